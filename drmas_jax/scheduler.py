"""Who goes first, who waits, who makes room: no clock, no engine, no I/O.

    Queue     who is admitted next, from what waits and what has been completed
    decide    the next thing to do, from numbers of pages and slots
    batches   which rows are prefilled together
    Turns     which engines run next, where several are on one device

A sampler calls `decide` and does what it says until it says "run":

    park      the running sequence that was admitted last goes to the host
    resume    the parked one that was admitted first runs again
    admit     `Queue.first` gets a slot

What is parked was admitted behind all that run, and is back before anything is
admitted; the oldest never leaves its slot. So each round some sequence is on
its way to its end, as long as the pool holds any one of them.
"""

import collections
import dataclasses
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

Action = Literal["park", "resume", "admit", "run"]


class State(NamedTuple):
  """What a decision depends on.

  Attributes:
    growth: pages that each running sequence needs for the next run, in the
      order of admission.
    hungry: how many of them may need more after that.
    available: pages that are not of running sequences.
    free_slots: how many.
    parked: pages with which the first of the parked goes on; None: there is
      none.
    waiting: pages that the first of the queue begins with; None: it is empty.
  """

  growth: Sequence[int]
  hungry: int
  available: int
  free_slots: int
  parked: int | None
  waiting: int | None


def decide(state: State) -> Action:
  """See the module's docstring."""
  left = state.available - sum(state.growth)
  if left < 0 and len(state.growth) > 1:
    return "park"
  # A page for each that goes on: whoever comes is not to be parked at once.
  left -= state.hungry
  wanted = state.waiting if state.parked is None else state.parked
  if wanted is None or not state.free_slots or wanted > left:
    return "run"
  return "admit" if state.parked is None else "resume"


def batches(buckets: Sequence[int], rows: int) -> list[list[int]]:
  """Indices of what is prefilled together: of one bucket, at most `rows`."""
  found: list[list[int]] = []
  open_: dict[int, list[int]] = {}
  for i, bucket in enumerate(buckets):
    batch = open_.get(bucket)
    if batch is None or len(batch) == rows:
      batch = open_[bucket] = []
      found.append(batch)
    batch.append(i)
  return found


@dataclasses.dataclass(eq=False)
class Job:
  """What waits in a queue.

  Attributes:
    kind: jobs of one kind are expected to be of one length.
    limit: most tokens that it may come to.
    overtaken: how many have gone before it that came later.
    arrival: its number in the queue.
  """

  kind: Hashable
  limit: int
  overtaken: int = dataclasses.field(default=0, init=False)
  arrival: int = dataclasses.field(default=-1, init=False)


class Queue:
  """First come, first served; at the tail, the longest first.

  The tail is where everything that waits could run at once. What is expected to
  take longest then begins first, so that it does not run on alone; nothing is
  overtaken more often than there are slots. A job is expected to be as long as
  those of its kind were on average, or as it may be while none has ended.
  """

  def __init__(self, num_slots: int):
    self._num_slots = num_slots
    self._jobs: collections.OrderedDict[int, Job] = collections.OrderedDict()
    self._arrivals = 0
    self._ended: dict[Hashable, tuple[int, int]] = {}  # number, tokens

  def __len__(self) -> int:
    return len(self._jobs)

  def __iter__(self) -> Iterator[Job]:
    return iter(self._jobs.values())

  def __contains__(self, job: Job) -> bool:
    return job.arrival in self._jobs

  def add(self, job: Job) -> None:
    job.arrival = self._arrivals
    self._arrivals += 1
    self._jobs[job.arrival] = job

  def remove(self, job: Job) -> None:
    """It will not be served."""
    del self._jobs[job.arrival]

  def first(self) -> Job | None:
    """Who is next; stays in the queue."""
    if not self._jobs:
      return None
    if len(self._jobs) > self._num_slots:
      return next(iter(self._jobs.values()))
    for job in self._jobs.values():
      if job.overtaken >= self._num_slots:
        return job
    return max(self._jobs.values(), key=self.expected)  # the first of equals

  def take(self, job: Job) -> None:
    """It is served now."""
    for other in self._jobs.values():
      if other is job:
        break
      other.overtaken += 1
    del self._jobs[job.arrival]

  def expected(self, job: Job) -> float:
    """Its length, in tokens."""
    number, tokens = self._ended.get(job.kind, (0, 0))
    return min(tokens / number, job.limit) if number else job.limit

  def ended(self, kind: Hashable, num_tokens: int) -> None:
    """A job of a kind came to so many tokens."""
    number, tokens = self._ended.get(kind, (0, 0))
    self._ended[kind] = number + 1, tokens + num_tokens


class Turns:
  """Which engines run next: on a device no more than it takes, the fullest
  first.

  A run of steps takes a device about as long with one slot taken as with all.
  So an engine that has little to do waits until it has more, or the others have
  less; but nobody that has work is passed over more than `patience` times in a
  row.
  """

  def __init__(
    self,
    devices: Sequence[Collection[Any]],
    at_once: int = 1,
    patience: int = 16,
  ):
    """`devices` are those of each engine; each takes `at_once` engines."""
    self._devices = [frozenset(d) for d in devices]
    self._at_once = at_once
    self._patience = patience
    self._passed = [0] * len(devices)

  def next(self, loads: Sequence[float]) -> list[int]:
    """Numbers of the engines that run now.

    Args:
      loads: of each engine, what share of its slots its requests would take;
        0: it has no work.
    """
    waiting = [i for i, load in enumerate(loads) if load > 0]
    self._passed = [
      n if load > 0 else 0 for n, load in zip(self._passed, loads, strict=True)
    ]
    waiting.sort(
      key=lambda i: (
        self._passed[i] < self._patience,
        -min(1.0, loads[i]),
        -self._passed[i],
      )
    )
    chosen, taken = [], collections.Counter()
    for i in waiting:
      if all(taken[d] < self._at_once for d in self._devices[i]):
        chosen.append(i)
        taken.update(self._devices[i])
        self._passed[i] = 0
      else:
        self._passed[i] += 1
    return sorted(chosen)
