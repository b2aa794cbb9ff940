"""The train step beside a reference policy; what of a step is in the loss."""

import dataclasses
import functools
import itertools
import types

import jax
import numpy as np
import pytest

from drmas_jax import (
  backbone,
  batching,
  learner,
  placement,
  rewards,
  training,
)
from drmas_jax import config as config_lib
from drmas_jax.models import transformer
from drmas_jax.types import Turn

MODEL = transformer.DecoderConfig(
  family="qwen3",
  vocab_size=32,
  embed_dim=32,
  num_layers=1,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  mlp_dim=48,
  max_positions=64,
  tied=True,
  qk_norm=True,
)
TEMPERATURE = np.array([1.0, 0.7], np.float32)
BOTH = config_lib.Loss(
  kl="k3", kl_weight=0.5, reference="r", reward_weight=0.7, clip_high=0.1
)
DISTILL = config_lib.Loss(
  kl="k2", kl_weight=1.0, reference="r", reward_weight=0.0
)


def make_turns(num=7):
  rng = np.random.default_rng(3)
  return [
    Turn(
      agent="ab"[i % 2],
      policy="p",
      index=0,
      prompt_ids=rng.integers(0, 30, 3 + i % 4).astype(np.int32),
      completion_ids=rng.integers(0, 30, 2 + i % 5).astype(np.int32),
      sampler_logprobs=-3 - rng.random(2 + i % 5).astype(np.float32),
      log_kept_mass=np.zeros(2 + i % 5, np.float32),
      stop_reason="length" if i == 2 else "stop",
      policy_version=0,
      valid=True,
    )
    for i in range(num)
  ]


TURNS = make_turns()
AGENTS = np.arange(7, dtype=np.int32) % 2
# Two turns without an advantage; their distance counts all the same.
ADVANTAGES = np.array([1, 0, -2, 0.5, 0, -1, 2], np.float32)


def make_spec(loss, **optimizer):
  mesh = jax.sharding.Mesh(
    np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor")
  )
  rule = config_lib.Optimizer(**{"learning_rate": 1e-2} | optimizer)
  return learner.Spec(MODEL, mesh, loss, rule, num_agents=2, vocab_size=30)


@functools.cache
def params(seed):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: rng.normal(0.5, 0.3, x.shape).astype(np.float32),
    transformer.param_shapes(MODEL),
  )


def pack():
  return batching.pack(TURNS, range(7), AGENTS, batching.Shape(1, 8, 16, 1))


def score(seed, batch):
  spec = make_spec(BOTH)
  return learner.programs(spec).score(params(seed), batch, 1, TEMPERATURE)


def step(loss, batch, ref, advantages=ADVANTAGES, state=None):
  """One update of the policy of seed 0; (state, output)."""
  spec = make_spec(loss)
  programs = learner.programs(spec)
  if state is None:
    where = learner.state_shardings(spec).params
    state = programs.init(jax.device_put(params(0), where))
  data = placement.global_batch(
    (
      batch,
      batch.sampler_logprobs,
      ref,
      batching.gather(advantages, batch),
    ),
    spec.mesh,
  )
  tokens = np.array([batch.mask.sum()], np.float32)
  state, out = programs.train_step(
    state, None, data, tokens, np.array([True]), 1, TEMPERATURE
  )
  return state, jax.device_get(out)


@pytest.mark.quick
def test_the_loss_is_the_sum_by_hand():
  batch = pack()
  new, ref = np.asarray(score(0, batch)), np.asarray(score(1, batch))
  ratio = np.exp(new - batch.sampler_logprobs)
  advantages = batching.gather(ADVANTAGES, batch)
  bounded = np.clip(ratio, 0.8, 1.1)
  surrogate = np.maximum(-advantages * ratio, -advantages * bounded)
  surrogate = np.where(
    advantages < 0, np.minimum(surrogate, -advantages * 3), surrogate
  )
  distance = np.exp(ref - new) - (ref - new) - 1
  total = (0.7 * surrogate + 0.5 * distance) * batch.mask
  _, out = step(BOTH, batch, ref)
  np.testing.assert_allclose(out.loss, total.sum() / batch.mask.sum(), 1e-5)
  for k in range(2):
    own = batch.mask * (batch.agent_index == k)
    np.testing.assert_allclose(out.sums.kl[k], (distance * own).sum(), 1e-4)
  assert distance[batch.mask > 0].min() > 0 and out.grad_norm[0] > 0.01


