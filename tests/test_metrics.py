"""Row scores, metrics by agent, and evaluation statistics, by hand."""

import dataclasses
import json
import math
import pathlib
from types import SimpleNamespace

import numpy as np
import pytest

from drmas_jax import metrics, rewards, types

pytestmark = pytest.mark.quick

AGENTS = ("solver", "verifier")
PENALTIES = {"solver": 0.1, "verifier": 0.25}
TASK = types.Task("t", 0, 0, "1+1", 2)


def turn(agent, index=0, *, length=2, logprob=-0.5, **fields):
  fields = dict(stop_reason="stop", policy_version=0, valid=True) | fields
  return types.Turn(
    agent=agent,
    policy="p",
    index=index,
    prompt_ids=np.zeros(3, np.int32),
    completion_ids=np.zeros(length, np.int32),
    sampler_logprobs=np.full(length, logprob, np.float32),
    log_kept_mass=np.zeros(length, np.float32),
    **fields,
  )


def episode(*turns, reward=1.0, **fields):
  outcome = types.Outcome(reward, **fields)
  return types.Episode(TASK, 0, list(turns), outcome=outcome)


def lost(kind, *turns, clock=False, status="failed"):
  fault = types.Fault(kind, "gone", wall_clock=clock)
  # Its outcome came before the fault: it must not be read all the same.
  outcome = types.Outcome(1.0)
  return types.Episode(
    TASK, 0, list(turns), outcome=outcome, status=status, fault=fault
  )


def rollout(*groups, **options):
  groups = [types.Group(TASK, list(g)) for g in groups]
  rows = rewards.row_scores(groups, PENALTIES)
  return metrics.rollout(groups, rows, AGENTS, **options)


def test_row_scores():
  groups = [
    types.Group(
      TASK,
      [
        episode(
          turn("verifier", 0),
          turn("solver", 1, valid=False),
          turn("verifier", 2, valid=False),
          turn_rewards={1: 0.5},
        ),
        lost("deadline", turn("solver")),
        episode(
          turn("solver", 0),
          turn("solver", 1, fault=types.Fault("deadline", "late")),
          reward=0.0,
        ),
      ],
    ),
    types.Group(TASK, [lost("cancelled", turn("solver"), status="cancelled")]),
    types.Group(
      TASK,
      [
        episode(
          turn("solver"),
          turn("verifier", 1),
          reward={"solver": -1.0, "verifier": 1.0},
        )
      ],
    ),
  ]
  rows = rewards.row_scores(groups, PENALTIES)
  np.testing.assert_allclose(rows.scores, [1, 1.4, 0.75, 0, -1, 1])
  assert rows.group.tolist() == [0, 0, 0, 0, 2, 2]
  assert rows.agent.tolist() == [1, 0, 1, 0, 0, 1]
  assert rows.episode.tolist() == [0, 0, 0, 2, 4, 4]
  assert [t.index for t in rows.turns] == [0, 1, 2, 0, 0, 1]
  assert rows.per_agent
  assert not rewards.row_scores(groups[:2], PENALTIES).per_agent


def test_row_scores_of_nothing():
  rows = rewards.row_scores([types.Group(TASK, [lost("reward")])], PENALTIES)
  assert rows.turns == [] and not rows.per_agent
  assert all(x.shape == (0,) for x in rows[1:5])
  assert rows.scores.dtype == np.float32 and rows.group.dtype == np.int32


def test_row_scores_equal_the_references():
  path = pathlib.Path(__file__).parent / "golden/advantages.json"
  for case in json.loads(path.read_text())["cases"]:
    columns = ("agent", "reward", "valid")
    penalties = dict.fromkeys(case["agent"], case["penalty"])
    episodes = [
      episode(turn(agent, valid=valid), reward=reward)
      for agent, reward, valid in zip(*map(case.get, columns), strict=True)
    ]
    rows = rewards.row_scores([types.Group(TASK, episodes)], penalties)
    np.testing.assert_allclose(rows.scores, case["score"], atol=1e-6)


