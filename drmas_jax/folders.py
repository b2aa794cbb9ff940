"""Checkpoint folders that may be elsewhere: where a `checkpoint` leads.

    checkpoints/qwen     a folder here
    gs://bucket/qwen     copied file by file to the user's cache
    Qwen/Qwen3-4B        of the Hugging Face hub, which keeps a cache of its own

`sizes` is what a plan needs and costs little; `fetch` brings the weights.
"""

import contextlib
import fnmatch
import os
import pathlib
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from drmas_jax import caches
from drmas_jax.models import weights
from drmas_jax.models.transformer import DecoderConfig

# What a checkpoint folder is read for: weights, configs, tokenizer, template.
_WANTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_ANSWER_S = 60.0  # for a list of files, or the next piece of one
_PIECE = 16 << 20

T = TypeVar("T")


def sizes(checkpoint: str) -> DecoderConfig:
  """What config.json says, or for a public checkpoint that is not here the
  table of its family, so that nothing is fetched for a plan that does not fit.

  Raises:
    ValueError: as `fetch`.
  """
  if _is_hub_id(checkpoint) and (found := weights.public_sizes(checkpoint)):
    return found
  return weights.read_config(_find(checkpoint, (weights.CONFIG,)))


def fetch(checkpoint: str) -> pathlib.Path:
  """The folder, whole and on this machine.

  Raises:
    ValueError: there is none, it cannot be reached, or there is no answer
      within a minute.
  """
  return _find(checkpoint, _WANTED)


def here(checkpoint: str) -> pathlib.Path:
  """The folder as far as it is on this machine; nothing is fetched.

  Raises:
    ValueError: nothing of it is.
  """
  if "://" in checkpoint:
    folder = _cache_of(checkpoint)
    if not folder.is_dir():
      raise ValueError("is not on this machine; a run copies it")
    return folder
  if not _is_hub_id(checkpoint):
    return _find(checkpoint, _WANTED)
  import huggingface_hub

  try:
    folder = huggingface_hub.snapshot_download(
      checkpoint, local_files_only=True
    )
  except Exception as e:  # of several kinds
    raise ValueError("is not on this machine; a run fetches it") from e
  return pathlib.Path(folder)


def contents(url: str, pattern: str) -> Iterator[tuple[str, bytes]]:
  """(path, bytes) of the files in a bucket's folder, in the order of their
  names; one that goes meanwhile is left out.

  Args:
    url: of the folder.
    pattern: of their names in it, such as "transcripts/*.jsonl".

  Raises:
    ValueError: it cannot be read, or there is no answer within a minute.
  """
  import fsspec

  try:
    system, root = fsspec.core.url_to_fs(url)
    for path in sorted(_within(lambda: system.glob(f"{root}/{pattern}"))):
      with contextlib.suppress(FileNotFoundError):
        yield path, _within(lambda path=path: system.cat_file(path))
  except Exception as e:  # of many kinds, as the file system's
    raise ValueError(f"{url}: {_unread(e)}") from e


def _find(checkpoint: str, patterns: tuple[str, ...]) -> pathlib.Path:
  if "://" in checkpoint:
    return _from_bucket(checkpoint, patterns)
  if _is_hub_id(checkpoint):
    return _from_hub(checkpoint, patterns)
  folder = pathlib.Path(checkpoint).expanduser()
  if not folder.is_dir():
    raise ValueError(
      "no such folder; allowed are a Hugging Face folder, gs://BUCKET/FOLDER, "
      "a hub id such as Qwen/Qwen3-4B, tiny:NAME and run:WORKDIR/POLICY; make "
      "it or correct the path"
    )
  return folder


def _is_hub_id(checkpoint: str) -> bool:
  """A folder here comes first."""
  here = pathlib.Path(checkpoint).is_dir()
  return not here and _HUB_ID.fullmatch(checkpoint) is not None


