"""The train step: exact accumulation, sharding, skipping, one compilation."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drmas_jax import backbone, batching, learner, losses, placement, rewards
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
LIVE = np.ones([1], bool)


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


def pack(turns, num_micro, micro_rows, length=16, order=None, chats=None):
  order = list(range(len(turns)) if order is None else order)
  return batching.pack(
    [turns[i] for i in order],
    order,
    [i % 2 for i in order],
    batching.Shape(num_micro, micro_rows, length, num_micro),
    chats=chats,
  )


def step(spec, batch, advantages, trips, state=None, steps=1):
  programs = learner.programs(spec)
  if state is None:
    where = learner.state_shardings(spec).params
    init = jax.jit(
      transformer.init_params, static_argnums=0, out_shardings=where
    )
    state = programs.init(init(MODEL, jax.random.key(0)))
  tokens = batch.mask.sum()[None]
  data = placement.global_batch(
    (batch, batch.sampler_logprobs, None, batching.gather(advantages, batch)),
    spec.mesh,
  )
  for _ in range(steps):
    state, out = programs.train_step(
      state, None, data, tokens, LIVE, trips, TEMPERATURE
    )
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
  batch = pack(turns, 1, 16)
  whole, out = step(spec, batch, ADVANTAGES, 1)
  # By token what is summed by agent.
  assert not out.gap[batch.weights == 0].any()
  np.testing.assert_allclose(out.gap.sum(), out.sums.log_ratio_abs.sum(), 1e-5)
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
  for at in np.argwhere(batch.mask > 0):
    at = tuple(at)
    a = advantages[batch.turn_index[at]]
    r = np.exp(new[at] - batch.sampler_logprobs[at])
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
  moments = [s for s in jax.tree.leaves(where.opt_state) if any(s.spec)]
  params = [s for s in jax.tree.leaves(where.params) if any(s.spec)]
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
  assert not out.finite[0]
  assert_same(before, after, atol=0)


@pytest.mark.quick
def test_what_is_not_live_stays_as_it_was():
  """Rule 12: neither decay nor moments nor the count of steps."""
  turns, spec = make_turns(), make_spec()
  batch = pack(turns, 1, 16)
  start, _ = step(spec, batch, ADVANTAGES, 1)
  before = placement.fetch(start)
  data = (
    *(batch, batch.sampler_logprobs, None),
    batching.gather(ADVANTAGES, batch),
  )
  after, out = learner.programs(spec).train_step(
    start, None, data, batch.mask.sum()[None], ~LIVE, 1, TEMPERATURE
  )
  assert out.finite[0] and out.grad_norm[0] > 0
  assert_same(before, after, atol=0)


@pytest.mark.quick
def test_agents_gradients_add_up():
  turns, spec = make_turns(), make_spec()
  batch = pack(turns, 1, 16)
  programs = learner.programs(spec)
  params = transformer.init_params(MODEL, jax.random.key(0))
  rest = (
    batch.mask.sum()[None],
    1,
    TEMPERATURE,
    np.arange(2),
    np.zeros(2, int),
  )
  by_token = batching.gather(ADVANTAGES, batch)

  def norms(weights):
    own = batch._replace(weights=weights)
    data = (own, batch.sampler_logprobs, None, by_token)
    return programs.agent_norms(params, None, data, *rest)

  both = np.asarray(norms(batch.weights))
  alone = batch.weights * (batch.agent_index == 1)
  np.testing.assert_allclose(norms(alone), [0, both[1]], rtol=1e-5)
  one, out = step(spec, batch._replace(weights=alone), ADVANTAGES, 1)
  del one
  np.testing.assert_allclose(out.grad_norm, both[1:], rtol=1e-4)
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


# -- what a loss may be made of ------------------------------------------------

SMALL = dataclasses.replace(MODEL, num_layers=1)
SETTINGS = {
  "gspo": config_lib.Loss(
    name="gspo",
    clip_low=0.2,
    clip_high=0.1,
    aggregation="sequence_mean",
    importance="sequence",
  ),
  "cispo": config_lib.Loss(
    name="cispo",
    aggregation="sequence_sum",
    divisor=5.0,
    entropy_weight=0.3,
    importance="token",
    importance_bound=1.25,
  ),
  "clipped": config_lib.Loss(
    aggregation="sequence_mean", mask_truncated=True, importance="rejection"
  ),
}


def make_chats():
  """Six turns, of which the first three and the next two are chats."""
  rng, known, turns = np.random.default_rng(4), np.zeros(0, np.int32), []
  for i, turn in enumerate(make_turns(6)):
    if i in (0, 3, 5):
      known = known[:0]
    prompt = np.concatenate([known, turn.prompt_ids[:2]])
    known = np.concatenate([prompt, turn.completion_ids])
    kept = -0.2 * rng.random(len(turn.completion_ids))
    turns.append(
      dataclasses.replace(
        turn,
        agent="a",
        prompt_ids=prompt,
        log_kept_mass=kept.astype(np.float32),
        stop_reason="length" if i == 1 else "stop",
      )
    )
  return turns


CHATS, SIGNS = make_chats(), np.array([1, -1, 0.5, -2, 1.5, 0.7], np.float32)


def weigh(settings):
  lengths = np.array([len(t.completion_ids) for t in CHATS])
  cut = np.array([t.stop_reason == "length" for t in CHATS])
  counted = ~cut if settings.mask_truncated else np.ones(6, bool)
  return losses.aggregate(
    lengths, counted, settings.aggregation, settings.divisor
  )


@functools.cache
def small():
  """Parameters, on the host."""
  return jax.device_get(transformer.init_params(SMALL, jax.random.key(0)))


def update(settings, mesh, chats, num_micro, micro_rows, trips, length):
  """One update on the chats in some layout; (parameters, output)."""
  spec = dataclasses.replace(make_spec(mesh), model=SMALL, loss=settings)
  weights, denominator = weigh(settings)
  batch = batching.pack(
    CHATS,
    range(6),
    [0] * 6,
    batching.Shape(num_micro, micro_rows, length, trips),
    chats=chats,
    weights=weights,
  )
  programs = learner.programs(spec)
  params = jax.device_put(small(), learner.state_shardings(spec).params)
  # As if the learner's log-probs were others than the sampler's.
  old = 0.9 * batch.sampler_logprobs
  data = placement.global_batch(
    (batch, old, None, batching.gather(SIGNS, batch)), spec.mesh
  )
  state, out = programs.train_step(
    programs.init(params),
    None,
    data,
    np.array([denominator], np.float32),
    LIVE,
    trips,
    TEMPERATURE,
  )
  return placement.fetch(state.params), jax.device_get(out)


@functools.cache
def predictions(i):
  """Log-probs of a completion, and entropies, by the whole softmax."""
  turn = CHATS[i]
  tokens = np.concatenate([turn.prompt_ids, turn.completion_ids])[None]
  inputs = transformer.Inputs(
    tokens,
    np.arange(tokens.size)[None],
    np.ones_like(tokens),
    np.zeros(1, np.int32),
  )
  hidden, _ = transformer.forward(small(), inputs, config=SMALL, mesh=None)
  logits = np.asarray(hidden @ transformer.head(small(), SMALL), np.float64)
  logits = logits[0, len(turn.prompt_ids) - 1 : -1, :30]
  logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  chosen = logp[np.arange(len(turn.completion_ids)), turn.completion_ids]
  return chosen, -(np.exp(logp) * logp).sum(-1)


def terms(s, i):
  """The token losses of one completion."""
  turn, advantage = CHATS[i], SIGNS[i]
  new, entropy = predictions(i)
  log_ratio = new - 0.9 * turn.sampler_logprobs
  ratio = np.exp(log_ratio.mean() if s.name == "gspo" else log_ratio)
  bounded = np.clip(ratio, 1 - s.clip_low, 1 + s.clip_high)
  out = np.maximum(-advantage * ratio, -advantage * bounded)
  if s.name == "clipped" and advantage < 0:
    out = np.minimum(out, -advantage * 3.0)
  if s.name == "cispo":
    out = -advantage * bounded * new
  rho = turn.log_kept_mass - 0.1 * turn.sampler_logprobs
  rho = np.exp(rho if s.importance == "token" else rho.sum())
  factor = np.minimum(rho, s.importance_bound)
  if s.importance == "rejection":
    factor = np.where(rho <= s.importance_bound, rho, 0)
  return np.broadcast_to(out * factor, new.shape) - s.entropy_weight * entropy


@pytest.mark.parametrize(
  "name",
  # Each compiles two train steps; the others' formulas are test_losses.py's.
  [
    pytest.param(n, marks=[] if n == "gspo" else [pytest.mark.slow])
    for n in SETTINGS
  ],
)
def test_options_by_hand_and_in_any_layout(name):
  """Rule 10, with sums over completions that share a row."""
  s = SETTINGS[name]
  found = [
    terms(s, i)
    for i, turn in enumerate(CHATS)
    if not (s.mask_truncated and turn.stop_reason == "length")
  ]
  mean = {
    "sequence_mean": np.mean([t.mean() for t in found]),
    "sequence_sum": np.mean([t.sum() for t in found]) / s.divisor,
  }[s.aggregation]
  params, out = update(s, make_mesh(), None, 1, 8, 1, 24)
  np.testing.assert_allclose(out.loss, mean, rtol=1e-5)
  assert out.grad_norm[0] > 0.01
  assert out.sums.tokens[0] == sum(map(len, found))
  assert 0 < out.sums.importance_cut[0] < out.sums.tokens[0]
  assert 0 < out.sums.clipped[0] < out.sums.tokens[0]
  rows = [(5,), (3, 4), (0, 1, 2)]
  packed, other = update(s, make_mesh(), rows, 4, 1, 3, 32)
  assert_same(params, packed, atol=2e-6)
  np.testing.assert_allclose(other.loss, out.loss, rtol=1e-5)
  np.testing.assert_allclose(other.grad_norm, out.grad_norm, rtol=1e-5)
  for a, b in zip(*map(jax.tree.leaves, (other.sums, out.sums)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5)


def test_sums_over_completions_on_a_slice():
  s, rows = SETTINGS["gspo"], [(0, 1, 2), (3, 4), (5,)]
  one, out = update(s, make_mesh(), rows, 1, 8, 1, 24)
  four, other = update(s, make_mesh(2, 2), rows, 1, 8, 1, 24)
  assert_same(one, four)
  np.testing.assert_allclose(other.loss, out.loss, rtol=1e-5)


def work(loss, advantages=SIGNS, num_updates=1, **of_agent):
  made = object.__new__(backbone.Backbone)
  made.names = made.trained = ("p",)
  made.policy_index = {"p": 0}
  made.policy = config_lib.Policy(
    checkpoint="x", loss=loss, num_updates=num_updates
  )
  made.learner = make_spec()
  made.slice = types.SimpleNamespace(train_mesh=made.learner.mesh)
  made.row_buckets = (64,)
  made._roles = {"a": config_lib.Agent(role="r", policy="p", **of_agent)}
  ids = np.zeros(6, np.int32)
  rows = rewards.Rows(
    CHATS, np.zeros(6, np.float32), ids, ids, np.arange(6), False
  )
  return made.work(rows, advantages, ("p",))


def denominators(found):
  return [part.denominators for part in found.parts]


@pytest.mark.quick
def test_what_is_counted_is_the_losss():
  total = sum(len(t.completion_ids) for t in CHATS)
  assert denominators(work(config_lib.Loss())) == [[total]]
  found = work(SETTINGS["clipped"])
  assert denominators(found) == [[5]] and found.tokens == [total]
  assert found.parts[0].chats == [(0,), (2,), (3,), (4,), (5,)]
  lengths = np.array([len(t.completion_ids) for t in CHATS])
  want = np.where(np.arange(6) == 1, 0, 1 / lengths)
  np.testing.assert_allclose(found.weights, want, rtol=1e-6)
  assert denominators(work(SETTINGS["cispo"])) == [[6 * 5.0]]


@pytest.mark.quick
def test_an_agent_may_weigh_more_or_not_be_trained():
  """The denominator counts tokens, so a weight is a factor of the gradient."""
  total = sum(len(t.completion_ids) for t in CHATS)
  double = work(config_lib.Loss(), loss_weight=2.0)
  assert set(double.weights) == {2.0} and denominators(double) == [[total]]
  none = work(config_lib.Loss(), train=False)
  assert not none.parts[0].chats and none.tokens == [total]


@pytest.mark.quick
def test_parts_of_a_batch_have_denominators_of_their_own():
  """Also of turns without a signal, which fall into parts as they come."""
  advantages = np.where(np.arange(6) < 2, 0, SIGNS)
  parts = work(config_lib.Loss(), advantages, num_updates=3).parts
  lengths = [len(t.completion_ids) for t in CHATS]
  assert [p.chats for p in parts] == [[], [(2,), (3,)], [(4,), (5,)]]
  assert [p.num_chats for p in parts] == [[0], [2], [2]]
  assert [p.denominators for p in parts] == [
    [sum(lengths[i : i + 2])] for i in (0, 2, 4)
  ]


@pytest.mark.quick
def test_with_an_entropy_bonus_every_row_has_a_signal():
  """Rule 12; rows that are cut by length have none even so."""
  nothing = np.zeros(6, np.float32)
  assert not work(config_lib.Loss(), nothing).parts[0].chats
  bonus = config_lib.Loss(entropy_weight=0.1)
  assert len(work(bonus, nothing).parts[0].chats) == 6
  near = config_lib.Loss(kl_weight=0.1)
  assert len(work(near, nothing).parts[0].chats) == 6
  masked = dataclasses.replace(bonus, mask_truncated=True)
  assert len(work(masked, nothing).parts[0].chats) == 5


@pytest.mark.quick
@pytest.mark.parametrize("tied", [True, False])
def test_an_update_holds_one_set_of_gradients(tied):
  """Beside the state, where parameters are most of what there is: gradients,
  and the largest parameter's of one micro-batch."""
  wide = dict(vocab_size=8192, embed_dim=256, mlp_dim=1024, num_layers=8)
  model = dataclasses.replace(MODEL, tied=tied, **wide)
  spec = dataclasses.replace(
    make_spec(), model=model, vocab_size=8192, head_chunk=8
  )
  batch = pack(make_turns(), 12, 1)
  data = batch, batch.sampler_logprobs, None, batching.gather(ADVANTAGES, batch)
  tokens = batch.mask.sum()[None]
  program = learner.programs(spec).train_step.func
  compiled = program.lower(
    spec, learner.state_shapes(spec), None, data, tokens, LIVE, 12, TEMPERATURE
  ).compile()
  sizes = [4 * x.size for x in jax.tree.leaves(learner.trainable_shapes(spec))]
  used = compiled.memory_analysis().temp_size_in_bytes
  assert used < sum(sizes) + 2.3 * max(sizes) < 2 * sum(sizes)
