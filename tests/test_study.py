"""The study of estimators: its numbers by hand, and what it does not repeat."""

import dataclasses
import json
import math
import os
import pathlib
import types
from unittest import mock

import numpy as np
import pytest

from drmas_jax import config as config_lib
from drmas_jax import main, rewards, study, writers

pytestmark = pytest.mark.quick

# Two agents on two backbones; three groups, the third without agent 0.
AGENT = np.array([0, 0, 1, 0, 0, 1, 1])
GROUP = np.array([0, 0, 0, 1, 1, 2, 2])
SCORES = np.array([1, 0, 1, 1, 1, 0, 1], np.float32)
VALUES = np.array([2.0, -1.0, 5.0, 0.5, 1.0, 3.0, -3.0])


@pytest.fixture
def step():
  rng = np.random.default_rng(1)
  z = rng.normal(size=(7, 5))
  rows = rewards.Rows([], SCORES, GROUP, AGENT, GROUP, False)
  products = []
  for agent in (0, 1):
    places = np.flatnonzero(agent == AGENT)[::-1]  # in any order
    products.append((places, z[places] @ z[places].T, places + 1.0))
  return study.Step(rows, [], products), z


def test_gradients_of_an_agent(step):
  step, z = step
  got = study.gradients(step, VALUES, 0)
  own = [0, 1, 3, 4]
  each = VALUES[:, None] * np.arange(1, 8)[:, None] * z  # A w z
  assert got.mean == 2.5 / 4 and got.square == (4 + 1 + 0.25 + 1) / 4
  assert got.factor == 2.5  # of group 0; in group 1 scores are equal
  assert got.most == 2
  whole = each[own].sum(0)
  assert got.norm == pytest.approx(np.linalg.norm(whole))
  terms = (VALUES[own] ** 2 * (z[own] ** 2).sum(1)).mean()
  assert got.terms == pytest.approx(terms)
  parts = np.array([each[[0, 1]].sum(0), each[[3, 4]].sum(0), 0 * whole])
  noise = 3 * np.var(parts, axis=0, ddof=1).sum()
  assert got.noise == pytest.approx(noise)
  assert got.signal == pytest.approx((whole**2).sum() - noise)


def test_an_agent_that_did_not_speak(step):
  step, _ = step
  assert study.gradients(step, VALUES, 2) is None


def test_paired_differences():
  # Student's t with two degrees: 4.303 for 95 %, 1.061 for a power of 80 %.
  mean, half, least = study.paired([2, 4, 6], [1, 2, 3])
  assert mean == 2
  assert half == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
  assert least == pytest.approx((4.3027 + 1.0607) / math.sqrt(3), rel=1e-4)
  assert study.paired([2], [1]) == (1, math.inf, math.inf)


def finished(workdir, norms):
  workdir.mkdir(parents=True)
  after = {"macro": {"avg@8": [0.75, 0.7, 0.8], "maj@8": [0.8, 0.7, 0.9]}}
  writers.write_json(
    workdir / "summary.json", {"after": after, "cpu_seconds": 9.0, "steps": 7}
  )
  lines = [
    {"step": i, "success/team": i / 10, "skipped/non_finite/p": float(i == 3)}
    | ({"grad_norm/p": norm, "grad_norm/p/a": 99.0} if norm else {})
    for i, norm in enumerate(norms, 1)
  ]
  (workdir / "metrics.jsonl").write_text(
    "".join(f"{json.dumps(line)}\n" for line in lines)
  )


def test_stability_of_a_run(tmp_path):
  finished(tmp_path / "run", [9.0, 1, 1, 0, 1, 1, 3.5, 2.5])
  assert study.stability(tmp_path / "run") == {
    "held-out avg@8 at the end": 0.75,
    "success, mean over steps": pytest.approx(0.45),
    "CPU seconds": 9.0,
    "gradient norm, mean: p": pytest.approx(19 / 7),
    "gradient norm, max: p": 9.0,
    # 3.5 is behind five others; 2.5 is not above three times their median.
    "spikes: p": 1.0,
    "non-finite updates: p": 1.0,
  }


def test_table_of_differences():
  measures = {"a": [{"x": 1.0}, {"x": 3.0}], "b": [{"x": 2.0}, {"x": 4.0}]}
  text = study.stability_table(measures, "a")
  lines = [[c.strip() for c in x.split("|")[1:-1]] for x in text.splitlines()]
  assert ["x", "2.000", "3.000"] in lines
  assert ["minus a", "", "+1.000 [+1.000, +1.000]"] in lines
  measures["b"][1]["lost"] = 1.0  # by one run alone
  assert "| lost" in study.stability_table(measures, "a")


def test_results_of_the_same_settings_are_kept(tmp_path):
  path = tmp_path / "case.json"
  assert study._kept(path, {"steps": 2}) is None
  writers.write_json(path, {"settings": {"steps": 2}, "found": {"x": 1}})
  assert study._kept(path, {"steps": 2}) == {"x": 1}
  assert study._kept(path, {"steps": 3}) is None


