"""What a rollout waits for outside of the engines, in one asyncio thread.

Rewards and answers of environments that are coroutines, and calls of remote
policies, run there; what they come to goes to a queue, which the thread that
plays reads. A reward that asks an agent (`types.ask`) sends its question
through the same queue.
"""

import asyncio
import queue
import threading
from collections.abc import Collection
from typing import Any

from drmas_jax import remote
from drmas_jax.types import ASKER, CallRequest, Fault, Reply, TransientError


class Question:
  """What a coroutine in the I/O thread asks of an agent, and waits for."""

  def __init__(self, asked: CallRequest):
    self.asked = asked
    self._loop = asyncio.get_running_loop()
    self.answer = self._loop.create_future()

  def settle(self, reply: Reply | Fault) -> None:
    """From the thread that plays."""
    self._loop.call_soon_threadsafe(self._settle, reply)

  def close(self) -> None:
    self.settle(Fault("cancelled", "the episode was given up"))

  def _settle(self, reply: Reply | Fault) -> None:
    if self.answer.done():  # it was given up meanwhile
      return
    if isinstance(reply, Fault):
      self.answer.set_exception(CallFault(self.asked.agent, reply))
    else:
      self.answer.set_result(reply)


class CallFault(TransientError):
  """An agent that a reward asked has no answer."""

  def __init__(self, agent: str, fault: Fault):
    super().__init__(f"{agent!r}: {fault.kind}: {fault.message}")
    self.wall_clock = fault.wall_clock


class Io:
  """One asyncio thread; what it finishes goes to a queue."""

  def __init__(self):
    self.finished: queue.SimpleQueue = queue.SimpleQueue()
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(
      target=self._loop.run_forever, name="drmas-io", daemon=True
    )
    self._thread.start()

  def run(
    self, tag: Any, awaitable: Any, timeout_s: float, asks: bool = False
  ) -> None:
    """Puts (tag, result or exception) on the queue within timeout_s; before
    that (tag, question), where it `asks`."""

    async def ask(asked: CallRequest) -> Reply:
      question = Question(asked)
      self.finished.put((tag, question))
      return await question.answer

    async def guarded():
      if asks:
        ASKER.set(ask)
      try:
        result = await asyncio.wait_for(awaitable, timeout_s)
      except BaseException as e:  # it must come back as a value, whatever it is
        result = e
      self.finished.put((tag, result))

    asyncio.run_coroutine_threadsafe(guarded(), self._loop)

  def places(self) -> list[str]:
    """Where the coroutines stand that are under way, our own left out."""
    own = (__file__, asyncio.__file__.removesuffix("__init__.py"))
    found = []
    for task in asyncio.all_tasks(self._loop):
      coro, place = task.get_coro(), ""
      while (frame := getattr(coro, "cr_frame", None)) is not None:
        code = frame.f_code
        if not code.co_filename.startswith(own):
          name = code.co_filename.rpartition("/")[2]
          place = f"{name}:{frame.f_lineno} {code.co_name}"
        coro = coro.cr_await
      found += [place] if place else []
    return sorted(found)

  def close(self, endpoints: Collection[remote.Endpoint] = ()) -> None:
    """Gives up what is under way."""

    async def stop():
      others = asyncio.all_tasks() - {asyncio.current_task()}
      for task in others:
        task.cancel()
      if others:  # they close what they have open
        await asyncio.wait(others, timeout=2)
      for endpoint in endpoints:
        endpoint.close()
      self._loop.stop()

    asyncio.run_coroutine_threadsafe(stop(), self._loop)
    self._thread.join(timeout=5)
