"""The decoder: parity with transformers, cache, packing, gradient, mesh."""

import dataclasses
import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from parity import make_numbers
from safetensors.numpy import save_file

from drmas_jax import decoding, engine, logprobs, sharding
from drmas_jax.models import (
  layers,
  llama3,
  paged,
  qwen2,
  qwen3,
  transformer,
  weights,
)
from drmas_jax.models.transformer import Inputs

CONFIG = transformer.DecoderConfig(
  family="qwen3",
  vocab_size=64,
  embed_dim=32,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=16,
  mlp_dim=48,
  max_positions=64,
  qkv_bias=True,
  qk_norm=True,
)
forward = jax.jit(transformer.forward, static_argnames=("config", "mesh"))


def _inputs(tokens, positions=None, segment_ids=None) -> Inputs:
  tokens = jnp.asarray(tokens, jnp.int32)
  if positions is None:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  if segment_ids is None:
    segment_ids = jnp.ones_like(tokens)
  return Inputs(
    tokens,
    jnp.asarray(positions, jnp.int32),
    jnp.asarray(segment_ids, jnp.int32),
    jnp.zeros(tokens.shape[0], jnp.int32),
  )


def _tokens(rows, length, seed=0):
  return np.random.default_rng(seed).integers(
    0, CONFIG.vocab_size, (rows, length)
  )


@pytest.fixture(scope="module")
def params():
  """Random, with biases and norms that are not at their neutral start."""
  init = jax.jit(transformer.init_params, static_argnums=0)
  params = init(CONFIG, jax.random.key(0))
  rng = np.random.default_rng(1)
  return jax.tree.map(
    lambda p: p + 0.2 * rng.standard_normal(p.shape, np.float32), params
  )


# -- parity with transformers --------------------------------------------------


@functools.cache
def _numbers():
  with np.load(make_numbers.PATH) as file:
    return dict(file)


def _checkpoint(name, folder):
  (folder / "config.json").write_text(json.dumps(make_numbers.CASES[name]))
  save_file(make_numbers.tensors(name), folder / "model.safetensors")
  config = weights.read_config(folder)
  return config, weights.load(folder, config)


