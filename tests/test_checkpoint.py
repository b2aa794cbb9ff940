"""Saves that survive a kill, restores on any mesh, resume checks."""

import logging
import os
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from drmas_jax import config as config_lib
from drmas_jax.checkpoint import (
  Checkpoints,
  FormatError,
  Run,
  compare_config,
)
from drmas_jax.types import RunError, TrainState

# Reader threads of Orbax that die with a broken file complain when collected.
pytestmark = pytest.mark.filterwarnings(
  "ignore::pytest.PytestUnraisableExceptionWarning"
)

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
SHAPES = {"embed": (64, 16), "layers": {"q": (2, 16, 16), "norm": (2, 16)}}


def mesh_of(num: int) -> Mesh:
  devices = np.array(jax.devices()[:num]).reshape(1, num, 1)
  return Mesh(devices, ("data", "fsdp", "tensor"))


def make_state(seed: int, mesh: Mesh, scale: int = 1) -> TrainState:
  """Every leaf random, so that a leaf mixed up with another shows."""
  rng = np.random.default_rng(seed)
  shapes = jax.eval_shape(
    lambda: (
      p := jax.tree.map(
        lambda s: jnp.zeros((s[0] * scale, *s[1:])),
        SHAPES,
        is_leaf=lambda s: isinstance(s, tuple),
      ),
      TX.init(p),
    )
  )

  def leaf(shape):
    if shape.dtype == jnp.int32:
      value, spec = np.int32(seed), PartitionSpec()
    else:
      value = rng.normal(size=shape.shape).astype(np.float32)
      even = shape.shape[-1] % mesh.size == 0
      spec = PartitionSpec(*[None] * (value.ndim - 1), "fsdp" if even else None)
    return jax.device_put(value, NamedSharding(mesh, spec))

  params, opt_state = jax.tree.map(leaf, shapes)
  step = jax.device_put(np.int32(seed), NamedSharding(mesh, PartitionSpec()))
  return TrainState(step, params, opt_state)


def abstract(states):
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
    states,
  )


def make_run(step: int, score: float | None = None) -> Run:
  return Run(
    step=step,
    cursor=16 * step,
    config={"steps": 10},
    versions={"solver": step},
    score=score,
  )


def assert_same(got, want):
  paths = jax.tree_util.tree_leaves_with_path(want)
  leaves = jax.tree.leaves(got)
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for (path, w), g in zip(paths, leaves, strict=True):
    np.testing.assert_array_equal(np.asarray(g), np.asarray(w), str(path))


@pytest.mark.quick
def test_round_trip_of_states_and_record(tmp_path):
  mesh = mesh_of(1)
  states = {n: make_state(i, mesh) for i, n in enumerate(("solver", "judge"))}
  run = Run(
    step=3,
    cursor=48,
    config={"steps": 10, "agents": {"a": {"role": "x.y"}}},
    versions={"solver": 3, "judge": 2},
    extra={"changes": [["steps", 5, 10]]},
    score=0.25,
  )
  with_one = Checkpoints(tmp_path)
  with_one.save(run, states)
  assert with_one.steps() == [3]
  with_one.close()

  again = Checkpoints(tmp_path)
  got, got_run = again.restore(abstract(states))
  assert got_run == run == again.run()
  assert_same(got, states)
  assert isinstance(got["solver"], TrainState)
  one = again.restore_params(3, "judge", abstract(states["judge"].params))
  assert_same(one, states["judge"].params)


@pytest.mark.quick
def test_nothing_there(tmp_path):
  for read_only in (False, True):
    checkpoints = Checkpoints(tmp_path / str(read_only), read_only=read_only)
    assert checkpoints.steps() == []
    assert checkpoints.best() is None
    assert checkpoints.run() is None
    assert checkpoints.restore({}) is None


