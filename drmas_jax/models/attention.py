"""Attention of whole rows, without a cache: causal within packed segments.

    splash   TPU    Pallas kernel that comes with JAX; never forms [T, T]
    cudnn    GPU    cuDNN's flash attention; takes segments as a [B, T, T] bias
    xla      any    `layers.attend`; forms [B, H, T, T] or most of it, of long
                    rows again in the backward pass

`resolve` is the one place that says which of them "auto" is, `check` why a
named one cannot run. The tests run splash in interpret mode and compile it for
v5e and v5p, and run cudnn's call in XLA's implementation; neither has run on
its chip yet.

(tokamax has a newer splash, and a pre-release's interface; JAX's own needs no
package. cuDNN itself knows packed rows, by offsets of their segments, on Hopper
and newer; `jax.nn.dot_product_attention` has no argument for them.)
"""

import functools
import itertools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from drmas_jax import sharding
from drmas_jax.models import layers
from drmas_jax.types import Spread

Kind = Literal["splash", "cudnn", "xla"]

SAVED = "attention"  # what a remat policy may keep of splash, by this name

_PLATFORM = {"splash": "tpu", "cudnn": "gpu"}
_MULTIPLE = {"splash": 128, "cudnn": 2, "xla": 1}  # of a row's length
_MAX_BLOCK = 512  # tokens that splash takes at a time
# XLA's [T, T] arrays are kept for the backward pass up to a T of so many head
# dims. Of longer rows they would outweigh all else of a layer.
_KEPT = 4
_BLOCK, _MOST_BLOCKS = 64, 4  # of queries, each with the keys up to its end


def resolve(
  kind: Kind | Literal["auto"],
  mesh: Mesh | None,
  head_dim: int,
  dtype: jnp.dtype | str,
) -> Kind:
  """What serves; "auto" is the first that runs there.

  Args:
    kind: of the config.
    mesh: the learner's; None stands for JAX's default backend.
    head_dim: C.
    dtype: of q, k and v.
  """
  if kind != "auto":
    return kind
  fused = (k for k in _PLATFORM if check(k, mesh, head_dim, dtype) is None)
  return next(fused, "xla")


def check(
  kind: Kind | Literal["auto"],
  mesh: Mesh | None,
  head_dim: int,
  dtype: jnp.dtype | str,
) -> str | None:
  """Why a kind cannot run, for people; None if it can.

  Row lengths are no reason: they are padded to what a kernel takes.

  Args:
    kind: of the config.
    mesh: the learner's; None stands for JAX's default backend.
    head_dim: C.
    dtype: of q, k and v.
  """
  if kind not in _PLATFORM:
    return None
  platform = (
    jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
  )
  if platform != _PLATFORM[kind]:
    return f"for it runs on {_PLATFORM[kind]} and the update on {platform}"
  if jnp.dtype(dtype) != jnp.bfloat16:
    # (Splash takes float32 and multiplies it in bfloat16.)
    return f"for it multiplies in bfloat16 and compute_dtype is {dtype}"
  if kind == "cudnn" and (head_dim % 8 or head_dim > 128):
    return (
      f"for it takes heads of 8, 16, .. 128 and the model's have {head_dim}"
    )
  return None


def attend(
  q: Float[Array, "B T H C"],
  k: Float[Array, "B T K C"],
  v: Float[Array, "B T K C"],
  where: Int[Array, "B T"] | Spread,
  *,
  kind: Kind,
  mesh: Mesh | None = None,
  interpret: bool = False,
) -> Float[Array, "B T H C"]:
  """softmax(q k / sqrt(C)) v over the earlier tokens of the own segment.

  Query head h looks at kv head h // (H / K). Padding, of segment 0, sees
  padding, so that no softmax is over nothing.

  Args:
    q: of a dtype that `kind` takes.
    k: keys.
    v: values.
    where: segment ids, which tokens of a row belong together; or where the
      segments are whole that share tokens.
    kind: as `resolve` says.
    mesh: each device works on its own rows and, if the kv heads divide, on its
      own heads.
    interpret: run splash as XLA operations, on any backend.
  """
  run = functools.partial(_whole, kind=kind, mesh=mesh, interpret=interpret)
  if not isinstance(where, Spread):
    return run(q, k, v, where)
  return _attend_spread(run, q, k, v, where, kind)


def _attend_spread(run, q, k, v, where, kind):
  """Tokens are copied to where their segments are whole, and the results of one
  copy back; backward, what the copies of a token are owed adds up."""
  rows, views, length = where.segment_ids.shape
  page = q.shape[1] // where.home.shape[1]
  places = where.source.reshape(rows, -1)

  def take(x, places):
    return _pages(x.reshape(rows, -1, page, *x.shape[-2:]), places)

  q, k, v = (
    take(x, places).reshape(rows, views, length, *x.shape[2:])
    for x in (q, k, v)
  )
  each = q, k, v, where.segment_ids
  if kind == "xla" and not keeps(kind, length, q.shape[-1]):
    # Scores of long rows in turn: there are more of them than of whole rows.
    each = (x.swapaxes(0, 1) for x in each)
    out = jax.lax.map(lambda x: run(*x), tuple(each)).swapaxes(0, 1)
  else:
    out = run(*(x.reshape(-1, *x.shape[2:]) for x in each))
  return take(out, where.home).reshape(rows, -1, *out.shape[-2:])


