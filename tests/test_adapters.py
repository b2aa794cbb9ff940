"""Adapters: their arithmetic, that policies keep apart, and their folders."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_learner as learning
from safetensors.numpy import load_file

from drmas_jax import batching, config, learner, placement
from drmas_jax.models import adapters, peft, transformer

MODEL = dataclasses.replace(
  learning.MODEL, num_layers=2, qkv_bias=True, adapter_scale=2.0
)
ADAPTER = config.Adapter(rank=4, alpha=8.0)
TEMPERATURE = np.ones([2], np.float32)


def make_spec(mesh=None, num_policies=2, **loss):
  return dataclasses.replace(
    learning.make_spec(mesh),
    model=MODEL,
    adapter=ADAPTER,
    num_policies=num_policies,
    loss=config.Loss(**loss),
  )


@pytest.fixture(scope="module")
def base():
  return transformer.init_params(MODEL, jax.random.key(0))


def some_adapters(num_policies=2, scale=0.1):
  """None of which is 0."""
  shapes = learner.trainable_shapes(make_spec(num_policies=num_policies))
  rng = np.random.default_rng(5)
  return jax.tree.map(
    lambda x: (scale * rng.normal(size=x.shape)).astype(np.float32), shapes
  )


def of(tree, k):
  return jax.tree.map(lambda x: x[k], tree)


def inputs(policy_index, length=7):
  tokens = np.random.default_rng(1).integers(0, 30, [len(policy_index), length])
  rows = np.ones_like(tokens)
  return transformer.Inputs(
    jnp.asarray(tokens, jnp.int32),
    jnp.asarray(np.cumsum(rows, 1) - 1, jnp.int32),
    jnp.asarray(rows, jnp.int32),
    jnp.asarray(policy_index, jnp.int32),
  )


def hidden(params, asked):
  return np.asarray(transformer.forward(params, asked, config=MODEL)[0])


@pytest.mark.quick
def test_a_row_is_that_of_its_policys_merged_weights(base):
  """And one whose index is K is the decoder's own."""
  tree, asked = some_adapters(), inputs([1, 0, 2, 1])
  found = hidden(base | {"adapters": tree}, asked)
  layered = transformer.unstack(base) | {"adapters": tree}
  np.testing.assert_allclose(hidden(layered, asked), found, atol=1e-5)
  for row, k in enumerate([1, 0, 2, 1]):
    merged = base
    if k < 2:
      merged = base | {
        "layers": adapters.merge(base["layers"], of(tree, k), ADAPTER)
      }
    want = hidden(merged, inputs([0] * 4))
    np.testing.assert_allclose(found[row], want[row], atol=2e-5)
  assert np.abs(found[0] - hidden(base, asked)[0]).max() > 0.1


def gradient(params, tree, asked, model):
  def total(tree):
    found, _ = transformer.forward(
      params | {"adapters": tree}, asked, config=model
    )
    return jnp.sum(jnp.sin(found))

  return jax.grad(total)(tree)


@pytest.mark.quick
def test_layers_that_lie_apart_have_the_same_gradient(base):
  found = [
    jax.jit(gradient, static_argnums=3)(
      params, some_adapters(), inputs([1, 0, 2, 1]), MODEL
    )
    for params in (base, transformer.unstack(base))
  ]
  learning.assert_same(*found)


@pytest.mark.quick
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_layers_that_lie_apart_are_one_program(base, remat):
  """An engine's are its learner's, too. It is as long for six as for two, and
  of the weights nothing is kept for the backward pass but they themselves."""

  def program(num_layers):
    model = dataclasses.replace(MODEL, remat=remat, num_layers=num_layers)
    layers = transformer.unstack(base)["layers"][:1] * num_layers
    more = jax.tree.map(
      lambda x: np.repeat(x[:, :1], num_layers, 1), some_adapters()
    )
    return str(
      jax.make_jaxpr(gradient, static_argnums=3)(
        base | {"layers": layers}, more, inputs([1, 0, 2, 1]), model
      )
    )

  few, many = program(2), program(6)
  assert few.count("dot_general") == many.count("dot_general") > 40
  assert "f32[32,48]" in many
  assert "f32[6,32," not in many and "f32[6,48," not in many