def test_turns_of_an_agent():
  found = rollout(
    [
      episode(
        turn("solver", length=3, logprob=-1.0, stop_reason="length"),
        turn(
          "verifier",
          1,
          valid=False,
          reply=types.Reply("no", labels={"approve": 0.0}),
        ),
        turn("verifier", 2, reply=types.Reply("yes", labels={"approve": 1.0})),
        turn("solver", 3, length=1, logprob=-2.0),
        turn("verifier", 4),
      )
    ]
  )
  assert found["turns/solver"] == 2 and found["turns/verifier"] == 3
  assert found["tokens/solver"] == 4 and found["tokens/verifier"] == 6
  assert found["completion_length/solver"] == 2
  assert found["completion_length_max/solver"] == 3
  assert found["truncated/solver"] == 0.5 and found["truncated/verifier"] == 0
  assert found["valid/verifier"] == pytest.approx(2 / 3)
  # By token, not by turn: three tokens at 1 nat and one at 2.
  assert found["entropy/solver"] == pytest.approx(1.25)
  # A turn without the label does not count for it.
  assert found["label_approve/verifier"] == 0.5
  assert "label_approve/solver" not in found


def test_first_verdicts_are_counted_by_what_they_are_about():
  def judged(right, *verdicts, agent="verifier"):
    turns = [
      turn(agent, i, reply=types.Reply("", verdict=v))
      for i, v in enumerate(verdicts)
    ]
    return episode(*turns, parts={"first_correct": float(right)})

  silent = episode(turn("verifier", reply=types.Reply("", verdict="approve")))
  found = rollout(
    [judged(1, "approve"), judged(1, "approve", "reject"), judged(1, "reject")],
    [judged(0, "reject", "approve"), judged(0, "yes"), silent],
    [lost("deadline", turn("verifier")), judged(0, "reject", agent="solver")],
  )
  verdicts = {k: v for k, v in found.items() if k.startswith("verdict_")}
  assert verdicts == {
    "verdict_right_approved/verifier": 2,
    "verdict_right_rejected/verifier": 1,
    "verdict_wrong_approved/verifier": 0,
    "verdict_wrong_rejected/verifier": 1,
    "verdict_right_approved/solver": 0,
    "verdict_right_rejected/solver": 0,
    "verdict_wrong_approved/solver": 0,
    "verdict_wrong_rejected/solver": 1,
  }
  assert metrics.merge([found, found])["verdict_right_approved/verifier"] == 4


def test_rewards_and_parts():
  found = rollout(
    [
      episode(turn("solver"), turn("verifier", 1), parts={"exact": 1.0}),
      episode(turn("solver"), reward=0.0, parts={"exact": 0.5, "form": 0.25}),
      lost("reward", turn("solver")),
    ]
  )
  assert found["reward/solver"] == 0.5 and found["reward/verifier"] == 1.0
  assert found["part_exact/solver"] == 0.75
  assert found["part_exact/verifier"] == 1.0
  assert found["part_form/solver"] == 0.25
  assert "part_form/verifier" not in found
  assert found["reward/team"] == 0.5 and found["success/team"] == 0.5


def test_a_reward_per_agent():
  found = rollout(
    [
      episode(
        turn("solver"),
        turn("verifier", 1),
        reward={"solver": -1.0, "verifier": 2.0},
      )
    ]
  )
  assert found["reward/solver"] == -1.0 and found["reward/verifier"] == 2.0
  assert found["reward/team"] == 0.5 and found["success/team"] == 0.0


