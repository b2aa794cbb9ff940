"""Estimators against hand numbers, the reference's numbers, and properties."""

import json
import math
import pathlib
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drmas_jax import advantages, rewards
from drmas_jax import config as config_lib
from drmas_jax.types import Episode, Group, Outcome, Task, Turn

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
  turn=None,
  tokens=None,
  anchor=None,
  returns=None,
  averages=None,
  **options,
):
  """Advantages, and in `averages` what is for the next step."""
  got, averages = advantages.estimate(
    config_lib.Advantage(name=name, **options),
    np.array(scores),
    np.array(group),
    np.array(agent),
    np.array(episode),
    turn=np.zeros(len(scores), int) if turn is None else np.array(turn),
    tokens=np.ones(len(scores), int) if tokens is None else np.array(tokens),
    num_agents=num_agents,
    per_agent=per_agent,
    anchor=anchor,
    returns=returns,
    averages=averages,
  )
  return types.SimpleNamespace(**got._asdict(), averages=averages)


# Estimators in their forms: each is compiled, so not all of those possible.
FORMS = [
  (name, dict(over=over, count=count))
  for name, over, count in (
    ("agent_wise", "agent", "turn"),
    ("agent_wise", "agent", "episode"),
    ("grpo", "agent", "turn"),
    ("mean_only", "agent", "turn"),
    ("std_only", "agent", "episode"),
    ("global_call", "agent", "turn"),
    ("rloo", "agent", "episode"),
    ("rloo", "team", "turn"),
    ("dr_grpo", "team", "episode"),
    ("reinforce_plus_plus_baseline", "agent", "turn"),
    ("reinforce_plus_plus_baseline", "team", "episode"),
    ("rae", "agent", "episode"),
    ("gigpo", "agent", "turn"),
    ("gigpo", "team", "episode"),
    ("bounded", "agent", "turn"),
  )
]


def kinds(*names):
  """The forms of these estimators, or of all."""
  return [
    pytest.param(*form, id="-".join((form[0], *form[1].values())))
    for form in FORMS
    if form[0] in (names or advantages.ESTIMATORS)
  ]


every = pytest.mark.parametrize(("name", "options"), kinds())
# Those whose baseline is a group of this step, and theirs that have a scale.
SCALED = ("agent_wise", "grpo", "mean_only", "std_only", "global_call")
SCALED += ("gigpo", "bounded")
OF_GROUPS = (*SCALED, "rloo", "dr_grpo")


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


HAND_NUMBERS = [
  ("grpo", {}, [0.5802] * 4 + [-1.1547] * 2 + [0.5745] * 6),
  (
    "mean_only",
    {},
    [0.2920, 0.0058, 0.2920, 0.5783, -1.4429, -1.1566]
    + [0.2747, 0.0058, 0.2920, -0.0116, 0.2920, 0.5783],
  ),
  (
    "std_only",
    {},
    [0.8208, 57.9174, 0.8208, 0.5793, -1.6335, -1.1528]
    + [0.7963, 57.9174, 0.8208, 56.1857, 0.8208, 0.5793],
  ),
  (
    "global_call",
    {},
    [0.4333] * 4
    + [-2.1408] * 2
    + [0.4076, 0.4333, 0.4333, 0.4076, 0.4333, 0.4333],
  ),
  # Verifier: sum 4.99 of 6; others' mean for a 1 is 3.99 / 5. Searcher: 2.99
  # of 3. Answerer: 2 of 3.
  (
    "rloo",
    {},
    [0.202, 0.005, 0.202, 0.5, -0.998, -1, 0.19, 0.005, 0.202, -0.01]
    + [0.202, 0.5],
  ),
  # Episodes 1, 0 and (0.99 + 1 + 1 + 0.99 + 1 + 1) / 6 = 0.99667.
  (
    "rloo",
    dict(over="team", count="episode"),
    [0.50167] * 4 + [-0.99833] * 2 + [0.49667] * 6,
  ),
  (
    "dr_grpo",
    {},
    [0.16833, 0.00333, 0.16833, 0.33333, -0.83167, -0.66667]
    + [0.15833, 0.00333, 0.16833, -0.00667, 0.16833, 0.33333],
  ),
  # Verifier by episode: 1, 0, (0.99 + 1 + 1) / 3 = 0.99667: mean 0.66556,
  # deviation 0.57639. Searcher: 1, 0.995: root(1/2), less for the 1e-6.
  (
    "agent_wise",
    dict(count="episode"),
    [0.5802, 0.7069, 0.5802, 0.5773, -1.1547, -1.1547]
    + [0.5745, -0.7069, 0.5745, -0.7069, 0.5745, 0.5773],
  ),
]


