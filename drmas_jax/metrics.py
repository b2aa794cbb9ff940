"""From groups, scores and samples to {name: float}; numpy, on the host.

Names are `<what>/<agent>`, `<what>/team` for what belongs to no one agent, and
`<what>_on/<source>` for what the team does on each data set of a mixture.
A count is always there and says 0; a mean over nothing is absent. Nothing is
NaN. Failed episodes are in the `episodes/..` counts and nowhere else.

A run is reproducible bit for bit unless a clock decided something (a time
limit of a verdict, a retrieval, a turn): `wall_clock_faults/team` counts the
episodes where one did, and any such episode makes a run non-deterministic.
"""

import collections
import math
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from drmas_jax import rewards
from drmas_jax.types import Episode, Group, Turn

Interval = tuple[float, float, float]

_LARGE = 80.0  # of an exponent: e^80 is finite in float32
_ZERO = 1e-5  # rule 5, whatever tolerance the estimator of the run has


def rollout(
  groups: Sequence[Group],
  rows: rewards.Rows,
  agents: Sequence[str],
  sources: Sequence[str] = (),
  verdicts: Mapping[str, Sequence[str]] = types.MappingProxyType({}),
) -> dict[str, float]:
  """All that a step's episodes say, before any update.

  Args:
    groups: that were played in one step.
    rows: scored turns, from `rewards.row_scores`, of those that are trained on.
    agents: the sorted names.
    sources: keys of the data sets, where several are mixed.
    verdicts: by agent, those among which its role decides.
  """
  found = episodes(groups)
  for source in sources:
    own = episodes([g for g in groups if g.task.source == source])
    found |= {k.replace("/team", f"_on/{source}"): v for k, v in own.items()}
  turn_faults = collections.Counter(
    t.agent for g in groups for e in g.episodes for t in e.turns if t.fault
  )
  found |= calls(groups) | confusion(groups)
  beside = _beside(groups)
  for i, agent in enumerate(agents):
    own = [t for t in rows.turns if t.agent == agent] + beside[agent]
    for part in (
      {"turn_faults": float(turn_faults[agent])},
      turns(own),
      decided(own, verdicts.get(agent, ())),
      outcomes(groups, agent),
      moments(rows, i),
    ):
      found |= {f"{name}/{agent}": value for name, value in part.items()}
  return found


def episodes(groups: Sequence[Group]) -> dict[str, float]:
  """Of the team: rewards of ok episodes, and the faults of the others.

  With a reward per agent, the team's is their mean. `episodes_rewarded` counts
  those where some reward, of the team, an agent or a turn, is not 0.
  """
  everything = [e for g in groups for e in g.episodes]
  played = [e for e in everything if rewards.ok(e)]
  failed = [e for e in everything if not rewards.ok(e)]
  found = {
    "episodes/team": len(everything),
    "episodes_failed/team": len(failed),
    "episodes_rewarded/team": sum(map(_rewarded, played)),
    "wall_clock_faults/team": sum(map(clocked, everything)),
  }
  kinds = collections.Counter(e.fault.kind for e in failed if e.fault)
  found |= {f"episodes_failed_{kind}/team": n for kind, n in kinds.items()}
  found |= _mean("reward/team", [_team_reward(e) for e in played])
  found |= _mean("success/team", [e.outcome.won for e in played])
  return _floats(found)


def _beside(groups: Sequence[Group]) -> Mapping[str, list[Turn]]:
  """By agent, the turns of ok episodes that are no rows."""
  found = collections.defaultdict(list)
  for episode in (e for g in groups for e in g.episodes if rewards.ok(e)):
    for turn in episode.turns:
      if turn.fault is None and not turn.counts:
        found[turn.agent].append(turn)
  return found


