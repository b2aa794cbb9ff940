"""A run's policies as Hugging Face folders, and as another run's start."""

import functools
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
import small_run
from parity import make_numbers
from safetensors.numpy import load_file, save_file

from drmas_jax import (
  backbone,
  building,
  checkpoint,
  evaluate,
  export,
  placement,
  sft,
)
from drmas_jax import config as config_lib
from drmas_jax.models import transformer, weights
from drmas_jax.tokenizer import Tokenizer
from drmas_jax.types import TrainState

# Reader threads of Orbax that die with a broken file complain when collected.
pytestmark = pytest.mark.filterwarnings(
  "ignore::pytest.PytestUnraisableExceptionWarning"
)

CONFIG = small_run.ROOT / "tests" / "small_run.py"
TINY = small_run.ROOT / "drmas_jax" / "models" / "tiny" / "solver"
FAMILIES = ("qwen2", "qwen3_untied", "llama32")


def original(folder, name="qwen2", dtype="float32", shards=1, **changes):
  """A case's folder as it comes from the hub, with the tiny tokenizer."""
  folder.mkdir()
  tensors = {
    k: v.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    for k, v in make_numbers.tensors(name).items()
  }
  raw = make_numbers.CASES[name] | {"torch_dtype": dtype, "own_key": [1]}
  (folder / "config.json").write_text(json.dumps(raw | changes, indent=4))
  for file in ("tokenizer.json", "tokenizer_config.json"):
    shutil.copyfile(TINY / file, folder / file)
  if shards == 1:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
  files = [
    f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)
  ]
  where = {n: files[i % shards] for i, n in enumerate(sorted(tensors))}
  for file in files:
    part = {n: tensors[n] for n, f in where.items() if f == file}
    save_file(part, folder / file, {"format": "pt"})
  index = {
    "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
    "weight_map": where,
  }
  (folder / "model.safetensors.index.json").write_text(
    json.dumps(index, indent=2, sort_keys=True) + "\n"
  )
  return folder


def moved(params, by=1e-3):
  return jax.tree.map(lambda x: x + by, params)


def trained(folder, workdir, steps=(7,), scores=(None,), by=1e-3, frozen=False):
  """A workdir with checkpoints of `folder`'s weights, moved at each by `by`
  times the step; returns the last params."""
  policies = {
    "solver": {"checkpoint": str(folder), "frozen": False},
    "judge": {"checkpoint": "/models/judge", "frozen": True},
  }
  digests = {"solver": backbone.digest(folder), "judge": ""}
  checkpoints = checkpoint.Checkpoints(workdir, keep=len(steps))
  start = weights.load(folder, weights.read_config(folder))
  for step, score in zip(steps, scores, strict=True):
    params = moved(start, by * step) if by else start
    run = checkpoint.Run(
      step, 0, {"policies": policies}, {}, {"folders": digests}, score
    )
    state = TrainState(np.int32(step), params, {"moments": moved(params)})
    checkpoints.save(run, {"solver": state})
  checkpoints.close()
  return params


def call(*flags):
  return export.main([str(flag) for flag in flags])


def run_export(workdir, out, *flags):
  asked = ("--workdir", workdir, "--policy", "solver", "--out", out)
  assert call(*asked, *flags) == 0
  return out


def contents(folder):
  return {p.name: p.read_bytes() for p in folder.iterdir()}


def assert_equal(one, two):
  assert jax.tree.structure(one) == jax.tree.structure(two)
  jax.tree.map(np.testing.assert_array_equal, one, two)


# -- the folder ----------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
  ("name", "dtype", "shards"),
  [
    ("qwen2", "float32", 1),
    ("qwen3_untied", "bfloat16", 3),
    ("llama32", "bfloat16", 1),
  ],
)
def test_untouched_weights_come_back_byte_for_byte(
  name, dtype, shards, tmp_path
):
  """L09: HF -> ours -> a run's checkpoint -> HF; here even whole files."""
  source = original(tmp_path / "hf", name, dtype, shards)
  trained(source, tmp_path / "run", by=0)
  out = contents(run_export(tmp_path / "run", tmp_path / "out"))
  ends = json.loads(out.pop("generation_config.json"))
  assert ends == {"eos_token_id": [36]}
  assert out == contents(source)