@pytest.mark.parametrize(("name", "options", "want"), HAND_NUMBERS)
def test_by_hand(name, options, want):
  got = run(name, **HAND, **options)
  # 57.9 has as many digits as 0.58.
  np.testing.assert_allclose(got.values, want, atol=6e-5, rtol=2e-5)


def test_groups_by_turn_index():
  # Two episodes of solver, verifier, solver: the solver's first turns are won
  # and lost, its second ones too, the other way round; the verifier's equal.
  scores = [1, 1, 0, 0, 1, 1]
  rows = (scores, [0] * 6, [0, 1, 0] * 2, [0] * 3 + [1] * 3)
  got = run("agent_wise", *rows, turn=[0, 1, 2] * 2, by_turn=True)
  root = 1 / math.sqrt(2)
  want = [root, 0, -root, -root, 0, root]
  np.testing.assert_allclose(got.values, want, atol=2e-6)
  together = run("agent_wise", *rows, turn=[0, 1, 2] * 2)
  np.testing.assert_allclose(together.values[0], 0.5 / math.sqrt(1 / 3), 1e-5)
  # A turn that one episode alone has come to is a group of one.
  late = run("agent_wise", *rows, turn=[0, 1, 2, 0, 1, 9], by_turn=True)
  assert late.values[[2, 5]].tolist() == [0, 0]
  assert late.num_singleton.tolist() == [1, 0, 0]  # of the groups played
  assert late.num_zero_variance.tolist() == [0, 1, 0]
  # Groups of two episodes: of four turns that are equal in both, and not.
  scores = [[1] * 4, [1] * 4, [1, 1, 0, 1], [1, 1, 0, 0]]
  four = run(
    "agent_wise",
    np.concatenate(scores),
    np.repeat([0, 1], 8),
    [0] * 16,
    np.repeat(range(4), 4),
    turn=[0, 1, 2, 3] * 4,
    by_turn=True,
  )
  assert four.num_zero_variance[0] == 1 and four.num_singleton[0] == 0
  assert np.flatnonzero(four.values).tolist() == [11, 15]
  # One place that is equal in both, and one that each alone has come to: as
  # they are, these have a signal where a single score is one.
  alone = [1] * 4, [0] * 4, [0] * 4, [0, 0, 1, 1]
  for singleton, num in (("zero", 1), ("raw", 0)):
    got = run(
      "agent_wise", *alone, turn=[0, 1, 0, 2], by_turn=True, singleton=singleton
    )
    assert got.num_zero_variance[0] == num and got.num_singleton[0] == 1


def test_std_only_falls_back_to_the_groups_deviation():
  # The verifier's turns are equal in a group that is mixed: mu 0.75 of the
  # episodes' means 1 and 0.5, sigma 0.35355.
  rows = ([1, 1, 0, 1], [0] * 4, [0, 1, 0, 1], [0, 0, 1, 1])
  got = run("std_only", *rows)
  np.testing.assert_allclose(got.values[[1, 3]], 0.25 / 0.35355, rtol=1e-4)
  assert got.num_zero_variance.tolist() == [0, 0, 0]
  # Those of the solver, 1 and 0, have one of their own: 0.70711.
  want = np.array([0.25, -0.75]) / 0.70711
  np.testing.assert_allclose(got.values[[0, 2]], want, rtol=1e-4)


