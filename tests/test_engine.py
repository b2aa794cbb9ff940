"""Engine, sampler and learner agree; slots, shapes and JetStream's contract.

What holds of every family is tested of two: the transformer, and a toy whose
cache has a recurrent state beside its keys and values.
"""

import dataclasses
import functools
import gc
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recurrent

from drmas_jax import (
  batching,
  decoding,
  engine,
  jetstream_compat,
  learner,
  sampler,
)
from drmas_jax import config as config_lib
from drmas_jax.models import kernels, transformer
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
PAGE, MAX_LENGTH = 24, 48


class Letters:
  """Token i is the i-th letter; enough of a tokenizer for a sampler."""

  text = "".join(chr(48 + i) for i in range(40))

  def decode(self, ids):
    return "".join(self.text[i] for i in ids)

  def tokens_until(self, ids, end):
    return end


def make_family(decoder):
  """A decoder and its parameters, by numpy, which compiles nothing."""
  rng = np.random.default_rng(1)
  params = jax.tree.map(
    lambda p: rng.normal(0, 0.3, p.shape).astype(np.float32),
    decoder.param_shapes(MODEL),
  )
  return types.SimpleNamespace(decoder=decoder, params=params)


@pytest.fixture(scope="module", params=[transformer, recurrent])
def family(request):
  return make_family(request.param)


@pytest.fixture(scope="module")
def plain():
  """For what does not depend on the family."""
  return make_family(transformer)


@pytest.fixture
def compiled():
  """Names of what is compiled, as it happens."""
  event = "/jax/core/compile/backend_compile_duration"
  names = []

  def listen(name, seconds, **kwargs):
    del seconds
    if name == event:
      names.append(kwargs.get("fun_name"))

  jax.monitoring.register_event_duration_secs_listener(listen)
  yield names
  jax.monitoring.unregister_event_duration_listener(listen)


def make_mesh(data=1, fsdp=1, tensor=1):
  devices = np.array(jax.devices()[: data * fsdp * tensor])
  return jax.sharding.Mesh(
    devices.reshape(data, fsdp, tensor), ("data", "fsdp", "tensor")
  )


def make_engine(family, num_slots=4, mesh=None, steps_per_call=4, rows=2, **kw):
  spec = decoding.Spec(
    **{
      "model": MODEL,
      "mesh": mesh or make_mesh(),
      "num_slots": num_slots,
      "max_length": MAX_LENGTH,
      "prefill_rows": rows,
      "prefill_buckets": (16, MAX_LENGTH),
      "steps_per_call": steps_per_call,
      "stop_ids": STOP,
      "vocab_size": 40,
      "page_size": PAGE,
      "max_pages": 9,  # all that 4 slots can have, as JetStream's do
      "decoder": family.decoder,
    }
    | kw
  )
  return engine.PolicyEngine(spec)


def ask(key, prompt, limit=9, **fields):
  settings = {
    "sampling": config_lib.Sampling(),
    "closes": None,
    "shared_by": 1,
    "deadline": np.inf,
  }
  return sampler.Request(
    id=key,
    prompt_ids=np.asarray(prompt, np.int32),
    max_tokens=limit,
    **settings | fields,
  )


