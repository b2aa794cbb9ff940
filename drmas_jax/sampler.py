"""The host side of sampling: continuous batching of requests on one engine.

    submit    a Request joins the queue
    dispatch  `scheduler.decide` says who makes room, who goes on and who is
              admitted; then a fused run of steps is started, and nothing is
              waited for
    harvest   the run is read; what ended comes back as Completions

Pages of the cache are handed out as tokens come. A request goes on from what
the cache has of its prompt: an earlier turn of its episode, the head of its
template, the prompt that the episodes of a group share (`prefixes`). Tokens
depend on the request and the weights, and on nothing else: not on arrival,
slots, steps in a run or the size of the pool.
"""

import dataclasses
import heapq
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from drmas_jax import decoding, scheduler
from drmas_jax import engine as engine_lib
from drmas_jax.config import Sampling
from drmas_jax.pages import needed
from drmas_jax.prefixes import Counts, Prefixes, Prompt, Row, Source, TurnId
from drmas_jax.tokenizer import Growing, Tokenizer
from drmas_jax.types import Call, Fault, StopReason

__all__ = ["Completion", "Counts", "Request", "Sampler"]


@dataclasses.dataclass(frozen=True)
class Request:
  """One completion to be sampled.

  Attributes:
    id: (task position, episode, turn): its name, among all that are in flight
      or kept.
    prompt_ids: [prompt] int32.
    max_tokens: limit of the completion; cut to what max_length leaves.
    sampling: temperature and what is kept.
    closes: where in the decoded text an action block ends, None if nowhere.
    shared_by: number of requests that will come with this very prompt, task
      and turn; they share one prefill, and go on from no parent.
    deadline: on the clock of `time.monotonic`.
    min_tokens: no stop id is sampled before there are so many. A block that
      closes ends the completion all the same.
    stop_ids: that end it beside the tokenizer's, at most decoding.MAX_STOPS.
    parents: earlier turns, kept and of the same episode, that the prompt may go
      on from.
    head: so many of its first ids are the template's, and shared by tasks.
    kind: requests of one kind are expected to come to one length.
    seed: of the sampling, three numbers; None: the id.
    policy_index: which of the policies on the engine's weights is asked.
  """

  id: TurnId
  prompt_ids: np.ndarray
  max_tokens: int
  sampling: Sampling
  closes: Callable[[str], int | None] | None
  shared_by: int
  deadline: float
  min_tokens: int = 0
  stop_ids: tuple[int, ...] | None = None
  parents: tuple[TurnId, ...] = ()
  head: int = 0
  kind: Hashable = None
  seed: tuple[int, int, int] | None = None
  policy_index: int = 0


@dataclasses.dataclass(frozen=True)
class Completion:
  """What a request came to; see `types.Turn` for the fields.

  `cached_tokens` of its prompt were not prefilled for it. `call` is there where
  it was sampled elsewhere.
  """

  request: Request
  ids: np.ndarray
  logprobs: np.ndarray
  log_kept_mass: np.ndarray
  text: str
  stop_reason: StopReason
  version: int
  fault: Fault | None = None
  cached_tokens: int = 0
  call: Call | None = None


class _Shared(NamedTuple):
  """What the requests of a group have in common."""

  position: int
  turn: int
  policy_index: int
  start: int
  prompt: bytes
  size: int


