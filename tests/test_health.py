"""Alarms: each on a run that goes wrong in one way, none on one that learns."""

import dataclasses
import json
import random

import pytest

from drmas_jax import config as config_lib
from drmas_jax import health, main, metrics

GROUPS = 16
TURNS = 30  # at which what goes wrong begins


def make_config(**limits):
  return config_lib.build(
    {
      "policies": {"p": {"checkpoint": "x"}, "q": {"checkpoint": "y"}},
      "agents": {
        "a": {"role": "math.solver", "policy": "p"},
        "b": {"role": "math.verifier", "policy": "q"},
      },
      "orchestra": {"name": "math"},
      "environment": {"name": "math"},
      "data": {"sources": {"arithmetic": {}}},
      "health": limits,
    }
  )


def well(step, seed=0):
  """A step's metrics of a run that has learned half of what it will."""
  rng = random.Random(f"{seed} {step}")

  def about(value, share=0.2):
    return value * rng.uniform(1 - share, 1 + share)

  found = {"success/team": about(0.5), "reward/team": about(0.5)}
  for agent, policy in (("a", "p"), ("b", "q")):
    found |= {
      f"truncated/{agent}": about(0.1, 1.0),
      f"valid/{agent}": about(0.9, 0.1),
      f"reward/{agent}": about(0.5),
      f"entropy/{agent}": about(0.3, 0.5),
      f"groups_in/{agent}": float(GROUPS),
      f"zero_variance_groups/{agent}": float(rng.randint(2, GROUPS - 5)),
      f"logprob_gap/{agent}": about(3e-3),
      f"ratio_error/{policy}": about(0.1),
      f"grad_norm/{policy}": rng.lognormvariate(-1.0, 0.25),
      # Of another pass, and not looked at.
      f"grad_norm/{policy}/{agent}": 99.0 if step == 25 else 1.0,
    }
  approved = about(0.6)
  return found | {
    "decided_approve/b": approved,
    "decided_reject/b": 1 - approved,
  }


def play(config, change=lambda step, found: {}, steps=60, every=10, score=None):
  """[(step, Seen)] of a run, evaluated every so many steps."""
  monitor, seen = health.Monitor(config), []
  for step in range(1, steps + 1):
    if score is not None and (step - 1) % every == 0:
      monitor.evaluated(step - 1, score(step - 1), 128)
    found = well(step)
    seen.append((step, monitor.see(step, found | change(step, found))))
  return monitor, seen


def begun(seen):
  return [(step, a.name, a.agent) for step, s in seen for a in s.begun]


def later(since=TURNS, **values):
  """Values of metrics from a step on; "/" is written "__"."""

  def change(step, found):
    if step < since:
      return {}
    return {
      (name := key.replace("__", "/")): value(found[name])
      if callable(value)
      else value
      for key, value in values.items()
    }

  return change


BAD = {  # alarm: (whose, what changes, a key that its text names)
  "truncated": ("a", later(truncated__a=0.9), "agents.a.max_tokens"),
  "invalid": ("b", later(valid__b=0.05), "agents.b.template"),
  "zero_variance": ("a", later(zero_variance_groups__a=15.0), "data.resample"),
  "one_verdict": (
    "b",
    later(decided_approve__b=0.0, decided_reject__b=1.0),
    "agents.b.template",
  ),
  "entropy": (
    "b",
    later(entropy__b=lambda x: x / 10),
    "policies.q.optimizer.learning_rate",
  ),
  "ratio": ("p", later(ratio_error__p=2.0), "policies.p.rollout_dtype"),
  "logprob_gap": ("b", later(logprob_gap__b=0.5), "policies.q.rollout_dtype"),
  "norm_spike": (
    "q",
    lambda step, found: (
      {"grad_norm/q": 40.0} if step in (TURNS - 9, TURNS) else {}
    ),
    f"--spike {TURNS}",
  ),
}


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(8))
def test_a_run_that_is_well_alarms_nobody(seed):
  monitor, seen = play(
    make_config(),
    lambda step, found: well(step, seed),
    steps=200,
    score=lambda step: random.Random(step).uniform(0.46, 0.52),
  )
  assert begun(seen) == [] and monitor.summary() == {}
  assert all(s.metrics == {"alarms/team": 0.0} for _, s in seen)


