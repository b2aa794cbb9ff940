"""From groups of episodes to rows with scores: what estimators work on."""

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from drmas_jax import config as config_lib
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


class Overlong(NamedTuple):
  """What long completions of an agent cost.

      penalty * max(0, length - (max_tokens - buffer)) / buffer

  so nothing up to `buffer` tokens before the limit, and all of it at the limit.

  Attributes:
    max_tokens: limit of a completion.
    buffer: above 0, at most max_tokens.
    penalty: of one that is as long as the limit.

  Source: Yu et al. 2025 (DAPO, arXiv 2503.14476) equation 13.
  """

  max_tokens: int
  buffer: int
  penalty: float

  def cost(self, turn: Turn) -> float:
    """What is taken from the turn's score."""
    over = len(turn.completion_ids) - (self.max_tokens - self.buffer)
    return self.penalty * max(0, over) / self.buffer


def overlong_costs(
  agents: Mapping[str, config_lib.Agent],
) -> dict[str, Overlong]:
  """By name, of the agents that have such costs."""
  return {
    name: Overlong(a.max_tokens, a.overlong_tokens, a.overlong_penalty)
    for name, a in agents.items()
    if a.overlong_tokens
  }


def real(episode: Episode) -> list[Turn]:
  """The turns of an episode that are rows, if it is `ok`."""
  return [t for t in episode.turns if t.counts and t.fault is None]


def ok(episode: Episode) -> bool:
  """Whether an episode takes part in statistics and loss (rule 6)."""
  return episode.status == "ok" and episode.outcome is not None


def is_mixed(group: Group, zero_tolerance: float) -> bool:
  """Whether rewards tell the group's episodes apart, for one agent at least.

  An episode's rewards are the team's and each agent's, with those of the turns,
  which may differ where the team's sum does not; penalties do not count.
  Rewards are equal where their deviation counts as zero (rule 5), so those of a
  single episode are.

  Args:
    group: of which the episodes that are `ok` count.
    zero_tolerance: that of `config.Advantage`.

  Source: Yu et al. 2025 (DAPO, arXiv 2503.14476) equation 11.
  """
  rewards = collections.defaultdict(list)
  for episode in filter(ok, group.episodes):
    for whose, reward in _rewards(episode):
      rewards[whose].append(reward)
  return any(_differ(found, zero_tolerance) for found in rewards.values())


def _rewards(episode: Episode) -> Iterator[tuple[str, float]]:
  """(agent, reward) of those that spoke in an episode; "" is the team, which
  has one where it is not per agent."""
  outcome = episode.outcome
  if not isinstance(outcome.reward, Mapping):
    yield "", outcome.reward + sum(outcome.turn_rewards.values())
  own: dict[str, float] = collections.defaultdict(float)
  for turn in episode.turns:
    if turn.counts:
      own[turn.agent] += outcome.turn_rewards.get(turn.index, 0.0)
  for agent, reward in own.items():
    yield agent, outcome.of(agent) + reward


def _differ(rewards: Sequence[float], zero_tolerance: float) -> bool:
  if len(rewards) < 2:
    return False
  values = np.array(rewards, float)
  # Less the lowest: equal numbers have then a deviation of exactly 0.
  deviation = np.std(values - values.min(), ddof=1)
  return bool(deviation > zero_tolerance * max(1, np.abs(values).max()))


def anchors(turns: Sequence[Turn]) -> np.ndarray:
  """[N] int: a number for each prompt, the same where all its tokens are."""
  known: dict[bytes, int] = {}
  return np.array(
    [known.setdefault(t.prompt_ids.tobytes(), len(known)) for t in turns], int
  )


def step_returns(
  groups: Sequence[Group], scores: np.ndarray, gamma: float
) -> np.ndarray:
  """[N] float32 of what followed each turn, discounted, less its own charges.

      G_t = gamma^(last - t) R + sum_{u >= t} gamma^(u - t) r_u - c_t

  t, u and last are indices of an episode's turns, r_u is the turn's own reward,
  R that of the outcome, and c_t what is taken from the turn's score for its
  form (R + r_t - score). With rewards per agent, R and the sum are those of
  the turn's agent; u stands for its turns.

  Args:
    groups: of one step.
    scores: [N] of its rows (`row_scores`), in their order.
    gamma: in [0, 1].
  """
  found = [np.zeros(0)]
  for episode in (e for g in groups for e in g.episodes if ok(e)):
    turns = real(episode)
    outcome = episode.outcome
    index = np.array([t.index for t in turns], int)
    final = np.array([outcome.of(t.agent) for t in turns])
    own = np.array([outcome.turn_rewards.get(t.index, 0.0) for t in turns])
    ahead = index[None] >= index[:, None]
    if isinstance(outcome.reward, Mapping):
      agent = np.array([t.agent for t in turns])
      ahead &= agent[None] == agent[:, None]
    powers = gamma ** np.maximum(index[None] - index[:, None], 0)
    last = index.max(initial=0)
    found.append(
      gamma ** (last - index) * final + (powers * ahead) @ own - final - own
    )
  return (np.concatenate(found) + scores).astype(np.float32)


def row_scores(
  groups: Sequence[Group],
  penalties: Mapping[str, float],
  overlong: Mapping[str, Overlong] | None = None,
) -> Rows:
  """Scores every real turn (rule 1).

      score = reward of the turn's agent, or the team's
              + the turn's own reward
              - the agent's penalty if the turn is invalid
              - what the turn costs as an overlong one

  Left out: episodes that failed or were cancelled, and turns with a fault or
  that do not count.

  Args:
    groups: of one step.
    penalties: what an invalid turn costs, by agent; names every agent.
    overlong: what a long turn costs, by agent, of those whose do.
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
      for turn in real(episode):
        score = outcome.of(turn.agent)
        score += outcome.turn_rewards.get(turn.index, 0.0)
        score -= 0.0 if turn.valid else penalties[turn.agent]
        if overlong and turn.agent in overlong:
          score -= overlong[turn.agent].cost(turn)
        turns.append(turn)
        rows.append((score, g, index[turn.agent], number))
  scores, *ids = zip(*rows, strict=True) if rows else ((), (), (), ())
  return Rows(
    turns,
    np.array(scores, np.float32),
    *(np.array(i, np.int32) for i in ids),
    per_agent,
  )
