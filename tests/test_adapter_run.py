"""A run whose policies are adapters on one backbone, end to end."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
import small_run
import xla_flags
from safetensors.numpy import load_file

from drmas_jax import backbone, checkpoint, export, placement
from drmas_jax import config as config_lib
from drmas_jax.models import adapters, peft, weights

CONFIG = pathlib.Path(__file__).with_name("adapter_run.py")


def run(workdir, *flags):
  code, said = small_run.run(workdir, f"--config={CONFIG}", *flags)
  assert code == 0, said
  return said


@pytest.fixture(scope="module")
def job(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("adapters") / "job"
  run(workdir, "--config.steps=2")
  return workdir


def params(workdir, policy, step="2"):
  saved = checkpoint.SavedPolicy(workdir, policy, step)
  folder = backbone.original_folder(saved)
  return export._adapters(saved, weights.read_config(folder))


def test_what_it_says_of_each(job):
  found = small_run.metrics(job)
  name = "solver+verifier+base"
  for policy in ("solver", "verifier"):
    # Adapters are 0 at first; of the second step each slot needs its own.
    assert max(found[s, f"ratio_error/{policy}"] for s in (1, 2)) < 1e-4
    assert found[1, f"grad_norm/{policy}"] > 0
    assert found[2, f"kl/{policy}"] > 0
  assert found[1, f"prefix_hit_rate/{name}"] > 0
  assert not any("base" in n for s, n in found if name not in n)


def test_adapters_are_all_that_is_trained_and_saved(job):
  folder = job / "checkpoints" / "2"
  assert {p.name for p in folder.glob("policy_*")} == {
    "policy_solver",
    "policy_verifier",
  }
  (settings, solver), (_, verifier) = (
    params(job, n) for n in ("solver", "verifier")
  )
  assert settings.rank == 4
  assert solver["attention"].keys() == {"q", "o"}
  for one, other in zip(*map(jax.tree.leaves, (solver, verifier)), strict=True):
    assert np.abs(one).max() > 0 and np.abs(one - other).max() > 0


def test_it_is_exported_merged_or_alone(job, tmp_path):
  export.export(job, "verifier", tmp_path / "whole")
  export.export(job, "verifier", tmp_path / "alone", peft=True)
  settings, own = params(job, "verifier")
  base = backbone.checkpoint_folder("tiny:solver")
  model = weights.read_config(base)
  merged = weights.load(tmp_path / "whole", model)
  before = weights.load(base, model)
  want = adapters.merge(before["layers"], own, settings)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
    merged["layers"],
    want,
  )
  np.testing.assert_array_equal(merged["embedding"], before["embedding"])
  tensors = load_file(tmp_path / "alone" / peft.WEIGHTS)
  assert len(tensors) == 2 * 3 * model.num_layers
  with pytest.raises(ValueError, match="'base' is frozen"):
    export.export(job, "base", tmp_path / "base")


def test_peft_computes_the_same(job, tmp_path):
  torch = pytest.importorskip("torch", reason="the extra [parity] brings torch")
  library = pytest.importorskip("peft", reason="the extra [parity] brings peft")
  import transformers

  export.export(job, "solver", tmp_path / "alone", peft=True)
  export.export(job, "solver", tmp_path / "whole")
  load = transformers.AutoModelForCausalLM.from_pretrained
  base = load(backbone.checkpoint_folder("tiny:solver"), dtype=torch.float32)
  with_adapter = library.PeftModel.from_pretrained(base, tmp_path / "alone")
  ids = torch.arange(4, 24)[None]
  with torch.no_grad():
    found = with_adapter(ids).logits
    with with_adapter.disable_adapter():
      without = with_adapter(ids).logits
    merged = load(tmp_path / "whole", dtype=torch.float32)(ids).logits
  np.testing.assert_allclose(found, merged, atol=1e-4)
  assert (found - without).abs().max() > 1e-3


def test_an_evaluation_is_of_the_adapters(job):
  """As the run's own last one, of the same tasks and keys."""
  before = json.loads((job / "summary.json").read_text())["after"]
  run(job, "--mode=eval")
  found = json.loads((job / "eval" / "step_2" / "results.json").read_text())
  assert found["summary"] == before


def test_learner_and_engine_read_one_copy_of_the_weights():
  """And what goes to the engine after an update is the adapters alone."""
  config = config_lib.read(CONFIG)
  ((name, policies),) = config.backbones.items()
  folder = backbone.checkpoint_folder("tiny:solver")
  model = weights.read_config(folder)
  models = dict.fromkeys(policies, model)
  plan = placement.plan(config, models, jax.devices()[:1])
  made = backbone.Backbone(policies, config, plan.slices[name], model, folder)
  made.load()
  for _ in range(2):
    made.resume()
    given = dict(made.engines[0].params)
    assert len(given.pop("adapters")) == model.num_layers
    for ours, theirs in zip(
      *map(jax.tree.leaves, (made.base, given)), strict=True
    ):
      assert ours is theirs
  states = made.states()
  assert states.keys() == {"solver", "verifier"}
  before = jax.device_get(made.state)
  made.put(states)
  jax.tree.map(np.testing.assert_array_equal, before, made.state)