def _paged(config, rows, total, size=4, dtype=jnp.float32):
  """A cache for `rows` rows, whose pages are mixed; its tables; and the Pages
  of a prefill and of a decode step on it."""
  each = -(-total // size)
  order = np.random.default_rng(0).permutation(rows * each)
  table = np.sort((1 + order).reshape(rows, each)).astype(np.int32)
  cache = transformer.init_cache(config, 1 + rows * each, size, dtype)
  owner, block = np.zeros([2, 1 + rows * each], np.int32)
  block[0] = total
  owner[table], block[table] = np.indices(table.shape)
  prefill = paged.Pages(table, np.zeros([rows], np.int32))
  return cache, prefill, paged.Pages(table, None, owner, block)


def _decode(params, config, prompts, num_new):
  """Prompts and their greedy continuations, token by token through the cache
  after a prefill of 5: ids [B, T + new] and logits [B, T + new, V]."""
  rows, length = prompts.shape
  total, head = length + num_new, transformer.head(params, config)
  cache, prefill, pages = _paged(config, rows, total)
  hidden, cache = transformer.forward(
    params, _inputs(prompts[:, :5]), cache, prefill, config=config
  )
  ids = jnp.zeros((rows, total), jnp.int32).at[:, :length].set(prompts)
  logits = jnp.zeros((rows, total, config.vocab_size))
  logits = logits.at[:, :5].set(hidden @ head)

  def step(state):
    i, cache, ids, logits = state
    best = jnp.argmax(logits[:, i - 1], -1).astype(jnp.int32)
    ids = ids.at[:, i].set(jnp.where(i < length, ids[:, i], best))
    inputs = _inputs(ids[:, i][:, None], jnp.full((rows, 1), i))
    hidden, cache = transformer.forward(
      params, inputs, cache, pages, config=config
    )
    return i + 1, cache, ids, logits.at[:, i].set((hidden @ head)[:, 0])

  state = jax.lax.while_loop(
    lambda s: s[0] < total, step, (5, cache, ids, logits)
  )
  return state[2], state[3]


@pytest.mark.quick
def test_a_decode_step_computes_its_angles_once():
  """Not in each head of each layer, as XLA's CPU code would."""
  cache, _, pages = _paged(CONFIG, 2, 16)

  def step(params, cache, positions):
    tokens = jnp.zeros_like(positions)
    return transformer.forward(
      params, _inputs(tokens, positions), cache, pages, config=CONFIG
    )

  params = transformer.param_shapes(CONFIG)
  positions = jax.ShapeDtypeStruct((2, 1), jnp.int32)
  text = jax.jit(step).lower(params, cache, positions).compile().as_text()
  made = [line for line in text.splitlines() if re.search(r" sine\(", line)]
  assert len(made) == 1 < CONFIG.num_layers


@pytest.mark.quick
def test_rows_of_a_gradient_stay_on_their_devices():
  """Of whole weights nothing is exchanged but the gradients' sum, and that in
  no loop over rows: a loop's collectives are not in step between hosts."""
  devices = np.array(jax.devices()[:8]).reshape(8, 1, 1)
  mesh = Mesh(devices, ("data", "fsdp", "tensor"))
  whole, by_row = sharding.replicated(mesh), sharding.rows(mesh, ndim=1)

  def loss(params, inputs):
    hidden, _ = transformer.forward(params, inputs, config=CONFIG, mesh=mesh)
    return jnp.sum(hidden)

  inputs = jax.eval_shape(lambda: _inputs(np.zeros((8, 32), int)))
  gradient = jax.jit(jax.grad(loss), in_shardings=(whole, by_row))
  lowered = gradient.lower(transformer.param_shapes(CONFIG), inputs)
  text = lowered.compile().as_text()
  assert " all-reduce(" in text
  for other in ("all-gather", "all-to-all", "collective-permute"):
    assert other not in text


QUICK = ("llama32", "qwen2", "qwen3")  # one of each family
cases = pytest.mark.parametrize(
  "name",
  [
    pytest.param(n, marks=[pytest.mark.quick] if n in QUICK else [])
    for n in make_numbers.CASES
  ],
)


@cases
def test_equals_transformers(name, tmp_path):
  """Cases L01, L03, L04: all at once with padding left and right, through the
  cache, and greedy."""
  config, params = _checkpoint(name, tmp_path)
  prompts, expected = make_numbers.prompts(name), _numbers()[f"{name}/logits"]
  rows, positions, segments = np.zeros((3, 6, 8), int)
  rows[:2], positions[:2], segments[:2] = prompts, np.arange(8), 1
  for i in range(4):  # 5 tokens at any place of 8
    at = 2 + i, slice(i, i + 5)
    rows[at], positions[at], segments[at] = prompts[0, :5], np.arange(5), 1
  inputs = _inputs(rows, positions, segments)
  hidden, _ = forward(params, inputs, config=config)
  logits = hidden @ transformer.head(params, config)
  close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-4)
  close(logits[:2], expected)
  for i in range(4):
    close(logits[2 + i, i : i + 5], expected[0, :5])
  decode = jax.jit(_decode, static_argnums=(1, 3))
  ids, logits = decode(transformer.unstack(params), config, prompts, 16)
  close(logits[:, :8], expected)
  np.testing.assert_array_equal(ids[:, 8:], _numbers()[f"{name}/ids"])


