"""What a run leaves for people: numbers, a progress line, episodes.

    metrics.jsonl       one line a step
    tensorboard/        the same as events
    wandb_id            of the same on Weights & Biases
    transcripts/*.jsonl whole episodes, bounded on disk
    config.json summary.json

`logging.writers` lists who gets the numbers: rows of `WRITERS`, and modules of
a user's own with `make(config, workdir, first)`. What `make` returns has those
of the methods of `Writer` that it cares for, which are those of
`clu.metric_writers.MetricWriter` and `write_episodes`; so one of clu's can
stand in the list (they need TensorFlow, which is why ours exist). What shows a
run never ends it: a writer that raises is left out from then on, and a warning
says so once. One that cannot be made does end it, before it has begun.

Whole files are renamed into place; those that grow are cut back to a
checkpoint's step on resume.
"""

import collections
import contextlib
import itertools
import json
import math
import os
import pathlib
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, TextIO

import numpy as np

from drmas_jax import config as config_lib
from drmas_jax import usercode


class Writer:
  """What is told of a run; every method does nothing, so this one is null."""

  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    """Numbers of a step; several calls may add to one step."""

  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    """Snippets by name."""

  def write_hparams(self, hparams: Mapping[str, Any]) -> None:
    """The flat config, once, at the start of a new run."""

  def write_episodes(self, episodes: Sequence[Mapping[str, Any]]) -> None:
    """What this host has played in the step, as lines of `transcripts`; first
    those that are written there."""

  def write_summaries(self, step, values, metadata=None) -> None: ...

  def write_images(self, step, images) -> None: ...

  def write_videos(self, step, videos) -> None: ...

  def write_audios(self, step, audios, *, sample_rate) -> None: ...

  def write_histograms(self, step, arrays, num_buckets=None) -> None: ...

  def flush(self) -> None:
    """The step is complete: write what is held back."""

  def close(self) -> None:
    """Flushes and lets go of the files."""


class MultiWriter(Writer):
  """Hands every call to each writer of a list that has the method.

  One that raises is taken off the list, with a warning.
  """

  def __init__(self, writers: Iterable[Any]):
    self.writers = list(writers)

  def _each(self, method: str, *args, **kwargs) -> None:
    for writer in tuple(self.writers):
      if not hasattr(writer, method):
        continue
      try:
        getattr(writer, method)(*args, **kwargs)
      except Exception as e:
        self.writers.remove(writer)
        name = f"{type(writer).__module__}.{type(writer).__qualname__}"
        doing = f"{method} of the writer {name}"
        print(
          f"drmas_jax: WARNING: {usercode.describe(e, doing)}\n"
          "  it gets nothing more, and the run goes on",
          file=sys.stderr,
          flush=True,
        )

  def write_scalars(self, step, scalars):
    self._each("write_scalars", step, scalars)

  def write_texts(self, step, texts):
    self._each("write_texts", step, texts)

  def write_hparams(self, hparams):
    self._each("write_hparams", hparams)

  def write_episodes(self, episodes):
    self._each("write_episodes", episodes)

  def write_summaries(self, step, values, metadata=None):
    self._each("write_summaries", step, values, metadata)

  def write_images(self, step, images):
    self._each("write_images", step, images)

  def write_videos(self, step, videos):
    self._each("write_videos", step, videos)

  def write_audios(self, step, audios, *, sample_rate):
    self._each("write_audios", step, audios, sample_rate=sample_rate)

  def write_histograms(self, step, arrays, num_buckets=None):
    self._each("write_histograms", step, arrays, num_buckets)

  def flush(self):
    self._each("flush")

  def close(self):
    self._each("close")


class _ByStep(Writer):
  """Gathers a step's numbers until the next step, `flush` or `close`."""

  def __init__(self):
    self._step: int | None = None
    self._held: dict[str, float] = {}

  def write_scalars(self, step, scalars):
    if step != self._step:
      self.flush()
    self._step = step
    self._held.update({k: float(v) for k, v in scalars.items()})

  def flush(self):
    if self._held:
      self._emit(self._step, self._held)
      self._held = {}

  def close(self):
    self.flush()

  def _emit(self, step: int, scalars: Mapping[str, float]) -> None:
    raise NotImplementedError


