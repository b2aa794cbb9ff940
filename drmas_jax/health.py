"""Alarms: that a run goes wrong, in a plain sentence with the key to turn.

    CHECKS      one step and those before it -> alarms; pure
    Monitor     keeps the steps before, says what has begun, counts what lasts

A check reads metrics and nothing else, and these are the same on all hosts: so
are the alarms, and what they decide. What a check needs of earlier steps is
plain data that goes into the checkpoint, and a resumed run alarms as a straight
one would.

A batch is a sample, and what it says is noisy. On a job that learns as it
should (configs/math_tiny.py: 16 groups of 8) single steps have 15 of 16 groups
without variance, an entropy of half the one before, and norms of 5 times their
median. Hence means over `_FEW` steps, and the further conditions of the checks,
each with its reason where it stands.
"""

import json
import math
import pathlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from drmas_jax import config as config_lib

# Steps that shares and means are over; as many quiet ones end an alarm.
_FEW = 5
_ENOUGH = 10  # steps before, for a median that says something
# Where the team is right so often, equal scores and one verdict are the goal.
_SOLVED = 0.9
# Below this many nats a token, the mean is made by a few tokens of the batch.
_CALM = 0.05
# A norm over three times its median is common where few groups have a signal,
# and then the logs of all norms scatter: on configs/math_tiny.py by 0.2 to 0.5,
# so that six times that is a norm of 3 to 20 medians. The largest there were
# 4.3 scatters away. Of lognormal norms (beside the 20 before) 3 in 10,000 are
# over six at the most, and twice as many over five. Where norms scatter by less
# than 0.18, `norm_spike` alone decides.
_SCATTERS = 6.0
_SPIKES = 2  # within a window, for an alarm
_MAD = 1.4826  # the median deviation of a normal distribution, to its sigma


class Alarm(NamedTuple):
  """Something that is wrong.

  Attributes:
    name: of the check.
    agent: whose it is: an agent, a policy, or "team".
    text: the sentence.
  """

  name: str
  agent: str
  text: str

  @property
  def key(self) -> str:
    return f"{self.name}/{self.agent}"


class Score(NamedTuple):
  """A held-out evaluation.

  Attributes:
    step: that it is of.
    score: of the team, a share over all sets.
    num_questions: of all sets.
    reward: mean of the team's training rewards at the time; None: not known.
  """

  step: int
  score: float
  num_questions: int
  reward: float | None

  @property
  def half_width(self) -> float:
    """Of a 95 % interval, with the largest variance that questions may have."""
    variance = self.score * (1 - self.score) / self.num_questions
    return 1.96 * math.sqrt(variance)


class View(NamedTuple):
  """What a check sees.

  Attributes:
    config: of the run.
    step: the number of this one.
    now: the names that this step has a value of.
    recent: by name, the values of this step and those before it, newest last;
      the names of `watched`.
    scores: the best evaluation, and the newest, if there is a newer one.
    mode: "train" or "sft", which has other keys to turn.
  """

  config: config_lib.Config
  step: int
  now: frozenset[str]
  recent: Mapping[str, Sequence[float]]
  scores: Sequence[Score]
  mode: config_lib.Mode = "train"

  @property
  def limits(self) -> config_lib.Health:
    return self.config.health

  def of(self, what: str) -> Iterator[tuple[str, Sequence[float]]]:
    """(whose, values) of what this step has, by name."""
    for name in sorted(self.now):
      kind, _, whose = name.partition("/")
      if kind == what:
        yield whose, self.recent[name]

  def policy(self, agent: str) -> str:
    return self.config.agents[agent].policy

  @property
  def solved(self) -> bool:
    success = self.recent.get("success/team", ())
    return bool(success) and _mean(success[-_FEW:]) >= _SOLVED


