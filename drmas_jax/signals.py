"""Ctrl-C and SIGTERM as a wish that what is under way ends well."""

import os
import signal
import threading
import time
from typing import Any

from drmas_jax.types import Stopped

_GRACE_S = 30.0  # a step may go on for this long after SIGTERM

_interrupted = False


def listen() -> None:
  """Until there is a `Stop`, Ctrl-C is remembered beside being raised: raised
  within a callback of a library it would be lost, and the run would begin."""
  global _interrupted
  _interrupted = False

  def note(number: int, frame: Any) -> None:
    global _interrupted
    _interrupted = True
    signal.default_int_handler(number, frame)

  if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, note)


class Stop:
  """SIGINT and SIGTERM as a wish; a second one ends the process at once.

  Args:
    grace_s: what is under way may go on for so long; none: as a step may.
    says: what becomes of it.

  Raises:
    KeyboardInterrupt: it came while all was made ready.
  """

  def __init__(
    self,
    grace_s: float | None = None,
    says: str = "the step is finished (or given up after {grace_s:.0f} s), "
    "then the run is saved",
  ):
    self._grace_s = _GRACE_S if grace_s is None else grace_s
    self._says = says.format(grace_s=self._grace_s)
    self.signal = 0
    self._since = 0.0
    # Python hears of signals in its main thread alone.
    main = threading.current_thread() is threading.main_thread()
    heard = (signal.SIGINT, signal.SIGTERM) if main else ()
    if _interrupted:
      raise KeyboardInterrupt
    self._before = {s: signal.signal(s, self._wish) for s in heard}

  def _wish(self, number: int, frame: Any) -> None:
    if self.signal:
      signal.signal(number, signal.SIG_DFL)
      signal.raise_signal(number)
    self.signal, self._since = number, time.monotonic()
    # Not print: the signal may have come in the middle of one.
    os.write(
      2,
      f"drmas_jax: {signal.Signals(number).name}: {self._says}; once more to "
      "end at once\n".encode(),
    )

  def check(self) -> None:
    """Called within a step."""
    if self.signal and time.monotonic() - self._since > self._grace_s:
      raise Stopped

  @property
  def exit_code(self) -> int:
    return 128 + (self.signal or signal.SIGTERM)  # or another host's wish

  def close(self) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)