class JsonLines(_ByStep):
  """metrics.jsonl: {"step": 3, "reward/team": 0.5, ..}; null if not finite."""

  @classmethod
  def make(cls, config: Any, workdir: pathlib.Path, first: int) -> "JsonLines":
    del config
    path = workdir / "metrics.jsonl"
    truncate_after(path, first - 1)
    return cls(path)

  def __init__(self, path: pathlib.Path):
    super().__init__()
    self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115

  def _emit(self, step, scalars):
    line = {"step": step} | {
      k: v if math.isfinite(v) else None for k, v in scalars.items()
    }
    self._file.write(json.dumps(line) + "\n")
    self._file.flush()

  def close(self):
    super().close()
    self._file.close()


_MOST_EVENTS = 100_000  # that wait to be written


class TensorBoard(Writer):
  """Events, one file a start; a board hides what older files say of `first`
  and later steps."""

  @classmethod
  def make(
    cls, config: Any, workdir: pathlib.Path, first: int
  ) -> "TensorBoard":
    del config
    return cls(workdir / "tensorboard", first)

  def __init__(self, folder: pathlib.Path, first: int = 0):
    import tensorboardX

    # The file's name holds the time in seconds only, and would be overwritten.
    self._events = tensorboardX.SummaryWriter(
      str(folder),
      purge_step=first,
      filename_suffix=f".{first}",
      max_queue=_MOST_EVENTS,
    )

  def _check(self):
    """Its thread ends where the disk is full, and nobody empties its queue: a
    full one would be waited for without end."""
    events = self._events.file_writer.event_writer
    if events._worker is not None and not events._worker.is_alive():
      events._event_queue.cancel_join_thread()
      raise OSError("its thread has ended, as where the disk is full")

  def write_scalars(self, step, scalars):
    self._check()
    for name, value in scalars.items():
      self._events.add_scalar(name, float(value), step)

  def write_texts(self, step, texts):
    self._check()
    for name, text in texts.items():
      self._events.add_text(name, text, step)

  def write_hparams(self, hparams):
    rows = "\n".join(f"|{k}|`{v}`|" for k, v in hparams.items())
    self._events.add_text("config", f"|key|value|\n|-|-|\n{rows}", 0)

  def flush(self):
    self._check()
    self._events.flush()

  def close(self):
    self._check()
    self._events.close()


class Wandb(_ByStep):
  """Weights & Biases. The id of its run is kept, so that a resume goes on with
  the curves; what a kill made the run do twice is there twice.

  Project, entity, key and mode are wandb's own environment variables
  (WANDB_PROJECT, .., WANDB_MODE=offline).
  """

  @classmethod
  def make(cls, config: Any, workdir: pathlib.Path, first: int) -> "Wandb":
    del config
    path = workdir / "wandb_id"
    if not first or not path.exists():
      write_text(path, secrets.token_hex(8))
    return cls(workdir, path.read_text())

  def __init__(self, folder: pathlib.Path, run_id: str):
    import wandb

    super().__init__()
    self._run = wandb.init(
      id=run_id,
      resume="allow",
      name=folder.resolve().name,
      dir=str(folder),
      settings=wandb.Settings(console="off"),
    )
    # Its own steps never go back, and those of a run that was killed do.
    self._run.define_metric("*", step_metric="step")

  def write_hparams(self, hparams):
    self._run.config.update(dict(hparams), allow_val_change=True)

  def _emit(self, step, scalars):
    self._run.log({"step": step, **scalars})

  def close(self):
    super().close()
    self._run.finish()


# What `logging.writers` names without a dot.
WRITERS = {"jsonl": JsonLines, "tensorboard": TensorBoard, "wandb": Wandb}


