"""Attention of whole rows, without a cache: causal within packed segments.

    splash   TPU    Pallas kernel that comes with JAX; never forms [T, T]
    cudnn    GPU    cuDNN's flash attention; takes segments as a [B, T, T] bias
    xla      any    `layers.attend`; forms [B, H, T, T], of long rows again in
                    the backward pass

`resolve` is the one place that says which of them "auto" is, `check` why a
named one cannot run. The tests run splash in interpret mode and compile it for
v5e and v5p, and run cudnn's call in XLA's implementation; neither has run on
its chip yet.

(tokamax has a newer splash, and a pre-release's interface; JAX's own needs no
package. cuDNN itself knows packed rows, by offsets of their segments, on Hopper
and newer; `jax.nn.dot_product_attention` has no argument for them.)
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from drmas_jax import sharding
from drmas_jax.models import layers

Kind = Literal["splash", "cudnn", "xla"]

SAVED = "attention"  # what a remat policy may keep of splash, by this name

_PLATFORM = {"splash": "tpu", "cudnn": "gpu"}
_MULTIPLE = {"splash": 128, "cudnn": 2, "xla": 1}  # of a row's length
_MAX_BLOCK = 512  # tokens that splash takes at a time
# XLA's [T, T] arrays are kept for the backward pass up to a T of so many head
# dims. Of longer rows they would outweigh all else of a layer.
_KEPT = 4


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
  segment_ids: Int[Array, "B T"],
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
    segment_ids: which tokens of a row belong together.
    kind: as `resolve` says.
    mesh: each device works on its own rows and, if the kv heads divide, on its
      own heads.
    interpret: run splash as XLA operations, on any backend.
  """
  if kind == "xla":
    run = _xla
    if q.shape[1] > _KEPT * q.shape[3]:
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


def _xla(q, k, v, segment_ids):
  keys, values = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
  return layers.attend(q, keys, values, _mask(segment_ids))


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
