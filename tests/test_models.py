"""The decoder: parity with transformers, cache, packing, gradient, mesh."""

import dataclasses
import functools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity import make_numbers
from safetensors.numpy import save_file

from drmas_jax import sharding
from drmas_jax.models import layers, transformer, weights
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


def _greedy(params, config, prompts, num_new):
  """Continuations through the cache, in one while loop over one-token steps."""
  rows, length = prompts.shape
  cache = transformer.init_cache(config, rows, length + num_new, jnp.float32)
  hidden, cache = transformer.forward(
    params, _inputs(prompts), cache, config=config
  )
  head = transformer.head(params, config)
  first = jnp.argmax(hidden[:, -1] @ head, -1).astype(jnp.int32)
  out = jnp.zeros((rows, num_new), jnp.int32).at[:, 0].set(first)

  def step(state):
    i, cache, out = state
    tokens = jax.lax.dynamic_slice_in_dim(out, i - 1, 1, axis=1)
    positions = jnp.full((rows, 1), length + i - 1)
    hidden, cache = transformer.forward(
      params, _inputs(tokens, positions), cache, config=config
    )
    token = jnp.argmax(hidden @ head, -1).astype(jnp.int32)
    return i + 1, cache, jax.lax.dynamic_update_slice(out, token, (0, i))

  return jax.lax.while_loop(lambda s: s[0] < num_new, step, (1, cache, out))[2]


QUICK = ("llama32", "qwen2", "qwen3")  # one of each family


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(n, marks=[pytest.mark.quick] if n in QUICK else [])
    for n in make_numbers.CASES
  ],
)
def test_equals_transformers(name, tmp_path):
  config, params = _checkpoint(name, tmp_path)
  prompts = make_numbers.prompts(name)
  hidden, _ = forward(params, _inputs(prompts), config=config)
  logits = hidden @ transformer.head(params, config)
  np.testing.assert_allclose(
    logits, _numbers()[f"{name}/logits"], rtol=0, atol=1e-4
  )
  greedy = jax.jit(_greedy, static_argnums=(1, 3))
  ids = greedy(transformer.unstack(params), config, prompts, 16)
  np.testing.assert_array_equal(ids, _numbers()[f"{name}/ids"])


@pytest.mark.parametrize("name", make_numbers.CASES)
def test_numbers_made_again(name):
  pytest.importorskip("torch", reason="the extra [parity] brings torch")
  for key, value in make_numbers.compute(name).items():
    np.testing.assert_allclose(
      value, _numbers()[f"{name}/{key}"], rtol=0, atol=1e-5
    )


@pytest.mark.slow
def test_real_checkpoint_equals_transformers():
  """DRMAS_SMOLLM2=FOLDER pytest -m slow tests/test_models.py"""
  folder = os.environ.get("DRMAS_SMOLLM2")
  if not folder:
    pytest.skip("set DRMAS_SMOLLM2 to a checkpoint folder")
  torch = pytest.importorskip("torch", reason="the extra [parity] brings it")
  import transformers

  config = weights.read_config(folder)
  params = weights.load(folder, config)
  tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 64))
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32
  )
  with torch.no_grad():
    expected = model(torch.from_numpy(tokens)).logits.numpy()
  hidden, _ = forward(params, _inputs(tokens), config=config)
  logits = hidden @ transformer.head(params, config)
  np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-3)


# -- cache ---------------------------------------------------------------------


@pytest.mark.quick
def test_cached_decode_equals_full_forward(params):
  """Rows of different lengths, prefill, a continued prefix, single steps."""
  tokens = _tokens(2, 12)
  full, _ = forward(params, _inputs(tokens), config=CONFIG)
  layered = transformer.unstack(params)
  cache = transformer.init_cache(CONFIG, 2, 12, jnp.float32)
  # What lies beyond a row's position may be anything.
  cache = jax.tree.map(lambda x: x + 1e3, cache)
  step = functools.partial(forward, layered, config=CONFIG)
  _, cache = step(_inputs(tokens[:, :5]), cache)
  starts = np.array([5, 3])  # the second row's last two were padding
  rows = np.arange(2)[:, None]
  positions = starts[:, None] + np.arange(4)
  hidden, cache = step(_inputs(tokens[rows, positions], positions), cache)
  np.testing.assert_allclose(hidden, full[rows, positions], atol=2e-5)
  for i in range(3):
    positions = starts[:, None] + 4 + i
    hidden, cache = step(_inputs(tokens[rows, positions], positions), cache)
    np.testing.assert_allclose(hidden, full[rows, positions], atol=2e-5)


