"""The loop that owns the devices, for requests that come from other threads.

    submit, cancel   any thread: a job joins the inbox, or leaves
    run              the main thread: take what came, dispatch every sampler,
                     harvest every sampler, hand back what there is

A job is one request: a chat with a policy, or a task for the team, each with a
number of choices. What comes of it goes to the job's own queue, at which the
thread that asked waits. Jobs share slots, prefills and rounds as the episodes
of a rollout do.

The seed of a job decides what is sampled, as (seed, choice, turn); its position
among all jobs is only its name.
"""

import contextlib
import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from drmas_jax import dispatch
from drmas_jax.config import Sampling
from drmas_jax.rollout import Episodes, Rollout
from drmas_jax.sampler import Completion, Request, Sampler
from drmas_jax.types import Episode, Fault, Group, Task

_IDLE_S = 0.25  # between two looks at signals, while nothing is asked for
_IO_S = 0.02  # that what runs outside is waited for, while no engine has work


class Full(Exception):
  """As many choices are open as may be."""


class Closed(Exception):
  """No job is taken any more."""


class Event(NamedTuple):
  """Something of a job.

  Attributes:
    choice: which one.
    ids: sampled since the last event, of a chat.
    logprobs: theirs.
    result: what the choice came to; None: there is more to come.
    fault: why nothing will come of the whole job.
  """

  choice: int
  ids: list[int]
  logprobs: list[float]
  result: Completion | Episode | None = None
  fault: Fault | None = None


@dataclasses.dataclass(kw_only=True, eq=False)
class Job:
  """One request.

  Attributes:
    num: choices.
    seed: of the sampling, 0 <= seed < 2^31.
    sampling: of a task, None: each agent's own.
    deadline: on the clock of `time.monotonic`; whoever waits cancels then.
    events: what comes of it.
    position: its name, once it has begun.
  """

  num: int
  seed: int
  sampling: Sampling | None
  deadline: float
  events: queue.SimpleQueue = dataclasses.field(
    default_factory=queue.SimpleQueue
  )
  position: int = -1


@dataclasses.dataclass(kw_only=True, eq=False)
class Chat(Job):
  """Completions of a prompt; see `sampler.Request` for the fields.

  Attributes:
    stream: whether events come before the result.
  """

  policy: str
  prompt_ids: np.ndarray
  max_tokens: int
  min_tokens: int
  closes: Callable[[str], int | None] | None
  stream: bool


@dataclasses.dataclass(kw_only=True, eq=False)
class Question(Job):
  """A task for the team."""

  text: str


@dataclasses.dataclass
class _Running:
  job: Job
  left: set[int]  # choices that are not done
  sent: dict[int, int]  # tokens, by choice


@dataclasses.dataclass
class Load:
  """Of one policy's slots, as of the last round."""

  slots: int
  in_use: int = 0


