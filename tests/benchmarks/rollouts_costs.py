"""Parts f to h of `rollouts.py`: the host's share, memory, a real model."""

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import rollouts_lab as lab

from drmas_jax import decoding
from drmas_jax.models import weights
from drmas_jax.sampler import Sampler

# -- f. time on the host -------------------------------------------------------


def host(args, peers) -> dict:
  """f. What the host adds to a rollout, and what a long queue adds to that.

  A share is of the time of `dispatch` and `harvest` without the wait for the
  device: by wall of the rollout's wall, and by the CPU seconds of the thread of
  those of the process. Where the machine is loaded the wall of a host that is
  not scheduled counts as the host's; the CPU share is then the one to read.
  """
  del peers
  sampler = lab.make_sampler(lab.random_params(), stop_ids=lab.stop_ids())
  shares = [_shares(sampler) for _ in range(1 + args.rounds)][1:]
  queued = {n: _scheduling(n) for n in (64, 10_000)}
  return {
    **{
      name: round(statistics.median(s[name] for s in shares), 4)
      for name in shares[0]
    },
    "dispatch_us": queued,
    "queue_us": round(queued[10_000] - queued[64], 1),
  }


def _shares(sampler: Sampler) -> dict[str, float]:
  """Of 16 groups of 8 that end at different lengths."""
  for position, prompt in enumerate(lab.prompts(16)):
    for episode in range(8):
      sampler.submit(
        lab.request((position, episode, 0), prompt, lab.NEW, shared_by=8)
      )
  wall, cpu, thread = _clocks()
  with _waits() as waited:
    while sampler.busy:
      sampler.dispatch()
      for completion in sampler.harvest():
        sampler.forget(*completion.request.id[:2])
  all_wall, all_cpu, all_thread = (
    now - then for now, then in zip(_clocks(), (wall, cpu, thread), strict=True)
  )
  return {
    "wall_share": (all_wall - waited[0]) / all_wall,
    "cpu_share": (all_thread - waited[1]) / all_cpu,
  }


def _clocks() -> tuple[float, float, float]:
  """Wall, CPU of the process, CPU of this thread."""
  return time.perf_counter(), time.process_time(), time.thread_time()


@contextlib.contextmanager
def _waits() -> Iterator[list[float]]:
  """[wall, CPU of the thread] of all waits for the device."""
  seconds, real = [0.0, 0.0], decoding.to_host

  def to_host(out):
    wall, thread = time.perf_counter(), time.thread_time()
    jax.block_until_ready(out)
    seconds[0] += time.perf_counter() - wall
    seconds[1] += time.thread_time() - thread
    return real(out)

  decoding.to_host = to_host
  try:
    yield seconds
  finally:
    decoding.to_host = real


class Idle:
  """An engine without a device: what is left is the sampler's own work."""

  rewinds = True
  version = 0

  def __init__(self, spec: decoding.Spec):
    self.spec, self.num_pages = spec, spec.max_pages
    self._left = np.zeros([spec.num_slots], int)

  def bucket(self, length: int) -> int:
    return self.spec.prefill_buckets[0]

  def prefill_rows(self, chunks):
    return chunks

  def insert_rows(self, hidden, rows, slots, copies, lengths, requests):
    self._left[list(slots)] = requests.limit

  def generate_n(self, tables, live, leave_when_free):
    del tables
    steps = self.spec.steps_per_call
    if leave_when_free:
      steps = min(steps, self._left[live].min())
    shape = (self.spec.steps_per_call, self.spec.num_slots)
    valid = live & (np.arange(shape[0])[:, None] < self._left)
    valid[steps:] = False
    self._left = self._left - steps
    zeros = np.zeros(shape, np.float32)
    out = decoding.Generated(
      zeros.astype(np.int32), zeros, zeros, valid, steps, self._left > 0
    )
    return [decoding.Part(range(shape[1]), out)]


def _scheduling(num_queued: int, calls: int = 200) -> float:
  """Microseconds of `dispatch` with so many requests in the queue."""
  sampler = Sampler(Idle(lab.spec()), lab.Silent())
  prompts = lab.prompts(num_queued + 32 * calls)
  lengths = np.random.default_rng(0).integers(1, lab.NEW, len(prompts))
  coming = (
    lab.request((i, 0, 0), prompt, int(length))
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
  )
  for _ in range(num_queued):
    sampler.submit(next(coming))
  seconds = []
  for _ in range(calls):
    start = time.thread_time()
    sampler.dispatch()
    seconds.append(time.thread_time() - start)
    for completion in sampler.harvest():
      sampler.forget(*completion.request.id[:2])
      sampler.submit(next(coming))
  return round(1e6 * statistics.median(seconds), 1)


# -- g. memory -----------------------------------------------------------------


