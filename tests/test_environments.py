"""The math environment pays one for a right action, and loses no fault."""

import asyncio
import inspect

import numpy as np
import pytest

from drmas_jax.environments import math
from drmas_jax.grading import math as grading
from drmas_jax.grading import pool
from drmas_jax.types import Episode, Outcome, Reply, Task, Turn

pytestmark = pytest.mark.quick


def make_turn(text):
  none = np.zeros(0, np.float32)
  ids = (none, none, none, none)
  return Turn("solver", "p", 0, *ids, "stop", 0, True, text, Reply(text))


def score(action, gold="9", first=r"\boxed{9}"):
  task = Task("set", 0, 0, "4+5", gold)
  turns = [make_turn(first), make_turn("no"), make_turn(action)]
  return math.make().score(task, Episode(task, 0, turns, action=action))


@pytest.mark.parametrize(
  ("action", "reward", "answer"),
  [
    (r"so \boxed{9}", 1.0, "9"),
    (r"so \boxed{x = \frac{18}{2}}", 1.0, "9"),
    (r"\boxed{8}", 0.0, "8"),
    (r"\boxed{8} \boxed{}", 0.0, None),
    ("9", 0.0, None),
    ("", 0.0, None),
  ],
)
def test_math(action, reward, answer):
  outcome = score(action)
  assert outcome == Outcome(
    reward=reward,
    parts={"correct": reward, "first_correct": 1.0},
    answer=answer,
  )
  assert outcome.won is (reward == 1.0)
  assert not hasattr(math.make(), "score_group")


@pytest.mark.parametrize(
  ("action", "reward"), [(r"\boxed{\sqrt{8}}", 1.0), (r"\boxed{\sqrt{7}}", 0.0)]
)
def test_algebra_is_scored_later(action, reward):
  outcome = score(action, gold=r"2\sqrt{2}", first=r"\boxed{2.8284271247}")
  assert inspect.isawaitable(outcome)
  outcome = asyncio.run(outcome)
  assert outcome.reward == reward
  assert outcome.parts == {"correct": reward, "first_correct": 1.0}
  assert outcome.answer == grading.canonical(action[7:-1])


def test_no_verdict_is_no_zero(monkeypatch):
  def fail(*args, **kwargs):
    raise pool.GraderFault("late", True)

  monkeypatch.setattr(pool, "verdict", fail)
  with pytest.raises(pool.GraderFault):
    asyncio.run(score(r"\boxed{\sqrt{8}}", gold=r"2\sqrt{2}"))
  # Plain numbers need no worker.
  assert score(r"\boxed{9}").reward == 1.0


def test_version_changes_with_the_grader():
  assert grading.VERSION in math.VERSION
