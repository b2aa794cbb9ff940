"""Estimators against hand numbers, the reference's numbers, and properties."""

import json
import math
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drmas_jax import advantages
from drmas_jax import config as config_lib

pytestmark = pytest.mark.quick

GOLDEN = json.loads(
  (pathlib.Path(__file__).parent / "golden/advantages.json").read_text()
)["cases"]


def run(
  name,
  scores,
  group,
  agent,
  episode,
  *,
  num_agents=3,
  per_agent=False,
  **options,
):
  config = config_lib.Advantage(name=name, **options)
  return advantages.estimate(
    config,
    np.array(scores),
    np.array(group),
    np.array(agent),
    np.array(episode),
    num_agents=num_agents,
    per_agent=per_agent,
  )


# One task, three episodes won, lost, won; a searching team of Verifier,
# Searcher, Answerer; two invalid turns at 0.01 each (reference 9.2).
HAND = {
  "scores": [1, 1, 1, 1, 0, 0, 0.99, 1, 1, 0.99, 1, 1],
  "group": [0] * 12,
  "agent": ["VSA".index(a) for a in "VSVAVAVSVSVA"],
  "episode": [0] * 4 + [1] * 2 + [2] * 6,
}


def test_agent_wise_by_hand():
  got = run("agent_wise", **HAND)
  want = [0.4131, 0.5773, 0.4131, 0.5773, -2.0411, -1.1547]
  want += [0.3886, 0.5773, 0.4131, -1.1545, 0.4131, 0.5773]
  np.testing.assert_allclose(got.values, want, atol=5e-5)
  assert got.num_singleton.tolist() == [0, 0, 0]
  assert got.num_zero_variance.tolist() == [0, 0, 0]


def test_grpo_by_hand():
  got = run("grpo", **HAND)
  want = [0.5802] * 4 + [-1.1547] * 2 + [0.5745] * 6
  np.testing.assert_allclose(got.values, want, atol=5e-5)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: c["name"])
@pytest.mark.parametrize(
  ("name", "key"), [("agent_wise", "drmas_agent_wise"), ("grpo", "grpo_global")]
)
def test_reference_numbers(case, name, key):
  agents = sorted(set(case["agent"]))
  got = run(
    name,
    case["score"],
    case["group"],
    [agents.index(a) for a in case["agent"]],
    case["episode"],
    num_agents=len(agents),
    singleton="raw",
    zero_tolerance=0.0,
  )
  np.testing.assert_allclose(got.values, case[key], atol=2e-5)


def test_the_agents_of_a_group_do_not_touch_each_other():
  # Two solver rows differ, two verifier rows are equal (open case A03).
  got = run("agent_wise", [1, 0, 1, 1], [0] * 4, [0, 0, 1, 1], [0, 1, 0, 1])
  root = 1 / math.sqrt(2)
  np.testing.assert_allclose(got.values, [root, -root, 0, 0], atol=2e-6)
  assert got.num_zero_variance.tolist() == [0, 1, 0]


@pytest.mark.parametrize("name", ["agent_wise", "grpo"])
def test_a_group_of_one(name):
  rows = ([1.0, 0.5, 0.0], [0, 1, 1], [0, 0, 0], [0, 1, 2])
  got = run(name, *rows)
  root = 1 / math.sqrt(2)
  np.testing.assert_allclose(got.values, [0, root, -root], atol=3e-6)
  assert got.num_singleton.tolist() == [1, 0, 0]
  raw = run(name, *rows, singleton="raw")
  np.testing.assert_allclose(raw.values[0], 1 / (1 + 1e-6), rtol=1e-6)
  assert raw.num_singleton.tolist() == [1, 0, 0]


@pytest.mark.parametrize("name", ["agent_wise", "grpo"])
@pytest.mark.parametrize(
  ("spread", "zero"), [(0.9e-5, True), (2e-5, False)], ids=["below", "above"]
)
def test_the_tolerance_is_relative_to_large_scores(name, spread, zero):
  # Scores near 100 deviate by root(1/2) * 100 * spread * root(2).
  scores = [100.0, 100.0 * (1 + spread * math.sqrt(2))]
  got = run(name, scores, [0, 0], [0, 0], [0, 1])
  assert (got.values == 0).all() == zero
  assert got.num_zero_variance[0] == zero


# Two debaters, one wins what the other loses: agent 0 gets 1, -1, 1.
ZERO_SUM = ([1, -1, -1, 1, 1, -1], [0] * 6, [0, 1] * 3, [0, 0, 1, 1, 2, 2])


@pytest.mark.parametrize("name", ["agent_wise", "grpo"])
def test_zero_sum_rewards_are_compared_agent_by_agent(name):
  # mean 1/3, std sqrt((2 * 4/9 + 16/9) / 2) = 2 / sqrt(3), and its mirror.
  got = run(name, *ZERO_SUM, num_agents=2, per_agent=True)
  won, lost = (2 / 3) * math.sqrt(3) / 2, (4 / 3) * math.sqrt(3) / 2
  want = [won, -won, -lost, lost, won, -won]
  np.testing.assert_allclose(got.values, want, atol=3e-6)


def test_zero_sum_rewards_pooled():
  # mean 0 and std sqrt(6 / 5) over both agents' six episode scores.
  got = run("grpo", *ZERO_SUM, num_agents=2, per_agent=True, pool_agents=True)
  want = np.array(ZERO_SUM[0]) / math.sqrt(6 / 5)
  np.testing.assert_allclose(got.values, want, atol=3e-6)