@pytest.mark.quick
@pytest.mark.parametrize("name", ["q", "o", "down"])
def test_both_forms_of_the_product_are_one(name):
  tree = some_adapters(3)
  kind = "mlp" if name == "down" else "attention"
  pair = jax.tree.map(lambda x: x[:, 0], tree[kind][name])
  x = np.random.default_rng(2).normal(size=[5, 3, *pair["a"].shape[1:-1]])
  index = jnp.array([2, 0, 3, 1, 1])
  one, other = (
    adapters.delta(pair, jnp.float32(x), index, 2.0, trained=trained)
    for trained in (True, False)
  )
  np.testing.assert_allclose(one, other, atol=1e-5)
  assert not np.any(one[2]) and np.all(np.any(one[3] != 0, axis=0))


@pytest.mark.quick
def test_a_policy_begins_as_the_decoder(base):
  spec = make_spec()
  keys = jax.random.split(jax.random.key(3), 2)
  tree = learner.new_adapters(spec, keys)
  asked = inputs([0, 1])
  np.testing.assert_allclose(
    hidden(base | {"adapters": tree}, asked), hidden(base, asked), atol=1e-5
  )
  a = tree["attention"]["q"]["a"]
  bound = MODEL.embed_dim**-0.5
  assert 0.9 * bound < np.abs(a).max() <= bound
  assert np.abs(a[0] - a[1]).max() > 0.1 * bound


# -- updates -------------------------------------------------------------------


def update(spec, base, advantages, owner, live=(True, True), mesh_rows=8):
  """(adapters before, after, output) of one update on the turns of
  test_learner, those of agent i are of policy owner[i]."""
  turns = learning.make_turns()
  policy = [owner[i % 2] for i in range(len(turns))]
  batch = batching.pack(
    turns,
    range(len(turns)),
    [i % 2 for i in range(len(turns))],
    batching.Shape(1, mesh_rows, 32, 1),
    policy_index=policy,
  )
  before = some_adapters(spec.num_policies)
  placed = jax.device_put(before, learner.trainable_shardings(spec))
  programs = learner.programs(spec)
  lengths = np.array([len(t.completion_ids) for t in turns])
  totals = [
    max(1, lengths[np.array(policy) == k].sum())
    for k in range(spec.num_policies)
  ]
  data = placement.global_batch(
    (
      *(batch, batch.sampler_logprobs, None),
      batching.gather(advantages, batch),
    ),
    spec.mesh,
  )
  state, out = programs.train_step(
    programs.init(placed),
    transformer.unstack(base),
    data,
    np.float32(totals),
    np.array(live[: spec.num_policies]),
    1,
    TEMPERATURE,
  )
  return before, placement.fetch(state), jax.device_get(out)


@pytest.mark.parametrize("rates", [(), (3e-3, 1e-2)])
def test_an_update_of_two_is_two_updates_of_one(base, rates):
  """Each with its own denominator, clip, moments, count (rules 11, 12), and
  learning rate."""
  spec = dataclasses.replace(make_spec(), rates=rates)
  both = update(spec, base, learning.ADVANTAGES, owner=(0, 1))
  for k in range(2):
    spec = make_spec(num_policies=1)
    if rates:
      optimizer = dataclasses.replace(spec.optimizer, learning_rate=rates[k])
      spec = dataclasses.replace(spec, optimizer=optimizer)
    mine = np.arange(11) % 2 == k
    turns = np.where(mine, learning.ADVANTAGES, 0).astype(np.float32)
    # The other policy's turns go to no adapter at all.
    owner = (0, 1) if k == 0 else (1, 0)
    before = jax.tree.map(lambda x, k=k: x[k : k + 1], some_adapters())
    found = _alone(spec, base, turns, owner, before)
    for a, b in zip(
      jax.tree.leaves(of(both[1], k)),
      jax.tree.leaves(of(found[0], 0)),
      strict=True,
    ):
      np.testing.assert_allclose(a, b, atol=1e-6)
    np.testing.assert_allclose(
      both[2].grad_norm[k], found[1].grad_norm[0], rtol=1e-4
    )
    np.testing.assert_allclose(both[2].loss[k], found[1].loss[0], rtol=1e-4)