@cases
def test_bfloat16_equals_transformers(name, tmp_path):
  """Weights and activations in bfloat16, in both. 2e-2 of the largest logit;
  transformers' own bfloat16 is 0.5e-2 to 1.2e-2 of it away from its float32
  (a bfloat16 has steps of 0.4e-2 to 0.8e-2)."""
  config, params = _checkpoint(name, tmp_path)
  params = jax.tree.map(lambda p: np.asarray(p).astype(jnp.bfloat16), params)
  config = dataclasses.replace(config, compute_dtype="bfloat16")
  inputs = _inputs(make_numbers.prompts(name))
  hidden, _ = forward(params, inputs, config=config)
  assert hidden.dtype == jnp.bfloat16
  logits = logprobs.logits(
    hidden, transformer.head(params, config), config.vocab_size
  )
  expected = make_numbers.half(_numbers()[f"{name}/bfloat16"])
  exact = _numbers()[f"{name}/logits"]
  largest = np.abs(exact).max()
  np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-2 * largest)
  # No further from the truth than transformers is, as a whole.
  ours, theirs = (np.std(x - exact) for x in (logits, expected))
  assert 0 < ours < 1.2 * theirs


@pytest.mark.parametrize("name", make_numbers.CASES)
def test_numbers_made_again(name):
  pytest.importorskip("torch", reason="the extra [parity] brings torch")
  found, kept = make_numbers.compute(name), _numbers()
  exact = kept[f"{name}/logits"]
  padded = make_numbers.compute_padded(name)
  for value, expected, atol in (
    (found["logits"], exact, 1e-5),
    (padded, exact[:, : padded.shape[1]], 1e-4),
    (found["ids"], kept[f"{name}/ids"], 0),
    (
      make_numbers.half(found["bfloat16"]),
      make_numbers.half(kept[f"{name}/bfloat16"]),
      2e-2 * np.abs(exact).max(),
    ),
  ):
    np.testing.assert_allclose(value, expected, rtol=0, atol=atol)


# -- sizes ---------------------------------------------------------------------

# Parameters as their publishers count them (a tied head once).
PUBLISHED = {
  "meta-llama/Llama-3.1-8B": 8_030_261_248,
  "meta-llama/Llama-3.2-1B": 1_235_814_400,
  "meta-llama/Llama-3.2-3B": 3_212_749_824,
  "HuggingFaceTB/SmolLM2-135M": 134_515_008,
  "HuggingFaceTB/SmolLM2-360M": 361_821_120,
  "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
  "Qwen/Qwen2.5-0.5B": 494_032_768,
  "Qwen/Qwen2.5-1.5B": 1_543_714_304,
  "Qwen/Qwen2.5-3B": 3_085_938_688,
  "Qwen/Qwen2.5-7B": 7_615_616_512,
  "Qwen/Qwen2.5-14B": 14_770_033_664,
  "Qwen/Qwen3-0.6B": 596_049_920,
  "Qwen/Qwen3-1.7B": 1_720_574_976,
  "Qwen/Qwen3-4B": 4_022_468_096,
  "Qwen/Qwen3-8B": 8_190_735_360,
  "Qwen/Qwen3-14B": 14_768_307_200,
}


@pytest.mark.quick
def test_public_sizes_have_the_published_number_of_parameters():
  for name, number in PUBLISHED.items():
    shapes = jax.tree.leaves(
      transformer.param_shapes(weights.public_sizes(name))
    )
    assert sum(math.prod(x.shape) for x in shapes) == number, name


@pytest.mark.quick
def test_variants_of_public_checkpoints_have_their_sizes():
  """All but the length, the rotation and epsilon."""
  plain = {"max_positions": 0, "rope_theta": 0, "norm_eps": 0}
  tables = {n: c for f in (llama3, qwen2, qwen3) for n, c in f.SIZES.items()}
  for name, config in tables.items():
    short = name.replace("Coder-", "")
    (base,) = (n for n in PUBLISHED if short == n or short.startswith(f"{n}-"))
    assert dataclasses.replace(config, **plain) == dataclasses.replace(
      tables[base], **plain
    )
    assert weights.public_sizes(name) == config
  assert weights.public_sizes("Qwen/Qwen3-4B-of-mine") is None