def test_rewards_that_cancel_are_rewards():
  outcome = types.Outcome(0.0, turn_rewards={0: 0.5})
  one = episode(turn("solver"), reward={"solver": -1.0, "verifier": 1.0})
  two = types.Episode(TASK, 0, [turn("solver")], outcome=outcome)
  none = episode(turn("solver"), reward=0.0)
  found = rollout([one, two, none, lost("reward")])
  assert found["episodes_rewarded/team"] == 2
  assert rollout([none])["episodes_rewarded/team"] == 0


def test_each_data_set_of_a_mixture_has_its_own():
  def group(source, *episodes):
    task = dataclasses.replace(TASK, source=source)
    return types.Group(task, list(episodes))

  groups = [
    group("a", episode(turn("solver")), episode(reward=0.0)),
    group("b", episode(reward=0.0), lost("prompt", clock=True)),
    group("a", episode(turn("solver"))),
  ]
  rows = rewards.row_scores(groups, PENALTIES)
  found = metrics.rollout(groups, rows, AGENTS, ("a", "b", "c"))
  own = {name: v for name, v in found.items() if "_on/" in name}
  assert own == pytest.approx(
    {
      **{"reward_on/a": 2 / 3, "success_on/a": 2 / 3},
      **{"reward_on/b": 0.0, "success_on/b": 0.0},
      "episodes_failed_prompt_on/b": 1,
    }
    | {f"episodes_on/{s}": n for s, n in (("a", 3), ("b", 2), ("c", 0))}
    | {f"episodes_rewarded_on/{s}": 2 * (s == "a") for s in "abc"}
    | {f"episodes_failed_on/{s}": float(s == "b") for s in "abc"}
    | {f"wall_clock_faults_on/{s}": float(s == "b") for s in "abc"}
  )
  alone = metrics.rollout(groups, rows, AGENTS)
  assert alone == {k: v for k, v in found.items() if k not in own}
  [one, two] = [metrics.rollout([g], rows, AGENTS, ("a",)) for g in groups[::2]]
  assert metrics.merge([one, two])["reward_on/a"] == pytest.approx(2 / 3)


def test_failed_episodes_are_counted_by_kind():
  late = types.Fault("deadline", "late", wall_clock=True)
  found = rollout(
    [
      episode(turn("solver")),
      episode(turn("solver"), turn("solver", 1, fault=late)),
      lost("deadline", turn("solver", fault=late), clock=True),
      lost("reward"),
      lost("reward"),
      types.Episode(TASK, 0, status="cancelled"),
    ]
  )
  assert found["episodes/team"] == 6 and found["episodes_failed/team"] == 4
  assert found["episodes_failed_reward/team"] == 2
  assert found["episodes_failed_deadline/team"] == 1
  assert found["wall_clock_faults/team"] == 2
  assert found["turn_faults/solver"] == 2 and found["turn_faults/verifier"] == 0
  assert found["turns/solver"] == 2
  assert found["success/team"] == 1.0


def test_moments_and_inflation():
  # Group 1: a lost episode of two verifier turns, a won one of one; scores of
  # the verifier 0 0 1. Group 2: all won, one verifier turn invalid.
  found = rollout(
    [
      episode(turn("verifier"), turn("verifier", 1), reward=0.0),
      episode(turn("verifier"), turn("solver", 1)),
    ],
    [episode(turn("verifier")), episode(turn("solver"))],
  )
  assert found["mu/verifier"] == pytest.approx((1 / 3 + 1) / 2)
  assert found["sigma/verifier"] == pytest.approx(math.sqrt(2) / 3 / 2)
  # mu = sigma = 1/2: kappa = (2/9 + (1/3 - 1/2)^2) / (1/4) = 1, solver's too.
  assert found["kappa/verifier"] == pytest.approx(1.0)
  assert found["kappa/solver"] == pytest.approx(1.0)
  assert found["kappa_groups/verifier"] == found["kappa_groups/solver"] == 1