@pytest.mark.quick
def test_trained_weights_in_the_originals_dtype_or_another(tmp_path):
  source = original(tmp_path / "hf", "qwen3_untied", "bfloat16", 2)
  params = trained(source, tmp_path / "run")
  config = weights.read_config(source)
  out = run_export(tmp_path / "run", tmp_path / "bf16")
  rounded = jax.tree.map(
    lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32), params
  )
  assert_equal(weights.load(out, config), rounded)
  full = run_export(tmp_path / "run", tmp_path / "f32", "--dtype", "float32")
  assert_equal(weights.load(full, config), params)
  files = sorted(p.name for p in source.glob("*.safetensors"))
  for file in files:
    there = load_file(source / file)
    for folder, dtype in ((out, "bfloat16"), (full, "float32")):
      made = load_file(folder / file)
      assert {n: t.shape for n, t in made.items()} == {
        n: t.shape for n, t in there.items()
      }
      assert {str(t.dtype) for t in made.values()} == {dtype}
  raw = json.loads((full / "config.json").read_text())
  assert (raw["torch_dtype"], raw["own_key"]) == ("float32", [1])
  index = json.loads((full / "model.safetensors.index.json").read_text())
  size = sum(t.nbytes for f in files for t in load_file(full / f).values())
  assert index["metadata"]["total_size"] == size


@pytest.mark.quick
def test_a_tied_head_is_written_once(tmp_path):
  source = original(tmp_path / "hf", shards=2)
  path = source / "model-00002-of-00002.safetensors"
  tensors = load_file(path)
  embedding = make_numbers.tensors("qwen2")["model.embed_tokens.weight"]
  save_file(tensors | {"lm_head.weight": embedding}, path, {"format": "pt"})
  trained(source, tmp_path / "run", by=0)
  out = run_export(tmp_path / "run", tmp_path / "out")
  assert load_file(out / path.name).keys() == tensors.keys()
  index = json.loads((out / "model.safetensors.index.json").read_text())
  assert "lm_head.weight" not in index["weight_map"]


@pytest.mark.quick
@pytest.mark.parametrize(
  ("there", "expected"),
  [
    ({"eos_token_id": [4, 3], "top_k": 20}, [3, 4, 5, 36]),
    ({"eos_token_id": 3}, [3, 5, 36]),
    ({"eos_token_id": [36, 5]}, [36, 5]),  # all of them: left as it is
    (None, [5, 36]),
  ],
)
def test_every_end_id_is_written_back(there, expected, tmp_path):
  """L12: config.json says 5, the tokenizer 36, generation_config another."""
  source = original(tmp_path / "hf", eos_token_id=5)
  if there is not None:
    (source / "generation_config.json").write_text(json.dumps(there))
  trained(source, tmp_path / "run")
  out = run_export(tmp_path / "run", tmp_path / "out")
  written = json.loads((out / "generation_config.json").read_text())
  assert written == (there or {}) | {"eos_token_id": expected}
  assert Tokenizer.load(out).stop_ids == tuple(sorted(expected))


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_computes_the_same_from_it(name, tmp_path):
  torch = pytest.importorskip("torch", reason="the extra [parity] brings torch")
  import transformers

  source = original(tmp_path / "hf", name)
  params = trained(source, tmp_path / "run")
  out = run_export(tmp_path / "run", tmp_path / "out")
  model, info = transformers.AutoModelForCausalLM.from_pretrained(
    out, dtype=torch.float32, output_loading_info=True
  )
  assert not info["missing_keys"] and not info["unexpected_keys"]
  ids = make_numbers.prompts(name)
  with torch.no_grad():
    expected = model(torch.from_numpy(ids)).logits.numpy()
  config = weights.read_config(out)
  shape = np.ones_like(ids)
  inputs = transformer.Inputs(
    ids, np.cumsum(shape, 1) - 1, shape, np.zeros(len(ids), np.int32)
  )
  hidden, _ = transformer.forward(params, inputs, config=config)
  logits = hidden @ transformer.head(params, config)
  np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.quick
def test_a_parameter_is_written_before_the_next_is_read(tmp_path, monkeypatch):
  trained(original(tmp_path / "hf"), tmp_path / "run")
  events = []

  def noting(event, function):
    def noted(*args):
      events.append(event)
      return function(*args)

    return noted

  for owner, name in (
    (checkpoint.SavedPolicy, "restore"),
    (weights, "_to_file"),
  ):
    monkeypatch.setattr(owner, name, noting(name, getattr(owner, name)))
  run_export(tmp_path / "run", tmp_path / "out")
  config = weights.read_config(tmp_path / "hf")
  num = len(jax.tree.leaves(transformer.param_shapes(config)))
  assert events.count("restore") == num
  assert ("restore", "restore") not in set(itertools.pairwise(events))