def _alone(spec, base, advantages, owner, before):
  turns = learning.make_turns()
  policy = [owner[i % 2] for i in range(len(turns))]
  batch = batching.pack(
    turns,
    range(len(turns)),
    [i % 2 for i in range(len(turns))],
    batching.Shape(1, 8, 32, 1),
    policy_index=policy,
  )
  lengths = np.array([len(t.completion_ids) for t in turns])
  programs = learner.programs(spec)
  state, out = programs.train_step(
    programs.init(jax.tree.map(jnp.asarray, before)),
    transformer.unstack(base),
    (
      *(batch, batch.sampler_logprobs, None),
      batching.gather(advantages, batch),
    ),
    np.float32([lengths[np.array(policy) == 0].sum()]),
    np.array([True]),
    1,
    TEMPERATURE,
  )
  return placement.fetch(state), jax.device_get(out)


def test_what_is_not_finite_in_one_touches_no_other(base):
  spec = make_spec()
  good = update(spec, base, learning.ADVANTAGES, owner=(0, 1))
  bad = learning.ADVANTAGES.copy()
  bad[1] = np.nan  # of policy 1
  before, state, out = update(spec, base, bad, owner=(0, 1))
  assert out.finite.tolist() == [True, False]
  for old, new, other in zip(
    *map(jax.tree.leaves, (before, state.params, good[1].params)), strict=True
  ):
    np.testing.assert_array_equal(old[1], new[1])
    np.testing.assert_allclose(new[0], other[0], atol=1e-6)
  assert state.step.tolist() == [1, 0]


def test_the_same_on_a_slice(base):
  one = update(make_spec(), base, learning.ADVANTAGES, owner=(0, 1))
  mesh = learning.make_mesh(2, 2, 2)
  many = update(make_spec(mesh), base, learning.ADVANTAGES, owner=(0, 1))
  learning.assert_same(one[1].params, many[1].params)


def aside(spec):
  """With its optimizer's state in the host's memory."""
  rule = dataclasses.replace(spec.optimizer, offload=True)
  return dataclasses.replace(spec, optimizer=rule)


def test_an_offloaded_state_is_in_the_hosts_memory(base):
  here, there = (
    update(spec, base, learning.ADVANTAGES, owner=(0, 1), live=(True, False))
    for spec in (make_spec(), aside(make_spec()))
  )
  learning.assert_same(here[1], there[1], atol=1e-6)
  assert there[1].step.tolist() == [1, 0]


@pytest.mark.quick
@pytest.mark.parametrize("offload", [False, True])
def test_states_apart_and_together(offload):
  spec = make_spec(learning.make_mesh(1, 2, 2))
  spec = aside(spec) if offload else spec
  params = jax.device_put(some_adapters(), learner.trainable_shardings(spec))
  state = learner.programs(spec).init(params)
  each = learner.split(spec, state)
  shapes, where = learner.policy_state(spec)
  for k, one in enumerate(each):
    jax.tree.map(lambda x, s: x.shape == s.shape or 1 / 0, one, shapes)
    np.testing.assert_array_equal(
      one.params["mlp"]["up"]["a"], state.params["mlp"]["up"]["a"][k]
    )
  again = learner.join(spec, each)
  for a, b, s in zip(*map(jax.tree.leaves, (state, again, where)), strict=True):
    np.testing.assert_array_equal(a, b)
    assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    kind = a.sharding.memory_kind
    assert kind == b.sharding.memory_kind == s.memory_kind
  moments = each[0].opt_state["mlp"]["up"]["a"]
  kinds = {
    x.sharding.memory_kind for x in jax.tree.leaves(moments) if x.ndim > 2
  }
  assert kinds == {"pinned_host" if offload else "device"}


# -- folders -------------------------------------------------------------------


@pytest.mark.quick
def test_the_folder_that_peft_loads(tmp_path):
  tree = of(some_adapters(), 1)
  peft.save(tmp_path, tree, MODEL, ADAPTER, "some/base")
  about = json.loads((tmp_path / peft.CONFIG).read_text())
  assert about["r"] == 4 and about["lora_alpha"] == 8.0
  assert about["target_modules"] == sorted(
    f"{n}_proj" for n in ("q", "k", "v", "o", "gate", "up", "down")
  )
  tensors = load_file(tmp_path / peft.WEIGHTS)
  assert len(tensors) == 2 * 7 * MODEL.num_layers
  stem = "base_model.model.model.layers.1.self_attn.o_proj"
  a, b = (tensors[f"{stem}.lora_{s}.weight"] for s in "AB")
  change = adapters.change(tree["attention"]["o"], ADAPTER)[1]
  np.testing.assert_allclose(2.0 * (b @ a).T, change, atol=1e-6)
