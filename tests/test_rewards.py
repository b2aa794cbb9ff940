"""What long turns cost, and which groups tell episodes apart, by hand."""

import numpy as np
import pytest

from drmas_jax import metrics, rewards, types

pytestmark = pytest.mark.quick

TASK = types.Task("t", 0, 0, "1+1", 2)


def turn(agent="a", index=0, length=2, **fields):
  fields = dict(stop_reason="stop", policy_version=0, valid=True) | fields
  return types.Turn(
    agent=agent,
    policy="p",
    index=index,
    prompt_ids=np.zeros(3, np.int32),
    completion_ids=np.zeros(length, np.int32),
    sampler_logprobs=np.zeros(length, np.float32),
    log_kept_mass=np.zeros(length, np.float32),
    **fields,
  )


def episode(reward, *turns, turn_rewards=None, status="ok"):
  outcome = types.Outcome(reward, turn_rewards or {})
  turns = list(turns) or [turn("a"), turn("b", 1)]
  return types.Episode(TASK, 0, turns, outcome=outcome, status=status)


def group(*episodes):
  return types.Group(TASK, list(episodes))


# -- overlong turns ------------------------------------------------------------


@pytest.mark.parametrize(
  ("length", "cost"),
  [(0, 0.0), (6, 0.0), (7, 0.125), (8, 0.25), (9, 0.375), (10, 0.5)],
)
def test_the_cost_rises_over_the_buffer(length, cost):
  assert rewards.Overlong(10, 4, 0.5).cost(turn(length=length)) == cost


def test_it_is_taken_from_the_score_of_the_turn_alone():
  """Beside the penalty of an invalid turn, and the agent's own."""
  groups = [
    group(
      episode(
        1.0,
        turn("a", 0, 10),
        turn("b", 1, 10),
        turn("a", 2, 8, valid=False),
        turn("a", 3, 6),
      )
    )
  ]
  overlong = {"a": rewards.Overlong(10, 4, 0.5)}
  penalties = {"a": 0.1, "b": 0.1}
  rows = rewards.row_scores(groups, penalties, overlong)
  np.testing.assert_allclose(rows.scores, [0.5, 1, 0.65, 1], rtol=1e-6)
  found = metrics.overlong(rows, overlong)
  assert found == {"overlong_penalty/a": pytest.approx(0.25)}
  silent = rewards.Rows([], *rows[1:])
  assert metrics.overlong(silent, overlong) == {}


# -- groups that tell something ------------------------------------------------


def mixed(*episodes, zero_tolerance=1e-5):
  return rewards.is_mixed(group(*episodes), zero_tolerance)


def test_rewards_that_differ():
  assert mixed(episode(0.0), episode(1.0), episode(0.0))
  assert not mixed(episode(1.0), episode(1.0))
  assert not mixed(episode(0.0), episode(0.0))


def test_penalties_do_not_count():
  wrong = episode(1.0, turn("a", valid=False))
  assert not mixed(episode(1.0), wrong)


def test_a_lost_episode_does_not_count():
  lost = episode(0.0, status="failed")
  assert not mixed(episode(1.0), lost, episode(1.0))
  assert not mixed(episode(1.0), lost)
  assert not mixed(lost, lost)
  assert not mixed()


def test_rewards_of_turns_count():
  extra = episode(0.0, turn("a"), turn_rewards={0: 0.5})
  assert mixed(episode(0.0), extra)
  assert not mixed(extra, episode(0.5))


def test_rewards_of_turns_tell_agents_apart_whose_sum_is_one():
  turns = turn("a"), turn("b", 1)
  one = episode(0.0, *turns, turn_rewards={0: 1.0, 1: 0.0})
  two = episode(0.0, *turns, turn_rewards={0: 0.0, 1: 1.0})
  assert mixed(one, two)
  assert not mixed(one, one)


def test_rewards_by_agent_tell_apart_for_one_of_them():
  same, other = {"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 0.5}
  assert mixed(episode(same), episode(other))
  # Two agents that differ, each of which has always the same.
  assert not mixed(episode(same), episode(same))
  # b has not spoken there, so that nothing of its is compared.
  assert not mixed(episode(same), episode(other, turn("a")))
  extra = episode(same, turn("a"), turn("b", 1), turn_rewards={1: 0.5})
  assert mixed(episode(same), extra)
  assert not mixed(extra, episode(other))


@pytest.mark.parametrize(
  ("values", "tolerance", "differ"),
  [
    ([0.9] * 9, 0.0, False),  # whose float mean is not 0.9
    ([0.5, 0.5 + 1e-9], 0.0, True),
    ([0.5, 0.5 + 1e-9], 1e-5, False),
    ([100.0, 100.0 + 1e-3], 1e-5, False),  # relative to what is above 1
    ([100.0, 100.0 + 2e-3], 1e-5, True),
  ],
)
def test_equal_is_rule_5s(values, tolerance, differ):
  episodes = map(episode, values)
  assert mixed(*episodes, zero_tolerance=tolerance) == differ