def test_inflation_above_one():
  # Episode scores 1, 0, 0, 0: mu = 1/4, sigma^2 = 3/16. The solver spoke only
  # in the won one: kappa = (0 + 9/16) / (3/16) = 3.
  found = rollout(
    [
      episode(turn("solver")),
      *(episode(turn("verifier"), reward=0.0) for _ in range(3)),
    ]
  )
  assert found["kappa/solver"] == pytest.approx(3.0)
  assert found["kappa/verifier"] == pytest.approx(1 / 3)


def test_inflation_takes_the_tolerance_of_equal_scores():
  group = [
    episode(turn("solver"), reward=100.0),
    episode(turn("solver"), reward=100.001),
  ]
  assert rollout(group)["kappa_groups/solver"] == 0
  assert "kappa/solver" not in rollout(group)
  apart = [episode(turn("solver"), reward=r) for r in (100.0, 100.1)]
  assert rollout(apart)["kappa/solver"] == pytest.approx(1.0, rel=1e-3)


def test_a_sampler_is_measured_between_two_readings():
  names = ("prompt_tokens", "prefilled_tokens", "slot_steps", "busy_steps")
  names += ("parked", "spilled")

  def counts(*values):
    return SimpleNamespace(**dict(zip(names, values, strict=True)))

  none = counts(100, 100, 64, 10, 3, 1)
  one = metrics.sampling(none, counts(300, 150, 96, 34, 3, 2), "p")
  assert one == {
    "prompt_tokens/p": 200.0,
    "prefilled_tokens/p": 50.0,
    "prefix_hit_rate/p": 0.75,
    "slot_steps/p": 32.0,
    "slot_occupancy/p": 0.75,
    "parked/p": 0.0,
    "spilled/p": 1.0,
  }
  idle = metrics.sampling(none, none, "p")
  assert not any(idle.values()) and len(idle) == 5
  other = metrics.sampling(none, counts(700, 700, 160, 10, 5, 1), "p")
  merged = metrics.merge([one, idle, other])
  assert merged == pytest.approx(
    metrics.sampling(none, counts(900, 750, 192, 34, 5, 2), "p")
  )


def test_hosts_are_merged_by_what_they_count():
  one = {"turns/a": 1.0, "valid/a": 1.0, "logprob_gap_max/a": 2.0}
  two = {"turns/a": 3.0, "valid/a": 0.0, "logprob_gap_max/a": 1.0}
  one |= {"kappa/a": 2.0, "kappa_groups/a": 1.0, "grad_norm/p": 0.5}
  two |= {"kappa_groups/a": 0.0, "grad_norm/p": 0.5}
  one |= {"resample_rounds/team": 2.0, "resample_dropped/team": 3.0}
  two |= {"resample_rounds/team": 2.0, "resample_dropped/team": 0.0}
  assert metrics.merge([one, two]) == {
    "turns/a": 4.0,
    "valid/a": 0.25,
    "logprob_gap_max/a": 2.0,
    "kappa/a": 2.0,
    "kappa_groups/a": 1.0,
    "grad_norm/p": 0.5,
    "resample_rounds/team": 2.0,
    "resample_dropped/team": 3.0,
  }
  assert metrics.merge([one]) == one


def test_hosts_with_unequal_shares_are_merged_as_one():
  """What all episodes say, however they were shared out."""
  invalid = {"valid": False, "stop_reason": "length"}
  shares = [
    [
      [
        episode(turn("solver", logprob=-2.0), parts={"exact": 1.0}),
        episode(
          turn("solver", length=7, **invalid),
          turn("verifier", 1),
          turn("solver", 2, logprob=-0.1),
          reward=0.0,
          parts={"exact": 0.0},
        ),
        lost("reward", turn("solver")),
      ],
      [episode(turn("solver", length=4), reward=0.0), episode(turn("solver"))],
    ],
    [[episode(turn("verifier"), turn("solver", 1), reward=0.5), lost("io")]],
  ]
  whole = rollout(*shares[0], *shares[1])
  merged = metrics.merge([rollout(*share) for share in shares])
  assert merged == pytest.approx(whole)
  assert whole["reward/team"] == 0.5 and whole["success/team"] == 2 / 5
  assert whole["episodes_in/verifier"] == 2 and whole["groups_in/solver"] == 3


