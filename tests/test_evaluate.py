"""Held-out evaluation: numbers by hand, and that it goes on where it was."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import types as pytypes

import jax
import numpy as np
import pytest
import small_run
from test_rollout import Role, Scripted

from drmas_jax import (
  compare,
  evaluate,
  hosts,
  main,
  records,
  rollout,
  sampling,
  writers,
)
from drmas_jax import config as config_lib
from drmas_jax.types import Fault, Outcome, RunError, Stopped, Task

K = 3


# -- numbers -------------------------------------------------------------------


def scores(success, answers=None, ok=None):
  success = np.array(success, bool)
  return evaluate.Scores(
    list(range(len(success))),
    success,
    np.ones_like(success) if ok is None else np.array(ok, bool),
    answers or [[None] * success.shape[1]] * len(success),
  )


def evaluation(k, **sets):
  return evaluate.Evaluation(
    k=k,
    sets=sets,
    agents={"a": {"turns": 2.0}},
    records=[],
    num_clocked=1,
    num_played=4,
    tokens_per_s=2.0,
    seconds=1.0,
  )


@pytest.mark.quick
def test_summary_by_set_and_over_sets():
  """Two questions of 4 episodes: 3 and 0 right; one of another set, 1 right."""
  both = evaluation(
    4,
    one=scores(
      [[1, 1, 1, 0], [0, 0, 0, 0]],
      answers=[["7", "7", None, "8"], ["1", "1", "2", "2"]],
    ),
    two=scores([[0, 1, 0, 0]]),
  )
  summary = both.summary()
  assert list(summary) == ["one", "two", "macro"]
  means = {
    name: {what: value[0] for what, value in values.items()}
    for name, values in summary.items()
  }
  assert means == {
    "one": {"avg@4": 0.375, "maj@4": 0.5, "pass@4": 0.5},
    # Nobody has an answer there: its votes are lost, and not left out.
    "two": {"avg@4": 0.25, "maj@4": 0.0, "pass@4": 1.0},
    "macro": {"avg@4": 0.3125, "maj@4": 0.25, "pass@4": 0.75},
  }
  for values in summary.values():
    for mean, low, high in values.values():
      assert 0 <= low <= mean <= high <= 1
  found = both.metrics()
  assert found["eval/avg@4"] == both.score == 0.3125
  assert found["eval/one/maj@4"] == 0.5 and found["eval/maj@4"] == 0.25
  assert (
    found["eval/turns/a"] == 2 and found["eval/wall_clock_faults/team"] == 1
  )
  assert evaluate.rows(summary)["macro avg@4"] == summary["macro"]["avg@4"]


@pytest.mark.quick
def test_one_set_alone_and_pass_at_fewer():
  sixteen = np.zeros([2, 16])
  sixteen[0, :4] = 1
  alone = evaluation(16, one=scores(sixteen))
  means = {what: v[0] for what, v in alone.summary()["one"].items()}
  # 1 - C(12, 4) / C(16, 4) of the first question, by half.
  assert means["pass@4"] == pytest.approx((1 - 495 / 1820) / 2)
  assert list(means) == ["avg@16", "pass@4", "pass@16"]
  assert list(evaluate.rows(alone.summary())) == [
    *("one avg@16", "one pass@4", "one pass@16")
  ]
  assert not any(n.startswith("eval/one/") for n in alone.metrics())
  few = alone.first(1, 2)
  assert few.score == 1 and few.sets["one"].questions == [0]


@pytest.mark.quick
def test_failed_episodes_are_not_wrong_ones():
  ok = [[1, 0, 1, 1], [0, 0, 0, 0]]
  lost = evaluation(
    4, one=scores([[1, 0, 1, 0], [0, 0, 0, 0]], ok=ok), two=scores([[1] * 4])
  )
  summary = lost.summary()
  assert summary["one"] == {"avg@4": (2 / 3, 0, 1)}
  assert summary["macro"].keys() == {"avg@4"}
  assert lost.metrics()["eval/episodes_failed/team"] == 5
  gone = evaluation(4, one=scores([[0] * 4], ok=[[0] * 4]))
  assert gone.summary() == {} and gone.score is None


def record(parts=None, ok=True, turns=(), fault=None):
  return records.Record(
    "s", 0, 0, ok, True, None, parts or {}, list(turns), fault, False
  )


def turn(agent, tokens=4, verdict=None, stop_reason="stop", valid=True):
  return {
    "agent": agent,
    "tokens": tokens,
    "valid": valid,
    "verdict": verdict,
    "stop_reason": stop_reason,
  }


@pytest.mark.quick
def test_numbers_by_agent():
  """The second verdict of an episode is about another solution."""
  played = [
    record(
      {"first_correct": 1.0},
      turns=[
        *(turn("s"), turn("v", verdict="approve", stop_reason="tag")),
        turn("v", verdict="reject", valid=False),
      ],
    ),
    record(
      {"first_correct": 0.0},
      turns=[turn("s", 8, stop_reason="length"), turn("v", verdict="approve")],
    ),
    record({"first_correct": 0.0}, turns=[turn("v", verdict="reject")]),
    record(turns=[turn("v", verdict="reject")]),  # nobody says if it was right
    record({"first_correct": 1.0}, ok=False, turns=[turn("s", 1000)]),
  ]
  found = evaluate.by_agent(evaluate.count(played), 4)
  assert found["s"] == {
    "turns": 0.5,
    "tokens": 3.0,
    "tokens_per_turn": 6.0,
    "valid": 1.0,
    "truncated": 0.5,
    "closed": 0.0,
  }
  assert found["v"]["turns"] == 1.25 and found["v"]["closed"] == 0.2
  assert found["v"]["valid"] == 0.8
  judged = {k: v for k, v in found["v"].items() if k.endswith(("on", "all"))}
  assert judged == {
    "approve_precision": 0.5,
    "approve_recall": 1.0,
    "reject_precision": 1.0,
    "reject_recall": 0.5,
  }
  assert found["v"]["verdicts"] == 3
  assert found["v"]["balanced_accuracy"] == 0.75


# -- playing, on scripted samplers ---------------------------------------------


def tasks(name, num):
  return [Task(name, i, i, f"{name} {i}", i) for i in range(num)]


class World:
  """A team of one turn; what it says depends on key, task and episode."""

  def __init__(self, late=(), scores_groups=False, stop_after=10**9):
    config = config_lib.build(
      {
        "policies": {"p": {"checkpoint": "x", "engine": {"num_slots": 2}}},
        "agents": {"a": {"role": "math.solver", "policy": "p"}},
        "orchestra": {"name": "single"},
        "environment": {"name": "math"},
        "data": {"sources": {"one": {}}},
      }
    )
    self.config, self.stop_after = config, stop_after
    self.late = set(late)
    team = object.__new__(rollout.Team)
    team.members = {"a": rollout.Member("a", Role(), config.agents["a"])}
    team.orchestra = pytypes.SimpleNamespace(run=self.play)
    team.orchestra_options = {}
    team.environment = self
    team.reward_timeout_s = 1.0
    if scores_groups:
      self.score_group = lambda g: [self.score(g.task, e) for e in g.episodes]
    num_slots = config.policies["p"].engine.num_slots
    self.sampler = Scripted(self.answer, num_slots=num_slots)
    self.rollout = rollout.Rollout(
      team, {"p": self.sampler}, config, heartbeat=self.beat
    )
    self.played, self.most = [], 0

  async def play(self, task, call):
    return (await call("a", task)).text

  def answer(self, key):
    sampler = self.sampler
    self.most = max(self.most, len(sampler.queue) + len(sampler.running))
    if key[:2] in self.late:
      return Fault("deadline", "late", True)
    seed = (*np.asarray(self.sampler.engine.key), *key)
    return str(np.random.default_rng(seed).integers(3))

  def score(self, task, episode):
    self.played.append((task.source, task.index, episode.index))
    return Outcome(float(episode.action == "1"), answer=episode.action)

  def beat(self):
    if len(self.played) >= self.stop_after:
      raise Stopped

  def run(self, store=None, k=K, **sets):
    key = sampling.root_key(0, "eval")
    return evaluate.run(self.rollout, sets, self.config, key, k, store)


def open_store(folder, fresh=False, **identity):
  identity = {"sources": {"one": "f", "two": "g"}, "seed": 0} | identity
  return records.Store(folder, identity, fresh)


def same_scores(one, other):
  np.testing.assert_array_equal(one.success, other.success)
  np.testing.assert_array_equal(one.ok, other.ok)
  assert one.answers == other.answers


def same(left, right):
  assert left.sets.keys() == right.sets.keys()
  for name, one in left.sets.items():
    same_scores(one, right.sets[name])
  assert left.agents == right.agents


@pytest.mark.quick
def test_another_set_and_more_episodes_change_nothing():
  one, two = tasks("one", 6), tasks("two", 4)
  alone = World().run(one=one)
  assert 0 < alone.sets["one"].success.sum() < 6 * K
  both = World().run(one=one, two=two)
  for more in (both, World().run(k=K + 2, one=one, two=two)):
    same_scores(alone.sets["one"], more.first(6, K).sets["one"])
  # The sets have keys of their own: equal rows are not equally answered.
  assert both.sets["two"].answers != both.sets["one"].answers[:4]


@pytest.mark.quick
def test_collect_skips_and_hands_over():
  world, ended = World(), []
  groups = world.rollout.collect(
    tasks("one", 3),
    K,
    sampling.root_key(0, "eval"),
    skip={(0, 1), (2, 0), (2, 1), (2, 2)},
    finished=lambda e: ended.append((e.task.index, e.index, len(e.turns))),
  )
  numbers = [[e.index for e in group.episodes] for group in groups]
  assert numbers == [[0, 2], [0, 1, 2], []]
  assert sorted(ended) == [
    (0, 0, 1),
    (0, 2, 1),
    (1, 0, 1),
    (1, 1, 1),
    (1, 2, 1),
  ]
  assert not any(e.turns for group in groups for e in group.episodes)
  # A prompt is shared by those that are played, not by all K.
  shared = {r.id[0]: r.shared_by for r in world.sampler.asked}
  assert shared == {0: 2, 1: 3}


@pytest.mark.quick
def test_twice_as_many_episodes_as_slots_are_under_way():
  world = World()
  result = world.run(one=tasks("one", 20))
  assert world.most == 4 and result.sets["one"].ok.all()
  # Of groups that are scored whole, those that wait for the rest do not count.
  whole = World(scores_groups=True)
  same(result, whole.run(one=tasks("one", 20)))
  assert whole.run(k=7, one=tasks("one", 2)).sets["one"].ok.all()


@pytest.mark.quick
def test_a_host_that_is_done_waits_as_long_again(monkeypatch):
  limits, agree = [], hosts.agree

  def noted(name, values, timeout_s):
    limits.append(timeout_s)
    return agree(name, values, timeout_s)

  monkeypatch.setattr(hosts, "agree", noted)
  world, began = World(), time.monotonic()
  world.run(one=tasks("one", 2))
  took, (limit,) = time.monotonic() - began, limits
  assert 0 < limit - world.config.placement.timeout_s <= took


@pytest.mark.quick
def test_stopped_and_gone_on(tmp_path):
  """A turn that was late is played again, a line cut short is dropped."""
  sets = {"one": tasks("one", 6), "two": tasks("two", 4)}
  straight = World().run(**sets)
  first = World(stop_after=8, late={(0, 1), (1, 2)})
  with pytest.raises(Stopped), open_store(tmp_path) as store:
    first.run(store, **sets)
  path = tmp_path / "episodes.jsonl"
  lines = path.read_text().splitlines(keepends=True)
  assert 8 <= len(lines) < 30
  path.write_text("".join(lines) + lines[0][:20])
  again = World()
  with open_store(tmp_path) as store:
    same(straight, again.run(store, **sets))
  assert not set(first.played) & set(again.played)
  assert {("one", 0, 1), ("one", 1, 2)} <= set(again.played)
  assert len(again.played) == 30 - len(first.played)
  third = World()
  with open_store(tmp_path) as store:
    result = third.run(store, **sets)
  same(straight, result)
  assert third.played == [] and result.num_played == result.num_clocked == 0
  # The first questions of each set are there to be read, each episode once.
  text = (tmp_path / "transcripts.jsonl").read_text()
  whole = [json.loads(line) for line in text.splitlines()]
  ended = [e for e in whole if e["status"] == "ok"]
  keys = [
    (e["task"]["source"], e["task"]["index"], e["episode"]) for e in ended
  ]
  num = again.config.logging.transcript_groups
  assert sorted(keys) == [
    (name, i, j) for name in sets for i in range(num) for j in range(K)
  ]
  assert all(e["kind"] == "eval" and e["turns"][0]["completion"] for e in ended)
  (tmp_path / "results.json").touch()
  with open_store(tmp_path) as store:
    assert len(store.records) == 30 and (tmp_path / "results.json").exists()
  with open_store(tmp_path, fresh=True) as store:
    assert not store.records and not (tmp_path / "results.json").exists()
    assert not (tmp_path / "transcripts.jsonl").read_text()
    World().run(store, **sets)
  assert len(path.read_text().splitlines()) == 30


@pytest.mark.quick
def test_hosts_have_files_of_their_own_and_read_all(tmp_path, monkeypatch):
  sets = {"one": tasks("one", 6)}
  with open_store(tmp_path) as store, pytest.raises(Stopped):
    World(stop_after=8).run(store, **sets)
  with monkeypatch.context() as other:
    other.setattr(jax, "process_index", lambda: 1)
    with open_store(tmp_path) as store:
      World().run(store, **sets)
  paths = [tmp_path / name for name in ("episodes.jsonl", "episodes.1.jsonl")]
  one, two = (path.read_text().count("\n") for path in paths)
  assert one >= 8 and two > 0 and one + two == 6 * K
  with open(paths[1], "a") as f:  # killed in the middle of a line
    f.write('{"source": "o')
  again = World()
  with open_store(tmp_path) as store:  # fewer hosts than before
    same(World().run(**sets), again.run(store, **sets))
  assert again.played == []


@pytest.mark.quick
def test_groups_that_are_scored_whole_are_played_whole(tmp_path):
  sets = {"one": tasks("one", 4)}
  straight = World(scores_groups=True).run(**sets)
  with open_store(tmp_path) as store:
    World(scores_groups=True).run(store, **sets)
  path = tmp_path / "episodes.jsonl"
  kept = [
    line
    for line in path.read_text().splitlines(keepends=True)
    if (r := json.loads(line))["index"] != 2 or r["episode"] != 1
  ]
  path.write_text("".join(kept))
  again = World(scores_groups=True)
  with open_store(tmp_path) as store:
    same(straight, again.run(store, **sets))
  assert again.played == [("one", 2, i) for i in range(K)]


@pytest.mark.quick
def test_another_evaluation_is_refused(tmp_path):
  with open_store(tmp_path):
    pass
  with open_store(tmp_path, sources={"three": "h"}):  # a set more
    pass
  known = json.loads((tmp_path / "identity.json").read_text())
  assert known["sources"] == {"one": "f", "two": "g", "three": "h"}
  with pytest.raises(config_lib.ConfigError) as caught:
    open_store(tmp_path, seed=1, sources={"one": "other"})
  said = str(caught.value)
  assert "seed: was 0 there, is now 1" in said
  assert "sources.one: was 'f' there, is now 'other'" in said
  assert "--fresh" in said and "run:WORKDIR/" in said and "two" not in said
  with pytest.raises(config_lib.ConfigError, match="--workdir"):
    open_store(tmp_path / "identity.json" / "under")


@pytest.mark.quick
def test_what_an_episode_depends_on():
  """Of the config: what changes the text of an episode or its grade."""
  config = config_lib.read(small_run.ROOT / "tests" / "small_run.py")

  def of(*overrides, weights="w"):
    config = config_lib.read(
      small_run.ROOT / "tests" / "small_run.py", overrides
    )
    about = {
      "grader": {"environment": "math", "version": None},
      "data": {f"eval/{key}": "f" for key in config.held_out},
    }
    policies = {name: (weights, "t") for name in config.policies}
    return json.dumps(records.identity(config, policies, about, 0))

  plain = of()
  assert set(config.agents) == set(json.loads(plain)["agents"])
  for key in (
    "eval.final_k=9",
    "eval.num_tasks=5",
    "policies.solver.engine.num_slots=16",
    "policies.solver.optimizer.learning_rate=0.5",
    "agents.solver.invalid_penalty=0.5",
    "agents.solver.overlong_tokens=3",
    "agents.solver.loss_weight=2",
    "rollout.turn_timeout_s=5",
    "data.num_tasks=8",
  ):
    assert of(key) == plain, key
  for key in (
    "seed=1",
    "eval.sampling.temperature=0.6",
    "agents.solver.max_tokens=11",
    "agents.solver.template=default",
    "orchestra.options.max_loops=3",
    "policies.solver.chat_template_kwargs.enable_thinking=False",
    "policies.solver.rollout_dtype=bfloat16",
  ):
    assert of(key) != plain, key
  assert of(weights="v") != plain


@pytest.mark.quick
def test_progress_where_there_is_no_terminal(capsys, monkeypatch):
  monkeypatch.setattr(evaluate._Play, "_LINE_S", 0.0)
  World().run(one=tasks("one", 2))
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) == 2 * K and not lines[0].endswith("left")
  assert lines[-1].startswith("held-out episode 6/6  success ")
  assert "tokens/s" in lines[-1] and lines[-1].endswith("left")


@pytest.mark.quick
def test_files(tmp_path):
  result = evaluation(
    2,
    one=scores([[1, 0], [1, 1]], answers=[["7", None], ["7", "7"]]),
    two=scores([[0, 0]], ok=[[1, 0]]),
  )
  config = World().config
  about = {
    "config": {"seed": 0},
    "grader": {"environment": "math", "version": "3"},
    "data": {"eval/one": "f", "eval/two": "g"},
    "devices": {"count": 1, "kind": "cpu"},
    "commit": "abc",
    "dirty": True,
    "versions": {"jax": "1"},
  }
  folder = records.folder(tmp_path, 5)
  fault = {"kind": "prompt", "message": "of 9 tokens"}
  lost = [record(), record(ok=False, fault=fault)]
  result = dataclasses.replace(result, records=lost)
  text = evaluate.write(folder, result, config, 5, {"p": "x"}, about)
  assert (folder / "results.md").read_text() == text
  lines = text.splitlines()
  assert lines[0] == "# Evaluation of step_5"
  assert lines[2].split("|")[1:4] == [" set   ", " questions ", " failed "]
  assert "0.750 [" in lines[4] and lines[5].split("|")[3].strip() == "1"
  assert lines[6].startswith("| macro ")
  assert "temperature 1, top-p 1" in text and "math, version 3" in text
  assert "never count as wrong; the first: prompt: of 9 tokens" in text
  found = json.loads((folder / "results.json").read_text())
  assert found["format"] == 1 and found["label"] == "step_5"
  assert found["step"] == 5 and found["k"] == 2 and found["seed"] == 0
  # Rule 26: a clock decided in one.
  assert found["deterministic"] is False and found["wall_clock_faults"] == 1
  assert found["sampling"]["a"]["temperature"] == 1
  assert found["sources"]["one"] == {
    "fingerprint": "f",
    "questions": [0, 1],
    "success": [[1, 0], [1, 1]],
    "ok": [[1, 1], [1, 1]],
    "answers": [["7", None], ["7", "7"]],
  }
  assert found["sources"]["two"]["ok"] == [[1, 0]]
  assert found["summary"]["one"]["avg@2"][0] == 0.75
  assert found["manifest"] == about
  # What compares evaluations reads this, and has the same numbers.
  assert compare.main([str(tmp_path), f"--out={tmp_path / 't.csv'}"]) == 0
  table = (tmp_path / "t.csv").read_text().splitlines()
  means = {row.split(",")[2]: float(row.split(",")[4]) for row in table[1:]}
  assert means == {n: v["avg@2"][0] for n, v in found["summary"].items()}


def test_a_folder_that_may_not_be_written_to_is_left_as_it_was(
  tmp_path, monkeypatch
):
  with open_store(tmp_path):
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

  def read_only(path, missing_ok=False):
    raise OSError(30, "Read-only file system")

  monkeypatch.setattr(pathlib.Path, "unlink", read_only)
  with pytest.raises(config_lib.ConfigError, match=r"--workdir: .*Read-only"):
    open_store(tmp_path, fresh=True)
  assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.quick
def test_what_a_resumed_run_plays_anew_is_cut(tmp_path):
  for step in (0, 9, 10, 20):
    records.folder(tmp_path, step).mkdir(parents=True)
  (tmp_path / "eval" / "step_20_copy").mkdir()
  records.cut_after(tmp_path, 10)
  left = {p.name for p in (tmp_path / "eval").iterdir()}
  assert left == {"step_0", "step_9", "step_10", "step_20_copy"}
  records.cut_after(tmp_path / "new", 0)


# -- a real one ----------------------------------------------------------------

SETS = (
  "--config.eval.sources.easy.name=arithmetic",
  "--config.eval.sources.easy.options.num_operands=3",
  "--config.eval.sources.hard.name=arithmetic",
  "--config.eval.sources.hard.options.num_operands=5",
  "--config.eval.num_tasks=6",
  "--config.eval.final_k=4",
)
KILLED = """
import os, signal, sys
from drmas_jax import main, records

