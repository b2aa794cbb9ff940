"""Advantages from row scores: agent-wise (Dr. MAS), global (GRPO), and others.

A row is one turn. An estimator takes samples of rows, compares each with the
others of its baseline, and may divide by a scale:

    samples    count: every turn, or every episode at the mean of its turns
    baseline   over: the samples of the (group, agent), or of the whole group
    scale      std with ddof 1, plus 1e-6; or another

    estimator     samples         baseline         A of a sample
    agent_wise    turn | episode  agent            (s - mu_k) / (sigma_k + e)
    grpo          episode         team             (s - mu) / (sigma + e)
    global_call   turn            team             the same
    mean_only     turn | episode  agent            (s - mu_k) / (sigma + e)
    std_only      turn | episode  team             (s - mu) / (sigma_k + e)
    rloo          turn | episode  agent | team     n / (n - 1) * (s - mean)
    dr_grpo       turn | episode  agent | team     s - mean
    reinforce_plus_plus_baseline  (both free)      (s - mean), whitened
    rae           turn | episode  the agent's past  s - average
    gigpo         as agent_wise, and turns with one another in the same state
    bounded       turn            agent            (s - mu_k - t) / root mean sq

mu and sigma without an index are grpo's. A sample of several rows scores their
mean, and each of them gets its value. With rewards per agent an episode is a
sample for each of its agents, compared with the same agent's in the group's
other episodes, or with all agents' if `pool_agents`. With `by_turn` a baseline
is of one turn index, too. Statistics are over real rows only: a padding row
changes nothing and gets 0. A sample that is alone in its baseline gets 0, or
its score / (1 + 1e-6) with singleton="raw"; and so do all samples of a baseline
whose deviation is at most zero_tolerance * max(1, max|score|): exactly 0.

Sources: Dr. MAS (arXiv 2602.08847) equations 2, 5 and 6 and its section 5.4,
with the standard deviation and epsilon of the authors' code rather than the
paper's population one; project rules 2 to 5.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from drmas_jax import config as config_lib
from drmas_jax import rewards
from drmas_jax.types import Group

EPSILON = 1e-6
_TIE = 1e-5  # relative distance within which `bounded` takes two for equal

_LEAST_ROWS = 32  # fewer are padded to as many


class Advantages(NamedTuple):
  """What an estimator returns.

  Attributes:
    values: [N] float32, 0 for padding.
    num_singleton: [num_agents] int32, groups in which the agent has rows whose
      baseline had a single sample.
    num_zero_variance: [num_agents] int32, groups in which the agent has rows
      and none of them a signal: all samples of each baseline are equal within
      the tolerance, and of one there are two or more.
  """

  values: Float[Array, " N"]
  num_singleton: Int[Array, " agents"]
  num_zero_variance: Int[Array, " agents"]


class Turns(NamedTuple):
  """The rows that an estimator works on.

  Attributes:
    scores: of the rows (rewards.py).
    group: ids from 0; with `by_turn` each place in the episodes is one.
    played: ids from 0 of the groups as they were played.
    agent: ids from 0.
    episode: ids from 0, unique over the step.
    tokens: trained tokens of the row.
    anchor: ids from 0 of the states that turns were taken in, each of one
      (group, agent); read by `gigpo` alone.
    returns: what followed the turn (rewards.step_returns); likewise.
    real: False for padding.
  """

  scores: Float[Array, " N"]
  group: Int[Array, " N"]
  played: Int[Array, " N"]
  agent: Int[Array, " N"]
  episode: Int[Array, " N"]
  tokens: Int[Array, " N"]
  anchor: Int[Array, " N"]
  returns: Float[Array, " N"]
  real: Bool[Array, " N"]


class Sizes(NamedTuple):
  """What is static beside the config.

  Attributes:
    groups: bound of the ids of groups.
    agents: bound of the ids of agents.
    episodes: bound of the ids of episodes.
    per_agent: rewards come one per agent.
  """

  groups: int
  agents: int
  episodes: int
  per_agent: bool = False

  @property
  def pairs(self) -> int:
    return self.groups * self.agents


class Run(NamedTuple):
  """What a host knows beyond the rows of its own step.

  Attributes:
    averages: [agents, 2] float64 of `rae`: a decayed sum of the steps' mean
      scores, and the weight in it, which is 0 before an agent's first step.
    total: adds up an array over the hosts; all of them call it.
  """

  averages: np.ndarray
  total: Callable[[np.ndarray], np.ndarray]


Estimator = Callable[
  [Turns, config_lib.Advantage, Sizes, Run], tuple[Advantages, np.ndarray]
]


class _Baseline(NamedTuple):
  """What each row [N] is compared with, and its sample.

  Attributes:
    scores: of the row's sample.
    centred: less the mean of the baseline.
    std: of the baseline.
    count: samples in the baseline.
    single: it has one sample.
    flat: it has more, which are equal within the tolerance.
  """

  scores: Float[Array, " N"]
  centred: Float[Array, " N"]
  std: Float[Array, " N"]
  count: Float[Array, " N"]
  single: Bool[Array, " N"]
  flat: Bool[Array, " N"]


_jit = functools.partial(jax.jit, static_argnames=("config", "sizes"))


def _local(function: Callable[..., Advantages]) -> Estimator:
  """An estimator that needs no more than this host's rows of the step."""
  compiled = _jit(function)

  @functools.wraps(compiled)
  def estimator(turns, config, sizes, run):
    return compiled(turns, config, sizes), run.averages

  return estimator