class Progress:
  """A progress bar on a terminal; elsewhere a line when one is due.

  Args:
    unit: of what is counted, such as "step".
    total: how many there are.
    first: how many were done before it began (on resume).
    stream: where to (stderr); a bar if it is a terminal.
    clock: seconds, for tests.
    keep: whether the bar stays at the end.
  """

  def __init__(
    self,
    unit: str,
    total: int,
    first: int = 0,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
    keep: bool = True,
  ):
    self._unit, self._total, self._clock = unit, total, clock
    self._stream = sys.stderr if stream is None else stream
    self._began: tuple[int, float] | None = None
    self._bar = None
    if self._stream.isatty():
      import tqdm

      self._bar = tqdm.tqdm(
        total=total,
        initial=first,
        file=self._stream,
        dynamic_ncols=True,
        unit=unit,
        leave=keep,
      )

  def count_from(self, done: int) -> None:
    """The time left goes by what comes after this."""
    self._began = done, self._clock()

  def show(self, done: int, text: str, due: bool = True) -> None:
    """`text` says how it goes; a line is printed only where it is due."""
    if self._bar is not None:
      self._bar.set_postfix_str(text, refresh=False)
      self._bar.update(done - self._bar.n)
      self._bar.refresh()
    elif due:
      line = f"{self._unit} {done}/{self._total}  {text}{self._left(done)}"
      print(line.rstrip(), file=self._stream, flush=True)

  def _left(self, done: int) -> str:
    if self._began is None or done <= self._began[0]:
      return ""
    first, then = self._began
    seconds = (self._clock() - then) / (done - first) * (self._total - done)
    return f"  {_duration(seconds)} left"

  def close(self) -> None:
    if self._bar is not None:
      self._bar.close()


