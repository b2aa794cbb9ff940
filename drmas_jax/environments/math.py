"""One step: the team's last solution is right or wrong."""

import asyncio
from collections.abc import Awaitable, Sequence

from drmas_jax.grading import math as grading
from drmas_jax.types import Episode, Outcome, Task

VERSION = f"math {grading.VERSION}"


class MathEnvironment:
  """Reward 1 for a correct action, 0 for any other.

  The part `first_correct` grades the episode's first turn, which is a
  solution: the team's success minus it is what verdicts and second tries
  gained. Where a verdict takes algebra the outcome is a coroutine; without a
  verdict (`grading.pool.GraderFault`) the episode is lost, not wrong.
  """

  def score(self, task: Task, episode: Episode) -> Outcome | Awaitable[Outcome]:
    solutions = (episode.action, episode.turns[0].reply.text)
    verdicts = [grading.quick_grade(s, task.answer) for s in solutions]
    if None in verdicts:
      return _score_later(solutions, task.answer)
    return _outcome(solutions[0], verdicts)


async def _score_later(solutions: Sequence[str], answer) -> Outcome:
  verdicts = await asyncio.gather(
    *(asyncio.to_thread(grading.grade, s, answer) for s in solutions)
  )
  return _outcome(solutions[0], verdicts)


def _outcome(action: str, verdicts: Sequence[bool]) -> Outcome:
  correct, first = map(float, verdicts)
  found = grading.answer_of(action)
  return Outcome(
    reward=correct,
    parts={"correct": correct, "first_correct": first},
    answer=None if found is None else grading.canonical(found),
  )


def make() -> MathEnvironment:
  return MathEnvironment()
