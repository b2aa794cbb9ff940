"""Public data sets: a row of `SETS` each, one builder for all.

A config names a set by its row, as it names a file of this folder:

    sources=dict(aime24=dict(options=dict(data_dir="data")))

Its files come from a folder, a gs:// folder or the Hugging Face hub. They are
built once into a cache folder, through TFDS, and read as array records by
index. Neither step needs TensorFlow. `python -m drmas_jax.datasets` lists the
sets, prepares and shows them.
"""

import ast
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import io
import json
import os
import pathlib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from drmas_jax import caches
from drmas_jax.datasets import own

HUB = "hub"
_LOCK_TIMEOUT_S = 1800.0
_HUB_TIMEOUT_S = 20.0


@dataclasses.dataclass(frozen=True)
class Files:
  """A place where a split's rows may be.

  Attributes:
    pattern: of file names; those that fit are parts of one split, in the order
      of their names.
    data_source: only the rows whose column of that name has this value; none:
      all rows.
  """

  pattern: str
  data_source: str | None = None


@dataclasses.dataclass(frozen=True)
class PublicSet:
  """A set: where its rows are and how they become ours.

  Attributes:
    name: key in `SETS`.
    about: one line for the reader of a list.
    repo: id of the data set on the hub.
    hub: by split, the files in that repository.
    files: by split, further places in a data folder. Looked for there, in this
      order: `files`, then `hub` below a folder with the repository's id or the
      last part of it. The first place that has files is taken.
    question: keys of the question, dotted as in `own.find`; a row's first.
    answer: the same for the gold answer.
    info: names in `Task.info`, with such keys each; a row may lack them.
    ask: makes a row's question ours.
    gold: makes a row's answer ours, before `own.gold`.
    drop_empty: the set is known to have rows without an answer; they are left
      out. Otherwise such a row is an error.
  """

  name: str
  about: str
  repo: str
  hub: Mapping[str, Files]
  files: Mapping[str, tuple[Files, ...]]
  question: tuple[str, ...]
  answer: tuple[str, ...]
  info: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
  ask: Callable[[str], str] = str.strip
  gold: Callable[[Any], Any] = lambda answer: answer
  drop_empty: bool = False

  @property
  def splits(self) -> tuple[str, ...]:
    return tuple(self.hub)

  def make(
    self, split: str, *, data_dir: str = HUB, cache_dir: str | None = None
  ) -> "Rows":
    """A split, built first if the cache does not hold it.

    Args:
      split: one of those that the set has.
      data_dir: folder of the set's files, here or at gs://..; or "hub".
      cache_dir: where built sets are kept; none: the user's cache folder.

    Raises:
      ValueError: the set has no such split, its files are not there or cannot
        be read, or their rows lack a column.
    """
    if split not in self.splits:
      raise ValueError(
        f"split={split!r} is not allowed; {self.name} has "
        f"{', '.join(self.splits)}"
      )
    cache = (
      pathlib.Path(cache_dir).expanduser()
      if cache_dir
      else caches.folder("datasets")
    )
    paths, place = self._find(split, data_dir, cache)
    folder = cache / f"{self.name}-{split}-{_digest(paths, place)}"
    with _locked(folder.with_suffix(".lock")):
      return _build(folder, functools.partial(self._rows, paths, place))

  def _find(
    self, split: str, data_dir: str, cache: pathlib.Path
  ) -> tuple[list[pathlib.Path], Files]:
    """The files of a split, on this machine."""
    hub = self.hub[split]
    if data_dir == HUB:
      return _from_hub(self.repo, hub.pattern), hub
    below = (self.repo, self.repo.rpartition("/")[2])
    places = self.files.get(split, ()) + tuple(
      dataclasses.replace(hub, pattern=f"{folder}/{hub.pattern}")
      for folder in below
    )
    for place in places:
      if paths := _from_folder(data_dir, place.pattern, cache):
        return paths, place
    raise ValueError(
      f"data_dir={data_dir!r} has no {' or '.join(p.pattern for p in places)}; "
      f"name the folder that holds the {split} rows of {self.name}, or write "
      f"data_dir={HUB!r}"
    )

  def _rows(
    self, paths: list[pathlib.Path], place: Files
  ) -> Iterator[dict[str, Any]]:
    """Our rows, in the order of the files."""
    keys = (*self.question, *self.answer, *sum(self.info.values(), ()))
    kept, others = 0, set()
    for path in paths:
      rows = own.read(path, (*keys, "data_source"))
      for i in _progress(range(len(rows)), f"{self.name} {path.name}"):
        row = rows[i]
        if place.data_source not in (None, row.get("data_source")):
          others.add(str(row.get("data_source")))
          continue
        name = f"{path}: row {i}"
        answer = self.gold(_first(row, self.answer, name, "answer"))
        if self.drop_empty and answer == "":
          continue
        kept += 1
        yield {
          "question": self.ask(_first(row, self.question, name, "question")),
          "answer": own.gold(answer, name),
          "info": self._info(row),
        }
    if not kept:
      raise ValueError(
        f"{paths[0]}: no rows"
        + f" with data_source={place.data_source!r}" * bool(others)
        + f"; it has {', '.join(sorted(others))}" * bool(others)
        + "; give the right file"
      )

  def _info(self, row: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, keys in self.info.items():
      for key in keys:
        if name not in found and key in row:
          found[name] = row[key]
    return found


def _first(
  row: Mapping[str, Any], keys: tuple[str, ...], name: str, what: str
) -> Any:
  for key in keys:
    with contextlib.suppress(LookupError):
      return own.find(row, key)
  raise ValueError(
    f"{name}: has the columns {', '.join(row)}; the {what} is expected in "
    f"{' or '.join(keys)}; give a file in the set's published layout, or read "
    "it with the data set 'own'"
  )


class Rows:
  """A built split as `data.Source`: text decoded row by row.

  Attributes:
    folder: where it lies in the cache.
  """

  def __init__(self, folder: pathlib.Path, fingerprint: str, records: Any):
    self.folder, self.fingerprint = folder, fingerprint
    self._records = records

  def __len__(self) -> int:
    return len(self._records)

  def __getitem__(self, index: int) -> dict[str, Any]:
    record = self._records[index]
    return {
      "question": record["question"].decode(),
      "answer": json.loads(record["answer"]),
      "info": json.loads(record["info"]),
    }


# -- files ---------------------------------------------------------------------


def _from_folder(
  data_dir: str, pattern: str, cache: pathlib.Path
) -> list[pathlib.Path]:
  """Those that fit; files of a remote folder are copied into the cache."""
  if "://" not in data_dir:
    return sorted(pathlib.Path(data_dir).expanduser().glob(pattern))
  import fsspec  # and not etils.epath, which loads TensorFlow for gs://

  try:
    system, root = fsspec.core.url_to_fs(data_dir)
    found = sorted(system.glob(f"{root}/{pattern}"))
    return [_copied(system, path, cache / "remote") for path in found]
  except Exception as e:  # of whatever library reads this kind of folder
    raise ValueError(
      f"data_dir={data_dir!r} cannot be read ({type(e).__name__}: {e}); gs:// "
      "needs the package gcsfs and access to the bucket; or name a folder here"
    ) from e


def _copied(system: Any, path: str, cache: pathlib.Path) -> pathlib.Path:
  """A copy of a remote file as it is now, made once."""
  version = f"{path} {sorted(system.info(path).items())}"
  folder = cache / hashlib.sha256(version.encode()).hexdigest()[:16]
  copy = folder / path.rpartition("/")[2]
  if not copy.exists():
    folder.mkdir(parents=True, exist_ok=True)
    part = copy.with_name(f"{copy.name}.{os.getpid()}")
    system.get_file(path, str(part))
    part.replace(copy)
  return copy


def _from_hub(repo: str, pattern: str) -> list[pathlib.Path]:
  import huggingface_hub

  try:
    folder = huggingface_hub.snapshot_download(
      repo,
      repo_type="dataset",
      allow_patterns=[pattern],
      etag_timeout=_HUB_TIMEOUT_S,
    )
  except Exception as e:  # no network, no such repository, no access, ..
    why = (str(e).strip().splitlines() or [""])[0]
    raise ValueError(
      f"data_dir={HUB!r}: {repo} could not be loaded ({type(e).__name__}: "
      f"{why}); where the hub cannot be reached, write data_dir=FOLDER with "
      "the set's files"
    ) from e
  paths = sorted(pathlib.Path(folder).glob(pattern))
  if not paths:
    raise ValueError(
      f"data_dir={HUB!r}: {repo} has no {pattern}; write data_dir=FOLDER with "
      "the set's files"
    )
  return paths


def _digest(paths: list[pathlib.Path], place: Files) -> str:
  """Names what a build is made of: a changed file is built anew."""
  total = hashlib.sha256(f"{_VERSION} {place.data_source}".encode())
  for path in paths:
    with open(path, "rb") as file:
      total.update(hashlib.file_digest(file, "sha256").digest())
  return total.hexdigest()[:16]


# -- building ------------------------------------------------------------------

# Changed by hand when a row of SETS gives other rows for the same files.
_VERSION = "1.0.0"


def _build(
  folder: pathlib.Path, rows: Callable[[], Iterator[dict[str, Any]]]
) -> "Rows":
  """The rows of a built split; builds it if it is not there whole."""
  name = folder / "fingerprint"

  def named() -> Iterator[dict[str, Any]]:
    # Written before the records are moved to where they are looked for.
    digest = own.Digest()
    for row in rows():
      digest.add(row)
      yield row
    name.write_text(digest.hex())

  builder = _builder_class()(
    rows=named, data_dir=str(folder), file_format="array_record"
  )
  if not builder.data_path.exists():
    shutil.rmtree(folder, ignore_errors=True)  # what an ended process left
    folder.mkdir()
    with contextlib.redirect_stdout(io.StringIO()):
      builder.download_and_prepare()
  records = builder.as_data_source(split="rows")
  return Rows(folder, name.read_text(), records)


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
  """One process at a time; a dead one holds nothing."""
  deadline = time.monotonic() + _LOCK_TIMEOUT_S
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
  except OSError as e:
    raise ValueError(
      f"cache_dir: {path.parent} cannot be written ({e}); write another"
    ) from e
  with open(path, "w") as lock:
    while True:
      try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
      except BlockingIOError:
        if time.monotonic() > deadline:
          raise ValueError(
            f"cache_dir: another process has held {path} for "
            f"{_LOCK_TIMEOUT_S:g} s; end it, or write another cache_dir"
          ) from None
        time.sleep(0.1)
    yield


def _progress(rows: range, name: str) -> Any:
  import tqdm

  # disable=None: only where a terminal shows it.
  return tqdm.tqdm(rows, name, unit=" rows", disable=None, leave=False)


@functools.cache
def _builder_class() -> type:
  """The builder, made when used: TFDS takes a second to import."""
  import tensorflow_datasets as tfds

  tfds.disable_progress_bar()  # it would show one inside the other

  class PublicRows(tfds.core.GeneratorBasedBuilder):
    """A split's rows in their order; answer and info are JSON texts."""

    VERSION = tfds.core.Version(_VERSION)

    def __init__(self, *, rows: Callable[[], Iterator[dict]], **kwargs):
      self._rows = rows
      super().__init__(**kwargs)

    def _info(self):
      text = tfds.features.Text()
      return tfds.core.DatasetInfo(
        builder=self,
        features=tfds.features.FeaturesDict(
          {"question": text, "answer": text, "info": text}
        ),
        disable_shuffling=True,
      )

    def _split_generators(self, dl_manager):
      del dl_manager
      return {"rows": self._generate_examples()}

    def _generate_examples(self):
      for i, row in enumerate(self._rows()):
        texts = {k: json.dumps(row[k], sort_keys=True) for k in row}
        yield i, texts | {"question": row["question"]}

  return PublicRows


# -- what the sets' own forms become -------------------------------------------

_SUFFIX = re.compile(
  r"(?:\s|\\n)*let'?s\s+think\s+step\s+by\s+step\s+and\s+output\s+the\s+final"
  r"\s+answer\s+within\s*\\boxed\{\}\.?\s*$",
  re.IGNORECASE,
)


def _without_suffix(question: str) -> str:
  """DAPO: the instruction that ends each prompt is our agents' to give."""
  return _SUFFIX.sub("", question).strip()


def _after_hashes(answer: str) -> str:
  """GSM8K: what stands behind the solution, without thousands commas."""
  return answer.rpartition("####")[2].replace(",", "").strip()


def _listed(answer: Any) -> list[str] | None:
  """A list of texts, or one that a text spells in Python; None: neither."""
  if isinstance(answer, str):
    try:
      answer = ast.literal_eval(answer)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
      return None
  texts = isinstance(answer, list) and all(isinstance(a, str) for a in answer)
  return answer if texts else None


def _last_listed(answer: Any) -> Any:
  """Minerva: some files hold all boxes of a solution.

  The last one is its answer; those before are the same in another form, or
  steps on the way.
  """
  listed = _listed(answer)
  return answer if listed is None else "".join(listed[-1:])


def _joined(answer: Any) -> Any:
  """OlympiadBench: several values are one answer, in one text."""
  listed = _listed(answer)
  return answer if listed is None else ", ".join(listed)


# -- the table -----------------------------------------------------------------


def _math_test(name: str, about: str, repo: str, hub: str, **kwargs: Any):
  """A test set of the paper's math experiments.

  The authors' preprocessing reads the columns problem and answer of each
  repository and writes env_kwargs into one test.parquet for all.
  """
  return PublicSet(
    name=name,
    about=about,
    repo=repo,
    hub={"test": Files(hub)},
    files={
      "test": (
        Files(f"{name}.jsonl"),
        Files("drmas_math/test.parquet", name),
        Files("test.parquet", name),
      )
    },
    question=("env_kwargs.question", "problem"),
    answer=("env_kwargs.ground_truth", "answer"),
    **kwargs,
  )


_SEARCH = dict(
  repo="PeterJinGo/nq_hotpotqa_train",
  question=("question", "env_kwargs.question"),
  answer=(
    "golden_answers",
    "reward_model.ground_truth.target",
    "env_kwargs.ground_truth.target",
  ),
  info={"data_source": ("data_source", "source")},
)


def _search(
  name: str,
  about: str,
  *lines: str,
  splits: tuple[str, ...] = ("test",),
  data_source: str | None = None,
) -> PublicSet:
  """A set of the paper's search experiments, in train.parquet and test.parquet.

  The authors' preprocessing keeps those names. `lines` are JSON-lines files of
  the test split.
  """
  hub = {s: Files(f"{s}.parquet", data_source or name) for s in splits}
  files = {
    split: (
      *(Files(line) for line in lines if split == "test"),
      Files(f"{name}_{split}.jsonl"),
      dataclasses.replace(place, pattern=f"drmas_search/{place.pattern}"),
      place,
    )
    for split, place in hub.items()
  }
  return PublicSet(name=name, about=about, hub=hub, files=files, **_SEARCH)


# Column names are as the authors' preprocessing and others' code read them.
# What nobody's code was seen to read is marked "not verified".
_SETS = (
  PublicSet(
    name="dapo_math",
    about="DAPO-Math as the paper trains on it, integer answers",
    # Columns prompt (one user message), reward_model, ability.
    repo="aaabiao/dapo_filter",
    hub={"train": Files("train.parquet")},  # not verified: the file's name
    files={
      "train": (
        Files("dapo_math.jsonl"),
        Files("drmas_math/train.parquet"),
        Files("train.parquet"),
      )
    },
    question=("env_kwargs.question", "prompt.0.content", "problem"),
    answer=("env_kwargs.ground_truth", "reward_model.ground_truth", "answer"),
    ask=_without_suffix,
  ),
  PublicSet(
    name="math",
    about="MATH, training problems (7472 rows; 2 have no answer)",
    repo="PrimeIntellect/Hendrycks-Math",
    hub={"train": Files("data/train-*.parquet")},
    files={"train": (Files("math_train.jsonl"),)},
    question=("problem", "question"),
    answer=("answer",),
    drop_empty=True,
  ),
  PublicSet(
    name="gsm8k",
    about="word problems of primary school (7473 and 1319 rows)",
    repo="openai/gsm8k",
    hub={s: Files(f"main/{s}-*.parquet") for s in ("train", "test")},
    files={s: (Files(f"gsm8k_{s}.jsonl"),) for s in ("train", "test")},
    question=("question", "problem"),
    answer=("answer",),
    gold=_after_hashes,
  ),
  _math_test(
    "aime24",
    "AIME 2024 (30 rows)",
    "HuggingFaceH4/aime_2024",
    "data/train-*.parquet",
  ),
  _math_test(
    "aime25",
    "AIME 2025 (30 rows)",
    "MathArena/aime_2025",
    "data/train-*.parquet",
  ),
  _math_test(
    "amc23",
    "AMC 12 of 2023 (40 rows)",
    "knoveleng/AMC-23",
    "data/train-*.parquet",  # not verified: the name of the file
  ),
  _math_test(
    "math500",
    "500 test problems of MATH",
    "HuggingFaceH4/MATH-500",
    "test.jsonl",
  ),
  _math_test(
    "minerva",
    "undergraduate science with answers in text (272 rows)",
    "zwhe99/simplerl-minerva-math",
    "data/test-*.parquet",  # not verified: the name of the file
    gold=_last_listed,
  ),
  _math_test(
    "olympiadbench",
    "olympiad problems in English without pictures (675 rows)",
    "realtreetune/olympiadbench",
    "data/test-*.parquet",  # not verified: the name, and whether answer is text
    gold=_joined,
  ),
  PublicSet(
    name="nq_hotpotqa",
    about="NQ and HotpotQA, as the paper trains search on them (169615 rows)",
    hub={"train": Files("train.parquet")},
    files={
      "train": (
        Files("nq_hotpotqa_train.jsonl"),
        Files("drmas_search/train.parquet"),
        Files("train.parquet"),
      )
    },
    **_SEARCH,
  ),
  _search(
    "nq",
    "Natural Questions",
    "nq_test_1000.jsonl",
    "nq_wiki18.jsonl",
    splits=("train", "test"),
  ),
  _search(
    "hotpotqa",
    "two-hop questions; its dev split",
    "hotpotqa_dev_1000.jsonl",
    splits=("train", "test"),
  ),
  _search("triviaqa", "quiz questions", "triviaqa_wiki18.jsonl"),
  _search("popqa", "questions on rare entities", "popqa_wiki18.jsonl"),
  _search(
    "two_wiki",
    "2WikiMultihopQA; its dev split",
    "2wikimultihopqa_matched.jsonl",
    data_source="2wikimultihopqa",
  ),
  _search(
    "musique",
    "questions of 2 to 4 hops; its dev split",
    "musique_dev_1000.jsonl",
  ),
  _search(
    "bamboogle",
    "125 two-hop questions, written by hand",
    "bamboogle_wiki18.jsonl",
  ),
)
SETS = {public.name: public for public in _SETS}