def confusion(groups: Sequence[Group]) -> dict[str, float]:
  """How often a judge's first verdict in an episode was what, by agent.

  `verdict_right_approved`, `verdict_right_rejected`, `verdict_wrong_approved`
  and `verdict_wrong_rejected`, of ok episodes whose environment says whether
  the first solution was right (the part "first_correct"); all four are there
  where one is.
  """
  found: dict[str, float] = {}
  for episode in (e for g in groups for e in g.episodes if rewards.ok(e)):
    correct = episode.outcome.parts.get("first_correct")
    if correct is None:
      continue
    first: dict[str, str] = {}
    for turn in episode.turns:
      verdict = turn.reply and turn.reply.verdict
      if verdict in ("approve", "reject"):
        first.setdefault(turn.agent, verdict)
    for agent, verdict in first.items():
      for truth in ("right", "wrong"):
        for said in ("approve", "reject"):
          hit = verdict == said and bool(correct) == (truth == "right")
          name = f"verdict_{truth}_{said.removesuffix('e')}ed/{agent}"
          found[name] = found.get(name, 0.0) + hit
  return found


def calls(groups: Sequence[Group]) -> dict[str, float]:
  """What remote policies were asked, in failed episodes too.

  By policy: `remote_calls`, those of them that had no answer (`_failed`) and
  that nobody had to be asked for (`_cached`), the `_retries`, the tokens of
  prompts and completions, and the `_cost`.
  """
  found: dict[str, float] = collections.defaultdict(float)
  for turn in (t for g in groups for e in g.episodes for t in e.turns):
    if turn.call is None:
      continue
    for what, number in {
      "calls": 1,
      "failed": turn.fault is not None,
      "cached": turn.call.cached,
      "retries": turn.call.retries,
      "prompt_tokens": turn.call.prompt_tokens,
      "completion_tokens": turn.call.completion_tokens,
      "cost": turn.call.cost,
    }.items():
      found[f"remote_{what}/{turn.policy}"] += number
  return _floats(found)


def clocked(episode: Episode) -> bool:
  """Whether a clock decided something in it."""
  faults = [episode.fault, *(t.fault for t in episode.turns)]
  return any(f is not None and f.wall_clock for f in faults)


def turns(own: Sequence[Turn]) -> dict[str, float]:
  """Of one agent's turns; `entropy` is minus the mean of `sampler_logprobs`.

  The mean over sampled tokens of -log p is an unbiased estimate of the mean
  entropy of the tempered full softmax they were drawn from; with top-k or
  top-p it is not: tokens outside the kept set are never drawn.
  """
  lengths = [t.num_tokens for t in own]
  surprise = [-t.sampler_logprobs for t in own if len(t.sampler_logprobs)]
  labels = collections.defaultdict(list)
  for turn in own:
    for name, value in (turn.reply.labels if turn.reply else {}).items():
      labels[name].append(value)
  found = {"turns": len(own), "tokens": sum(lengths)}
  found["prompt_cut"] = sum(t.prompt_cut for t in own)
  found["chat_splits"] = sum(t.chat_split for t in own)
  found |= _mean("completion_length", lengths)
  found |= {"completion_length_max": max(lengths)} if lengths else {}
  found |= _mean("valid", [t.valid for t in own])
  found |= _mean("truncated", [t.stop_reason == "length" for t in own])
  found |= _mean("entropy", np.concatenate(surprise) if surprise else [])
  for name, values in labels.items():
    found |= _mean(f"label_{name}", values)
  return _floats(found)


def decided(own: Sequence[Turn], verdicts: Sequence[str]) -> dict[str, float]:
  """The share of each verdict in one agent's turns."""
  found = {}
  for verdict in verdicts:
    given = [t.reply is not None and t.reply.verdict == verdict for t in own]
    found |= _mean(f"decided_{verdict}", given)
  return _floats(found)


