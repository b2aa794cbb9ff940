"""From groups, scores and samples to {name: float}; numpy, on the host.

Names are `<what>/<agent>`, and `<what>/team` for what belongs to no one agent.
A count is always there and says 0; a mean over nothing is absent. Nothing is
NaN. Failed episodes are in the `episodes/..` counts and nowhere else.

A run is reproducible bit for bit unless a clock decided something (a time
limit of a verdict, a retrieval, a turn): `wall_clock_faults/team` counts the
episodes where one did, and any such episode makes a run non-deterministic.
"""

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from drmas_jax import rewards
from drmas_jax.types import Episode, Group, Turn

Interval = tuple[float, float, float]

_ZERO = 1e-5  # rule 5, whatever tolerance the estimator of the run has


def rollout(
  groups: Sequence[Group],
  rows: rewards.Rows,
  agents: Sequence[str],
) -> dict[str, float]:
  """All that a step's episodes say, before any update.

  Args:
    groups: of one step.
    rows: their scored turns, from `rewards.row_scores`.
    agents: the sorted names.
  """
  found = episodes(groups)
  turn_faults = collections.Counter(
    t.agent for g in groups for e in g.episodes for t in e.turns if t.fault
  )
  for i, agent in enumerate(agents):
    own = [t for t in rows.turns if t.agent == agent]
    for part in (
      {"turn_faults": float(turn_faults[agent])},
      turns(own),
      outcomes(groups, agent),
      moments(rows, i),
    ):
      found |= {f"{name}/{agent}": value for name, value in part.items()}
  return found


def episodes(groups: Sequence[Group]) -> dict[str, float]:
  """Of the team: rewards of ok episodes, and the faults of the others.

  With a reward per agent, the team's is their mean.
  """
  everything = [e for g in groups for e in g.episodes]
  played = [e for e in everything if rewards.ok(e)]
  failed = [e for e in everything if not rewards.ok(e)]
  found = {
    "episodes/team": len(everything),
    "episodes_failed/team": len(failed),
    "wall_clock_faults/team": sum(map(_clocked, everything)),
  }
  kinds = collections.Counter(e.fault.kind for e in failed if e.fault)
  found |= {f"episodes_failed_{kind}/team": n for kind, n in kinds.items()}
  found |= _mean("reward/team", [_team_reward(e) for e in played])
  found |= _mean("success/team", [e.outcome.won for e in played])
  return _floats(found)


def turns(own: Sequence[Turn]) -> dict[str, float]:
  """Of one agent's turns; `entropy` is minus the mean of `sampler_logprobs`.

  The mean over sampled tokens of -log p is an unbiased estimate of the mean
  entropy of the tempered full softmax they were drawn from; with top-k or
  top-p it is not: tokens outside the kept set are never drawn.
  """
  lengths = [len(t.completion_ids) for t in own]
  surprise = [-t.sampler_logprobs for t in own if len(t.sampler_logprobs)]
  labels = collections.defaultdict(list)
  for turn in own:
    for name, value in (turn.reply.labels if turn.reply else {}).items():
      labels[name].append(value)
  found = {"turns": len(own), "tokens": sum(lengths)}
  found |= _mean("completion_length", lengths)
  found |= {"completion_length_max": max(lengths)} if lengths else {}
  found |= _mean("valid", [t.valid for t in own])
  found |= _mean("truncated", [t.stop_reason == "length" for t in own])
  found |= _mean("entropy", np.concatenate(surprise) if surprise else [])
  for name, values in labels.items():
    found |= _mean(f"label_{name}", values)
  return _floats(found)


def outcomes(groups: Sequence[Group], agent: str) -> dict[str, float]:
  """Mean reward, and each of its parts, over ok episodes with the agent in."""
  played = [
    e.outcome
    for g in groups
    for e in g.episodes
    if rewards.ok(e) and any(t.agent == agent for t in e.turns)
  ]
  parts = collections.defaultdict(list)
  for outcome in played:
    for name, value in outcome.parts.items():
      parts[name].append(value)
  found = _mean("reward", [o.of(agent) for o in played])
  for name, values in parts.items():
    found |= _mean(f"part_{name}", values)
  return _floats(found)