def requests(num=10, limit=9, **fields):
  rng = np.random.default_rng(0)
  return [
    ask(
      (i // 2, i % 2, 0),
      rng.integers(3, 40, size=3 + (5 * i) % 11),
      limit,
      **fields,
    )
    for i in range(num)
  ]


def start(made, family):
  sampling = sampler.Sampler(made, Letters())
  sampling.resume(family.decoder.unstack(family.params), 0)
  return sampling


def serve(sampling, asked):
  for request in asked:
    sampling.submit(request)
  done = {}
  for _ in range(200):
    if not sampling.busy:
      break
    sampling.dispatch()
    done.update({c.request.id: c for c in sampling.harvest()})
  assert not sampling.busy
  return done


def run(made, family, asked):
  sampling = start(made, family)
  return serve(sampling, asked), sampling


def assert_same(one, other):
  assert one.keys() == other.keys()
  for key, completion in one.items():
    np.testing.assert_array_equal(completion.ids, other[key].ids)
    np.testing.assert_allclose(
      completion.logprobs, other[key].logprobs, atol=1e-5
    )
    assert completion.stop_reason == other[key].stop_reason


def full_logprobs(family, completion):
  """Of the completion's tokens, by one pass over all of the sequence."""
  prompt, ids = completion.request.prompt_ids, completion.ids
  places = np.arange(MAX_LENGTH)[None]
  end = len(prompt) + len(ids)
  tokens = np.zeros([1, MAX_LENGTH], np.int32)
  tokens[0, :end] = [*prompt, *ids]
  inputs = transformer.Inputs(
    tokens, places, (places < end).astype(np.int32), np.zeros([1], np.int32)
  )
  forward = jax.jit(family.decoder.forward, static_argnames="config")
  hidden, _ = forward(family.params, inputs, config=MODEL)
  logits = hidden[0] @ family.decoder.head(family.params, MODEL)
  logits /= completion.request.sampling.temperature
  logprobs = jax.nn.log_softmax(logits)
  return logprobs[np.arange(len(prompt) - 1, end - 1), ids]


def learner_scores(model, params, done, temperature):
  """The learner's log-probs of ten completions, and their batch."""
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
    model, make_mesh(), config_lib.Loss(), config_lib.Optimizer(), 1, 40
  )
  shape = batching.Shape(2, 8, MAX_LENGTH, 2)
  batch = batching.pack(turns, range(10), [0] * 10, shape)
  scores = learner.programs(spec).score(
    params, batch, 2, np.array([temperature], np.float32)
  )
  assert np.count_nonzero(batch.mask) == sum(
    len(t.completion_ids) for t in turns
  )
  return np.asarray(scores), batch


@pytest.mark.quick
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_sampler_logprobs_are_the_learners(plain, temperature):
  """Rule 9: the first update's ratio is 1 up to rounding."""
  settings = config_lib.Sampling(temperature=temperature)
  done, _ = run(make_engine(plain), plain, requests(sampling=settings))
  scores, batch = learner_scores(MODEL, plain.params, done, temperature)
  np.testing.assert_allclose(scores, batch.sampler_logprobs, atol=1e-5)
  assert np.all(batch.sampler_logprobs[batch.mask > 0] < 0)


@pytest.mark.quick
@pytest.mark.parametrize(
  ("temperature", "kept"),
  [(0.6, {}), (1.0, {}), (1.3, {"top_p": 0.95, "top_k": 20})],
)
def test_bfloat16_sampler_logprobs_are_the_learners(temperature, kept):
  """float32 weights in the learner, products in bfloat16 in both: at most half
  of what larger models may be off by."""
  model = dataclasses.replace(
    MODEL, embed_dim=64, tied=False, compute_dtype="bfloat16"
  )
  params = transformer.init_params(model, jax.random.key(0))
  made = make_engine(
    types.SimpleNamespace(decoder=transformer),
    model=model,
    dtype="bfloat16",
    cache_dtype="bfloat16",
    stop_ids=(),
  )
  sampling = sampler.Sampler(made, Letters())
  rounded = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
  sampling.resume(transformer.unstack(rounded), 0)
  settings = config_lib.Sampling(temperature=temperature, **kept)
  done = serve(sampling, requests(limit=30, sampling=settings))
  scores, batch = learner_scores(model, params, done, temperature)
  off = np.abs(scores - batch.sampler_logprobs)[batch.mask > 0]
  assert 0 < off.mean() < 5e-3 / temperature
  assert np.quantile(off, 0.99) < 2e-2 / temperature


@pytest.mark.quick
def test_sampler_logprobs_are_a_full_forwards(family):
  """Over several pages, with prompts that end at and beside their ends."""
  settings = config_lib.Sampling(temperature=0.7, top_p=0.95)
  rng = np.random.default_rng(3)
  asked = [
    ask((i, 0, 0), rng.integers(3, 40, n), 20, sampling=settings)
    for i, n in enumerate((1, 7, 23, 24, 25, 28))
  ]
  done, _ = run(make_engine(family), family, asked)
  assert sum(len(c.ids) for c in done.values()) > 40
  for completion in done.values():
    np.testing.assert_allclose(
      full_logprobs(family, completion), completion.logprobs, atol=1e-5
    )


@pytest.mark.quick
def test_slots_steps_rows_and_devices_change_nothing(family):
  """Rule 26: equal tokens, and log-probs within 1e-5."""
  asked = requests(num=20)
  few, _ = run(make_engine(family), family, asked)
  assert few.keys() == {r.id for r in asked}
  many = make_engine(
    family, num_slots=16, steps_per_call=1, rows=8, mesh=make_mesh(2, 1, 2)
  )
  assert_same(few, run(many, family, asked)[0])
  lengths = {len(c.ids) for c in few.values()}
  assert len(lengths) > 2, "some must stop early for this to mean something"


