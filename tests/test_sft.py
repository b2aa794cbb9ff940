"""Demonstrations become turns that the policy itself could have sampled."""

import functools
import types

import jax
import numpy as np
import pytest
import small_run

from drmas_jax import checkpoint, coordinator, data, placement, rollout, sft
from drmas_jax import config as config_lib
from drmas_jax.datasets import arithmetic
from drmas_jax.tokenizer import Tokenizer
from drmas_jax.types import RunError

pytestmark = pytest.mark.quick

CONFIG = small_run.ROOT / "tests" / "small_run.py"
TINY = small_run.ROOT / "drmas_jax" / "models" / "tiny" / "solver"


@pytest.mark.parametrize(
  ("override", "message"),
  [
    ("max_tokens=5", r"it has \d+ tokens; .*solver\.max_tokens=5; raise"),
    ("max_prompt_tokens=20", r"prompt of \d\d tokens.* at most 20;"),
  ],
)
def test_demonstrations_that_do_not_fit(override, message):
  config = config_lib.read(CONFIG, [f"agents.solver.{override}"], "sft")
  backbone = types.SimpleNamespace(
    tokenizer=Tokenizer.load(TINY),
    names=("solver",),
    agents={"solver": {"solver": 0}},
    policy=config.policies["solver"],
  )
  shown = sft._Demonstrations(
    config,
    backbone,
    rollout.Team(config),
    {"arithmetic": arithmetic.demonstrations},
  )
  tasks = data.Stream({"arithmetic": arithmetic.make("train")}, 0).tasks(0, 9)
  match = rf"demonstration of 'solver' for arithmetic\[\d+\]: {message}"
  with pytest.raises(RunError, match=match):
    for task in tasks:
      shown.turns(task, np.random.default_rng(0))


def files(folder):
  return {
    str(p.relative_to(folder)): p.read_bytes()
    for p in folder.rglob("*")
    if p.is_file()
  }


def test_a_killed_one_goes_on_to_the_same_bits(tmp_path, monkeypatch):
  """Within its first policy, and while it writes the second."""
  one = functools.partial(placement.plan, devices=jax.devices()[:1])
  monkeypatch.setattr(placement, "plan", one)
  start = checkpoint.Checkpoints.save

  def at_once(self, *args):  # a thread would outlive what is killed here
    start(self, *args)
    self.wait()

  monkeypatch.setattr(checkpoint.Checkpoints, "save", at_once)
  flags = ["sft.steps=5", "sft.batch_rows=7", "checkpoint.every=2"]
  config = config_lib.read(CONFIG, flags, "sft")

  def go(name):
    return coordinator.main(config, tmp_path / name, mode="sft")

  assert go("straight") == 0
  batch, save, steps = sft._batch, sft.weights.save, []

  def killed(*args):
    steps.append(args)
    if len(steps) == 4:
      raise KeyboardInterrupt
    return batch(*args)

  def half(folder, *args, **kwargs):
    save(folder, *args, **kwargs)
    if "verifier" in folder.name:
      raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(sft, "_batch", killed)
    with pytest.raises(KeyboardInterrupt):
      go("parts")
  assert not (tmp_path / "parts" / "policies").exists()
  with monkeypatch.context() as patch:
    patch.setattr(sft.weights, "save", half)
    with pytest.raises(KeyboardInterrupt):
      go("parts")
  left = tmp_path / "parts" / "policies"
  assert {p.name for p in left.glob("[!.]*")} == {"solver"}
  assert go("parts") == 0 and go("parts") == 0
  assert files(left) == files(tmp_path / "straight" / "policies")
  known = small_run.metrics(tmp_path / "straight")
  assert small_run.metrics(tmp_path / "parts") == known
  assert {step for step, _ in known} == {5, 10}
  other = config_lib.read(CONFIG, [*flags, "sft.batch_rows=8"], "sft")
  with pytest.raises(config_lib.ConfigError, match=r"sft\.batch_rows: was 7"):
    coordinator.main(other, tmp_path / "parts", mode="sft")
