"""Programs that run side by side on one CPU device.

XLA's CPU client runs what one thread dispatches one after the other, also where
nothing connects it; and much of a decode step, being many small operations,
keeps one core busy. What different threads dispatch runs side by side. (Other
devices take programs one by one whoever sends them.)
"""

import os
from collections.abc import Callable, Collection
from concurrent import futures
from typing import ParamSpec, TypeVar

import jax

Args = ParamSpec("Args")
Result = TypeVar("Result")


def at_once(devices: Collection[jax.Device]) -> int:
  """Programs that are worth running together on some devices.

  One, but on a CPU that stands for one device. (Several that exchange with each
  other must all be sent programs in one order.)
  """
  if [d.platform for d in devices] == ["cpu"]:
    return os.cpu_count() or 1
  return 1


class Strands:
  """Calls functions in threads by number, 0 being the caller's, where what they
  dispatch may so run side by side, and elsewhere all in the caller's.

  It waits for the call as without a thread, not for the results. (A thread that
  does not have a core at once takes a while: the first is called without.)
  """

  def __init__(self, devices: Collection[jax.Device]):
    """`devices` are where the programs run."""
    self._apart = at_once(devices) > 1
    self._threads: list[futures.Executor] = []

  def __call__(
    self,
    number: int,
    function: Callable[Args, Result],
    *args: Args.args,
    **kwargs: Args.kwargs,
  ) -> Result:
    if not (number and self._apart):
      return function(*args, **kwargs)
    while number > len(self._threads):
      self._threads.append(futures.ThreadPoolExecutor(1, "dispatch"))
    thread = self._threads[number - 1]
    return thread.submit(function, *args, **kwargs).result()
