"""Products: their gradients, whose operand is turned on CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drmas_jax import products

pytestmark = pytest.mark.quick


# So many rows are turned at a time: 8 of 1024 float32 (4096 bytes apart), 64 of
# 60; of fewer rows all.
@pytest.mark.parametrize("rows, width", [(150, 1024), (150, 60), (3, 60)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_a_product(rows, width, dtype):
  rng = np.random.default_rng(0)
  x, w, grad = (
    jnp.asarray(rng.standard_normal(shape), dtype)
    for shape in ((rows, width), (width, 7), (rows, 7))
  )

  def pull(x, w, grad):
    out, back = jax.vjp(products.dot, x, w)
    return back(grad.astype(out.dtype))

  to_x, to_w = jax.jit(pull)(x, w, grad)
  x, w, grad = (np.asarray(a, np.float64) for a in (x, w, grad))
  tolerance = dict(rtol=1e-5, atol=1e-4)
  if dtype == "bfloat16":  # of what is returned in it
    tolerance = dict(rtol=1e-2, atol=1e-2)
  np.testing.assert_allclose(
    np.asarray(to_x, np.float64), grad @ w.T, **tolerance
  )
  np.testing.assert_allclose(
    np.asarray(to_w, np.float64), x.T @ grad, **tolerance
  )
