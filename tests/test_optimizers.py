"""Rules by hand, their shards, the host's memory, and checkpoints of them."""

import dataclasses
import functools
import importlib.util
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from drmas_jax import config as config_lib
from drmas_jax import optimizers, sharding
from drmas_jax.checkpoint import Checkpoints, Run
from drmas_jax.models import adapters, transformer
from drmas_jax.types import TrainState

RULES = tuple(optimizers.OPTIMIZERS)
MODEL = transformer.DecoderConfig(
  family="qwen2",
  vocab_size=32,
  embed_dim=16,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=4,
  mlp_dim=24,
  max_positions=64,
  qkv_bias=True,
)
# One parameter of each kind.
AXES = {
  "embedding": ("vocab", "embed"),
  "layers": {
    "q": ("layers", "embed", "heads", "head_dim"),
    "o": ("layers", "heads", "head_dim", "embed"),
    "bias": ("layers", "heads", "head_dim"),
    "norm": ("layers", "embed"),
  },
}
SHAPES = {
  "embedding": (256, 128),
  "layers": {
    "q": (2, 128, 4, 64),
    "o": (2, 4, 64, 128),
    "bias": (2, 4, 64),
    "norm": (2, 128),
  },
}


def settings(name="adamw", **changes):
  """Decay 0 and no clip unless asked for."""
  plain = {"learning_rate": 0.01, "weight_decay": 0.0, "clip_norm": 1e9}
  return config_lib.Optimizer(name=name, **plain | changes)


def first_step(config, axes, grad, param):
  """Of one parameter."""
  tx = optimizers.make_optimizer(config, {"w": axes})
  params = {"w": jnp.asarray(param)}
  updates, _ = jax.jit(lambda g, p: tx.update(g, tx.init(p), p))(
    {"w": jnp.asarray(grad)}, params
  )
  return np.asarray(updates["w"])


