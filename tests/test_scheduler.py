"""Order, fairness and memory: what is decided, from numbers alone."""

import random
import statistics
import time

import numpy as np
import pytest

from drmas_jax import scheduler
from drmas_jax.scheduler import Job, Queue, State, Turns, batches, decide

pytestmark = pytest.mark.quick


def add(queue, *jobs):
  made = [Job(kind, limit) for kind, limit in jobs]
  for job in made:
    queue.add(job)
  return made


def drain(queue):
  order = []
  while (job := queue.first()) is not None:
    queue.take(job)
    order.append(job)
  return order


def test_first_come_first_served_while_many_wait():
  queue = Queue(2)
  jobs = add(queue, *[(None, n) for n in (1, 9, 5, 7, 8)])
  for job in jobs[:3]:
    assert queue.first() is job
    queue.take(job)
  assert len(queue) == 2 and jobs[3] in queue and jobs[0] not in queue


def test_the_longest_expected_goes_first_at_the_tail():
  queue = Queue(4)
  for length in (10, 30):
    queue.ended("long", length)
  queue.ended("short", 2)
  jobs = add(queue, ("short", 99), ("long", 99), ("new", 15), ("long", 12))
  assert [queue.expected(job) for job in jobs] == [2, 20, 15, 12]
  assert drain(queue) == [jobs[1], jobs[2], jobs[3], jobs[0]]


def test_equals_go_by_arrival():
  queue = Queue(4)
  jobs = add(queue, *[("a", 5)] * 4)
  assert drain(queue) == jobs


def test_nothing_is_overtaken_more_often_than_there_are_slots():
  queue = Queue(3)
  (short,) = add(queue, (None, 1))
  before = 0
  while True:
    add(queue, (None, 100))
    job = queue.first()
    queue.take(job)
    if job is short:
      break
    before += 1
  assert before == short.overtaken == 3


def test_what_is_removed_is_not_served():
  queue = Queue(1)
  jobs = add(queue, *[(None, 1)] * 5)
  for i in (0, 2, 4):
    queue.remove(jobs[i])
  assert list(queue) == [jobs[1], jobs[3]]
  assert drain(queue) == [jobs[1], jobs[3]]


def test_batches_are_of_one_bucket():
  assert batches([8, 16, 8, 8, 16], 2) == [[0, 2], [1, 4], [3]]
  assert batches([], 2) == []


@pytest.mark.parametrize(
  ("state", "action"),
  [
    # Room is made for those that run before anyone comes.
    (State([1, 1], 2, 1, 1, None, 1), "park"),
    (State([1, 1], 2, 1, 1, 4, None), "park"),
    (State([3], 1, 2, 1, None, 1), "run"),  # the oldest is never parked
    # What is parked is back before anything is admitted.
    (State([0], 1, 9, 1, 8, None), "resume"),
    (State([0], 1, 8, 1, 8, None), "run"),  # a page for the one that runs
    (State([], 0, 8, 1, 8, None), "resume"),
    (State([0], 1, 9, 0, 8, 1), "run"),  # no slot
    (State([0], 1, 5, 1, 8, 1), "run"),  # the next one would fit: it waits
    (State([0, 1], 2, 6, 2, None, 3), "admit"),
    (State([0, 1], 2, 5, 2, None, 3), "run"),
    (State([0, 1], 1, 5, 2, None, 3), "admit"),  # one of them has all it needs
    (State([], 0, 5, 2, None, None), "run"),
  ],
)
def test_decide(state, action):
  assert decide(state) == action