@pytest.mark.quick
def test_public_sizes_that_differ_within_a_family():
  sizes = weights.public_sizes
  assert sizes("Qwen/Qwen3-4B").rope_theta == 1e6
  for kind in ("Instruct", "Thinking"):
    release = sizes(f"Qwen/Qwen3-4B-{kind}-2507")
    assert (release.rope_theta, release.max_positions) == (5e6, 262_144)
  assert sizes("meta-llama/Llama-3.2-1B").rope_scaling.factor == 32
  assert sizes("meta-llama/Llama-3.1-8B").rope_scaling.factor == 8
  assert sizes("Qwen/Qwen2.5-7B-Instruct").vocab_size == 152_064
  assert sizes("HuggingFaceTB/SmolLM2-1.7B").rope_theta == 130_000


@pytest.mark.quick
@pytest.mark.parametrize("name", ["Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B"])
def test_a_head_is_not_embedding_over_heads(name):
  """Case L04."""
  config = weights.public_sizes(name)
  attention = transformer.param_shapes(config)["layers"]["attention"]
  num, embed = config.num_layers, config.embed_dim
  heads = {2560: 32, 1024: 16}[embed]
  assert attention["q"].shape == (num, embed, heads, 128)
  assert attention["k"].shape == attention["v"].shape == (num, embed, 8, 128)
  assert attention["o"].shape == (num, heads, 128, embed)


def test_padded_rows_of_an_odd_vocabulary_are_not_sampled(tmp_path):
  """143 tokens in 151 rows, the last of which are the loudest."""
  config, params = _checkpoint("llama", tmp_path)
  params["head"] = params["head"].at[:, 143:].set(10 * params["head"][:, :8])
  mesh = jax.sharding.Mesh(
    np.array(jax.devices()[:1]).reshape(1, 1, 1), sharding.AXES
  )
  spec = decoding.Spec(
    model=config,
    mesh=mesh,
    num_slots=1,
    max_length=32,
    prefill_rows=1,
    prefill_buckets=(8,),
    steps_per_call=1,
    stop_ids=(150,),
    vocab_size=143,
    page_size=8,
    max_pages=5,
  )
  made = engine.PolicyEngine(spec)
  layered = made.load_params(transformer.unstack(params))
  state, found = made.init_decode_state(), []
  prefix = made.prefill(
    params=layered,
    padded_tokens=make_numbers.prompts("llama")[0].astype(np.int32) % 143,
    true_length=8,
  )
  state = made.insert(prefix, state, slot=0)
  for _ in range(20):
    state, result = made.generate(layered, state)
    found.append(result.convert_to_numpy().get_result_at_slot(0).tokens[0, 0])
  assert max(found) < 143
  assert len(set(found)) > 1


# -- cache ---------------------------------------------------------------------


@pytest.mark.quick
def test_one_layer_is_traced_for_all_of_a_decode(params, monkeypatch):
  traced, call = [], transformer.Mlp.__call__

  def counted(self, *args):
    traced.append(self)
    return call(self, *args)

  monkeypatch.setattr(transformer.Mlp, "__call__", counted)
  cache, prefill, _ = _paged(CONFIG, 2, 12)
  step = functools.partial(forward, transformer.unstack(params), config=CONFIG)
  jax.eval_shape(step, _inputs(_tokens(2, 5)), cache, prefill)
  assert CONFIG.num_layers > 1 and len(traced) == 1