@_local
def agent_wise(
  turns: Turns, config: config_lib.Advantage, sizes: Sizes
) -> Advantages:
  """Dr. MAS: mean and deviation of the agent's own in the group (eq. 5)."""
  base = _baseline(turns, config, sizes, "agent", config.count)
  return _result(turns, config, sizes, base, _standard(base, base.std))


@_local
def grpo(
  turns: Turns, config: config_lib.Advantage, sizes: Sizes
) -> Advantages:
  """GRPO: mean and deviation over the episodes of the group (eq. 2)."""
  base = _baseline(turns, config, sizes, "team", "episode")
  return _result(turns, config, sizes, base, _standard(base, base.std))


@_local
def global_call(
  turns: Turns, config: config_lib.Advantage, sizes: Sizes
) -> Advantages:
  """Mean and deviation over all turns of the group: between the two above, it
  counts turns as `agent_wise` and compares all agents as `grpo`."""
  base = _baseline(turns, config, sizes, "team", "turn")
  return _result(turns, config, sizes, base, _standard(base, base.std))


@_local
def mean_only(
  turns: Turns, config: config_lib.Advantage, sizes: Sizes
) -> Advantages:
  """Dr. MAS's ablation (mu_k, sigma): the agent's mean, the group's deviation.

  0 where either baseline has one sample or no deviation.
  """
  own = _baseline(turns, config, sizes, "agent", config.count)
  team = _baseline(turns, config, sizes, "team", "episode")
  base = own._replace(
    single=own.single | team.single, flat=own.flat | team.flat
  )
  return _result(turns, config, sizes, base, _standard(base, team.std))


@_local
def std_only(
  turns: Turns, config: config_lib.Advantage, sizes: Sizes
) -> Advantages:
  """Dr. MAS's ablation (mu, sigma_k): the group's mean, the agent's deviation.

  Divided by the group's where the agent's is zero (rule 5). 0 where either
  baseline has one sample, or both have no deviation.
  """
  own = _baseline(turns, config, sizes, "agent", config.count)
  team = _baseline(turns, config, sizes, "team", "episode")
  base = own._replace(
    centred=own.scores - (team.scores - team.centred),
    single=own.single | team.single,
    flat=own.flat & team.flat,
  )
  std = jnp.where(own.flat, team.std, own.std)
  return _result(turns, config, sizes, base, _standard(base, std))


