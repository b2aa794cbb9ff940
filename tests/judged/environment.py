"""The team's reward is a judge's verdict: what a user's own environment is."""

import asyncio

from drmas_jax.types import Outcome, ask

JUDGES = ("judge",)


class Judged:
  """One judge, asked `times` times at once; the first verdict decides."""

  def __init__(self, times, scores_groups):
    self.times = times
    if scores_groups:  # an environment that has this is asked for it alone
      self.score_group = self._score_group

  async def score(self, task, episode):
    said = (("solver", str(episode.action)),)
    verdicts = await asyncio.gather(
      *(ask("judge", task, said) for _ in range(self.times))
    )
    return Outcome(reward=float(verdicts[0].verdict == "approve"))

  async def _score_group(self, group):
    return [await self.score(group.task, e) for e in group.episodes]


def make(*, times: int = 1, scores_groups: bool = False):
  return Judged(times, scores_groups)