add, left = records.Store.add, [int(sys.argv.pop(1))]

def killing(self, *args):
  add(self, *args)
  left[0] -= 1
  if not left[0]:
    os.kill(os.getpid(), signal.SIGKILL)

records.Store.add = killing
sys.exit(main.main(sys.argv[1:]))
"""


def command(workdir, *flags):
  config = small_run.ROOT / "tests" / "small_run.py"
  return [
    *(f"--config={config}", f"--workdir={workdir}", "--mode=eval"),
    *("--config.placement.strategy=split", *SETS, *flags),
  ]


def results(workdir):
  """All but when it was made."""
  path = workdir / "eval" / "step_0" / "results.json"
  found = json.loads(path.read_text())
  del found["manifest"]["created"]
  return found


def test_killed_in_the_middle(tmp_path, capsys):
  """SIGKILL; the same command goes on, and its result is the straight run's."""
  assert main.main(command(tmp_path / "straight")) == 0
  capsys.readouterr()
  killed = subprocess.run(
    [sys.executable, "-c", KILLED, "29", *command(tmp_path / "killed")],
    env=os.environ | {"PYTHONPATH": str(small_run.ROOT)},
    capture_output=True,
    timeout=300,
  )
  assert killed.returncode == -signal.SIGKILL, killed.stderr
  folder = tmp_path / "killed" / "eval" / "step_0"
  path = folder / "episodes.jsonl"
  before = path.read_text()
  assert before.count("\n") == 29 and not (folder / "results.json").exists()
  path.write_text(before + before[:50])
  assert main.main(command(tmp_path / "killed")) == 0
  said = capsys.readouterr().out
  assert "for 19 episodes at" in said and "29 were there already" in said
  assert path.read_text().startswith(before)
  assert path.read_text().count("\n") == 48  # nothing twice
  assert results(tmp_path / "killed") == results(tmp_path / "straight")
  found = results(tmp_path / "killed")
  assert found["summary"].keys() == {"easy", "hard", "macro"}
  assert found["sources"]["hard"]["success"] != [[0] * 4] * 6
  assert found["agents"]["verifier"]["verdicts"] == 48
  # With other weights the episodes would be of another team.
  assert main.main(command(tmp_path / "killed", "--config.seed=3")) == 2
  assert "seed: was 0 there, is now 3" in capsys.readouterr().err
  assert results(tmp_path / "killed") == found