@pytest.mark.quick
def test_cached_decode_equals_full_forward(params):
  """Rows of different lengths, prefill, a continued prefix, single steps."""
  tokens = _tokens(2, 12)
  full, _ = forward(params, _inputs(tokens), config=CONFIG)
  cache, prefill, pages = _paged(CONFIG, 2, 12)
  # What lies beyond a row's position may be anything.
  cache = jax.tree.map(lambda x: x + 1e3, cache)
  step = functools.partial(forward, transformer.unstack(params), config=CONFIG)
  _, cache = step(_inputs(tokens[:, :5]), cache, prefill)
  starts = np.array([5, 3])  # the second row's last two were padding
  rows = np.arange(2)[:, None]
  positions = starts[:, None] + np.arange(4)
  going_on = prefill._replace(source=prefill.table[[0, 1], starts // 4])
  hidden, cache = step(
    _inputs(tokens[rows, positions], positions), cache, going_on
  )
  np.testing.assert_allclose(hidden, full[rows, positions], atol=2e-5)
  for i in range(3):
    positions = starts[:, None] + 4 + i
    hidden, cache = step(
      _inputs(tokens[rows, positions], positions), cache, pages
    )
    np.testing.assert_allclose(hidden, full[rows, positions], atol=2e-5)


@pytest.mark.quick
def test_a_sequence_is_gone_on_from_in_the_middle_of_a_page(params):
  """Two rows share a page; each has what is in it up to where it leaves."""
  tokens = _tokens(1, 12)
  full, _ = forward(params, _inputs(tokens), config=CONFIG)
  cache = transformer.init_cache(CONFIG, 9, 4, jnp.float32)
  step = functools.partial(forward, transformer.unstack(params), config=CONFIG)
  first = paged.Pages(np.array([[3, 1, 0]]), np.array([0]))
  _, cache = step(_inputs(tokens[:, :7]), cache, first)
  tables = np.array([[3, 2, 5], [3, 1, 7]])  # the second writes on
  positions = np.tile(np.arange(6, 11), (2, 1))
  chunk = np.stack([tokens[0, 6:11], tokens[0, 6:11]])
  hidden, cache = step(
    _inputs(chunk, positions), cache, paged.Pages(tables, np.array([1, 1]))
  )
  for row in range(2):
    np.testing.assert_allclose(hidden[row], full[0, 6:11], atol=2e-5)


@pytest.mark.quick
def test_writes_beyond_the_pages_of_a_row_go_nowhere(params):
  """A continued prefix's padding may reach over the end."""
  tokens = _tokens(2, 12)
  full, _ = forward(params, _inputs(tokens), config=CONFIG)
  step = functools.partial(forward, transformer.unstack(params), config=CONFIG)
  cache, prefill, pages = _paged(CONFIG, 2, 12)
  _, cache = step(_inputs(tokens[:, :8]), cache, prefill)
  padded = np.pad(tokens[:, 8:], ((0, 0), (0, 5)))
  hidden, cache = step(
    _inputs(padded, np.tile(np.arange(8, 17), (2, 1))), cache, prefill
  )
  np.testing.assert_allclose(hidden[:, :4], full[:, 8:], atol=2e-5)
  # A decode step of a row that is full, too.
  before = jax.tree.map(lambda x: x[1:], cache)
  _, cache = step(_inputs(tokens[:, :1], np.full((2, 1), 12)), cache, pages)
  after = jax.tree.map(lambda x: x[1:], cache)
  jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.quick
def test_other_rows_change_no_bit_of_a_row(params):
  """Rule 26: neither prefill nor decode of a row depends on who is beside it,
  on the size of the pool, or on the width of the table."""
  tokens = _tokens(3, 12)
  step = functools.partial(forward, transformer.unstack(params), config=CONFIG)
  found = []
  for others, total in (((1, 2), 12), ((2, 1), 40)):
    cache, prefill, pages = _paged(CONFIG, 3, total)
    rows = tokens[[0, *others]]
    out, cache = step(_inputs(rows[:, :9]), cache, prefill)
    at = np.array([[9], [5 * (total > 12)], [2]])
    inputs = _inputs(rows[np.arange(3)[:, None], at], at)
    found.append((out[0], step(inputs, cache, pages)[0][0]))
  jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.quick
def test_the_number_of_pages_changes_no_bit_of_a_row():
  """Rule 26, where each page has an owner: there are few pages, or many."""
  num_heads, size = 4, 8
  rng = np.random.default_rng(0)
  most = 1024
  pool = {
    "keys": rng.normal(size=[most, 2, 16, size]).astype(np.float32),
    "values": rng.normal(size=[most, 2, size, 16]).astype(np.float32),
  }
  q = rng.normal(size=[3, 1, num_heads, 16]).astype(np.float32)
  at = np.full((3, 1), 21)
  attend = jax.jit(paged.attend)

  def first_row(num):
    owner, block = np.full([2, num], 2, np.int32)
    owner[:3], block[:3] = 0, np.arange(3)
    cache = {name: x[:num] for name, x in pool.items()}
    return attend(q, cache, at, paged.Pages(at, None, owner, block))[0]

  want = first_row(most)
  fewest = paged.fewest(num_heads, size)
  for num in (fewest, 2 * fewest + 1):
    np.testing.assert_array_equal(first_row(num), want)


@pytest.mark.quick
def test_an_int8_cache_is_close(params):
  tokens = _tokens(2, 12)
  full, _ = forward(params, _inputs(tokens), config=CONFIG)
  cache, prefill, pages = _paged(CONFIG, 2, 12, dtype=jnp.int8)
  step = functools.partial(forward, transformer.unstack(params), config=CONFIG)
  hidden, cache = step(_inputs(tokens[:, :9]), cache, prefill)
  at = np.full((2, 1), 9)
  last, _ = step(_inputs(tokens[:, 9:10], at), cache, pages)
  for got, want in ((hidden, full[:, :9]), (last, full[:, 9:10])):
    error = np.abs(got - want).max() / np.abs(want).max()
    assert 1e-5 < error < 0.03


@pytest.mark.quick
def test_cache_declares_its_axes():
  cache = transformer.init_cache(CONFIG, 3, 10, jnp.bfloat16)
  axes = transformer.cache_axes(CONFIG, jnp.bfloat16)
  sizes = {"pages": 3, "cache_heads": 2, "head_dim": 16, "length": 10}
  assert len(cache) == len(axes) == CONFIG.num_layers
  for entry, names in zip(cache, axes, strict=True):
    for key, value in entry.items():
      assert value.shape == tuple(sizes[n] for n in names[key])
      assert value.dtype == jnp.bfloat16


# -- rows, dtypes, gradient ----------------------------------------------------


@pytest.mark.quick
def test_packed_segments_equal_separate_rows(params):
  lengths, tokens = (4, 6), _tokens(2, 12)
  alone, _ = forward(params, _inputs(tokens), config=CONFIG)
  spans = (slice(1, 5), slice(5, 11))  # padding on both sides
  # The second row is padding alone.
  packed, positions, segments = np.zeros((3, 2, 12), int)
  for i, (n, span) in enumerate(zip(lengths, spans, strict=True)):
    packed[0, span], positions[0, span] = tokens[i, :n], np.arange(n)
    segments[0, span] = i + 1
  hidden, _ = forward(
    params, _inputs(packed, positions, segments), config=CONFIG
  )
  assert np.isfinite(hidden).all()
  for i, (n, span) in enumerate(zip(lengths, spans, strict=True)):
    np.testing.assert_allclose(hidden[0, span], alone[i, :n], atol=2e-5)


@pytest.mark.quick
def test_only_the_past_is_seen(params):
  tokens = _tokens(2, 12)
  other = tokens.copy()
  other[0, 5] += 1
  a, _ = forward(params, _inputs(tokens), config=CONFIG)
  b, _ = forward(params, _inputs(other % 64), config=CONFIG)
  np.testing.assert_array_equal(a[0, :5], b[0, :5])
  assert np.abs(a[0, 5:] - b[0, 5:]).max(-1).min() > 1e-3


def _loss(params, inputs, config, mesh=None):
  hidden, _ = transformer.forward(params, inputs, config=config, mesh=mesh)
  logits = hidden @ transformer.head(params, config)
  logprobs = jax.nn.log_softmax(logits[:, :-1])
  target = inputs.tokens[:, 1:, None]
  return -jnp.take_along_axis(logprobs, target, -1).mean()


_value_and_grad = jax.jit(
  jax.value_and_grad(_loss), static_argnames=("config", "mesh")
)


def _assert_trees_close(a, b, atol):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol), a, b)