@jax.custom_vjp
def _pages(x, places):
  """[B, num, ..]: of x [B, pages, ..] those at `places` [B, num]."""
  return _pages_forward(x, places)[0]


def _pages_forward(x, places):
  take = jax.vmap(lambda x, at: x.at[at].get(mode="promise_in_bounds"))
  like = jnp.zeros([x.shape[1], 0])  # as long as x, and empty
  return take(x, places), (places, like)


def _pages_backward(residuals, grads):
  # In float32: a sum over many copies would stop growing in bfloat16.
  places, like = residuals
  zeros = jnp.zeros([len(like), *grads.shape[2:]], jnp.float32)
  add = jax.vmap(lambda g, at: zeros.at[at].add(g, mode="promise_in_bounds"))
  return add(grads, places).astype(grads.dtype), None


_pages.defvjp(_pages_forward, _pages_backward)


def _whole(q, k, v, segment_ids, *, kind, mesh, interpret):
  if kind == "xla":
    run = _xla
    if not keeps(kind, q.shape[1], q.shape[3]):
      run = jax.checkpoint(_xla, prevent_cse=False)
    return run(q, k, v, segment_ids)
  run = functools.partial(_splash, interpret=interpret)
  if kind == "cudnn":
    run = _cudnn
  if mesh is not None:
    heads = sharding.spec(("batch", None, "kv_heads", None), k.shape, mesh)
    rows = sharding.spec(("batch", None), segment_ids.shape, mesh)
    run = jax.shard_map(
      run,
      mesh=mesh,
      in_specs=(heads, heads, heads, rows),
      out_specs=heads,
      check_vma=False,  # a kernel's results do not say over what they vary
    )
  length = q.shape[1]
  surplus = -length % _MULTIPLE[kind]
  # Behind the row's end, where no token of the row looks.
  q, k, v, segment_ids = (
    jnp.pad(x, [(0, 0), (0, surplus)] + [(0, 0)] * (x.ndim - 2))
    for x in (q, k, v, segment_ids)
  )
  return run(q, k, v, segment_ids)[:, :length]


def _mask(segment_ids):
  """[B, T, T], True where a token may look."""
  order = jnp.arange(segment_ids.shape[1])
  same = segment_ids[:, :, None] == segment_ids[:, None, :]
  return same & (order[:, None] >= order[None, :])


def keeps(kind: Kind, length: int, head_dim: int) -> bool:
  """Whether scores [H, T, T] may be kept for the backward pass."""
  return kind == "xla" and length <= _KEPT * head_dim


def _xla(q, k, v, segment_ids):
  """In a few blocks of queries: with four, three eighths of the scores lie
  above the diagonal in keys that nobody multiplies."""
  keys, values = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
  mask, length = _mask(segment_ids), q.shape[1]
  num = max(1, min(length // _BLOCK, _MOST_BLOCKS))
  ends = [length * i // num for i in range(num + 1)]
  return jnp.concatenate(
    [
      layers.attend(
        q[:, start:end],
        keys[..., :end],
        values[:, :, :end],
        mask[:, start:end, :end],
      )
      for start, end in itertools.pairwise(ends)
    ],
    axis=1,
  )


def _cudnn(q, k, v, segment_ids):
  return jax.nn.dot_product_attention(
    *(q, k, v),
    mask=_mask(segment_ids)[:, None],
    is_causal=True,  # so that blocks above the diagonal are left out
    implementation="cudnn",
  )


def _splash(q, k, v, segment_ids, *, interpret):
  """Blocks above the diagonal are left out; those between two segments are
  masked."""
  _, length, num_heads, head_dim = q.shape
  block = next(b for b in (_MAX_BLOCK, 256, 128) if length % b == 0)
  kernel = splash.make_splash_mha(
    splash.MultiHeadMask([splash.CausalMask((length, length))] * num_heads),
    block_sizes=splash.BlockSizes(
      *(block, block, block),  # forward: of q, of kv, of kv in a product
      *(block, block, block),  # backward, of k and v
      *(block, block),  # backward, of q
    ),
    head_shards=1,
    q_seq_shards=1,
    residual_checkpoint_name=SAVED,
    interpret=interpret,
  )
  q *= jnp.asarray(head_dim**-0.5, q.dtype)
  q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
  segments = splash.SegmentIds(segment_ids, segment_ids)
  return jax.vmap(kernel)(q, k, v, segments).swapaxes(1, 2)
