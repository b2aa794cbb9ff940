"""What a run waits for is told: by a made-up clock, and of real hangs."""

import asyncio
import threading
import time
import types

import pytest
from test_rollout import Role, Scripted, make_config

from drmas_jax import hosts, rollout
from drmas_jax.types import Outcome, Task, act
from drmas_jax.watchdog import Watchdog

pytestmark = pytest.mark.quick

PATIENCE_S = 20.0  # for what takes no time, on a machine that is busy


class Clock:
  now = 100.0

  def __call__(self):
    return self.now


def make(tmp_path, **changes):
  """A watchdog that nobody but the test looks with, its clock, what it says."""
  clock, said = Clock(), []
  settings = {"factor": 2.0, "floor_s": 60.0, "clock": clock} | changes
  watch = Watchdog(tmp_path / "stacks", say=said.append, **settings)
  return watch, clock, said


def spend(watch, clock, seconds, name="step", times=1):
  for _ in range(times):
    with watch.during(name):
      clock.now += seconds
      watch.look()


def test_twice_the_median_and_then_at_growing_intervals(tmp_path):
  watch, clock, said = make(tmp_path)
  spend(watch, clock, 900.0, times=2)  # they compile
  spend(watch, clock, 50.0, times=5)
  assert not said
  told = []
  with watch.during("step"), watch.during("rollout", lambda: "for Godot"):
    for second in range(1, 1000):
      clock.now += 1
      watch.look()
      if len(said) > len(told):
        told.append(second)
  assert told == [100, 200, 400, 800]
  assert said[0].startswith("step > rollout: for 100 s, and the median is 50 s")
  assert "; for Godot; " in said[0]
  assert f"test_watchdog.py:{_line('watch.look()', 2)}" in said[0]
  spend(watch, clock, 50.0)
  assert len(said) == 4  # a new one, which took no longer than others


def _line(text, number):
  """Of the so-manieth line of this file that has a text."""
  lines = open(__file__, encoding="utf-8").read().splitlines()  # noqa: SIM115
  return [i for i, line in enumerate(lines, 1) if text in line][number - 1]


def test_no_wait_is_long_under_the_floor(tmp_path):
  watch, clock, said = make(tmp_path)
  spend(watch, clock, 1.0, times=9)
  spend(watch, clock, 59.0)
  assert not said
  spend(watch, clock, 60.0)
  assert len(said) == 1


def test_an_evaluation_is_measured_by_evaluations(tmp_path):
  watch, clock, said = make(tmp_path)
  spend(watch, clock, 10.0, times=9)
  spend(watch, clock, 500.0, "evaluation", times=4)
  spend(watch, clock, 900.0, "checkpoint", times=2)
  assert not said
  spend(watch, clock, 1000.0, "evaluation")
  assert len(said) == 1 and said[0].startswith("evaluation: for 1000 s")


def test_nothing_is_told_of_the_first_steps(tmp_path):
  watch, clock, said = make(tmp_path)
  spend(watch, clock, 1.0, times=3)
  spend(watch, clock, 9000.0)  # one step is no median
  assert not said
  watch.look()  # between two sections
  assert not said


def test_what_cannot_be_described(tmp_path):
  watch, clock, said = make(tmp_path)
  spend(watch, clock, 1.0, times=4)
  answers = iter([RuntimeError("changed size"), RuntimeError("again"), "three"])

  def describe():
    answer = next(answers)
    if isinstance(answer, Exception):
      raise answer
    return answer

  for wanted in ("; three; ", "(x cannot be described: StopIteration())"):
    with watch.during("step"), watch.during("x", describe):
      clock.now += 99.0
      watch.look()
    assert wanted in said.pop()


def test_which_host_is_missing(tmp_path, monkeypatch):
  one = hosts._Sign("one.example", entered=7, at="rollout")
  two = hosts._Sign("two.example", entered=8, at="agree on 'step'")
  here = object.__new__(hosts._Hosts)
  here._seen, here._waiting = {1: (one, 0.0), 2: (two, 0.0)}, None
  monkeypatch.setattr(hosts, "_hosts", here)
  watch, clock, said = make(tmp_path)
  spend(watch, clock, 1.0, times=4)
  spend(watch, clock, 99.0)
  assert "waits for" not in said.pop()
  here._waiting = "agree on 'step'", 8, 1e9
  spend(watch, clock, 99.0)
  assert (
    "agree on 'step' waits for host 1 (one.example), which is at: rollout;"
  ) in said[0]
  assert "two.example" not in said[0]


def test_stacks_of_all_threads(tmp_path):
  watch, clock, said = make(tmp_path)
  spend(watch, clock, 1.0, times=4)
  done = threading.Event()
  other = threading.Thread(target=done.wait, name="another one")
  other.start()
  spend(watch, clock, 99.0)
  done.set()
  other.join()
  [path] = (tmp_path / "stacks").iterdir()
  assert str(path) in said[0]
  text = path.read_text()
  assert "thread another one" in text and "thread MainThread" in text
  assert "in spend" in text and "step: for 99 s" in text


