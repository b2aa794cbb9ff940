"""A step that is played again is the step that it was; so is a run's fork."""

import functools
import json
import math

import jax
import numpy as np
import pytest
import small_run

from drmas_jax import (
  advantages,
  checkpoint,
  health,
  main,
  placement,
  replay,
  rollout,
  spikes,
)
from drmas_jax import config as config_lib
from drmas_jax.types import (
  Call,
  Episode,
  Fault,
  Group,
  Outcome,
  Reply,
  Task,
  Turn,
)

STEPS = 4
FLAGS = (
  f"--config.steps={STEPS}",
  "--config.eval.num_tasks=0",
  "--config.data.num_tasks=3",
  "--config.checkpoint.keep=1",
  "--config.logging.writers=['jsonl']",
)


def get_config():
  """This file is a config: the small run, with the solver alone trained."""
  config = small_run.get_config()
  verifier = config.policies["verifier"]
  verifier.frozen = True
  del verifier.optimizer, verifier.row_buckets, verifier.micro_tokens
  return config


def call(workdir, *flags):
  """In this process, whose programs are compiled once."""
  return main.main([f"--config={__file__}", f"--workdir={workdir}", *flags])


def state(workdir, step):
  return small_run.policy(workdir, step, "solver")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
  """A run of which every step counts as a spike of the solver."""
  workdir = tmp_path_factory.mktemp("runs") / "job"
  one = functools.partial(placement.plan, devices=jax.devices()[:1])
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(placement, "plan", one)
    patch.setattr(health.Monitor, "spikes", lambda self, found: ("solver",))
    assert call(workdir, *FLAGS) == 0
    yield workdir


def files(workdir):
  """{name: bytes} of all but replays."""
  return {
    str(p.relative_to(workdir)): p.read_bytes()
    for p in workdir.rglob("*")
    if p.is_file() and "replay" not in p.parts
  }


@pytest.fixture(scope="module")
def played(job):
  """replay.json of the steps 3 and 4; the run stays as it was."""
  before = files(job)
  # Also where an alarm would have ended the run.
  stop = "--config.health.stop_on=['norm_spike']"
  assert call(job, *FLAGS, "--mode=replay", "--step=4", stop) == 0
  assert call(job, *FLAGS, "--mode=replay", "--step=3") == 0
  assert files(job) == before
  return {
    step: json.loads((job / f"replay/step_{step}/replay.json").read_text())
    for step in (3, 4)
  }


def rows_of(job, name):
  text = (job / "replay" / name / "rows.jsonl").read_text()
  return [json.loads(line) for line in text.splitlines()]


def test_a_step_is_played_again_bit_for_bit(job, played):
  assert played[3]["compared"] == {"3": []}
  assert played[4]["compared"] == {"3": [], "4": []}
  assert {p["checkpoint"] for p in played.values()} == {2}
  known = small_run.metrics(job)
  assert (
    known[4, "grad_norm/solver"] == played[4]["metrics"]["grad_norm/solver"]
  )
  folder = job / "replay" / "step_4"
  lines = (folder / "episodes.jsonl").read_text().splitlines()
  assert len(lines) == 3 * 4  # of all groups
  of_run = [t for t in small_run.transcripts(job) if t["step"] == 4]
  assert [json.loads(line) for line in lines][: len(of_run)] == of_run
  assert (
    "EQUAL: all numbers of step 3, 4" in (folder / "summary.md").read_text()
  )