def moments(rows: rewards.Rows, agent: int) -> dict[str, float]:
  """Moments of one agent's row scores within groups, and what they inflate.

      mu_k, sigma_k   mean and population deviation over agent k's rows
      mu, sigma       the same over episodes, each the mean of all its rows
      kappa_k = (sigma_k^2 + (mu_k - mu)^2) / sigma^2

  Means over groups: of `mu` and `sigma` (mu_k, sigma_k) over those with a row
  of the agent, of `kappa` over those among them whose sigma is above
  rule 5's tolerance, 1e-5 * max(1, max|episode score|): `kappa_groups` of them.

  Source: arXiv 2602.08847, lemma 4.2.
  """
  means, deviations, kappas = [], [], []
  for g in np.unique(rows.group[rows.agent == agent]):
    here = rows.group == g
    scores = rows.scores[here].astype(np.float64)
    own = scores[rows.agent[here] == agent]
    means.append(own.mean())
    deviations.append(own.std())
    team = _means_by(scores, rows.episode[here])
    if team.std() > _ZERO * max(1.0, np.abs(team).max()):
      square = own.var() + (own.mean() - team.mean()) ** 2
      kappas.append(square / team.var())
  found = {"kappa_groups": len(kappas)}
  found |= _mean("mu", means) | _mean("sigma", deviations)
  return _floats(found | _mean("kappa", kappas))


def baselines(
  num_singleton: np.ndarray,
  num_zero_variance: np.ndarray,
  agents: Sequence[str],
) -> dict[str, float]:
  """The counts of `advantages.Advantages`, by name."""
  found = {}
  for i, agent in enumerate(agents):
    found[f"singleton_groups/{agent}"] = num_singleton[i]
    found[f"zero_variance_groups/{agent}"] = num_zero_variance[i]
  return _floats(found)


def update(
  output: Any, norms: np.ndarray | None, policy: str, agents: Mapping[str, int]
) -> dict[str, float]:
  """What one update says, by policy and by agent.

  Args:
    output: a `learner.StepOutput`, fetched.
    norms: gradient norms of `agents`, in their order, where they were taken.
    policy: its name.
    agents: of the policy, by name their index in the output's sums.
  """
  if not output.finite:  # skipped, and counted (rules 11 and 12)
    return {}
  found = {
    f"grad_norm/{policy}": output.grad_norm,
    f"loss/{policy}": output.loss,
    f"ratio_error/{policy}": output.ratio_error,
  }
  if norms is None and len(agents) == 1:
    norms = [output.grad_norm]
  for i, (agent, k) in enumerate(agents.items()):
    if norms is not None:
      found[f"grad_norm/{policy}/{agent}"] = norms[i]
    tokens = output.sums.tokens[k]
    if tokens:
      found |= {
        f"clip_fraction/{agent}": output.sums.clipped[k] / tokens,
        f"dual_clip_fraction/{agent}": output.sums.dual_clipped[k] / tokens,
        f"logprob_gap/{agent}": output.sums.log_ratio_abs[k] / tokens,
        f"logprob_gap_max/{agent}": output.sums.log_ratio_max[k],
      }
  return _floats(found)


_SUMMED = (
  *("turns", "tokens", "turn_faults", "episodes", "wall_clock_faults"),
  *("kappa_groups", "singleton_groups", "zero_variance_groups", "rollout"),
)


def merge(hosts: Sequence[Mapping[str, float]]) -> dict[str, float]:
  """One set of metrics from every host's.

  Counts and rates of tokens add up; of a maximum the largest counts; a mean is
  weighted by what it is a mean of: an agent's turns, groups for kappa.
  """
  if len(hosts) == 1:
    return dict(hosts[0])
  merged = {}
  for name in sorted({name for host in hosts for name in host}):
    what, _, whose = name.partition("/")
    having = [host for host in hosts if name in host]
    values = [host[name] for host in having]
    if what.startswith(_SUMMED):
      merged[name] = sum(values)
    elif what.endswith("_max") or what in ("ratio_error", "time"):
      merged[name] = max(values)
    else:
      count = "kappa_groups" if what == "kappa" else "turns"
      weights = [host.get(f"{count}/{whose}", 1.0) for host in having]
      merged[name] = float(np.average(values, weights=weights))
  return merged