def test_gradient_is_finite_and_the_same_unrolled(params):
  inputs = _inputs(_tokens(2, 8), segment_ids=np.repeat([[1], [0]], 8, axis=1))
  _, grads = _value_and_grad(params, inputs, CONFIG)
  for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
    assert np.isfinite(leaf).all(), path
    assert np.abs(leaf).max() > 0, path
  config = dataclasses.replace(CONFIG, unroll=1)
  _, other = _value_and_grad(params, inputs, config)
  _assert_trees_close(other, grads, 1e-6)


def test_remat_saves_memory_and_no_gradient_differs(params):
  inputs, found = _inputs(_tokens(8, 64)), {}
  for remat in ("none", "dots", "full"):
    config = dataclasses.replace(CONFIG, remat=remat, unroll=1)
    program = _value_and_grad.lower(params, inputs, config).compile()
    memory = program.memory_analysis().temp_size_in_bytes
    found[remat] = memory, program(params, inputs)[1]
  _assert_trees_close(found["dots"][1], found["none"][1], 1e-6)
  _assert_trees_close(found["full"][1], found["none"][1], 1e-6)
  none, dots, full = (found[remat][0] for remat in ("none", "dots", "full"))
  assert full < dots < 0.75 * none, (none, dots, full)


@pytest.mark.quick
def test_gradient_points_downhill(params):
  """The derivative along the gradient, by central difference."""
  inputs = _inputs(_tokens(2, 8))
  _, grads = _value_and_grad(params, inputs, CONFIG)
  norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
  eps = 1e-2

  def at(sign):
    moved = jax.tree.map(lambda p, g: p + sign * eps * g / norm, params, grads)
    return _value_and_grad(moved, inputs, CONFIG)[0]

  np.testing.assert_allclose((at(1) - at(-1)) / (2 * eps), norm, rtol=1e-2)


