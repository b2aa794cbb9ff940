"""The math environment pays one for a right action."""

import numpy as np
import pytest

from drmas_jax.environments import math
from drmas_jax.types import Episode, Reply, Task, Turn

pytestmark = pytest.mark.quick


def make_turn(text):
  none = np.zeros(0, np.float32)
  return Turn(
    "solver",
    "p",
    0,
    none,
    none,
    none,
    none,
    "stop",
    0,
    True,
    text,
    Reply(text),
  )


@pytest.mark.parametrize(
  ("action", "reward"),
  [(r"so \boxed{9}", 1.0), (r"\boxed{8}", 0.0), ("9", 0.0), ("", 0.0)],
)
def test_math(action, reward):
  task = Task("set", 0, 0, "4+5", "9")
  environment = math.make()
  turns = [make_turn(r"\boxed{9}"), make_turn("no"), make_turn(action)]
  outcome = environment.score(task, Episode(task, 0, turns, action=action))
  assert outcome.reward == reward
  assert outcome.parts == {"correct": reward, "first_correct": 1.0}
  assert outcome.won is (reward == 1.0)
  assert not environment.scores_groups
