"""A stranger's team, as its user runs it: the command, a notebook, a check."""

import ast
import json
import os
import shutil
import subprocess
import sys

import pytest
import readme
import small_run
import xla_flags

from drmas_jax import config as config_lib

OWN = small_run.ROOT / "tests" / "own_team"

# Two programs to compile instead of eight: one length of prompts and rows, no
# norms by agent; and few held-out episodes.
CHANGES = {
  "policies.one.engine.prefill_buckets": [44],
  "policies.two.engine.prefill_buckets": [44],
  "policies.one.row_buckets": [56],
  "policies.two.row_buckets": [56],
  "policies.one.micro_tokens": 1792,
  "policies.two.micro_tokens": 1792,
  "logging.agent_norm_every": 0,
  "eval.num_tasks": 2,
  "eval.k": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """With the team in it, and nothing else of this project."""
  folder = tmp_path_factory.mktemp("user")
  shutil.copytree(OWN, folder / "own_team")
  return folder


@pytest.fixture(scope="module")
def straight(folder):
  """What the README's commands, a check and two steps, said."""
  return readme.bash(readme.block("--config own_team"), folder, CHANGES)


@pytest.fixture(scope="module")
def notebook(folder, straight):
  script = small_run.ROOT / "tests" / "own_notebook.py"
  done = subprocess.run(
    [sys.executable, script, folder, json.dumps(CHANGES)],
    env=os.environ
    | {"XLA_FLAGS": xla_flags.flags(), "PYTHONPATH": str(small_run.ROOT)},
    capture_output=True,
    text=True,
    timeout=280,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


def test_it_trains_and_evaluates(folder, straight):
  workdir = folder / "runs" / "own_team"
  summary = json.loads((workdir / "summary.json").read_text())
  assert summary["steps"] == 2 and summary["deterministic"]
  assert summary["before"]["own"] and summary["after"]["own"]
  found = small_run.metrics(workdir)
  assert {found[step, "valid/judge"] for step in (1, 2)} == {1.0}
  rewards = [found[1, f"reward/{who}"] for who in ("left", "right", "judge")]
  assert len(set(rewards)) == 3, "each agent has a reward of its own"
  assert "the task was played to its end" in straight  # by the check
  assert "before" in straight and "after" in straight


def _of_training(workdir):
  """Numbers of steps, evaluations left out: a run ended early has one more."""
  return {
    key: value
    for key, value in small_run.metrics(workdir).items()
    if not key[1].startswith("eval/")
  }


def test_a_resumed_run_is_the_straight_one(folder, notebook):
  """So is its order of turns, two of which are asked for at the same time."""
  one, two = folder / "runs" / "own_team", folder / "first"
  assert _of_training(one) == _of_training(two)
  episodes = small_run.transcripts(one)
  assert len(episodes) == 2 * 2 * 8 and episodes == small_run.transcripts(two)
  spoken = [[t["agent"] for t in e["turns"]] for e in episodes]
  order = ["left", "right", "judge", "judge", "left", "right"]
  assert spoken == [order] * len(episodes)
  for policy in ("one", "two"):
    states = (small_run.policy(w, 2, policy) for w in (one, two))
    small_run.assert_equal(*states)


def test_runs_of_a_notebook(folder, notebook):
  first, whole, last = notebook["results"]
  assert [r["step"] for r in whole["metrics"]] == [0, 1, 2]
  assert whole["metrics"][:2] == first["metrics"]
  assert whole["before"] == first["before"] and whole["after"]["own"]
  assert whole["policies"] == {
    name: f"run:{folder}/first/{name}" for name in ("one", "two")
  }
  assert [r["step"] for r in last["metrics"]] == [0, 1]
  config = json.loads((folder / "second" / "config.json").read_text())
  checkpoint = config["policies"]["one"]["checkpoint"]
  assert checkpoint == f"run:{folder}/first/one@2"


def test_a_run_gives_back_the_memory_of_the_devices(notebook):
  assert max(notebook["left"]) < 10_000, notebook["left"]
  assert notebook["signals"]


@pytest.mark.quick
def test_what_python_may_hand_over(folder, monkeypatch):
  monkeypatch.chdir(folder)
  path = folder / "own_team" / "config.py"
  try:
    raw = config_lib.load_file(path)
    changes = {"eval": {"k": 3}, "policies.one.frozen": True}
    config = config_lib.resolve(path, changes)
    assert (config.eval.k, config.eval.num_tasks) == (3, 4)
    assert config.policies["one"].frozen
    assert config_lib.resolve(raw, changes) == config
    assert raw == config_lib.load_file(path), "it stays as it is"
    built = config_lib.build(raw)
    assert config_lib.resolve(built, changes) == config
    with pytest.raises(config_lib.ConfigError, match="did you mean 'steps'"):
      config_lib.resolve(raw, {"stepz": 3})
  finally:
    forget()


def forget():
  for name in [n for n in sys.modules if n.split(".")[0] == "own_team"]:
    del sys.modules[name]


# -- the files -----------------------------------------------------------------


@pytest.mark.quick
def test_it_is_small_and_needs_types_alone():
  files = sorted(p for p in OWN.iterdir() if p.is_file())
  assert [p.name for p in files] == ["config.py", "debate.py", "tasks.jsonl"]
  assert sum(p.read_text().count("\n") for p in files) <= 80
  imported = set()
  for path in files[:2]:
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Import):
        imported |= {alias.name for alias in node.names}
      elif isinstance(node, ast.ImportFrom):
        imported.add(node.module)
  assert {n for n in imported if n.startswith("drmas")} == {"drmas_jax.types"}