# -- what is refused -----------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  """(original folder, workdir) of three steps, the second of them the best."""
  base = tmp_path_factory.mktemp("made")
  folder = original(base / "hf")
  trained(folder, base / "run", (2, 4, 6), (0.1, 0.3, 0.2))
  return folder, base / "run"


@pytest.mark.quick
@pytest.mark.parametrize(("step", "meant"), [("2", 2), ("best", 4), ("", 6)])
def test_the_step_asked_for(made, step, meant, tmp_path):
  folder, workdir = made
  said = export.export(workdir, "solver", tmp_path / "out", step)
  assert f"solver@{meant}," in said
  config = weights.read_config(folder)
  start = weights.load(folder, config)
  assert_equal(
    weights.load(tmp_path / "out", config), moved(start, 1e-3 * meant)
  )


@pytest.mark.quick
@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (
      ("--policy", "Solver"),
      "run: trains no policy 'Solver'; allowed are solver",
    ),
    (
      ("--policy", "judge"),
      "run: policy 'judge' is frozen, so its weights are those of "
      "'/models/judge'; use that checkpoint itself",
    ),
    (("--step", "3"), "run: has no step '3'; allowed are 2, 4, 6, best"),
    (("--step", "last"), "has no step 'last'; allowed are 2, 4, 6, best"),
    (("--workdir", "/nowhere"), "/nowhere: holds no checkpoint; name the"),
    (("--out", TINY), "is there already; name another, or move it"),
    (("--out", TINY / "config.json"), "is there already; name another"),
  ],
)
def test_what_is_not_there(made, flags, message, tmp_path, capsys):
  asked = {"--workdir": made[1], "--policy": "solver", "--out": tmp_path / "o"}
  asked[flags[0]] = flags[1]
  assert call(*(x for pair in asked.items() for x in pair)) == 2
  said = capsys.readouterr().err
  assert message in said and "Traceback" not in said
  assert not list(tmp_path.iterdir())
  assert (TINY / "config.json").is_file()


@pytest.mark.quick
@pytest.mark.parametrize(
  ("harm", "message"),
  [
    ("gone", "no such folder"),
    ("tokenizer", "or the tokenizer of"),
    ("weights", "has neither model.safetensors nor"),
    ("checkpoint", "solver@2: cannot be read"),
  ],
)
def test_what_is_gone_or_changed(made, harm, message, tmp_path, capsys):
  """One message, and nothing is left where the folder would be."""
  folder = original(tmp_path / "hf")
  workdir, out = tmp_path / "run", tmp_path / "deep" / "out"
  trained(folder, workdir, (2,))
  if harm == "gone":
    folder.rename(tmp_path / "other")
  elif harm == "tokenizer":
    (folder / "tokenizer_config.json").write_text("{}")
  elif harm == "weights":
    (folder / "model.safetensors").unlink()
  else:
    item = workdir / "checkpoints" / "2" / "policy_solver"
    for path in item.glob("**/d/*"):
      path.unlink()
  out.mkdir(parents=True)  # an empty one is taken
  flags = ("--workdir", workdir, "--policy", "solver", "--out", out)
  assert call(*flags, "--step", "2") == 2
  said = capsys.readouterr().err
  assert message in said and "Traceback" not in said
  assert [*out.parent.iterdir()] == [out] and not [*out.iterdir()]


@pytest.mark.quick
def test_help_loads_nothing_heavy():
  done = subprocess.run(
    [sys.executable, "-X", "importtime", "-m", "drmas_jax.export", "--help"],
    env=os.environ | {"PYTHONPATH": str(small_run.ROOT)},
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert done.returncode == 0 and "--policy" in done.stdout
  loaded = {
    line.rpartition("|")[2].strip().split(".")[0]
    for line in done.stderr.splitlines()
  }
  assert "argparse" in loaded
  assert not loaded & {"jax", "numpy", "orbax", "transformers", "safetensors"}


# -- another run's policy by name ----------------------------------------------


@pytest.mark.quick
def test_a_name_means_a_step_and_the_original_folder(made):
  folder, workdir = made
  for suffix, step in (("", 6), ("@best", 4), ("@2", 2), ("@9", 9)):
    name = f"run:{workdir}/solver{suffix}"
    assert backbone.checkpoint_folder(name) == folder
    # A step's number is not looked up: a run that began with it needs it no
    # more once it has checkpoints of its own.
    assert backbone.pinned(name) == f"run:{workdir}/solver@{step}"
  assert backbone.pinned("tiny:solver") == "tiny:solver"
  assert backbone.pinned(str(workdir)) == str(workdir)


@pytest.mark.quick
@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("run:solver", "write run:WORKDIR/POLICY"),
    ("run:{}/solver@", "write run:WORKDIR/POLICY"),
    ("run:{}/judge", "use that checkpoint itself"),
    ("run:{}/nobody", "trains no policy 'nobody'; allowed are solver"),
    ("run:{}x/solver", "x: holds no checkpoint"),
    ("run:{}/solver@last", "has no step 'last'; allowed are 2, 4, 6, best"),
  ],
)
def test_a_name_that_means_nothing(made, name, message, tmp_path):
  config = config_lib.read(
    CONFIG,
    [f"policies.verifier.checkpoint={name.format(made[1])}"],
    "eval",
  )
  with pytest.raises(config_lib.ConfigError) as e:
    evaluate.main(config, tmp_path / "new")
  assert str(e.value).startswith("policies.verifier.checkpoint='run:")
  assert message in str(e.value)
  assert not (tmp_path / "new").exists()


