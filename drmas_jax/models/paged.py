"""The cache of an attention layer in pages: its layout, writing and reading.

    keys      [N, K, C, page]   a pool of N pages for all rows together: token
    values    [N, K, page, C]   p of row b is in page table[b, p // page] at
    *_scales  [N, K, page]      p % page; scales, float32, of an int8 cache

Page 0 is nobody's: what is not wanted is written there. Pages may be shared by
rows up to the one that they write to. What lies behind a row's last token may
be any finite number: it is overwritten before it is seen.

Numbers of a row do not depend on other rows, on the size of the pool or on the
table's width (rule 26): softmax goes page by page, in order, and a page behind
the row's end adds exact zeros.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from drmas_jax import products, sharding
from drmas_jax.models import kernels, layers

AXES = {
  "keys": ("pages", "cache_heads", "head_dim", "length"),
  "values": ("pages", "cache_heads", "length", "head_dim"),
}
_SCALE_AXES = ("pages", "cache_heads", "length")
_WITH_SCALES = AXES | {"key_scales": _SCALE_AXES, "value_scales": _SCALE_AXES}

Layer = dict[str, jax.Array]


class Pages(NamedTuple):
  """Where the tokens of B rows are.

  Attributes:
    table: [B, M] int32, pages of each row in order, 0 where there are no more.
    source: [B] int32, when tokens are prefilled: the page whose first
      `start % page` tokens the row's first new page begins with.
    owner: [N] int32, when every page of the pool is one row's: that row. Sums
      go in this order: a row's pages are to be in theirs.
    block: [N] int32, with `owner`: the page's place among those of its row;
      of a page that is nobody's, one behind the end of any row.
  """

  table: Int[Array, "B M"]
  source: Int[Array, " B"] | None = None
  owner: Int[Array, " N"] | None = None
  block: Int[Array, " N"] | None = None


def axes(dtype: Any) -> dict[str, sharding.Axes]:
  """Logical axes of a layer's leaves."""
  return dict(_WITH_SCALES if jnp.dtype(dtype) == jnp.int8 else AXES)


def init(
  num_pages: int, page_size: int, num_heads: int, head_dim: int, dtype: Any
) -> Layer:
  """An empty pool of one layer, for `num_heads` kv heads."""
  size = {
    "pages": num_pages,
    "cache_heads": num_heads,
    "length": page_size,
    "head_dim": head_dim,
  }
  scales = {name: jnp.float32 for name in ("key_scales", "value_scales")}
  return {
    name: jnp.zeros([size[a] for a in names], scales.get(name, dtype))
    for name, names in axes(dtype).items()
  }