def watched(
  found: Mapping[str, float], config: config_lib.Config
) -> dict[str, float]:
  """What checks look at of a step's metrics, as {"<what>/<whose>": value}."""
  same = ("truncated", "entropy", "reward", "success", "grad_norm")
  same += ("ratio_error", "logprob_gap")
  kept = {}
  for name, value in found.items():
    what, _, whose = name.partition("/")
    if "/" in whose or not math.isfinite(value):
      continue
    if what in same or what.startswith("decided_"):
      kept[name] = float(value)
    elif what == "valid":
      kept[f"invalid/{whose}"] = 1.0 - value
    elif what == "groups_in" and value and _learns(whose, config):
      flat = found[f"zero_variance_groups/{whose}"]
      kept[f"zero_variance/{whose}"] = flat / value
  return kept


def _learns(agent: str, config: config_lib.Config) -> bool:
  own = config.agents[agent]
  return own.train and own.policy in config.trained


# -- checks --------------------------------------------------------------------


def _truncated(view: View) -> Iterator[Alarm]:
  for agent, values in view.of("truncated"):
    share = _mean(values[-_FEW:])
    if share > view.limits.truncated:
      yield Alarm(
        "truncated",
        agent,
        f"{agent}: {share:.0%} of its completions are cut at their limit; "
        "mostly they need more room than they have: raise "
        f"agents.{agent}.max_tokens (and policies.{view.policy(agent)}.engine."
        "max_length), or have its template ask for less",
      )


def _invalid(view: View) -> Iterator[Alarm]:
  for agent, values in view.of("invalid"):
    share = _mean(values[-_FEW:])
    if share > view.limits.invalid:
      yield Alarm(
        "invalid",
        agent,
        f"{agent}: {share:.0%} of its turns are invalid; mostly its policy "
        "does not keep to the form that the prompt asks for, or is cut before "
        "the end of it: read some (drmas_jax.show --invalid), then change "
        f"agents.{agent}.template or max_tokens, or begin with --mode=sft",
      )


def _zero_variance(view: View) -> Iterator[Alarm]:
  for agent, values in view.of("zero_variance"):
    share = _mean(values[-_FEW:])
    few = len(values) < _FEW  # one batch of few tasks may be all too hard
    if share > view.limits.zero_variance and not few and not view.solved:
      yield Alarm(
        "zero_variance",
        agent,
        f"{agent}: in {share:.0%} of its groups all scores are equal, and from "
        "these nothing is learned; mostly the tasks are too hard or too easy "
        "for the team: set data.resample, raise data.group_size, or take "
        "other tasks in data.sources",
      )


def _one_verdict(view: View) -> Iterator[Alarm]:
  names = sorted(n for n in view.now if n.startswith("decided_"))
  for name in names if not view.solved else ():
    what, _, agent = name.partition("/")
    values, verdict = view.recent[name], what.removeprefix("decided_")
    share = _mean(values[-_FEW:])
    if share >= view.limits.one_verdict and len(values) >= _FEW:
      yield Alarm(
        "one_verdict",
        agent,
        f"{agent}: {share:.0%} of its verdicts are {verdict!r}; mostly its "
        "policy leans that way whatever it is shown, or what cannot be read "
        f"counts as that: see agents.{agent}.template and options, begin with "
        "a policy that can tell (--mode=sft), or set policies."
        f"{view.policy(agent)}.loss.entropy_weight",
      )


def _entropy(view: View) -> Iterator[Alarm]:
  """Not while the reward rises: then it is being learned what to say."""
  factor = view.limits.entropy
  for agent, values in view.of("entropy"):
    before, recent = _before(values, view), values[-_FEW:]
    rewards = view.recent.get(f"reward/{agent}", ())
    if len(before) < _ENOUGH or not _learns(agent, view.config):
      continue
    old, new = statistics.median(before), _mean(recent)
    rises = _rose(_before(rewards, view), rewards[-_FEW:])
    if max(old, new) < _CALM or rises or old < factor * new < factor**2 * old:
      continue
    policy = f"policies.{view.policy(agent)}"
    if new < old:
      said, why = "fell", "it is pushed too hard towards few answers"
      keys = f"{policy}.loss.clip_high or entropy_weight"
    else:
      said, why = "rose", "updates undo what it knew"
      keys = f"{policy}.loss.kl_weight (with a reference)"
    yield Alarm(
      "entropy",
      agent,
      f"{agent}: its entropy {said} from {old:.2g} to {new:.2g} nats a token, "
      f"and its reward does not rise; mostly {why}: lower {policy}.optimizer."
      f"learning_rate, or raise {keys}",
    )


