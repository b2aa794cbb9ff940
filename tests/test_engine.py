"""Engine, sampler and learner agree; slots, shapes and JetStream's contract."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drmas_jax import batching, engine, jetstream_compat, learner, sampler
from drmas_jax import config as config_lib
from drmas_jax.models import transformer
from drmas_jax.types import Turn

MODEL = transformer.DecoderConfig(
  family="qwen2",
  vocab_size=40,
  embed_dim=32,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  mlp_dim=48,
  max_positions=64,
  tied=True,
  qkv_bias=True,
)
STOP = (1, 2)


class Letters:
  """Token i is the i-th letter; enough of a tokenizer for a sampler."""

  text = "".join(chr(48 + i) for i in range(40))

  def decode(self, ids):
    return "".join(self.text[i] for i in ids)

  def tokens_until(self, ids, end):
    return end


def make_mesh(data=1, fsdp=1, tensor=1):
  devices = np.array(jax.devices()[: data * fsdp * tensor])
  return jax.sharding.Mesh(
    devices.reshape(data, fsdp, tensor), ("data", "fsdp", "tensor")
  )


def make_engine(num_slots=4, mesh=None, steps_per_call=4, rows=2):
  spec = engine.Spec(
    model=MODEL,
    mesh=mesh or make_mesh(),
    num_slots=num_slots,
    max_length=32,
    prefill_rows=rows,
    prefill_buckets=(8, 16),
    steps_per_call=steps_per_call,
    stop_ids=STOP,
    vocab_size=40,
  )
  return engine.PolicyEngine(spec)


@pytest.fixture(scope="module")
def params():
  return transformer.init_params(MODEL, jax.random.key(1))


def requests(num=10, limit=9, sampling=None, closes=None):
  rng = np.random.default_rng(0)
  return [
    sampler.Request(
      id=(i // 2, i % 2, 0),
      prompt_ids=rng.integers(3, 40, size=3 + (5 * i) % 11).astype(np.int32),
      max_tokens=limit,
      sampling=sampling or config_lib.Sampling(),
      closes=closes,
      shared_by=1,
      deadline=time.monotonic() + 60,
    )
    for i in range(num)
  ]


def run(made, params, asked):
  sampling = sampler.Sampler(made, Letters())
  sampling.resume(transformer.unstack(params), 0)
  for request in asked:
    sampling.submit(request)
  done = {}
  for _ in range(200):
    if not sampling.busy:
      break
    sampling.dispatch()
    done.update({c.request.id: c for c in sampling.harvest()})
  assert not sampling.busy
  return done, sampling


@pytest.mark.quick
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_sampler_logprobs_are_the_learners(params, temperature):
  """Rule 9: the first update's ratio is 1 up to rounding."""
  settings = config_lib.Sampling(temperature=temperature)
  done, _ = run(make_engine(), params, requests(sampling=settings))
  turns = [
    Turn(
      "a",
      "p",
      0,
      c.request.prompt_ids,
      c.ids,
      c.logprobs,
      c.log_kept_mass,
      c.stop_reason,
      0,
      True,
    )
    for c in done.values()
  ]
  spec = learner.Spec(
    MODEL, make_mesh(), config_lib.Loss(), config_lib.Optimizer(), 1, 40
  )
  batch = batching.pack(
    turns, range(10), [0] * 10, num_micro=2, micro_batch=8, length=32
  )
  scores = learner.programs(spec).score(
    params, batch, 2, np.array([temperature], np.float32)
  )
  np.testing.assert_allclose(scores, batch.sampler_logprobs, atol=1e-5)
  assert np.count_nonzero(batch.mask) == sum(
    len(t.completion_ids) for t in turns
  )
  assert np.all(batch.sampler_logprobs[batch.mask > 0] < 0)


@pytest.mark.quick
def test_slots_and_steps_change_nothing(params):
  """Rule 26: equal tokens, log-probs within 1e-5, for 4 and 32 slots."""
  asked = requests(num=20)
  few, _ = run(make_engine(num_slots=4, steps_per_call=4), params, asked)
  for other in (make_engine(32), make_engine(4, steps_per_call=1, rows=8)):
    many, _ = run(other, params, asked)
    assert few.keys() == many.keys() == {r.id for r in asked}
    for key, one in few.items():
      np.testing.assert_array_equal(one.ids, many[key].ids)
      np.testing.assert_allclose(one.logprobs, many[key].logprobs, atol=1e-5)
      assert one.stop_reason == many[key].stop_reason
  lengths = {len(c.ids) for c in few.values()}
  assert len(lengths) > 2, "some must stop early for this to mean something"


def test_sharded_engine_samples_the_same(params):
  asked = requests(num=8)
  one, _ = run(make_engine(), params, asked)
  other, _ = run(make_engine(mesh=make_mesh(2, 1, 2)), params, asked)
  for key, completion in one.items():
    np.testing.assert_array_equal(completion.ids, other[key].ids)
    np.testing.assert_allclose(
      completion.logprobs, other[key].logprobs, atol=1e-5
    )


@pytest.mark.quick
def test_a_group_shares_one_prefill_and_samples_apart(params):
  prompt = np.arange(5, 12, dtype=np.int32)
  asked = [
    sampler.Request(
      (7, e, 0),
      prompt,
      9,
      config_lib.Sampling(),
      None,
      6,
      time.monotonic() + 60,
    )
    for e in range(6)
  ]
  done, made = run(make_engine(num_slots=4), params, asked)
  assert made.counts.prefilled_tokens == len(prompt)
  assert made.counts.prompt_tokens == 6 * len(prompt)
  assert len({tuple(c.ids) for c in done.values()}) > 1