def test_a_finished_run_is_not_run_again(tmp_path, root, monkeypatch):
  config = config_lib.load_file(root / "configs" / "normaliser_study.py")
  asked = []

  def run(command, check, env):
    asked.append(command)
    # What lies beside the config can be imported.
    assert str(root / "configs") in env["PYTHONPATH"].split(os.pathsep)
    given = {c.partition("=")[0]: c.partition("=")[2] for c in command}
    raw = json.loads(pathlib.Path(given["--config"]).read_text())
    assert raw["seed"] == 3 and raw["advantage"]["name"] == "grpo"
    workdir = tmp_path / "part" / "rule" / "seed_3"
    assert given["--workdir"] == str(workdir) and check
    workdir.mkdir(parents=True, exist_ok=True)
    writers.write_json(workdir / "summary.json", {"steps": raw["steps"]})
    writers.write_json(workdir / "config.json", raw)

  monkeypatch.setattr(study.subprocess, "run", run)
  workdir, grpo = tmp_path / "part/rule/seed_3", {"name": "grpo"}
  for _ in range(2):
    study._train(config, grpo, 3, workdir)
  assert len(asked) == 1
  # Nor taken for one of another config.
  study._train(config, grpo | {"pool_agents": True}, 3, workdir)
  assert len(asked) == 2


def test_products_have_the_weights_of_the_loss(root):
  """Turns out of the loss count nowhere, others by their agent's weight."""
  raw = config_lib.load_file(root / "configs" / "normaliser_study.py")
  config = config_lib.build(raw)
  solver, verifier = config.agents
  agents = config.agents | {
    verifier: dataclasses.replace(config.agents[verifier], loss_weight=0.5)
  }
  config = dataclasses.replace(config, agents=agents)
  turns = [
    types.SimpleNamespace(
      prompt_ids=np.zeros(3), completion_ids=np.zeros(n), policy="p", agent=a
    )
    for n, a in ((1, solver), (3, verifier), (4, solver))
  ]
  backbone = mock.Mock(names=("p",), row_buckets=(8,), policy_index={"p": 0})
  backbone.policy.loss = config_lib.Loss()
  backbone.in_loss = lambda turns: np.array([True, True, False])
  backbone.score_vectors = lambda batch: np.eye(3)
  rows = types.SimpleNamespace(turns=turns, agent=np.zeros(3, int))
  with mock.patch("drmas_jax.scores.lay_out"):
    places, products, weights = study._products(config, backbone, rows)
  assert (
    places.tolist() == [0, 1, 2] and products.tolist() == np.eye(3).tolist()
  )
  np.testing.assert_allclose(weights, [1 / 4, 0.5 / 4, 0])


def test_weights_of_adapters_are_in_no_run(tmp_path, root, monkeypatch):
  config = config_lib.load_file(root / "configs" / "normaliser_study.py")
  raw = json.loads(json.dumps(config))
  name = next(iter(raw["policies"]))
  raw["policies"][name]["adapter"] = {"rank": 2}
  monkeypatch.setattr(study, "_train", lambda *args: pytest.fail("was run"))
  with pytest.raises(config_lib.ConfigError, match=f"{name}.adapter: a case"):
    study._trained(raw, 2, tmp_path)


def test_only_what_was_trained_comes_from_the_run(tmp_path, root, monkeypatch):
  config = config_lib.load_file(root / "configs" / "normaliser_study.py")
  raw = json.loads(json.dumps(config))
  first, second = raw["policies"]
  raw["policies"][second]["frozen"] = True
  monkeypatch.setattr(study, "_train", lambda *args: None)
  found = study._trained(raw, 2, tmp_path)["policies"]
  assert found[first]["checkpoint"] == f"run:{tmp_path}/{first}@2"
  assert found[second] == raw["policies"][second]


def test_the_shipped_study_can_be_read(root):
  found = config_lib.load_file(
    root / "configs" / "normaliser_study.py", "get_study"
  )
  rules = study._rules(found)
  for case in found["rollouts"]["cases"].values():
    config_lib.check(config_lib.build(case["config"]))
  for part in found["training"].values():
    assert part["baseline"] in part["rules"] and set(part["rules"]) <= set(
      rules
    )
    assert len(part["seeds"]) == 8 and part["config"]["steps"] == 40
    penalties = {
      a["invalid_penalty"] for a in part["config"]["agents"].values()
    }
    assert penalties == {0.0}  # one thing changes


def test_a_config_that_is_no_study(tmp_path, root, capsys, monkeypatch):
  monkeypatch.setattr(main, "set_environment", lambda: None)
  path = root / "configs" / "math_tiny.py"
  args = [f"--config={path}", f"--workdir={tmp_path}"]
  assert study.main(args) == 2
  assert "get_study" in capsys.readouterr().err
