"""Fused decode attention: in interpret mode, lowered, compiled for TPUs."""

import functools
import importlib.util
import json
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drmas_jax.models import kernels

quick = pytest.mark.quick
both = pytest.mark.parametrize("which", ["tpu", "gpu"])

HUGE = 1e30  # what lies behind a row's end may be any finite number


def make(kv_heads, group, head_dim, page, dtype, cache_dtype, seed=0):
  """Rows that end at, before and behind the end of a page, and share pages.

  Of 11 pages of random tokens, the last holds nothing but HUGE: it fills the
  tables behind the rows' ends.
  """
  rng = np.random.default_rng(seed)
  num, blocks = 11, 3
  lengths = np.array([0, 1, page - 1, page, page + 1, blocks * page], np.int32)
  table = np.full([len(lengths), blocks], num - 1, np.int32)
  for row, length in zip(table, lengths, strict=True):
    row[: -(-length // page)] = rng.permutation(num - 1)[: -(-length // page)]
  q = rng.normal(size=[len(lengths), kv_heads * group, head_dim])
  keys = rng.normal(size=[num, kv_heads, head_dim, page])
  values = rng.normal(size=[num, kv_heads, page, head_dim])
  scales = None
  if cache_dtype == "int8":
    keys, values = (np.clip(40 * x, -127, 127) for x in (keys, values))
    scales = rng.uniform(0.01, 0.03, [2, num, kv_heads, page])
    scales[:, -1] = HUGE
    scales = tuple(jnp.asarray(scales, jnp.float32))
  else:
    keys[-1] = values[-1] = HUGE
  return (
    jnp.asarray(q, dtype),
    jnp.asarray(keys, cache_dtype),
    jnp.asarray(values, cache_dtype),
    jnp.asarray(table),
    jnp.asarray(lengths),
    scales,
  )


def expected(q, keys, values, table, lengths, scales):
  """The formula, head by head, in float64."""
  q, keys, values = (np.asarray(x, np.float64) for x in (q, keys, values))
  if scales is not None:
    keys = keys * np.asarray(scales[0], np.float64)[:, :, None]
    values = values * np.asarray(scales[1], np.float64)[..., None]
  out = np.zeros(q.shape)
  for s, h in np.ndindex(q.shape[:2]):
    n, k = int(lengths[s]), h * keys.shape[1] // q.shape[1]
    if n:
      pages = np.asarray(table)[s]
      row_keys = np.concatenate(keys[pages, k], axis=-1)[:, :n]
      row_values = np.concatenate(values[pages, k])[:n]
      scores = q[s, h] @ row_keys / np.sqrt(q.shape[-1])
      weights = np.exp(scores - scores.max())
      out[s, h] = weights @ row_values / weights.sum()
  return out


@functools.partial(jax.jit, static_argnames=("which", "mesh"))
def attend(*args, which, mesh=None):
  return kernels.paged_attention(*args, which=which, mesh=mesh, interpret=True)


@quick
@both
@pytest.mark.parametrize(
  "group, head_dim, page, dtype, cache_dtype",
  [
    (1, 64, 512, "float32", "float32"),  # the GPU kernel's parts are 1024
    (2, 64, 128, "bfloat16", "bfloat16"),
    (4, 128, 128, "bfloat16", "int8"),
    (7, 128, 16, "float32", "float32"),
  ],
)
def test_against_the_formula(which, group, head_dim, page, dtype, cache_dtype):
  args = make(2, group, head_dim, page, dtype, cache_dtype)
  got = attend(*args, which=which)
  assert got.dtype == dtype
  want = expected(*args)
  # A bfloat16 has 8 bits; weights and result are rounded to it.
  limit = 1e-5 if dtype == "float32" else 2.0**-7 * np.abs(want).max()
  np.testing.assert_allclose(np.asarray(got, np.float64), want, 0, limit)
  assert not np.any(np.asarray(got)[0])  # the row of length 0


@quick
@both
def test_a_row_does_not_see_the_others(which):
  """Same bits alone, in a wider table, at other pages of a larger pool."""
  q, keys, values, table, lengths, _ = make(2, 4, 64, 16, "float32", "float32")
  together = attend(q, keys, values, table, lengths, None, which=which)
  order = np.random.default_rng(1).permutation(2 * len(keys))
  pools = [jnp.concatenate([x, x])[order] for x in (keys, values)]
  place = np.argsort(order)[np.asarray(table[4:5])]
  alone = attend(
    q[4:5],
    *pools,
    np.pad(place, [(0, 0), (0, 100)]),
    lengths[4:5],
    None,
    which=which,
  )
  np.testing.assert_array_equal(alone[0], together[4])


@quick
@pytest.mark.parametrize(
  "which, kv_heads, ways", [("tpu", 4, 4), ("gpu", 2, 2), ("tpu", 3, 1)]
)
def test_devices_work_on_their_own_heads(mesh, which, kv_heads, ways):
  args = make(kv_heads, 2, 64, 64, "float32", "int8")
  got = attend(*args, which=which, mesh=mesh)
  held = {s.data.shape[1] for s in got.addressable_shards}
  assert held == {2 * kv_heads // ways}
  np.testing.assert_allclose(np.asarray(got), expected(*args), 0, 1e-5)


@quick
@pytest.mark.parametrize(
  "platform, page, head_dim, want",
  [
    ("tpu", 128, 128, "tpu"),
    ("tpu", 256, 64, "tpu"),
    ("tpu", 64, 128, None),
    ("tpu", 128, 80, None),
    ("gpu", 64, 128, "gpu"),
    ("gpu", 48, 128, None),
    ("gpu", 64, 96, None),
    ("cpu", 128, 128, None),
  ],
)
def test_which_kernel_serves_a_cache(platform, page, head_dim, want):
  device = types.SimpleNamespace(platform=platform)
  mesh = types.SimpleNamespace(devices=np.array([[device]]))
  assert kernels.implementation(mesh, page, head_dim) == want


@quick
def test_without_a_mesh_the_default_backend_decides():
  assert kernels.implementation(None, 128, 128) is None  # the tests' is cpu


@quick
@pytest.mark.parametrize("cache_dtype", ["bfloat16", "int8"])
def test_the_gpu_kernel_lowers_to_triton(cache_dtype):
  """As far as a machine without one gets."""
  args = make(2, 4, 128, 64, "bfloat16", cache_dtype)
  run = functools.partial(kernels.paged_attention, which="gpu")
  lowered = jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",))
  assert lowered.as_text().count("@__gpu$xla.gpu.triton") == 1


@pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="needs the package libtpu, which compiles for TPUs",
)
@pytest.mark.parametrize(
  "topology",
  [
    "v5e:2x2",
    pytest.param("v5p:2x2x1", marks=pytest.mark.slow),
    pytest.param("v6e:2x2", marks=pytest.mark.slow),
  ],
)
def test_decoding_compiles_for_a_tpu(root, topology):
  """One kernel, a pool that stays where it is, and no copy of rows."""
  done = subprocess.run(
    [sys.executable, root / "tests" / "tpu_worker.py", topology],
    capture_output=True,
    text=True,
    timeout=400,
  )
  assert done.returncode == 0, done.stderr[-4000:]
  cases = json.loads(done.stdout.splitlines()[-1])
  assert len(cases) == 4
  for name, case in cases.items():
    print(name, case)
    assert case["kernels"] == 1, name
    assert case["pool_copies"] == 0, name
    # The pages of all rows at full length would be as large as the pool.
    assert case["temporaries"] < case["arguments"] / 8, name
