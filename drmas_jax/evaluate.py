"""Held-out evaluation: k episodes of every task; avg@k and pass@k."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from drmas_jax import config as config_lib
from drmas_jax import hosts, metrics, rewards
from drmas_jax.rollout import Rollout, Stopped
from drmas_jax.types import Group, Task


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """What the team did on the held-out tasks.

  Attributes:
    groups: the episodes of this host.
    success: [P, k] of all hosts.
    ok: [P, k], False where an episode failed.
    scalars: means by agent, of all hosts.
  """

  groups: list[Group]
  success: np.ndarray
  ok: np.ndarray
  scalars: dict[str, float]

  def summary(self) -> dict[str, metrics.Interval]:
    """{"avg@k": (mean, low, high), "pass@k": ..}; empty if all failed."""
    k = self.success.shape[1]
    if not self.ok.any():
      return {}
    result = {f"avg@{k}": metrics.avg_at_k(self.success, self.ok)}
    if self.ok.all(axis=1).any():
      result[f"pass@{k}"] = metrics.pass_at_k(self.success, k, self.ok)
    return result

  def score(self, num_tasks: int) -> float | None:
    """avg@k of the first tasks, by which the best checkpoint is chosen: the
    same ones at every evaluation, also where the last one has more."""
    success, ok = self.success[:num_tasks], self.ok[:num_tasks]
    return metrics.avg_at_k(success, ok)[0] if ok.any() else None

  def metrics(self) -> dict[str, float]:
    """Numbers for the writers, all under eval/."""
    found = {name: mean for name, (mean, _, _) in self.summary().items()}
    return {f"eval/{name}": v for name, v in (found | self.scalars).items()}


def run(
  rollout: Rollout,
  tasks: Sequence[Task],
  config: config_lib.Config,
  key: jax.Array,
) -> Evaluation:
  """Plays the tasks, each host its share.

  Args:
    rollout: with samplers that hold the weights.
    tasks: the held-out ones, the same on every host.
    config: of the run.
    key: of purpose "eval", so that every evaluation draws the same numbers.

  Raises:
    Stopped: a heartbeat gave it up, on this or on another host.
  """
  own = hosts.share(tasks)
  groups, stopped = [], False
  try:
    groups = rollout.collect(own, config.eval.k, key, config.eval.sampling)
  except Stopped:
    stopped = True
  rows = rewards.row_scores(
    groups, {n: a.invalid_penalty for n, a in config.agents.items()}
  )
  shares = hosts.agree(
    "eval",
    {
      "scalars": metrics.rollout(groups, rows, config.agent_names),
      "stopped": stopped,
      "ok": [[rewards.ok(e) for e in g.episodes] for g in groups],
      "won": [
        [rewards.ok(e) and e.outcome.won for e in g.episodes] for g in groups
      ],
    },
    config.placement.timeout_s,
  )
  if any(s["stopped"] for s in shares):
    raise Stopped
  return Evaluation(
    groups=groups,
    success=_interleave([s["won"] for s in shares], config.eval.k),
    ok=_interleave([s["ok"] for s in shares], config.eval.k),
    scalars=metrics.merge([s["scalars"] for s in shares]),
  )


def _interleave(shares: list[Any], k: int) -> np.ndarray:
  """The hosts' shares (`hosts.share`) in the order of the tasks."""
  total = sum(len(s) for s in shares)
  whole = np.zeros([total, k], bool)
  for host, share in enumerate(shares):
    whole[host :: len(shares)] = np.asarray(share, bool).reshape(-1, k)
  return whole
