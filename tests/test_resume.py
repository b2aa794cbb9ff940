"""A run that was ended and goes on is the run that was not (rule 25).

Processes end at exact moments (faulty_main.py). The straight run has another
PYTHONHASHSEED than those compared with it.
"""

import json
import pathlib
import shutil
import signal

import pytest
import small_run

from drmas_jax import checkpoint, main, restoring
from drmas_jax import config as config_lib


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
  """The folder of a run that nothing disturbed."""
  workdir = tmp_path_factory.mktemp("straight")
  code, said = small_run.run(workdir, PYTHONHASHSEED="1")
  assert code == 0, said
  return workdir


def go_on(workdir, fault=None, *flags, **env):
  return small_run.run(workdir, *flags, fault=fault, PYTHONHASHSEED="2", **env)


def assert_same_run(workdir, straight):
  """Weights, moments, counts; what was measured, sampled and scored."""
  small_run.assert_equal(small_run.state(workdir), small_run.state(straight))
  assert small_run.metrics(workdir) == small_run.metrics(straight)
  assert small_run.transcripts(workdir) == small_run.transcripts(straight)
  for folder in (workdir, straight):
    left = {p.name for p in (folder / "checkpoints").iterdir()}
    assert all(name.isdigit() for name in left) and "5" in left


def last_said(workdir):
  return json.loads((workdir / "summary.json").read_text())


def test_the_straight_run_trains(straight):
  """Without updates the tests below would compare nothing."""
  first = small_run.policy(straight, small_run.STEPS, "solver")
  assert 0 < first["['step']"] <= small_run.STEPS
  found = small_run.metrics(straight)
  for step in range(1, small_run.STEPS + 1):
    assert found[step, "episodes/team"] == 16
    assert (step, "eval/avg@2") in found
  written = small_run.transcripts(straight)
  assert len(written) == small_run.STEPS * 2 * 4  # 2 groups of every step
  assert len({json.dumps(t) for t in written}) > 16


def test_killed_again_and_again(straight, tmp_path):
  """Stopped after step 2 by the number of steps, then killed five times."""
  code, said = go_on(tmp_path, None, "--config.steps=2")
  assert code == 0, said
  assert (tmp_path / "checkpoints" / "2").is_dir()
  before = last_said(tmp_path)
  for fault in (
    "SIGKILL:rollout:4",
    "SIGKILL:update:3",
    "SIGKILL:save:4",
    "SIGKILL:written:5",
    "SIGKILL:evaluation:5",
  ):
    code, said = go_on(tmp_path, fault)
    assert code == -signal.SIGKILL, f"{fault}: {said}"
    assert "goes on from step" in said
    assert last_said(tmp_path) == before  # of the finished run still
    if ":save:" in fault:
      left = {p.name for p in (tmp_path / "checkpoints").iterdir()}
      assert left > {"2"} and "4" not in left
  code, said = go_on(tmp_path)
  assert code == 0, said
  # The last step is on disk before the evaluation after it begins.
  assert "goes on from step 5" in said
  assert_same_run(tmp_path, straight)
  summary, other = last_said(tmp_path), last_said(straight)
  for key in ("before", "after", "tokens", "deterministic", "best_step"):
    assert summary[key] == other[key], key
  assert summary["seconds"] > before["seconds"]


@pytest.mark.slow
def test_an_estimators_averages_and_fresh_tasks_go_on(tmp_path):
  flags = (
    "--config.data.resample=2",
    "--config.advantage.name=rae",
    "--config.advantage.decay=0.8",
    "--config.eval.num_tasks=0",
  )
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  for workdir, steps in ((whole, 3), (parts, 2), (parts, 3)):
    code, said = small_run.run(workdir, *flags, f"--config.steps={steps}")
    assert code == 0, said
  runs = [
    checkpoint.Checkpoints(workdir, read_only=True).run()
    for workdir in (whole, parts)
  ]
  found = [run.extra["averages"] for run in runs]
  assert found[0] == found[1] != [[0, 0], [0, 0]]
  assert runs[0].cursor == runs[1].cursor > 3 * 4
  small_run.assert_equal(small_run.state(parts, 3), small_run.state(whole, 3))
  assert small_run.metrics(parts) == small_run.metrics(whole)


