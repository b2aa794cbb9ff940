"""Dr. MAS's lemma 4.2 on a small policy, with its real gradients."""

import dataclasses
import functools
import types

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drmas_jax import (
  advantages,
  backbone,
  batching,
  learner,
  metrics,
  rewards,
  scores,
)
from drmas_jax import config as config_lib
from drmas_jax.models import transformer
from drmas_jax.types import Turn

pytestmark = pytest.mark.quick

MODEL = transformer.DecoderConfig(
  family="qwen3",
  vocab_size=32,
  embed_dim=16,
  num_layers=1,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  mlp_dim=24,
  max_positions=64,
  tied=True,
  qk_norm=True,
)
LENGTH = 16

# A group of four episodes, the first one won, of two agents whose numbers of
# calls differ. The lemma has one reward for all turns of an episode.
CALLS = [[0, 1], [0, 1, 0, 1, 0], [0, 1, 0], [1]]
WON = [1.0, 0.0, 0.0, 0.0]
EPISODE = np.repeat(np.arange(4), [len(c) for c in CALLS]).astype(np.int32)
AGENT = np.concatenate(CALLS).astype(np.int32)
SCORES = np.repeat(WON, [len(c) for c in CALLS]).astype(np.float32)
N = len(AGENT)

ROWS = rewards.Rows(
  [None] * N, SCORES, np.zeros(N, np.int32), AGENT, EPISODE, False
)


@pytest.fixture(scope="module")
def turns():
  rng = np.random.default_rng(5)
  return [
    Turn(
      agent="ab"[agent],
      policy="p",
      index=0,
      prompt_ids=rng.integers(0, 30, 2 + i % 4).astype(np.int32),
      completion_ids=rng.integers(0, 30, 1 + 3 * i % 8).astype(np.int32),
      sampler_logprobs=np.zeros(1 + 3 * i % 8, np.float32),
      log_kept_mass=np.zeros(1 + 3 * i % 8, np.float32),
      stop_reason="stop",
      policy_version=0,
      valid=True,
    )
    for i, agent in enumerate(AGENT)
  ]


@pytest.fixture(scope="module")
def spec():
  """Every turn counts as an agent, so that there is a gradient of each."""
  devices = np.array(jax.devices()[:1]).reshape(1, 1, 1)
  return learner.Spec(
    MODEL,
    jax.sharding.Mesh(devices, ("data", "fsdp", "tensor")),
    config_lib.Loss(),
    config_lib.Optimizer(),
    num_agents=N,
    vocab_size=30,
  )


@pytest.fixture(scope="module")
def params():
  init = jax.jit(transformer.init_params, static_argnums=0)
  return init(MODEL, jax.random.key(1))


TEMPERATURE = np.linspace(0.7, 1.4, N).astype(np.float32)


@pytest.fixture(scope="module")
def squares(spec, params, turns):
  """|z|^2 of each turn, as a run takes them: on devices that share the weights,
  in rows of which some are padding, beside a turn of another backbone."""
  devices = np.array(jax.devices()[:8]).reshape(2, 2, 2)
  mesh = jax.sharding.Mesh(devices, ("data", "fsdp", "tensor"))
  made = object.__new__(backbone.Backbone)
  made.learner = dataclasses.replace(spec, mesh=mesh)
  made.slice = types.SimpleNamespace(train_mesh=mesh)
  made.trained, made.policy_index = ("p",), {"p": 0}
  made.row_buckets, made._temperatures = (8, LENGTH), TEMPERATURE
  where = learner.trainable_shardings(made.learner)
  made.state = types.SimpleNamespace(params=jax.device_put(params, where))
  other = dataclasses.replace(turns[0], policy="q")
  rows = ROWS._replace(
    turns=[*turns[:2], other, *turns[2:]],
    agent=np.array([0, 1, 0, *range(2, N)], np.int32),
  )
  extent = made.extent(rows)
  longest = max(len(t.prompt_ids) + len(t.completion_ids) for t in turns)
  assert extent == {"turns": N, "longest": longest}
  found = made.score_norms(rows, [extent])
  assert found.shape == (N + 1,) and found[2] == 0
  return np.delete(found, 2)


def gradient_norms(spec, params, turns, agent, values, indices):
  """Norms of the gradient of the learner's own loss by agent; a sum of token
  losses, whose turns are packed."""
  batch = batching.pack(turns, range(N), agent, batching.Shape(1, 8, LENGTH, 1))
  programs = learner.programs(spec)
  old = programs.score(params, batch, 1, TEMPERATURE)
  data = batch, old, None, batching.gather(values, batch)
  one = np.ones(1, np.float32)
  norms = programs.agent_norms(
    *(params, None, data, one, 1, TEMPERATURE),
    *(np.array(indices), np.zeros(len(indices), int)),
  )
  return np.asarray(norms, float)


def terms(spec, params, turns, values):
  """|A z|^2 of each turn."""
  each = range(N)
  return gradient_norms(spec, params, turns, each, values, each) ** 2


def estimate(name):
  got, _ = advantages.estimate(
    config_lib.Advantage(name=name),
    SCORES,
    np.zeros(N, np.int32),
    AGENT,
    EPISODE,
    turn=np.zeros(N, int),
    tokens=np.ones(N, int),
    num_agents=2,
  )
  return got.values