@pytest.mark.quick
@pytest.mark.parametrize(("before", "after"), [(8, 1), (1, 8), (8, 2), (4, 8)])
def test_restores_onto_another_mesh(tmp_path, before, after):
  state = make_state(0, mesh_of(before))
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(make_run(1), {"solver": state})
  target = abstract(make_state(1, mesh_of(after)))
  states, _ = checkpoints.restore({"solver": target})
  assert_same(states["solver"], state)
  q = states["solver"].params["layers"]["q"]
  assert q.sharding.device_set == set(jax.devices()[:after])
  assert q.addressable_shards[0].data.shape == (2, 16, 16 // after)


@pytest.mark.quick
def test_works_under_an_active_mesh(tmp_path):
  mesh = mesh_of(8)
  state = make_state(0, mesh)
  with jax.set_mesh(mesh):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(make_run(1), {"solver": state})
    states, _ = checkpoints.restore({"solver": abstract(state)})
  assert_same(states["solver"], state)


@pytest.mark.quick
def test_states_may_be_donated_once_save_returns(tmp_path):
  """On CPU a host copy can be a view of the buffer that is then reused.

  While the write in the background still holds such a view, jax copies instead
  of reusing; either way what is written is what was saved.
  """
  mesh = mesh_of(8)
  state = make_state(0, mesh, scale=512)
  want = jax.tree.map(lambda x: np.array(x, copy=True), state)
  update = jax.jit(
    lambda s: jax.tree.map(lambda x: x * 2 + 1, s),
    donate_argnums=0,
    out_shardings=jax.tree.map(lambda x: x.sharding, state),
  )
  target = abstract(state)
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(make_run(1), {"solver": state})
  for _ in range(3):
    state = update(state)
  states, _ = checkpoints.restore({"solver": target})
  assert_same(states["solver"], want)


@pytest.mark.quick
def test_keeps_the_last_and_the_best(tmp_path):
  state = {"solver": make_state(0, mesh_of(1))}
  scores = {1: 0.1, 2: 0.9, 3: None, 4: 0.9, 5: 0.3, 6: None, 7: None}
  checkpoints = Checkpoints(tmp_path, keep=2)
  for step, score in scores.items():
    if step == 6:  # what was best must be known after a restart
      checkpoints.close()
      checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(make_run(step, score), state)
  checkpoints.close()
  reader = Checkpoints(tmp_path, keep=1, read_only=True)
  assert reader.steps() == [4, 6, 7]  # of equal scores the later
  assert reader.best() == 4
  reader.close()
  names = {p.name for p in (tmp_path / "checkpoints").iterdir()}
  assert names == {"4", "6", "7"}


@pytest.mark.quick
def test_a_save_that_fails_is_told(tmp_path):
  state = {"solver": make_state(0, mesh_of(1))}
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(make_run(1, 0.5), state)
  checkpoints.wait()
  checkpoints._manager.save = _full
  with pytest.raises(RunError, match="could not be written: RESOURCE_EXH") as e:
    checkpoints.save(make_run(2, 0.5), state)
  assert "and more" not in str(e.value)
  assert Checkpoints(tmp_path, read_only=True).steps() == [1]


@pytest.mark.quick
def test_late_scores_that_are_cut_short_are_none(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(make_run(1), {"solver": make_state(0, mesh_of(1))})
  checkpoints.close()
  (tmp_path / "scores.json").write_text('{"1')
  again = Checkpoints(tmp_path)
  assert again.best() is None
  again.save(make_run(1, 0.5), {"solver": make_state(0, mesh_of(1))})
  assert again.best() == 1


def _full(*args, **kwargs):
  raise ValueError("RESOURCE_EXHAUSTED: No space left\nand more")


def _largest(folder: pathlib.Path) -> pathlib.Path:
  files = [p for p in folder.rglob("*") if p.is_file()]
  return max(files, key=lambda p: p.stat().st_size)


def _cut(path: pathlib.Path) -> None:
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _break(step: pathlib.Path, how: str) -> None:
  if how == "arrays cut":
    _cut(_largest(step / "policy_solver"))
  elif how == "index cut":
    _cut(step / "policy_solver" / "manifest.ocdbt")
  elif how == "record cut":
    _cut(step / "run" / "metadata")
  elif how == "half deleted":
    for path in (step / "policy_solver").rglob("*"):
      if path.is_file():
        path.unlink()


@pytest.mark.parametrize(
  "how", ["arrays cut", "index cut", "record cut", "half deleted"]
)
def test_broken_newest_falls_back(tmp_path, caplog, how):
  mesh = mesh_of(1)
  checkpoints = Checkpoints(tmp_path, keep=3)
  for step in (2, 4):
    checkpoints.save(make_run(step), {"solver": make_state(step, mesh)})
  checkpoints.close()
  _break(tmp_path / "checkpoints" / "4", how)

  checkpoints = Checkpoints(tmp_path, keep=3)
  target = {"solver": abstract(make_state(0, mesh))}
  with caplog.at_level(logging.WARNING, "drmas_jax.checkpoint"):
    states, run = checkpoints.restore(target)
  assert run.step == 2
  assert_same(states["solver"], make_state(2, mesh))
  (message,) = (r.getMessage() for r in caplog.records if "drmas" in r.name)
  assert f"checkpoints{os.sep}4 cannot be read (" in message
  assert "going on from step 2" in message
  # The run comes to step 4 again, and that save must not be skipped.
  checkpoints.save(make_run(4), {"solver": make_state(5, mesh)})
  states, run = checkpoints.restore(target)
  assert run.step == 4
  assert_same(states["solver"], make_state(5, mesh))
  assert (tmp_path / "checkpoints" / "4.broken").is_dir()


@pytest.mark.quick
def test_another_tree_is_no_broken_checkpoint(tmp_path):
  mesh = mesh_of(1)
  checkpoints = Checkpoints(tmp_path)
  for step in (1, 2):
    checkpoints.save(make_run(step), {"solver": make_state(step, mesh)})
  target = {"solver": abstract(make_state(0, mesh, scale=2))}
  with pytest.raises(ValueError, match=r"none of the checkpoints \[1, 2\]"):
    checkpoints.restore(target)
  assert checkpoints.steps() == [1, 2]
  target = {"solver": abstract(make_state(0, mesh))}
  assert checkpoints.restore(target)[1].step == 2


@pytest.mark.quick
def test_another_format_is_named(tmp_path, monkeypatch):
  checkpoints = Checkpoints(tmp_path)
  state = {"solver": make_state(0, mesh_of(1))}
  checkpoints.save(make_run(1), state)
  monkeypatch.setattr("drmas_jax.checkpoint.FORMAT", 2)
  with pytest.raises(FormatError, match="format 1, and this version reads 2"):
    checkpoints.restore(abstract(state))


@pytest.mark.quick
@pytest.mark.parametrize("suffix", ["", "-0", "-1700000000"])
def test_left_over_temporary_folder(tmp_path, suffix):
  left = tmp_path / "checkpoints" / f"5.orbax-checkpoint-tmp{suffix}"
  (left / "policy_solver").mkdir(parents=True)
  (left / "policy_solver" / "half").write_text("x")
  reader = Checkpoints(tmp_path, read_only=True)
  assert reader.steps() == []
  assert left.is_dir()  # a reader leaves a save under way alone
  state = {"solver": make_state(0, mesh_of(1))}
  checkpoints = Checkpoints(tmp_path)
  assert checkpoints.steps() == []
  checkpoints.save(make_run(5), state)
  assert_same(checkpoints.restore(abstract(state))[0], state)
  checkpoints.close()
  assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["5"]


_CHILD = """
import sys
from tests.test_checkpoint import (
  Checkpoints, abstract, assert_same, make_run, make_state, mesh_of)

mesh = mesh_of(1)
checkpoints = Checkpoints(sys.argv[1], keep=2)
first, restored = 1, checkpoints.restore(
  {"solver": abstract(make_state(0, mesh, 1024))})
if restored:
  states, run = restored
  assert_same(states["solver"], make_state(run.step, mesh, 1024))
  first = run.step + 1
print("restored", first - 1, flush=True)
for step in range(first, first + 1000):
  state = make_state(step, mesh, 1024)
  print("saving", step, flush=True)
  checkpoints.save(make_run(step), {"solver": state})
  print("copied", step, flush=True)
  checkpoints.wait()
  print("committed", step, flush=True)
"""


def _run_and_kill(workdir, after: str, delay: float) -> list[list[str]]:
  """Lines the child wrote, killed `delay` s after its second line `after`."""
  child = subprocess.Popen(
    [sys.executable, "-c", _CHILD, str(workdir)],
    stdout=subprocess.PIPE,
    text=True,
    cwd=pathlib.Path(__file__).parents[1],
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
  )
  lines, seen = [], 0
  for line in child.stdout:
    lines.append(line.split())
    seen += line.startswith(after)
    if seen == 2:
      break
  time.sleep(delay)
  child.kill()
  lines += [rest.split() for rest in child.stdout]
  assert child.wait() == -9, lines
  return lines


def test_kill_during_a_save(tmp_path):
  """Each life checks the one before it bit for bit, and is killed in turn."""
  mesh, committed, interrupted = mesh_of(1), 0, 0
  moments = [("saving", 0.0), ("saving", 0.03), ("copied", 0.0),
             ("copied", 0.04), ("copied", 0.1)]  # fmt: skip
  for life, (after, delay) in enumerate(moments * 3):
    if life >= len(moments) and interrupted:
      break
    lines = _run_and_kill(tmp_path, after, delay)
    restored = int(lines[0][1])
    assert restored >= committed
    done = [int(n) for word, n in lines if word == "committed"]
    committed = max([restored, *done])
    names = [p.name for p in (tmp_path / "checkpoints").iterdir()]
    interrupted += any("tmp" in name for name in names)
  assert interrupted  # at least one kill left a save half done
  target = {"solver": abstract(make_state(0, mesh, 1024))}
  states, run = Checkpoints(tmp_path).restore(target)
  assert committed <= run.step <= committed + 1  # killed after the rename
  assert_same(states["solver"], make_state(run.step, mesh, 1024))


# -- what may change on resume ------------------------------------------------


def resolved(**changes):
  config = config_lib.build(
    {
      "policies": {
        "solver": {"checkpoint": "tiny:solver"},
        "judge": {"checkpoint": "tiny:judge"},
      },
      "agents": {
        "solver": {"role": "math.solver", "policy": "solver"},
        "verifier": {"role": "math.verifier", "policy": "judge"},
      },
      "orchestra": {"name": "math"},
      "environment": {"name": "math"},
      "data": {"sources": {"arithmetic": {}}},
    }
  )
  tree = config_lib.to_dict(config)
  for path, value in changes.items():
    *groups, last = path.split("__")
    node = tree
    for group in groups:
      node = node[group]
    node[last] = value
  return tree


@pytest.mark.quick
def test_free_changes_are_returned():
  now = resolved(
    steps=7,
    eval__every=3,
    eval__sources={"gsm8k": {"split": "test", "options": {}}},
    logging__transcripts_mb=1.0,
    checkpoint__keep=9,
    placement__strategy="split",
    rollout__turn_timeout_s=1.0,
  )
  changes = compare_config(resolved(), now)
  assert {c.kind for c in changes} == {"free"}
  by_key = {c.key: (c.old, c.new) for c in changes}
  assert by_key["steps"] == (100, 7)
  assert by_key["eval.sources.gsm8k.split"] == ("(absent)", "test")
  assert by_key["placement.strategy"] == ("shared", "split")
  assert compare_config(now, now) == []


@pytest.mark.quick
@pytest.mark.parametrize(
  ("path", "value"),
  [
    ("policies__solver__optimizer__learning_rate", 0.5),
    ("policies__solver__loss__clip_low", 0.5),
    ("policies__solver__micro_tokens", 1),
    ("policies__solver__engine__num_slots", 1),
    ("advantage__name", "grpo"),
    ("agents__verifier__sampling__temperature", 0.5),
    ("agents__verifier__options", {"missing_verdict": "reject"}),
    ("data__num_tasks", 1),
    ("environment__name", "search"),
    ("orchestra__options", {"max_loops": 3}),
    ("seed", 1),
  ],
)
def test_guarded_changes_need_the_flag(path, value):
  now = resolved(**{path: value})
  key = path.replace("__", ".")
  with pytest.raises(config_lib.ConfigError, match="--allow_change=") as info:
    compare_config(resolved(), now)
  if not isinstance(value, dict):
    assert f"{key}: was " in str(info.value)
    assert f"is now {value!r}" in str(info.value)
  (change,) = compare_config(resolved(), now, {key})
  assert change.kind == "guarded"
  group = key.split(".")[0]
  assert compare_config(resolved(), now, {group}) == [change]
  with pytest.raises(config_lib.ConfigError, match="is now"):
    compare_config(resolved(), now, {"steps"})


@pytest.mark.quick
@pytest.mark.parametrize(
  ("path", "value"),
  [
    ("policies__solver__checkpoint", "elsewhere"),
    ("policies__solver__compute_dtype", "bfloat16"),
    ("policies__solver__frozen", True),
    ("agents__verifier__role", "math.solver"),
    ("agents__verifier__policy", "solver"),
    ("agents__verifier__template", "short"),
    ("orchestra__name", "single"),
  ],
)
def test_the_team_never_changes(path, value):
  key = path.replace("__", ".")
  with pytest.raises(config_lib.ConfigError) as info:
    compare_config(resolved(), resolved(**{path: value}), {key})
  assert str(info.value).startswith(f"{key}: was ")
  assert "cannot change on resume" in str(info.value)


@pytest.mark.quick
def test_another_set_of_policies_is_one_fault():
  now = resolved()
  now["policies"]["extra"] = now["policies"].pop("judge")
  with pytest.raises(config_lib.ConfigError) as info:
    compare_config(resolved(), now)
  assert str(info.value) == (
    "policies: was ['judge', 'solver'] in the checkpoint, is now "
    "['extra', 'solver']; it cannot change on resume; write it back, or start "
    "a new --workdir"
  )


@pytest.mark.quick
def test_misspelt_allow_change_is_named():
  with pytest.raises(config_lib.ConfigError, match="optimiser: no such key"):
    compare_config(resolved(), resolved(), {"policies.solver.optimiser"})
