"""The task stream: an endless, reshuffled walk over random-access sources.

A source is what `datasets.<name>.make(split, *, ..)` returns: it has a length,
a `fingerprint` of its content, and `source[i]` is a dict with "question",
"answer" and, if it likes, "info". Which row of which source stands at which
position of the stream is a function of seed and position alone, so a run's
whole data state is one number, the cursor.
"""

import functools
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from drmas_jax import usercode
from drmas_jax.types import Task

# Positions after which a mixture's shares come out exactly, and what sets the
# draws of its order apart from those of the sources' epochs.
_CYCLE, _MIX = 1000, 1 << 31


class Source(Protocol):
  """A data set with random access.

  Attributes:
    fingerprint: differs where rows differ; manifests and comparisons of runs
      go by it.
  """

  fingerprint: str

  def __len__(self) -> int: ...

  def __getitem__(self, index: int) -> Mapping[str, Any]: ...


class Stream:
  """Epoch after epoch of each source, each in an order of its own.

  The stream goes in cycles of 1000 positions. In each, a source has its share,
  to the nearest position, and the shares are shuffled by (seed, cycle). The
  i-th task of a source of n rows is row `order(i // n)[i % n]`, where the order
  of an epoch is a permutation drawn from (seed, epoch): nothing is repeated
  within an epoch or dropped at its edge.
  """

  def __init__(
    self,
    sources: Mapping[str, Source],
    seed: int,
    weights: Mapping[str, float] | None = None,
  ):
    """`weights` are relative; without them all sources have the same.

    Raises:
      ValueError: a source has no rows, or no position of a cycle.
    """
    self.sources = dict(sources)
    for key, source in self.sources.items():
      _check_rows(key, source)
    self.seed = seed
    # In an order of their own: that of the config's entries means nothing.
    self._keys = tuple(sorted(self.sources))
    self._counts = _shares([(weights or {}).get(k, 1.0) for k in self._keys])
    for key, count in zip(self._keys, self._counts, strict=True):
      if not count:
        raise ValueError(
          f"{key}.weight is less than 1/{_CYCLE} of all weights, so that it "
          "would never be drawn; raise it, or remove the source"
        )
    self._order = functools.lru_cache(maxsize=2 * len(sources))(self._shuffled)
    self._cycle = functools.lru_cache(maxsize=2)(self._mixed)

  def tasks(self, cursor: int, num: int) -> list[Task]:
    """The `num` tasks from position `cursor` on."""
    return [self._task(p) for p in range(cursor, cursor + num)]

  def _task(self, position: int) -> Task:
    number, i = self._source_at(position)
    key = self._keys[number]
    epoch, place = divmod(i, len(self.sources[key]))
    index = int(self._order(number, epoch)[place])
    return _task(key, self.sources[key], index, position)

  def _source_at(self, position: int) -> tuple[int, int]:
    """(a source's number, how many of its tasks come before)."""
    if len(self._keys) == 1:
      return 0, position
    cycle, place = divmod(position, _CYCLE)
    numbers, before = self._cycle(cycle)
    number = int(numbers[place])
    return number, cycle * self._counts[number] + int(before[place])

  def _mixed(self, cycle: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each place of a cycle: its source, and that source's places before."""
    rng = np.random.Generator(np.random.PCG64([self.seed, cycle, _MIX]))
    numbers = rng.permutation(np.repeat(range(len(self._keys)), self._counts))
    before = np.zeros(_CYCLE, int)
    for number in range(len(self._keys)):
      before[numbers == number] = range(self._counts[number])
    return numbers, before

  def _shuffled(self, number: int, epoch: int) -> np.ndarray:
    # Sources of equal length take different orders by their number; the first
    # one the order that it would have alone.
    seed = [self.seed, epoch, number] if number else [self.seed, epoch]
    rng = np.random.Generator(np.random.PCG64(seed))
    return rng.permutation(len(self.sources[self._keys[number]]))


def _shares(weights: list[float]) -> list[int]:
  """Positions of a cycle by weight; the largest remainders round up."""
  exact = np.array(weights) / sum(weights) * _CYCLE
  counts = np.floor(exact).astype(int)
  by_remainder = np.argsort(counts - exact, kind="stable")
  counts[by_remainder[: _CYCLE - counts.sum()]] += 1
  return counts.tolist()


def held_out(key: str, source: Source, num: int) -> list[Task]:
  """The first `num` rows in their own order, or all if there are fewer.

  Raises:
    ValueError: there are no rows.
  """
  _check_rows(key, source)
  return [_task(key, source, i, i) for i in range(min(num, len(source)))]


def _check_rows(key: str, source: Source) -> None:
  if len(source) == 0:
    raise ValueError(f"{key} has no rows; choose another split or its options")


def _task(key: str, source: Source, index: int, position: int) -> Task:
  with usercode.blaming(
    "reading a row", f"task {key}[{index}]", type(source).__getitem__
  ):
    row = source[index]
    return Task(
      source=key,
      index=index,
      position=position,
      question=row["question"],
      answer=row["answer"],
      info=row.get("info", {}),
    )