def test_other_hosts_write_no_files():
  said, clock = [], Clock()
  watch = Watchdog(None, factor=2.0, floor_s=60.0, say=said.append, clock=clock)
  spend(watch, clock, 1.0, times=4)
  spend(watch, clock, 99.0)
  assert "all threads:" in said[0] and "in spend" in said[0]


def test_the_thread_ends(tmp_path):
  watch, _, said = make(tmp_path, floor_s=1e-3)
  before = threading.active_count()
  for _ in range(2):  # a notebook may go on with it
    with watch:
      assert threading.active_count() == before + 1
    assert threading.active_count() == before
  with pytest.raises(KeyError), watch, watch.during("step"):
    raise KeyError
  assert threading.active_count() == before and not said


# -- real hangs ----------------------------------------------------------------


class Told(list):
  """What is said; what hangs ends once a line has `wanted`, and not before."""

  def __init__(self, wanted):
    super().__init__()
    self.wanted = wanted
    self.end = time.monotonic() + PATIENCE_S

  def __bool__(self):
    return any(map(self.has, self)) or time.monotonic() > self.end

  def has(self, line):
    return self.wanted in line


class Environment:
  def __init__(self, said, blocks):
    self.said, self.blocks = said, blocks

  def act(self, task, action):
    return self.hang() if self.blocks else self.wait()

  def hang(self):
    while not self.said:
      time.sleep(0.005)
    return "late"

  async def wait(self):
    while not self.said:
      await asyncio.sleep(0.005)
    return "late"

  def score(self, task, episode):
    return Outcome(1.0)


class Engine(Scripted):
  """One that hangs."""

  num_requests = property(lambda self: len(self.queue) + len(self.running))
  num_running = property(lambda self: len(self.running))
  said = (True,)

  def harvest(self):
    while self.running and not self.said:
      time.sleep(0.005)
    return super().harvest()


async def orchestra(task, call):
  reply = await call("a", task.question)
  return await act(reply.text) if task.question == "act" else reply.text


def hang(tmp_path, question, wanted, blocks=False):
  """What is told of a rollout that hangs, and the group that it comes to.

  Of three episodes there is room for two.
  """
  said = Told(wanted)
  config = make_config()
  team = object.__new__(rollout.Team)
  team.members = {
    n: rollout.Member(n, Role(), a) for n, a in config.agents.items()
  }
  team.orchestra = types.SimpleNamespace(run=orchestra)
  team.orchestra_options = {}
  team.environment = Environment(said, blocks)
  team.reward_timeout_s = 1.0
  samplers = {"p": Engine(lambda key: "ok", num_slots=1)}
  if question == "turn":
    samplers["p"].said = said
  player = rollout.Rollout(team, samplers, config)
  watch = Watchdog(
    tmp_path / "stacks", factor=2.0, floor_s=0.05, say=said.append
  )
  try:
    with watch:
      for _ in range(4):
        with watch.during("step"):
          pass
      with watch.during("step"), watch.during("rollout", player.waiting):
        task = Task("sums", 3, 11, question, "")
        [group] = player.collect([task], 3, key=None)
  finally:
    player.close()
  assert player.waiting() == ""
  return next(filter(said.has, said)), group


@pytest.mark.parametrize("blocks", [False, True])
def test_an_environment_that_hangs(tmp_path, blocks):
  wanted = " hang < " if blocks else "I/O thread has 2"
  said, group = hang(tmp_path, "act", wanted, blocks)
  assert [e.action for e in group.episodes] == ["late"] * 3
  assert said.startswith("step > rollout: for 0 s") and "3 episodes are" in said
  where = "wait for the environment: task sums[3], episode 0, act"
  if blocks:  # the main thread itself
    assert f"1 {where}" in said and "I/O" not in said
    assert "the main thread is at test_watchdog.py:" in said
  else:
    assert f"2 {where}" in said and "oldest turn" not in said
    assert "I/O thread has 2, at test_watchdog.py:" in said and " wait;" in said
    stacks = [path.read_text() for path in (tmp_path / "stacks").iterdir()]
    assert any("thread drmas-io" in text for text in stacks)


def test_an_engine_that_hangs(tmp_path):
  said, group = hang(tmp_path, "turn", "has slots for 2")
  assert [e.action for e in group.episodes] == ["ok"] * 3
  assert (
    "the oldest turn of 2 is 'a''s, by the policy 'p', asked for 0 s ago in "
    "task sums[3], episode 0"
  ) in said
  assert "'p' has slots for 2 of its 2 requests" in said and "'q'" not in said