def update(norms=None, finite=True, kl=None, tokens=4.0):
  """Of one policy, in which agent 0 has tokens and agent 1 none."""
  sums = SimpleNamespace(
    tokens=np.array([tokens, 0.0]),
    clipped=np.array([1.0, 0.0]),
    dual_clipped=np.zeros(2),
    importance=np.array([3.0, 0.0]),
    importance_cut=np.array([2.0, 0.0]),
    log_ratio_abs=np.array([2.0, 0.0]),
    log_ratio_max=np.array([1.5, 0.0]),
    kl=kl,
  )
  output = SimpleNamespace(
    loss=np.array([0.1 if finite else math.nan]),
    grad_norm=np.array([0.2]),
    finite=np.array([finite]),
    ratio_error=np.array([0.0]),
    sums=sums,
  )
  return SimpleNamespace(output=output, live=np.array([True]), norms=norms)


def test_gaps_of_tokens_add_up_over_a_completion():
  """Case G13: 0.012 over 100 tokens."""
  played = [episode(turn("a", length=n), turn("b", 1)) for n in (100, 10, 9)]
  rows = rewards.row_scores([types.Group(TASK, played)], {"a": 0.0, "b": 0.0})
  gaps = np.array([0.012, np.nan, 0.04, np.nan, np.nan, np.nan])
  found = metrics.sequence_ratios(rows, gaps, ["a", "b"])
  assert found == {"sequence_ratio_max/a": pytest.approx(3.32, abs=1e-3)}
  found = metrics.sequence_ratios(rows, gaps + 9, ["a", "b"])
  assert np.isfinite(found["sequence_ratio_max/a"])
  none = rewards.row_scores([], {"a": 0.0})
  assert metrics.sequence_ratios(none, np.zeros(0), ["a"]) == {}


def test_an_update_that_was_skipped_says_nothing():
  """Rule 12: no metric is NaN."""
  both, one = {"p": {"a": 0, "b": 1}}, {"p": {"a": 0}}
  found = metrics.update([update(np.array([0.3, 0.4]))], both)
  assert found["clip_fraction/a"] == 0.25 and found["logprob_gap/a"] == 0.5
  assert found["importance/a"] == 0.75 and found["importance_cut/a"] == 0.5
  assert "clip_fraction/b" not in found and "kl/a" not in found
  assert found["grad_norm/p/b"] == 0.4
  alone = metrics.update([update()], one)
  assert alone["grad_norm/p/a"] == alone["grad_norm/p"] == 0.2
  assert metrics.update([update(finite=False)], one) == {}
  assert metrics.update([update(finite=False), update()], one) == alone


def test_the_distance_is_a_mean_over_the_tokens_of_all_updates():
  found = metrics.update(
    [
      update(kl=np.array([2.0, 0.0])),
      update(kl=np.array([1.0, 0.0]), tokens=8),
    ],
    {"p": {"a": 0, "b": 1}},
  )
  assert found["kl/a"] == 0.25 and "kl/b" not in found


@pytest.mark.parametrize(
  "groups",
  [[], [[]], [[lost("reward", turn("solver"))]], [[episode()]]],
  ids=["no groups", "no episodes", "all failed", "no turns"],
)
def test_nothing_is_nan(groups):
  found = rollout(*groups)
  assert all(math.isfinite(v) for v in found.values())
  for agent in AGENTS:
    for count in ("turns", "tokens", "kappa_groups", "turn_faults"):
      assert found[f"{count}/{agent}"] == 0
    assert f"reward/{agent}" not in found and f"mu/{agent}" not in found