@_local
def rloo(
  turns: Turns, config: config_lib.Advantage, sizes: Sizes
) -> Advantages:
  """A sample less the mean of the others: n / (n - 1) * (s - mean).

  Source: RLOO (arXiv 2402.14740).
  """
  base = _baseline(turns, config, sizes, config.over, config.count)
  values = base.centred * base.count / jnp.maximum(base.count - 1, 1)
  return _result(turns, config, sizes, base, values)


@_local
def dr_grpo(
  turns: Turns, config: config_lib.Advantage, sizes: Sizes
) -> Advantages:
  """A sample less the mean, not divided. Source: arXiv 2503.20783."""
  base = _baseline(turns, config, sizes, config.over, config.count)
  return _result(turns, config, sizes, base, base.centred)


@_local
def gigpo(
  turns: Turns, config: config_lib.Advantage, sizes: Sizes
) -> Advantages:
  """A sample in its baseline, and a turn among those taken in the same state.

      A = (s - mean) / (std + e) + step_weight * (G - mean_a) / (std_a + e)

  G is what followed the turn, discounted by gamma (rewards.step_returns), and
  its mean and deviation are over the turns of the (group, agent) with the same
  anchor. In a team of language models a turn's state is its prompt, so an
  anchor is a prompt, equal token by token: all first turns of an agent have
  one where nobody has spoken before, later ones where the same was said. The
  second part is 0 for a turn alone in its state, and for equal returns.

  Source: GiGPO (arXiv 2505.10978), with the standard deviation as the factor.
  """
  base = _baseline(turns, config, sizes, config.over, config.count)
  found = _result(turns, config, sizes, base, _standard(base, base.std))
  num = len(turns.scores)
  anchor = _ids(turns.anchor, turns.real, num)
  step = _statistics(turns.returns, anchor, num, config.zero_tolerance)
  mixed = turns.real & ~step.single & ~step.flat
  gain = jnp.where(mixed, _standard(step, step.std), 0.0)
  return found._replace(values=found.values + config.step_weight * gain)


@_local
def bounded(
  turns: Turns, config: config_lib.Advantage, sizes: Sizes
) -> Advantages:
  """`agent_wise` with the smaller bound: an agent's calls count in the mean
  square, and its episodes limit how far one of them stands out.

      A = (s - mu_k - t) / sqrt(sigma_k^2 + t^2)      sigma_k^2 with ddof 0
      |A| <= B = sqrt(M - 1),  M episodes of the group with agent k in

  The mean square of A over the agent's turns, the factor of Dr. MAS's lemma
  4.2, is 1 whatever t is. The largest |A| is at most sqrt(n - 1) over n turns
  for t = 0 (Samuelson), and reaches it where the only success took one call
  and the failures took many. t is 0 unless |A| exceeds B, and else the least
  shift towards the score x that is farthest off, d = x - mu_k, with which it
  does not, (d - t)^2 = B^2 (sigma_k^2 + t^2):

      t = (d^2 - B^2 sigma_k^2)
          / (d + sign(d) B sqrt(d^2 - (B^2 - 1) sigma_k^2))

  The price is a mean other than 0 there, and there is no rule without one: for
  scores of two values, mean 0 and mean square 1 over the turns leave nothing
  to choose. Their turns at x then have |A| = B >= 1, so that the others' mean
  square, one number, is at most 1: within the bound. With more values another
  score may still exceed B; all are then scaled to meet it, and the mean square
  is below 1. The turns of one episode alone have no baseline and get 0.
  """
  base = _baseline(turns, config, sizes, "agent", "turn")
  pairs = _pairs(turns, sizes)
  unit, num_units = _units(turns, sizes, by_agent=True)
  share = 1 / jnp.maximum(_count(unit, num_units), 1)[unit]
  episodes = jax.ops.segment_sum(share, pairs, sizes.pairs + 1)[pairs]
  limit = jnp.round(episodes) - 1
  high, low = (
    reduce(base.centred, pairs, sizes.pairs + 1)[pairs]
    for reduce in (jax.ops.segment_max, jax.ops.segment_min)
  )
  var = base.std**2 * (base.count - 1) / jnp.maximum(base.count, 1)
  # Of two that are as far off, up to rounding, always the same one.
  far = jnp.where(high >= -low * (1 - _TIE), high, low)
  over = far**2 - limit * var
  root = jnp.sqrt(jnp.maximum(limit * (far**2 - (limit - 1) * var), 0))
  shift = jnp.where(over > 0, over / (far + jnp.sign(far) * root), 0.0)
  scale = jnp.sqrt(var + shift**2)
  most = jnp.maximum(high - shift, shift - low) / scale
  values = (base.centred - shift) / scale
  values *= jnp.minimum(1, jnp.sqrt(limit) / most)
  base = base._replace(single=limit == 0)
  return _result(turns, config, sizes, base, values)


