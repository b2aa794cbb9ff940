"""Slices on 8 fake devices: plans, their bytes, refusals, and moves."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from drmas_jax import backbone, engine, learner, placement, sharding
from drmas_jax import config as config_lib
from drmas_jax.models import transformer

pytestmark = pytest.mark.quick

MODEL = transformer.DecoderConfig(
  family="llama3",
  vocab_size=32,
  embed_dim=16,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=4,
  mlp_dim=24,
  max_positions=64,
  tied=True,
)
POLICY = config_lib.Policy(
  checkpoint="none",
  micro_tokens=128,
  engine=config_lib.Engine(num_slots=8, max_length=16, prefill_rows=8),
)


def make_config(names=("solver", "verifier"), policy=POLICY, **placement_):
  return config_lib.Config(
    policies=dict.fromkeys(names, policy),
    agents={},
    orchestra=config_lib.Orchestra("single"),
    environment=config_lib.Environment("math"),
    data=config_lib.Data(config_lib.Source("arithmetic")),
    placement=config_lib.Placement(**placement_),
  )


def make_plan(**kwargs):
  config = make_config(**kwargs)
  return placement.plan(config, dict.fromkeys(config.policies, MODEL))


def ids(mesh):
  return [d.id for d in mesh.devices.flat]


def engines(part):
  """Devices of each engine of a slice."""
  return [ids(mesh) for mesh in part.rollout_meshes]


# -- plans ---------------------------------------------------------------------


def test_shared_gives_everyone_all_devices():
  plan = make_plan()
  for part in plan.slices.values():
    assert ids(part.train_mesh) == list(range(8))
    assert engines(part) == [[i] for i in range(8)]
    assert part.train_mesh.axis_names == ("data", "fsdp", "tensor")
    assert part.train_mesh.devices.shape == (1, 8, 1)


@pytest.mark.parametrize("strategy", ["split", "columns"])
def test_slices_are_disjoint(strategy):
  plan = make_plan(strategy=strategy)
  assert ids(plan.slices["solver"].train_mesh) == [0, 1, 2, 3]
  assert ids(plan.slices["verifier"].train_mesh) == [4, 5, 6, 7]


@pytest.mark.parametrize(
  "num_slots, cpu", [(1, 1), (32, 32), (33, 17), (100, 25), (128, 32)]
)
def test_slots_are_decoded_in_equal_parts_on_cpu(num_slots, cpu, monkeypatch):
  sizes = config_lib.Engine(num_slots=num_slots)
  assert placement.lanes(sizes) == cpu
  monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
  assert placement.lanes(sizes) == num_slots


def test_unequal_shares_and_devices_set_aside_for_rollout():
  plan = make_plan(
    strategy="split",
    shares={"solver": 3},
    rollout_devices=1,
  )
  solver, verifier = plan.slices["solver"], plan.slices["verifier"]
  assert ids(solver.train_mesh) == [0, 1, 2, 3, 4]
  assert engines(solver) == [[5]]
  assert ids(verifier.train_mesh) == [6]
  assert engines(verifier) == [[7]]


@pytest.mark.parametrize(
  ("mesh", "shape", "devices"),
  [
    ({"data": 2, "fsdp": 2, "tensor": 1}, (1, 2, 1), [[0, 1], [2, 3]]),
    ({"data": 0, "fsdp": 1, "tensor": 2}, (1, 1, 2), [[0, 1], [2, 3]]),
    ({"data": 1, "fsdp": 2, "tensor": 0}, (1, 2, 2), [[0, 1, 2, 3]]),
    ({"data": 4, "fsdp": 1, "tensor": 1}, (1, 1, 1), [[0], [1], [2], [3]]),
  ],
)
def test_data_is_the_number_of_engines_of_a_policy(mesh, shape, devices):
  """Each on devices of its own; slots and prefill rows need not divide."""
  odd = dataclasses.replace(POLICY.engine, num_slots=7, prefill_rows=3)
  policy = dataclasses.replace(POLICY, engine=odd)
  plan = make_plan(
    strategy="split", policy=policy, rollout_mesh=config_lib.Mesh(**mesh)
  )
  for part, first in ((plan.slices["solver"], 0), (plan.slices["verifier"], 4)):
    assert engines(part) == [[first + i for i in own] for own in devices]
    assert {m.devices.shape for m in part.rollout_meshes} == {shape}


def test_columns_take_the_same_devices_of_every_host():
  config = make_config(
    strategy="columns",
    shares={"solver": 3},
    train_mesh=config_lib.Mesh(data=2, fsdp=0),
  )
  layouts = placement.lay_out(config, num_hosts=2, num_local=4)
  assert layouts == {
    "solver": placement.Layout(
      (0, 1, 2), ((0,), (1,), (2,)), (2, 3, 1), (1, 1, 1)
    ),
    "verifier": placement.Layout((3,), ((3,),), (2, 1, 1), (1, 1, 1)),
  }


@pytest.mark.parametrize(
  ("hosts", "kwargs", "parts"),
  [
    (2, {"strategy": "split"}, ("'split'", "2", "'columns'")),
    (1, {"shares": {"solver": 2}}, ("placement.shares", "no effect")),
    (
      1,
      {"strategy": "split", "shares": {"solver": 2}},
      ("placement.shares", "3", "8 devices", "'shared'"),
    ),
    (
      1,
      {"strategy": "split", "rollout_devices": 4},
      ("placement.rollout_devices: 4", "less than 4"),
    ),
    (
      1,
      {"train_mesh": config_lib.Mesh(data=3)},
      ("train_mesh: data=3 x fsdp=0", "8 devices of 'solver'"),
    ),
    (
      1,
      {"train_mesh": config_lib.Mesh(data=2, fsdp=2)},
      ("data=2 x fsdp=2 x tensor=1", "product is 8"),
    ),
    (
      1,
      {"rollout_mesh": config_lib.Mesh(data=0, fsdp=0)},
      ("placement.rollout_mesh", "fsdp a size"),
    ),
    (
      2,
      {"train_mesh": config_lib.Mesh(tensor=16)},
      ("train_mesh.tensor: 16 reaches over hosts", "divisors of the 8"),
    ),
  ],
)
def test_what_does_not_lay_out_is_refused(hosts, kwargs, parts):
  with pytest.raises(config_lib.ConfigError) as e:
    placement.lay_out(make_config(**kwargs), num_hosts=hosts, num_local=8)
  for part in parts:
    assert part in str(e.value)


def test_every_device_gets_a_row_and_the_plan_knows_it():
  """However few the tokens of a micro-batch; then, as many rows as they hold,
  of the row length that takes the most memory."""

  def update(tokens, devices, buckets=(16,)):
    policy = dataclasses.replace(
      POLICY, micro_tokens=tokens, row_buckets=buckets
    )
    config = make_config(("solver",), policy)
    layout = placement.lay_out(config, 1, devices)["solver"]
    size = placement.measure([policy], MODEL, layout)
    # The parameters are divided too: what is left is of the activations.
    return size.update - 2 * size.state // 3

  assert update(1, 1) == update(1, 4) == update(64, 4) == update(127, 4)
  assert update(16, 1) == update(31, 1) < update(32, 1) == update(64, 2)
  # Attention over 16 costs more a token than over 12; 2 rows of 12 fill 24.
  assert update(24, 1, (12, 16)) == update(24, 1, (12, 12)) > update(16, 1)


# -- bytes ---------------------------------------------------------------------


def test_bytes_of_a_small_example_by_hand():
  shapes = {
    "w": jax.ShapeDtypeStruct((16, 24), jnp.float32),
    "norm": jax.ShapeDtypeStruct((6,), jnp.float32),
  }
  axes = {"w": ("embed", "mlp"), "norm": ("embed",)}
  mesh = jax.sharding.AbstractMesh((1, 4, 2), sharding.AXES)
  # w: 4 x 12 floats on a device; norm does not divide by 4 and stays whole.
  assert placement.tree_bytes(shapes, axes, mesh) == 4 * (4 * 12 + 6)
  assert placement.tree_bytes(shapes, axes, mesh, "bfloat16") == 2 * 54


@pytest.mark.parametrize("rule", ["adamw", "adafactor", "muon"])
def test_bytes_of_the_arrays_are_those_of_real_ones(rule):
  policy = dataclasses.replace(
    POLICY, optimizer=config_lib.Optimizer(name=rule)
  )
  plan = make_plan(names=("solver",), policy=policy)
  size = placement.measure([policy], MODEL, plan.layouts["solver"])
  mesh = plan.slices["solver"].train_mesh
  spec = learner.Spec(MODEL, mesh, None, policy.optimizer, 1, 32)
  state = jax.tree.map(
    lambda x, s: jax.device_put(np.zeros(x.shape, x.dtype), s),
    learner.state_shapes(spec),
    learner.state_shardings(spec),
  )
  held = sum(
    x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state)
  )
  assert size.state == held - state.step.nbytes


def test_an_offloaded_state_visits_its_devices(monkeypatch):
  offloaded = dataclasses.replace(
    POLICY, optimizer=config_lib.Optimizer(offload=True)
  )
  layout = placement.lay_out(make_config(), 1, 8)["solver"]

  def measure():
    return [placement.measure([p], MODEL, layout) for p in (POLICY, offloaded)]

  whole, same = measure()  # the memory of a CPU is the host's
  assert whole == same
  monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
  whole, aside = measure()
  assert aside.state < whole.state / 2
  assert whole.update < aside.update < whole.update + whole.state - aside.state
  kinds = [types.SimpleNamespace(kind="device")]
  device = types.SimpleNamespace(
    addressable_memories=lambda: kinds, device_kind="abacus"
  )
  config = make_config(policy=offloaded)
  with pytest.raises(config_lib.ConfigError, match="offload: True needs"):
    placement._check_host_memory(config, device)
  kinds.append(types.SimpleNamespace(kind="pinned_host"))
  placement._check_host_memory(config, device)


@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"cache_dtype": "int8", "page_size": 4},
    {"cache_dtype": "bfloat16", "cache_tokens": 50, "page_size": 16},
  ],
)
def test_bytes_of_an_engine_are_those_of_real_arrays(changes):
  sizes = dataclasses.replace(POLICY.engine, num_slots=3, **changes)
  policy = dataclasses.replace(POLICY, engine=sizes)
  plan = make_plan(
    names=("solver",),
    policy=policy,
    rollout_mesh=config_lib.Mesh(data=2, fsdp=2, tensor=2),
  )
  part = plan.slices["solver"]
  tokenizer = types.SimpleNamespace(stop_ids=(1,), vocab_size=32)
  mesh = part.rollout_meshes[1]
  spec = backbone._engine_spec(policy, MODEL, mesh, tokenizer)
  made = engine.PolicyEngine(spec)
  made.num_pages = spec.max_pages
  made.resume(None, 0)
  held = {device: 0 for device in mesh.devices.flat}
  for leaf in jax.tree.leaves(made.state.cache):
    for shard in leaf.addressable_shards:
      held[shard.device] += shard.data.nbytes
  assert set(held.values()) == {placement.cache_bytes(policy, MODEL, mesh)}


def test_what_decoding_works_on_is_no_larger_than_the_pool():
  """The plan counts it as large as that."""
  sizes = config_lib.Engine(num_slots=5, max_length=1024, page_size=64)
  policy = dataclasses.replace(POLICY, engine=sizes)
  mesh = make_plan(names=("solver",)).slices["solver"].rollout_meshes[0]
  tokenizer = types.SimpleNamespace(stop_ids=(1,), vocab_size=32)
  spec = backbone._engine_spec(policy, MODEL, mesh, tokenizer)
  full = [range(1, 1 + spec.pages_per_row)] * 5
  ids, _ = engine.PolicyEngine(spec)._in_a_row(full)
  assert len(ids) == 1 + 5 * 16 <= placement.pool(sizes)[0]


def test_the_pool_holds_what_the_slots_or_the_config_ask_for():
  sizes = config_lib.Engine(num_slots=3, max_length=130)
  assert placement.pool(sizes) == (3 + 3 * 3, 64)
  sizes = dataclasses.replace(sizes, page_size=16)
  assert placement.pool(sizes) == (3 + 3 * 9, 16)
  sizes = dataclasses.replace(sizes, cache_tokens=200)
  assert placement.pool(sizes) == (3 + 13, 16)


def test_a_pool_costs_what_it_may_hold_and_prefills_no_square(monkeypatch):
  """Memory follows the tokens of the cache, whatever one sequence may have."""

  def needs(**changes):
    sizes = dataclasses.replace(POLICY.engine, **changes)
    policy = dataclasses.replace(POLICY, engine=sizes)
    layout = placement.lay_out(make_config(), 1, 8)["solver"]
    return placement.measure([policy], MODEL, layout).engine

  one, two, four = (
    needs(max_length=n, cache_tokens=8192) for n in (512, 1024, 2048)
  )
  assert four - two == 2 * (two - one), "a prefill grows with its tokens"
  half = {"cache_tokens": 4096, "max_length": 1024, "num_slots": 8}
  many = half | {"num_slots": 64}
  assert needs(**many) > needs(**half), "each may have a copy of all its pages"
  monkeypatch.setattr(transformer, "fused", lambda *args: True)
  assert needs(**many) == needs(**half)


def test_phases_do_not_add_up_where_slices_are_shared():
  names = ("solver", "verifier")
  config = make_config(names)
  layouts = placement.lay_out(config, 1, 8)
  size = placement.measure([POLICY], MODEL, layouts["solver"])
  found = placement.memory(config, dict.fromkeys(names, MODEL), layouts)
  assert found["rollout"] == (2 * size.state + 2 * size.engine,) * 8
  assert found["update"] == (2 * size.state + size.update,) * 8
  assert found["score"] == (2 * size.state,) * 8  # nothing is scored again


def test_a_frozen_policy_has_no_moments_and_no_update():
  frozen = dataclasses.replace(POLICY, frozen=True)
  layout = placement.lay_out(make_config(), 1, 8)["solver"]
  trained, still = (
    placement.measure([p], MODEL, layout) for p in (POLICY, frozen)
  )
  assert still.state * 3 <= trained.state
  assert still.update == 0 < trained.update


def test_devices_set_aside_hold_the_engine_alone():
  policy = dataclasses.replace(POLICY, micro_tokens=192, old_logprobs="learner")
  plan = make_plan(names=("solver",), rollout_devices=2, policy=policy)
  size = placement.measure([policy], MODEL, plan.layouts["solver"])
  assert plan.memory["rollout"] == (size.state,) * 6 + (size.engine,) * 2
  assert plan.memory["score"] == (size.state + size.score,) * 6 + (0,) * 2
  assert 0 < size.score < size.update


def test_a_plan_that_does_not_fit_is_refused_with_one_that_would():
  names = ("solver", "verifier")
  config = make_config(names)
  models = dict.fromkeys(names, dataclasses.replace(MODEL, embed_dim=1024))
  peaks = {}
  for strategy in ("shared", "split"):
    other = make_config(names, strategy=strategy)
    layouts = placement.lay_out(other, 1, 8)
    found = placement.memory(other, models, layouts)
    peaks[strategy] = max(max(values) for values in found.values())
  better = min(peaks, key=peaks.get)
  worse = max(peaks, key=peaks.get)
  assert peaks[better] < peaks[worse]
  limit = peaks[better] / 1e9
  config = make_config(names, strategy=worse, device_memory_gb=limit)
  with pytest.raises(config_lib.ConfigError) as e:
    placement.plan(config, models)
  message = str(e.value)
  assert f"placement.strategy: {worse!r} needs" in message
  assert f"{better!r}" in message.splitlines()[0]
  assert f"device_memory_gb={limit:g}" in message
  rows = [line.split()[0] for line in message.splitlines()[2:]]
  assert rows == ["rollout", "score", "update"]


def test_where_nothing_fits_the_message_says_what_to_change():
  config = make_config(device_memory_gb=1e-6)
  with pytest.raises(
    config_lib.ConfigError, match="no strategy fits; use more"
  ):
    placement.plan(config, dict.fromkeys(config.policies, MODEL))


def test_memory_of_a_device_is_the_config_s_or_a_part_of_the_machine():
  config = make_config(device_memory_gb=2.5)
  assert placement.device_memory(config, jax.devices()) == 2_500_000_000
  asked = placement.device_memory(make_config(), jax.devices())
  assert asked == placement.device_memory(make_config(), jax.devices()[:1]) // 8


def test_peaks_are_of_this_process_and_its_fullest_device(monkeypatch):
  before = placement.peaks()
  assert before.keys() == {"host"}  # on CPU a device tells nothing
  assert np.ones(3 << 24).sum() == 3 << 24  # 400 MB
  assert placement.peaks()["host"] >= max(before["host"], 400e6)

  def device(**stats):
    return types.SimpleNamespace(memory_stats=lambda: stats or None)

  devices = [device(peak_bytes_in_use=5), device(peak_bytes_in_use=7), device()]
  monkeypatch.setattr(jax, "local_devices", lambda: devices)
  assert placement.peaks()["device"] == 7


# -- moves ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def values():
  rng = np.random.default_rng(0)
  return {
    "w": rng.normal(size=(8, 6)).astype(np.float32),
    "layers": rng.normal(size=(2, 4, 8)).astype(np.float32),
  }


AXES = {"w": ("embed", "mlp"), "layers": ("layers", "embed", "mlp")}


def put(values, mesh):
  return jax.device_put(values, sharding.shardings(AXES, values, mesh))


@pytest.mark.parametrize(
  ("kwargs", "rollout"),
  [
    ({"strategy": "split"}, {0, 1, 2, 3}),
    ({"strategy": "split", "rollout_devices": 2}, {2, 3}),
    ({}, set(range(8))),
  ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sync_moves_all_to_the_rollout_devices(values, kwargs, rollout, dtype):
  part = make_plan(
    train_mesh=config_lib.Mesh(fsdp=2, data=0),
    rollout_mesh=config_lib.Mesh(tensor=2, fsdp=1, data=0),
    **kwargs,
  ).slices["solver"]
  params = put(values, part.train_mesh)
  where = [sharding.shardings(AXES, values, m) for m in part.rollout_meshes]
  moved = placement.sync(params, where, dtype)
  assert len(moved) == len(rollout) // 2
  for own, target, mesh in zip(moved, where, part.rollout_meshes, strict=True):
    for name, array in own.items():
      assert array.sharding == target[name]
      assert array.devices() == set(mesh.devices.flat)
      np.testing.assert_array_equal(array, values[name].astype(dtype))
  assert {d.id for x in moved for d in x["w"].devices()} == rollout
  compiled = placement._program.cache_info().misses
  placement.sync(params, where, dtype)
  assert placement._program.cache_info().misses == compiled


def unstack(params):
  return {"w": params["w"], "layers": [params["layers"][i] for i in range(2)]}


@pytest.mark.parametrize("aside", [0, 2])
def test_sync_in_another_layout(values, aside):
  part = make_plan(strategy="split", rollout_devices=aside).slices["solver"]
  axes = {"w": AXES["w"], "layers": [AXES["layers"][1:]] * 2}
  meshes = part.rollout_meshes
  where = [sharding.shardings(axes, unstack(values), m) for m in meshes]
  params = put(values, part.train_mesh)
  moved = placement.sync(params, where, "float32", unstack)
  for own, mesh in zip(moved, meshes, strict=True):
    for i in range(2):
      layer = own["layers"][i]
      assert layer.devices() == set(mesh.devices.flat)
      np.testing.assert_array_equal(layer, values["layers"][i])


def test_an_engine_never_sees_what_an_update_donated(values):
  part = make_plan(strategy="split").slices["solver"]
  params = put(values, part.train_mesh)
  where = jax.tree.map(lambda p: p.sharding, params)
  step = jax.jit(
    lambda p: jax.tree.map(lambda x: x + 1, p),
    donate_argnums=0,
    out_shardings=where,
  )
  [moved] = placement.sync(params, [where], "float32")
  step(params)
  assert params["w"].is_deleted()  # the update did take the buffers
  for name, array in moved.items():
    np.testing.assert_array_equal(array, values[name])


@pytest.mark.parametrize(("leading", "shape"), [(0, (8, 3)), (1, (2, 8, 3))])
def test_global_batch_in_one_process(mesh, leading, shape):
  rows = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
  index = rows[..., 0]
  out, out_index = placement.global_batch((rows, index), mesh, leading)
  np.testing.assert_array_equal(out, rows)
  assert out.sharding.is_equivalent_to(
    sharding.rows(mesh, len(shape), leading), len(shape)
  )
  assert out_index.addressable_shards[0].data.shape[leading] == 2


def test_fetch_gives_numpy(mesh):
  x = jax.device_put(np.arange(8.0), NamedSharding(mesh, P("data")))
  got = placement.fetch({"x": x, "y": None, "z": np.float32(2)})
  assert isinstance(got["x"], np.ndarray) and got["y"] is None
  np.testing.assert_array_equal(got["x"], np.arange(8.0))
