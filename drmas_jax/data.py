"""The task stream: an endless, reshuffled walk over a random-access source.

A source is what `datasets.<name>.make(split, *, ..)` returns: it has a `name`,
a length, and `source[i]` is a dict with "question", "answer" and, if it likes,
"info". Which row stands at which position of the stream is a function of seed
and position alone, so a run's whole data state is one number, the cursor.
"""

import functools
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from drmas_jax.types import Task


class Source(Protocol):
  """A data set with random access."""

  name: str

  def __len__(self) -> int: ...

  def __getitem__(self, index: int) -> Mapping[str, Any]: ...


class Stream:
  """Epoch after epoch of a source, each in an order of its own.

  Position p holds row `order(p // n)[p % n]` of the n rows, where the order of
  an epoch is a permutation drawn from (seed, epoch): nothing is repeated within
  an epoch or dropped at its edge.
  """

  def __init__(self, source: Source, seed: int):
    if len(source) == 0:
      raise ValueError(
        f"data source {source.name!r} has no rows; choose another split"
      )
    self.source = source
    self.seed = seed
    self._order = functools.lru_cache(maxsize=2)(self._shuffled)

  def tasks(self, cursor: int, num: int) -> list[Task]:
    """The `num` tasks from position `cursor` on."""
    return [self._task(p) for p in range(cursor, cursor + num)]

  def _task(self, position: int) -> Task:
    epoch, place = divmod(position, len(self.source))
    return _task(self.source, int(self._order(epoch)[place]), position)

  def _shuffled(self, epoch: int) -> np.ndarray:
    rng = np.random.Generator(np.random.PCG64([self.seed, epoch]))
    return rng.permutation(len(self.source))


def held_out(source: Source, num: int) -> list[Task]:
  """The first `num` rows in their own order, or all if there are fewer."""
  return [_task(source, i, i) for i in range(min(num, len(source)))]


def _task(source: Source, index: int, position: int) -> Task:
  row = source[index]
  return Task(
    source=source.name,
    index=index,
    position=position,
    question=row["question"],
    answer=row["answer"],
    info=row.get("info", {}),
  )
