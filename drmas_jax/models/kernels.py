"""Fused attention of one token a row over a paged cache, on TPU and GPU.

Both kernels read the pages of a row where they lie in the pool, no further than
the row reaches, and keep a running softmax: a gather of pages, or scores of a
whole row, never exist in memory. What lies behind a row's last token may be any
finite number.

The TPU kernel is compiled for v5e, v5p and v6e by the tests and runs in
interpret mode; the GPU kernel is lowered to Triton and runs in interpret mode.
Neither has run on its chip yet.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from drmas_jax import products, sharding

Implementation = Literal["tpu", "gpu"]
Scales = tuple[Float[Array, "N K page"], Float[Array, "N K page"]]

_LOWEST = float(np.finfo(np.float32).min)
_PART = 1024  # tokens of a row that one program of the GPU kernel sees to,
_TILE = 32  # and that it takes at a time, for shared memory is small


def implementation(
  mesh: Mesh | None, page_size: int, head_dim: int
) -> Implementation | None:
  """Which kernel serves a cache; None: XLA's own code has to.

  A TPU lays arrays out in tiles of 128 lanes; a page of other sizes would be
  copied into that layout in every step. Triton's blocks are powers of two, and
  its products have at least 16 of everything.

  Args:
    mesh: the engine's; None stands for JAX's default backend.
    page_size: tokens in a page.
    head_dim: C.
  """
  platform = (
    jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
  )
  if platform == "tpu" and page_size % 128 == 0 and head_dim % 32 == 0:
    return "tpu"
  sizes = (page_size, head_dim)
  if platform == "gpu" and all(n >= 16 and n & (n - 1) == 0 for n in sizes):
    return "gpu"
  return None


def paged_attention(
  q: Float[Array, "S H C"],
  keys: Float[Array, "N K C page"],
  values: Float[Array, "N K page C"],
  table: Int[Array, "S M"],
  lengths: Int[Array, " S"],
  scales: Scales | None,
  *,
  which: Implementation,
  mesh: Mesh | None = None,
  interpret: bool = False,
) -> Float[Array, "S H C"]:
  """softmax(q k / sqrt(C)) v over the first lengths[s] tokens of each row s.

  Token p of row s is in page table[s, p // page] at p % page, and query head h
  looks at kv head h // (H / K). Products take the dtype of q and accumulate in
  float32. A row of length 0 gives zeros.

  Args:
    q: one token a row.
    keys: the pool's keys.
    values: the pool's values.
    table: pages of each row; behind its last one any page of the pool.
    lengths: at most M * page.
    scales: of the keys and of the values of an int8 pool.
    which: as `implementation` says.
    mesh: each device works on its own kv heads, if they divide.
    interpret: run the kernel as XLA operations, on any backend.
  """
  run = functools.partial(
    {"tpu": _attend_tpu, "gpu": _attend_gpu}[which], interpret=interpret
  )
  if mesh is None:
    return run(q, keys, values, table, lengths, scales)
  whole = PartitionSpec()
  heads = sharding.spec((None, "cache_heads"), keys.shape[:2], mesh)
  return jax.shard_map(
    run,
    mesh=mesh,
    in_specs=(heads, heads, heads, whole, whole, heads),
    out_specs=heads,
    check_vma=False,  # a kernel's results do not say over what they vary
  )(q, keys, values, table, lengths, scales)


def _seen(scores: jax.Array, start: jax.Array, length: jax.Array) -> jax.Array:
  """Scores [.., T] of the row's tokens from `start` on, up to its length."""
  dim = scores.ndim - 1
  at = start + jax.lax.broadcasted_iota(jnp.int32, scores.shape, dim)
  return jnp.where(at < length, scores, _LOWEST)


# -- TPU -----------------------------------------------------------------------


def _attend_tpu(q, keys, values, table, lengths, scales, *, interpret):
  """One grid step for each page in use, in order of rows.

  The grid is as long as there are pages in use, so that the work follows the
  tokens that there are and not the longest row that there might be. Pallas
  fetches the next page, which `page` finds through the table, while this one is
  worked on; a row's sums stay on the chip from page to page.
  """
  rows, num_heads, head_dim = q.shape
  _, kv_heads, _, size = keys.shape
  group = num_heads // kv_heads
  pages = jnp.maximum(pl.cdiv(lengths, size), 1)  # a row of none gives zeros
  ends = jnp.cumsum(pages)
  row_of = jnp.repeat(
    jnp.arange(rows, dtype=jnp.int32), pages, total_repeat_length=table.size
  )
  values_tile = (kv_heads, size, head_dim)
  if head_dim % 128:
    # So does the TPU lay them out: it wants 128 lanes, and the page has them.
    values, values_tile = values.swapaxes(2, 3), (kv_heads, head_dim, size)

  def row(step, row_of, starts, lengths, table):
    del starts, lengths, table
    return row_of[step], 0, 0, 0

  def page(step, row_of, starts, lengths, table):
    del lengths
    row = row_of[step]
    return table[row, step - starts[row]], 0, 0, 0

  def page_scales(*args):
    return page(*args)[:3]

  in_specs = [
    pl.BlockSpec((None, kv_heads, group, head_dim), row),
    pl.BlockSpec((None, kv_heads, head_dim, size), page),
    pl.BlockSpec((None, *values_tile), page),
  ]
  if scales is not None:
    in_specs += [pl.BlockSpec((None, kv_heads, size), page_scales)] * 2
  out = pl.pallas_call(
    functools.partial(
      _tpu_kernel,
      scaled=scales is not None,
      weigh="kgp,kcp->kgc" if head_dim % 128 else "kgp,kpc->kgc",
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=4,
      grid=(ends[-1],),
      in_specs=in_specs,
      out_specs=pl.BlockSpec((None, kv_heads, group, head_dim), row),
      scratch_shapes=[
        pltpu.VMEM((kv_heads, group, 1), jnp.float32),
        pltpu.VMEM((kv_heads, group, 1), jnp.float32),
        pltpu.VMEM((kv_heads, group, head_dim), jnp.float32),
      ],
    ),
    out_shape=jax.ShapeDtypeStruct((rows, kv_heads, group, head_dim), q.dtype),
    interpret=interpret,
    name="paged_attention",
  )(
    *(row_of, ends - pages, lengths, table),
    *(q.reshape(rows, kv_heads, group, head_dim), keys, values),
    *(scales or ()),
  )
  return out.reshape(q.shape)


def _tpu_kernel(row_of, starts, lengths, table, q, keys, values, *refs, **how):
  """One page of one row, all kv heads at once: q [K, G, C], keys [K, C, page].

  `refs`: the page's scales, the row's result, and of its pages so far the
  highest score, the sum of weights, the weighted sum of values.
  """
  del table
  *scales, out, most, total, weighted = refs
  step = pl.program_id(0)
  row = row_of[step]
  length = lengths[row]
  start = (step - starts[row]) * keys.shape[-1]  # tokens before this page
  dot = functools.partial(
    jnp.einsum,
    precision=products.precision(q.dtype),
    preferred_element_type=jnp.float32,
  )

  @pl.when(start == 0)
  def _start():
    most[...] = jnp.full_like(most, _LOWEST)
    total[...] = jnp.zeros_like(total)
    weighted[...] = jnp.zeros_like(weighted)

  scores = dot("kgc,kcp->kgp", q[...], keys[...].astype(q.dtype))
  scores *= q.shape[-1] ** -0.5
  if how["scaled"]:
    scores *= scales[0][...][:, None]
  scores = _seen(scores, start, length)
  new = jnp.maximum(most[...], jnp.max(scores, axis=-1, keepdims=True))
  weights, shrink = jnp.exp(scores - new), jnp.exp(most[...] - new)
  most[...] = new
  total[...] = shrink * total[...] + jnp.sum(weights, axis=-1, keepdims=True)
  if how["scaled"]:
    weights *= scales[1][...][:, None]
  weighted[...] = shrink * weighted[...] + dot(
    how["weigh"], weights.astype(q.dtype), values[...].astype(q.dtype)
  )

  @pl.when(start + keys.shape[-1] >= length)
  def _finish():
    mean = weighted[...] / total[...]
    out[...] = jnp.where(length > 0, mean, 0.0).astype(out.dtype)


# -- GPU -----------------------------------------------------------------------


def _attend_gpu(q, keys, values, table, lengths, scales, *, interpret):
  """One program for each row, kv head and part of the row's pages.

  JAX's own kernel wants keys as [K, N, page, C], which would copy the pool in
  every step.
  """
  rows, num_heads, head_dim = q.shape
  num_pages, kv_heads, _, size = keys.shape
  group = num_heads // kv_heads
  span = max(_PART // size, 1)  # pages in a part
  parts = pl.cdiv(table.shape[1], span)
  wide = max(16, pl.next_power_of_2(group))  # the least a product takes
  q = q.reshape(rows, kv_heads, group, head_dim)
  q = jnp.pad(q, ((0, 0), (0, 0), (0, wide - group), (0, 0)))

  def of_head(*block):
    return pl.BlockSpec(
      (num_pages, None, *block), lambda r, k, i: (0, k, *[0] * len(block))
    )

  in_specs = [
    pl.BlockSpec((None, table.shape[1]), lambda r, k, i: (r, 0)),
    pl.BlockSpec((1,), lambda r, k, i: (r,)),
    pl.BlockSpec((None, None, wide, head_dim), lambda r, k, i: (r, k, 0, 0)),
    of_head(head_dim, size),
    of_head(size, head_dim),
  ] + [of_head(size)] * (0 if scales is None else 2)
  shape = (parts, rows, kv_heads, wide)
  sums = pl.BlockSpec((None, None, None, wide), lambda r, k, i: (i, r, k, 0))
  most, total, weighted = pl.pallas_call(
    functools.partial(_gpu_kernel, span=span),
    grid=(rows, kv_heads, parts),
    in_specs=in_specs,
    out_specs=(
      sums,
      sums,
      pl.BlockSpec(
        (None, None, None, wide, head_dim), lambda r, k, i: (i, r, k, 0, 0)
      ),
    ),
    out_shape=(
      jax.ShapeDtypeStruct(shape, jnp.float32),
      jax.ShapeDtypeStruct(shape, jnp.float32),
      jax.ShapeDtypeStruct((*shape, head_dim), jnp.float32),
    ),
    compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
    interpret=interpret,
    name="paged_attention",
  )(table, lengths, q, keys, values, *(scales or ()))
  share = jnp.exp(most - jnp.max(most, axis=0))
  total = jnp.maximum(jnp.sum(share * total, axis=0), 1e-30)  # a row of none
  out = jnp.sum(share[..., None] * weighted, axis=0) / total[..., None]
  return out[:, :, :group].astype(q.dtype).reshape(rows, num_heads, head_dim)


def _gpu_kernel(table, lengths, q, keys, values, *refs, span):
  """Pages [i span, (i + 1) span) of a row for one kv head: q [G, C].

  `refs`: the scales, and the results: the highest score, the sum of weights,
  the weighted sum of values.
  """
  *scales, most_out, total_out, weighted_out = refs
  group, head_dim = q.shape
  size = keys.shape[-1]
  tile = min(size, _TILE)
  queries, length = q[...], lengths[0]
  dot = functools.partial(plgpu.dot, precision=products.precision(q.dtype))

  def body(i, carry):
    most, total, weighted = carry
    page = table[i * tile // size]
    at = pl.ds(i * tile % size, tile)
    scores = dot(queries, keys[page, :, at].astype(q.dtype)) * head_dim**-0.5
    if scales:
      scores *= scales[0][page, at][None]
    scores = _seen(scores, i * tile, length)
    new = jnp.maximum(most, jnp.max(scores, axis=-1))
    weights, shrink = jnp.exp(scores - new[:, None]), jnp.exp(most - new)
    total = shrink * total + jnp.sum(weights, axis=-1)
    if scales:
      weights *= scales[1][page, at][None]
    weighted = shrink[:, None] * weighted + dot(
      weights.astype(q.dtype), values[page, at].astype(q.dtype)
    )
    return new, total, weighted

  first = pl.program_id(2) * (span * size)
  last = jnp.minimum(first + span * size, length)
  start = (
    jnp.full([group], _LOWEST, jnp.float32),
    jnp.zeros([group], jnp.float32),
    jnp.zeros([group, head_dim], jnp.float32),
  )
  most_out[...], total_out[...], weighted_out[...] = jax.lax.fori_loop(
    first // tile, pl.cdiv(last, tile), body, start
  )