class _Job(scheduler.Job):
  """A request in flight: it waits, runs (`slot` is set) or is parked.

  Attributes:
    request: what is asked.
    source: what it goes on from.
    slot: that it runs in, or None.
    pages: of its sequence while it runs.
    length: tokens of its sequence; it ends at `end` at the latest.
    num: tokens sampled.
    ids, logprobs, log_kept_mass: [limit], of which `num` are there.
    read: the text of the ids.
    cached_tokens: see `Completion`.
    copy: of its pages and its slot, while it is parked.
  """

  def __init__(self, request: Request, limit: int, source: Source):
    super().__init__(request.kind, limit)
    self.request, self.source = request, source
    self.slot: int | None = None
    self.pages: list[int] = []
    self.length = len(request.prompt_ids)
    self.end = self.length + limit
    self.cached_tokens = self.num = 0
    self.copy: Any = None
    position, _, turn = request.id
    self.shared_key: _Shared | None = None  # None: it is alone
    if request.shared_by > 1:
      prompt = request.prompt_ids.tobytes()
      self.shared_key = _Shared(
        *(position, turn, request.policy_index),
        *(source.start, prompt, request.shared_by),
      )

  def begin(self, read: Growing) -> None:
    """It has a slot."""
    self.read = read
    self.ids = np.empty([self.limit], np.int32)
    self.logprobs, self.log_kept_mass = np.empty([2, self.limit], np.float32)

  def add(self, ids, logprobs, log_kept_mass) -> None:
    """[n] each, of a run."""
    end = self.num + len(ids)
    self.ids[self.num : end] = ids
    self.logprobs[self.num : end] = logprobs
    self.log_kept_mass[self.num : end] = log_kept_mass
    self.num, self.length = end, self.length + len(ids)