@functools.cache
def values(seed):
  """A tree like the parameters, on the host."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda s: np.float32(rng.normal(size=s)),
    SHAPES,
    is_leaf=lambda s: isinstance(s, tuple),
  )


def mesh_of(*shape):
  devices = np.array(jax.devices()[: np.prod(shape)])
  return jax.sharding.Mesh(devices.reshape(shape), sharding.AXES)


def layout(config):
  """Shardings of parameters and state on 8 devices."""
  mesh = mesh_of(2, 2, 2)
  return TrainState(
    sharding.replicated(mesh),
    sharding.shardings(AXES, values(0), mesh),
    optimizers.state_shardings(config, AXES, values(0), mesh),
  )


@functools.cache
def programs(config):
  """(new state, one update with a gradient)."""
  where, tx = layout(config), optimizers.make_optimizer(config, AXES)

  def init(params):
    return TrainState(jnp.zeros([], jnp.int32), params, tx.init(params))

  def step(state, grads):
    updates, own = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(state.step + 1, params, own)

  return (
    jax.jit(init, out_shardings=where),
    jax.jit(step, out_shardings=where, donate_argnums=0),
  )


def copy(state):
  return jax.tree.map(
    lambda x: jax.device_put(np.asarray(x), x.sharding), state
  )


def assert_equal(one, two):
  jax.tree.map(np.testing.assert_array_equal, *jax.device_get((one, two)))


# -- numbers -------------------------------------------------------------------


@pytest.mark.quick
def test_schedules():
  constant = settings(learning_rate=2.0)
  assert float(optimizers.make_schedule(constant)(7)) == 2.0
  rising = dataclasses.replace(
    constant,
    warmup_steps=4,
    schedule="cosine",
    decay_steps=10,
    final_fraction=0.5,
  )
  rate = optimizers.make_schedule(rising)
  np.testing.assert_allclose(
    [rate(i) for i in range(5)], [0.5, 1.0, 1.5, 2.0, 2.0], rtol=1e-6
  )
  np.testing.assert_allclose(rate(4 + 10), 1.0, rtol=1e-6)
  linear = dataclasses.replace(rising, schedule="linear")
  np.testing.assert_allclose(optimizers.make_schedule(linear)(4 + 5), 1.5)


@pytest.mark.quick
def test_adamw_begins_with_the_sign_of_the_gradient():
  config = settings(eps=1e-12, weight_decay=0.1)
  step = first_step(config, ("embed",), [3.0, -1e-4, 0.0], [1.0, 2.0, -4.0])
  # - rate (sign + decay p)
  np.testing.assert_allclose(step, [-0.011, 0.008, 0.004], rtol=1e-4)


@pytest.mark.quick
def test_the_gradient_is_clipped_by_the_norm_of_all():
  """With an epsilon far above the gradient a step is proportional to it."""
  axes = {"a": ("embed",), "b": ("layers", "embed")}
  tx = optimizers.make_optimizer(settings(eps=1e3, clip_norm=0.5), axes)
  grads = {"a": jnp.array([3.0]), "b": jnp.array([[0.0], [4.0]])}
  updates, _ = jax.jit(lambda g: tx.update(g, tx.init(g), g))(grads)
  flat = [float(updates["a"][0]), *map(float, updates["b"][:, 0])]
  np.testing.assert_allclose(flat, [-3e-6, 0, -4e-6], rtol=1e-3)


@pytest.mark.quick
def test_adafactor_takes_each_layers_matrix_by_itself():
  """The first gradient's rows and columns explain it whole if it is of rank
  one: a sign, times the root mean square of that layer's parameter."""
  rng = np.random.default_rng(0)
  rows, columns = rng.normal(size=(2, 128, 1)), rng.normal(size=(2, 1, 160))
  grad = (rows * columns).astype(np.float32).reshape(2, 128, 2, 80)
  axes = ("layers", "embed", "heads", "head_dim")
  param = np.ones_like(grad) * np.array([3.0, -1e-5])[:, None, None, None]
  config = settings("adafactor", weight_decay=0.5)
  step = first_step(config, axes, grad, param)
  # At least 1e-3 for the second layer's.
  want = np.sign(grad) * np.array([3.0, 1e-3])[:, None, None, None]
  np.testing.assert_allclose(step, -0.01 * (want + 0.5 * param), rtol=1e-3)
  state = optimizers.state_shapes(
    config, axes, jax.ShapeDtypeStruct(grad.shape, grad.dtype)
  )
  moments = [x.shape for x in jax.tree.leaves(state) if x.size > 2]
  assert moments == [(2, 128), (2, 160)]


@pytest.mark.quick
@pytest.mark.parametrize(
  ("axes", "shape"),
  [
    (("layers", "embed", "kv_heads", "head_dim"), (8, 2, 4)),
    (("layers", "heads", "head_dim", "embed"), (2, 4, 8)),
    (("layers", "mlp", "embed"), (8, 8)),
  ],
)
def test_muon_multiplies_equal_singular_values_alike(axes, shape):
  """Of an orthogonal gradient all are 8^-1/2 once it is normed, and five steps
  of a quintic polynomial take them near 1."""
  rng = np.random.default_rng(1)
  size = 8
  turns = [np.linalg.qr(rng.normal(size=(size, size)))[0] for _ in range(2)]
  grad = np.float32(np.stack([turns[0] * 5, turns[1] * 1e-3]))
  value = size**-0.5
  for _ in range(5):
    value = 3.4445 * value - 4.775 * value**3 + 2.0315 * value**5
  assert 0.7 < value < 1.2
  want = -0.01 * 0.2 * size**0.5 * value * np.stack(turns)
  param = np.full((2, *shape), 2.0, np.float32)
  config = settings("muon", weight_decay=0.5)
  step = first_step(config, axes, grad.reshape(2, *shape), param)
  decay = -0.01 * 0.5 * 2.0
  np.testing.assert_allclose(
    step.reshape(2, size, size) - decay, want, atol=2e-5
  )