def reinforce_plus_plus_baseline(
  turns: Turns, config: config_lib.Advantage, sizes: Sizes, run: Run
) -> tuple[Advantages, np.ndarray]:
  """`dr_grpo`, whitened over the trained tokens of the step on all hosts.

      A = (c - mean) / sqrt(var + 1e-8),    c = s - mean of the baseline,

  mean and unbiased variance over tokens: the agent's, or with over="team" all
  agents'. Whitening would move the zeros of rules 4 and 5 too: they stay,
  unless singleton is "raw" or zero_tolerance 0, as in the reference.

  Source: REINFORCE++ (arXiv 2501.03262), as verl has it.
  """
  found, moves, sums = jax.device_get(_centre(turns, config, sizes))
  sums = run.total(sums.astype(np.float64))
  if config.over == "team":
    sums = np.broadcast_to(sums.sum(0), sums.shape)
  weight, first, second = sums.T
  mean = first / np.maximum(weight, 1)
  var = (second - weight * mean**2) / np.maximum(weight - 1, 1)
  std = np.sqrt(np.maximum(var, 0) + 1e-8)
  white = (found.values - mean[turns.agent]) / std[turns.agent]
  values = np.where(moves, white, 0).astype(np.float32)
  return found._replace(values=values), run.averages


@_jit
def _centre(
  turns: Turns, config: config_lib.Advantage, sizes: Sizes
) -> tuple[Advantages, Bool[Array, " N"], Float[Array, "agents 3"]]:
  """Centred values, which of them whitening moves, and by agent the sums over
  tokens of 1, of the value and of its square."""
  base = _baseline(turns, config, sizes, config.over, config.count)
  found = _result(turns, config, sizes, base, base.centred)
  moves = turns.real
  if config.singleton == "zero":
    moves &= ~base.single
  if config.zero_tolerance > 0:
    moves &= ~base.flat
  powers = jnp.stack(
    [jnp.ones_like(found.values), found.values, found.values**2], axis=1
  )
  sums = jax.ops.segment_sum(
    powers * (turns.tokens * turns.real)[:, None], turns.agent, sizes.agents
  )
  return found, moves, sums


def rae(
  turns: Turns, config: config_lib.Advantage, sizes: Sizes, run: Run
) -> tuple[Advantages, np.ndarray]:
  """Role-conditioned: a sample less the agent's own average before the step.

      A = s - b_k / w_k
      b_k <- decay * b_k + (1 - decay) * (mean of the agent's samples)
      w_k <- decay * w_k + (1 - decay)

  over the steps in which the agent has rows, on all hosts; b and w begin with
  0, so b / w is a weighted mean of those steps. No group is needed. In an
  agent's first step there is no average, and its rows are like groups of one.

  Source: SPIRAL (arXiv 2506.24119), with the bias of the start corrected.
  """
  average, weight = run.averages.T
  mean = (average / np.where(weight > 0, weight, 1)).astype(np.float32)
  found, sums = _less_average(turns, config, sizes, mean, weight > 0)
  score, count = run.total(np.asarray(sums, np.float64)).T
  now = np.stack([score / np.maximum(count, 1), np.ones_like(score)], axis=1)
  moved = config.decay * run.averages + (1 - config.decay) * now
  return found, np.where(count[:, None] > 0, moved, run.averages)


