"""Programs that run side by side on one CPU device.

XLA's CPU client runs what one thread dispatches one after the other, also where
nothing connects it; and much of a decode step, being many small operations,
keeps one core busy. What different threads dispatch runs side by side. (Other
devices take programs one by one whoever sends them.)
"""

import os
from collections.abc import Callable, Collection, Hashable
from concurrent import futures
from typing import TypeVar, TypeVarTuple

import jax

Args = TypeVarTuple("Args")
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
  """Calls functions in threads, one for each name, where what they dispatch may
  so run side by side, and elsewhere all in the caller's.

  The first name's thread is the caller's: one that has to wait for a core would
  cost what runs alone. The call is waited for, its results are not.
  """

  def __init__(self, devices: Collection[jax.Device]):
    """`devices` are where the programs run."""
    self._apart = at_once(devices) > 1
    self._threads: dict[Hashable, futures.Executor | None] = {}

  def __call__(
    self,
    name: Hashable,
    function: Callable[[*Args], Result],
    *args: *Args,
  ) -> Result:
    if name not in self._threads:
      beside = self._apart and bool(self._threads)
      thread = futures.ThreadPoolExecutor(1, "dispatch") if beside else None
      self._threads[name] = thread
    thread = self._threads[name]
    if thread is None:
      return function(*args)
    return thread.submit(function, *args).result()
