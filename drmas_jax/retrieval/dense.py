"""Passages by the meaning of a text: an encoder, and an exact search.

Made once: vectors of all passages, in files of 65,536 rows, which are written
one by one, so that a build of hours goes on where it was. In a search, queries
are encoded together and compared with all of them (`topk`).

Within a training run the search has one CPU device of its own: programs on
several devices, started from two threads, may wait for each other for ever. On
accelerators it is a process of its own, `serve`, and the run has a `client`.
"""

import pathlib
from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np
from jax.sharding import Mesh

from drmas_jax.retrieval import corpus as corpus_lib
from drmas_jax.retrieval.encoder import Encoder
from drmas_jax.retrieval.retriever import Batcher, Passage
from drmas_jax.retrieval.topk import Vectors

_FILE_ROWS = 1 << 16


class Dense:
  """A `retriever.Retriever`."""

  def __init__(
    self,
    corpus: str | pathlib.Path,
    encoder: str | pathlib.Path,
    mesh: Mesh,
    *,
    index: str | pathlib.Path = "",
    build: corpus_lib.Build = "auto",
    prefixes: Sequence[str] | None = None,
    dtype: Literal["float16", "float32"] = "float16",
    stream: bool = False,
  ):
    """Opens the index, or makes it first.

    Args:
      corpus: a .jsonl file, or a folder of them; see `corpus`.
      encoder: a folder of a checkpoint; see `encoder`.
      mesh: all of its devices encode and search.
      index: folder of the index; "": beside the corpus.
      build: see `corpus.ready`.
      prefixes: before a query, and before a passage; None: the folder's own. e5
        wants ("query: ", "passage: ").
      dtype: of the vectors, on disk and devices.
      stream: whether vectors stay on the host; see `topk.Vectors`.

    Raises:
      ValueError: as `corpus.ready` and `Encoder`; or the index cannot be read.
    """
    if dtype not in ("float16", "float32"):
      raise ValueError(f"dtype={dtype!r}: allowed are float16 and float32")
    self._encoder = Encoder(encoder, mesh, prefixes)
    where = corpus_lib.place(
      corpus,
      index,
      f".{pathlib.Path(encoder).name}",
      {"kind": "dense", "dtype": dtype, **self._encoder.described()},
    )

    def fill(found: corpus_lib.Corpus, folder: pathlib.Path) -> None:
      _fill(found, folder, self._encoder, dtype)

    self._corpus = corpus_lib.ready(where, build, fill)
    parts = [
      corpus_lib.mapped(_path(where.index, start))
      for start in range(0, len(self._corpus), _FILE_ROWS)
    ]
    self._vectors = Vectors(parts, mesh, stream=stream)

  def __len__(self) -> int:
    return len(self._corpus)

  def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
    """As `retriever.Retriever` says."""
    vectors = self._encoder.encode(queries, "query")
    return [
      [
        self._corpus.passage(int(i), float(score))
        for score, i in zip(*row, strict=True)
      ]
      for row in zip(*self._vectors.search(vectors, k), strict=True)
    ]


def _path(folder: pathlib.Path, start: int) -> pathlib.Path:
  return folder / f"vectors-{start:010d}.npy"


def _fill(
  corpus: corpus_lib.Corpus,
  folder: pathlib.Path,
  encoder: Encoder,
  dtype: str,
) -> None:
  """Writes the files that are not there yet."""
  import tqdm

  with tqdm.tqdm(total=len(corpus), desc="encode passages") as bar:
    for start in range(0, len(corpus), _FILE_ROWS):
      stop = min(start + _FILE_ROWS, len(corpus))
      path = _path(folder, start)
      if path.exists():
        bar.update(stop - start)
        continue
      texts = [corpus.passage(i).contents for i in range(start, stop)]
      vectors = encoder.encode(texts, "passage", bar.update).astype(dtype)
      half = path.with_name("half.npy")
      np.save(half, vectors)
      half.rename(path)


def make(
  *,
  corpus: str,
  encoder: str,
  index: str = "",
  build: corpus_lib.Build = "auto",
  prefixes: list[str] | None = None,
  dtype: Literal["float16", "float32"] = "float16",
  stream: bool = False,
) -> Batcher:
  """A source over a corpus, on one CPU device (see the module); the arguments
  are those of `Dense`."""
  mesh = Mesh(np.asarray(jax.local_devices(backend="cpu")[:1]), ("rows",))
  dense = Dense(
    corpus,
    encoder,
    mesh,
    index=index,
    build=build,
    prefixes=prefixes,
    dtype=dtype,
    stream=stream,
  )
  return Batcher(dense)
