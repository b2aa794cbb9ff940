"""Matrix products in the compute dtype, summed in float32."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rounded(x: Float[Array, "*dims"], dtype: Any) -> Float[Array, "*dims"]:
  """`x` in another dtype, and with no more precision than that has.

  XLA may leave out a cast to bfloat16 and back: a learner would not see the
  weights that its sampler has.
  """
  dtype = jnp.dtype(dtype)
  # Not where it is so already: a TPU would copy all of an engine's weights.
  if dtype == jnp.bfloat16 and x.dtype != dtype:
    x = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
  return x.astype(dtype)


def precision(dtype: Any) -> jax.lax.Precision:
  """float32 means float32 on every backend: a TPU would otherwise round to
  bfloat16 and a GPU to TF32."""
  if dtype == jnp.float32:
    return jax.lax.Precision.HIGHEST
  return jax.lax.Precision.DEFAULT


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def dot(
  x: Float[Array, "N D"], w: Float[Array, "D F"], one_device: bool = False
) -> Float[Array, "N F"]:
  """x w in float32, of operands of one dtype.

  Args:
    x: of the batch.
    w: a weight.
    one_device: that all of x is known to lie on one. Then its gradient may go
      over it in a loop, each turn of which devices would have to share.
  """
  return _forward(x, w, one_device)[0]


def _forward(x, w, one_device):
  del one_device
  # Not by `dot`: a remat policy that keeps products would not see one.
  out = jnp.dot(
    x, w, precision=precision(x.dtype), preferred_element_type=jnp.float32
  )
  return out, (x, w)


def _backward(one_device, operands, grad):
  # In the operands' dtype, too. A GPU would multiply a float32 gradient with
  # bfloat16 weights at half the rate.
  x, w = operands
  grad = grad.astype(x.dtype)
  multiply = functools.partial(jnp.dot, precision=precision(x.dtype))
  on_cpu = _turned if one_device else _apart
  turned = jax.lax.platform_dependent(x, cpu=on_cpu, default=lambda x: x.T)
  return multiply(grad, w.T), multiply(turned, grad)


def _apart(x: Float[Array, "N D"]) -> Float[Array, "D N"]:
  """x.T in an array of its own, not read column by column by a product."""
  return jax.lax.optimization_barrier(x.T)


def _turned(x: Float[Array, "N D"]) -> Float[Array, "D N"]:
  """The same a few rows at a time: XLA's CPU code would go down a column of
  all of them, where entries that lie 4096 bytes apart are in each other's way
  in a cache of eight ways (960 x 1024 of float32: 3.8 ms, so 0.45).
  """
  rows, width = x.shape
  apart = 4096 // math.gcd(4096, width * x.dtype.itemsize)
  size = min(8 * apart, 64, rows)

  def some(i, out):
    # Of the last ones both begin early enough to be whole.
    part = jax.lax.dynamic_slice_in_dim(x, i * size, size)
    return jax.lax.dynamic_update_slice_in_dim(out, part.T, i * size, axis=1)

  start = jnp.zeros((width, rows), x.dtype)
  return jax.lax.fori_loop(0, -(-rows // size), some, start)


dot.defvjp(_forward, _backward)