def _ratio(view: View) -> Iterator[Alarm]:
  for policy, values in view.of("ratio_error"):
    error = _mean(values[-_FEW:])
    if error > view.limits.ratio:
      yield Alarm(
        "ratio",
        policy,
        f"{policy}: in its first update a token's ratio is off 1 by "
        f"{error:.2g}, and nothing has moved yet; {_numerics(policy)}",
      )


def _logprob_gap(view: View) -> Iterator[Alarm]:
  for agent, values in view.of("logprob_gap"):
    gap = _mean(values[-_FEW:])
    if gap > view.limits.logprob_gap:
      yield Alarm(
        "logprob_gap",
        agent,
        f"{agent}: its log-probs in the learner differ from those it was "
        f"sampled with by {gap:.2g} on average; "
        f"{_numerics(view.policy(agent))}",
      )


def _numerics(policy: str) -> str:
  return (
    "mostly engine and learner compute in other numerics: write the same "
    f"policies.{policy}.rollout_dtype and compute_dtype (and engine."
    "cache_dtype=''), or old_logprobs='learner' with loss.importance='token'"
  )


def _norm_spike(view: View) -> Iterator[Alarm]:
  """Where spikes come again. A single one is clipped and passes, and a run that
  is well has one in some hundred updates (norms of 22 medians where a rare
  success is all that tells); its batch is kept all the same (`spikes`)."""
  window = view.limits.window
  for policy, spikes in view.of("spike"):
    times = round(sum(spikes[-window:]))
    if not spikes[-1] or times < _SPIKES:
      continue
    said = "is not finite"
    if f"grad_norm/{policy}" in view.now:
      *before, norm = view.recent[f"grad_norm/{policy}"]
      usual = math.exp(statistics.median(_logs(before, view.limits)))
      said = f"is {norm:.2g}, {norm / usual:.1f} times its running median"
    yield Alarm(
      "norm_spike",
      policy,
      f"{policy}: its gradient norm {said}, and it was as far out {times} "
      f"times in {window} updates; {_remedy(view, policy)}",
    )


def _remedy(view: View, policy: str) -> str:
  """Against spikes of the norm."""
  if view.mode == "sft":
    return (
      "mostly a few demonstrations are unlike the others, or the rate is too "
      "high: look at these, lower sft.learning_rate, or raise sft.batch_rows "
      "or sft.warmup_steps"
    )
  return (
    "mostly a few rows with large advantages carry it: see which "
    f"(--mode=replay --spike {view.step}), lower policies.{policy}.optimizer."
    "clip_norm or learning_rate, or compare agents with themselves "
    "(advantage.name='agent_wise')"
  )


def _held_out(view: View) -> Iterator[Alarm]:
  """By more than chance: outside of the best one's interval."""
  if len(view.scores) < 2:
    return
  best, now = view.scores
  if best.reward is None or now.reward is None or now.reward <= best.reward:
    return
  fall = best.score - now.score
  if fall > max(view.limits.held_out, best.half_width):
    yield Alarm(
      "held_out",
      "team",
      f"team: its held-out score fell from {best.score:.3f} to {now.score:.3f} "
      f"while its training reward rose from {best.reward:.3f} to "
      f"{now.reward:.3f}; mostly it learns the training tasks by heart, or "
      "what their reward does not mean: look at what is rewarded (drmas_jax."
      "show --best 5), take more tasks in data.sources, set policies.*.loss."
      "kl_weight, or go back to --step best",
    )