def test_gradients_add_up(job, played):
  """Each row has its part of the loss; the frozen policy has none."""
  rows = rows_of(job, "step_4")
  own = played[4]["estimators"]
  assert next(iter(own)) == "agent_wise"
  assert set(own) == set(advantages.ESTIMATORS)
  mine = [r for r in rows if r["agent"] == "solver"]
  norms = [r["norm"] for r in mine]
  whole = played[4]["metrics"]["grad_norm/solver"]
  found = own["agent_wise"]["solver"]
  assert found["norm"] == pytest.approx(whole, rel=1e-4)
  assert math.sqrt(sum(n**2 for n in norms)) > 0.05 * whole > 0
  assert whole <= sum(norms) * 1.0001
  values = np.array([r["advantage"] for r in mine])
  assert found["turns"] == len(values) > 8
  assert found["square"] == pytest.approx((values**2).mean(), rel=1e-6)
  assert found["most"] == abs(values).max()
  assert "norm" not in own["agent_wise"]["verifier"]
  assert all(r["norm"] == 0 for r in rows if r["agent"] == "verifier")
  assert all((r["norm"] > 0) == (r["advantage"] != 0) for r in mine)
  most = [r["norm"] for r in played[4]["most"]]
  assert most == sorted((r["norm"] for r in rows), reverse=True)[:10]
  # With equal weights and a softer scale the gradient is shorter, not gone.
  assert 0 < own["dr_grpo"]["solver"]["norm"] < own["grpo"]["solver"]["norm"]


def test_a_spike_needs_no_rollout(job, played, monkeypatch):
  def never(*_):
    raise AssertionError("something was played")

  monkeypatch.setattr(rollout.Rollout, "collect", never)
  row_norms, alone = replay.Replay._row_norms, []

  def both(self, rows, values, work, shares):
    """Also the gradient of a batch in which one row has a signal."""
    norms = row_norms(self, rows, values, work, shares)
    i = int(np.argsort(norms)[-3])
    one = np.where(np.arange(len(values)) == i, values, 0)
    own = self.work(rows, one, self._due())["solver"]
    solver = self.backbones["solver"]
    found = solver.agent_norms(rows, one, own, [own.numbers()])
    alone.append((norms[i], found[rows.agent[i]]))
    return norms

  monkeypatch.setattr(replay.Replay, "_row_norms", both)
  assert [s.name for s in sorted((job / "spikes").iterdir())] == [
    "step_3",
    "step_4",
  ]
  steps = checkpoint.Checkpoints(job, read_only=True).steps()
  assert steps == [2, 4]  # one is kept, and one is held
  assert call(job, *FLAGS, "--mode=replay", "--spike=3") == 0
  found = json.loads((job / "replay/spike_3/replay.json").read_text())
  assert found["compared"] == {"3": []}
  assert found["spike"]["policies"] == ["solver"]
  assert rows_of(job, "spike_3") == rows_of(job, "step_3")
  ((row, batch),) = alone
  assert row == pytest.approx(batch, rel=1e-4) and row > 0
  assert found["estimators"] == played[3]["estimators"]


def test_a_spike_without_its_weights_says_so(job, played):
  """Its checkpoint is one step too old: the batch is exact, and no more."""
  assert call(job, *FLAGS, "--mode=replay", "--spike=4") == 0
  text = (job / "replay" / "spike_4" / "summary.md").read_text()
  assert "1 steps before the update" in text and "`--step=4` plays" in text
  assert "weights are not those that the update began with" in text
  one, two = (rows_of(job, name) for name in ("spike_4", "step_4"))
  for key in ("text", "advantage", "score", "tokens"):
    assert [r[key] for r in one] == [r[key] for r in two]
  assert [r["norm"] for r in one] != [r["norm"] for r in two]


def test_what_cannot_be_replayed(job, tmp_path, capsys):
  rate = "policies.solver.optimizer.learning_rate"
  for flags, message in (
    ((f"--config.{rate}=0.5", "--step=4"), f"{rate}: is 0.5, and was 0.001"),
    (("--spike=2",), "allowed are 3, 4; --step=2 plays it again"),
    ((), "write either --step=N"),
    (("--step=3", "--spike=3"), "write either --step=N"),
    (("--step=99",), "--step=99: the run in"),
    (("--step=²",), "--step=²: allowed is the number of a step"),
    (("--step=best",), "--step=best: allowed is the number of a step"),
    (("--step=3", f"--fork={job}"), "no effect with --mode=replay"),
  ):
    assert call(job, *FLAGS, "--mode=replay", *flags) == 2
    assert message in capsys.readouterr().err
  assert call(tmp_path, *FLAGS, "--mode=replay", "--step=1") == 2
  assert "holds no run to replay" in capsys.readouterr().err