# -- mesh ----------------------------------------------------------------------


@pytest.mark.quick
def test_declares_axes_of_every_parameter():
  shapes = transformer.param_shapes(CONFIG)
  axes = transformer.param_axes(CONFIG)
  jax.tree.map(
    lambda s, a: [None] if len(s.shape) == len(a) else pytest.fail(f"{s} {a}"),
    shapes,
    axes,
  )
  assert axes["layers"]["attention"]["q"] == (
    "layers",
    "embed",
    "heads",
    "head_dim",
  )
  assert "head" not in transformer.param_axes(
    dataclasses.replace(CONFIG, tied=True)
  )


def test_sharded_equals_one_device(params, mesh):
  """Loss, gradient and decoding on data 2, fsdp 2, tensor 2; one compile."""
  where = sharding.shardings(
    transformer.param_axes(CONFIG), transformer.param_shapes(CONFIG), mesh
  )
  spread = jax.device_put(params, where)
  q = spread["layers"]["attention"]["q"]
  assert q.addressable_shards[0].data.shape == (2, 16, 2, 16)
  inputs = _inputs(_tokens(4, 8))
  laid = jax.tree.map(
    lambda x: jax.device_put(x, sharding.rows(mesh, x.ndim)), inputs
  )
  step = jax.jit(
    jax.value_and_grad(functools.partial(_loss, config=CONFIG, mesh=mesh)),
    out_shardings=(sharding.replicated(mesh), where),
  )
  loss, grads = _value_and_grad(params, inputs, CONFIG)
  for _ in range(2):
    loss_spread, grads_spread = step(spread, laid)
  assert step._cache_size() == 1
  np.testing.assert_allclose(loss_spread, loss, atol=1e-5)
  _assert_trees_close(grads_spread, grads, 1e-5)

  rows = inputs.tokens.shape[0]
  cache, _, pages = _paged(CONFIG, rows, 8)
  cache_where = sharding.shardings(
    transformer.cache_axes(CONFIG, jnp.float32), cache, mesh
  )
  cache = jax.device_put(cache, cache_where)
  decode = jax.jit(
    functools.partial(transformer.forward, config=CONFIG, mesh=mesh),
    out_shardings=(None, cache_where),
  )
  full, _ = forward(params, inputs, config=CONFIG)
  for i in range(8):
    column = Inputs(*(x[:, i : i + 1] for x in laid[:3]), laid.policy_index)
    hidden, cache = decode(spread, column, cache, pages)
    np.testing.assert_allclose(hidden[:, 0], full[:, i], atol=1e-5)
  assert decode._cache_size() == 1