def memory(args, peers) -> dict:
  """g. One long episode among 31 short ones, at a maximum length of 12,288.

  MB of keys and values: of the pool; of the pages that a run copies out of it
  (where no kernel reads the pool itself), at most; of a dense cache.
  """
  del args, peers
  longest = 12_288
  sampler = lab.make_sampler(
    lab.random_params(),
    max_length=longest,
    prefill_rows=1,  # or the long prompt would be padded with seven more
    prefill_buckets=(lab.PROMPT, longest),
  )
  engine, spec = sampler.engine, sampler.engine.spec
  start, generate, copied = engine.num_pages, engine.generate_n, [0]

  def generate_n(tables, *rest, **named):
    copied.append(sum(map(len, tables)))
    return generate(tables, *rest, **named)

  engine.generate_n = generate_n
  [long] = lab.prompts(1, longest - lab.NEW)
  lab.serve(
    sampler,
    [
      lab.request((i, 0, 0), prompt, lab.NEW)
      for i, prompt in enumerate([*lab.prompts(31), long])
    ],
  )
  page = _bytes(engine.state.cache) / engine.num_pages
  mb = {
    "begins": start * page,
    "pool": engine.num_pages * page,
    "copied": 0 if spec.fused else max(copied) * page,
    "dense": spec.num_slots * spec.pages_per_row * page,
  }
  tokens = 31 * (lab.PROMPT + lab.NEW) + longest
  return {
    "mb": {name: round(size / 1e6, 1) for name, size in mb.items()},
    "live_tokens_mb": round(tokens / spec.page_size * page / 1e6, 1),
    "dense_by_paged": round(mb["dense"] / (mb["pool"] + mb["copied"]), 1),
  }


def _bytes(tree: Any) -> int:
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


# -- h. a real model -----------------------------------------------------------


def smollm2(args, peers) -> dict:
  """h. SmolLM2's decoding as a share of what this machine could do.

  A step reads every weight and the keys and values so far, and multiplies each
  weight by the hidden states of all slots. Its limit is the longer of the two
  at the rates measured here: bytes at which the weights can be read, and
  products of the decode's own shapes whose weights are at hand.
  """
  del peers
  if not args.smollm2:
    return {"left out": "no --smollm2"}
  model = weights.read_config(args.smollm2)
  params = weights.load(args.smollm2, model, lab.one_device())
  flat = jax.tree.leaves(params)
  num_bytes = _bytes(params)
  bandwidth = num_bytes / _seconds(
    jax.jit(lambda xs: [x.sum() for x in xs]), flat
  )
  found = {"read_gb_per_s": round(bandwidth / 1e9, 1)}
  # Of the embedding one row is read at the bottom; tied, it is the head on top.
  num_weights = sum(x.size for x in flat)
  for slots in (1, 8, 32, 64):
    rate = _product_rate(model, slots)
    cached = slots * (lab.PROMPT + lab.NEW / 2) * _bytes_per_token(model)
    limits = {
      "bandwidth": (num_bytes + cached) / bandwidth,
      "products": 2 * num_weights * slots / rate,
    }
    limit = max(limits, key=limits.get)
    speeds = _decode_speeds(params, model, slots, args.rounds)
    possible = slots / limits[limit]
    found[f"{slots} slots"] = {
      "tokens_per_s": round(statistics.median(speeds), 1),
      "best_tokens_per_s": round(max(speeds), 1),
      "limit_tokens_per_s": round(possible, 1),
      "limit_is": limit,
      "products_gflop_per_s": round(rate / 1e9, 1),
      "share": round(statistics.median(speeds) / possible, 3),
    }
    print(slots, found[f"{slots} slots"], flush=True)
  return found


def _seconds(run, *values, tries: int = 7) -> float:
  """The fastest: a limit is what the machine can do at its best."""
  jax.block_until_ready(run(*values))
  return min(
    lab.timed(lambda: jax.block_until_ready(run(*values))).wall
    for _ in range(tries)
  )


def _bytes_per_token(model) -> int:
  return 4 * 2 * model.num_layers * model.num_kv_heads * model.head_dim


def _product_rate(model, slots: int, repeats: int = 20) -> float:
  """Operations a second of x [slots, D] through an mlp and back."""
  key = jax.random.key(0)
  size = (model.embed_dim, model.mlp_dim)
  up = jax.random.normal(key, size) / size[0]
  down = jax.random.normal(key, size[::-1]) / size[1]
  x = jax.random.normal(key, (slots, size[0]))
  run = jax.jit(
    lambda x: jax.lax.fori_loop(0, repeats, lambda _, x: (x @ up) @ down, x)
  )
  return repeats * 4 * slots * size[0] * size[1] / _seconds(run, x)


def _decode_speeds(params, model, slots: int, rounds: int) -> Sequence[float]:
  """Tokens a second from the second run on, without prefills."""
  sampler = lab.make_sampler(
    params, model=model, num_slots=slots, prefill_buckets=(lab.PROMPT,)
  )
  speeds = []
  for _ in range(1 + rounds):
    for i, prompt in enumerate(lab.prompts(slots)):
      sampler.submit(lab.request((i, 0, 0), prompt, lab.NEW))
    sampler.dispatch()
    sampler.harvest()
    start, steps = time.perf_counter(), sampler.counts.steps
    while sampler.busy:
      sampler.dispatch()
      for completion in sampler.harvest():
        sampler.forget(*completion.request.id[:2])
    seconds = time.perf_counter() - start
    speeds.append(slots * (sampler.counts.steps - steps) / seconds)
  return speeds[1:]


PARTS = {"f": host, "g": memory, "h": smollm2}