@pytest.mark.quick
@pytest.mark.parametrize("name", BAD)
def test_each_fires_once_and_alone(name):
  whose, change, key = BAD[name]
  monitor, seen = play(make_config(stop_on=[name]), change)
  [(step, *found)] = begun(seen)
  assert found == [name, whose] and TURNS <= step < TURNS + 6
  [alarm] = [a for _, s in seen for a in s.begun]
  assert key in alarm.text and alarm.text.startswith(f"{whose}: ")
  at = dict(seen)
  assert at[step].metrics == {"alarms/team": 1.0, f"alarms/{name}/{whose}": 1.0}
  assert alarm.text in at[step].stop and f"stop_on: {name}" in at[step].stop
  assert not at[step - 1].stop
  counts = monitor.summary()[f"{name}/{whose}"]
  assert counts["times"] == 1
  lasting = sum(f"alarms/{name}/{whose}" in s.metrics for _, s in seen)
  assert counts["steps"] == lasting
  # What is new becomes what is usual, for that which compares with the past.
  assert lasting == 1 if name == "norm_spike" else lasting > 4


@pytest.mark.quick
def test_every_alarm_has_a_limit_and_a_bad_run():
  limits = {f.name for f in dataclasses.fields(config_lib.Health)}
  assert set(health.CHECKS) == {*BAD, "held_out"}
  assert set(health.CHECKS) <= limits


@pytest.mark.quick
def test_one_batch_may_be_too_hard_but_a_limit_is_not():
  bad = {"zero_variance_groups__a": 16.0, "truncated__b": 1.0}
  _, seen = play(make_config(), later(1, **bad), steps=9)
  assert begun(seen) == [(1, "truncated", "b"), (5, "zero_variance", "a")]


@pytest.mark.quick
def test_entropy_that_rises():
  _, seen = play(make_config(), later(entropy__a=lambda x: 8 * x))
  [(_, name, whose)] = begun(seen)
  assert (name, whose) == ("entropy", "a")
  assert "rose" in next(a for _, s in seen for a in s.begun).text


@pytest.mark.quick
def test_entropy_falls_where_it_is_learned_what_to_say():
  _, seen = play(
    make_config(), later(entropy__b=lambda x: x / 10, reward__b=0.85)
  )
  assert begun(seen) == []


@pytest.mark.quick
def test_equal_scores_of_a_team_that_is_right():
  changes = {"zero_variance_groups__a": 16.0, "decided_approve__b": 1.0}
  right = later(TURNS - 4, success__team=0.95)
  equal = later(**changes)
  _, seen = play(make_config(), lambda *at: right(*at) | equal(*at))
  assert begun(seen) == []
  _, seen = play(make_config(), equal)
  assert {name for _, name, _ in begun(seen)} == {
    *("zero_variance", "one_verdict")
  }


@pytest.mark.quick
def test_agents_that_are_not_trained_learn_nothing():
  config = make_config()
  agents = config.agents | {
    "a": dataclasses.replace(config.agents["a"], train=False)
  }
  config = dataclasses.replace(config, agents=agents)
  _, seen = play(
    config, later(zero_variance_groups__a=16.0, entropy__a=lambda x: x / 10)
  )
  assert begun(seen) == []


@pytest.mark.quick
@pytest.mark.parametrize(
  ("fall", "reward", "alarms"), [(0.2, 0.8, 1), (0.02, 0.8, 0), (0.2, 0.4, 0)]
)
def test_held_out_falls_while_reward_rises(fall, reward, alarms):
  _, seen = play(
    make_config(),
    later(reward__team=reward),
    score=lambda step: 0.7 - fall * (step > TURNS),
  )
  assert [x[1:] for x in begun(seen)] == [("held_out", "team")] * alarms
  for step, name, _ in begun(seen):
    assert name == "held_out" and step == 41  # behind the evaluation of 40


