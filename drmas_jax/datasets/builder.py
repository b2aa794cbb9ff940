"""Public data sets, from files of rows to random access, through TFDS.

One builder serves all sets; a set is a row of `SETS`. It is built on first use
into a cache folder and read as array records. Neither step needs TensorFlow.
"""

import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class PublicSet:
  """Where a set's rows are.

  Attributes:
    files: JSON-lines file of each split, relative to the data folder.
    question: key of the question in a row.
    answer: key of the gold answer, a string.
  """

  files: Mapping[str, str]
  question: str
  answer: str


SETS = {
  "gsm8k": PublicSet(
    files={"train": "gsm8k_train.jsonl", "test": "gsm8k_test.jsonl"},
    question="problem",
    answer="answer",
  ),
}


class Rows:
  """A split as `data.Source`: text decoded row by row."""

  def __init__(self, name: str, records: Any):
    self.name = name
    self._records = records

  def __len__(self) -> int:
    return len(self._records)

  def __getitem__(self, index: int) -> dict[str, str]:
    return {k: v.decode() for k, v in self._records[index].items()}


def source(
  name: str, split: str, data_dir: str, cache_dir: str | None = None
) -> Rows:
  """A split of a set, built first if the cache does not hold these files.

  Args:
    name: a row of `SETS`.
    split: one of that row's splits.
    data_dir: folder of the set's files.
    cache_dir: where prepared sets are kept; None: the user's cache folder.
  """
  files = SETS[name].files
  if split not in files:
    raise ValueError(
      f"split={split!r} is not allowed; {name} has {', '.join(files)}"
    )
  folder = pathlib.Path(data_dir).expanduser()
  if missing := [f for f in files.values() if not (folder / f).is_file()]:
    raise ValueError(
      f"data_dir={data_dir!r} has no {', '.join(missing)}; name the folder "
      f"that holds the files of {name}"
    )
  cache = pathlib.Path(cache_dir).expanduser() if cache_dir else _user_cache()
  builder = _builder_class()(
    folder=folder,
    config=name,
    data_dir=str(cache / f"{name}-{_digest(folder, files)}"),
    file_format="array_record",
  )
  _prepare(builder, cache)
  return Rows(name, builder.as_data_source(split=split))


def _prepare(builder: Any, cache: pathlib.Path) -> None:
  """Builds once, whichever of several processes comes first."""
  import tensorflow_datasets as tfds

  cache.mkdir(parents=True, exist_ok=True)
  with open(cache / "lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    tfds.disable_progress_bar()
    builder.download_and_prepare()


def _user_cache() -> pathlib.Path:
  base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  return pathlib.Path(base) / "drmas_jax" / "datasets"


def _digest(folder: pathlib.Path, files: Mapping[str, str]) -> str:
  """Names the content of the files, so that a changed one is built anew."""
  digest = hashlib.sha256()
  for split, file in sorted(files.items()):
    content = hashlib.sha256((folder / file).read_bytes()).digest()
    digest.update(split.encode() + content)
  return digest.hexdigest()[:16]


@functools.cache
def _builder_class() -> type:
  """The builder, made when used: TFDS takes a second to import."""
  import tensorflow_datasets as tfds

  class PublicSets(tfds.core.GeneratorBasedBuilder):
    """Questions with answers, in the order of their files."""

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = [  # noqa: RUF012
      tfds.core.BuilderConfig(name=name) for name in SETS
    ]

    def __init__(self, *, folder: pathlib.Path, **kwargs):
      self._folder = folder
      super().__init__(**kwargs)

    def _info(self):
      text = tfds.features.Text()
      return tfds.core.DatasetInfo(
        builder=self,
        features=tfds.features.FeaturesDict({"question": text, "answer": text}),
        disable_shuffling=True,
      )

    def _split_generators(self, dl_manager):
      del dl_manager
      return {
        split: self._generate_examples(self._folder / file)
        for split, file in SETS[self.builder_config.name].files.items()
      }

    def _generate_examples(self, path):
      row = SETS[self.builder_config.name]
      with open(path, encoding="utf-8") as lines:
        for i, line in enumerate(lines):
          record = json.loads(line)
          yield (
            i,
            {"question": record[row.question], "answer": record[row.answer]},
          )

  return PublicSets