@pytest.mark.quick
def test_writes_beyond_the_cache_are_dropped(params):
  """A continued prefix's padding may reach over the end."""
  tokens = _tokens(2, 12)
  full, _ = forward(params, _inputs(tokens), config=CONFIG)
  step = functools.partial(forward, transformer.unstack(params), config=CONFIG)
  cache = transformer.init_cache(CONFIG, 2, 12, jnp.float32)
  _, cache = step(_inputs(tokens[:, :5]), cache)
  _, cache = step(
    _inputs(tokens[:, 5:9], np.tile(np.arange(5, 9), (2, 1))), cache
  )
  padded = np.pad(tokens[:, 9:], ((0, 0), (0, 1)))
  hidden, _ = step(_inputs(padded, np.tile(np.arange(9, 13), (2, 1))), cache)
  np.testing.assert_allclose(hidden[:, :3], full[:, 9:], atol=2e-5)


@pytest.mark.quick
def test_cache_declares_its_axes():
  cache = transformer.init_cache(CONFIG, 3, 10, jnp.bfloat16)
  axes = transformer.cache_axes(CONFIG)
  sizes = {"slots": 3, "kv_heads": 2, "head_dim": 16, "length": 10}
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


def test_bfloat16_is_close(params):
  tokens = _inputs(_tokens(2, 12))
  exact, _ = forward(params, tokens, config=CONFIG)
  half = dataclasses.replace(CONFIG, compute_dtype="bfloat16")
  hidden, _ = forward(params, tokens, config=half)
  assert hidden.dtype == jnp.bfloat16
  error = np.abs(np.asarray(hidden, np.float32) - exact).mean()
  assert 0 < error < 0.05 * np.abs(exact).mean()


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


def test_gradient_is_finite_and_the_same_with_remat_and_unroll(params):
  inputs = _inputs(_tokens(2, 8), segment_ids=np.repeat([[1], [0]], 8, axis=1))
  _, grads = _value_and_grad(params, inputs, CONFIG)
  for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
    assert np.isfinite(leaf).all(), path
    assert np.abs(leaf).max() > 0, path
  config = dataclasses.replace(CONFIG, remat=True, unroll=1)
  _, other = _value_and_grad(params, inputs, config)
  _assert_trees_close(other, grads, 1e-6)


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
  laid = Inputs(
    *(jax.device_put(x, sharding.rows(mesh, x.ndim)) for x in inputs)
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

  cache_where = sharding.shardings(
    transformer.cache_axes(CONFIG),
    transformer.init_cache(CONFIG, 4, 8, jnp.float32),
    mesh,
  )
  cache = jax.device_put(
    transformer.init_cache(CONFIG, 4, 8, jnp.float32), cache_where
  )
  decode = jax.jit(
    functools.partial(transformer.forward, config=CONFIG, mesh=mesh),
    out_shardings=(None, cache_where),
  )
  full, _ = forward(params, inputs, config=CONFIG)
  for i in range(8):
    column = Inputs(*(x[:, i : i + 1] for x in laid[:3]), laid.policy_index)
    hidden, cache = decode(spread, column, cache)
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


@pytest.mark.quick
def test_float32_products_are_exact_on_any_backend():
  """A TPU rounds operands to bfloat16 unless the product says otherwise."""
  x, w = jnp.ones((1, 2, 4)), jnp.ones((4, 3))
  assert "HIGHEST" in str(jax.make_jaxpr(layers.product)(x, w))