@pytest.mark.quick
def test_the_score_before_the_first_step_counts():
  _, seen = play(
    make_config(),
    lambda step, found: {"reward/team": 0.3 if step < 6 else 0.6},
    score=lambda step: 0.6 if step == 0 else 0.3,
  )
  assert [x[1:] for x in begun(seen)] == [("held_out", "team")]


@pytest.mark.quick
def test_comes_again_after_it_has_ended():
  bad = {*range(20, 30), *range(31, 35), *range(50, 55)}
  monitor, seen = play(
    make_config(),
    lambda step, found: {"truncated/a": 1.0 if step in bad else 0.0},
  )
  first, second = begun(seen)
  assert (first[0], second[0]) == (22, 52)  # the third of five steps
  assert monitor.summary()["truncated/a"]["times"] == 2


@pytest.mark.quick
@pytest.mark.parametrize("name", [*BAD, "held_out"])
@pytest.mark.parametrize("at", [3, 29, 31, 41])
def test_a_resumed_run_alarms_as_a_straight_one(name, at):
  config = make_config()
  change = BAD.get(name, ("", later(reward__team=0.8), ""))[1]

  def go(monitor, steps):
    for step in steps:
      if (step - 1) % 10 == 0:
        monitor.evaluated(step - 1, 0.7 - 0.3 * (step > TURNS), 128)
      found = well(step)
      yield monitor.see(step, found | change(step, found))

  straight = list(go(health.Monitor(config), range(1, 61)))
  monitor = health.Monitor(config)
  before = list(go(monitor, range(1, at + 1)))
  saved = json.loads(json.dumps(monitor.state()))
  list(go(monitor, range(at + 1, 50)))  # goes on, and is killed
  resumed = health.Monitor(config)
  resumed.restore(saved)
  assert before + list(go(resumed, range(at + 1, 61))) == straight
  assert sum(len(s.begun) for s in straight) > 0


@pytest.mark.quick
def test_one_spike_is_no_alarm_and_an_update_without_a_norm_is_a_spike():
  odd = {5, 45}  # further apart than a window

  def change(step, found):
    return {"skipped/non_finite/p": float(step in odd)} | (
      {"grad_norm/p": float("nan")} if step in odd else {}
    )

  assert begun(play(make_config(), change)[1]) == []
  odd.add(24)
  _, seen = play(make_config(), change)
  assert begun(seen) == [(24, "norm_spike", "p")]
  text = next(a.text for _, s in seen for a in s.begun)
  assert "is not finite" in text and "2 times in 20 updates" in text


@pytest.mark.quick
def test_fine_tuning_has_other_keys_to_turn():
  monitor = health.Monitor(make_config(), "sft")
  norms = [0.2, 0.21, 0.19] * 5 + [9.0, 0.2, 9.0]
  seen = [
    monitor.see(step, {"loss/p": 1.0, "grad_norm/p": norm})
    for step, norm in enumerate(norms, 1)
  ]
  assert [len(s.begun) for s in seen] == [0] * 17 + [1]
  (alarm,) = seen[-1].begun
  assert alarm.name == "norm_spike" and "lower sft.learning_rate" in alarm.text
  assert "replay" not in alarm.text and "advantage" not in alarm.text