# -- a run ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def job(tmp_path_factory):
  """Workdir of one step of the tiny team."""
  workdir = tmp_path_factory.mktemp("runs") / "job"
  flags = ("--config.steps=1", "--config.eval.num_tasks=0")
  code, said = small_run.run(workdir, *flags)
  assert code == 0, said
  return workdir


def params_of(workdir, name):
  """{path: array} of what the run's checkpoint holds."""
  found = small_run.policy(workdir, 1, name)
  return {
    path.removeprefix("['params']"): value
    for path, value in found.items()
    if path.startswith("['params']")
  }


def by_path(params):
  return {
    jax.tree_util.keystr(path): np.asarray(leaf)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
  }


def test_the_command(job, tmp_path):
  out = tmp_path / "out"
  done = subprocess.run(
    [
      *(sys.executable, "-m", "drmas_jax.export"),
      *("--workdir", job, "--policy", "solver", "--out", out),
    ],
    env=os.environ | {"PYTHONPATH": str(small_run.ROOT)},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  assert f"{out}: run:{job}/solver@1, like {TINY}" in done.stdout
  made = by_path(weights.load(out, weights.read_config(out)))
  small_run.assert_equal(made, params_of(job, "solver"))
  before, after = (load_file(f / "model.safetensors") for f in (TINY, out))
  assert before.keys() == after.keys()
  assert any((before[n] != after[n]).any() for n in before)
  for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
    assert (out / name).read_bytes() == (TINY / name).read_bytes()


def test_a_run_starts_from_a_policy_of_another(job):
  """Laid on the slice of the new run, here 8 devices."""
  name = f"run:{job}/verifier"
  config = config_lib.read(CONFIG, [f"policies.solver.checkpoint={name}"])
  backbones = building.build(building.begin(config))
  solver = backbones["solver"]
  assert solver.policy.checkpoint == f"{name}@1"
  solver.load()
  made = solver.state.params
  small_run.assert_equal(by_path(made), params_of(job, "verifier"))
  assert len(made["embedding"].sharding.device_set) == 8
  assert solver.folder == TINY.parent / "verifier"


def test_a_mix_is_evaluated(job, tmp_path):
  """A trained solver with an untrained verifier."""
  code, said = small_run.run(
    tmp_path / "mix",
    "--mode=eval",
    f"--config.policies.solver.checkpoint=run:{job}/solver",
    "--config.eval.num_tasks=2",
  )
  assert code == 0, said
  assert f"from run:{job}/solver@1, tiny:verifier" in said


def test_sft_writes_what_it_has_when_it_is_stopped(tmp_path, monkeypatch):
  """The policy at work, after its step; the next is not begun."""
  batch, steps = sft._batch, []

  def stopped(*args):
    steps.append(args)
    if len(steps) == 2:
      signal.raise_signal(signal.SIGINT)
    return batch(*args)

  monkeypatch.setattr(sft, "_batch", stopped)
  one = functools.partial(placement.plan, devices=jax.devices()[:1])
  monkeypatch.setattr(placement, "plan", one)
  config = config_lib.read(CONFIG, ["sft.batch_rows=8"], "sft")
  assert sft.main(config, tmp_path) == 130
  assert len(steps) == 2
  assert [p.name for p in (tmp_path / "policies").iterdir()] == ["solver"]
  out = tmp_path / "policies" / "solver"
  before, after = (load_file(f / "model.safetensors") for f in (TINY, out))
  assert any((before[n] != after[n]).any() for n in before)