def test_baselines():
  found = metrics.baselines(np.array([1, 0]), np.array([0, 3]), AGENTS)
  assert found == {
    "singleton_groups/solver": 1.0,
    "singleton_groups/verifier": 0.0,
    "zero_variance_groups/solver": 0.0,
    "zero_variance_groups/verifier": 3.0,
  }


# -- evaluation ----------------------------------------------------------------

SUCCESS = np.array([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])


def test_avg():
  scores = metrics.avg_by_question(SUCCESS)
  assert scores.tolist() == [0.5, 0.25, 0.0]
  # Of the 27 resamples one has mean 1/2 and one 0: 3.7 % each, which is more
  # than the 2.5 % that are cut off.
  assert metrics.bootstrap(scores) == pytest.approx((0.25, 0.0, 0.5))


def test_pass():
  # 1 - C(2,2)/C(4,2) = 5/6, 1 - C(3,2)/6 = 1/2, 0.
  assert metrics.pass_by_question(SUCCESS, 2) == pytest.approx(
    [5 / 6, 1 / 2, 0]
  )
  assert metrics.pass_by_question(SUCCESS, 4).tolist() == [1, 1, 0]
  averages = metrics.avg_by_question(SUCCESS)
  assert metrics.pass_by_question(SUCCESS, 1) == pytest.approx(averages)


def test_pass_is_unbiased():
  rng = np.random.default_rng(0)
  success = rng.random((4000, 6)) < 0.3
  mean, low, high = metrics.bootstrap(metrics.pass_by_question(success, 3))
  assert low < 1 - 0.7**3 < high
  assert high - low < 0.03 and low < mean < high


def test_maj():
  answers = [
    ["4", "4", "5", "7"],
    ["4", "4", "5", "5"],
    [None, None, None, "3"],
  ]
  success = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 1]]
  scores = metrics.maj_by_question(answers, success)
  # The plurality is right; half of a tie is; silence does not outvote "3".
  assert scores.tolist() == [1.0, 0.5, 1.0]
  # A failed episode does not vote, its question goes only with the last one.
  ok = np.array([[0, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]])
  scores = metrics.maj_by_question(answers, success, ok)
  assert scores[:2].tolist() == [0.0, 1.0] and np.isnan(scores[2])
  # Nobody answers: wrong, and no fault.
  assert metrics.maj_by_question([[None] * 2], [[0, 0]]).tolist() == [0.0]
  # A judge that was of two minds about one answer: the mean of its verdicts.
  assert metrics.maj_by_question([["a", "a"]], [[1, 0]]).tolist() == [0.5]


def test_bootstrap_is_the_mean_over_what_is_resampled():
  rng = np.random.default_rng(3)
  easy, hard = rng.random(30), rng.random(200) ** 4
  mean, low, high = metrics.bootstrap(easy, hard)
  assert mean == pytest.approx((easy.mean() + hard.mean()) / 2)
  # Sets are drawn apart: their errors add in squares (to a few per cent).
  error = np.sqrt(easy.var() / 30 + hard.var() / 200) / 2
  assert high - low == pytest.approx(2 * 1.96 * error, rel=0.06)
  # Of two runs, the same questions: what differs by question stays.
  _, low, high = metrics.bootstrap(np.stack([easy, easy], axis=1))
  assert (low, high) == pytest.approx(metrics.bootstrap(easy)[1:], abs=0.01)
  # The same numbers for the same questions, in any order, and every time.
  assert metrics.bootstrap(easy) == metrics.bootstrap(easy[::-1])
  assert metrics.bootstrap(easy) != metrics.bootstrap(easy, seed=1)


def test_bootstrap_of_many_kinds_goes_in_parts(monkeypatch):
  values = np.random.default_rng(0).random(3000)  # 3,000 kinds, 1,398 a part
  drawn = []
  middle = metrics._middle
  monkeypatch.setattr(
    metrics, "_middle", lambda v: drawn.append(v) or middle(v)
  )
  mean, low, high = metrics.bootstrap(values, num=1500)
  assert len(drawn[0]) == 1500 and drawn[0].min() > 0.4
  error = values.std() / np.sqrt(3000)
  assert (high - mean, mean - low) == pytest.approx(
    (1.96 * error,) * 2, rel=0.1
  )