@pytest.mark.quick
def test_what_a_spike_is():
  limits = config_lib.Health()
  calm = [0.2, 0.21, 0.19, 0.2, 0.22, 0.18, 0.2, 0.2, 0.21, 0.19]
  assert health.is_spike(0.61, calm, limits)
  assert not health.is_spike(0.59, calm, limits)  # under three medians
  assert not health.is_spike(9.9, calm[1:], limits)  # too few to know
  assert health.is_spike(float("nan"), [], limits)
  wild = [0.05, 0.1, 0.2, 0.2, 0.2, 0.2, 0.4, 0.8, 0.1, 0.4]
  assert not health.is_spike(1.0, wild, limits)  # as they scatter
  assert health.is_spike(100.0, wild, limits)
  # Of the last `window` only.
  assert health.is_spike(3.1, [9.0] * 30 + [1.0] * 20, limits)
  monitor = health.Monitor(make_config())
  for step in range(1, 20):
    monitor.see(step, {"grad_norm/p": 0.2, "grad_norm/q": 0.2})
  assert monitor.spikes({"grad_norm/p": 0.9, "grad_norm/q": 0.3}) == ("p",)
  assert monitor.spikes({"grad_norm/p": 0.3}) == ()


@pytest.mark.quick
def test_shares_of_verdicts():
  from drmas_jax.agents import math as roles
  from drmas_jax.types import Reply

  assert roles.verifier.verdicts == ("approve", "reject")
  texts = ("<verify>approve</verify>", "<verify> Reject </verify>", "hm")
  replies = [roles.verifier.parse(text, "stop") for text in texts]
  turns = [dataclasses.make_dataclass("T", ["reply"])(r) for r in replies]
  turns.append(dataclasses.replace(turns[0], reply=None))
  assert metrics.decided(turns, roles.verifier.verdicts) == {
    "decided_approve": 0.5,  # one of them by default
    "decided_reject": 0.25,
  }
  assert metrics.decided([], ("approve",)) == {}
  assert metrics.decided(turns, ()) == {}
  assert Reply("", verdict="x").verdict not in roles.verifier.verdicts


@pytest.mark.quick
def test_an_unknown_name_lists_those_there_are(root):
  with pytest.raises(config_lib.ConfigError) as e:
    config_lib.read(
      root / "configs" / "math_tiny.py", ["health.stop_on=['norm_spikes']"]
    )
  assert "health.stop_on: 'norm_spikes'" in str(e.value)
  assert "truncated" in str(e.value) and "norm_spike," in str(e.value)


def test_a_run_ends_on_an_alarm_and_goes_on_without(root, tmp_path, capsys):
  """Three tokens are too few for an answer."""
  config = config_lib.load_file(root / "tests" / "small_run.py")
  solver = config["agents"]["solver"] | {"max_tokens": 3}
  config |= {
    "policies": {"solver": config["policies"]["solver"]},
    "agents": {"solver": solver},
    "orchestra": {"name": "single"},
    "eval": {"num_tasks": 0, "every": 0},
  }
  (tmp_path / "config.json").write_text(json.dumps(config))
  workdir = tmp_path / "run"
  flags = (f"--config={tmp_path / 'config.json'}", f"--workdir={workdir}")
  assert main.main([*flags, "--config.health.stop_on=['truncated']"]) == 3
  said = capsys.readouterr().err
  assert "ALARM at step 1: truncated: solver: 100 %" in said.replace("%", " %")
  assert "step 1: health.stop_on: truncated: solver" in said
  assert "saved step 1" in said
  lines = (workdir / "alarms.jsonl").read_text().splitlines()
  record, other = map(json.loads, lines)
  assert (record["name"], other["name"]) == ("truncated", "invalid")
  assert record.keys() == {"step", "name", "agent", "text"}
  assert record["step"] == 1 and record["agent"] == "solver"
  with open(workdir / "alarms.jsonl", "a") as f:  # of a step that is lost
    f.write(json.dumps(record | {"step": 2}) + "\n")
  assert main.main([*flags, "--config.steps=2"]) == 0
  # It is still on, and so is not told of again.
  assert (workdir / "alarms.jsonl").read_text().splitlines() == lines
  summary = json.loads((workdir / "summary.json").read_text())
  assert summary["alarms"]["truncated/solver"] == {"times": 1, "steps": 2}
  last = json.loads((workdir / "metrics.jsonl").read_text().splitlines()[-1])
  assert last["alarms/truncated/solver"] == 1.0