class Loop:
  """See the module's docstring.

  Args:
    samplers: by policy, with weights.
    rollout: plays the team; None: there is none.
    limit: most choices that are open at a time.
  """

  def __init__(
    self,
    samplers: Mapping[str, Sampler],
    rollout: Rollout | None,
    limit: int,
  ):
    self._samplers = dict(samplers)
    devices = [s.engine.devices for s in self._samplers.values()]
    self._strands = dispatch.Strands(frozenset().union(*devices))
    self._episodes = rollout and Episodes(
      rollout, finished=self._played, scored=False
    )
    self.limit = limit
    self._inbox: queue.SimpleQueue = queue.SimpleQueue()
    self._lock = threading.Lock()  # of the next two
    self._closed = False
    self._num_open = 0  # choices
    self._positions = itertools.count()
    self._jobs: dict[int, _Running] = {}
    self.load = {
      name: Load(s.engine.max_concurrent_decodes)
      for name, s in self._samplers.items()
    }

  # -- any thread --------------------------------------------------------------

  def submit(self, job: Job) -> None:
    """Takes a job; each of its choices comes to a result, unless the job is
    cancelled or has a fault.

    Raises:
      Full: try again later.
      Closed: the loop ends.
    """
    with self._lock:
      if self._closed:
        raise Closed
      if self._num_open + job.num > self.limit:
        raise Full
      self._num_open += job.num
      self._inbox.put((self._begin, job))

  def cancel(self, job: Job) -> None:
    """Frees what a job holds; nothing more comes of it. One that is done
    already stays so."""
    self._inbox.put((self._drop, job))

  @property
  def closed(self) -> bool:
    return self._closed

  @property
  def num_open(self) -> int:
    return self._num_open

  # -- the main thread ---------------------------------------------------------

  def run(self, stopping: Callable[[], bool], drain_s: float) -> None:
    """Serves until `stopping()`, then finishes what was taken.

    Args:
      stopping: looked at every round.
      drain_s: what is not done so long after the stop comes back as a fault.
    """
    limit = None
    try:
      while limit is None or (self._jobs and time.monotonic() < limit):
        if limit is None and stopping():
          self._close()
          limit = time.monotonic() + drain_s
        self._take(wait=not self._jobs and limit is None)
        if self._jobs:
          self._round()
        for name, sampler in self._samplers.items():
          self._report(name, sampler)
    finally:
      self._close()
      self._take(wait=False)
      fault = Fault("cancelled", "the server has stopped")
      for running in list(self._jobs.values()):
        self._fail(running.job, fault)

  def _close(self) -> None:
    with self._lock:  # what was taken is in the inbox
      self._closed = True

  def _take(self, wait: bool) -> None:
    """Does what came from other threads; waits for something if asked to."""
    with contextlib.suppress(queue.Empty):
      while True:
        act, job = self._inbox.get(wait, _IDLE_S if wait else None)
        act(job)
        wait = False

  def _round(self) -> None:
    for sampler in self._samplers.values():
      self._strands(id(sampler.engine), sampler.dispatch)
    for name, sampler in self._samplers.items():
      for completion in sorted(sampler.harvest(), key=lambda c: c.request.id):
        self._route(name, completion)
    if self._episodes is not None:
      self._hear()

  def _hear(self) -> None:
    """Goes on with episodes that the environment has answered."""
    idle = not any(s.busy for s in self._samplers.values())
    for position, go_on in self._episodes.heard(_IO_S if idle else 0.0):
      running = self._jobs.get(position)
      if running is not None:  # it was not dropped meanwhile
        with self._guarded(running.job):
          go_on()

  def _begin(self, job: Job) -> None:
    job.position = next(self._positions)
    running = _Running(
      job, set(range(job.num)), dict.fromkeys(range(job.num), 0)
    )
    self._jobs[job.position] = running
    if isinstance(job, Chat):
      for choice in range(job.num):
        self._samplers[job.policy].submit(_request(job, choice))
    else:
      task = Task("request", job.position, job.position, job.text, None)
      group = Group(task, [Episode(task, i) for i in range(job.num)])
      with self._guarded(job):
        self._episodes.add(group, job.sampling, job.seed)

  def _route(self, name: str, completion: Completion) -> None:
    """Hands a completion to the chat or the episode that asked for it."""
    position, choice, _ = completion.request.id
    running = self._jobs.get(position)
    if running is None:  # it was dropped while others of its round came back
      return
    if not isinstance(running.job, Chat):
      with self._guarded(running.job):
        self._episodes.answer(completion)
      return
    if completion.fault is not None:
      self._fail(running.job, completion.fault)
      return
    sent = running.sent[choice]
    self._done(
      running,
      Event(
        choice,
        completion.ids[sent:].tolist(),
        completion.logprobs[sent:].tolist(),
        completion,
      ),
    )
    self._samplers[name].forget(position, choice)

  def _played(self, episode: Episode) -> None:
    """An episode of a task is over; its own turns are given up after this."""
    running = self._jobs[episode.task.position]
    if episode.fault is not None:
      self._fail(running.job, episode.fault)
    else:
      self._done(
        running, Event(episode.index, [], [], dataclasses.replace(episode))
      )

  def _done(self, running: _Running, event: Event) -> None:
    running.left.discard(event.choice)
    running.job.events.put(event)
    if not running.left:
      self._drop(running.job)

  def _report(self, name: str, sampler: Sampler) -> None:
    """What is new of streamed chats, and how full the slots are."""
    self.load[name].in_use = sampler.num_running
    streams = {
      position: running
      for position, running in self._jobs.items()
      if isinstance(running.job, Chat)
      and running.job.stream
      and running.job.policy == name
    }
    so_far = sampler.progress() if streams else {}
    for (position, choice, _), (ids, logprobs) in so_far.items():
      running = streams.get(position)
      if running is not None and len(ids) > running.sent[choice]:
        sent, running.sent[choice] = running.sent[choice], len(ids)
        running.job.events.put(Event(choice, ids[sent:], logprobs[sent:]))

  @contextlib.contextmanager
  def _guarded(self, job: Job):
    """What a team's own code raises costs its request, and not the server."""
    try:
      yield
    except Exception as e:
      self._fail(job, Fault("orchestra", f"{type(e).__name__}: {e}"))

  def _fail(self, job: Job, fault: Fault) -> None:
    job.events.put(Event(0, [], [], None, fault))
    self._drop(job)

  def _drop(self, job: Job) -> None:
    """The job is over: its slots and whatever is kept of it go."""
    running = self._jobs.pop(job.position, None)
    if running is None:
      return
    with self._lock:
      self._num_open -= job.num
    if isinstance(job, Chat):
      sampler = self._samplers[job.policy]
      if running.left:
        sampler.cancel(lambda r: r.id[0] == job.position)
      for choice in running.left:
        sampler.forget(job.position, choice)
    else:
      self._episodes.drop(job.position)


def _request(job: Chat, choice: int) -> Request:
  return Request(
    id=(job.position, choice, 0),
    seed=(job.seed, choice, 0),
    prompt_ids=job.prompt_ids,
    max_tokens=job.max_tokens,
    min_tokens=job.min_tokens,
    sampling=job.sampling,
    closes=job.closes,
    shared_by=job.num,
    deadline=job.deadline,
  )