class World:
  """Sequences of given lengths in a pool, without pages or tokens."""

  def __init__(self, lengths, num_slots, pages, size, steps):
    self.num_slots, self.pages, self.size = num_slots, pages, size
    self.steps, self.queue = steps, Queue(num_slots)
    self.left = {}
    self.coming = list(lengths)
    self.active, self.parked, self.ended, self.admitted = [], [], [], []
    self.held = {}

  def need(self, job):
    length = min(job.done + self.steps, job.limit)
    return -(-length // self.size)

  def state(self):
    growth = [self.need(j) - self.held[j.arrival] for j in self.active]
    first = self.queue.first()
    return State(
      growth,
      sum(-(-j.limit // self.size) > self.need(j) for j in self.active),
      self.pages - sum(self.held.values()),
      self.num_slots - len(self.active),
      self.need(self.parked[0]) if self.parked else None,
      self.need(first) if first else None,
    )

  def round(self, rng):
    for _ in range(rng.randint(0, 3)):
      if self.coming:
        (job,) = add(self.queue, (None, self.coming.pop()))
        job.done = 0
    oldest = self.active[0] if self.active else None
    while (action := decide(self.state())) != "run":
      if action == "park":
        job = self.active.pop()
        del self.held[job.arrival]
        self.parked.insert(0, job)
      else:
        if action == "resume":
          job = self.parked.pop(0)
        else:
          assert not self.parked
          job = self.queue.first()
          self.queue.take(job)
          self.admitted.append(job)
        self.active.append(job)
        self.held[job.arrival] = self.need(job)
    assert oldest is None or self.active[0] is oldest
    order = [self.admitted.index(j) for j in self.active + self.parked]
    assert order == sorted(order)
    for job in self.active:
      self.held[job.arrival] = self.need(job)
    assert sum(self.held.values()) <= self.pages
    for job in list(self.active):
      job.done = min(job.done + self.steps, job.limit)
      if job.done == job.limit:
        self.active.remove(job)
        del self.held[job.arrival]
        self.ended.append(job)


@pytest.mark.parametrize("seed", range(20))
def test_all_end_in_any_pool_that_holds_the_longest(seed):
  rng = random.Random(seed)
  size, longest = rng.randint(1, 8), rng.randint(1, 60)
  lengths = [rng.randint(1, longest) for _ in range(60)]
  pages = -(-max(lengths) // size) + rng.randint(0, 20)
  world = World(lengths, rng.randint(1, 9), pages, size, rng.randint(1, 9))
  for _ in range(5000):
    world.round(rng)
    if len(world.ended) == 60:
      break
  assert len(world.ended) == 60 and not world.held
  for job in world.ended:
    assert job.overtaken <= world.num_slots


def test_ten_thousand_that_wait_cost_nothing(capsys):
  """The queue's part of a round: who is next, gone, and the next one."""
  queue = Queue(32)
  jobs = add(queue, *[(i % 3, 100) for i in range(20_000)])
  for job in random.Random(0).sample(jobs, 10_000):
    queue.remove(job)
  growth, spent = [0] * 32, []
  for _ in range(2000):
    began = time.perf_counter()
    first = queue.first()
    action = decide(State(growth, len(growth), 1000, 1, None, 3))
    queue.take(first)
    queue.ended(first.kind, 10)
    add(queue, (0, 100))
    spent.append(time.perf_counter() - began)
    assert action == "admit"
  middle = statistics.median(spent)
  with capsys.disabled():
    print(f"[{middle * 1e6:.1f} us a round, 10,000 waiting]", end=" ")
  assert middle < 50e-6
  assert scheduler.Queue(1).first() is None


def test_engines_on_different_devices_run_at_once():
  turns = Turns([{0, 1}, {2}, {3}])
  assert turns.next([1.0, 0.1, 0.0]) == [0, 1]
  assert turns.next([0.0, 0.0, 0.0]) == []


@pytest.mark.parametrize(
  "devices, loads, chosen",
  [
    ([{0}, {0}], [0.4, 0.6], [1]),
    ([{0}, {0}], [0.1, 0.0], [0]),
    # The last has its device for itself, the first meets both others.
    ([{0, 1}, {0}, {1}], [0.9, 0.8, 0.7], [0]),
    ([{0, 1}, {0}, {1}], [0.7, 0.8, 0.9], [1, 2]),
  ],
)
def test_of_engines_on_one_device_the_fullest_runs(devices, loads, chosen):
  assert Turns(devices).next(loads) == chosen


@pytest.mark.parametrize(
  "at_once, loads, chosen",
  [
    (2, [0.4, 0.6, 0.5], [1, 2]),
    (2, [0.0, 0.6, 0.0], [1]),
    (3, [0.4, 0.6, 0.5], [0, 1, 2]),
  ],
)
def test_a_device_runs_as_many_engines_at_once_as_it_takes(
  at_once, loads, chosen
):
  assert Turns([{0}] * 3, at_once).next(loads) == chosen


def test_nobody_is_passed_over_for_ever_where_two_run_at_once():
  turns = Turns([{0}] * 3, at_once=2, patience=4)
  ran = [turns.next([1.0, 0.9, 0.01]) for _ in range(10)]
  assert ran == ([[0, 1]] * 4 + [[0, 2]]) * 2


def test_engines_that_are_all_full_take_turns():
  turns = Turns([{0}, {0}, {0}])
  # A queue behind full slots makes none of them fuller.
  ran = [turns.next([1.0, 3.0, 2.0])[0] for _ in range(9)]
  assert ran[:3] == ran[3:6] == ran[6:] and sorted(ran[:3]) == [0, 1, 2]


def test_an_engine_with_little_to_do_is_not_passed_over_for_ever():
  turns = Turns([{0}, {0}], patience=4)
  ran = [turns.next([1.0, 0.01])[0] for _ in range(15)]
  assert ran == [0, 0, 0, 0, 1] * 3


def test_what_was_waited_for_before_it_had_no_work_does_not_count():
  turns = Turns([{0}, {0}], patience=4)
  assert [turns.next([1.0, 0.1])[0] for _ in range(4)] == [0] * 4
  turns.next([1.0, 0.0])  # its request was cancelled
  assert turns.next([1.0, 0.1]) == [0]


def test_engines_of_one_device_in_turn_need_fewer_runs_than_all_at_once():
  """A run takes as long with one slot taken as with all."""
  num, slots = 40, 8
  rng = np.random.default_rng(0)
  # Runs that each call needs: a solver's, and then a verifier's short one.
  needed = np.stack([rng.integers(5, 20, num), rng.integers(1, 4, num)], 1)

  def runs(devices):
    waiting, running, ran = [list(range(num)), []], [{}, {}], 0
    turns = Turns(devices)
    while any(waiting) or any(running):
      pairs = zip(waiting, running, strict=True)
      for engine in turns.next([(len(w) + len(r)) / slots for w, r in pairs]):
        ran += 1
        queue, taken = waiting[engine], running[engine]
        while queue and len(taken) < slots:
          episode = queue.pop(0)
          taken[episode] = needed[episode, engine]
        for episode in list(taken):
          taken[episode] -= 1
          if not taken[episode]:
            del taken[episode]
            waiting[1] += [episode] * (engine == 0)
    return ran

  least = needed.sum() / slots
  assert least <= runs([{0}, {0}]) < 0.75 * runs([{0}, {1}])