@pytest.mark.quick
def test_without_advantages_it_nears_the_reference_and_stops_there():
  batch, state, distances = pack(), None, []
  ref = np.asarray(score(1, batch))
  nothing = np.zeros(7, np.float32)
  for _ in range(40):
    state, out = step(BOTH, batch, ref, nothing, state)
    distances.append(float(out.sums.kl.sum()))
  assert distances[-1] < 0.05 * distances[0]
  _, out = step(BOTH, batch, np.asarray(score(0, batch)), nothing)
  assert out.loss < 1e-8 and out.grad_norm[0] < 1e-4


# -- what a step's turns count -------------------------------------------------


def work(loss=None, advantages=ADVANTAGES, due=("p",), agents=None, **policy):
  """Of a backbone of one policy, whose agents are a and b."""
  made = object.__new__(backbone.Backbone)
  made.policy = config_lib.Policy(
    checkpoint="x", loss=loss or config_lib.Loss(), **policy
  )
  made.names = made.trained = ("p",)
  made.policy_index = {"p": 0}
  made.learner = make_spec(made.policy.loss)
  made.slice = types.SimpleNamespace(train_mesh=made.learner.mesh)
  made.row_buckets = (16, 32)
  made._roles = {
    name: config_lib.Agent("math.solver", "p", **(agents or {}).get(name, {}))
    for name in "ab"
  }
  rows = rewards.Rows(
    TURNS,
    np.zeros(7, np.float32),
    np.zeros(7, np.int32),
    AGENTS,
    np.arange(7, dtype=np.int32),
    False,
  )
  return made.work(rows, advantages, due)


LENGTHS = np.array([len(t.completion_ids) for t in TURNS])


@pytest.mark.quick
def test_with_a_distance_every_turn_has_a_signal():
  """Rule 12; those cut by length have none even so, if they are masked."""
  nothing = np.zeros(7, np.float32)
  assert work(advantages=nothing).parts[0].chats == []
  for loss in (BOTH, DISTILL):
    (part,) = work(loss, nothing).parts
    assert part.chats == [(i,) for i in range(7)] and part.num_chats == [7]
  masked = dataclasses.replace(BOTH, mask_truncated=True)
  (part,) = work(masked, nothing).parts
  assert part.chats == [(i,) for i in (0, 1, 3, 4, 5, 6)]
  assert part.denominators == [LENGTHS.sum() - LENGTHS[2]]


@pytest.mark.quick
def test_an_agent_that_is_not_trained_leaves_loss_and_denominator():
  found = work(agents={"b": {"train": False}})
  (part,) = found.parts
  assert part.chats == [(0,), (2,), (6,)]  # a's, with an advantage
  assert part.denominators == [LENGTHS[::2].sum()]
  np.testing.assert_array_equal(found.weights, 1 - AGENTS)


@pytest.mark.quick
def test_an_agents_weight_is_a_factor_and_not_in_the_denominator():
  plain, heavy = work(), work(agents={"b": {"loss_weight": 2.5}})
  assert heavy.parts == plain.parts
  np.testing.assert_allclose(heavy.weights, plain.weights * (1 + 1.5 * AGENTS))
  loss = config_lib.Loss(aggregation="sequence_mean")
  both = work(loss, agents={n: {"loss_weight": 2.0} for n in "ab"})
  np.testing.assert_allclose(both.weights, 2 / LENGTHS, rtol=1e-6)
  assert both.parts[0].denominators == [7]


@pytest.mark.quick
def test_a_policy_that_is_not_due_has_nothing_to_do():
  found = work(BOTH, due=())
  assert found.parts[0].chats == [] and found.tokens == [0]


@pytest.mark.quick
def test_parts_of_a_batch_have_their_own_denominators():
  """In order and of about equal size, those without a signal among them."""
  found = work(num_updates=3)
  ends = [0, 2, 4, 7]
  wanted = [
    [(i,) for i in range(*pair) if ADVANTAGES[i]]
    for pair in itertools.pairwise(ends)
  ]
  assert [part.chats for part in found.parts] == wanted
  assert [part.denominators for part in found.parts] == [
    [LENGTHS[a:b].sum()] for a, b in itertools.pairwise(ends)
  ]


@pytest.mark.quick
def test_policies_take_turns():
  """Each every second step, and one always; a frozen one never."""
  policies = {
    "a": config_lib.Policy("x", update_every=2),
    "b": config_lib.Policy("x", update_every=2, update_phase=1),
    "c": config_lib.Policy("x"),
    "d": config_lib.Policy("x", frozen=True),
  }
  made = object.__new__(training.Training)
  made.config = config_lib.Config(
    policies,
    agents={},
    orchestra=config_lib.Orchestra("single"),
    environment=config_lib.Environment("math"),
    data=config_lib.Data({}),
  )
  due = []
  for made.step_done in range(4):
    due.append("".join(made._due()))
  assert due == ["ac", "bc", "ac", "bc"]
