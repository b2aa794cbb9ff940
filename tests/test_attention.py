"""Attention of the update: kernels against XLA, choices, compiles for TPUs."""

import dataclasses
import functools
import importlib.util
import json
import subprocess
import sys
import types

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval

from drmas_jax import backbone, placement
from drmas_jax import config as config_lib
from drmas_jax.models import attention, transformer
from drmas_jax.types import Spread

quick = pytest.mark.quick

B, C = 4, 16
MODEL = transformer.DecoderConfig(
  family="qwen3",
  vocab_size=32,
  embed_dim=32,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=C,
  mlp_dim=48,
  max_positions=512,
  unroll=1,
)


def make(length, num_heads=4, kv_heads=2, dtype="float32"):
  """Rows of several segments; the first two end in padding."""
  rng = np.random.default_rng(0)
  q, k, v = (
    jnp.asarray(rng.normal(size=[B, length, n, C]), dtype)
    for n in (num_heads, kv_heads, kv_heads)
  )
  segments = np.sort(rng.integers(1, 5, [B, length]), axis=1)
  segments[:2, -length // 8 :] = 0
  return q, k, v, jnp.asarray(segments, jnp.int32)


def formula(q, k, v, segment_ids):
  """Token by token, in float64."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  group = q.shape[2] // k.shape[2]
  out = np.zeros(q.shape)
  for b, t, h in np.ndindex(q.shape[:3]):
    seen = np.flatnonzero(segment_ids[b, : t + 1] == segment_ids[b, t])
    scores = k[b, seen, h // group] @ q[b, t, h] / np.sqrt(C)
    weights = np.exp(scores - scores.max())
    out[b, t, h] = weights @ v[b, seen, h // group] / weights.sum()
  return out


@functools.partial(jax.jit, static_argnames=("kind", "mesh"))
def both_ways(q, k, v, segment_ids, *, kind, mesh=None):
  """(output, gradients of a weighted sum of it)."""

  def loss(q, k, v):
    out = attention.attend(
      q, k, v, segment_ids, kind=kind, mesh=mesh, interpret=True
    )
    ramp = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
    return jnp.sum(out * ramp), out

  grads, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)
  return out, grads


def assert_same(got, want, atol=1e-5):
  assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, want)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), got, want
  )


@quick
def test_xla_is_the_formula():
  args = make(24)
  got = attention.attend(*args, kind="xla")
  np.testing.assert_allclose(got, formula(*args), rtol=0, atol=1e-5)


def test_xla_in_blocks_of_queries_is_the_formula():
  args = make(250)  # four: of 62 or 63
  got = attention.attend(*args, kind="xla")
  np.testing.assert_allclose(got, formula(*args), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind, kept", [("xla", 4), ("xla", 0), ("splash", 4)])
def test_segments_that_share_tokens(monkeypatch, kind, kept):
  """Rows of 9 tokens; of three segments two begin with the first four, the
  second with the first alone."""
  monkeypatch.setattr(attention, "_KEPT", kept)  # 0: one row after the other
  own = [4, 1, 2, 2]
  q, k, v, _ = make(9)
  source, segments = np.zeros([2, B, 2, 8], np.int32)
  home = np.zeros([B, 9], np.int32)
  spots = [(0, 0), (0, 5), (1, 0)]  # of the segments: row, offset
  starts = np.cumsum([0, *own])
  for number, (row, offset) in enumerate(spots, 1):
    # The third is too long for what is left of the first row.
    mine = range(starts[number], starts[number + 1])
    seen = [*range(4 if number != 2 else 1), *mine]
    here = slice(offset, offset + len(seen))
    source[:, row, here], segments[:, row, here] = seen, number
    home[:, mine] = 8 * row + offset + np.arange(len(seen))[-len(mine) :]
  home[:, :4] = range(4)
  spread = Spread(*map(jnp.asarray, (source, segments, home)))

  def whole(x):
    """Each segment on its own, in rows that share nothing."""
    return jnp.stack([x[b, source[b, r]] for b in range(B) for r in range(2)])

  def by_hand(q, k, v):
    ids = jnp.asarray(segments.reshape(-1, 8))
    out = attention.attend(*map(whole, (q, k, v)), ids, kind="xla")
    out = out.reshape(B, 16, *out.shape[2:])
    return jnp.stack([out[b, home[b]] for b in range(B)])

  ramp = jnp.cos(jnp.arange(q.size, dtype=jnp.float32)).reshape(q.shape)

  def both(run):
    return jax.value_and_grad(
      lambda *x: jnp.sum(run(*x) * ramp), argnums=(0, 1, 2)
    )(q, k, v)

  def run(*x):
    return attention.attend(*x, spread, kind=kind, interpret=True)

  got = run(q, k, v)
  # Token 5, of the second segment, sees its first token and itself.
  pair = [jnp.stack([x[0, [0, 5]]]) for x in (q, k, v)]
  alone = formula(*pair, np.ones([1, 2], int))
  np.testing.assert_allclose(got[0, 5], alone[0, 1], atol=1e-5)
  assert_same(both(run), both(by_hand))


def test_what_many_copies_are_owed_adds_up_in_float32():
  """In bfloat16 a sum of ones stops at 256."""
  num = 1000
  spread = Spread(
    source=jnp.zeros([1, num, 1], jnp.int32),
    segment_ids=jnp.ones([1, num, 1], jnp.int32),
    home=jnp.arange(num, dtype=jnp.int32)[None],
  )
  q = k = v = jnp.ones([1, num, 1, C], jnp.bfloat16)

  def total(v):
    return attention.attend(q, k, v, spread, kind="xla").sum()

  owed = jax.grad(total)(v)
  np.testing.assert_allclose(owed[0, 0], num, rtol=1e-2)
  assert not np.any(owed[0, 1:])


@pytest.mark.parametrize("length, kept", [(4 * C, True), (8 * C, False)])
@pytest.mark.parametrize("views", [0, 2])
def test_what_of_scores_the_default_keeps(length, kept, views):
  """Through the policy of the layers, which reaches into `attention`."""
  assert MODEL.remat == "dots"
  ids = jnp.ones([1, length], jnp.int32)
  inputs = transformer.Inputs(ids, ids, ids, ids[:, 0])
  if views:
    whole = jnp.zeros([1, views, length], jnp.int32)
    inputs = inputs._replace(spread=Spread(whole, whole, ids))
  params = transformer.init_params(MODEL, jax.random.key(0))

  def loss(params):
    return transformer.forward(params, inputs, config=MODEL)[0].sum()

  shapes = [
    value.shape
    for value in jax.tree.leaves(
      jax.eval_shape(lambda p: jax.vjp(loss, p)[1], params)
    )
  ]
  scores = [s for s in shapes if s[-1] == length and len(s) >= 4]
  assert bool(scores) == kept, scores


def test_long_rows_are_run_again_and_short_ones_kept():
  def loss(q, k, v, segment_ids):
    return attention.attend(q, k, v, segment_ids, kind="xla").sum()

  for length, again in ((4 * C, False), (4 * C + 8, True)):
    grads = jax.make_jaxpr(jax.grad(loss))(*make(length))
    assert ("remat" in str(grads)) == again, length


def test_splash_is_xla():
  args = make(300)  # padded to three blocks of 128
  want = both_ways(*args, kind="xla")
  assert_same(both_ways(*args, kind="splash"), want)


# Of 2 x 2 x 2 devices a pair shares a row; 3 kv heads stay whole on each.
@pytest.mark.parametrize("num_heads, kv_heads", [(4, 2), (6, 3)])
def test_splash_on_a_mesh(mesh, num_heads, kv_heads):
  args = make(128, num_heads, kv_heads)
  got = both_ways(*args, kind="splash", mesh=mesh)
  assert_same(got, both_ways(*args, kind="xla"))
  rows, _, heads, _ = got[0].sharding.shard_shape(got[0].shape)
  assert rows == B // 4
  assert heads == num_heads // (2 if kv_heads == 2 else 1)


@quick
@pytest.mark.parametrize("length", [24, 31])  # cuDNN takes even ones
def test_what_cudnn_is_asked_for(monkeypatch, mesh, length):
  """The call, in XLA's implementation: there is no cuDNN here."""
  asked = []

  def plain(q, k, v, *, implementation, **kwargs):
    asked.append((implementation, q.shape[1] % 2))
    return dot_product_attention(q, k, v, **kwargs)

  dot_product_attention = jax.nn.dot_product_attention
  monkeypatch.setattr(jax.nn, "dot_product_attention", plain)
  args = make(length)
  both_ways.clear_cache()
  got = both_ways(*args, kind="cudnn", mesh=mesh)
  assert set(asked) == {("cudnn", 0)}
  assert_same(got, both_ways(*args, kind="xla"))


def on(platform):
  """As much of a mesh as the choice reads."""
  device = types.SimpleNamespace(platform=platform)
  return types.SimpleNamespace(devices=np.array([[device]]))


@quick
@pytest.mark.parametrize(
  "platform, head_dim, dtype, want",
  [
    ("tpu", 128, "bfloat16", "splash"),
    ("tpu", 64, "bfloat16", "splash"),
    ("tpu", 128, "float32", "xla"),
    ("gpu", 128, "bfloat16", "cudnn"),
    ("gpu", 80, "bfloat16", "cudnn"),
    ("gpu", 256, "bfloat16", "xla"),
    ("gpu", 36, "bfloat16", "xla"),
    ("gpu", 128, "float32", "xla"),
    ("cpu", 128, "bfloat16", "xla"),
  ],
)
def test_what_auto_is(platform, head_dim, dtype, want):
  where = on(platform)
  assert attention.resolve("auto", where, head_dim, dtype) == want
  assert attention.check("auto", where, head_dim, dtype) is None
  assert attention.check("xla", where, head_dim, dtype) is None
  for kind in {"splash", "cudnn"} - {want}:
    assert attention.check(kind, where, head_dim, dtype)
    assert attention.resolve(kind, where, head_dim, dtype) == kind


@quick
@pytest.mark.parametrize(
  "kind, where, head_dim, dtype, why",
  [
    ("splash", None, 128, "bfloat16", "on tpu and the update on cpu"),
    ("splash", on("tpu"), 128, "float32", "compute_dtype is float32"),
    ("cudnn", on("gpu"), 256, "bfloat16", "the model's have 256"),
  ],
)
def test_why_a_kind_cannot_run(kind, where, head_dim, dtype, why):
  assert why in attention.check(kind, where, head_dim, dtype)


def test_a_config_that_asks_for_it_is_refused():
  config = config_lib.build(
    {
      "policies": {
        "p": {
          "checkpoint": "tiny:solver",
          "attention": "splash",
          "engine": {"max_length": 256},
        }
      },
      "agents": {"solver": {"role": "math.solver", "policy": "p"}},
      "orchestra": {"name": "single"},
      "environment": {"name": "math"},
      "data": {"sources": {"arithmetic": {}}},
    }
  )
  folder = backbone.checkpoint_folder("tiny:solver")
  model = backbone.weights.read_config(folder)
  plan = placement.plan(config, {"p": model}, jax.devices()[:1])
  with pytest.raises(config_lib.ConfigError) as caught:
    backbone.Backbone(["p"], config, plan.slices["p"], model, folder)
  assert str(caught.value) == (
    "policies.p.attention: 'splash' cannot run here, for it runs on tpu and "
    "the update on cpu; allowed are 'auto' and 'xla'; set it to 'auto'"
  )


def kernels(jaxpr):
  """How many a program runs, inner ones included."""
  num = 0
  for equation in jaxpr.eqns:
    num += equation.primitive.name == "pallas_call"
    for inner in jax.extend.core.jaxprs_in_params(equation.params):
      num += kernels(inner)
  return num


@quick
@pytest.mark.parametrize("remat, want", [("none", 3), ("dots", 3), ("full", 4)])
def test_what_of_splash_is_run_again(remat, want):
  """Forward, and of q and of k and v backward; forward twice with "full"."""
  config = dataclasses.replace(MODEL, attention="splash", remat=remat)
  ids = jnp.zeros([2, 128], jnp.int32)
  inputs = transformer.Inputs(ids, ids, ids, ids[:, 0])

  def loss(params):
    return jnp.sum(transformer.forward(params, inputs, config=config)[0])

  shapes = transformer.param_shapes(config)
  jaxpr = jax.make_jaxpr(jax.grad(loss))(shapes).jaxpr
  used = [True] * len(jaxpr.outvars)
  assert kernels(partial_eval.dce_jaxpr(jaxpr, used)[0]) == want


@pytest.mark.slow
@pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="needs the package libtpu, which compiles for TPUs",
)
@pytest.mark.parametrize(
  "topology, num_devices, model, num_heads, rows",
  [
    ("v5e:2x2", 4, "qwen3-0.6b", 16, []),
    ("v5e:2x2", 4, "qwen3-0.6b", 16, ["shared"]),
    ("v5p:2x2x1", 4, "qwen3-4b", 32, []),
  ],
)
def test_an_update_compiles_for_a_tpu(
  root, topology, num_devices, model, num_heads, rows
):
  """8 x 4096 tokens: no array as large as one layer's scores or the logits."""
  done = subprocess.run(
    [
      sys.executable,
      root / "tests" / "tpu_update_worker.py",
      *(topology, model, *rows),
    ],
    capture_output=True,
    text=True,
    timeout=900,
  )
  assert done.returncode == 0, done.stderr[-4000:]
  found = json.loads(done.stdout.splitlines()[-1])
  print(found)
  assert found["kernels"] == 4  # forward, and with remat again; q; k and v
  scores = 8 // num_devices * num_heads * 4096 * 4096 * 4
  assert found["largest"] < scores
  assert found["results"] < 1e6  # the state stays where it is