@pytest.mark.quick
@pytest.mark.parametrize("length", [7, PAGE, PAGE + 3])
def test_a_group_shares_one_prefill_and_samples_apart(family, length):
  """Each as if it were alone; a shared page may be full, or not yet."""
  prompt = np.arange(5, 5 + length)
  asked = [ask((7, e, 0), prompt, shared_by=6) for e in range(6)]
  done, made = run(make_engine(family), family, asked)
  assert made.counts.prefilled_tokens == length
  assert made.counts.prompt_tokens == 6 * length
  assert len({tuple(c.ids) for c in done.values()}) > 1
  alone = [ask((7, e, 0), prompt) for e in range(6)]
  assert_same(done, run(make_engine(family), family, alone)[0])


def chat(sampling, parents, closes=None):
  """Three turns, each of the last one's tokens and five new ones.

  Beside each, another sequence keeps the engine stepping once it has ended.
  """
  rng = np.random.default_rng(5)
  said, history = {}, rng.integers(3, 40, 17)
  for turn in range(3):
    key = (3, 0, turn)
    before = tuple((3, 0, t) for t in range(turn)) if parents else ()
    request = ask(key, history, 6, parents=before, closes=closes, min_tokens=3)
    neighbour = ask((4, 0, turn), [5, 6], 14, min_tokens=14)
    done = serve(sampling, [request, neighbour])
    said[key] = done[key]
    history = [*history, *said[key].ids, *rng.integers(3, 40, 5)]
  sampling.forget(3, 0)
  sampling.forget(4, 0)
  return said


def new_tokens(said):
  """Of each prompt, those that had to be prefilled."""
  return [len(c.request.prompt_ids) - c.cached_tokens for c in said.values()]


@pytest.mark.quick
def test_a_chat_is_gone_on_from_where_it_ended(family):
  sampling = start(make_engine(family), family)
  whole = chat(sampling, parents=False)
  assert not any(c.cached_tokens for c in whole.values())
  continued = chat(sampling, parents=True)
  assert new_tokens(continued) == [17, 5, 5]
  assert_same(whole, continued)
  for completion in continued.values():
    np.testing.assert_allclose(
      full_logprobs(family, completion), completion.logprobs, atol=1e-5
    )


@pytest.mark.quick
def test_a_chat_cut_by_a_tag_goes_on_only_where_a_cache_rewinds(family):
  """The engine has sampled beyond the tag; a state cannot be taken back."""

  def closes(text):
    return 2 if len(text) >= 2 else None

  sampling = start(make_engine(family), family)
  whole = chat(sampling, False, closes)
  assert all(c.stop_reason == "tag" for c in whole.values())
  continued = chat(sampling, True, closes)
  assert_same(whole, continued)
  rewinds = family.decoder.rewinds(MODEL)
  assert new_tokens(continued) == ([17, 5, 5] if rewinds else [17, 24, 31])


@pytest.mark.quick
@pytest.mark.parametrize("head", [17, PAGE])
def test_a_templates_head_is_shared_between_tasks(family, head):
  prompts = [np.r_[np.arange(5, 5 + head), n : n + 4] for n in (6, 9, 12)]
  asked = [ask((i, 0, 0), p, head=head) for i, p in enumerate(prompts)]
  done, made = run(make_engine(family), family, asked)
  assert made.counts.prefilled_tokens == head + 3 * 4
  apart = [ask((i, 0, 0), p) for i, p in enumerate(prompts)]
  assert_same(done, run(make_engine(family), family, apart)[0])


@pytest.mark.quick
def test_a_small_pool_of_small_pages_changes_nothing(family):
  """Sequences go to the host in their middle, and come back as they were."""
  asked = requests(num=8, limit=34, min_tokens=30)
  wide, _ = run(make_engine(family), family, asked)
  small = make_engine(family, page_size=16, max_pages=7)
  narrow, made = run(small, family, asked)
  assert made.counts.parked > 0
  assert_same(wide, narrow)


