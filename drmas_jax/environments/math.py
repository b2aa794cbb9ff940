"""One step: the team's last solution is right or wrong."""

from drmas_jax.grading import math as grading
from drmas_jax.types import Episode, Outcome, Task


class MathEnvironment:
  """Reward 1 for a correct action, 0 for any other.

  The part `first_correct` grades the episode's first turn, which is a
  solution: the team's success minus it is what verdicts and second tries
  gained.
  """

  scores_groups = False

  def score(self, task: Task, episode: Episode) -> Outcome:
    correct = float(grading.grade(episode.action, task.answer))
    first = episode.turns[0].reply.text
    parts = {
      "correct": correct,
      "first_correct": float(grading.grade(first, task.answer)),
    }
    return Outcome(reward=correct, parts=parts)


def make() -> MathEnvironment:
  return MathEnvironment()
