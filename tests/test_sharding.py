"""The one table, and what is made from it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from drmas_jax import sharding

pytestmark = pytest.mark.quick


def test_spec_follows_the_table(mesh):
  assert sharding.spec(("embed", "mlp"), (8, 6), mesh) == P(
    ("fsdp",), ("tensor",)
  )
  assert sharding.spec(("batch", None), (4, 7), mesh) == P(
    ("data", "fsdp"), None
  )


def test_a_dim_that_does_not_divide_stays_whole(mesh):
  assert sharding.spec(("embed", "mlp"), (7, 6), mesh) == P(None, ("tensor",))
  assert sharding.spec(("batch",), (3,), mesh) == P(None)


def test_a_dim_takes_the_axes_that_divide_it(mesh):
  # kv heads over tensor and fsdp, or as far as there are heads.
  assert sharding.spec(("cache_heads",), (4,), mesh) == P(("tensor", "fsdp"))
  assert sharding.spec(("cache_heads",), (2,), mesh) == P(("tensor",))
  assert sharding.spec(("slots", "cache_heads"), (8, 3), mesh) == P(None, None)


def test_a_mesh_axis_is_used_once(mesh):
  got = sharding.spec(("heads", "mlp"), (4, 4), mesh)
  assert got == P(("tensor",), None)
  # The rows have taken fsdp already.
  got = sharding.spec(("batch", "embed"), (8, 8), mesh)
  assert got == P(("data", "fsdp"), None)


def test_shardings_of_a_tree_with_named_tuples(mesh):
  axes = {"a": ("embed", None), "b": [("mlp",)]}
  shapes = jax.eval_shape(
    lambda: {"a": jnp.zeros([4, 3]), "b": [jnp.zeros([6])]}
  )
  got = sharding.shardings(axes, shapes, mesh)
  assert got["a"].shard_shape((4, 3)) == (2, 3)
  assert got["b"][0].shard_shape((6,)) == (3,)


@pytest.mark.parametrize("leading", [0, 1])
def test_rows_lays_the_rows_on_the_batch_axes(mesh, leading):
  shape = [3, 3, 3]
  shape[leading] = 8
  where = sharding.rows(mesh, ndim=3, leading=leading)
  x = jax.device_put(np.zeros(shape), where)
  shape[leading] = 2
  assert {s.data.shape for s in x.addressable_shards} == {tuple(shape)}


def test_constrain_pins_a_layout(mesh):
  f = jax.jit(lambda x: sharding.constrain(2 * x, ("batch", "mlp"), mesh))
  y = f(np.arange(32.0, dtype=np.float32).reshape(8, 4))
  assert {s.data.shape for s in y.addressable_shards} == {(2, 2)}
  np.testing.assert_array_equal(y, 2 * np.arange(32.0).reshape(8, 4))