def test_lemma_4_2(spec, params, turns, squares):
  """E|g|^2 = E|z|^2 kappa + Delta, of GRPO's advantages.

  The lemma has the deviation of all episodes there are, the estimator that of
  a sample, and epsilon: both sides are brought to the latter.
  """
  values = estimate("grpo")
  got = terms(spec, params, turns, values)
  means = np.bincount(EPISODE, SCORES) / np.bincount(EPISODE)
  factor = (means.std() / (means.std(ddof=1) + advantages.EPSILON)) ** 2
  np.testing.assert_allclose(factor, 3 / 4, rtol=1e-5)
  for agent in (0, 1):
    own = agent == AGENT
    said = metrics.score_norms(ROWS, squares, agent)
    kappa = metrics.moments(ROWS, agent)["kappa"]
    np.testing.assert_allclose(
      said["inflated"], said["score_norm"] * kappa, rtol=1e-6
    )
    np.testing.assert_allclose(said["score_norm"], squares[own].mean(), 1e-6)
    want = said["inflated"] + said["delta"]
    np.testing.assert_allclose(got[own].mean(), want * factor, rtol=1e-5)
    # Neither the factor nor the covariance is a matter of course here.
    assert abs(kappa - 1) > 0.05 and abs(said["delta"]) > 0.05 * want
    np.testing.assert_allclose(kappa * factor, (values[own] ** 2).mean(), 1e-4)


@pytest.mark.parametrize("name", ["agent_wise", "bounded"])
def test_the_factor_of_agent_wise_rules_is_one(
  spec, params, turns, squares, name
):
  """E|g|^2 = E|z|^2 + Cov(|z|^2, A^2), the paper's remedy (its eq. 6)."""
  values = estimate(name)
  got = terms(spec, params, turns, values)
  for agent in (0, 1):
    own = agent == AGENT
    n = own.sum()
    # Of a sample, its mean square is (n - 1) / n.
    values_own = values[own].astype(float) * (
      np.sqrt(n / (n - 1)) if name == "agent_wise" else 1
    )
    np.testing.assert_allclose((values_own**2).mean(), 1, rtol=1e-5)
    scale = (values_own / values[own])[0] ** 2
    cov = np.cov(squares[own], values_own**2, ddof=0)[0, 1]
    want = squares[own].mean() + cov
    np.testing.assert_allclose(scale * got[own].mean(), want, rtol=2e-5)


@settings(max_examples=100, deadline=None)
@given(
  calls=st.lists(st.integers(0, 6), min_size=2, max_size=9),
  data=st.data(),
)
def test_samuelsons_bound(calls, data):
  """kappa <= episodes - 1, or (M - 1)^2 / M of a sample's deviation."""
  m = len(calls)
  score = st.sampled_from([0.0, 1.0, 0.3, -2.0])
  won = np.array(data.draw(st.lists(score, min_size=m, max_size=m)))
  # The agent in question and another, who speaks once in every episode.
  episode = np.concatenate([np.repeat(np.arange(m), calls), np.arange(m)])
  agent = np.repeat([0, 1], [sum(calls), m])
  rows = rewards.Rows(
    [], won[episode], np.zeros_like(agent), agent, episode, False
  )
  found = metrics.moments(rows, 0)
  if "kappa" in found:
    sample = found["kappa"] * (m - 1) / m
    assert found["kappa_max"] == found["kappa"] <= (m - 1) * (1 + 1e-9)
    assert sample <= (m - 1) ** 2 / m * (1 + 1e-9)


def test_samuelsons_bound_is_reached():
  # The agent spoke in the one episode of eight that was won.
  scores_ = np.array([1.0] + [1.0] + [0.0] * 7)
  agent, episode = np.array([0] + [1] * 8), np.array([0, *range(8)])
  rows = rewards.Rows([], scores_, agent * 0, agent, episode, False)
  assert metrics.moments(rows, 0)["kappa"] == pytest.approx(7)


def test_a_gradient_is_made_of_the_score_vectors(spec, params, turns):
  """Of one agent's turns, as the update has it; by sums over products."""
  values = estimate("grpo")
  one = [0] * N
  batch = scores.lay_out(
    turns, one, one, num_micro=1, micro_rows=12, length=LENGTH
  )
  rows = jax.tree.map(lambda x: x[0], batch)
  vectors = scores.programs(spec).vectors(params, None, rows, TEMPERATURE)
  want = np.linalg.norm(values @ np.asarray(vectors)[:N])
  norms = gradient_norms(spec, params, turns, one, values, one)
  np.testing.assert_allclose(norms, want, rtol=1e-5)


def test_norms_of_adapters_are_of_their_own_rows(spec, params, turns):
  """Of two policies on one decoder, each turn is one's."""
  small = dataclasses.replace(
    spec,
    model=dataclasses.replace(MODEL, adapter_scale=2.0),
    adapter=config_lib.Adapter(rank=2),
    num_policies=2,
  )
  keys = jax.random.split(jax.random.key(2), 2)
  trained = learner.new_adapters(small, keys)
  first = jax.tree.map(lambda x: x.at[1].set(x[0]), trained)
  lay = functools.partial(
    scores.lay_out, turns, range(N), num_micro=1, micro_rows=12, length=LENGTH
  )
  program = scores.programs(small).squares
  one, two = (
    np.asarray(program(first, params, lay([k] * N), 1, TEMPERATURE))[0, :N]
    for k in (0, 1)
  )
  assert (one > 0).all()
  np.testing.assert_allclose(one, two, rtol=1e-5)