def outcomes(groups: Sequence[Group], agent: str) -> dict[str, float]:
  """Mean reward, and each of its parts where it is finite, over the
  `episodes_in`: ok episodes in which the agent has a row."""
  played = [
    e.outcome
    for g in groups
    for e in g.episodes
    if rewards.ok(e) and any(t.agent == agent and t.counts for t in e.turns)
  ]
  parts = collections.defaultdict(list)
  for outcome in played:
    for name, value in outcome.parts.items():
      if math.isfinite(value):
        parts[name].append(value)
  found = {"episodes_in": len(played)}
  found |= _mean("reward", [o.of(agent) for o in played])
  for name, values in parts.items():
    found |= _mean(f"part_{name}", values)
  return _floats(found)


def moments(rows: rewards.Rows, agent: int) -> dict[str, float]:
  """Moments of one agent's row scores within groups, and what they inflate.

      mu_k, sigma_k   mean and population deviation over agent k's rows
      mu, sigma       the same over episodes, each the mean of all its rows
      kappa_k = (sigma_k^2 + (mu_k - mu)^2) / sigma^2

  Means over groups: of `mu` and `sigma` (mu_k, sigma_k) over the `groups_in`,
  those with a row of the agent, of `kappa` over those among them whose sigma
  is above rule 5's tolerance, 1e-5 * max(1, max|episode score|), of which there
  are `kappa_groups`. `kappa_max` is their largest: at most episodes - 1 of the
  group, where turns score as their episodes do (Samuelson's inequality).

  Source: arXiv 2602.08847, lemma 4.2.
  """
  means, deviations = [], []
  for g in np.unique(rows.group[rows.agent == agent]):
    own = rows.scores[(rows.group == g) & (rows.agent == agent)]
    means.append(own.mean(dtype=np.float64))
    deviations.append(own.std(dtype=np.float64))
  kappas = [squares.mean() for _, squares in _inflation(rows, agent)]
  found = {"groups_in": len(means), "kappa_groups": len(kappas)}
  found |= {"kappa_max": max(kappas)} if kappas else {}
  found |= _mean("mu", means) | _mean("sigma", deviations)
  return _floats(found | _mean("kappa", kappas))


def overlong(
  rows: rewards.Rows, costs: Mapping[str, rewards.Overlong]
) -> dict[str, float]:
  """What turns lost of their scores by their length, on average."""
  found = {}
  for agent, overlong in costs.items():
    lost = [overlong.cost(t) for t in rows.turns if t.agent == agent]
    found |= _mean(f"overlong_penalty/{agent}", lost)
  return _floats(found)


def score_norms(
  rows: rewards.Rows, squares: np.ndarray, agent: int
) -> dict[str, float]:
  """Both sides of Dr. MAS's lemma 4.2 for one agent, means over groups.

      E|g|^2 = E|z|^2 kappa_k + Delta_k,   g = (s - mu) / sigma z
      Delta_k = Cov(|z|^2, (s - mu)^2 / sigma^2)

  over the agent's rows in a group, with the statistics of `moments` and over
  its `kappa_groups`: `score_norm` is E|z|^2, `inflated` E|z|^2 kappa_k, and
  with `delta` added to it the mean square of the terms of GRPO's gradient (but
  for the sample's deviation, and for turns that score other than their
  episode).

  Args:
    rows: of the step.
    squares: [N] |z|^2 of each row's score vector (`scores`).
    agent: its index.
  """
  norms, inflated, deltas = [], [], []
  for places, terms in _inflation(rows, agent):
    own = squares[places].astype(np.float64)
    norms.append(own.mean())
    inflated.append(own.mean() * terms.mean())
    deltas.append((own * terms).mean() - inflated[-1])
  found = _mean("score_norm", norms) | _mean("inflated", inflated)
  return _floats(found | _mean("delta", deltas))