def test_mean_only_has_no_scale_where_the_group_has_none():
  # Both episodes score 0.5 while the agents' scores differ.
  got = run("mean_only", [1, 0, 0, 1], [0] * 4, [0, 1] * 2, [0, 0, 1, 1])
  assert (got.values == 0).all()
  assert got.num_zero_variance.tolist() == [1, 1, 0]


@pytest.mark.parametrize("over", ["agent", "team"])
def test_whitened_over_tokens(over):
  scores, agent = np.array([1, 0, 1, 0, 0.5, 0]), np.array([0, 0, 1, 1, 0, 1])
  tokens = np.array([3, 1, 2, 5, 4, 1])
  group = [0, 0, 0, 0, 1, 1]  # in group 1 both agents are alone
  rows = (scores, group, agent, [0, 1, 0, 1, 2, 2])
  name = "reinforce_plus_plus_baseline"
  options = dict(tokens=tokens, over=over, zero_tolerance=0.0, singleton="raw")
  got = run(name, *rows, **options)
  centred = np.array([0.5, -0.5, 0.5, -0.5, 0.5, 0])
  if over == "team":
    centred[5] = -0.25
    centred[4] = 0.25
  alike = np.zeros(6) if over == "team" else agent
  want = np.zeros(6)
  for k in set(alike):
    flat = np.repeat(centred[alike == k], tokens[alike == k])
    want[alike == k] = (centred[alike == k] - flat.mean()) / np.sqrt(
      flat.var(ddof=1) + 1e-8
    )
  np.testing.assert_allclose(got.values, want, atol=5e-6)


def test_whitening_keeps_the_zeros_of_the_rules():
  rows = ([1, 0, 1, 1, 1], [0, 0, 1, 1, 2], [0] * 5, range(5))
  name = "reinforce_plus_plus_baseline"
  got = run(name, *rows, tokens=[9, 1, 1, 1, 1])
  assert (got.values[2:] == 0).all() and (got.values[:2] != 0).all()
  assert got.num_singleton[0] == got.num_zero_variance[0] == 1
  as_reference = run(
    name, *rows, tokens=[9, 1, 1, 1, 1], zero_tolerance=0.0, singleton="raw"
  )
  assert (as_reference.values != 0).all()


def test_rae_by_hand():
  # No average yet: like a group of one. Then 0.5, whatever the decay.
  def play(scores, agent, averages, **options):
    n = len(scores)
    rows = (scores, range(n), agent, range(n))
    return run("rae", *rows, averages=averages, num_agents=2, **options)

  first = play([1, 0, 1], [0, 0, 1], None)
  assert (first.values == 0).all()
  assert first.num_singleton.tolist() == [2, 1]
  np.testing.assert_allclose(first.averages, [[0.025, 0.05], [0.05, 0.05]])
  raw = play([1, 0, 1], [0, 0, 1], None, singleton="raw")
  np.testing.assert_allclose(raw.values, [1, 0, 1], atol=2e-6)
  # The second agent does not speak, and keeps its average.
  second = play([1, 1], [0, 0], first.averages)
  np.testing.assert_allclose(second.values, [0.5, 0.5])
  want = [[0.95 * 0.025 + 0.05, 0.95 * 0.05 + 0.05], [0.05, 0.05]]
  np.testing.assert_allclose(second.averages, want)
  third = play([0, 1], [0, 1], second.averages)
  want = [-(0.95 * 0.5 + 1) / 1.95, 0]
  np.testing.assert_allclose(third.values, want, rtol=1e-6)
  assert third.num_singleton.tolist() == [0, 0]
  # The half-life is the option's.
  other = play([1, 1], [0, 0], first.averages, decay=0.5)
  np.testing.assert_allclose(other.averages[0], [0.5125, 0.525])


