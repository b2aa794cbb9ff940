"""Worker processes with a hard limit of time and memory for one verdict.

`verdict` may be called from any thread. Workers are plain child processes that
import no jax and no numpy: nothing is forked, the parent's main module is not
imported again, and a worker ends with its parent. They start when they are
first needed; starting does not count as time of a verdict. A worker that is
late, or dies, is ended and replaced, and the caller gets a GraderFault: never a
plain False (RULES 20).
"""

import atexit
import collections
import contextlib
import json
import os
import pathlib
import select
import subprocess
import sys
import threading
import time

from drmas_jax.types import TransientError

LIMIT_S = 2.0
MEMORY_MB = 500
_START_S = 60.0
_MAX_WORKERS = 4
_CACHED = 1 << 16
_ROOT = pathlib.Path(__file__).parents[2]
_MAIN = (
  "import sys; sys.path.insert(0, {root!r}); "
  "from drmas_jax.grading import worker; worker.main({memory}, {alarm})"
)


class GraderFault(TransientError):
  """There is no verdict: time, memory, or a defect. It loses the episode.

  Attributes:
    wall_clock: whether a clock decided, so that the run is not reproducible.
  """

  def __init__(self, message: str, wall_clock: bool = False):
    super().__init__(message)
    self.wall_clock = wall_clock


class Pool:
  """Up to `size` workers and a cache of their verdicts."""

  def __init__(
    self,
    size: int | None = None,
    *,
    limit_s: float = LIMIT_S,
    memory_mb: int = MEMORY_MB,
  ):
    """Starts nothing yet.

    Args:
      size: processes; None: one a core, at most four.
      limit_s: seconds of one verdict, in a worker that is ready.
      memory_mb: address space of a worker.
    """
    self.size = size or min(_MAX_WORKERS, os.cpu_count() or 1)
    self.limit_s = limit_s
    self.memory_mb = memory_mb
    self.num_faults = 0
    self._lock = threading.Lock()
    self._seats = threading.Semaphore(self.size)
    self._idle: list[_Worker] = []
    self._cache: collections.OrderedDict = collections.OrderedDict()

  def verdict(self, a: str, b: str, *, percent: bool = False) -> bool:
    """`answers.verdict` with algebra.

    Args:
      a: one answer.
      b: another one.
      percent: b is a gold that may be a percentage.

    Raises:
      GraderFault: no verdict within the limits.
    """
    key = (a, b, percent) if percent or a <= b else (b, a, percent)
    with self._lock:
      if key in self._cache:
        self._cache.move_to_end(key)
        return self._cache[key]
    verdict = self._ask(key)
    with self._lock:
      self._cache[key] = verdict
      if len(self._cache) > _CACHED:
        self._cache.popitem(last=False)
    return verdict

  def _ask(self, question: tuple[str, str, bool]) -> bool:
    with self._seats:
      with self._lock:
        worker = self._idle.pop() if self._idle else None
      worker = worker or _Worker(self.limit_s, self.memory_mb)
      try:
        answer = worker.ask(question)
      except BaseException as e:
        worker.close()
        if isinstance(e, GraderFault):
          self._count_fault()
        raise
      with self._lock:
        self._idle.append(worker)
    if "error" in answer:
      self._count_fault()
      raise GraderFault(answer["error"])
    return answer["same"]

  def _count_fault(self) -> None:
    with self._lock:
      self.num_faults += 1

  def close(self) -> None:
    """Ends the workers that are idle; the pool can still be used."""
    with self._lock:
      workers, self._idle = self._idle, []
    for worker in workers:
      worker.close()


class _Worker:
  """A process that is ready for questions."""

  def __init__(self, limit_s: float, memory_mb: int):
    self.limit_s = limit_s
    code = _MAIN.format(root=str(_ROOT), memory=memory_mb, alarm=5 * limit_s)
    self._process = subprocess.Popen(
      [sys.executable, "-c", code],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      start_new_session=True,  # a Ctrl-C is the parent's to handle
    )
    self._read = b""
    try:
      self._line(_START_S, "start")
    except BaseException:
      self.close()
      raise

  def ask(self, question: tuple[str, str, bool]) -> dict:
    """The worker's answer, or a GraderFault if it is late or gone."""
    try:
      self._process.stdin.write(json.dumps(question).encode() + b"\n")
      self._process.stdin.flush()
    except OSError:
      raise GraderFault("a grader process is gone") from None
    return self._line(self.limit_s, "answer")

  def _line(self, seconds: float, what: str) -> dict:
    deadline = time.monotonic() + seconds
    output = self._process.stdout.fileno()
    while b"\n" not in self._read:
      left = deadline - time.monotonic()
      if left <= 0 or not select.select([output], [], [], left)[0]:
        raise GraderFault(f"no {what} within {seconds:g} s", wall_clock=True)
      if not (piece := os.read(output, 1 << 16)):
        raise GraderFault(f"a grader process died ({what})")
      self._read += piece
    line, _, self._read = self._read.partition(b"\n")
    return json.loads(line)

  def close(self) -> None:
    self._process.kill()
    self._process.wait()
    self._process.stdout.close()
    with contextlib.suppress(OSError):  # what it could not be told any more
      self._process.stdin.close()


_POOL = Pool()
atexit.register(_POOL.close)
verdict = _POOL.verdict
