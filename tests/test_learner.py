"""The train step: exact accumulation, sharding, skipping, one compilation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drmas_jax import batching, learner, placement
from drmas_jax import config as config_lib
from drmas_jax.models import transformer
from drmas_jax.types import Turn

MODEL = transformer.DecoderConfig(
  family="qwen3",
  vocab_size=32,
  embed_dim=32,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  mlp_dim=48,
  max_positions=64,
  tied=True,
  qk_norm=True,
)
TEMPERATURE = np.ones([2], np.float32)


def make_mesh(data=1, fsdp=1, tensor=1):
  devices = np.array(jax.devices()[: data * fsdp * tensor])
  return jax.sharding.Mesh(
    devices.reshape(data, fsdp, tensor), ("data", "fsdp", "tensor")
  )


def make_spec(mesh=None):
  return learner.Spec(
    MODEL,
    mesh or make_mesh(),
    config_lib.Loss(),
    # A large epsilon: Adam's first step is lr * sign(gradient) otherwise, and
    # turns rounding of the gradients that are nearly 0 into whole steps.
    config_lib.Optimizer(learning_rate=1e-2, eps=1e-3),
    num_agents=2,
    vocab_size=30,
  )


def make_turns(num=11):
  rng = np.random.default_rng(3)
  turns = []
  for i in range(num):
    size = 2 + i % 5
    turns.append(
      Turn(
        agent="ab"[i % 2],
        policy="p",
        index=0,
        prompt_ids=rng.integers(0, 30, 3 + i % 4).astype(np.int32),
        completion_ids=rng.integers(0, 30, size).astype(np.int32),
        sampler_logprobs=-3 - rng.random(size).astype(np.float32),
        log_kept_mass=np.zeros(size, np.float32),
        stop_reason="stop",
        policy_version=0,
        valid=True,
      )
    )
  return turns


def pack(turns, num_micro, micro_batch, length=16, order=None):
  order = list(range(len(turns)) if order is None else order)
  return batching.pack(
    [turns[i] for i in order],
    order,
    [i % 2 for i in order],
    num_micro=num_micro,
    micro_batch=micro_batch,
    length=length,
  )


def step(spec, batch, advantages, trips, state=None, steps=1):
  programs = learner.programs(spec)
  if state is None:
    where = learner.state_shardings(spec).params
    init = jax.jit(
      transformer.init_params, static_argnums=0, out_shardings=where
    )
    state = programs.init(init(MODEL, jax.random.key(0)))
  tokens = np.float32(batch.mask.sum())
  args = placement.global_batch(
    (batch, batch.sampler_logprobs, batching.gather(advantages, batch)),
    spec.mesh,
  )
  for _ in range(steps):
    state, out = programs.train_step(state, *args, tokens, trips, TEMPERATURE)
  return state, jax.device_get(out)


def assert_same(one, two, atol=1e-5):
  for a, b in zip(
    jax.tree.leaves(placement.fetch(one)),
    jax.tree.leaves(placement.fetch(two)),
    strict=True,
  ):
    np.testing.assert_allclose(a, b, atol=atol)


ADVANTAGES = np.linspace(-1.5, 1.2, 11).astype(np.float32)


@pytest.mark.quick
def test_micro_batches_padding_and_order_change_nothing():
  """Rule 10."""
  turns, spec = make_turns(), make_spec()
  whole, out = step(spec, pack(turns, 1, 16), ADVANTAGES, 1)
  order = np.random.default_rng(0).permutation(11)
  for batch, trips in (
    (pack(turns, 4, 4), 3),
    (pack(turns, 1, 16, length=24), 1),
    (pack(turns, 8, 2, order=order), 6),
  ):
    other, again = step(spec, batch, ADVANTAGES, trips)
    assert_same(whole.params, other.params, atol=2e-6)
    np.testing.assert_allclose(out.loss, again.loss, rtol=1e-5)
    np.testing.assert_allclose(out.grad_norm, again.grad_norm, rtol=1e-5)


@pytest.mark.quick
def test_loss_is_the_formula_by_hand():
  turns, spec = make_turns(3), make_spec()
  batch = pack(turns, 1, 4)
  advantages = np.array([1.0, -2.0, 0.5], np.float32)
  programs = learner.programs(spec)
  params = transformer.init_params(MODEL, jax.random.key(0))
  new = np.asarray(programs.score(params, batch, 1, TEMPERATURE))
  total = 0.0
  for row, turn in enumerate(turns):
    start = len(turn.prompt_ids)
    for t in range(start, start + len(turn.completion_ids)):
      a = advantages[row]
      r = np.exp(new[0, row, t] - batch.sampler_logprobs[0, row, t])
      value = max(-a * r, -a * np.clip(r, 0.8, 1.2))
      total += min(value, -a * 3.0) if a < 0 else value
  _, out = step(spec, batch, advantages, 1)
  np.testing.assert_allclose(out.loss, total / batch.mask.sum(), rtol=1e-5)


def test_same_update_on_one_device_and_on_slices():
  """From the same recorded turns; shardings and programs stay as they are."""
  turns = make_turns()
  batch = pack(turns, 2, 8)
  one, _ = step(make_spec(), batch, ADVANTAGES, 2)
  for shape in ((2, 2, 1), (1, 2, 2), (2, 2, 2)):
    spec = make_spec(make_mesh(*shape))
    first, _ = step(spec, batch, ADVANTAGES, 2)
    assert_same(one.params, first.params)
    want = learner.state_shardings(spec)
    third, _ = step(spec, batch, ADVANTAGES, 2, steps=3)
    for array, where in zip(
      jax.tree.leaves(third), jax.tree.leaves(want), strict=True
    ):
      assert array.sharding.is_equivalent_to(where, array.ndim)
  program = learner.programs(spec).train_step.func
  before = program._cache_size()
  step(spec, batch, ADVANTAGES, 1)
  assert program._cache_size() == before


@pytest.mark.quick
def test_optimizer_state_is_laid_out_as_the_parameters():
  """Decision 4: without out_shardings the moments sat on device 0."""
  spec = make_spec(make_mesh(2, 2, 2))
  where = learner.state_shardings(spec)
  moments = [s for s in jax.tree.leaves(where.opt_state) if s.spec != jax.P()]
  params = [s for s in jax.tree.leaves(where.params) if s.spec != jax.P()]
  assert len(moments) == 2 * len(params) > 0


@pytest.mark.quick
def test_non_finite_gradients_change_nothing():
  """Rule 11."""
  turns, spec = make_turns(), make_spec()
  start, _ = step(spec, pack(turns, 1, 16), ADVANTAGES, 1)
  before = placement.fetch(start)
  bad = ADVANTAGES.copy()
  bad[3] = np.nan
  after, out = step(spec, pack(turns, 1, 16), bad, 1, state=start)
  assert not out.finite
  assert_same(before, after, atol=0)


@pytest.mark.quick
def test_agents_gradients_add_up():
  turns, spec = make_turns(), make_spec()
  batch = pack(turns, 1, 16)
  programs = learner.programs(spec)
  params = transformer.init_params(MODEL, jax.random.key(0))
  rest = (np.float32(batch.mask.sum()), 1, TEMPERATURE, np.arange(2))
  by_token = batching.gather(ADVANTAGES, batch)

  def norms(weights):
    return programs.agent_norms(
      params,
      batch._replace(weights=weights),
      batch.sampler_logprobs,
      by_token,
      *rest,
    )

  both = np.asarray(norms(batch.weights))
  alone = batch.weights * (batch.agent_index == 1)
  np.testing.assert_allclose(norms(alone), [0, both[1]], rtol=1e-5)
  one, out = step(spec, batch._replace(weights=alone), ADVANTAGES, 1)
  del one
  np.testing.assert_allclose(out.grad_norm, both[1], rtol=1e-4)
  assert both[0] > 0


@pytest.mark.quick
def test_sums_by_agent():
  turns, spec = make_turns(), make_spec()
  batch = pack(turns, 2, 8)
  _, out = step(spec, batch, ADVANTAGES, 2)
  tokens = [
    sum(len(t.completion_ids) for t in turns if t.agent == a) for a in "ab"
  ]
  np.testing.assert_array_equal(out.sums.tokens, tokens)
  assert np.all(out.sums.log_ratio_max > 0)
  assert np.all(out.sums.log_ratio_abs <= out.sums.log_ratio_max * tokens)


@pytest.mark.quick
def test_schedules():
  constant = config_lib.Optimizer(learning_rate=2.0)
  assert float(learner.make_schedule(constant)(7)) == 2.0
  rising = dataclasses.replace(
    constant,
    warmup_steps=4,
    schedule="cosine",
    decay_steps=10,
    final_fraction=0.5,
  )
  rate = learner.make_schedule(rising)
  np.testing.assert_allclose(
    [rate(i) for i in range(5)], [0.5, 1.0, 1.5, 2.0, 2.0], rtol=1e-6
  )
  np.testing.assert_allclose(rate(4 + 10), 1.0, rtol=1e-6)


@pytest.mark.quick
def test_vocabulary_padding_is_masked_in_score():
  """Rule 23: rows of the head beyond the vocabulary have no probability."""
  spec = make_spec()
  params = transformer.init_params(MODEL, jax.random.key(0))
  batch = pack(make_turns(), 1, 16)
  score = learner.programs(spec).score
  loud = dict(params)
  # Nothing looks up ids 30 and 31; as head rows they must not count either.
  loud["embedding"] = params["embedding"].at[30:].set(50.0)
  np.testing.assert_allclose(
    score(params, batch, 1, TEMPERATURE),
    score(loud, batch, 1, TEMPERATURE),
    atol=1e-6,
  )
  assert jnp.isfinite(score(loud, batch, 1, TEMPERATURE)).all()