def test_a_fork_is_the_straight_run(job, tmp_path, capsys):
  fork = tmp_path / "fork"
  before = files(job)
  flags = (*FLAGS, f"--fork={job}@2")
  assert call(fork, *flags) == 0
  assert files(job) == before
  small_run.assert_equal(state(fork, 4), state(job, 4))
  known = small_run.metrics(job)
  assert small_run.metrics(fork) == {k: v for k, v in known.items() if k[0] > 2}
  assert {s["step"] for s in small_run.transcripts(fork)} == {3, 4}
  about = json.loads((fork / "manifest.json").read_text())["fork"]
  assert about == {"workdir": str(job), "step": 2, "asked": "2"}
  capsys.readouterr()
  # Once more, with the flag and without: it is done.
  for again in (flags, FLAGS):
    assert call(fork, *again) == 0
    assert f"goes on from step 4 of {fork}" in capsys.readouterr().err
  assert call(job, *flags) == 2
  assert "holds a run that began without it" in capsys.readouterr().err


def test_a_fork_may_change_what_a_resume_may_not(job, tmp_path):
  rate = "policies.solver.optimizer.learning_rate"
  flags = (f"--fork={job}@4", f"--config.{rate}=0.002")
  assert call(tmp_path, *FLAGS, *flags) == 0
  assert json.loads((tmp_path / "changes.json").read_text()) == [
    {"step": 4, "key": rate, "old": 0.001, "new": 0.002}
  ]
  with pytest.raises(config_lib.ConfigError, match="cannot change on resume"):
    checkpoint.compare_config(
      {"policies": {}, "agents": {}, "orchestra": {"name": "math"}},
      {"policies": {}, "agents": {}, "orchestra": {"name": "single"}},
      fork=True,
    )


# -- without a run -------------------------------------------------------------


@pytest.mark.quick
def test_which_fork_is_meant(tmp_path, monkeypatch):
  for step in (1, 3, 12):
    (tmp_path / "a@b" / "checkpoints" / str(step)).mkdir(parents=True)
  new, old = tmp_path / "new", tmp_path / "a@b"
  monkeypatch.setattr(checkpoint.Checkpoints, "steps", lambda _: [1, 3, 12])
  monkeypatch.setattr(checkpoint.Checkpoints, "best", lambda _: 3)
  find = checkpoint.Fork.of
  assert find(new, "") is None
  assert find(new, f"{old}") == (str(old), 12, "")
  assert find(new, f"{old}@1") == (str(old), 1, "1")
  with pytest.raises(
    config_lib.ConfigError, match="allowed are 1, 3, 12, best"
  ):
    find(new, f"{old}@2")
  fork = find(new, f"{old}@best")
  assert fork == (str(old), 3, "best")
  fork.write(new)  # killed before anything else was there
  for name in ("", f"{old}@best", f"{old}@3"):
    assert find(new, name) == fork
  for name in (f"{old}", f"{old}@12", str(tmp_path)):
    with pytest.raises(config_lib.ConfigError, match="began at step 3"):
      find(new, name)


@pytest.mark.quick
def test_the_config_of_a_step_is_that_before_later_changes():
  now = {"policies": {}, "agents": {}, "seed": 3, "steps": 9}
  changes = [
    {"step": 4, "key": "seed", "old": 1, "new": 2},
    {"step": 8, "key": "seed", "old": 2, "new": 3},
    {"step": 8, "key": "steps", "old": 8, "new": 9},
  ]

  def check(seed, origin, step, monkey=now):
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(
        config_lib, "to_dict", lambda _: monkey | {"seed": seed, "steps": 50}
      )
      origin = replay.Origin(None, origin)
      replay._check_config(None, now, changes, origin, step)

  check(3, 8, 9)
  check(2, 4, 8)
  check(1, 0, 4)
  with pytest.raises(config_lib.ConfigError, match="seed: is 3, and was 2 at"):
    check(3, 4, 8)
  with pytest.raises(config_lib.ConfigError, match="was changed behind step 4"):
    check(2, 3, 8)


