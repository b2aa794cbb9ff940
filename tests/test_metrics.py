"""Row scores, metrics by agent, and evaluation statistics, by hand."""

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


def test_hosts_are_merged_by_what_they_count():
  one = {"turns/a": 1.0, "valid/a": 1.0, "logprob_gap_max/a": 2.0}
  two = {"turns/a": 3.0, "valid/a": 0.0, "logprob_gap_max/a": 1.0}
  one |= {"kappa/a": 2.0, "kappa_groups/a": 1.0, "grad_norm/p": 0.5}
  two |= {"kappa_groups/a": 0.0, "grad_norm/p": 0.5}
  assert metrics.merge([one, two]) == {
    "turns/a": 4.0,
    "valid/a": 0.25,
    "logprob_gap_max/a": 2.0,
    "kappa/a": 2.0,
    "kappa_groups/a": 1.0,
    "grad_norm/p": 0.5,
  }
  assert metrics.merge([one]) == one


def test_an_update_that_was_skipped_says_nothing():
  """Rule 12: no metric is NaN."""
  sums = SimpleNamespace(
    tokens=np.array([4.0, 0.0]),
    clipped=np.array([1.0, 0.0]),
    dual_clipped=np.zeros(2),
    log_ratio_abs=np.array([2.0, 0.0]),
    log_ratio_max=np.array([1.5, 0.0]),
  )
  output = SimpleNamespace(
    loss=0.1, grad_norm=0.2, finite=True, ratio_error=0.0, sums=sums
  )
  found = metrics.update(output, np.array([0.3, 0.4]), "p", {"a": 0, "b": 1})
  assert found["clip_fraction/a"] == 0.25 and found["logprob_gap/a"] == 0.5
  assert "clip_fraction/b" not in found
  assert found["grad_norm/p/b"] == 0.4
  alone = metrics.update(output, None, "p", {"a": 0})
  assert alone["grad_norm/p/a"] == alone["grad_norm/p"] == 0.2
  output.finite, output.loss = False, math.nan
  assert metrics.update(output, None, "p", {"a": 0}) == {}


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
# Student's t at 97.5 % with 2 degrees of freedom, from a printed table.
T2 = 4.302653


def test_avg_at_k():
  # Questions 1/2, 1/4, 0: mean 1/4, deviation 1/4, and the cut at 0.
  mean, low, high = metrics.avg_at_k(SUCCESS)
  assert mean == pytest.approx(0.25)
  assert low == 0.0
  assert high == pytest.approx(0.25 + T2 * 0.25 / math.sqrt(3))


def test_pass_at_k():
  # 1 - C(2,2)/C(4,2) = 5/6, 1 - C(3,2)/6 = 1/2, 0.
  assert metrics.pass_at_k(SUCCESS, 2)[0] == pytest.approx((5 / 6 + 1 / 2) / 3)
  assert metrics.pass_at_k(SUCCESS, 4)[0] == pytest.approx(2 / 3)
  assert metrics.pass_at_k(SUCCESS, 1) == pytest.approx(
    metrics.avg_at_k(SUCCESS)
  )


def test_pass_at_k_is_unbiased():
  rng = np.random.default_rng(0)
  success = rng.random((4000, 6)) < 0.3
  mean, low, high = metrics.pass_at_k(success, 3)
  assert low < 1 - 0.7**3 < high
  assert high - low < 0.03 and low < mean < high


def test_the_interval_covers():
  # Questions of unequal difficulty; 95 % of the intervals hold the mean.
  rng = np.random.default_rng(1)
  hits = 0
  for _ in range(400):
    chance = rng.beta(2, 2, (20, 1))
    _, low, high = metrics.avg_at_k(rng.random((20, 4)) < chance)
    hits += low <= 0.5 <= high
  assert 0.92 <= hits / 400 <= 0.98


def test_failed_episodes_are_no_wrong_answers():
  ok = np.array([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]], bool)
  assert metrics.avg_at_k(SUCCESS, ok)[0] == pytest.approx((2 / 3 + 1) / 2)
  # Only the first question has two episodes left: 1 - C(1,2)/C(3,2) = 1.
  assert metrics.pass_at_k(SUCCESS, 2, ok) == (1.0, 0.0, 1.0)
  with pytest.raises(ValueError, match="no question of 3 has 4 episodes"):
    metrics.pass_at_k(SUCCESS, 4, ok)


def test_paired_difference():
  first = np.array([[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1]])
  # Differences by question 1/4, 0, -1/4.
  mean, low, high = metrics.paired_difference(SUCCESS, first)
  reach = T2 * 0.25 / math.sqrt(3)
  assert (mean, low, high) == pytest.approx((0.0, -reach, reach))
  # What the two share cancels: a constant gain has an interval of no width.
  hard = np.array([[0, 0], [1, 0], [1, 0]])
  easy = np.array([[0, 1], [1, 1], [1, 1]])
  assert metrics.paired_difference(easy, hard) == pytest.approx((0.5,) * 3)
