"""BM25 over a corpus, by bm25s: the default, in the process itself.

Scores are those of Lucene's variant with k1 1.5 and b 0.75
(https://arxiv.org/abs/2407.03618). Each word's part is computed when the index
is made; a search adds up columns of a sparse matrix that stays on disk and is
mapped. A word is found by the hash of its spelling in a sorted array, mapped
too, so that starting takes no longer where there are more words.
"""

import hashlib
import pathlib
import re
import sys
import unicodedata
from array import array
from collections.abc import Sequence

import numpy as np

from drmas_jax.retrieval import corpus as corpus_lib
from drmas_jax.retrieval.retriever import Batcher, Passage

_HASHES, _COLUMNS = "words.npy", "columns.npy"
_MATRIX = ("data", "indices", "indptr")
_METHOD = {"method": "lucene", "k1": 1.5, "b": 0.75}
# Bound to the index: another way to cut words, or other columns.
_SETTINGS = {"kind": "bm25", "words": 1, **_METHOD}

# Left out of a query that has other words: each is in a large part of all
# passages, which costs time and tells little.
_COMMON = frozenset(
  (
    *("a", "an", "and", "are", "as", "at", "be", "by", "for", "from", "has"),
    *("he", "in", "is", "it", "its", "of", "on", "or", "she", "that", "the"),
    *("to", "was", "were", "what", "when", "where", "which", "who", "whose"),
    *("will", "with"),
  )
)
_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
  """Lower-cased runs of letters and digits, without accents."""
  if not text.isascii():
    text = unicodedata.normalize("NFKD", text)
    text = "".join(c for c in text if not unicodedata.combining(c))
  return _WORD.findall(text.casefold())


class Bm25:
  """A `retriever.Retriever`."""

  def __init__(
    self,
    corpus: str | pathlib.Path,
    index: str | pathlib.Path = "",
    build: corpus_lib.Build = "auto",
  ):
    """Opens the index, or makes it first.

    Args:
      corpus: a .jsonl file, or a folder of them; see `corpus`.
      index: folder of the index; "": beside the corpus.
      build: see `corpus.ready`.

    Raises:
      ValueError: as `corpus.ready`; or the index cannot be read.
    """
    where = corpus_lib.place(corpus, index, ".bm25", _SETTINGS)
    self._corpus = corpus_lib.ready(where, build, _fill)
    self._data, self._indices, self._starts = (
      corpus_lib.mapped(where.index / f"{name}.npy") for name in _MATRIX
    )
    self._hashes = corpus_lib.mapped(where.index / _HASHES)
    self._numbers = corpus_lib.mapped(where.index / _COLUMNS)

  def __len__(self) -> int:
    return len(self._corpus)

  def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
    """As `retriever.Retriever` says; a passage shares a word with its query."""
    return [self._search(query, k) for query in queries]

  def _search(self, query: str, k: int) -> list[Passage]:
    found = words(query)
    columns = self._columns([w for w in found if w not in _COMMON] or found)
    if not len(columns):
      return []
    scores = np.zeros(len(self), np.float32)
    for column in columns:
      rows = slice(self._starts[column], self._starts[column + 1])
      scores[self._indices[rows]] += self._data[rows]
    return [
      self._corpus.passage(int(i), float(scores[i])) for i in _best(scores, k)
    ]

  def _columns(self, found: Sequence[str]) -> np.ndarray:
    """Of those words that the corpus has."""
    hashes = np.asarray([_hash(word) for word in found], np.uint64)
    places = np.searchsorted(self._hashes, hashes)
    places[places == len(self._hashes)] = 0
    return self._numbers[places[self._hashes[places] == hashes]]


def _best(scores: np.ndarray, k: int) -> np.ndarray:
  """Of [N] scores, the places of the k highest above 0, the best first."""
  able = np.flatnonzero(scores)
  if len(able) > k:
    some = scores[able]
    able = able[some >= np.partition(some, len(some) - k)[len(some) - k]]
  return able[np.argsort(-scores[able], kind="stable")[:k]]


def _hash(word: str) -> int:
  return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest())


def _bm25s():
  """bm25s without jax: it would start it, on all devices, to sort by."""
  held = {name: sys.modules.get(name) for name in ("jax", "jax.lax")}
  sys.modules |= dict.fromkeys(held)  # None: there is none
  try:
    import bm25s
  finally:
    for name, module in held.items():
      del sys.modules[name]
      if module is not None:
        sys.modules[name] = module
  return bm25s


def _fill(corpus: corpus_lib.Corpus, folder: pathlib.Path) -> None:
  """Writes the index."""
  import tqdm

  columns: dict[str, int] = {}
  rows = []  # arrays, as lists would take nine times the memory
  for i in tqdm.trange(len(corpus), desc="cut into words"):
    found = words(corpus.passage(i).contents)
    rows.append(
      array("i", [columns.setdefault(w, len(columns)) for w in found])
    )
  if not columns:
    raise ValueError(
      f"{folder}: would be empty, as no passage of the corpus holds a word"
    )
  bm25 = _bm25s().BM25(**_METHOD, backend="numpy")
  bm25.index((rows, columns), create_empty_token=False, show_progress=True)
  for name in _MATRIX:
    np.save(folder / f"{name}.npy", bm25.scores[name])
  hashes = np.asarray([_hash(word) for word in columns], np.uint64)
  order = np.argsort(hashes)
  np.save(folder / _HASHES, hashes[order])
  np.save(folder / _COLUMNS, order.astype(np.int32))


def make(
  *, corpus: str, index: str = "", build: corpus_lib.Build = "auto"
) -> Batcher:
  """A source over a corpus; see `Bm25`.

  Args:
    corpus: a .jsonl file, or a folder of them.
    index: folder of the index; "": beside the corpus.
    build: "auto", or "never" to refuse where there is no index.
  """
  return Batcher(Bm25(corpus, index, build))