def test_signals_save_and_say_how_to_go_on(straight, tmp_path):
  """What is under way is finished within the grace, or given up after it; an
  evaluation that was given up is made up for."""
  for fault, grace_s, step in (
    ("SIGINT:evaluation:2", 0, 2),
    ("SIGTERM:rollout:4", 0, 3),
    ("SIGTERM:rollout:5", 30, 5),
  ):
    code, said = go_on(tmp_path, fault, GRACE_S=str(grace_s))
    number = getattr(signal, fault.partition(":")[0])
    assert code == 128 + number, said
    assert f"{number.name}: the step is finished" in said
    assert f"saved step {step} of 5 in {tmp_path}" in said
    assert "the same command goes on from there" in said
    assert "Traceback" not in said
    assert (tmp_path / "checkpoints" / str(step)).is_dir()
    assert not (tmp_path / "summary.json").exists()
  code, said = go_on(tmp_path)
  assert code == 0, said
  assert_same_run(tmp_path, straight)


@pytest.fixture
def copy(straight, tmp_path):
  return pathlib.Path(shutil.copytree(straight, tmp_path / "copy"))


def call(workdir, *flags):
  """In this process: for what ends before the devices are asked."""
  config = small_run.ROOT / "tests" / "small_run.py"
  return main.main([f"--config={config}", f"--workdir={workdir}", *flags])


def test_a_finished_run_stays_as_it_is(straight, copy):
  code, said = go_on(copy)
  assert code == 0, said
  assert_same_run(copy, straight)


@pytest.mark.parametrize(
  ("flag", "old", "new"),
  [
    ("--config.data.num_tasks=8", "4", "8"),
    ("--config.policies.solver.optimizer.learning_rate=0.5", "0.001", "0.5"),
    ("--config.agents.solver.template=default", "'short'", "'default'"),
  ],
)
def test_a_changed_config_is_refused(straight, copy, capsys, flag, old, new):
  assert call(copy, flag) == 2
  key = flag.removeprefix("--config.").partition("=")[0]
  said = capsys.readouterr().err
  assert f"{key}: was {old} in the checkpoint, is now {new}" in said
  assert "Traceback" not in said
  fix = "start a new --workdir" if "template" in key else "--allow_change="
  assert fix in said
  assert small_run.metrics(copy) == small_run.metrics(straight)
  assert (copy / "config.json").read_bytes() == (
    straight / "config.json"
  ).read_bytes()


def test_other_rows_are_refused(copy, capsys):
  """Of the same config: a file of the user's, edited in between."""
  path = copy / "manifest.json"
  about = json.loads(path.read_text())
  assert about["data"].keys() == {"train/arithmetic", "eval/arithmetic"}
  own = about["data"]["train/arithmetic"]
  path.write_text(json.dumps(about | {"data": {"train/arithmetic": "other"}}))
  assert call(copy) == 2
  said = capsys.readouterr().err
  assert f"(fingerprint {own}, was other)" in said
  assert "--allow_change=data.sources.arithmetic\n" in said
  now = copy, ["arithmetic"], {"train/arithmetic": own}
  for key in ("data", "data.sources.arithmetic.options.num_operands"):
    restoring.check_rows(*now, [key])
  with pytest.raises(config_lib.ConfigError, match="its rows"):
    restoring.check_rows(*now, ["data.sources.arithmetic2", "dat"])


def test_a_change_that_is_allowed(copy):
  """And recorded; the number of steps may change without leave."""
  key = "policies.solver.optimizer.learning_rate"
  flags = (f"--config.{key}=0.5", "--config.steps=6", "--config.eval.every=0")
  code, said = go_on(copy, None, *flags, f"--allow_change={key}")
  assert code == 0, said
  recorded = json.loads((copy / "config.json").read_text())
  assert recorded["policies"]["solver"]["optimizer"]["learning_rate"] == 0.5
  assert recorded["steps"] == 6
  assert (6, "reward/team") in small_run.metrics(copy)
  moved = small_run.policy(copy, 6, "solver")
  before = small_run.policy(copy, 5, "solver")
  step = "['step']"
  assert moved[step] == before[step] + 1
  name = "['params']['final_norm']"
  assert abs(moved[name] - before[name]).max() > 0.05  # by the new rate


def test_broken_checkpoints_are_refused_and_kept(copy, capsys):
  records = list((copy / "checkpoints").glob("*/run/metadata"))
  for path in records:
    path.write_bytes(b"{")
  assert call(copy) == 2
  said = capsys.readouterr().err
  steps = sorted(int(p.parents[1].name) for p in records)
  assert f"none of the checkpoints {steps} can be read" in said
  assert small_run.metrics(copy)
