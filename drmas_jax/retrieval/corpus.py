"""Passages in files, and the folder beside them that an index is in.

A corpus is a .jsonl file or a folder of them, one passage a line:

    {"id": "0", "contents": "\"Title\"\nText .."}        as wiki-18 is published
    {"id": "0", "title": "Title", "text": "Text .."}

The files are mapped, and a passage is read when it is found. What is in memory
is where each line begins. Those places, an index, and `index.json`, which says
of what files and with what settings it was made, are one folder. It is made
under another name and renamed when it is whole, so that a build that is killed
leaves no index, and one that takes hours can be gone on with.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import mmap
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np

from drmas_jax.retrieval import retriever

Build = Literal["auto", "only", "never"]

_MANIFEST, _STAMP, _LINES = "index.json", "building.json", "lines.npy"
_FORMAT = 1
_LOCK_S = 3600.0


class Corpus:
  """Passages by number, in the order of the files' names and lines."""

  def __init__(self, paths: list[pathlib.Path], lines: np.ndarray):
    """Maps the files.

    Args:
      paths: of the files, in order.
      lines: [N] where each passage's line begins in all files as one.
    """
    self._lines = lines
    self._maps = [_map(path) for path in paths]
    ends = np.cumsum([len(m) for m in self._maps])
    self._starts = np.concatenate([[0], ends[:-1]])

  def __len__(self) -> int:
    return len(self._lines)

  def passage(self, index: int, score: float = 0.0) -> retriever.Passage:
    """The passage with that number, from 0."""
    place = int(self._lines[index])
    file = int(np.searchsorted(self._starts, place, side="right")) - 1
    start = place - int(self._starts[file])
    stop = self._maps[file].find(b"\n", start)
    line = self._maps[file][start : stop if stop >= 0 else None]
    return retriever.passage(json.loads(line), score)


def _map(path: pathlib.Path) -> mmap.mmap | bytes:
  if not path.stat().st_size:
    return b""
  with path.open("rb") as file:
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def mapped(path: pathlib.Path) -> np.ndarray:
  """An array of an index, which stays on disk until it is looked at.

  Raises:
    ValueError: it is not there, or not whole.
  """
  try:
    return np.load(path, mmap_mode="r").view(np.ndarray)
  except (OSError, ValueError, EOFError) as e:
    raise ValueError(
      f"{path}: cannot be read: {e}; delete the folder, and it is made again"
    ) from e


@dataclasses.dataclass(frozen=True)
class Place:
  """A corpus and where its index is.

  Attributes:
    corpus: a .jsonl file, or a folder of them.
    index: folder of the index.
    settings: what else the index depends on; plain JSON.
  """

  corpus: pathlib.Path
  index: pathlib.Path
  settings: Mapping[str, Any]


def place(
  corpus: str | pathlib.Path,
  index: str | pathlib.Path,
  suffix: str,
  settings: Mapping[str, Any],
) -> Place:
  """`index`, or the corpus's own name with `suffix`, beside it."""
  path = pathlib.Path(corpus).expanduser().resolve()
  beside = path.with_name(path.name + suffix)
  return Place(
    path,
    pathlib.Path(index).expanduser().resolve() if index else beside,
    settings,
  )


def ready(
  where: Place, build: Build, fill: Callable[[Corpus, pathlib.Path], None]
) -> Corpus:
  """The corpus, with an index of it as it is now.

  Args:
    where: what of, and where.
    build: "auto" or "only" make the index where there is none, or where the
      corpus or the settings have changed since; "never" refuses.
    fill: writes an index into a folder, which may hold a part of it from an
      earlier, interrupted call.

  Raises:
    ValueError: no corpus, a line that is no passage (named by file and number),
      no index or one of another corpus with `build` "never", or one that
      another process makes for longer than an hour.
  """
  paths = _files(where.corpus)
  fault = _fault(where, paths)
  if fault and build == "never":
    raise ValueError(
      f"{where.index}: {fault}; make it with --build=only of python -m "
      "drmas_jax.retrieval.serve"
    )
  if fault:
    try:
      where.index.parent.mkdir(parents=True, exist_ok=True)
      with _locked(where.index.parent):
        if _fault(where, paths):  # nobody has made it meanwhile
          _make(where, paths, fill)
    except OSError as e:
      raise ValueError(
        f"{where.index}: {fault}, and it cannot be made there: {e}; name "
        "another folder as index"
      ) from e
  return Corpus(paths, mapped(where.index / _LINES))