def _inflation(
  rows: rewards.Rows, agent: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Of each group with a row of the agent and a sigma: the places of these
  rows, and (s - mu)^2 / sigma^2 of each."""
  for g in np.unique(rows.group[rows.agent == agent]):
    here = rows.group == g
    team = _means_by(rows.scores[here].astype(np.float64), rows.episode[here])
    if team.std() > _ZERO * max(1.0, np.abs(team).max()):
      places = np.flatnonzero(here & (rows.agent == agent))
      yield places, (rows.scores[places] - team.mean()) ** 2 / team.var()


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
  updates: Sequence[Any], agents: Mapping[str, Mapping[str, int]]
) -> dict[str, float]:
  """What a step's updates of one backbone say, by policy and by agent.

  Means over the updates of a policy that were not skipped; `ratio_error`, and
  how far the sampler is off (`logprob_gap`), are of the first: those behind it
  are of weights that have moved.

  Args:
    updates: `backbone.Update`s in order, fetched.
    agents: by policy, the K of the learner first, and by agent, its index in
      the sums.
  """
  found: dict[str, Any] = {}
  index = [a for names in agents.values() for a in names]
  for k, (policy, names) in enumerate(agents.items()):
    if not updates or k >= len(updates[0].live):  # a frozen one
      break
    # Others are skipped, and counted (rules 11 and 12).
    done = [u for u in updates if u.live[k] and u.output.finite[k]]
    if not done:
      continue
    first, norms = done[0].output, done[0].norms
    found |= {
      f"grad_norm/{policy}": np.mean([u.output.grad_norm[k] for u in done]),
      f"loss/{policy}": np.mean([u.output.loss[k] for u in done]),
      f"ratio_error/{policy}": first.ratio_error[k],
    }
    for agent, i in names.items():
      if norms is not None:
        found[f"grad_norm/{policy}/{agent}"] = norms[index.index(agent)]
      elif len(names) == 1:
        found[f"grad_norm/{policy}/{agent}"] = found[f"grad_norm/{policy}"]
      found |= _by_agent(agent, i, first.sums, [u.output.sums for u in done])
  return _floats(found)


def _by_agent(
  agent: str, index: int, first: Any, each: Sequence[Any]
) -> dict[str, Any]:
  """Shares of the tokens in the loss, and means over them."""
  tokens = sum(sums.tokens[index] for sums in each)
  found = {}
  for name, field in (
    ("clip_fraction", "clipped"),
    ("dual_clip_fraction", "dual_clipped"),
    ("importance", "importance"),
    ("importance_cut", "importance_cut"),
    ("kl", "kl"),
  ):
    if tokens and getattr(first, field) is not None:
      total = sum(getattr(sums, field)[index] for sums in each)
      found[f"{name}/{agent}"] = total / tokens
  if first.tokens[index]:
    gap = first.log_ratio_abs[index] / first.tokens[index]
    found[f"logprob_gap/{agent}"] = gap
    found[f"logprob_gap_max/{agent}"] = first.log_ratio_max[index]
  return found


def sequence_ratios(
  rows: rewards.Rows, gaps: np.ndarray, agents: Iterable[str]
) -> dict[str, float]:
  """`sequence_ratio_max`, by agent: how far off a completion may be as a whole.

      exp(tokens * mean |learner - sampler|),    the largest of its turns

  A gap that is nothing in a token adds up: 0.012 in each of 100 come to 3.3,
  where weights of sequences are cut (`losses.importance_weights`).

  Args:
    rows: of the step.
    gaps: [N] mean gap of each row's tokens; nan for those in no update.
    agents: the names.
  """
  lengths = np.array([len(t.completion_ids) for t in rows.turns])
  ratios = np.exp(np.minimum(lengths * gaps, _LARGE))
  found = {}
  for agent in agents:
    own = ratios[[t.agent == agent for t in rows.turns]]
    if np.isfinite(own).any():
      found[f"sequence_ratio_max/{agent}"] = np.nanmax(own)
  return _floats(found)


def sampling(before: Any, after: Any, policy: str) -> dict[str, float]:
  """What a policy's sampler did between two readings of its counts.

  `prefix_hit_rate` is the share of prompt tokens that were in the cache,
  `slot_occupancy` that of decode steps in which a slot had a sequence.

  Args:
    before: a `prefixes.Counts`.
    after: the same, later.
    policy: its name.
  """
  names = ("prompt_tokens", "prefilled_tokens", "slot_steps", "busy_steps")
  names += ("parked", "spilled")
  spent = {n: getattr(after, n) - getattr(before, n) for n in names}
  busy = spent.pop("busy_steps")
  found = {f"{name}/{policy}": value for name, value in spent.items()}
  if spent["prompt_tokens"]:
    missed = spent["prefilled_tokens"] / spent["prompt_tokens"]
    found[f"prefix_hit_rate/{policy}"] = 1 - missed
  if spent["slot_steps"]:
    found[f"slot_occupancy/{policy}"] = busy / spent["slot_steps"]
  return _floats(found)


_SUMMED = (
  *("turns", "tokens", "turn_faults", "episodes", "wall_clock_faults"),
  *("kappa_groups", "singleton_groups", "zero_variance_groups", "rollout"),
  *("groups_in", "prompt_cut", "chat_splits", "resample_dropped", "remote"),
  "verdict",
  *("prompt_tokens", "prefilled_tokens", "slot_steps", "parked", "spilled"),
)
_GREATEST = ("ratio_error", "time", "resample_rounds", "memory")
_MEAN_OVER = {
  **dict.fromkeys(("kappa", "score", "inflated", "delta"), "kappa_groups"),
  **{"mu": "groups_in", "sigma": "groups_in"},
  **{"reward": "episodes_in", "part": "episodes_in", "entropy": "tokens"},
  **{"prefix": "prompt_tokens", "slot": "slot_steps"},
}  # what an agent's mean is over, where that is not its turns


def merge(hosts: Sequence[Mapping[str, float]]) -> dict[str, float]:
  """One set of metrics from every host's.

  Counts and rates of tokens add up; of a maximum the largest counts; a mean is
  weighted by what it is over, so that it is that of all hosts' episodes.
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
    elif what.endswith("_max") or what in _GREATEST:
      merged[name] = max(values)
    else:
      weights = [_weight(what, whose, host) for host in having]
      merged[name] = float(np.average(values, weights=weights))
  return merged


def _weight(what: str, whose: str, host: Mapping[str, float]) -> float:
  """How many turns, episodes, .. are behind a host's mean."""
  on = "_on" if what.endswith("_on") else ""
  if on or whose == "team":
    failed = host.get(f"episodes_failed{on}/{whose}", 0.0)
    return host.get(f"episodes{on}/{whose}", 1.0) - failed
  count = _MEAN_OVER.get(what.partition("_")[0], "turns")
  return host.get(f"{count}/{whose}", 1.0)


# -- evaluation: P questions, n episodes each ----------------------------------
#
# A score of a question is a share in [0, 1], and nan where its episodes failed
# (rule 6): such a question is left out. Every interval is a 95 % percentile
# bootstrap over questions; one question says nothing of others, so there the
# interval is all that is possible.


def avg_by_question(
  success: np.ndarray, ok: np.ndarray | None = None
) -> np.ndarray:
  """[P] mean success of each question's episodes that did not fail.

  Args:
    success: [P, n] 0 or 1.
    ok: [P, n], False where an episode failed; None: all are well.
  """
  kept = _kept(success, ok)
  counts = kept.sum(axis=1)
  sums = np.where(kept, success, 0).sum(axis=1)
  return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def pass_by_question(
  success: np.ndarray, k: int, ok: np.ndarray | None = None
) -> np.ndarray:
  """[P] chance that one of k episodes succeeds; nan with fewer that are ok.

      1 - C(n - c, k) / C(n, k)     for c successes in n episodes

  is without bias (Chen et al. 2021, arXiv 2107.03374).

  Args:
    success: [P, n] 0 or 1.
    k: at most n.
    ok: as `avg_by_question`.
  """
  kept = _kept(success, ok)
  wins = (kept & (np.asarray(success) > 0)).sum(axis=1)
  return np.array(
    [
      1 - math.comb(int(n - c), k) / math.comb(int(n), k) if n >= k else np.nan
      for n, c in zip(kept.sum(axis=1), wins, strict=True)
    ],
    float,
  )


def maj_by_question(
  answers: Sequence[Sequence[str | None]],
  success: np.ndarray,
  ok: np.ndarray | None = None,
) -> np.ndarray:
  """[P] expected success of the answer that most episodes gave.

  Answers with equally many votes are chosen with equal chance. An episode
  without an answer votes for nothing; a question without a vote scores 0.

  Args:
    answers: [P, n] canonical answers, None where there was none.
    success: [P, n] 0 or 1.
    ok: as `avg_by_question`.
  """
  kept = _kept(success, ok)
  return np.array(
    [_vote(*question) for question in zip(answers, success, kept, strict=True)]
  )


def _vote(
  answers: Sequence[str | None], success: np.ndarray, kept: np.ndarray
) -> float:
  if not kept.any():
    return np.nan
  votes = collections.defaultdict(list)
  for answer, won, counts in zip(answers, success, kept, strict=True):
    if counts and answer is not None:
      votes[answer].append(float(won))
  if not votes:
    return 0.0
  most = max(map(len, votes.values()))
  return float(np.mean([np.mean(v) for v in votes.values() if len(v) == most]))


def verdicts(
  right: np.ndarray | Sequence[bool], approved: np.ndarray | Sequence[bool]
) -> dict[str, float]:
  """How often a judge is right, from verdicts on solutions graded apart.

  Precision of a verdict: the share of those given that fit the solution (it is
  right and approved, or wrong and rejected). Recall: the share of the solutions
  with which it would fit that got it. Balanced accuracy: the mean of both
  recalls, 0.5 for a judge that does not look. Shares of nothing are absent.

  Args:
    right: [N] whether each solution was right.
    approved: [N] whether it was approved; otherwise it was rejected.
  """
  right, approved = np.asarray(right, bool), np.asarray(approved, bool)
  found = {"verdicts": len(right)}
  found |= _mean("approve_precision", right[approved])
  found |= _mean("approve_recall", approved[right])
  found |= _mean("reject_precision", ~right[~approved])
  found |= _mean("reject_recall", ~approved[~right])
  if {"approve_recall", "reject_recall"} <= found.keys():
    both = found["approve_recall"] + found["reject_recall"]
    found["balanced_accuracy"] = both / 2
  return _floats(found)


def bootstrap(*sets: np.ndarray, seed: int = 0, num: int = 10_000) -> Interval:
  """Mean of the sets' means (of one set: its mean), with a 95 % interval.

  Every resample draws each set's questions anew, and of several runs the runs
  too, the same ones for all sets. Where both are drawn, what differs by
  question and run together is counted more than once, so that the interval is
  rather too wide (the pigeonhole bootstrap: Owen 2007, 10.1214/07-AOAS122);
  what differs by run alone is judged from as few runs as there are.

  Args:
    *sets: each [P], or [P, S] of the same S runs, in [0, 1] without nan.
    seed: of the resampling; the same values give the same interval.
    num: resamples.
  """
  columns = [_columns(s) for s in sets]
  rng = np.random.default_rng(seed)
  mean = float(np.mean([c.mean() for c in columns]))
  if min(map(len, columns)) == 1:
    return mean, 0.0, 1.0
  scores = _resample(columns, rng, num)
  return mean, *_middle((scores * _draw(scores, rng)).sum(axis=1))


def paired_bootstrap(
  ours: Sequence[np.ndarray],
  theirs: Sequence[np.ndarray],
  *,
  same_seeds: bool = False,
  seed: int = 0,
  num: int = 10_000,
) -> Interval:
  """Difference of two means of sets' means, with a 95 % interval.

  As `bootstrap`, where every resample has the same questions on both sides.

  Args:
    ours: sets, each [P], or [P, S] of S runs.
    theirs: of the same questions, each [P] or [P, R].
    same_seeds: run s of both sides has the same seed (so S is R): they are
      drawn together. Otherwise each side's runs are drawn on their own.
    seed: of the resampling.
    num: resamples.
  """
  left, right = ([_columns(s) for s in side] for side in (ours, theirs))
  pairs = list(zip(left, right, strict=True))
  difference = float(np.mean([a.mean() - b.mean() for a, b in pairs]))
  if min(map(len, left)) == 1:
    return difference, -1.0, 1.0
  rng = np.random.default_rng(seed)
  runs = left[0].shape[1]
  if same_seeds or runs == right[0].shape[1] == 1:
    gains = _resample([a - b for a, b in pairs], rng, num)
    return difference, *_middle((gains * _draw(gains, rng)).sum(axis=1))
  scores = _resample([np.hstack(pair) for pair in pairs], rng, num)
  own, other = np.split(scores, [runs], axis=1)
  gains = (own * _draw(own, rng)).sum(axis=1)
  return difference, *_middle(gains - (other * _draw(other, rng)).sum(axis=1))


def _resample(
  sets: Sequence[np.ndarray], rng: np.random.Generator, num: int
) -> np.ndarray:
  """[num, S] means of the sets' means with every set's questions drawn anew.

  Questions with equal scores are one kind, and how often each kind is drawn is
  multinomial: the order of the questions does not matter, and a set of
  thousands costs no more than its few kinds.

  Args:
    sets: each [P, S].
    rng: advanced.
    num: resamples.
  """
  total = np.zeros([num, sets[0].shape[1]])
  for values in sets:
    kinds, counts = np.unique(values, axis=0, return_counts=True)
    size = max(1, (1 << 22) // len(kinds))  # 32 MB at a time
    for start in range(0, num, size):
      stop = min(start + size, num)
      drawn = rng.multinomial(
        len(values), counts / len(values), size=stop - start
      )
      total[start:stop] += drawn @ kinds / len(values)
  return total / len(sets)


def _draw(scores: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  """[num, S] share of each run in each resample; a single run is no choice."""
  num, runs = scores.shape
  return rng.multinomial(runs, np.full(runs, 1 / runs), size=num) / runs


def _middle(values: np.ndarray) -> tuple[float, float]:
  """What 95 % of the values lie in."""
  low, high = np.percentile(values, [2.5, 97.5])
  return float(low), float(high)


def _columns(values: np.ndarray) -> np.ndarray:
  values = np.asarray(values, float)
  return values[:, None] if values.ndim == 1 else values


def _kept(success: np.ndarray, ok: np.ndarray | None) -> np.ndarray:
  return np.ones(np.shape(success), bool) if ok is None else np.asarray(ok) > 0


def _team_reward(episode: Episode) -> float:
  reward = episode.outcome.reward
  if isinstance(reward, Mapping):
    return sum(reward.values()) / max(len(reward), 1)
  return reward


def _rewarded(episode: Episode) -> bool:
  reward = episode.outcome.reward
  parts = reward.values() if isinstance(reward, Mapping) else [reward]
  return any(parts) or any(episode.outcome.turn_rewards.values())


def _means_by(scores: np.ndarray, ids: np.ndarray) -> np.ndarray:
  _, ids = np.unique(ids, return_inverse=True)
  return np.bincount(ids, scores) / np.bincount(ids)


def _mean(name: str, values: Sequence[float] | np.ndarray) -> dict[str, float]:
  """Absent where there is nothing to average."""
  return {name: np.mean(values)} if len(values) else {}


def _floats(found: Mapping[str, float]) -> dict[str, float]:
  return {name: float(value) for name, value in found.items()}