@pytest.mark.quick
def test_checksum_of_weights():
  """One bit, two places changed over, another mesh."""
  from drmas_jax import placement

  rng = np.random.default_rng(0)
  tree = {
    "a": rng.normal(size=(8, 4, 6)).astype(np.float32),
    "b": rng.normal(size=(8,)).astype("bfloat16"),
  }
  first = placement.checksum(jax.tree.map(jax.numpy.asarray, tree))
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))
  spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
  assert placement.checksum(jax.device_put(tree, spec)) == first
  seen = {first}
  for change in (
    lambda t: t["a"].view(np.uint32).__ixor__(np.uint32(0)),
    lambda t: t["a"].view(np.uint32)[2, 3].__setitem__(1, 7),
    lambda t: t["a"].__setitem__(slice(0, 2), t["a"][1::-1].copy()),
    lambda t: t["b"].__setitem__(5, -t["b"][5]),
  ):
    other = jax.tree.map(np.copy, tree)
    change(other)
    seen.add(placement.checksum(jax.tree.map(jax.numpy.asarray, other)))
  assert len(seen) == 4


@pytest.mark.quick
def test_markdown():
  assert writers.markdown(("a", "b"), [("long", "1"), ("x", "22")]) == (
    "| a    |  b |\n| ---- | -: |\n| long |  1 |\n| x    | 22 |"
  )


@pytest.mark.quick
def test_an_evaluation_that_lost_too_much_says_so():
  kept = evaluation(2, one=scores([[1, 0], [0, 0]], ok=[[1, 1], [0, 0]]))
  evaluate._check_lost(kept, 0.5)
  with pytest.raises(RunError, match="2 of 4 episodes failed; allowed is"):
    evaluate._check_lost(kept, 0.4)