def _files(corpus: pathlib.Path) -> list[pathlib.Path]:
  if corpus.is_file():
    paths = [corpus]
  elif corpus.is_dir():
    paths = sorted(corpus.glob("*.jsonl"))
  else:
    raise ValueError(f"{corpus}: no such file or folder; name a corpus")
  if not paths or paths[0].suffix != ".jsonl":
    what = "is" if corpus.is_file() else "holds"
    raise ValueError(
      f"{corpus}: {what} no .jsonl file; a corpus has one passage a line, and "
      "is not compressed"
    )
  return paths


def _fault(where: Place, paths: list[pathlib.Path]) -> str:
  """Why there is no index to be used; "" where there is one."""
  path = where.index / _MANIFEST
  if not path.is_file():
    return "there is no index"
  try:
    made = json.loads(path.read_text())
    files = {file["name"]: file for file in made["files"]}
    told = (made["format"], made["settings"])
  except (ValueError, KeyError, TypeError):
    return f"its {_MANIFEST} cannot be read"
  if told != (_FORMAT, dict(where.settings)):
    return "the index was made with other settings"
  if list(files) != [p.name for p in paths]:
    return "the index is of other files"
  for file in paths:
    if not _unchanged(file, files[file.name]):
      return f"{file.name} has changed since the index was made"
  return ""


def _unchanged(path: pathlib.Path, known: Mapping[str, Any]) -> bool:
  now = path.stat()
  if now.st_size != known["size"]:
    return False
  if now.st_mtime_ns == known["mtime_ns"]:
    return True
  with path.open("rb") as file:  # copied or touched, maybe
    return hashlib.file_digest(file, "sha256").hexdigest() == known["sha256"]


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
  """One process at a time; the lock of one that dies is gone with it."""
  deadline = time.monotonic() + _LOCK_S
  handle = os.open(folder, os.O_RDONLY)
  try:
    while True:
      try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
      except BlockingIOError:
        if time.monotonic() > deadline:
          raise ValueError(
            f"{folder}: another process has been making an index there for an "
            "hour; wait for that one, or end it"
          ) from None
        time.sleep(0.1)
    yield
  finally:
    os.close(handle)


def _make(where: Place, paths: list[pathlib.Path], fill) -> None:
  _check_place(where.index)
  part = where.index.with_name(f"{where.index.name}.part")
  files, lines = _scan(paths)
  stamp = json.dumps(
    {"format": _FORMAT, "settings": dict(where.settings), "files": files},
    indent=1,
  )
  if not (part / _STAMP).is_file() or (part / _STAMP).read_text() != stamp:
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    (part / _STAMP).write_text(stamp)
  np.save(part / _LINES, lines)
  fill(Corpus(paths, lines), part)
  (part / _STAMP).rename(part / _MANIFEST)
  if where.index.exists():  # an index that is no longer of use
    shutil.rmtree(where.index)
  part.rename(where.index)


def _check_place(index: pathlib.Path) -> None:
  """Raises a ValueError for what is no index, and would be lost."""
  if not index.exists() or (index / _MANIFEST).exists():
    return
  if not index.is_dir() or any(index.iterdir()):
    raise ValueError(
      f"{index}: is no index, and not empty; name another folder"
    )


def _scan(
  paths: list[pathlib.Path],
) -> tuple[list[dict[str, Any]], np.ndarray]:
  """What the files are, and [N] where their passages begin. Reads them all."""
  import tqdm

  files, lines, start = [], [], 0
  total = sum(path.stat().st_size for path in paths)
  with tqdm.tqdm(
    total=total, unit="B", unit_scale=True, desc="read passages"
  ) as bar:
    for path in paths:
      stat, digest, found = path.stat(), hashlib.sha256(), []
      with path.open("rb") as file:
        for number, line in enumerate(file, 1):
          digest.update(line)
          if line.strip():
            _check(line, path, number)
            found.append(start)
          start += len(line)
          bar.update(len(line))
      lines.append(np.asarray(found, np.int64))
      files.append(
        {
          "name": path.name,
          "size": stat.st_size,
          "mtime_ns": stat.st_mtime_ns,
          "sha256": digest.hexdigest(),
        }
      )
  joined = np.concatenate(lines)
  if not len(joined):
    where = paths[0] if len(paths) == 1 else paths[0].parent
    raise ValueError(f"{where}: there is no passage in it; write one a line")
  return files, joined


def _check(line: bytes, path: pathlib.Path, number: int) -> None:
  try:
    found = json.loads(line)
    if not isinstance(found, dict) or "id" not in found:
      raise ValueError('it is no object with an "id"')
    retriever.passage(found)
  except (ValueError, RecursionError) as e:
    raise ValueError(f"{path}:{number}: cannot be read: {e}; mend it") from e