@pytest.mark.quick
def test_a_tag_ends_a_completion_with_its_token_kept_whole(params):
  asked = requests(num=6, limit=12)
  free, _ = run(make_engine(), params, asked)

  def closes(text):
    return 3 if len(text) >= 3 else None

  cut, _ = run(make_engine(), params, requests(num=6, limit=12, closes=closes))
  for key, whole in free.items():
    np.testing.assert_array_equal(cut[key].ids, whole.ids[:3])
    assert len(cut[key].text) == min(3, len(whole.ids))
    if len(whole.ids) > 3:
      assert cut[key].stop_reason == "tag"


@pytest.mark.quick
def test_greedy_and_truncated_sampling(params):
  greedy, _ = run(
    make_engine(), params, requests(sampling=config_lib.Sampling(temperature=0))
  )
  one, _ = run(
    make_engine(), params, requests(sampling=config_lib.Sampling(top_k=1))
  )
  for key, completion in greedy.items():
    np.testing.assert_array_equal(completion.ids, one[key].ids)
    np.testing.assert_allclose(
      one[key].logprobs, one[key].log_kept_mass, atol=1e-5
    )
  some, _ = run(
    make_engine(), params, requests(sampling=config_lib.Sampling(top_p=0.8))
  )
  for completion in some.values():
    mass = completion.log_kept_mass
    assert np.all(mass <= 0) and np.all(np.exp(mass) >= 0.8 - 1e-5)
    assert np.all(completion.logprobs <= mass + 1e-5)


@pytest.mark.quick
def test_a_prompt_that_does_not_fit_is_a_fault_and_leaks_no_slot(params):
  made = make_engine()
  long = sampler.Request(
    (0, 0, 0),
    np.full([40], 5, np.int32),
    4,
    config_lib.Sampling(),
    None,
    1,
    time.monotonic() + 60,
  )
  empty = sampler.Request(
    (0, 1, 0),
    np.zeros([0], np.int32),
    4,
    config_lib.Sampling(),
    None,
    1,
    time.monotonic() + 60,
  )
  late = sampler.Request(
    (0, 2, 0),
    np.full([4], 5, np.int32),
    4,
    config_lib.Sampling(),
    None,
    1,
    time.monotonic() - 1,
  )
  done, made = run(made, params, [long, empty, late, *requests(num=4)[2:]])
  assert (
    "prompt of 40 tokens; allowed are 1 to 16" in done[0, 0, 0].fault.message
  )
  assert "prompt of 0 tokens" in done[0, 1, 0].fault.message
  assert done[0, 2, 0].fault.kind == "deadline"
  assert done[0, 2, 0].fault.wall_clock
  assert done[1, 0, 0].fault is None


@pytest.mark.quick
def test_release_drops_every_array(params):
  made = make_engine()
  rollout = transformer.unstack(params)
  made.resume(rollout, 0)
  cache = jax.tree.leaves(made.state)
  made.release()
  assert made.params is None and made.state is None
  assert cache  # the only reference left is this one


@pytest.mark.quick
def test_schedule_is_first_come_first_served():
  asked = requests(num=6)
  actions = sampler.schedule(asked, [2, 5, 7], set(), lambda n: 8, 2)
  assert [r.id for r, _ in actions.inserts] == [r.id for r in asked[:3]]
  assert [s for _, s in actions.inserts] == [2, 5, 7]
  assert [len(p.requests) for p in actions.prefills] == [2, 1]


@pytest.mark.quick
def test_jetstream_contract(params):
  """What a foreign orchestrator does: prefill, insert, generate by slot."""
  made = make_engine()
  assert isinstance(made, jetstream_compat.Engine)
  weights = made.load_params(transformer.unstack(params))
  state = made.init_decode_state()
  prompt = np.array([5, 6, 7, 8, 9], np.int32)
  padded = np.zeros([8], np.int32)
  padded[:5] = prompt
  prefix = made.prefill(params=weights, padded_tokens=padded, true_length=5)
  again = made.prefill(params=weights, padded_tokens=padded[:3], true_length=3)
  rest = np.zeros([8], np.int32)
  rest[:2] = prompt[3:]
  again = made.prefill(
    params=weights, existing_prefix=again, padded_tokens=rest, true_length=2
  )
  np.testing.assert_allclose(prefix.hidden[0], again.hidden[0], atol=1e-5)
  outputs = []
  for source in (prefix, again):
    state = made.insert(source, state, slot=2)
    got = []
    for i in range(4):
      state, result = made.generate(weights, state)
      slot = result.convert_to_numpy().get_result_at_slot(2)
      assert slot.valid[0, 0] == 1 and slot.lengths[0] == i + 1
      got.append(int(slot.tokens[0, 0]))
    outputs.append(got)
  assert outputs[0] == outputs[1]
  assert made.max_concurrent_decodes == 4 and made.samples_per_slot == 1
  assert made.max_prefill_length == 16


@pytest.mark.quick
def test_one_compilation(params):
  made = make_engine()
  run(made, params, requests(num=8))
  programs = engine.programs(made.spec)
  before = [
    programs.insert.func._cache_size(),
    programs.generate.func._cache_size(),
  ]
  run(make_engine(), params, requests(num=3))
  after = [
    programs.insert.func._cache_size(),
    programs.generate.func._cache_size(),
  ]
  assert before == after
  assert jnp.ndim(made.state.length) == 1