def test_zero_sum_rewards_as_a_team_reward_say_nothing():
  # Without per_agent an episode scores the mean of its rows: 0, always.
  got = run("grpo", *ZERO_SUM, num_agents=2)
  assert (got.values == 0).all()
  assert got.num_zero_variance.tolist() == [1, 1]


def test_grpo_counts_an_agents_turns_in_an_episode_once():
  # Agent 0 speaks three times in the episode it wins (open case A02).
  got = run(
    "grpo", [1, 1, 1, 0], [0] * 4, [0] * 4, [0, 0, 0, 1], per_agent=True
  )
  root = 1 / math.sqrt(2)
  np.testing.assert_allclose(got.values, [root] * 3 + [-root], atol=2e-6)
  by_row = run("agent_wise", [1, 1, 1, 0], [0] * 4, [0] * 4, [0, 0, 0, 1])
  np.testing.assert_allclose(by_row.values, [0.5] * 3 + [-1.5], atol=4e-6)


@st.composite
def steps(draw):
  """Rows of a step: scores, group, agent, episode."""
  num_rows = draw(st.integers(1, 24))
  rows = []
  for _ in range(num_rows):
    group = draw(st.integers(0, 2))
    rows.append(
      (
        draw(st.sampled_from([0.0, 1.0, -0.1, 0.9, 0.99])),
        group,
        draw(st.integers(0, 2)),
        10 * group + draw(st.integers(0, 3)),
      )
    )
  return tuple(np.array(x) for x in zip(*rows, strict=True))


@pytest.mark.parametrize("name", ["agent_wise", "grpo"])
@settings(max_examples=40, deadline=None)
@given(rows=steps(), seed=st.integers(0, 99))
def test_order_of_rows_does_not_matter(name, rows, seed):
  order = np.random.default_rng(seed).permutation(len(rows[0]))
  straight = run(name, *rows)
  shuffled = run(name, *(x[order] for x in rows))
  np.testing.assert_allclose(shuffled.values, straight.values[order], atol=5e-6)
  assert (shuffled.num_singleton == straight.num_singleton).all()
  assert (shuffled.num_zero_variance == straight.num_zero_variance).all()


@pytest.mark.parametrize("per_agent", [False, True])
@pytest.mark.parametrize("name", ["agent_wise", "grpo"])
def test_padding_changes_nothing_and_gets_nothing(name, per_agent):
  shape = dict(num_groups=4, num_agents=3, num_episodes=8, per_agent=per_agent)
  rng = np.random.default_rng(0)
  rows = [
    rng.random(11).astype(np.float32),
    rng.integers(0, 3, 11),
    rng.integers(0, 3, 11),
    None,
  ]
  rows[3] = 2 * rows[1] + rng.integers(0, 2, 11)
  straight = advantages.ESTIMATORS[name](*rows, np.ones(11, bool), **shape)
  # Padding rows that look real in all but the flag, among the real ones.
  at = rng.permutation(17)[:11]
  real = np.zeros(17, bool)
  real[at] = True
  padded = []
  for x in rows:
    wide = rng.integers(0, 3, 17).astype(x.dtype)
    wide[at] = x
    padded.append(wide)
  got = advantages.ESTIMATORS[name](*padded, real, **shape)
  np.testing.assert_allclose(got.values[at], straight.values, atol=2e-6)
  assert (np.asarray(got.values)[~real] == 0).all()
  assert (got.num_singleton == straight.num_singleton).all()
  assert (got.num_zero_variance == straight.num_zero_variance).all()


@settings(max_examples=60, deadline=None)
@given(rows=steps())
def test_agent_wise_has_mean_zero_and_a_bound(rows):
  scores, group, agent, _ = rows
  values = run("agent_wise", *rows).values
  assert np.isfinite(values).all()
  for key in set(zip(group.tolist(), agent.tolist(), strict=True)):
    own = values[(group == key[0]) & (agent == key[1])]
    n = len(own)
    assert abs(own.mean()) < 1e-5
    assert np.abs(own).max() <= (n - 1) / math.sqrt(n) + 1e-5
    row_scores = scores[(group == key[0]) & (agent == key[1])]
    assert (own == 0).all() == (len(set(row_scores)) == 1)


@pytest.mark.parametrize("tolerance", [0.0, 1e-5])
@pytest.mark.parametrize("name", ["agent_wise", "grpo"])
@settings(max_examples=30, deadline=None)
@given(
  score=st.floats(-1e3, 1e3, width=32, allow_subnormal=False),
  turns=st.lists(st.integers(1, 4), min_size=2, max_size=5),
)
def test_equal_scores_are_exactly_zero(name, tolerance, score, turns):
  episode = np.repeat(np.arange(len(turns)), turns)
  zeros = np.zeros_like(episode)
  scores = np.full(len(episode), score)
  got = run(name, scores, zeros, zeros, episode, zero_tolerance=tolerance)
  assert (got.values == 0).all()
  assert got.num_zero_variance.tolist() == [1, 0, 0]


def test_no_rows_at_all():
  got = run("agent_wise", [], [], [], [])
  assert got.values.shape == (0,)
  assert got.num_singleton.tolist() == [0, 0, 0]


def test_few_shapes():
  for estimator in advantages.ESTIMATORS.values():
    before = estimator._cache_size()
    for n in (33, 47, 64):
      index = np.arange(n)
      episode = index // 4
      run("agent_wise", index % 2, episode // 4, index % 3, episode)
      run("grpo", index % 2, episode // 4, index % 3, episode)
    assert estimator._cache_size() <= before + 1
