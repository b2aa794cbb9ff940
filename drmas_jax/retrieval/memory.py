"""A small corpus in memory, such as a generated one: no files, no index.

Scores are the sums of the inverse document frequencies of a query's words, by
the rule of BM25 without its terms for lengths and repetitions, in which the
passages of such a corpus hardly differ. Words of more than half of all passages
count only where a query has no others.
"""

import collections
import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from drmas_jax.retrieval import retriever
from drmas_jax.retrieval.bm25 import words
from drmas_jax.retrieval.retriever import Batcher, Passage


class Memory:
  """A `retriever.Retriever`."""

  def __init__(self, passages: Sequence[Mapping[str, Any]]):
    """Reads them all.

    Args:
      passages: as the rows of a corpus; see `retriever.passage`.
    """
    self._passages = [retriever.passage(row) for row in passages]
    self._places = collections.defaultdict(list)  # by word
    for place, passage in enumerate(self._passages):
      for word in dict.fromkeys(words(passage.contents)):
        self._places[word].append(place)

  def __len__(self) -> int:
    return len(self._passages)

  def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
    """As `retriever.Retriever` says; a passage shares a word with its query."""
    return [self._search(query, k) for query in queries]

  def _search(self, query: str, k: int) -> list[Passage]:
    known = [w for w in dict.fromkeys(words(query)) if w in self._places]
    found = [self._places[word] for word in known]
    scores = collections.Counter()
    for places in [f for f in found if 2 * len(f) <= len(self)] or found:
      num = len(places)
      weight = math.log(1 + (len(self) - num + 0.5) / (num + 0.5))
      for place in places:
        scores[place] += weight
    best = sorted(scores, key=lambda place: (-scores[place], place))[:k]
    return [self._passages[i]._replace(score=scores[i]) for i in best]


def make(*, passages: str) -> Batcher:
  """A source over passages that a module holds.

  Args:
    passages: "my_pkg.my_module:NAME", a sequence of rows.

  Raises:
    ValueError: there is no such object, or one of its rows is no passage.
  """
  module, _, name = passages.partition(":")
  try:
    rows = getattr(importlib.import_module(module), name)
    return Batcher(Memory(rows))
  except (ImportError, AttributeError, TypeError, ValueError) as e:
    raise ValueError(
      f"passages={passages!r} cannot be used ({e}); write "
      "'my_pkg.my_module:NAME' of a sequence of passages"
    ) from e