def fewest(num_heads: int, page_size: int) -> int:
  """Pages that a pool with owners has at least, on each device.

  XLA's CPU code reduces an array of less than 4096 numbers in another way than
  a larger one, and a row would feel how many others there are (rule 26).
  """
  return -(-4096 // (num_heads * page_size))


def append(
  cache: Layer,
  k: Float[Array, "B T K C"],
  v: Float[Array, "B T K C"],
  positions: Int[Array, "B T"],
  pages: Pages,
) -> Layer:
  """Writes T contiguous tokens of every row; beyond its pages, to page 0."""
  new = _encode(cache, k, v)
  write = _append_one if pages.source is None else _append_chunk
  return {
    name: write(
      cache[name], x, _WITH_SCALES[name].index("length"), positions, pages
    )
    for name, x in new.items()
  }


def _encode(cache: Layer, k: jax.Array, v: jax.Array) -> Layer:
  """Tokens in the form of the cache: [B, T, K, C], and scales [B, T, K]."""
  if "key_scales" not in cache:
    dtype = cache["keys"].dtype
    return {"keys": k.astype(dtype), "values": v.astype(dtype)}
  (keys, key_scales), (values, value_scales) = map(_quantize, (k, v))
  return {
    "keys": keys,
    "values": values,
    "key_scales": key_scales,
    "value_scales": value_scales,
  }


def _quantize(
  x: Float[Array, "B T K C"],
) -> tuple[Int[Array, "B T K C"], Float[Array, "B T K"]]:
  """x = int8 * scale, with a scale for each token and head."""
  x = x.astype(jnp.float32)
  scales = jnp.max(jnp.abs(x), axis=-1) / 127.0
  units = x / jnp.maximum(scales, jnp.finfo(jnp.float32).tiny)[..., None]
  return jnp.round(units).astype(jnp.int8), scales


def _pages_at(table: jax.Array, block: jax.Array) -> jax.Array:
  """table[b, block[b, i]], or 0 beyond the table."""
  return jnp.take_along_axis(table, block, axis=1, mode="fill", fill_value=0)


def _append_one(leaf, x, dim, positions, pages):
  """One token a row; `dim` counts the tokens of a page."""
  size = leaf.shape[dim]
  page = _pages_at(pages.table, positions // size)[:, 0]
  if pages.owner is not None:
    place = (page, *[slice(None)] * (dim - 1), positions[:, 0] % size)
    return leaf.at[place].set(x[:, 0])
  # For a write into the middle of pages a TPU would lay the pool out in another
  # way than the kernel reads it, and copy all of it, twice in every step.
  old = leaf[page]
  at = jnp.expand_dims(positions % size, tuple(range(2, leaf.ndim)))
  here = jax.lax.broadcasted_iota(jnp.int32, old.shape, dim) == at
  return leaf.at[page].set(jnp.where(here, jnp.expand_dims(x[:, 0], dim), old))


def _append_chunk(leaf, x, dim, positions, pages):
  """Whole pages are written; the first begins with what `source` has."""
  size, num_tokens = leaf.shape[dim], x.shape[1]
  num_pages = (num_tokens + 2 * size - 2) // size  # wherever the chunk begins
  start = positions[:, 0]
  x = jnp.moveaxis(x, 1, dim)  # [B, K, .., T, ..]
  before = leaf[pages.source]
  pad = [(0, 0)] * x.ndim
  pad[dim] = (0, (num_pages - 1) * size)

  def put(room, new, offset):
    return jax.lax.dynamic_update_slice_in_dim(room, new, offset, dim - 1)

  room = jax.vmap(put)(jnp.pad(before, pad), x, start % size)
  shape = (*room.shape[:dim], num_pages, size, *room.shape[dim + 1 :])
  written = jnp.moveaxis(room.reshape(shape), dim, 1)  # [B, pages, K, ..]
  target = _pages_at(
    pages.table, start[:, None] // size + jnp.arange(num_pages)
  )
  flat = written.reshape(-1, *written.shape[2:])
  return leaf.at[target.reshape(-1)].set(flat)


def attend(
  q: Float[Array, "B T H C"],
  cache: Layer,
  positions: Int[Array, "B T"],
  pages: Pages,
  mesh: Mesh | None = None,
) -> Float[Array, "B T H C"]:
  """softmax(q k / sqrt(C)) v over the tokens p <= positions[b, t] of a row.

  Each group of H / K query heads looks at its kv head.
  """
  if pages.source is not None:
    return _attend_blocks(q, cache, positions, pages.table)
  if pages.owner is not None:
    return _attend_owned(q, cache, positions, pages)
  scales = None
  if "key_scales" in cache:
    scales = cache["key_scales"], cache["value_scales"]
  size = cache["values"].shape[2]
  out = kernels.paged_attention(
    q[:, 0],
    cache["keys"],
    cache["values"],
    pages.table,
    positions[:, 0] + 1,
    scales,
    which=kernels.implementation(mesh, size, q.shape[-1]),
    mesh=mesh,
  )
  return out[:, None]


def _scores(q, cache, take, seen) -> jax.Array:
  """q k / sqrt(C) in float32 over the tokens of a page; the least number where
  they are not seen.

  Args:
    q: [N, K, Q, C].
    cache: a layer.
    take: leaf -> its pages [N, ..].
    seen: [N, 1, Q or 1, page] bool.
  """
  scores = jnp.matmul(
    q,
    take(cache["keys"]).astype(q.dtype),
    precision=products.precision(q.dtype),
    preferred_element_type=jnp.float32,
  )
  scores *= q.shape[-1] ** -0.5
  if "key_scales" in cache:
    scores *= take(cache["key_scales"])[:, :, None]
  return jnp.where(seen, scores, jnp.finfo(jnp.float32).min)


def _weighted(weights, cache, take, dtype) -> jax.Array:
  """weights [N, K, Q, page] times the values of the pages, in float32 as in
  `layers.attend`; `dtype` is the queries'."""
  if "value_scales" in cache:
    weights *= take(cache["value_scales"])[:, :, None]
  return jnp.matmul(
    weights,
    take(cache["values"]).astype(jnp.float32),
    precision=products.precision(dtype),
  )


def _attend_blocks(q, cache, positions, table):
  """Many tokens a row: page by page, as far as any row reaches."""
  rows, num_tokens, num_heads, head_dim = q.shape
  kv_heads, size = cache["values"].shape[1:3]
  group = num_heads // kv_heads
  q = q.reshape(rows, num_tokens, kv_heads, group, head_dim)
  q = q.transpose(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, head_dim)
  at = jnp.tile(positions, (1, group))[:, None, :, None]  # [B, 1, G T, 1]

  def block(i, carry):
    most, total, out = carry

    def take(leaf):
      return leaf[jax.lax.dynamic_index_in_dim(table, i, 1, keepdims=False)]

    scores = _scores(q, cache, take, i * size + jnp.arange(size) <= at)
    new = jnp.maximum(most, jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - new[..., None])
    shrink = jnp.exp(most - new)
    total = total * shrink + jnp.sum(weights, axis=-1)
    out = out * shrink[..., None] + _weighted(weights, cache, take, q.dtype)
    return new, total, out

  shape = q.shape[:3]
  start = (
    jnp.full(shape, jnp.finfo(jnp.float32).min),
    jnp.zeros(shape, jnp.float32),
    jnp.zeros(q.shape, jnp.float32),
  )
  trips = jnp.minimum(jnp.max(positions) // size + 1, table.shape[1])
  _, total, out = jax.lax.fori_loop(0, trips, block, start)
  out = (out / total[..., None]).astype(q.dtype)
  out = out.reshape(rows, kv_heads, group, num_tokens, head_dim)
  return out.transpose(0, 3, 1, 2, 4).reshape(
    rows, num_tokens, num_heads, head_dim
  )


def _attend_owned(q, cache, positions, pages):
  """One token a row, over a pool in which every page has one owner.

  Each page is attended to by itself, and a row then joins its pages: the work
  follows the tokens that there are, whatever the longest row has.
  """
  rows, _, num_heads, head_dim = q.shape
  kv_heads, size = cache["values"].shape[1:3]
  dtype = q.dtype
  q = layers.computed_once(q.reshape(rows, -1), pages.owner)[pages.owner]
  q = q.reshape(len(q), kv_heads, -1, head_dim)
  last = positions[pages.owner] - pages.block[:, None] * size
  seen = jnp.arange(size) <= last  # [N, page]
  scores = _scores(q, cache, lambda leaf: leaf, seen[:, None, None])
  most = jnp.max(scores, axis=-1)
  weights = jnp.exp(scores - most[..., None])
  total = jnp.sum(weights, axis=-1)
  out = _weighted(weights, cache, lambda leaf: leaf, dtype)
  # Of a page that its row does not see the share is 0, and sums go in order:
  # other rows change nothing, wherever a row's pages are.
  highest = jax.ops.segment_max(most, pages.owner, rows)
  share = jnp.exp(most - highest[pages.owner])
  join = functools.partial(
    jax.ops.segment_sum, segment_ids=pages.owner, num_segments=rows
  )
  total = jnp.maximum(join(share * total), jnp.finfo(jnp.float32).tiny)
  out = join(share[..., None] * out) / total[..., None]  # 0 of a row of none
  return out.reshape(rows, 1, num_heads, head_dim).astype(dtype)
