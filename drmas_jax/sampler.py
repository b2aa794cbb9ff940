"""The host side of sampling: a queue and slots over one engine.

    submit    a Request joins the queue
    dispatch  free slots are filled (`schedule`), then a fused run of steps is
              started; nothing is waited for
    harvest   the run is read; what ended comes back as Completions

A prompt that the G episodes of a group share is prefilled once and inserted G
times. Which prompts are shared is decided by (task, turn, prompt) alone.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from drmas_jax import engine as engine_lib
from drmas_jax.config import Sampling
from drmas_jax.tokenizer import Growing, Tokenizer
from drmas_jax.types import Fault, StopReason


@dataclasses.dataclass(frozen=True)
class Request:
  """One completion to be sampled.

  Attributes:
    id: (task position, episode, turn); it seeds the sampling and is its name.
    prompt_ids: [prompt] int32.
    max_tokens: limit of the completion.
    sampling: temperature and what is kept.
    closes: where in the decoded text an action block ends, None if nowhere.
    shared_by: number of requests that will come with this very prompt, task
      and turn; they share one prefill.
    deadline: on the clock of `time.monotonic`.
  """

  id: tuple[int, int, int]
  prompt_ids: np.ndarray
  max_tokens: int
  sampling: Sampling
  closes: Callable[[str], int | None] | None
  shared_by: int
  deadline: float

  @property
  def prefix_key(self) -> tuple:
    position, episode, turn = self.id
    own = () if self.shared_by > 1 else (episode,)
    return (position, turn, *own, self.prompt_ids.tobytes())


@dataclasses.dataclass(frozen=True)
class Completion:
  """What a request came to; see `types.Turn` for the fields."""

  request: Request
  ids: np.ndarray
  logprobs: np.ndarray
  log_kept_mass: np.ndarray
  text: str
  stop_reason: StopReason
  version: int
  fault: Fault | None = None


@dataclasses.dataclass(frozen=True)
class Prefill:
  """One prefill call: requests of distinct prompts, all of one bucket."""

  bucket: int
  requests: tuple[Request, ...]


@dataclasses.dataclass(frozen=True)
class Actions:
  """What a scheduling round does: these prefills, then these insertions."""

  prefills: tuple[Prefill, ...]
  inserts: tuple[tuple[Request, int], ...]


def schedule(
  queue: Sequence[Request],
  free: Sequence[int],
  ready: frozenset | set,
  bucket: Callable[[int], int],
  rows: int,
) -> Actions:
  """Pure: first come, first served; distinct prompts batched by bucket.

  Args:
    queue: waiting requests in order.
    free: slots that are free, in order.
    ready: prefix keys that are on the device already.
    bucket: padded length of a prompt.
    rows: prompts per prefill call.
  """
  admitted = list(queue[: len(free)])
  new: dict[tuple, Request] = {}
  for request in admitted:
    if request.prefix_key not in ready:
      new.setdefault(request.prefix_key, request)
  by_bucket: dict[int, list[Request]] = collections.defaultdict(list)
  for request in new.values():
    by_bucket[bucket(len(request.prompt_ids))].append(request)
  prefills = tuple(
    Prefill(size, tuple(requests[i : i + rows]))
    for size, requests in sorted(by_bucket.items())
    for i in range(0, len(requests), rows)
  )
  return Actions(prefills, tuple(zip(admitted, free, strict=False)))


@dataclasses.dataclass
class _Shared:
  """A prefilled prompt, kept until all that share it are inserted."""

  prefix: engine_lib.Prefix
  row: int
  left: int


@dataclasses.dataclass
class _Slot:
  request: Request
  read: Growing  # the text of `ids`
  ids: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  log_kept_mass: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Counts:
  """What a rollout cost; reset by whoever reads it."""

  prompt_tokens: int = 0
  prefilled_tokens: int = 0
  completion_tokens: int = 0
  steps: int = 0


class Sampler:
  """Continuous batching of requests on one engine."""

  def __init__(self, engine: engine_lib.PolicyEngine, tokenizer: Tokenizer):
    self.engine = engine
    self.tokenizer = tokenizer
    self.counts = Counts()
    self._queue: collections.deque[Request] = collections.deque()
    self._slots: list[_Slot | None] = [None] * engine.spec.num_slots
    self._shared: dict[tuple, _Shared] = {}
    self._running: engine_lib.Generated | None = None
    self._failed: list[Completion] = []

  @property
  def busy(self) -> bool:
    return bool(
      self._queue or self._failed or any(s is not None for s in self._slots)
    )

  def resume(self, params: Any, version: int) -> None:
    """Takes the weights that sample from now on; every prefix is dropped."""
    if self.busy:
      raise RuntimeError("resume() while requests are in flight")
    self._shared.clear()
    self.engine.resume(params, version)

  def release(self) -> None:
    self._shared.clear()
    self.engine.release()

  def submit(self, request: Request, fault: Fault | None = None) -> None:
    """Queues a request; one that cannot be served comes back as a Fault.

    Args:
      request: what to sample.
      fault: why it is known already that it cannot be served.
    """
    spec = self.engine.spec
    room = min(spec.max_length - 1, spec.prefill_buckets[-1])
    length = len(request.prompt_ids)
    if fault is None and not 0 < length <= room:
      fault = Fault(
        "prompt",
        f"prompt of {length} tokens; allowed are 1 to {room}; raise "
        "engine.max_length or shorten what agents pass on",
      )
    if fault is None:
      self._queue.append(request)
    else:
      self._failed.append(self._fail(request, fault))

  def cancel(self, wanted: Callable[[Request], bool]) -> None:
    """Drops requests, waiting or running; nothing comes back for them."""
    self._queue = collections.deque(r for r in self._queue if not wanted(r))
    self._failed = [c for c in self._failed if not wanted(c.request)]
    for i, slot in enumerate(self._slots):
      if slot is not None and wanted(slot.request):
        self._slots[i] = None

  def dispatch(self) -> None:
    """Fills free slots and starts a run of steps; does not wait."""
    self._expire()
    free = [i for i, s in enumerate(self._slots) if s is None]
    if self._queue and free:
      self._admit(free)
    live = np.array([s is not None for s in self._slots])
    if live.any():
      waits = bool(self._queue)
      self._running = self.engine.generate_n(live, leave_when_free=waits)

  def harvest(self) -> list[Completion]:
    """Waits for the run started last; returns what ended."""
    done, self._failed = self._failed, []
    if self._running is None:
      return done
    out = engine_lib.to_host(self._running)
    self._running = None
    self.counts.steps += int(out.num_steps)
    for i, slot in enumerate(self._slots):
      if slot is None:
        continue
      steps = np.flatnonzero(out.valid[: out.num_steps, i])
      slot.ids += out.tokens[steps, i].tolist()
      slot.logprobs += out.logprobs[steps, i].tolist()
      slot.log_kept_mass += out.log_kept_mass[steps, i].tolist()
      completion = self._finished(slot, bool(out.active[i]))
      if completion is not None:
        self.counts.completion_tokens += len(completion.ids)
        self._slots[i] = None
        done.append(completion)
    return done

  def _admit(self, free: list[int]) -> None:
    spec = self.engine.spec
    queue = list(self._queue)[: len(free)]
    actions = schedule(
      queue, free, self._shared.keys(), self.engine.bucket, spec.prefill_rows
    )
    for request, slot in actions.inserts:
      self._queue.popleft()
      self.counts.prompt_tokens += len(request.prompt_ids)
      self._slots[slot] = _Slot(request, Growing(self.tokenizer.decode))
    self._insert(actions.inserts)
    for prefill in actions.prefills:
      prefix = self.engine.prefill_rows(
        [r.prompt_ids for r in prefill.requests]
      )
      for row, request in enumerate(prefill.requests):
        self.counts.prefilled_tokens += len(request.prompt_ids)
        self._shared[request.prefix_key] = _Shared(
          prefix, row, request.shared_by
        )
      # At once, so that at most one prefix beside the shared ones is alive.
      keys = {r.prefix_key for r in prefill.requests}
      self._insert([i for i in actions.inserts if i[0].prefix_key in keys])

  def _insert(self, inserts: Sequence[tuple[Request, int]]) -> None:
    """Those whose prompt is on the device; the others wait for theirs."""
    by_prefix: dict[int, list[tuple[_Shared, Request, int]]] = {}
    for request, slot in inserts:
      shared = self._shared.get(request.prefix_key)
      if shared is None:
        continue
      shared.left -= 1
      if not shared.left:
        del self._shared[request.prefix_key]
      by_prefix.setdefault(id(shared.prefix), []).append(
        (shared, request, slot)
      )
    for entries in by_prefix.values():
      self.engine.insert_rows(
        entries[0][0].prefix,
        [shared.row for shared, _, _ in entries],
        [slot for _, _, slot in entries],
        self._settings([request for _, request, _ in entries]),
      )

  def _settings(self, requests: list[Request]) -> engine_lib.Requests:
    room = self.engine.spec.max_length
    asked = [r.sampling for r in requests]
    return engine_lib.Requests(
      seed=np.array([r.id for r in requests], np.int32),
      limit=np.array(
        [min(r.max_tokens, room - len(r.prompt_ids)) for r in requests],
        np.int32,
      ),
      temperature=np.array([s.temperature for s in asked], np.float32),
      top_k=np.array([s.top_k for s in asked], np.int32),
      top_p=np.array([s.top_p for s in asked], np.float32),
    )

  def _finished(self, slot: _Slot, active: bool) -> Completion | None:
    """Rule 14: an action block ends a completion where its text closes."""
    ids, closes = slot.ids, slot.request.closes
    if closes is not None and not (active and closes(slot.read(ids)) is None):
      text = self.tokenizer.decode(ids)
      end = closes(text)
      if end is not None:
        num = self.tokenizer.tokens_until(ids, end)
        stopped = num == len(ids) and ids[-1] in self.engine.spec.stop_ids
        return self._complete(
          slot, num, text[:end], "tag" if not stopped else "stop"
        )
    if active:
      return None
    reason = "stop" if ids[-1] in self.engine.spec.stop_ids else "length"
    return self._complete(slot, len(ids), self.tokenizer.decode(ids), reason)

  def _complete(self, slot, num, text, reason) -> Completion:
    return Completion(
      request=slot.request,
      ids=np.array(slot.ids[:num], np.int32),
      logprobs=np.array(slot.logprobs[:num], np.float32),
      log_kept_mass=np.array(slot.log_kept_mass[:num], np.float32),
      text=text,
      stop_reason=reason,
      version=self.engine.version,
    )

  def _expire(self) -> None:
    """Turns past their deadline come back as faults, and free their slots."""
    now = time.monotonic()
    late = [r for r in self._queue if r.deadline < now]
    late += [s.request for s in self._slots if s and s.request.deadline < now]
    if not late:
      return
    ids = {r.id for r in late}
    self.cancel(lambda r: r.id in ids)
    fault = Fault("deadline", "turn past rollout.turn_timeout_s", True)
    self._failed += [self._fail(r, fault) for r in late]

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