@pytest.mark.quick
def test_others_and_their_order_change_no_bit(family):
  """Rule 26: neither who is beside a request, nor when it came."""
  asked = requests(num=12)
  made = make_engine(family)
  together, _ = run(made, family, asked)
  backwards, _ = run(made, family, asked[::-1])
  alone = {}
  for request in asked[:3]:
    alone |= run(made, family, [request])[0]
  for found in (backwards, alone):
    for key, completion in found.items():
      np.testing.assert_array_equal(completion.ids, together[key].ids)
      np.testing.assert_array_equal(completion.logprobs, together[key].logprobs)


@pytest.mark.quick
def test_parts_of_many_slots_change_no_bit(family):
  """Of 66 slots 22 run at a time, and only as many parts as it takes."""
  asked = requests(num=70)
  many = make_engine(family, num_slots=66, max_pages=133, lanes=22)
  together, made = run(many, family, asked)
  assert made.counts.slot_steps == 22 * made.counts.steps
  sampled = sum(len(c.ids) for c in together.values())
  assert made.counts.busy_steps == sampled  # no lane without a slot samples
  few, _ = run(make_engine(family), family, asked)
  assert_same(few, together)
  last, made = run(many, family, asked[-20:])
  assert made.counts.steps == max(len(c.ids) for c in last.values())
  for key, completion in last.items():
    np.testing.assert_array_equal(completion.ids, together[key].ids)
    np.testing.assert_array_equal(completion.logprobs, together[key].logprobs)


@pytest.mark.parametrize("which", ["tpu", "gpu"])
def test_a_kernel_on_the_pool_changes_nothing(family, which, monkeypatch):
  """What TPU and GPU run, with their kernels as XLA operations."""
  asked = requests(num=6)
  chat = ask((9, 0, 0), range(3, 30), limit=6)
  plain, made = run(make_engine(family), family, [*asked, chat])
  more = [*range(3, 30), *plain[9, 0, 0].ids, 4, 5, 6]
  again = ask((9, 0, 1), more, limit=6, parents=((9, 0, 0),))
  plain |= serve(made, [again])
  kernel = functools.partial(kernels.paged_attention, interpret=True)
  monkeypatch.setattr(kernels, "implementation", lambda *_: which)
  monkeypatch.setattr(kernels, "paged_attention", kernel)
  # A length of its own: programs are kept by spec, and these are no others'.
  fused = make_engine(
    family, max_length=MAX_LENGTH + {"tpu": 1, "gpu": 2}[which]
  )
  assert fused.spec.fused
  found, made = run(fused, family, [*asked, chat])
  assert_same(plain, found | serve(made, [again]))


@pytest.mark.quick
def test_a_tag_ends_a_completion_with_its_token_kept_whole(plain):
  asked = requests(num=6, limit=12)
  free, _ = run(make_engine(plain), plain, asked)

  def closes(text):
    return 3 if len(text) >= 3 else None

  cut, _ = run(
    make_engine(plain), plain, requests(num=6, limit=12, closes=closes)
  )
  for key, whole in free.items():
    np.testing.assert_array_equal(cut[key].ids, whole.ids[:3])
    assert len(cut[key].text) == min(3, len(whole.ids))
    if len(whole.ids) > 3:
      assert cut[key].stop_reason == "tag"


@pytest.mark.quick
def test_greedy_and_truncated_sampling(plain):
  def sampled(**settings):
    asked = requests(sampling=config_lib.Sampling(**settings))
    return run(make_engine(plain), plain, asked)[0]

  one = sampled(top_k=1)
  for key, completion in sampled(temperature=0).items():
    np.testing.assert_array_equal(completion.ids, one[key].ids)
    np.testing.assert_allclose(
      one[key].logprobs, one[key].log_kept_mass, atol=1e-5
    )
  for completion in sampled(top_p=0.8).values():
    mass = completion.log_kept_mass
    assert np.all(mass <= 0) and np.all(np.exp(mass) >= 0.8 - 1e-5)
    assert np.all(completion.logprobs <= mass + 1e-5)


@pytest.mark.quick
def test_stop_ids_of_its_own_and_a_least_length(plain):
  """No stop id is sampled too early; any of them ends a completion."""
  asked = requests(num=10, limit=12)
  free, _ = run(make_engine(plain), plain, asked)
  own = tuple(range(20, 28))
  bound = requests(num=10, limit=12, stop_ids=own, min_tokens=4)
  done, _ = run(make_engine(plain), plain, bound)
  assert {len(c.ids) for c in free.values()} & {1, 2, 3}
  assert any(c.ids[-1] in own for c in done.values())
  for completion in done.values():
    assert len(completion.ids) >= 4
    stops = np.flatnonzero(np.isin(completion.ids, (*STOP, *own)))
    expected = [len(completion.ids) - 1]
    assert stops.tolist() == expected * (completion.stop_reason == "stop")