def test_rae_counts_an_agents_turns_in_an_episode_once():
  rows = ([1, 1, 1, 0], [0] * 4, [0] * 4, [0, 0, 0, 1])
  by_turn, by_episode = (
    run("rae", *rows, count=count).averages[0] for count in ("turn", "episode")
  )
  np.testing.assert_allclose(by_turn, [0.05 * 0.75, 0.05])
  np.testing.assert_allclose(by_episode, [0.05 * 0.5, 0.05])


def played(calls, scores):
  """A group's episodes, one agent: how often it spoke, and what it got."""
  episode = np.repeat(np.arange(len(calls)), calls)
  return np.array(scores, float)[episode], episode * 0, episode * 0, episode


def test_bounded_by_hand():
  # Turns 1 0 0 0: mean 1/4, variance 3/16, and 2 episodes: |A| is at most 1,
  # so all of it is 1, around a half.
  got = run("bounded", *played([1, 3], [1, 0]))
  np.testing.assert_allclose(got.values, [1, -1, -1, -1], rtol=1e-6)
  # 3 episodes, turns 1 0 0 0 0: d = 4/5, variance 4/25, bound root(2).
  # t = (16 - 8) / 25 / (0.8 + root(2 * 12 / 25)) = 0.32 / 1.7798 = 0.1798.
  got = run("bounded", *played([1, 3, 1], [1, 0, 0]))
  want = np.array([0.8 - 0.1798, -0.2 - 0.1798]) / np.hypot(0.4, 0.1798)
  np.testing.assert_allclose(got.values[:2], want, rtol=2e-4)
  np.testing.assert_allclose(got.values[0], math.sqrt(2), rtol=1e-6)
  # The lone failure likewise, with the other sign.
  mirror = run("bounded", *played([1, 3, 1], [0, 1, 1]))
  np.testing.assert_allclose(mirror.values, -got.values, rtol=1e-5)
  # One call an episode: as agent_wise, but for the deviation and its 1e-6.
  rows = played([1] * 8, [1, 1, 0, 0, 0, 0, 0, 0])
  want = run("agent_wise", *rows).values * math.sqrt(8 / 7)
  np.testing.assert_allclose(run("bounded", *rows).values, want, rtol=1e-5)


def test_bounded_knows_nothing_of_one_episode():
  # Two turns of an episode differ in a penalty; the other agent has two.
  scores, group, agent = [1, 0.9, 1, 0], [0] * 4, [0, 0, 1, 1]
  got = run("bounded", scores, group, agent, [0, 0, 0, 1])
  np.testing.assert_allclose(got.values, [0, 0, 1, -1], atol=1e-6)
  assert got.num_singleton.tolist() == [1, 0, 0]


@settings(max_examples=200, deadline=None)
@given(
  calls=st.lists(st.integers(1, 4), min_size=2, max_size=8),
  wins=st.integers(0, 2**8 - 1),
  penalties=st.integers(0, 2**8 - 1),
)
def test_bounded_has_both(calls, wins, penalties):
  """Mean square 1 and |A| <= root(M - 1), as far as that can be."""
  m = len(calls)
  scores = [float(wins >> i & 1) for i in range(m)]
  if len(set(scores)) == 1:
    return
  rows = played(calls, scores)
  bound = math.sqrt(m - 1)
  values = run("bounded", *rows).values
  np.testing.assert_allclose((values**2).mean(), 1, rtol=1e-5)
  assert np.abs(values).max() <= bound * (1 + 1e-5)
  own = run("agent_wise", *rows).values
  n = len(own)
  if np.abs(own).max() * math.sqrt(n / (n - 1)) <= bound:
    np.testing.assert_allclose(values, own * math.sqrt(n / (n - 1)), rtol=2e-5)
  # Three values and more.
  worse = rows[0] - 0.1 * (penalties >> np.arange(n) % 8 & 1)
  values = run("bounded", worse, *rows[1:]).values
  assert (values**2).mean() <= 1 + 1e-5
  assert np.abs(values).max() <= bound * (1 + 1e-5)