def test_the_interval_covers():
  # Questions of unequal difficulty; 95 % of the intervals hold the mean.
  rng = np.random.default_rng(1)
  hits = 0
  for _ in range(400):
    chance = rng.beta(2, 2, (40, 1))
    scores = (rng.random((40, 4)) < chance).mean(axis=1)
    _, low, high = metrics.bootstrap(scores, num=1000)
    hits += low <= 0.5 <= high
  assert 0.92 <= hits / 400 <= 0.98


def test_the_paired_interval_covers():
  # Two recipes of three seeds each on 40 questions: difficulty is shared, the
  # second is better by 0.05, and every seed has its own luck on each question.
  rng = np.random.default_rng(2)
  hits, widths = 0, []
  for _ in range(300):
    chance = rng.uniform(0.05, 0.9, (40, 1))
    ours, theirs = (
      (rng.random((40, 3, 8)) < (chance + gain)[..., None]).mean(axis=-1)
      for gain in (0.05, 0.0)
    )
    _, low, high = metrics.paired_bootstrap([ours], [theirs], num=600)
    hits += low <= 0.05 <= high
    widths.append(high - low)
  # What differs by question and seed is counted more than once, never less.
  assert hits / 300 >= 0.95
  # And difficulty, which is most of each score's variance, cancels.
  alone = metrics.bootstrap(ours)
  assert np.mean(widths) < 0.8 * (alone[2] - alone[1])


def test_paired_bootstrap_of_seeds():
  ours = np.array([[1.0, 0.0], [1.0, 0.0], [0.5, 0.5]])
  # The same runs with the same seeds: no difference in any resample.
  same = metrics.paired_bootstrap([ours], [ours], same_seeds=True)
  assert same == (0.0, 0.0, 0.0)
  # Without seeds in common the runs are drawn apart.
  _, low, high = metrics.paired_bootstrap([ours], [ours])
  assert low < -0.4 and high > 0.4
  # One run of ours against two of theirs, over two sets.
  one = ours[:, 0]
  mean, low, high = metrics.paired_bootstrap([one, one], [ours, ours])
  assert mean == pytest.approx(5 / 6 - 1 / 2) and low < mean < high
  # One question says nothing of others.
  assert metrics.paired_bootstrap([one[:1]], [one[:1]]) == (0.0, -1.0, 1.0)
  mean, low, high = metrics.bootstrap(one[:1], one)
  assert (mean, low, high) == (pytest.approx(11 / 12), 0.0, 1.0)


def test_failed_episodes_are_no_wrong_answers():
  ok = np.array([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]], bool)
  scores = metrics.avg_by_question(SUCCESS, ok)
  assert scores == pytest.approx([2 / 3, 1, np.nan], nan_ok=True)
  # Only the first question has two episodes left: 1 - C(1,2)/C(3,2) = 1.
  scores = metrics.pass_by_question(SUCCESS, 2, ok)
  assert scores == pytest.approx([1, np.nan, np.nan], nan_ok=True)


def test_paired_bootstrap():
  ours, theirs = np.array([0.5, 0.25, 0.0]), np.array([0.25, 0.25, 0.25])
  # Differences by question 1/4, 0, -1/4.
  found = metrics.paired_bootstrap([ours], [theirs])
  assert found == pytest.approx((0.0, -0.25, 0.25))
  # What the two share cancels: a constant gain has an interval of no width.
  hard, easy = np.array([0.0, 0.5, 0.5]), np.array([0.5, 1.0, 1.0])
  assert metrics.paired_bootstrap([easy], [hard]) == (0.5, 0.5, 0.5)
