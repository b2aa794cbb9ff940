"""The k nearest of many vectors, exactly, by matrix products on a mesh.

    rows of a chunk   split over all devices: [C, D] -> [C / devices, D] each
    each device       products, its k best
    all of them       k best of devices x k, and of what earlier chunks gave

Chunks are of one shape. They stay on the devices, or, where they do not fit,
are streamed from the host in every search, the next on its way while one is at
work: how many vectors there may be is a question of memory alone.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

_QUERIES = (8, 64)  # rows of a block of queries


class Best(NamedTuple):
  """Of each query, the highest first; where there are fewer, -inf.

  Attributes:
    scores: [Q, k] float32.
    ids: [Q, k] int32, numbers of the vectors.
  """

  scores: Float[Array, "Q k"]
  ids: Int[Array, "Q k"]


class Vectors:
  """Vectors to be searched among."""

  def __init__(
    self,
    parts: Sequence[np.ndarray],
    mesh: Mesh,
    *,
    chunk_rows: int = 1 << 18,
    stream: bool = False,
  ):
    """Places them on the devices, unless they are streamed.

    Args:
      parts: [rows, D] each, of one dtype, in order; arrays on disk may be
        mapped, as they are read one chunk at a time.
      mesh: its axes' names do not matter.
      chunk_rows: C at most; rounded up to a multiple of the devices.
      stream: whether they stay on the host.
    """
    self._parts, self._mesh = parts, mesh
    self._starts = np.cumsum([0, *map(len, parts)])
    rows = min(chunk_rows, len(self))
    self._rows = math.ceil(rows / mesh.size) * mesh.size
    self._split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    self._whole = NamedSharding(mesh, PartitionSpec())
    self._offsets = range(0, len(self), self._rows)
    self._chunks = None
    if not stream:
      self._chunks = [self._chunk(offset) for offset in self._offsets]

  def __len__(self) -> int:
    return int(self._starts[-1])

  def search(
    self, queries: Float[np.ndarray, "Q D"], k: int
  ) -> tuple[Float[np.ndarray, "Q k"], Int[np.ndarray, "Q k"]]:
    """The k highest products with each query, and which vectors these are.

    Of equal ones, those with lower numbers come first. k is at most the number
    of vectors.
    """
    k = min(k, len(self))
    found = [
      self._block(queries[start : start + _QUERIES[-1]], k)
      for start in range(0, len(queries), _QUERIES[-1])
    ]
    scores, ids = zip(*found, strict=True)
    return np.concatenate(scores), np.concatenate(ids)

  def _block(self, queries: np.ndarray, k: int):
    num = len(queries)
    rows = next(r for r in _QUERIES if r >= num)
    room = 1 << (k - 1).bit_length()  # few shapes
    padded = np.zeros((rows, queries.shape[1]), np.float32)
    padded[:num] = queries
    put = functools.partial(jax.device_put, device=self._whole)
    padded = put(padded)
    best = Best(
      put(np.full((rows, room), -np.inf, np.float32)),
      put(np.zeros((rows, room), np.int32)),
    )
    for i, offset in enumerate(self._offsets):
      streamed = self._chunks is None
      chunk = self._chunk(offset) if streamed else self._chunks[i]
      if streamed:  # two chunks at most are on the devices
        jax.block_until_ready(best)
      best = _step(
        best,
        padded,
        chunk,
        np.int32(offset),
        np.int32(len(self)),
        mesh=self._mesh,
      )
    return np.asarray(best.scores)[:num, :k], np.asarray(best.ids)[:num, :k]

  def _chunk(self, offset: int) -> jax.Array:
    """Rows from `offset`, and zeros behind the last one; [C, D]."""
    shape = (self._rows, self._parts[0].shape[1])
    chunk = np.zeros(shape, self._parts[0].dtype)
    stop = min(offset + self._rows, len(self))
    for part, start in zip(self._parts, self._starts, strict=False):
      low, high = max(offset, start), min(stop, start + len(part))
      if low < high:
        chunk[low - offset : high - offset] = part[low - start : high - start]
    return jax.device_put(chunk, self._split)


@functools.partial(jax.jit, static_argnames="mesh", donate_argnums=0)
def _step(best: Best, queries, chunk, offset, num, *, mesh: Mesh) -> Best:
  """The best of `best` and of a chunk [C, D] whose first row is `offset`."""
  axes, k = mesh.axis_names, best.ids.shape[1]

  def local(best: Best, queries, rows, offset, num) -> Best:
    scores = jnp.einsum(
      "qd,cd->qc",
      queries,
      rows.astype(jnp.float32),
      precision=jax.lax.Precision.HIGHEST,
    )
    first = offset + jax.lax.axis_index(axes) * rows.shape[0]
    ids = first + jnp.arange(rows.shape[0], dtype=jnp.int32)
    scores = jnp.where(ids < num, scores, -jnp.inf)
    mine, places = jax.lax.top_k(scores, min(k, rows.shape[0]))
    found = Best(mine, ids[places])
    # Of equal scores `top_k` takes the first, so the order is that of numbers.
    found = Best(
      *(jax.lax.all_gather(x, axes, axis=1, tiled=True) for x in found)
    )
    both = Best(*(jnp.concatenate(x, 1) for x in zip(best, found, strict=True)))
    scores, places = jax.lax.top_k(both.scores, k)
    return Best(scores, jnp.take_along_axis(both.ids, places, 1))

  whole, split = PartitionSpec(), PartitionSpec(axes)
  return jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(whole, whole, split, whole, whole),
    out_specs=whole,
    check_vma=False,
  )(best, queries, chunk, offset, num)
