"""Programs that run side by side on one CPU device.

XLA's CPU client runs what one thread dispatches one after the other, also where
nothing connects it; and much of a decode step, being many small operations,
keeps one core busy. What different threads dispatch runs side by side. (Other
devices take programs one by one whoever sends them.)
"""

import os
from collections.abc import Callable, Collection
from concurrent import futures
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

Programs = TypeVar("Programs", bound=tuple)


def at_once(devices: Collection[jax.Device]) -> int:
  """Programs that are worth running together on some devices.

  One, but on a CPU that stands for one device. (Several that exchange with each
  other must all be sent programs in one order.)
  """
  if [d.platform for d in devices] == ["cpu"]:
    return os.cpu_count() or 1
  return 1


def apart(programs: Programs, mesh: Mesh) -> Programs:
  """The same functions, dispatched from a thread of their own, in order, where
  that lets them run beside others. The caller waits for the call as it would
  without, not for the results.

  Args:
    programs: a NamedTuple of functions that dispatch.
    mesh: where they run.
  """
  if at_once(mesh.devices.flat) == 1:
    return programs
  thread = futures.ThreadPoolExecutor(1, thread_name_prefix="dispatch")

  def called(program: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: thread.submit(program, *args).result()

  return programs._make(map(called, programs))