def _from_hub(name: str, patterns: tuple[str, ...]) -> pathlib.Path:
  import huggingface_hub

  try:
    # It gives up by itself where there is no answer, and tells how far it is.
    folder = huggingface_hub.snapshot_download(
      name,
      allow_patterns=list(patterns),
      ignore_patterns=["*/*"],
      etag_timeout=_ANSWER_S,
    )
  except Exception as e:  # of many kinds: offline, no such name, gated, ..
    first = str(e).strip().partition("\n")[0]
    raise ValueError(
      f"no such folder here, and {name} of the Hugging Face hub cannot be "
      f"fetched: {type(e).__name__}: {first}; correct the name, log in with "
      "'hf auth login' if it is gated, or, where this machine is offline, "
      "bring the folder and give its path"
    ) from e
  return pathlib.Path(folder)


# -- buckets -------------------------------------------------------------------


def _from_bucket(url: str, patterns: tuple[str, ...]) -> pathlib.Path:
  """Copies what is not in the cache yet, or is not as it is in the bucket."""
  import fsspec  # and not etils.epath, which loads TensorFlow for gs://
  import tqdm

  folder = _cache_of(url)
  try:
    system, root = fsspec.core.url_to_fs(url)
    found = _within(lambda: _list(system, root, patterns))
    missing = [f for f in found if not _is_copy(folder, f)]
    if not found:
      raise FileNotFoundError(f"it holds none of {', '.join(patterns)}")
    folder.mkdir(parents=True, exist_ok=True)
    with tqdm.tqdm(
      desc=url,
      total=sum(f.size for f in missing),
      unit="B",
      unit_scale=True,
      disable=not missing,
    ) as progress:
      for file in missing:
        _copy(system, file, folder, progress.update)
  except Exception as e:  # of many kinds, as the file system's
    raise ValueError(_unread(e)) from e
  return folder


def _unread(e: Exception) -> str:
  return (
    f"cannot be fetched: {type(e).__name__}: {e}; gs:// needs the package "
    "gcsfs (pip install 'drmas-jax[gcs]') and access to the bucket; correct "
    "it, or copy the folder here and give its path"
  )


class _File(NamedTuple):
  """Of a folder elsewhere: full path, name, bytes, seconds of its change."""

  path: str
  name: str
  size: int
  modified: int


def _cache_of(url: str) -> pathlib.Path:
  return caches.folder("checkpoints") / urllib.parse.quote(
    url.rstrip("/"), safe=""
  )


def _list(system: Any, root: str, patterns: tuple[str, ...]) -> list[_File]:
  """The wanted files of a folder, by name."""
  found = []
  for entry in system.ls(root, detail=True):
    name = entry["name"].rpartition("/")[2]
    wanted = any(fnmatch.fnmatch(name, p) for p in patterns)
    if wanted and entry["type"] == "file":
      changed = int(system.modified(entry["name"]).timestamp())
      found.append(_File(entry["name"], name, entry["size"], changed))
  return sorted(found, key=lambda f: f.name)


def _is_copy(folder: pathlib.Path, file: _File) -> bool:
  """Copies are as old as their sources, and are there whole or not at all."""
  copy = folder / file.name
  if not copy.is_file():
    return False
  stat = copy.stat()
  return (stat.st_size, int(stat.st_mtime)) == (file.size, file.modified)


def _copy(
  system: Any,
  file: _File,
  folder: pathlib.Path,
  progress: Callable[[int], Any],
) -> None:
  part = folder / f"{file.name}.part{os.getpid()}"
  try:
    with part.open("wb") as out:
      source = _within(lambda: system.open(file.path, "rb"))
      while piece := _within(lambda: source.read(_PIECE)):
        out.write(piece)
        progress(len(piece))
      _within(source.close)
    if (size := part.stat().st_size) != file.size:
      raise OSError(f"{file.path} ended at {size} of {file.size} bytes")
    os.utime(part, (file.modified, file.modified))
    part.replace(folder / file.name)
  finally:
    part.unlink(missing_ok=True)


def _within(call: Callable[[], T]) -> T:
  """The call's result; in a thread, as a file system may wait for ever."""
  found: dict[str, Any] = {}

  def run():
    try:
      found["result"] = call()
    except BaseException as e:
      found["error"] = e

  thread = threading.Thread(target=run, daemon=True)
  thread.start()
  thread.join(_ANSWER_S)
  if thread.is_alive():
    raise TimeoutError(f"no answer within {_ANSWER_S:g} s")
  if "error" in found:
    raise found["error"]
  return found["result"]