def is_spike(
  norm: float, before: Sequence[float], limits: config_lib.Health
) -> bool:
  """Whether a policy's gradient norm is one to be looked at.

      log(norm / median) > max(log(norm_spike), 6 sigma)
      sigma = 1.4826 median |log(norms before / median)|

  over the last `window` norms before it, of at least 10; fewer say nothing. A
  norm that is not finite is one.

  Args:
    norm: of this update, before clipping.
    before: of the updates before it, newest last.
    limits: `norm_spike` and `window`.
  """
  if not math.isfinite(norm):
    return True
  logs = _logs(before, limits)
  if len(logs) < _ENOUGH or norm <= 0:
    return False
  middle = statistics.median(logs)
  sigma = _MAD * statistics.median([abs(x - middle) for x in logs])
  return math.log(norm) - middle > max(
    math.log(limits.norm_spike), _SCATTERS * sigma
  )


def _logs(norms: Sequence[float], limits: config_lib.Health) -> list[float]:
  return [math.log(n) for n in norms[-limits.window :] if n > 0]


def _before(values: Sequence[float], view: View) -> Sequence[float]:
  """Those that the last few are compared with."""
  return values[:-_FEW][-view.limits.window :]


def _rose(before: Sequence[float], after: Sequence[float]) -> bool:
  """By more than two standard errors, taken from how steps differ."""
  if len(before) < 2 or len(after) < 2:
    return False
  error = math.sqrt(
    sum(statistics.variance(v) / len(v) for v in (before, after))
  )
  return _mean(after) - _mean(before) > 2 * error


def _mean(values: Sequence[float]) -> float:
  return math.fsum(values) / len(values)


# -- a run ---------------------------------------------------------------------


class Seen(NamedTuple):
  """What a step came to.

  Attributes:
    begun: alarms that were not on before.
    metrics: `alarms/team`, how many there are, and `alarms/<name>/<agent>`, 1
      for each.
    stop: why the run has to end; "": it goes on.
  """

  begun: tuple[Alarm, ...]
  metrics: dict[str, float]
  stop: str