# -- on two hosts --------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
  """(folder, what each host said of itself) of two_hosts_worker.py."""
  folder = tmp_path_factory.mktemp("pair")
  worker = CONFIG.with_name("two_hosts_worker.py")
  port = small_run.free_port()
  ended = small_run.finish_all(
    [
      subprocess.Popen(
        [sys.executable, worker, str(i), str(port), folder],
        env=os.environ
        | {"XLA_FLAGS": xla_flags.flags(2), "PYTHONPATH": str(small_run.ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
      )
      for i in range(2)
    ]
  )
  for code, said in ended:
    assert code == 0, said
  return folder, [json.loads(said.splitlines()[-1]) for _, said in ended]


def test_two_hosts_are_as_one(job, pair):
  """As far as the one has come: two steps, their evaluations and weights."""
  run = pair[0] / "run"
  for step in (1, 2):
    small_run.assert_close_metrics(job, run, step)
  for policy in ("solver", "verifier"):
    ours, theirs = (params(w, policy)[1] for w in (run, job))
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5),
      ours,
      theirs,
    )


def test_hosts_end_with_the_same_weights(pair):
  """And the fork of a run as that run, bit for bit."""
  folder, (one, other) = pair
  assert one["weights"] == other["weights"]
  run, fork = one["weights"]
  assert run == fork and len(run["learner"]) == 1
  found = [small_run.metrics(folder / n) for n in ("run", "fork")]
  assert found[1] == {k: v for k, v in found[0].items() if k[0] > 2}


def test_the_first_host_alone_writes(pair):
  """But for checkpoints, and evaluations while they are played."""
  folder, said = pair
  first, second = (
    {
      pathlib.Path(p).relative_to(folder)
      for p in own["opened"]
      if pathlib.Path(p).is_relative_to(folder)
    }
    for own in said
  )
  kinds = {path.parts[1] for path in first}
  for own in ("run", "fork", "run/eval/step_3"):  # which all must see
    assert pathlib.Path(own, ".hosts") in first
  assert kinds > {"metrics.jsonl", "checkpoints", "spikes", "replay", "eval"}
  for path in second:
    played = path.parts[1] == "eval" and path.name.endswith(".1.jsonl")
    assert path.parts[1] == "checkpoints" or played, path


def test_a_host_without_a_row(pair):
  """All of the last step's rows are of the other one."""
  found = small_run.metrics(pair[0] / "run")
  assert found[3, "episodes_failed/team"] == 8
  for policy in ("solver", "verifier"):
    assert found[3, f"grad_norm/{policy}"] > 0


def test_two_hosts_replay_a_step_bit_for_bit(pair):
  folders = [pair[0] / "run" / "replay" / n for n in ("step_3", "spike_3")]
  step, spike = (json.loads((f / "replay.json").read_text()) for f in folders)
  assert step["compared"] == spike["compared"] == {"3": []}
  assert step["estimators"] == spike["estimators"]
  for name in ("rows", "episodes"):
    one, two = (
      [json.loads(x) for x in (f / f"{name}.jsonl").read_text().splitlines()]
      for f in folders
    )
    assert one == two and len(one) == 16  # 8 rows of either agent
    assert {p.name for f in folders for p in f.iterdir()} == {
      *("summary.md", "replay.json", "rows.jsonl", "episodes.jsonl"),
    }
  assert len({(str(e["task"]), e["episode"]) for e in one}) == 16
  norms = [row["norm"] for row in step["most"]]
  assert norms == sorted(norms, reverse=True) and norms[0] > 0


def test_two_hosts_evaluate_as_they_did_in_the_run(pair):
  run = pair[0] / "run"
  found = json.loads((run / "eval" / "step_3" / "results.json").read_text())
  after = json.loads((run / "summary.json").read_text())["after"]
  assert found["summary"] == after


@pytest.mark.slow
def test_it_resumes_bit_for_bit(job, tmp_path):
  run(tmp_path / "job", "--config.steps=1")
  said = run(tmp_path / "job", "--config.steps=2")
  assert "goes on from step 1" in said
  for name in ("solver", "verifier"):
    ours, theirs = (params(w, name)[1] for w in (tmp_path / "job", job))
    for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
      np.testing.assert_array_equal(a, b)
