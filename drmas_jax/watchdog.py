"""A thread that tells what is being waited for, once that takes too long.

    with Watchdog(workdir / "stacks", factor=2, floor_s=60, say=print) as watch:
      with watch.during("step"):
        with watch.during("rollout", rollout.waiting):
          ...

The outermost sections are timed, each against the median of those of its own
name: an evaluation or a save counts as what it is. Those within say where the
main thread is, and what it waits for; they are asked only when it is too long.
The main thread does no more than to put a section on a list and to take it off.
"""

import collections
import contextlib
import pathlib
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from drmas_jax import hosts

_COMPILE = 2  # the first sections of a name say nothing of how long others take
_KNOWN = 2  # sections behind them, for a median
_KEPT = 32
_PAUSE_S = 5.0  # between two looks, or a quarter of the floor
_FRAMES = 3  # of the main thread, in the line


class _Section(NamedTuple):
  """What the main thread is in.

  Attributes:
    name: of the section.
    describe: what it waits for; "" if there is nothing to say.
    since: when it began, by the clock.
  """

  name: str
  describe: Callable[[], str]
  since: float


class Watchdog:
  """See the module's docstring.

  It watches the thread that makes it, from `with` to its end.

  Args:
    folder: where the stacks of all threads go, in <time>.txt; None: they are
      said.
    factor: of the median, for a wait to be too long.
    floor_s: shorter ones never are.
    say: takes what is said, from the watching thread.
    clock: seconds, for tests.
  """

  def __init__(
    self,
    folder: pathlib.Path | None,
    *,
    factor: float,
    floor_s: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
  ):
    self._folder, self._say, self._clock = folder, say, clock
    self._factor, self._floor_s = factor, floor_s
    self._main = threading.get_ident()
    self._sections: list[_Section] = []
    self._done: collections.Counter = collections.Counter()  # by name
    self._took: dict[str, collections.deque[float]] = {}  # behind _COMPILE
    self._told: tuple[_Section | None, float] = (None, 0.0)  # and when again
    self._end = threading.Event()
    self._thread: threading.Thread | None = None

  def __enter__(self) -> "Watchdog":
    self._end.clear()
    self._thread = threading.Thread(
      target=self._watch, name="watchdog", daemon=True
    )
    self._thread.start()
    return self

  def __exit__(self, *unused) -> None:
    self._end.set()
    self._thread.join(timeout=_PAUSE_S)

  # -- the main thread's side --------------------------------------------------

  @contextlib.contextmanager
  def during(
    self, name: str, describe: Callable[[], str] = lambda: ""
  ) -> Iterator[None]:
    """A section of the main thread; one within others says more of them.

    Args:
      name: sections of one name are expected to take about as long.
      describe: called by the watching thread, and only if the wait is long.
    """
    section = _Section(name, describe, self._clock())
    self._sections.append(section)
    try:
      yield
    finally:
      self._sections.pop()
    if self._sections:
      return
    self._done[name] += 1
    if self._done[name] > _COMPILE:
      took = self._took.setdefault(name, collections.deque(maxlen=_KEPT))
      took.append(self._clock() - section.since)

  # -- the watching thread's side ----------------------------------------------

  def _watch(self) -> None:
    while not self._end.wait(min(_PAUSE_S, self._floor_s / 4)):
      try:
        self.look()
      except OSError as e:  # a full disk is not what the run waits for
        self._say(f"watchdog: {e}")

  def look(self) -> None:
    """Tells of a wait that is too long; again when it has lasted twice as long
    as the last time."""
    sections = list(self._sections)
    took = list(self._took.get(sections[0].name, ())) if sections else []
    if len(took) < _KNOWN:
      return
    outer, median = sections[0], statistics.median(took)
    told, limit_s = self._told
    if told is not outer:
      limit_s = max(self._floor_s, self._factor * median)
    waited_s = self._clock() - outer.since
    if waited_s >= limit_s:
      self._told = outer, 2 * waited_s
      self._tell(sections, waited_s, median)

  def _tell(
    self, sections: Sequence[_Section], waited_s: float, median: float
  ) -> None:
    frames = sys._current_frames()
    names = " > ".join(s.name for s in sections)
    said = [
      f"{names}: for {waited_s:.0f} s, and the median is {median:.0f} s",
      *map(_described, sections),
      hosts.waiting(),
      f"the main thread is at {_brief(frames.get(self._main))}",
    ]
    stacks = _stacks(frames)
    if self._folder is None:
      said.append(f"all threads:\n{stacks}")
    else:
      self._folder.mkdir(parents=True, exist_ok=True)
      path = self._folder / f"{time.strftime('%Y%m%d-%H%M%S')}.txt"
      text = "; ".join(filter(None, said))
      path.write_text(f"{text}\n\n{stacks}", errors="backslashreplace")
      said.append(f"the stacks of all threads are in {path}")
    self._say("; ".join(filter(None, said)))


def _described(section: _Section) -> str:
  """The main thread may change what is read, and is not waited for."""
  for _ in range(3):
    try:
      return section.describe()
    except RuntimeError:  # "dictionary changed size during iteration"
      continue
    except Exception as e:
      return f"({section.name} cannot be described: {e!r})"
  return ""


def _brief(frame) -> str:
  """The innermost frames, from within."""
  stack = traceback.extract_stack(frame)[-_FRAMES:] if frame else []
  return " < ".join(
    f"{pathlib.Path(f.filename).name}:{f.lineno} {f.name}"
    for f in reversed(stack)
  )


def _stacks(frames) -> str:
  names = {t.ident: t.name for t in threading.enumerate()}
  return "\n".join(
    f"thread {names.get(ident, '?')} ({ident}), innermost call last:\n"
    + "".join(traceback.format_stack(frame))
    for ident, frame in frames.items()
  )