class Monitor:
  """The alarms of a run, step by step.

  An alarm is on from the step in which its check finds it until it has not for
  `_FEW` steps; then it may begin anew.

  Args:
    config: of the run.
    mode: "train" or "sft".
  """

  def __init__(
    self, config: config_lib.Config, mode: config_lib.Mode = "train"
  ):
    self.config, self._mode = config, mode
    self._recent: dict[str, list[float]] = {}
    self._scores: list[Score] = []
    self._on: dict[str, int] = {}  # by key, steps without it since
    self._counts: dict[str, list[int]] = {}  # by key: [times, steps]

  def see(self, step: int, found: Mapping[str, float]) -> Seen:
    """A step is done.

    Args:
      step: its number.
      found: its metrics, of all hosts.
    """
    now = watched(found, self.config) | self._spiking(found)
    room = self.config.health.window + _FEW
    for name, value in now.items():
      values = self._recent.setdefault(name, [])
      values.append(value)
      del values[:-room]
    self._fill_first()
    view = View(
      self.config,
      step,
      frozenset(now),
      self._recent,
      tuple(self._scores),
      self._mode,
    )
    alarms = [a for check in CHECKS.values() for a in check(view)]
    begun = tuple(a for a in alarms if a.key not in self._on)
    self._count(alarms, begun)
    fatal = [a for a in alarms if a.name in self.config.health.stop_on]
    return Seen(
      begun,
      {"alarms/team": float(len(alarms))}
      | {f"alarms/{a.key}": 1.0 for a in alarms},
      f"step {step}: health.stop_on: {fatal[0].name}: {fatal[0].text}"
      if fatal
      else "",
    )

  def _spiking(self, found: Mapping[str, float]) -> dict[str, float]:
    """Of each policy that had an update, whether it was a spike."""
    spikes = self.spikes(found)
    whole = {}
    for policy in self.config.trained:
      if found.get(f"skipped/non_finite/{policy}"):
        whole[f"spike/{policy}"] = 1.0
      elif f"grad_norm/{policy}" in found:
        whole[f"spike/{policy}"] = float(policy in spikes)
    return whole

  def spikes(self, found: Mapping[str, float]) -> tuple[str, ...]:
    """The policies whose norm is a spike, of a step's metrics that have not
    been seen."""
    return tuple(
      policy
      for policy in self.config.trained
      if (name := f"grad_norm/{policy}") in found
      and is_spike(found[name], self._recent.get(name, ()), self.config.health)
    )

  def evaluated(self, step: int, score: float, num_questions: int) -> None:
    """A held-out evaluation of the step done; the next step is judged by it.

    Args:
      step: the number of the step; one that is known already changes nothing.
      score: of the team, a share over all sets.
      num_questions: of all sets.
    """
    if any(s.step == step for s in self._scores):
      return
    rewards = self._recent.get("reward/team", ())[-_FEW:]
    reward = _mean(rewards) if rewards else None
    best = max(self._scores, key=lambda s: s.score, default=None)
    kept = [] if best is None else [best]
    self._scores = [*kept, Score(step, score, num_questions, reward)]

  def _fill_first(self) -> None:
    """What the first steps were rewarded with belongs to the evaluation before
    them."""
    rewards = self._recent.get("reward/team", ())
    if len(rewards) == _FEW:
      self._scores = [
        s._replace(reward=_mean(rewards)) if s.reward is None else s
        for s in self._scores
      ]

  def _count(self, alarms: Sequence[Alarm], begun: Sequence[Alarm]) -> None:
    for key in list(self._on):
      self._on[key] += 1
    for alarm in alarms:
      self._on[alarm.key] = 0
      counts = self._counts.setdefault(alarm.key, [0, 0])
      counts[0] += alarm in begun
      counts[1] += 1
    self._on = {k: quiet for k, quiet in self._on.items() if quiet < _FEW}

  def summary(self) -> dict[str, dict[str, int]]:
    """{"<name>/<agent>": {"times": it began, "steps": it was found in}}."""
    return {
      key: {"times": times, "steps": steps}
      for key, (times, steps) in sorted(self._counts.items())
    }

  def state(self) -> dict[str, Any]:
    """Plain data, for the checkpoint."""
    return {
      "recent": {name: list(v) for name, v in self._recent.items()},
      "scores": [list(s) for s in self._scores],
      "on": dict(self._on),
      "counts": {key: list(v) for key, v in self._counts.items()},
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes on from what `state` returned."""
    self._recent = {name: list(v) for name, v in state["recent"].items()}
    self._scores = [Score(*s) for s in state["scores"]]
    self._on = dict(state["on"])
    self._counts = {key: list(v) for key, v in state["counts"].items()}


def no_reward(
  config: config_lib.Config, found: Mapping[str, float], num_batches: int
) -> str:
  """What to look at when nobody was right in any batch so far.

  Args:
    config: of the run.
    found: metrics of the last batch.
    num_batches: how many there were.
  """
  cut, valid = (
    ", ".join(
      f"{agent} {found[f'{what}/{agent}']:.0%}"
      for agent in config.agent_names
      if f"{what}/{agent}" in found
    )
    for what in ("truncated", "valid")
  )
  return (
    f"WARNING: every reward of the first {num_batches} batches is 0, and from "
    "equal rewards nothing is learned. Likely causes: answers in a form that "
    f"the environment {config.environment.name!r} does not read, or golds that "
    "are (see transcripts/); completions cut before the answer (cut in the "
    f"last batch: {cut}; raise agents.*.max_tokens); a prompt or chat template "
    f"that the model does not follow (valid turns: {valid}); tasks that are "
    "too hard for it"
  )


def write(path: pathlib.Path, step: int, alarms: Sequence[Alarm]) -> None:
  """Adds a line for each: {"step", "name", "agent", "text"}."""
  with open(path, "a", encoding="utf-8") as f:
    for alarm in alarms:
      f.write(json.dumps({"step": step} | alarm._asdict()) + "\n")


Check = Callable[[View], Iterator[Alarm]]

CHECKS: dict[str, Check] = {
  "truncated": _truncated,
  "invalid": _invalid,
  "zero_variance": _zero_variance,
  "one_verdict": _one_verdict,
  "entropy": _entropy,
  "ratio": _ratio,
  "logprob_gap": _logprob_gap,
  "norm_spike": _norm_spike,
  "held_out": _held_out,
}
