"""A run whose policies are adapters on one backbone, end to end."""

import json
import pathlib

import jax
import numpy as np
import pytest
import small_run
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


@pytest.mark.slow
def test_it_resumes_bit_for_bit(job, tmp_path):
  run(tmp_path / "job", "--config.steps=1")
  said = run(tmp_path / "job", "--config.steps=2")
  assert "goes on from step 1" in said
  for name in ("solver", "verifier"):
    ours, theirs = (params(w, name)[1] for w in (tmp_path / "job", job))
    for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
      np.testing.assert_array_equal(a, b)
