"""Advantages from row scores: agent-wise (Dr. MAS) and global (GRPO).

A row is one turn. An estimator normalises samples within groups:

    A = (s - mean) / (std + 1e-6),    std with ddof 1

and estimators differ in what a sample is and which samples share a mean:

    estimator                     sample            baseline over
    agent_wise                    row               rows of (group, agent)
    grpo                          episode           episodes of the group
    grpo, rewards per agent       (episode, agent)  the agent's, in the group
    grpo, .., pool_agents=True    (episode, agent)  all agents', in the group

A sample of several rows scores their mean, and each of them gets its value.
Statistics are over real rows only: a padding row changes nothing and gets 0.

Source: Dr. MAS (arXiv 2602.08847) equations 2, 5 and 6, with the standard
deviation and epsilon of the authors' code rather than the paper's population
one; project rules 2 to 5 for groups of one and for equal scores.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from drmas_jax import config as config_lib

EPSILON = 1e-6

_STATIC = (
  "num_groups",
  "num_agents",
  "num_episodes",
  "singleton",
  "zero_tolerance",
  "per_agent",
  "pool_agents",
)


class Advantages(NamedTuple):
  """What an estimator returns.

  Attributes:
    values: [N] float32, 0 for padding.
    num_singleton: [num_agents] int32, groups in which the agent has rows whose
      baseline had a single sample.
    num_zero_variance: [num_agents] int32, the same for two or more samples
      that are equal within the tolerance.
  """

  values: Float[Array, " N"]
  num_singleton: Int[Array, " agents"]
  num_zero_variance: Int[Array, " agents"]


class _Samples(NamedTuple):
  """Standardised samples [M], and what kind of baseline each one had."""

  values: Float[Array, " M"]
  single: Bool[Array, " M"]
  flat: Bool[Array, " M"]


@functools.partial(jax.jit, static_argnames=_STATIC)
def agent_wise(
  scores: Float[Array, " N"],
  group: Int[Array, " N"],
  agent: Int[Array, " N"],
  episode: Int[Array, " N"],
  real: Bool[Array, " N"],
  *,
  num_groups: int,
  num_agents: int,
  num_episodes: int,
  singleton: Literal["zero", "raw"] = "zero",
  zero_tolerance: float = 1e-5,
  per_agent: bool = False,
  pool_agents: bool = False,
) -> Advantages:
  """Dr. MAS: mean and deviation over the rows of each (group, agent).

  Args:
    scores: row scores (rewards.py).
    group: ids from 0.
    agent: ids from 0.
    episode: ids from 0, unique over the step.
    real: False for padding.
    num_groups: bound of the ids of groups.
    num_agents: bound of the ids of agents.
    num_episodes: bound of the ids of episodes.
    singleton: a group of one gets 0, or "raw": score / (1 + epsilon).
    zero_tolerance: a deviation at or below this times max(1, max|score|) of
      the group counts as zero, and the group's values are 0.
    per_agent: rewards come one per agent. No effect here: the baseline is the
      agent's own either way.
    pool_agents: see `grpo`; no effect here.
  """
  del episode, num_episodes, per_agent, pool_agents
  pairs = _ids(group * num_agents + agent, real, num_groups * num_agents)
  samples = _standardize(
    scores, pairs, num_groups * num_agents, singleton, zero_tolerance
  )
  return _by_row(samples, pairs, real, num_groups, num_agents)


@functools.partial(jax.jit, static_argnames=_STATIC)
def grpo(
  scores: Float[Array, " N"],
  group: Int[Array, " N"],
  agent: Int[Array, " N"],
  episode: Int[Array, " N"],
  real: Bool[Array, " N"],
  *,
  num_groups: int,
  num_agents: int,
  num_episodes: int,
  singleton: Literal["zero", "raw"] = "zero",
  zero_tolerance: float = 1e-5,
  per_agent: bool = False,
  pool_agents: bool = False,
) -> Advantages:
  """GRPO: mean and deviation over the episodes of each group.

  Arguments as in `agent_wise`. With `per_agent` an episode is scored agent by
  agent (the mean of the agent's own rows), and an agent is compared with
  itself in the group's other episodes; `pool_agents` compares it with all
  agents' scores in the group instead.
  """
  pairs = _ids(group * num_agents + agent, real, num_groups * num_agents)
  unit, num_units = episode, num_episodes
  key, num_keys = group, num_groups
  if per_agent:
    unit, num_units = episode * num_agents + agent, num_episodes * num_agents
    if not pool_agents:
      key, num_keys = pairs, num_groups * num_agents
  unit = _ids(unit, real, num_units)
  # An empty unit has the smallest integer as its maximum: no key of its own.
  unit_key = jax.ops.segment_max(_ids(key, real, num_keys), unit, num_units + 1)
  unit_key = jnp.where(unit_key < 0, num_keys, unit_key)
  unit_scores = _mean(scores, unit, num_units)
  samples = _standardize(
    unit_scores, unit_key, num_keys, singleton, zero_tolerance
  )
  rows = _Samples(*(x[unit] for x in samples))
  return _by_row(rows, pairs, real, num_groups, num_agents)


def estimate(
  config: config_lib.Advantage,
  scores: np.ndarray,
  group: np.ndarray,
  agent: np.ndarray,
  episode: np.ndarray,
  *,
  num_agents: int,
  per_agent: bool = False,
) -> Advantages:
  """The configured estimator on a step's rows; numpy in, numpy out.

  Rows are padded to a power of two, which also bounds the ids of groups and
  episodes, so that a run meets few shapes. Those ids may be any integers.

  Args:
    config: names the estimator and sets its options.
    scores: [N] row scores, real rows only, in any order.
    group: [N] ids.
    agent: [N] ids, below num_agents.
    episode: [N] ids, unique over the step.
    num_agents: size of the team.
    per_agent: whether rewards come one per agent (`rewards.Rows.per_agent`).

  Returns:
    Advantages with `values` [N] in the order of `scores`.
  """
  num_rows = len(scores)
  width = 1 << max(num_rows - 1, 0).bit_length()
  _, group = np.unique(group, return_inverse=True)
  _, episode = np.unique(episode, return_inverse=True)

  def pad(x: np.ndarray, dtype: type) -> np.ndarray:
    return np.pad(np.asarray(x, dtype), (0, width - num_rows))

  result = ESTIMATORS[config.name](
    pad(scores, np.float32),
    pad(group, np.int32),
    pad(agent, np.int32),
    pad(episode, np.int32),
    np.arange(width) < num_rows,
    num_groups=width,
    num_agents=num_agents,
    num_episodes=width,
    singleton=config.singleton,
    zero_tolerance=config.zero_tolerance,
    per_agent=per_agent,
    pool_agents=config.pool_agents,
  )
  result = jax.device_get(result)
  return result._replace(values=result.values[:num_rows])


def _ids(
  ids: Int[Array, " N"], real: Bool[Array, " N"], num: int
) -> Int[Array, " N"]:
  """Padding goes to a segment of its own, number `num`."""
  return jnp.where(real, ids, num)


def _mean(
  scores: Float[Array, " M"], key: Int[Array, " M"], num_keys: int
) -> Float[Array, " keys"]:
  """Mean by key; exactly the score where all scores of a key are equal.

  Taken relative to the key's lowest score: a plain float32 mean of nine times
  0.9 is not 0.9, and such residues would be divided by epsilon.
  """
  low = jax.ops.segment_min(scores, key, num_keys + 1)
  above = jax.ops.segment_sum(scores - low[key], key, num_keys + 1)
  return low + above / jnp.maximum(_count(key, num_keys), 1)


def _count(key: Int[Array, " M"], num_keys: int) -> Float[Array, " keys"]:
  return jax.ops.segment_sum(
    jnp.ones(key.shape, jnp.float32), key, num_keys + 1
  )


def _standardize(
  scores: Float[Array, " M"],
  key: Int[Array, " M"],
  num_keys: int,
  singleton: str,
  zero_tolerance: float,
) -> _Samples:
  """(score - mean) / (std + epsilon) by key, in two passes (centred)."""
  count = _count(key, num_keys)
  centred = scores - _mean(scores, key, num_keys)[key]
  squares = jax.ops.segment_sum(centred**2, key, num_keys + 1)
  std = jnp.sqrt(squares / jnp.maximum(count - 1, 1))
  size = jax.ops.segment_max(jnp.abs(scores), key, num_keys + 1)
  single = (count == 1)[key]
  zero = std <= zero_tolerance * jnp.maximum(1, size)
  flat = (zero & (count > 1))[key]
  alone = scores / (1 + EPSILON) if singleton == "raw" else 0.0
  values = jnp.where(flat, 0.0, centred / (std[key] + EPSILON))
  return _Samples(jnp.where(single, alone, values), single, flat)


def _by_row(
  rows: _Samples,
  pairs: Int[Array, " N"],
  real: Bool[Array, " N"],
  num_groups: int,
  num_agents: int,
) -> Advantages:
  """Zeroes padding, and counts (group, agent) pairs by kind of baseline."""

  def count(flags: Bool[Array, " N"]) -> Int[Array, " agents"]:
    num_pairs = num_groups * num_agents
    hits = jax.ops.segment_sum(flags.astype(jnp.int32), pairs, num_pairs + 1)
    hits = hits[:num_pairs].reshape(num_groups, num_agents)
    return jnp.sum(hits > 0, axis=0, dtype=jnp.int32)

  values = jnp.where(real, rows.values, 0.0)
  return Advantages(values, count(rows.single), count(rows.flat))


ESTIMATORS: Mapping[str, Callable[..., Advantages]] = {
  "agent_wise": agent_wise,
  "grpo": grpo,
}