@_jit
def _less_average(
  turns: Turns,
  config: config_lib.Advantage,
  sizes: Sizes,
  average: Float[Array, " agents"],
  known: Bool[Array, " agents"],
) -> tuple[Advantages, Float[Array, "agents 2"]]:
  """Values, and by agent the sum of its samples and how many there are."""
  base = _baseline(turns, config, sizes, "agent", config.count)
  centred = base.scores - average[turns.agent]
  size = jnp.maximum(1, jnp.abs(base.scores))
  base = base._replace(
    single=~known[turns.agent],
    flat=jnp.abs(centred) <= config.zero_tolerance * size,
  )
  unit, num_units = _units(turns, sizes, by_agent=True)
  if config.count == "turn":
    share = turns.real.astype(jnp.float32)
  else:  # the rows of a sample are one
    share = turns.real / jnp.maximum(_count(unit, num_units), 1)[unit]
  sums = jax.ops.segment_sum(
    jnp.stack([base.scores * share, share], axis=1), turns.agent, sizes.agents
  )
  return _result(turns, config, sizes, base, centred), sums


def _alone(sums: np.ndarray) -> np.ndarray:
  """The total over the hosts where there is one."""
  return sums


def estimate(
  config: config_lib.Advantage,
  scores: np.ndarray,
  group: np.ndarray,
  agent: np.ndarray,
  episode: np.ndarray,
  *,
  turn: np.ndarray,
  tokens: np.ndarray,
  num_agents: int,
  per_agent: bool = False,
  anchor: np.ndarray | None = None,
  returns: np.ndarray | None = None,
  averages: np.ndarray | None = None,
  total: Callable[[np.ndarray], np.ndarray] = _alone,
) -> tuple[Advantages, np.ndarray]:
  """The configured estimator on a step's rows; numpy in, numpy out.

  Rows are padded to a power of two, 32 or more, so that a run meets few
  shapes; it also bounds the ids of groups and episodes, which may be any
  integers here.

  Args:
    config: names the estimator and sets its options.
    scores: [N] row scores, real rows only, in any order.
    group: [N] ids.
    agent: [N] ids, below num_agents.
    episode: [N] ids, unique over the step.
    turn: [N] number of the turn within its episode, from 0.
    tokens: [N] trained tokens.
    num_agents: size of the team.
    per_agent: whether rewards come one per agent (`rewards.Rows.per_agent`).
    anchor: [N] the state that a turn was taken in, as a number
      (`rewards.anchors`); None where it is not read.
    returns: [N] what followed a turn (`rewards.step_returns`); likewise.
    averages: what the step before returned; None: there was none.
    total: adds up an array over the hosts, see `Run`. An estimator calls it
      equally often on all of them, whatever the rows.

  Returns:
    Advantages with `values` [N] in the order of `scores`, and [num_agents, 2]
    float64 for the next step (`Run.averages`).
  """
  if averages is None:
    averages = np.zeros((num_agents, 2))
  num_rows = len(scores)
  group = played = _numbered(group)
  if config.by_turn:
    group = _numbered(group * (np.max(turn, initial=0) + 1) + turn)
  if anchor is None:
    anchor = returns = np.zeros(num_rows)
  by_agent = (group * num_agents + agent) * (num_rows + 1)
  anchor = _numbered(by_agent + _numbered(anchor))
  turns = _padded(
    scores,
    (group, played, agent, _numbered(episode), tokens, anchor),
    returns,
  )
  width = len(turns.real)
  result, averages = ESTIMATORS[config.name](
    turns,
    config,
    Sizes(width, num_agents, width, per_agent),
    Run(averages, total),
  )
  result = jax.device_get(result)
  return result._replace(values=result.values[:num_rows]), averages


