"""From groups of episodes to rows with scores: what estimators work on."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from drmas_jax.types import Episode, Group, Turn


class Rows(NamedTuple):
  """The real turns of a step, in the order of groups, episodes and turns.

  Attributes:
    turns: [N] the turns themselves.
    scores: [N] float32.
    group: [N] int32, place of the group.
    agent: [N] int32, place of the agent among the sorted names.
    episode: [N] int32, unique over the step; failed episodes use up a number.
    per_agent: whether some outcome has a reward per agent.
  """

  turns: Sequence[Turn]
  scores: np.ndarray
  group: np.ndarray
  agent: np.ndarray
  episode: np.ndarray
  per_agent: bool


def ok(episode: Episode) -> bool:
  """Whether an episode takes part in statistics and loss (rule 6)."""
  return episode.status == "ok" and episode.outcome is not None


def row_scores(groups: Sequence[Group], penalties: Mapping[str, float]) -> Rows:
  """Scores every real turn (rule 1).

      score = reward of the turn's agent, or the team's
              + the turn's own reward
              - the agent's penalty if the turn is invalid

  Left out: episodes that failed or were cancelled, and turns with a fault.

  Args:
    groups: of one step.
    penalties: what an invalid turn costs, by agent; names every agent.
  """
  index = {name: i for i, name in enumerate(sorted(penalties))}
  turns, rows = [], []
  per_agent, number = False, -1
  for g, group in enumerate(groups):
    for episode in group.episodes:
      number += 1
      if not ok(episode):
        continue
      outcome = episode.outcome
      per_agent |= isinstance(outcome.reward, Mapping)
      for turn in episode.turns:
        if turn.fault is not None:
          continue
        score = outcome.of(turn.agent)
        score += outcome.turn_rewards.get(turn.index, 0.0)
        score -= 0.0 if turn.valid else penalties[turn.agent]
        turns.append(turn)
        rows.append((score, g, index[turn.agent], number))
  scores, *ids = zip(*rows, strict=True) if rows else ((), (), (), ())
  return Rows(
    turns,
    np.array(scores, np.float32),
    *(np.array(i, np.int32) for i in ids),
    per_agent,
  )