@pytest.mark.quick
def test_what_differs():
  then = {"reward/team": 0.5, "grad_norm/a": None, "time/step_s": 1.0}
  now = {"reward/team": 0.5, "grad_norm/a": math.nan, "time/step_s": 2.0}
  assert replay.differences(then, now) == []
  now |= {"kl/a": 0.0, "eval/avg@2": 0.1}
  assert replay.differences(then, now) == [("kl/a", None, 0.0)]
  now["reward/team"] = np.nextafter(0.5, 1)
  assert [d[0] for d in replay.differences(then, now)] == [
    "kl/a",
    "reward/team",
  ]
  assert replay.differences(then, now, of_batch=True) == [
    ("reward/team", 0.5, now["reward/team"])
  ]


def turn(index, **more):
  rng = np.random.default_rng(index)
  prompt, completion = rng.integers(1, 9, 2)
  logprobs = rng.normal(size=(2, completion)).astype(np.float32)
  return Turn(
    agent="solver",
    policy="p",
    index=index,
    prompt_ids=rng.integers(0, 99, prompt, np.int32),
    completion_ids=rng.integers(0, 99, completion, np.int32),
    sampler_logprobs=logprobs[0],
    log_kept_mass=logprobs[1],
    stop_reason="stop",
    policy_version=3,
    valid=True,
    **more,
  )


@pytest.mark.quick
def test_a_batch_comes_back_as_it_was():
  def group(position):
    task = Task("math", 7, position, "What is \ud800?", {"a": 1}, {"level": 2})
    reward = Outcome(1 / 3, {1: -0.1}, {"exact": 1.0}, True, "x")
    turns = [
      turn(0, text="one", reply=Reply("one", False, "approve", {"long": 0.5})),
      turn(1, continues=0, prompt_cut=True),
      turn(
        2, fault=Fault("remote", "gone", True), call=Call("ask"), counts=False
      ),
    ]
    lost = Fault("reward", "late", True)
    per_agent = Outcome({"solver": 0.1, "verifier": 0.2})
    return Group(
      task,
      [
        Episode(task, 0, turns, "4", reward),
        Episode(task, 1, status="failed", fault=lost),
        Episode(task, 2, [turn(4)], None, per_agent),
      ],
    )

  groups = [group(8), group(9)]
  assert plain(spikes.unpack(spikes.pack(groups))) == plain(groups)
  assert spikes.unpack(spikes.pack([])) == []


def plain(value):
  """Comparable, with arrays as dtype and bytes."""
  if isinstance(value, np.ndarray):
    return str(value.dtype), value.tobytes()
  if isinstance(value, (list, tuple)):
    return [plain(v) for v in value]
  if hasattr(value, "__dataclass_fields__"):
    return {k: plain(v) for k, v in vars(value).items()}
  return value


@pytest.mark.quick
def test_spikes_are_few_and_small(tmp_path, capsys):
  limits = config_lib.Logging(spikes_kept=2)
  kept = spikes.Spikes(tmp_path, limits, 0)

  def add(step, before, to=kept):
    to.save(spikes.Spike(step, ["p"], {"p": 2.0}, before, 5, [[0, 0]]), [])

  for step, before in ((3, None), (5, 4), (9, 8)):
    add(step, before)
  assert kept.state == [[5, 4], [9, 8]] and kept.checkpoints == {4, 8}
  assert {p.name for p in (tmp_path / "spikes").iterdir()} == {
    "step_5",
    "step_9",
  }
  spike, groups = spikes.read(tmp_path, 9)
  assert spike == spikes.Spike(9, ["p"], {"p": 2.0}, 8, 5, [[0, 0]])
  assert groups == [[]]  # those of the one host
  kept.go_on([[5, 4]])  # the run was killed, and step 9 is to come again
  assert not spikes.folder(tmp_path, 9).exists()
  small = config_lib.Logging(spikes_mb=1e-6)
  add(6, 4, spikes.Spikes(tmp_path, small, 0))
  assert "is not kept" in capsys.readouterr().err
  with pytest.raises(config_lib.ConfigError, match="larger than logging"):
    spikes.read(tmp_path, 6)
  add(7, 4, spikes.Spikes(tmp_path, config_lib.Logging(spikes_kept=0), 0))
  assert not spikes.folder(tmp_path, 7).exists()