# -- layers --------------------------------------------------------------------


@pytest.mark.quick
def test_scaled_rotation_bands():
  """Short wavelengths kept, long ones divided by factor, by hand."""
  scaling = layers.RopeScaling(8.0, 1.0, 4.0, 64)
  position = jnp.array([[1]])
  sin, cos = layers.rope_angles(position, 8, 1e4, scaling)
  plain_sin, plain_cos = layers.rope_angles(position, 8, 1e4, None)
  angles = np.arctan2(sin, cos).ravel()
  plain = np.arctan2(plain_sin, plain_cos).ravel()
  np.testing.assert_allclose(plain, [1.0, 0.1, 0.01, 0.001], rtol=1e-5)
  # Turns within 64 tokens: 10.2 (> 4), 1.019, 0.1019, 0.01 (< 1).
  mixed = (64 * 0.1 / (2 * np.pi) - 1) / 3
  expected = [1.0, mixed * 0.1 + (1 - mixed) * 0.1 / 8, 0.01 / 8, 0.001 / 8]
  np.testing.assert_allclose(angles, expected, rtol=1e-4)


# Case L06: Llama-3.2-1B, with what is unchanged, blended and divided.
LLAMA32 = layers.RopeScaling(32.0, 1.0, 4.0, 8192)


@pytest.mark.quick
def test_rotation_of_llama32():
  eight = layers.RopeScaling(8.0, 1.0, 4.0, 8192)
  table, plain, other = (
    layers.rope_frequencies(64, 5e5, scaling)
    for scaling in (LLAMA32, None, eight)
  )
  np.testing.assert_allclose(table, _numbers()["frequencies"], rtol=1e-6)
  given = {0: 1.0, 8: 0.0376060, 15: 0.00129055, 16: 0.000429557}
  given[31] = 9.41831e-08
  assert {i: float(f"{table[i]:.6g}") for i in given} == given
  assert f"{plain[15]:.6g}" == "0.00213112"
  assert f"{other[15]:.6g}" == "0.00137189"
  ratio = table / plain
  assert (ratio[:15] == 1).all()
  np.testing.assert_allclose(ratio[18:], 1 / 32, rtol=1e-6)
  assert ((ratio[15:18] < 1) & (ratio[15:18] > 1 / 32)).all()


@pytest.mark.quick
def test_angles_to_position_20000():
  """float32 positions times float32 frequencies, as transformers has it."""
  positions = np.arange(20_001)
  sin, cos = layers.rope_angles(jnp.asarray(positions)[None], 64, 5e5, LLAMA32)
  table = layers.rope_frequencies(64, 5e5, LLAMA32)
  angles = (positions[:, None].astype(np.float32) * table).astype(np.float64)
  np.testing.assert_allclose(sin[0, :, 0], np.sin(angles), atol=1e-6)
  np.testing.assert_allclose(cos[0, :, 0], np.cos(angles), atol=1e-6)


def test_frequencies_made_again():
  pytest.importorskip("torch", reason="the extra [parity] brings torch")
  np.testing.assert_allclose(
    make_numbers.compute_frequencies(), _numbers()["frequencies"], rtol=1e-6
  )


@pytest.mark.quick
def test_float32_products_are_exact_on_any_backend():
  """A TPU rounds operands to bfloat16 unless the product says otherwise."""
  x, w = jnp.ones((1, 2, 4)), jnp.ones((4, 3))
  assert "HIGHEST" in str(jax.make_jaxpr(layers.product)(x, w))
