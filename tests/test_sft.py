"""Demonstrations become turns that the policy itself could have sampled."""

import collections
import functools
import json
import types

import jax
import numpy as np
import pytest
import small_run

from drmas_jax import (
  checkpoint,
  data,
  health,
  placement,
  rollout,
  sft,
  watchdog,
)
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


def check_what_is_told(workdir, known):
  """A line a step, and the page of it."""
  assert {step for step, _ in known} == set(range(1, 11))
  for step, policy in ((1, "solver"), (5, "solver"), (6, "verifier")):
    assert known[step, f"loss/{policy}"] > 0 < known[step, "step"]
    assert known[step, f"grad_norm/{policy}"] > 0 == known[step, "alarms/team"]
    assert known[step, f"skipped/non_finite/{policy}"] == 0
  page = (workdir / "report.html").read_text()
  assert "10 of 10" in page and "<dd>finished</dd>" in page
  assert "Loss by policy" in page and "Gradient norm by policy" in page
  assert json.loads((workdir / "summary.json").read_text()) == {
    "steps": 10,
    "alarms": {},
  }


def test_a_killed_one_goes_on_to_the_same_bits(tmp_path, monkeypatch):
  """Within its first policy, by an alarm, and while it writes the second."""
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
    return sft.main(config, tmp_path / name)

  sections, during = collections.Counter(), watchdog.Watchdog.during

  def counted(self, name, *args):
    sections[name] += 1
    return during(self, name, *args)

  with monkeypatch.context() as patch:
    patch.setattr(watchdog.Watchdog, "during", counted)
    assert go("straight") == 0
  assert sections == {"step": 10, "checkpoint": 6, "folder": 2}
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
  see = health.Monitor.see

  def alarmed(self, step, found):
    return see(self, step, found)._replace(stop=f"step {step}: an alarm")

  with monkeypatch.context() as patch:
    patch.setattr(health.Monitor, "see", alarmed)
    with pytest.raises(RunError, match="step 3: an alarm"):
      go("parts")
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
  check_what_is_told(tmp_path / "straight", known)
  other = config_lib.read(CONFIG, [*flags, "sft.batch_rows=8"], "sft")
  with pytest.raises(config_lib.ConfigError, match=r"sft\.batch_rows: was 7"):
    sft.main(other, tmp_path / "parts")