@pytest.mark.quick
@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"prompt": [5] * 48}, "prompt of 48 tokens; allowed are 1 to 47"),
    ({"prompt": []}, "prompt of 0 tokens"),
    ({"prompt": [5, 40]}, "prompt with the id 40; allowed are 0 to 39"),
    ({"prompt": [-1, 5]}, "prompt with the id -1"),
    ({"limit": 0}, "max_tokens: 0; allowed is at least 1"),
    ({"stop_ids": tuple(range(9))}, "stop_ids: 9 of them"),
    ({"deadline": 0.0}, "turn past"),
  ],
)
def test_what_cannot_be_served_is_a_fault_and_leaks_no_slot(
  plain, fields, message
):
  bad = [ask((9, e, 0), **({"prompt": [5, 6]} | fields)) for e in range(9)]
  done, _ = run(make_engine(plain), plain, bad + requests(num=4))
  for request in bad:
    assert message in done[request.id].fault.message
    assert done[request.id].fault.wall_clock == ("deadline" in fields)
  assert all(done[r.id].fault is None for r in requests(num=4))


@pytest.mark.quick
def test_release_leaves_nothing_and_resume_compiles_nothing(family, compiled):
  """Twenty cycles."""
  weights = jax.device_get(family.decoder.unstack(family.params))
  gc.collect()
  before = {id(array) for array in jax.live_arrays()}
  made = make_engine(family)
  sampling = sampler.Sampler(made, Letters())
  for cycle in range(20):
    sampling.resume(jax.device_put(weights), cycle)
    done = serve(sampling, requests(num=3, limit=3))
    assert all(c.version == cycle for c in done.values())
    sampling.release()
    del done
    gc.collect()
    left = [a for a in jax.live_arrays() if id(a) not in before]
    assert not left, [(a.shape, a.dtype) for a in left]
    if not cycle:
      compiled.clear()
  assert not compiled


@pytest.mark.quick
def test_the_shapes_that_were_compiled_are_known(plain):
  _, made = run(make_engine(plain), plain, [ask((0, 0, 0), range(3, 30))])
  assert made.engine.shapes == {
    ("pool", f"9 x {PAGE} tokens"),
    ("prefill", f"2 x {MAX_LENGTH} tokens"),
    ("generate", "4 slots on 44 pages"),
  }


@pytest.mark.quick
def test_one_compilation(plain, compiled):
  """Engines of equal shape share their programs."""
  run(make_engine(plain), plain, requests(num=8))
  compiled.clear()
  run(make_engine(plain), plain, requests(num=8))
  assert not compiled


@pytest.mark.quick
def test_jetstream_contract(family):
  """What a foreign orchestrator does: prefill, insert, generate by slot."""
  made = make_engine(family)
  assert isinstance(made, jetstream_compat.Engine)
  weights = made.load_params(family.decoder.unstack(family.params))
  state = made.init_decode_state()
  prompt = np.arange(5, 33, dtype=np.int32)

  def prefill(tokens, existing=None):
    padded = np.zeros([MAX_LENGTH], np.int32)
    padded[: len(tokens)] = tokens
    return made.prefill(
      params=weights,
      existing_prefix=existing,
      padded_tokens=padded,
      true_length=len(tokens),
    )

  prefix = prefill(prompt)
  again = prefill(prompt[7:], prefill(prompt[:7]))
  np.testing.assert_allclose(prefix.hidden[0], again.hidden[0], atol=1e-5)
  outputs = []
  for source in (prefix, again):
    state = made.insert(source, state, slot=1)
    got = []
    for i in range(4):
      state, result = made.generate(weights, state)
      slot = result.convert_to_numpy().get_result_at_slot(1)
      assert slot.valid[0, 0] == 1 and slot.lengths[0] == i + 1
      got.append(int(slot.tokens[0, 0]))
    outputs.append(got)
  assert outputs[0] == outputs[1]
  assert made.max_concurrent_decodes == 4 and made.samples_per_slot == 1
  assert made.max_prefill_length == MAX_LENGTH