@pytest.mark.quick
def test_muon_has_the_matrices_of_layers_and_of_adapters():
  def matrices(axes, shapes):
    state = optimizers.state_shapes(settings("muon"), axes, shapes)
    return {
      "/".join(key.key for key in path if hasattr(key, "key"))
      for path, _ in jax.tree.flatten_with_path(state)[0]
      if path[-1] == jax.tree_util.GetAttrKey("ns_coeffs")
    }

  attention = {f"attention/{name}" for name in "qkvo"}
  mlp = {f"mlp/{name}" for name in ("gate", "up", "down")}
  both = attention | mlp
  axes, shapes = map(
    lambda of: of(MODEL), (transformer.param_axes, transformer.param_shapes)
  )
  assert matrices(axes, shapes) == {f"layers/{name}" for name in both}
  adapter = config_lib.Adapter(rank=2)
  found = matrices(
    adapters.axes(axes["layers"], adapter),
    adapters.shapes(shapes["layers"], adapter, 3),
  )
  assert found == {f"{name}/{side}" for name in both for side in "ab"}


@pytest.mark.quick
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_descends(rule):
  axes = {
    "q": ("layers", "embed", "heads", "head_dim"),
    "norm": ("layers", "embed"),
    "embedding": ("vocab", "embed"),
  }
  shapes = {"q": (2, 8, 2, 4), "norm": (2, 8), "embedding": (16, 8)}
  rng = np.random.default_rng(0)
  params = {n: jnp.asarray(rng.normal(size=s)) for n, s in shapes.items()}
  tx = optimizers.make_optimizer(settings(rule, learning_rate=0.05), axes)

  def step(carry, _):
    params, state = carry
    grads = jax.tree.map(lambda p: 2 * (p - 1), params)
    updates, state = tx.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), None

  after, _ = jax.jit(
    lambda p: jax.lax.scan(step, (p, tx.init(p)), length=60)[0]
  )(params)
  for name, p in params.items():
    assert np.square(after[name] - 1).sum() < np.square(p - 1).sum() / 2, name


@pytest.mark.quick
@pytest.mark.parametrize("rule", RULES)
def test_policies_are_apart(rule):
  """`vmap` over adapters: each with its own clip, moments and `live`."""
  weights = transformer.param_shapes(MODEL)["layers"]
  adapter = config_lib.Adapter(rank=2, targets=("q",))
  axes = adapters.axes(transformer.param_axes(MODEL)["layers"], adapter)
  axes = jax.tree.map(lambda a: a[1:], axes, is_leaf=sharding.is_axes)
  shapes = adapters.shapes(weights, adapter, 3)
  rng = np.random.default_rng(2)
  params, grads = (
    jax.tree.map(lambda s: np.float32(rng.normal(size=s.shape)), shapes)
    for _ in range(2)
  )
  for leaf in jax.tree.leaves(grads):
    leaf[1] = np.nan
  tx = optimizers.make_optimizer(settings(rule, clip_norm=0.5), axes)
  start = jax.jit(jax.vmap(tx.init))(params)
  update = jax.jit(
    jax.vmap(lambda g, s, p, live: tx.update(g, s, p, live=live))
  )
  live = np.array([True, False, True])
  updates, state = jax.device_get(update(grads, start, params, live))
  still = jax.tree.map(lambda x: x[1], (updates, state))
  assert_equal(still[1], jax.tree.map(lambda x: x[1], jax.device_get(start)))
  assert not any(map(np.any, jax.tree.leaves(still[0])))
  alone = jax.jit(lambda g, p: tx.update(g, tx.init(p), p))
  for k in (0, 2):
    own = jax.tree.map(lambda x, k=k: x[k], (grads, params, (updates, state)))
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7),
      alone(*own[:2]),
      own[2],
    )


# -- arrays --------------------------------------------------------------------


def gradients(step):
  return jax.tree.map(lambda x: 3 * np.sin(x + step), values(step))


@functools.cache
def straight(config):
  """Four updates: (the state after two, and on the host after four)."""
  init, step = programs(config)
  where, halfway = layout(config), None
  state = init(jax.device_put(values(0), where.params))
  for i in range(4):
    state = step(state, gradients(i))
    for x, want in zip(
      jax.tree.leaves(state), jax.tree.leaves(where), strict=True
    ):
      assert x.sharding.is_equivalent_to(want, x.ndim)
      assert x.sharding.memory_kind == want.memory_kind
    if i == 1:
      halfway = copy(state)
  assert step._cache_size() == 1
  return halfway, jax.device_get(state)