def test_agent_wise_has_the_larger_bound():
  # One success in one call, seven failures in four calls each.
  rows = played([1] + [4] * 7, [1] + [0] * 7)
  own, episodes = (
    run("agent_wise", *rows, count=c).values for c in ("turn", "episode")
  )
  np.testing.assert_allclose(own.max(), 28 / math.sqrt(29), rtol=1e-5)
  np.testing.assert_allclose(episodes.max(), 7 / math.sqrt(8), rtol=1e-5)
  assert (episodes**2).mean() < 0.4  # no factor of 1
  np.testing.assert_allclose(
    run("bounded", *rows).values.max(), math.sqrt(7), rtol=1e-5
  )


def episode_of(index, reward, turns, turn_rewards=None):
  """Turns are (agent, prompt, valid)."""
  task = Task("t", 0, 0, "q", "a")
  made = [
    Turn(
      agent=agent,
      policy="p",
      index=i,
      prompt_ids=np.array(prompt, np.int32),
      completion_ids=np.zeros(1, np.int32),
      sampler_logprobs=np.zeros(1, np.float32),
      log_kept_mass=np.zeros(1, np.float32),
      stop_reason="stop",
      policy_version=0,
      valid=valid,
    )
    for i, (agent, prompt, valid) in enumerate(turns)
  ]
  outcome = Outcome(reward, turn_rewards or {})
  return Episode(task, index, made, outcome=outcome)


def play_gigpo(episodes, gamma, **options):
  """(returns, advantages) as the coordinator asks for them."""
  groups = [Group(episodes[0].task, episodes)]
  rows = rewards.row_scores(groups, {"s": 0.1, "v": 0.1})
  returns = rewards.step_returns(groups, rows.scores, gamma)
  got = run(
    "gigpo",
    rows.scores,
    rows.group,
    rows.agent,
    rows.episode,
    per_agent=rows.per_agent,
    anchor=rewards.anchors(rows.turns),
    returns=returns,
    gamma=gamma,
    **options,
  )
  return returns, got


def test_gigpo_by_hand():
  """All solvers begin with one prompt; what they read later is their own."""
  first, others = ("s", [1, 2], True), iter(range(3, 9))

  def next_turn(agent):
    return agent, [1, 2, next(others)], True

  episodes = [
    episode_of(0, 1.0, [first, next_turn("v"), next_turn("s")]),
    episode_of(1, 0.0, [first, next_turn("v"), next_turn("s")]),
    episode_of(2, 1.0, [first, next_turn("v")]),
  ]
  returns, got = play_gigpo(episodes, 0.5)
  np.testing.assert_allclose(returns, [0.25, 0.5, 1, 0, 0, 0, 0.5, 1])
  # Solver 1 1 0 0 1: mean 0.6, deviation root(0.3); verifier 1 0 1.
  own = np.array([0.7303, 0.57735, 0.7303, -1.0954, -1.1547, -1.0954])
  own = np.append(own, [0.7303, 0.57735])
  # At the prompt that they share 0.25, 0, 0.5: mean and deviation 0.25.
  step = np.array([0, 0, 0, -1, 0, 0, 1, 0])
  np.testing.assert_allclose(got.values, own + step, atol=6e-5)
  _, half = play_gigpo(episodes, 0.5, step_weight=0.5)
  np.testing.assert_allclose(half.values, own + step / 2, atol=6e-5)
  # Not discounted, a first turn's return is its score: 1, 0, 1.
  _, flat = play_gigpo(episodes, 1.0)
  step = np.array([0.57735, 0, 0, -1.1547, 0, 0, 0.57735, 0])
  np.testing.assert_allclose(flat.values, own + step, atol=6e-5)
  # Of the team: episodes 1, 0, 1.
  team = play_gigpo(episodes, 1.0, over="team", count="episode")[1].values
  want = np.repeat([0.57735, -1.1547, 0.57735], [3, 3, 2]) + step
  np.testing.assert_allclose(team, want, atol=6e-5)