def of_rows(
  config: config_lib.Advantage,
  rows: rewards.Rows,
  groups: Sequence[Group],
  *,
  num_agents: int,
  averages: np.ndarray | None = None,
  total: Callable[[np.ndarray], np.ndarray] = _alone,
) -> tuple[Advantages, np.ndarray]:
  """`estimate` on the rows of a step's groups.

  Args:
    config: names the estimator and sets its options.
    rows: `rewards.row_scores` of the groups.
    groups: of this host.
    num_agents: size of the team.
    averages: see `estimate`.
    total: likewise.
  """
  steps = {}
  if "gamma" in READS[config.name]:
    steps = {
      "anchor": rewards.anchors(rows.turns),
      "returns": rewards.step_returns(groups, rows.scores, config.gamma),
    }
  return estimate(
    config,
    rows.scores,
    rows.group,
    rows.agent,
    rows.episode,
    turn=np.array([t.index for t in rows.turns], np.int32),
    tokens=np.array([len(t.completion_ids) for t in rows.turns], np.int32),
    num_agents=num_agents,
    per_agent=rows.per_agent,
    averages=averages,
    total=total,
    **steps,
  )


def others(config: config_lib.Advantage) -> dict[str, config_lib.Advantage]:
  """Every estimator by its name, that of `config` first, with the options of it
  that the other one reads, too."""
  found = {config.name: config}
  for name, reads in READS.items():
    shared = set(reads) & set(READS[config.name])
    found.setdefault(
      name,
      config_lib.Advantage(
        name=name,
        singleton=config.singleton,
        zero_tolerance=config.zero_tolerance,
        **{key: getattr(config, key) for key in shared},
      ),
    )
  return found


def _numbered(ids: np.ndarray) -> np.ndarray:
  """The same ids as 0, 1, .."""
  return np.unique(ids, return_inverse=True)[1]


def _padded(
  scores: np.ndarray, ids: Sequence[np.ndarray], returns: np.ndarray
) -> Turns:
  num_rows = len(scores)
  width = max(_LEAST_ROWS, 1 << max(num_rows - 1, 0).bit_length())

  def pad(x: np.ndarray, dtype: type) -> np.ndarray:
    return np.pad(np.asarray(x, dtype), (0, width - num_rows))

  return Turns(
    pad(scores, np.float32),
    *(pad(x, np.int32) for x in ids),
    pad(returns, np.float32),
    np.arange(width) < num_rows,
  )


def _ids(
  ids: Int[Array, " N"], real: Bool[Array, " N"], num: int
) -> Int[Array, " N"]:
  """Padding goes to a segment of its own, number `num`."""
  return jnp.where(real, ids, num)


def _pairs(turns: Turns, sizes: Sizes) -> Int[Array, " N"]:
  """By (group, agent)."""
  ids = turns.group * sizes.agents + turns.agent
  return _ids(ids, turns.real, sizes.pairs)


def _units(
  turns: Turns, sizes: Sizes, by_agent: bool
) -> tuple[Int[Array, " N"], int]:
  """By episode, or by (episode, agent); and the bound of the ids."""
  ids, num = turns.episode, sizes.episodes
  if by_agent:
    ids, num = ids * sizes.agents + turns.agent, num * sizes.agents
  return _ids(ids, turns.real, num), num