class Sampler:
  """Continuous batching of requests on one engine."""

  def __init__(self, engine: engine_lib.PolicyEngine, tokenizer: Tokenizer):
    """Raises ValueError if the engine's pool may be too small for one request.

    Beside its own pages, one that goes on from the middle of a page and forks
    within another holds these two.
    """
    spec = engine.spec
    least = needed(spec.max_length, spec.page_size) + 3
    if spec.max_pages < least:
      raise ValueError(
        f"max_pages: {spec.max_pages} cannot hold one sequence of max_length="
        f"{spec.max_length}; allowed are at least {least}; raise "
        "engine.cache_tokens"
      )
    self.engine = engine
    self.tokenizer = tokenizer
    self.counts = Counts()
    self._prefixes = Prefixes(engine, self.counts)
    self._queue = scheduler.Queue(spec.num_slots)
    self._jobs: dict[TurnId, _Job] = {}  # all in flight
    self._deadlines: list[tuple[float, int, _Job]] = []  # a heap
    self._slots: list[_Job | None] = [None] * spec.num_slots
    self._active: list[_Job] = []  # that run, in the order of admission
    self._parked: list[_Job] = []  # the same
    # Of each task's groups, episodes that wait for their prompt no more.
    self._groups: dict[int, dict[_Shared, set[int]]] = {}
    # Admitted, and still to be prefilled; what goes to slots, and its copies.
    self._rows: list[Row] = []
    self._inserts: list[tuple[_Job, Row, tuple[int, int]]] = []
    self._running: list[decoding.Part] | None = None
    self._failed: list[Completion] = []

  @property
  def busy(self) -> bool:
    return bool(self._jobs or self._failed)

  @property
  def num_requests(self) -> int:
    """Requests that have not come back."""
    return len(self._jobs) + len(self._failed)

  @property
  def num_running(self) -> int:
    """Requests that have a slot."""
    return len(self._active)

  def resume(self, params: Any, version: int) -> None:
    """Takes the weights that sample from now on; all that is kept is dropped.

    Raises:
      RuntimeError: requests are in flight.
    """
    self.release()
    self.engine.resume(params, version)

  def release(self) -> None:
    """Drops the weights, the cache, and all that is kept.

    Raises:
      RuntimeError: requests are in flight.
    """
    if self.busy:
      raise RuntimeError(
        f"{len(self._jobs)} requests are in flight; harvest or cancel them "
        "before the weights change"
      )
    self._running = None
    for what in (self._rows, self._inserts, self._groups):
      what.clear()  # the first two are not empty if `dispatch` raised
    self._prefixes.clear()
    self.engine.release()

  # -- requests ----------------------------------------------------------------

  def submit(self, request: Request, fault: Fault | None = None) -> None:
    """Queues a request; one that cannot be served comes back as a Fault.

    Args:
      request: what to sample.
      fault: why it is known already that it cannot be served.

    Raises:
      ValueError: another request of its id is in flight or kept.
      RuntimeError: a parent is not kept.
    """
    if request.id in self._jobs or request.id in self._prefixes:
      raise ValueError(
        f"id: {request.id} is that of a request in flight or kept; allowed is "
        "each id once; call forget() when its episode is over"
      )
    fault = fault or self._check(request)
    if fault is not None:
      self._failed.append(self._fail(request, fault))
      return
    room = self.engine.spec.max_length - len(request.prompt_ids)
    limit = min(request.max_tokens, room)
    job = _Job(request, limit, self._prefixes.choose(request))
    self._jobs[request.id] = job
    self._queue.add(job)
    if request.shared_by > 1:
      groups = self._groups.setdefault(request.id[0], {})
      groups.setdefault(job.shared_key, set())
    self._watch(job)

  def _check(self, request: Request) -> Fault | None:
    """Why it cannot be served, whenever it came."""
    spec, ids = self.engine.spec, request.prompt_ids
    room = min(spec.max_length - 1, spec.prefill_buckets[-1])
    if not 0 < len(ids) <= room:
      return Fault(
        "prompt",
        f"prompt of {len(ids)} tokens; allowed are 1 to {room}; raise "
        "engine.max_length (or the last of engine.prefill_buckets) or shorten "
        "what agents pass on",
      )
    wrong = ids[(ids < 0) | (ids >= spec.vocab_size)]
    if len(wrong):
      return Fault(
        "prompt",
        f"prompt with the id {wrong[0]}; allowed are 0 to "
        f"{spec.vocab_size - 1}; encode it with the policy's own tokenizer",
      )
    if request.max_tokens < 1:
      return Fault(
        "request",
        f"max_tokens: {request.max_tokens}; allowed is at least 1",
      )
    if len(request.stop_ids or ()) > decoding.MAX_STOPS:
      return Fault(
        "request",
        f"stop_ids: {len(request.stop_ids)} of them; allowed are at most "
        f"{decoding.MAX_STOPS} beside the tokenizer's",
      )
    for stop in request.stop_ids or ():
      if not 0 <= stop < spec.vocab_size:
        return Fault(
          "request",
          f"stop_ids: {stop}; allowed are 0 to {spec.vocab_size - 1}; take ids "
          "of the policy's own tokenizer",
        )
    return None

  def _watch(self, job: _Job) -> None:
    """Its deadline; those of jobs that are gone are cleared away in time."""
    if len(self._deadlines) > 2 * len(self._jobs) + 64:
      self._deadlines = [e for e in self._deadlines if self._in_flight(e[2])]
      heapq.heapify(self._deadlines)
    entry = job.request.deadline, job.arrival, job
    heapq.heappush(self._deadlines, entry)

  def _in_flight(self, job: _Job) -> bool:
    return self._jobs.get(job.request.id) is job

  def cancel(self, wanted: Callable[[Request], bool]) -> None:
    """Drops requests, waiting, running or parked; nothing comes back for them.

    Args:
      wanted: of a request, whether it is to go.
    """
    for job in [j for j in self._jobs.values() if wanted(j.request)]:
      self._abandon(job)
    self._failed = [c for c in self._failed if not wanted(c.request)]

  def forget(self, position: int, episode: int) -> None:
    """The episode is over: what is kept of its turns goes, and no group waits
    for it.

    Args:
      position: of its task.
      episode: its index; none of its requests is in flight.
    """
    self._prefixes.forget(position, episode)
    for key in list(self._groups.get(position, ())):
      self._leave_group(key, episode)

  def progress(self) -> dict[TurnId, tuple[list[int], list[float]]]:
    """Ids and log-probs so far of the requests that have begun, by id.

    Valid between `harvest` and `dispatch`.
    """
    return {
      job.request.id: (
        job.ids[: job.num].tolist(),
        job.logprobs[: job.num].tolist(),
      )
      for job in (*self._active, *self._parked)
    }

  def _abandon(self, job: _Job) -> None:
    """It has no result; all it had is free."""
    del self._jobs[job.request.id]
    if job in self._queue:
      self._queue.remove(job)
      self._leave_group(job.shared_key, job.request.id[1])
    elif job.slot is None:
      self._parked.remove(job)
      job.copy = None  # the job itself is watched until its deadline
    else:
      self._prefixes.pages.give(self._vacate(job))

  def _vacate(self, job: _Job) -> list[int]:
    """Takes a job from its slot; its pages, to be kept or given back."""
    self._active.remove(job)
    self._slots[job.slot] = None
    job.slot = None
    self._prefixes.pages.unpin(job.pages)
    pages, job.pages = job.pages, []
    return pages

  def _leave_group(self, key: _Shared | None, episode: int) -> None:
    """One less has need of a shared prompt; the last one gives it back."""
    if key is None:
      return
    groups = self._groups[key.position]
    groups[key].add(episode)
    if len(groups[key]) < key.size:
      return
    del groups[key]
    if not groups:
      del self._groups[key.position]
    prompt = self._prefixes.prompts.pop(key, None)
    if prompt is not None:
      self._prefixes.pages.give(prompt.pages)

  def _expire(self) -> None:
    """Turns past their deadline come back as faults, and free their slots."""
    now = time.monotonic()
    while self._deadlines and self._deadlines[0][0] < now:
      job = heapq.heappop(self._deadlines)[2]
      if self._in_flight(job):
        self._abandon(job)
        fault = Fault("deadline", "turn past rollout.turn_timeout_s", True)
        self._failed.append(self._fail(job.request, fault))

  # -- a run -------------------------------------------------------------------

  def dispatch(self) -> None:
    """Fills free slots and starts a run of steps; does not wait.

    Raises:
      RuntimeError: a request would go on from a sequence of other weights.
    """
    self._expire()
    act = {"park": self._park, "resume": self._resume, "admit": self._admit}
    while (action := scheduler.decide(self._state())) != "run":
      act[action]()
    if not self._active:
      return
    for job in self._active:
      self._extend(job, self._growth(job))
    self._prefill()
    self._running = self.engine.generate_n(
      [() if job is None else job.pages for job in self._slots],
      np.array([job is not None for job in self._slots]),
      leave_when_free=bool(self._queue or self._parked),
    )

  def _state(self) -> scheduler.State:
    free = self._slots.count(None)
    parked = waiting = None
    if self._parked:
      parked = self._pages_to_run(self._parked[0])
    elif free and self._queue:
      waiting = self._cost(self._queue.first())
    growth = [self._growth(job) for job in self._active]
    size = self.engine.spec.page_size
    hungry = sum(
      needed(job.end, size) > self._pages_to_run(job) for job in self._active
    )
    available = self._prefixes.available
    return scheduler.State(growth, hungry, available, free, parked, waiting)

  def _pages_to_run(self, job: _Job) -> int:
    spec = self.engine.spec
    return needed(
      min(job.length + spec.steps_per_call, job.end), spec.page_size
    )

  def _growth(self, job: _Job) -> int:
    return self._pages_to_run(job) - len(job.pages)

  def _extend(self, job: _Job, num: int) -> None:
    if num:
      pages = self._prefixes.take(num)
      self._prefixes.pages.pin(pages)
      job.pages += pages

  def _cost(self, job: _Job) -> int:
    """Pages that are pinned anew if a waiting job is admitted."""
    size, prefixes = self.engine.spec.page_size, self._prefixes
    total, key = self._pages_to_run(job), job.shared_key
    if key is None:
      own = total - job.source.start // size
      return own + prefixes.cost(job.source)
    full = job.length // size
    prompt = prefixes.prompts.get(key)
    if prompt is not None:
      return total - full + prefixes.pages.unpinned(prompt.pages)
    new = needed(job.length, size) - job.source.start // size
    return total - full + new + prefixes.cost(job.source)

  def _place(self, job: _Job) -> None:
    job.slot = self._slots.index(None)
    self._slots[job.slot] = job
    self._active.append(job)

  def _park(self) -> None:
    """The job admitted last goes to the host."""
    job = self._active[-1]
    slot, used = job.slot, needed(job.length, self.engine.spec.page_size)
    job.copy = self.engine.spill(slot, job.pages[:used])
    self._prefixes.pages.give(self._vacate(job))
    self._parked.insert(0, job)
    self.counts.parked += 1

  def _resume(self) -> None:
    """The parked job admitted first runs again."""
    job = self._parked.pop(0)
    self._place(job)
    used = needed(job.length, self.engine.spec.page_size)
    self._extend(job, self._pages_to_run(job))
    self.engine.restore(job.copy, job.slot, job.pages[:used])
    job.copy = None

  def _admit(self) -> None:
    """The first of the queue gets a slot and pages."""
    job, counts = self._queue.first(), self.counts
    before = counts.prefilled_tokens
    self._queue.take(job)
    self._place(job)
    job.begin(Growing(self.tokenizer.decode))
    total, copy = self._pages_to_run(job), (0, 0)
    if job.shared_key is None:
      row, job.pages = self._begin(job, total)
    else:
      row, job.pages, copy = self._fork(job, total)
    self._prefixes.pages.pin(job.pages)
    self._inserts.append((job, row, copy))
    counts.prompt_tokens += job.length
    job.cached_tokens = job.length - (counts.prefilled_tokens - before)

  def _begin(self, job: _Job, num_pages: int) -> tuple[Row, list[int]]:
    """The prefill of a prompt, with so many pages, and these."""
    size, prefixes = self.engine.spec.page_size, self._prefixes
    start, ids = job.source.start, job.request.prompt_ids
    before = prefixes.hold(job.source)
    full = start // size
    pages = prefixes.pages.share(before[:full])
    pages += prefixes.take(num_pages - full)
    chunk = decoding.Chunk(
      ids[start:],
      start,
      pages[: needed(len(ids), size)],
      (before or [0])[-1],
      job.request.policy_index,
    )
    row = Row(chunk)
    self._rows.append(row)
    self.counts.prefilled_tokens += len(chunk.tokens)
    return row, pages

  def _fork(
    self, job: _Job, num_pages: int
  ) -> tuple[Row, list[int], tuple[int, int]]:
    """A prompt that is shared up to its last page, of which this is a copy."""
    size, prefixes = self.engine.spec.page_size, self._prefixes
    prompt = prefixes.prompts.get(job.shared_key)
    if prompt is None:
      row, pages = self._begin(job, needed(job.length, size))
      prompt = Prompt(job.length, pages, self.engine.version, row=row)
      prefixes.prompts[job.shared_key] = prompt
    prefixes.check(prompt)
    held = prefixes.hold_pages(prompt.pages)
    full = job.length // size
    pages = prefixes.pages.share(held[:full])
    pages += prefixes.take(num_pages - full)
    copy = (held[full], pages[full]) if job.length % size else (0, 0)
    self._leave_group(job.shared_key, job.request.id[1])
    return prompt.row, pages, copy

  def _prefill(self) -> None:
    """Starts the prefills of what was admitted, and fills its slots."""
    spec, prefixes = self.engine.spec, self._prefixes
    for rows in (prefixes.new_heads, self._rows):
      buckets = [self.engine.bucket(len(r.chunk.tokens)) for r in rows]
      for batch in scheduler.batches(buckets, spec.num_slots):
        hidden = self.engine.prefill_rows([rows[i].chunk for i in batch])
        for index, i in enumerate(batch):
          rows[i].hidden, rows[i].index = hidden, index
      rows.clear()
    by_call: dict[int, list[tuple[_Job, Row, tuple[int, int]]]] = {}
    for insert in self._inserts:
      by_call.setdefault(id(insert[1].hidden), []).append(insert)
    for inserts in by_call.values():
      jobs, rows, copies = zip(*inserts, strict=True)
      self.engine.insert_rows(
        rows[0].hidden,
        [row.index for row in rows],
        [job.slot for job in jobs],
        copies,
        [job.length for job in jobs],
        _settings(jobs),
      )
    self._inserts.clear()
    prefixes.release()

  def harvest(self) -> list[Completion]:
    """Waits for the run started last; returns what ended."""
    done, self._failed = self._failed, []
    if self._running is None:
      return done
    parts, sampled = decoding.to_host(self._running), {}
    self._running = None
    for slots, out in parts:
      num = int(out.num_steps)
      # What a slot samples in a run is without gaps.
      ends = out.valid[:num].sum(axis=0).tolist()
      columns = [
        np.ascontiguousarray(a[:num].T)
        for a in (out.tokens, out.logprobs, out.log_kept_mass)
      ]
      self.counts.steps += num
      self.counts.slot_steps += num * len(ends)
      self.counts.busy_steps += sum(ends)
      for lane, slot in enumerate(slots):
        own = [column[lane, : ends[lane]] for column in columns]
        sampled[slot] = own, bool(out.active[lane])
    for job in list(self._active):
      own, active = sampled[job.slot]
      job.add(*own)
      completion = self._finished(job, active)
      if completion is not None:
        done.append(completion)
    return done

  # -- completions -------------------------------------------------------------

  def _finished(self, job: _Job, active: bool) -> Completion | None:
    """Rule 14: an action block ends a completion where its text closes."""
    ids, request = job.ids[: job.num], job.request
    closes = request.closes
    if active and (closes is None or closes(job.read(ids)) is None):
      return None
    text = self.tokenizer.decode(ids)
    end = None if closes is None else closes(text)
    if end is None and active:
      return None
    stops = (*self.engine.spec.stop_ids, *(request.stop_ids or ()))
    reason = "stop" if ids[-1] in stops else "length"
    if end is None:
      return self._complete(job, len(ids), text, reason)
    num = self.tokenizer.tokens_until(ids, end)
    if num < len(ids) or reason != "stop":
      reason = "tag"
    return self._complete(job, num, text[:end], reason)

  def _complete(
    self, job: _Job, num: int, text: str, reason: StopReason
  ) -> Completion:
    """`num` of its tokens count; its sequence is kept up to there."""
    request = job.request
    del self._jobs[request.id]
    self._queue.ended(job.kind, num)
    self.counts.completion_tokens += num
    ids = job.ids[:num].copy()
    sequence = np.concatenate([request.prompt_ids, ids])
    pages = self._vacate(job)
    used = needed(len(sequence), self.engine.spec.page_size)
    self._prefixes.pages.give(pages[used:])
    self._prefixes.keep(
      request.id, sequence, pages[:used], job.source, exact=reason != "tag"
    )
    return Completion(
      request=request,
      ids=ids,
      logprobs=job.logprobs[:num].copy(),
      log_kept_mass=job.log_kept_mass[:num].copy(),
      text=text,
      stop_reason=reason,
      version=self.engine.version,
      cached_tokens=job.cached_tokens,
    )

  def _fail(self, request: Request, fault: Fault) -> Completion:
    empty = np.zeros([0], np.float32)
    return Completion(
      request=request,
      ids=np.zeros([0], np.int32),
      logprobs=empty,
      log_kept_mass=empty,
      text="",
      stop_reason="fault",
      version=self.engine.version,
      fault=fault,
    )


def _settings(jobs: Sequence[_Job]) -> decoding.Requests:
  """What the slots of jobs have to know."""
  asked = [job.request for job in jobs]
  sampling = [request.sampling for request in asked]
  stops = np.full([len(jobs), decoding.MAX_STOPS], -1, np.int32)
  for row, request in zip(stops, asked, strict=True):
    row[: len(request.stop_ids or ())] = request.stop_ids or ()
  return decoding.Requests(
    seed=np.array(
      [r.id if r.seed is None else r.seed for r in asked], np.int32
    ),
    limit=np.array([job.limit for job in jobs], np.int32),
    min_tokens=np.array([r.min_tokens for r in asked], np.int32),
    temperature=np.array([s.temperature for s in sampling], np.float32),
    top_k=np.array([s.top_k for s in sampling], np.int32),
    top_p=np.array([s.top_p for s in sampling], np.float32),
    stops=stops,
    policy=np.array([r.policy_index for r in asked], np.int32),
  )