def test_equal_prompts_of_two_agents_or_groups_are_two_states():
  anchor, returns = [7] * 6, [3.0, 1, 3, 1, 5, 1]
  rows = ([1.0] * 6, [0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 0, 0], range(6))
  got = run("gigpo", *rows, anchor=anchor, returns=returns)
  root = 1 / math.sqrt(2)
  np.testing.assert_allclose(got.values, [root, -root] * 3, atol=2e-6)


def test_returns_of_turns_with_rewards_of_their_own():
  # 0.2 for the second turn; the first turn is invalid: only it pays for that.
  turns = [("s", [1], False), ("v", [1], True), ("s", [2], True)]
  returns, _ = play_gigpo([episode_of(0, 1.0, turns, {1: 0.2})], 0.5)
  want = [0.25 + 0.5 * 0.2 - 0.1, 0.5 + 0.2, 1]
  np.testing.assert_allclose(returns, want, rtol=1e-6)
  # With rewards per agent the verifier's turn is not the solver's gain.
  apart = {"s": 1.0, "v": -1.0}
  returns, _ = play_gigpo([episode_of(0, apart, turns, {1: 0.2})], 0.5)
  np.testing.assert_allclose(returns, [0.25 - 0.1, -0.5 + 0.2, 1], rtol=1e-6)


@pytest.mark.parametrize(
  ("name", "over"),
  [
    ("rae", "agent"),
    ("reinforce_plus_plus_baseline", "agent"),
    ("reinforce_plus_plus_baseline", "team"),
  ],
)
def test_two_hosts_are_as_one(name, over):
  """Each with its own groups; sums are exchanged at one place."""
  rng = np.random.default_rng(3)
  scores, agent = rng.random(12), np.tile([0, 1, 0], 4)
  episode = np.repeat(np.arange(4), 3)
  group, tokens = episode // 2, rng.integers(1, 9, 12)
  config = config_lib.Advantage(name=name, over=over)
  averages = np.array([[0.03, 0.1], [0.0, 0.0]])

  def play(rows, total):
    columns = (x[rows] for x in (scores, group, agent, episode))
    return advantages.estimate(
      config,
      *columns,
      turn=np.zeros(len(rows), int),
      tokens=tokens[rows],
      num_agents=2,
      averages=averages,
      total=total,
    )

  own = []
  whole, state = play(np.arange(12), lambda sums: (own.append(sums), sums)[1])
  halves = [np.arange(6), np.arange(6, 12)]
  asked = []
  for half in halves:
    play(half, lambda sums: (asked.append(sums), sums)[1])
  np.testing.assert_allclose(sum(asked), own[0], rtol=1e-6)
  parts = [play(half, lambda sums: sum(asked)) for half in halves]
  values = np.concatenate([part.values for part, _ in parts])
  np.testing.assert_allclose(values, whole.values, atol=2e-6)
  assert (parts[0][1] == parts[1][1]).all()
  np.testing.assert_allclose(parts[0][1], state, rtol=1e-6)