def _baseline(
  turns: Turns,
  config: config_lib.Advantage,
  sizes: Sizes,
  over: str,
  count: str,
) -> _Baseline:
  """Samples (`count`), and the statistics of those they share a baseline with
  (`over`)."""
  own = over == "agent"
  if count == "episode" and sizes.per_agent and not config.pool_agents:
    own = True
  key, num_keys = _ids(turns.group, turns.real, sizes.groups), sizes.groups
  if own:
    key, num_keys = _pairs(turns, sizes), sizes.pairs
  scores, unit = turns.scores, jnp.arange(len(turns.scores))
  if count == "episode":
    unit, num_units = _units(turns, sizes, own or sizes.per_agent)
    # An empty unit has the smallest integer as its maximum: no key of its own.
    key = jax.ops.segment_max(key, unit, num_units + 1)
    key = jnp.where(key < 0, num_keys, key)
    scores = _mean(scores, unit, num_units)
  samples = _statistics(scores, key, num_keys, config.zero_tolerance)
  return _Baseline(*(x[unit] for x in samples))


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


def _statistics(
  scores: Float[Array, " M"],
  key: Int[Array, " M"],
  num_keys: int,
  zero_tolerance: float,
) -> _Baseline:
  """Of samples [M] by key, in two passes (centred)."""
  count = _count(key, num_keys)
  centred = scores - _mean(scores, key, num_keys)[key]
  squares = jax.ops.segment_sum(centred**2, key, num_keys + 1)
  std = jnp.sqrt(squares / jnp.maximum(count - 1, 1))
  size = jax.ops.segment_max(jnp.abs(scores), key, num_keys + 1)
  zero = std <= zero_tolerance * jnp.maximum(1, size)
  return _Baseline(
    scores,
    centred,
    std[key],
    count[key],
    (count == 1)[key],
    (zero & (count > 1))[key],
  )


def _standard(base: _Baseline, std: Float[Array, " N"]) -> Float[Array, " N"]:
  return base.centred / (std + EPSILON)


def _result(
  turns: Turns,
  config: config_lib.Advantage,
  sizes: Sizes,
  base: _Baseline,
  values: Float[Array, " N"],
) -> Advantages:
  """Rules 4 and 5, and 0 for padding; counts (group, agent) pairs by kind of
  baseline."""
  pairs = _pairs(turns._replace(group=turns.played), sizes)

  def total(flags: Bool[Array, " N"]) -> Int[Array, "groups agents"]:
    found = jax.ops.segment_sum(flags.astype(jnp.int32), pairs, sizes.pairs + 1)
    return found[: sizes.pairs].reshape(sizes.groups, sizes.agents)

  alone = base.scores / (1 + EPSILON) if config.singleton == "raw" else 0.0
  values = jnp.where(base.flat, 0.0, values)
  values = jnp.where(base.single, alone, values)
  values = jnp.where(turns.real, values, 0.0)
  quiet = base.flat if config.singleton == "raw" else base.flat | base.single
  equal = (total(base.flat & ~base.single) > 0) & (total(~quiet) == 0)
  counts = (
    jnp.sum(kind, axis=0, dtype=jnp.int32)
    for kind in (total(base.single) > 0, equal)
  )
  return Advantages(values, *counts)


# The options that an estimator reads beside `singleton` and `zero_tolerance`;
# `config.check` refuses the others.
READS: Mapping[str, tuple[str, ...]] = {
  "agent_wise": ("count", "by_turn"),
  "grpo": ("pool_agents",),
  "mean_only": ("count", "pool_agents"),
  "std_only": ("count", "pool_agents"),
  "global_call": ("by_turn",),
  "rloo": ("over", "count", "by_turn", "pool_agents"),
  "dr_grpo": ("over", "count", "by_turn", "pool_agents"),
  "reinforce_plus_plus_baseline": ("over", "count", "by_turn", "pool_agents"),
  "rae": ("count", "decay"),
  "gigpo": ("over", "count", "pool_agents", "gamma", "step_weight"),
  "bounded": (),
}

ESTIMATORS: Mapping[str, Estimator] = {
  "agent_wise": agent_wise,
  "grpo": grpo,
  "mean_only": mean_only,
  "std_only": std_only,
  "global_call": global_call,
  "rloo": rloo,
  "dr_grpo": dr_grpo,
  "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
  "rae": rae,
  "gigpo": gigpo,
  "bounded": bounded,
}