# -- evaluation: P questions, n episodes each ----------------------------------


def avg_at_k(success: np.ndarray, ok: np.ndarray | None = None) -> Interval:
  """Mean success with its 95 % interval over questions.

  Args:
    success: [P, n] 0 or 1.
    ok: [P, n], False where an episode failed: it is left out (rule 6), and
      with it a question that has no other.

  Returns:
    (mean, low, high); the interval by Student's t over the questions' means,
    cut to [0, 1], and all of [0, 1] for a single question.

  Raises:
    ValueError: no episode is left.
  """
  return _interval(_by_question(success, ok, lambda n, c: c / n, 1), 0.0, 1.0)


def pass_at_k(
  success: np.ndarray, k: int, ok: np.ndarray | None = None
) -> Interval:
  """Chance that one of k episodes succeeds, as `avg_at_k`.

      1 - C(n - c, k) / C(n, k)     for c successes in n episodes

  is without bias (Chen et al. 2021, arXiv 2107.03374). A question with fewer
  than k episodes that are ok is left out.

  Raises:
    ValueError: no question has k episodes.
  """

  def estimate(n: int, c: float) -> float:
    return 1 - math.comb(n - round(c), k) / math.comb(n, k)

  return _interval(_by_question(success, ok, estimate, k), 0.0, 1.0)


def paired_difference(
  success: np.ndarray, other: np.ndarray, ok: np.ndarray | None = None
) -> Interval:
  """Mean of success - other over the same episodes, as `avg_at_k`.

  Such as the team's success against that of its first solutions. The interval
  is over questions' mean differences, so what is common to both cancels.
  """
  difference = np.asarray(success, float) - np.asarray(other, float)
  return _interval(
    _by_question(difference, ok, lambda n, c: c / n, 1), -1.0, 1.0
  )


def _by_question(
  success: np.ndarray,
  ok: np.ndarray | None,
  estimate: Callable[[int, float], float],
  least: int,
) -> np.ndarray:
  """`estimate(n, sum)` of the questions with n >= `least` ok episodes."""
  success = np.asarray(success, float)
  kept = np.ones(success.shape, bool) if ok is None else np.asarray(ok, bool)
  counts = kept.sum(axis=1)
  sums = np.where(kept, success, 0).sum(axis=1)
  values = [
    estimate(int(n), float(total))
    for n, total in zip(counts, sums, strict=True)
    if n >= least
  ]
  if not values:
    raise ValueError(
      f"success: no question of {len(success)} has {least} episodes that did "
      "not fail; allowed is at least one; see the faults of the episodes"
    )
  return np.array(values)


def _interval(values: np.ndarray, low: float, high: float) -> Interval:
  """(mean, its 95 % interval by Student's t, cut to [low, high])."""
  from scipy import special  # 0.1 s that training does not need at start

  n, mean = len(values), float(values.mean())
  if n == 1:
    return mean, low, high
  reach = special.stdtrit(n - 1, 0.975) * values.std(ddof=1) / math.sqrt(n)
  return mean, max(low, mean - float(reach)), min(high, mean + float(reach))


def _team_reward(episode: Episode) -> float:
  reward = episode.outcome.reward
  if isinstance(reward, Mapping):
    return sum(reward.values()) / max(len(reward), 1)
  return reward


def _clocked(episode: Episode) -> bool:
  faults = [episode.fault, *(t.fault for t in episode.turns)]
  return any(f is not None and f.wall_clock for f in faults)


def _means_by(scores: np.ndarray, ids: np.ndarray) -> np.ndarray:
  _, ids = np.unique(ids, return_inverse=True)
  return np.bincount(ids, scores) / np.bincount(ids)


def _mean(name: str, values: Sequence[float] | np.ndarray) -> dict[str, float]:
  """Absent where there is nothing to average."""
  return {name: np.mean(values)} if len(values) else {}


def _floats(found: Mapping[str, float]) -> dict[str, float]:
  return {name: float(value) for name, value in found.items()}
