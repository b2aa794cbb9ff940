"""ONE table: logical axis -> mesh axes; and the shardings made from it.

Every parameter, cache array and batch names its dims by logical axes where it
is declared. To lay one of them out differently, change a row here.
"""

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")

RULES: dict[str | None, tuple[str, ...]] = {
  "batch": ("data", "fsdp"),  # rows of a batch
  "slots": (),  # of an engine, whose devices split weights and kv heads
  "pages": (),
  "cache_heads": ("tensor", "fsdp"),  # kv heads of an engine's cache
  "embed": ("fsdp",),
  "vocab": ("tensor",),
  "heads": ("tensor",),
  "kv_heads": ("tensor",),
  "mlp": ("tensor",),
  "head_dim": (),
  "layers": (),
  "policies": (),  # of adapters
  "rank": (),
  "length": (),
  None: (),
}

Axes = tuple[str | None, ...]


def is_axes(x: Any) -> bool:
  """A leaf of an axes tree: a plain tuple, where a state is a NamedTuple."""
  return type(x) is tuple


def spec(axes: Axes, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
  """The partition of an array: a dim takes its mesh axes as far as it divides.

  A mesh axis is used once: the first dim that can take it does.
  """
  used: set[str] = set()
  parts: list[tuple[str, ...] | None] = []
  for axis, size in zip(axes, shape, strict=True):
    names: list[str] = []
    for name in RULES[axis]:
      ways = math.prod(mesh.shape[n] for n in (*names, name))
      if name not in used and size % ways == 0:
        names.append(name)
    if all(mesh.shape[n] == 1 for n in names):
      parts.append(None)
      continue
    used.update(names)
    parts.append(tuple(names))
  return PartitionSpec(*parts)


def shardings(axes: Any, shapes: Any, mesh: Mesh) -> Any:
  """A tree of NamedSharding from a tree of axes tuples and one of shapes."""
  return jax.tree.map(
    lambda a, s: NamedSharding(mesh, spec(a, s.shape, mesh)),
    axes,
    shapes,
    is_leaf=is_axes,
  )


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh, ndim: int = 2, leading: int = 0) -> NamedSharding:
  """Of a batch whose dim number `leading` counts rows."""
  parts: list[Any] = [None] * ndim
  parts[leading] = RULES["batch"]
  return NamedSharding(mesh, PartitionSpec(*parts))


def constrain(x: jax.Array, axes: Axes, mesh: Mesh | None) -> jax.Array:
  """Pins an activation's layout; does nothing without a mesh."""
  if mesh is None or mesh.size == 1:
    return x
  return jax.lax.with_sharding_constraint(
    x, NamedSharding(mesh, spec(axes, x.shape, mesh))
  )