@pytest.mark.parametrize(
  ("key", "name", "options"),
  [
    ("drmas_agent_wise", "agent_wise", {}),
    ("grpo_global", "grpo", {}),
    ("agent_wise_no_std", "dr_grpo", {}),
    ("grpo_global_no_std", "dr_grpo", dict(over="team", count="episode")),
    ("rloo_agent_wise", "rloo", {}),
  ],
)
def test_reference_numbers(key, name, options):
  """All cases as one step, with ids of their own."""

  def column(key):
    return np.concatenate([case[key] for case in GOLDEN])

  apart = np.repeat(range(len(GOLDEN)), [len(c["score"]) for c in GOLDEN])

  names, agent = np.unique(column("agent"), return_inverse=True)
  got = run(
    name,
    column("score"),
    column("group") + 1000 * apart,
    agent,
    column("episode") + 1000 * apart,
    num_agents=len(names),
    singleton="raw",
    zero_tolerance=0.0,
    **options,
  )
  np.testing.assert_allclose(got.values, column(key), atol=2e-5)


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
  """Rows of a step, of one padded width: scores, group, agent, episode."""
  num_rows = draw(st.integers(17, 24))
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


AVERAGES = np.array([[0.3, 0.5], [0.0, 0.05], [0.0, 0.0]])  # of rae


@every
@settings(max_examples=5, deadline=None)
@given(rows=steps(), seed=st.integers(0, 99))
def test_order_of_rows_does_not_matter(name, options, rows, seed):
  rng = np.random.default_rng(seed)
  order, tokens = (
    rng.permutation(len(rows[0])),
    rng.integers(1, 9, len(rows[0])),
  )
  anchor, returns = rng.integers(0, 4, len(order)), rng.random(len(order))
  options = options | dict(averages=AVERAGES)
  straight = run(
    name, *rows, tokens=tokens, anchor=anchor, returns=returns, **options
  )
  shuffled = run(
    name,
    *(x[order] for x in rows),
    tokens=tokens[order],
    anchor=anchor[order],
    returns=returns[order],
    **options,
  )
  np.testing.assert_allclose(
    shuffled.values, straight.values[order], atol=2e-5, rtol=1e-5
  )
  assert (shuffled.num_singleton == straight.num_singleton).all()
  assert (shuffled.num_zero_variance == straight.num_zero_variance).all()
  np.testing.assert_allclose(shuffled.averages, straight.averages, rtol=1e-6)


