"""The arithmetic of a decoder layer: arrays in, arrays out, no parameters.

Numbers are rounded to the compute dtype where a product takes them, and nowhere
else: products sum in float32 and return it; norms, rotary embedding, softmax
and the sum over the layers are float32. So a bfloat16 sampler and learner,
whose programs differ, round the same numbers.

Two shapes are chosen for XLA's CPU code and cost nothing elsewhere: products on
flattened [B*T, D] rows, and grouped-query attention as [G*T, C] x [C, S] per
row and kv head (no repeated keys, no 5-d einsum). Here G is the number of query
heads per kv head. `computed_once` is for it, too.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from drmas_jax import products


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Llama 3's stretching of the low rotary frequencies (`rope_type` llama3)."""

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_positions: int


def rms_norm(
  x: Float[Array, "*dims D"], scale: Float[Array, " D"], eps: float
) -> Float[Array, "*dims D"]:
  """x / sqrt(mean(x^2) + eps) * scale."""
  y = x.astype(jnp.float32)
  y *= jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
  return (y * scale.astype(jnp.float32)).astype(x.dtype)


def product(
  x: Float[Array, "*dims"],
  w: Float[Array, "*dims"],
  num_in: int = 1,
  one_device: bool = False,
) -> Float[Array, "*dims"]:
  """Contracts the last `num_in` dims of x [B, T, *in] with w [*in, *out].

  In the dtype of x, summed and returned in float32. `one_device` as in
  `products.dot`.
  """
  rows, size = x.shape[:2], math.prod(w.shape[:num_in])
  outs = w.shape[num_in:]
  w = w.astype(x.dtype).reshape(size, -1)
  y = products.dot(x.reshape(-1, size), w, one_device)
  return y.reshape(*rows, *outs)


def rope_frequencies(
  head_dim: int, theta: float, scaling: RopeScaling | None
) -> np.ndarray:
  """theta^(-2i/C) for i < C/2, as a float32 table [C/2].

  With `scaling`, a frequency whose wavelength is longer than original_max /
  low_freq_factor is divided by factor, one shorter than original_max /
  high_freq_factor is kept, and in between the two are mixed linearly in
  original_max / wavelength (Llama 3.1).
  """
  freqs = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
  if scaling is not None:
    turns = scaling.original_max_positions * freqs / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    freqs = keep * freqs + (1 - keep) * freqs / scaling.factor
  return freqs.astype(np.float32)


def rope_angles(
  positions: Int[Array, "B T"],
  head_dim: int,
  theta: float,
  scaling: RopeScaling | None,
) -> tuple[Float[Array, "B T 1 half"], Float[Array, "B T 1 half"]]:
  """Sine and cosine of position * frequency."""
  freqs = rope_frequencies(head_dim, theta, scaling)
  angles = positions[:, :, None, None].astype(jnp.float32) * freqs
  return jnp.sin(angles), jnp.cos(angles)


def computed_once(x: Any, naturals: Int[Array, "*dims"]) -> Any:
  """`x`, on CPU in arrays of its own.

  XLA's CPU code computes what is element-wise in each loop that reads it, anew
  for each element: the sine of a position for each head of each layer. It drops
  optimization barriers before it decides that, but keeps a branch.

  Args:
    x: a tree of arrays.
    naturals: numbers that are not negative, which XLA does not know.
  """

  def branch(x, naturals):
    known = naturals.reshape(-1)[0] >= 0
    zeros = jax.tree.map(jnp.zeros_like, x)
    return jax.lax.cond(known, lambda x, _: x, lambda _, z: z, x, zeros)

  return jax.lax.platform_dependent(
    x, naturals, cpu=branch, default=lambda x, _: x
  )


def rope(
  x: Float[Array, "B T N C"],
  sin: Float[Array, "B T 1 half"],
  cos: Float[Array, "B T 1 half"],
) -> Float[Array, "B T N C"]:
  """Rotates the pairs (x[i], x[i + C/2]) by their angles."""
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  y = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return y.astype(x.dtype)


def attend(
  q: Float[Array, "B T H C"],
  keys: Float[Array, "B K C S"],
  values: Float[Array, "B K S C"],
  mask: Bool[Array, "B T S"],
) -> Float[Array, "B T H C"]:
  """softmax(q k / sqrt(C)) v, each group of H / K query heads on its kv head.

  Weights are not rounded: a sampler that joins pages would do it elsewhere.
  Every token must see at least one entry (itself).
  """
  rows, num_tokens, num_heads, head_dim = q.shape
  kv_heads, length = values.shape[1:3]
  group = num_heads // kv_heads
  exact = products.precision(q.dtype)
  q = q.reshape(rows, num_tokens, kv_heads, group, head_dim)
  q = q.transpose(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, head_dim)
  scores = jnp.matmul(
    q, keys, precision=exact, preferred_element_type=jnp.float32
  ).reshape(rows, kv_heads, group, num_tokens, length)
  scores = jnp.where(
    mask[:, None, None],
    scores * head_dim**-0.5,
    jnp.finfo(jnp.float32).min,
  )
  weights = jax.nn.softmax(scores, axis=-1)
  weights = weights.reshape(rows, kv_heads, -1, length)
  out = jnp.matmul(weights, values.astype(jnp.float32), precision=exact)
  out = out.astype(q.dtype)
  out = out.reshape(rows, kv_heads, group, num_tokens, head_dim)
  return out.transpose(0, 3, 1, 2, 4).reshape(
    rows, num_tokens, num_heads, head_dim
  )