class Console(_ByStep):
  """The progress of a run, step by step.

  Where there is no terminal, a line comes with the first and the last step, and
  in between once 5 % of the steps or 10 s have passed since the one before.

  Args:
    total: steps of the run.
    first: steps done before it began (on resume).
    stream: where to; a bar if it is a terminal.
    clock: seconds, for tests.
  """

  def __init__(
    self,
    total: int,
    first: int = 0,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    super().__init__()
    self._total, self._clock = total, clock
    self._known: dict[str, float] = {}
    self._counting = False
    self._last: tuple[int, float] | None = None
    self._progress = Progress("step", total, first, stream, clock)

  def _emit(self, step, scalars):
    now = self._clock()
    self._known.update(scalars)
    if not self._counting and step > 0:
      self._counting = True
      self._progress.count_from(step)  # after the first step, which compiles
    due = self._due(step, now)
    self._progress.show(step, progress(self._known), due)
    if due:
      self._last = step, now

  def _due(self, step: int, now: float) -> bool:
    if self._last is None or step >= self._total:
      return True
    last, then = self._last
    first_step = last == 0 and step > 0
    return first_step or (step - last) * 20 >= self._total or now - then >= 10

  def close(self):
    super().close()
    self._progress.close()


def progress(scalars: Mapping[str, float]) -> str:
  """The numbers to watch, in one line; those that there are."""
  parts = []
  if "reward/team" in scalars:
    parts.append(f"reward {scalars['reward/team']:.3f}")
  for name, value in scalars.items():
    if re.fullmatch(r"eval/avg@\d+", name):
      parts.append(f"held-out {name.removeprefix('eval/')} {value:.3f}")
  norms = [
    f"{name.removeprefix('grad_norm/')} {value:.2g}"
    for name, value in scalars.items()
    if re.fullmatch(r"grad_norm/[^/]+", name)
  ]
  if norms:
    parts.append("grad norm " + ", ".join(norms))
  if "rollout/tokens_per_s" in scalars:
    parts.append(f"{scalars['rollout/tokens_per_s']:.0f} tokens/s")
  return "  ".join(parts)


def _duration(seconds: float) -> str:
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f"{hours}:{minutes:02}:{seconds:02}"
  return f"{minutes}:{seconds:02}"


# -- files that grow -----------------------------------------------------------


def truncate_after(path: pathlib.Path, step: int) -> None:
  """Drops lines of later steps, and a last line that a kill left half done."""
  if not path.exists():
    return
  with replacing(path) as out, open(path, "rb") as lines:
    for line in lines:
      record = _parse(line)
      if record is not None and record["step"] <= step:
        out.write(line)


def _parse(line: bytes) -> dict[str, Any] | None:
  """None for a line that a kill cut short; only its end says it is whole."""
  return json.loads(line) if line.endswith(b"\n") else None


class Transcripts(Writer):
  """Lines of `transcripts`, in numbered files; the oldest go first.

  Args:
    folder: made if it is not there.
    limit_mb: of all files together, in 10^6 bytes; 0 writes nothing.
    resume_from: episodes of later steps are dropped at the start.
    most: of those that are written at once, so many are kept; None: all.
  """

  _FILES = 8  # so that at most an eighth of what fits is dropped at a time

  def __init__(
    self,
    folder: pathlib.Path,
    limit_mb: float,
    resume_from: int = -1,
    most: int | None = None,
  ):
    self._folder = folder
    self._limit, self._most = int(limit_mb * 1e6), most
    folder.mkdir(parents=True, exist_ok=True)
    for path in self._paths():
      truncate_after(path, resume_from)
      if path.stat().st_size == 0:
        path.unlink()
    # The oldest first.
    self._sizes = {p: p.stat().st_size for p in self._paths()}

  def _paths(self) -> list[pathlib.Path]:
    return sorted(self._folder.glob("*.jsonl"))

  def write_episodes(self, episodes):
    held: dict[pathlib.Path, list[bytes]] = {}
    for episode in itertools.islice(episodes, self._most):
      # A lone surrogate becomes an escape that JSON reads back.
      line = json_line(episode).encode(errors="backslashreplace")
      if len(line) <= self._limit:
        held.setdefault(self._place(len(line)), []).append(line)
    for path, lines in held.items():
      if path in self._sizes:  # there may be more than has room
        with open(path, "ab") as f:
          f.write(b"".join(lines))

  def _place(self, num_bytes: int) -> pathlib.Path:
    """The file for a line; makes room for it."""
    if not self._sizes:
      self._sizes[self._folder / "000000.jsonl"] = 0
    path = next(reversed(self._sizes))
    size = self._sizes[path]
    if size and size + num_bytes > self._limit // self._FILES:
      path = self._folder / f"{int(path.stem) + 1:06}.jsonl"
      self._sizes[path] = 0
    while sum(self._sizes.values()) + num_bytes > self._limit:
      oldest = next(iter(self._sizes))
      oldest.unlink(missing_ok=True)  # it may be held still
      del self._sizes[oldest]
    self._sizes[path] += num_bytes
    return path


def json_line(record: Mapping[str, Any]) -> str:
  """A line of a jsonl file; what JSON does not know becomes text."""
  return _encode(record) + "\n"


# -- files that are replaced whole ---------------------------------------------


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[BinaryIO]:
  """A file that takes the place of `path` once it is whole and on disk."""
  temporary = path.with_name(f".{path.name}.tmp")
  with open(temporary, "wb") as f:
    yield f
    f.flush()
    os.fsync(f.fileno())
  temporary.replace(path)


def write_json(path: pathlib.Path, value: Any, indent: int | None = 2) -> None:
  """Plain data, and numpy's numbers and arrays."""
  write_text(path, json.dumps(value, indent=indent, default=_plain) + "\n")


def write_text(path: pathlib.Path, text: str) -> None:
  with replacing(path) as f:
    f.write(text.encode())


def _plain(value: Any) -> Any:
  """What `json` cannot write by itself: numpy's types as numbers, else str."""
  if isinstance(value, (np.ndarray, np.generic)):
    return value.tolist()
  return dict(value) if isinstance(value, Mapping) else str(value)


# Made once, and without a look for cycles, as there may be many short lines.
_encode = json.JSONEncoder(
  default=_plain, ensure_ascii=False, check_circular=False
).encode


def read_metrics(
  path: pathlib.Path,
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  """{name: (steps, values)} of a metrics.jsonl, one under way too."""
  by_name: dict[str, dict[int, float]] = collections.defaultdict(dict)
  with open(path, "rb") as lines:
    for record in map(_parse, lines):
      for name, value in (record or {}).items():
        if name != "step" and value is not None:
          by_name[name][record["step"]] = value
  return {
    name: (np.array(list(at)), np.array(list(at.values())))
    for name, at in by_name.items()
  }


def matching(metrics: Mapping[str, Any], pattern: str) -> dict[str, Any]:
  """{first group of the pattern: what is there}, in the order of the names."""
  found = ((re.fullmatch(pattern, name), name) for name in sorted(metrics))
  return {m.group(1): metrics[name] for m, name in found if m}


def table(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
  """Before and after, for the terminal; keys in the order of `before`.

  Args:
    before: {name: value}, or {name: (value, low, high)} with an interval.
    after: likewise.
  """
  rows = [("", "before", "after", "change")]
  for name in before:
    if name in after:
      change = _value(after[name]) - _value(before[name])
      rows.append(
        (name, shown(before[name]), shown(after[name]), f"{change:+.3f}")
      )
  return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
  """Lines of a table: the first column to the left, the others to the right."""
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return "\n".join(
    "  ".join(
      cell.rjust(width) if i else cell.ljust(width)
      for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ).rstrip()
    for row in rows
  )


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """A table of cells as Markdown, in columns that a terminal shows too; the
  first column holds names, the others numbers."""
  widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
  rule = [
    "-" * w if not i else "-" * (w - 1) + ":" for i, w in enumerate(widths)
  ]
  lines = []
  for row in (header, rule, *rows):
    cells = [
      cell.rjust(width) if i else cell.ljust(width)
      for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines)


def _value(entry: Any) -> float:
  return float(entry[0] if isinstance(entry, Sequence) else entry)


def shown(entry: Any) -> str:
  """A number, or (value, low, high) as a value with its interval."""
  if not isinstance(entry, Sequence):
    return f"{entry:.3f}"
  value, low, high = entry
  return f"{value:.3f} [{low:.3f}, {high:.3f}]"


# -- all of it together --------------------------------------------------------


class RunWriter(MultiWriter):
  """Everything a run writes into its workdir and on the terminal.

  Call `flush` at the end of a step, and before a checkpoint of it: what a
  resume keeps is what was flushed.

  Args:
    workdir: made if it is not there.
    total_steps: of the run.
    names: of writers, as `logging.writers` lists them.
    config: the run's, for writers of a user's own.
    transcripts_mb: limit of the transcripts on disk.
    whole: so many episodes of a step, the first, go into the transcripts.
    resume_from: step of the checkpoint that the run goes on from; what came
      after it is cut. None: a new run, which starts from empty files.
    primary: False on all processes but the first: nothing is written.
    extra: further writers, which come last.

  Raises:
    ConfigError: a writer is not there.
    UserError: a writer cannot be made.
  """

  def __init__(
    self,
    workdir: str | pathlib.Path,
    total_steps: int,
    *,
    names: Sequence[str] = ("jsonl",),
    config: config_lib.Config | None = None,
    transcripts_mb: float = 64.0,
    whole: int | None = None,
    resume_from: int | None = None,
    primary: bool = True,
    extra: Iterable[Any] = (),
  ):
    self.workdir = pathlib.Path(workdir)
    self.primary = primary
    if not primary:
      super().__init__(())
      return
    self._listens = any("." in name for name in names)  # one of a user's own
    step = -1 if resume_from is None else resume_from
    self.workdir.mkdir(parents=True, exist_ok=True)
    super().__init__(
      (
        *(_make(name, config, self.workdir, step + 1) for name in names),
        Console(total_steps, first=max(step, 0)),
        Transcripts(self.workdir / "transcripts", transcripts_mb, step, whole),
        *extra,
      )
    )

  def write_episodes(self, episodes: Iterable[Mapping[str, Any]]) -> None:
    """Lines of `transcripts`, made only where somebody wants them.

    Args:
      episodes: all of the step that this host has played.
    """
    if self.primary:
      super().write_episodes(list(episodes) if self._listens else episodes)

  def write_json(self, name: str, value: Any) -> None:
    """config.json, summary.json and the like."""
    if self.primary:
      write_json(self.workdir / name, value)


def _make(name: str, config: Any, workdir: pathlib.Path, first: int) -> Any:
  """A writer by its name; at the start of a run a fault of it ends the run."""
  make = config_lib.load_module("writers", name).make
  with usercode.blaming(f"making the writer {name!r}", code=make):
    return make(config, workdir, first)