@pytest.mark.parametrize("rule", RULES)
def test_shardings_stay_and_nothing_large_is_whole(rule):
  _, state = straight(settings(rule))
  where = layout(settings(rule)).opt_state
  total = 0
  for x, s in zip(
    jax.tree.leaves(state.opt_state), jax.tree.leaves(where), strict=True
  ):
    assert x.size <= 8 or s.shard_shape(x.shape) != x.shape, (x.shape, s)
    total += x.nbytes
  params = sum(x.nbytes for x in jax.tree.leaves(state.params))
  shares = {"adamw": (2, 2.01), "adafactor": (0, 0.05), "muon": (1, 1.3)}
  least, most = shares[rule]
  assert least <= total / params <= most


def test_adamw_is_optaxs():
  tx = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(0.01, weight_decay=0.1)
  )
  config = settings(weight_decay=0.1, clip_norm=1.0)
  params = values(0)
  state = tx.init(params)
  update = jax.jit(tx.update)
  for i in range(4):
    updates, state = update(gradients(i), state, params)
    params = optax.apply_updates(params, updates)
  _, ours = straight(config)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
    ours.params,
    params,
  )


def test_an_offloaded_state_is_in_the_hosts_memory():
  _, here = straight(settings())
  halfway, there = straight(settings(offload=True))
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6),
    here,
    there,
  )
  kinds = {"device": 0, "pinned_host": 0}
  for x in jax.tree.leaves(halfway.opt_state):
    kinds[x.sharding.memory_kind] += x.nbytes
  assert kinds["pinned_host"] > 50 * kinds["device"]
  assert {x.sharding.memory_kind for x in jax.tree.leaves(halfway.params)} == {
    "device"
  }


def test_saved_and_gone_on_with(tmp_path):
  """Rule 25, for each rule, and for a state in the host's memory."""
  chosen = {rule: settings(rule) for rule in RULES}
  chosen["aside"] = settings(offload=True)
  run = Run(2, 0, {}, dict.fromkeys(chosen, 2))
  store = Checkpoints(tmp_path)
  store.save(run, {n: straight(c)[0] for n, c in chosen.items()})
  store.close()
  abstract = {
    name: jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      straight(config)[1],
      layout(config),
    )
    for name, config in chosen.items()
  }
  states, _ = Checkpoints(tmp_path).restore(abstract)
  for name, config in chosen.items():
    _, step = programs(config)
    state = states[name]
    for i in (2, 3):
      state = step(state, gradients(i))
    assert step._cache_size() == 1  # its shardings and memories are a state's
    assert_equal(state, straight(config)[1])


@pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="needs the package libtpu, which compiles for TPUs",
)
@pytest.mark.parametrize(
  "what",
  [
    "adamw",
    pytest.param("muon", marks=pytest.mark.slow),
    pytest.param("adamw adapters", marks=pytest.mark.slow),
  ],
)
def test_an_offloaded_state_compiles_for_a_tpu(root, what):
  worker = root / "tests" / "tpu_optimizers.py"
  done = subprocess.run(
    [sys.executable, worker, "v5e:2x2", *what.split()],
    capture_output=True,
    text=True,
    timeout=400,
  )
  assert done.returncode == 0, done.stderr[-4000:]
  cases = json.loads(done.stdout.splitlines()[-1])
  print(cases)
  here, there = cases["device"], cases["host"]
  assert here["host"] == 0
  if what == "adamw":  # element-wise: XLA needs no copy of a moment
    assert here["temporary"] < 0.15 * here["device"]
  # What is there is no longer here,
  moved = here["device"] - there["device"]
  assert 0 < moved <= 1.01 * there["host"] <= 1.02 * moved
  # and does not come back as a whole.
  assert there["temporary"] - here["temporary"] < 0.6 * moved