@pytest.mark.parametrize(("name", "options"), kinds(*OF_GROUPS))
@settings(max_examples=5, deadline=None)
@given(rows=steps(), shift=st.sampled_from([-2.0, 0.5, 1.0]))
def test_a_shift_of_all_scores_changes_nothing(name, options, rows, shift):
  straight = run(name, *rows, **options).values
  shifted = run(name, rows[0] + shift, *rows[1:], **options).values
  np.testing.assert_allclose(shifted, straight, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(("name", "options"), kinds(*OF_GROUPS))
@settings(max_examples=5, deadline=None)
@given(rows=steps(), scale=st.sampled_from([2.0, 7.0]))
def test_a_scale_of_all_scores(name, options, rows, scale):
  straight = run(name, *rows, **options).values
  scaled = run(name, rows[0] * scale, *rows[1:], **options).values
  want = straight if name in SCALED else straight * scale
  np.testing.assert_allclose(scaled, want, atol=2e-4, rtol=5e-4)


def test_bounded_takes_the_same_of_two_that_are_as_far_off():
  """0.45 away from the mean, both; rounding must not choose."""
  scores, zeros = np.array([0, -0.1, 0.9, 1.0], np.float32), np.zeros(4, int)
  rows = (zeros, zeros, np.array([0, 0, 0, 1]))
  straight = run("bounded", scores, *rows).values
  assert np.abs(straight).max() == pytest.approx(1) and straight[-1] > 0
  for scale in (3.0, 7.0, 11.0):
    scaled = run("bounded", scores * scale, *rows).values
    np.testing.assert_allclose(scaled, straight, atol=1e-5)


@pytest.mark.parametrize(
  ("name", "options", "per_agent"),
  [(*form, False) for form in FORMS] + [("grpo", {}, True)],
)
def test_padding_changes_nothing_and_gets_nothing(name, options, per_agent):
  sizes = advantages.Sizes(32, 3, 32, per_agent)
  config = config_lib.Advantage(name=name, **options)
  work = advantages.Run(AVERAGES, lambda sums: sums)
  rng = np.random.default_rng(0)
  group = rng.integers(0, 3, 11, np.int32)
  rows = [
    rng.random(11).astype(np.float32),
    group,
    group,
    rng.integers(0, 3, 11, np.int32),
    2 * group + rng.integers(0, 2, 11, np.int32),
    rng.integers(1, 9, 11, np.int32),
    rng.integers(0, 3, 11, np.int32),
    rng.random(11).astype(np.float32),
  ]

  def play(at):
    """With rows that look real in all but the flag, among the real ones."""
    real = np.zeros(32, bool)
    real[at] = True
    columns = []
    for x in rows:
      wide = rng.integers(0, 3, 32).astype(x.dtype)
      wide[at] = x
      columns.append(wide)
    return *advantages.ESTIMATORS[name](
      advantages.Turns(*columns, real), config, sizes, work
    ), real

  at = rng.permutation(32)[:11]
  straight, after, _ = play(np.arange(11))
  got, padded_after, real = play(at)
  np.testing.assert_allclose(got.values[at], straight.values[:11], atol=3e-6)
  assert (np.asarray(got.values)[~real] == 0).all()
  assert (got.num_singleton == straight.num_singleton).all()
  assert (got.num_zero_variance == straight.num_zero_variance).all()
  np.testing.assert_allclose(padded_after, after, rtol=1e-6)


@every
def test_who_is_alone_gets_nothing(name, options):
  # Every row is a group, an agent's and an episode of its own.
  rows = (np.linspace(-1, 1, 20), range(20), [0] * 20, range(20))
  got = run(name, *rows, **options)
  assert (got.values == 0).all()
  assert got.num_singleton.tolist() == [20, 0, 0]
  assert got.num_zero_variance.tolist() == [0, 0, 0]


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


@pytest.mark.parametrize(
  ("name", "options", "tolerance"),
  [
    (*form, 1e-5)
    for form in FORMS
    if form[0] in (*OF_GROUPS, "reinforce_plus_plus_baseline")
  ]
  + [("agent_wise", {}, 0.0), ("grpo", {}, 0.0)],
)
@settings(max_examples=5, deadline=None)
@given(
  score=st.floats(-1e3, 1e3, width=32, allow_subnormal=False),
  turns=st.lists(st.integers(5, 7), min_size=4, max_size=4),
)
def test_equal_scores_are_exactly_zero(name, options, tolerance, score, turns):
  episode = np.repeat(np.arange(len(turns)), turns)
  scores = np.full(len(episode), score)
  agent = np.arange(len(episode)) % 2
  rows = (scores, np.zeros_like(episode), agent, episode)
  got = run(name, *rows, zero_tolerance=tolerance, **options)
  assert (got.values == 0).all()
  assert got.num_zero_variance.tolist() == [1, 1, 0]


def test_rae_of_scores_that_never_change_is_exactly_zero():
  rows = ([0.9] * 4, [0, 0, 1, 2], [0] * 4, range(4))
  averages = None
  for _ in range(20):
    got = run("rae", *rows, averages=averages)
    averages = got.averages
    assert (got.values == 0).all()
  assert got.num_zero_variance.tolist() == [3, 0, 0]


def test_no_rows_at_all():
  got = run("agent_wise", [], [], [], [])
  assert got.values.shape == (0,)
  assert got.num_singleton.tolist() == [0, 0, 0]


def test_few_shapes():
  for name in ("agent_wise", "grpo"):
    program = advantages.ESTIMATORS[name].__wrapped__
    before = program._cache_size()
    for n in (33, 47, 64):
      index = np.arange(n)
      episode = index // 4
      run(name, index % 2, episode // 4, index % 3, episode)
    assert program._cache_size() == before + 1


def test_every_estimator_says_what_it_reads():
  assert tuple(advantages.READS) == tuple(advantages.ESTIMATORS)
