"""The command end to end, cut to a few steps; what it refuses, and how."""

import dataclasses
import functools
import json
import shutil

import jax
import numpy as np
import pytest
import small_run
from safetensors.numpy import load_file, save_file

from drmas_jax import (
  backbone,
  building,
  checkpoint,
  main,
  placement,
  rewards,
  rollout,
  sampling,
  show,
  training,
)
from drmas_jax import config as config_lib
from drmas_jax.tokenizer import Tokenizer
from drmas_jax.types import RunError

CONFIG = small_run.ROOT / "tests" / "small_run.py"
TINY = small_run.ROOT / "drmas_jax" / "models" / "tiny"


# -- what a run leaves ---------------------------------------------------------


@pytest.fixture(scope="module")
def job(tmp_path_factory):
  """(workdir, what it said of itself) of the job, as a user starts it."""
  workdir = tmp_path_factory.mktemp("runs") / "deep" / "job"
  code, said = small_run.run(
    workdir,
    "--config.steps=3",
    "--config.eval.every=2",
    "--config.logging.transcript_groups=4",
    fault="none",
  )
  assert code == 0, said
  return workdir, said


def results_of(workdir, step):
  folder = workdir / "eval" / f"step_{step}"
  return json.loads((folder / "results.json").read_text())


def test_it_leaves_what_a_user_looks_for(job):
  workdir, said = job
  patch = "manifest_diff.patch"  # where this tree has uncommitted changes
  assert {p.name for p in workdir.iterdir()} - {patch} == {
    *("config.json", "changes.json", "summary.json", "metrics.jsonl"),
    *("checkpoints", "tensorboard", "transcripts", "report.html"),
    *("manifest.json", "eval", "scores.json"),
  }
  config = json.loads((workdir / "config.json").read_text())
  assert config["steps"] == 3 and config["policies"]["solver"]["micro_tokens"]
  page = (workdir / "report.html").read_text()
  assert "3 of 3" in page and "<dd>finished</dd>" in page
  assert {p.name for p in (workdir / "checkpoints").iterdir()} == {"2", "3"}
  (events,) = (workdir / "tensorboard").iterdir()
  assert events.stat().st_size > 1000
  episodes = small_run.transcripts(workdir)
  assert len(episodes) == 3 * 4 * 4  # 4 groups of 4 of every step
  first = episodes[0]
  assert first["kind"] == "train" and first["status"] == "ok"
  assert [t["agent"] for t in first["turns"]][:2] == ["solver", "verifier"]
  assert "before" in said and "after" in said  # the table
  assert "step 3/3" in said and "tokens/s" in said


def test_the_summary(job):
  summary = json.loads((job[0] / "summary.json").read_text())
  for when in ("before", "after"):
    assert summary[when].keys() == {"arithmetic", "macro"}
    for values in summary[when].values():
      assert values.keys() >= {"avg@2", "pass@2"}
      for mean, low, high in values.values():
        assert 0 <= low <= mean <= high <= 1
  found = small_run.metrics(job[0])
  assert summary["before"]["macro"]["avg@2"][0] == found[0, "eval/avg@2"]
  assert summary["after"]["macro"]["avg@2"][0] == found[3, "eval/avg@2"]
  for step, when in ((0, "before"), (3, "after")):
    results = results_of(job[0], step)
    assert results["summary"] == summary[when] and results["k"] == 2
    names = {"solver", "verifier"}
    assert results["agents"].keys() == results["sampling"].keys() == names
  assert summary["deterministic"] is True
  assert summary["steps"] == 3 and summary["best_step"] in (2, 3)
  assert summary["cpu_seconds"] > 1
  assert 0 < summary["seconds_to_first_step"] < summary["seconds"]
  tokens = sum(found[step, "rollout/tokens"] for step in (1, 2, 3))
  assert summary["tokens"] == tokens
  assert summary["tokens_per_s"] == pytest.approx(
    tokens / summary["rollout_seconds"]
  )
  assert 0.1 < summary["peak_memory_gb"] < 2


BY_AGENT = (
  *("turns", "reward", "part_correct", "mu", "sigma", "kappa_groups"),
  *("entropy", "completion_length", "truncated", "valid", "turn_faults"),
  *("singleton_groups", "zero_variance_groups"),
)
BY_TRAINED_AGENT = (
  *("clip_fraction", "logprob_gap", "logprob_gap_max", "sequence_ratio_max"),
)


def test_the_metrics(job):
  found = small_run.metrics(job[0])
  steps = {step for step, _ in found}
  assert steps == {0, 1, 2, 3}
  evaluated = {s for s, name in found if name == "eval/avg@2"}
  assert evaluated == {0, 2, 3}
  for step in (1, 2, 3):
    names = {name for s, name in found if s == step}
    for agent in ("solver", "verifier"):
      assert {f"{n}/{agent}" for n in BY_AGENT} <= names
      updated = not any(
        found[step, f"skipped/{why}/{agent}"]
        for why in ("no_rows", "no_signal", "non_finite")
      )
      wanted = {f"{n}/{agent}" for n in BY_TRAINED_AGENT}
      wanted |= {f"grad_norm/{agent}", f"grad_norm/{agent}/{agent}"}
      assert wanted <= names if updated else not wanted & names
      if found[step, f"kappa_groups/{agent}"]:
        assert found[step, f"kappa/{agent}"] > 0
    rates = ("approved", "rejected", "missing")
    shares = [found[step, f"label_{n}/verifier"] for n in rates]
    assert sum(shares[:2]) == pytest.approx(1) and shares[2] <= 1
    assert found[step, "episodes/team"] == 16
    assert found[step, "episodes_failed/team"] == 0
  assert None not in found.values()


def test_a_run_writes_what_its_turns_came_to(job, capsys):
  workdir, _ = job
  records = small_run.transcripts(workdir)
  tokenizers = {n: Tokenizer.load(TINY / n) for n in ("solver", "verifier")}
  gaps = []
  for record in records:
    for one in record["turns"]:
      ids = one["prompt_ids"]
      assert one["prompt"] == tokenizers[one["policy"]].decode(ids, True)
      assert one["prompt_tokens"] == len(ids)
      assert one["completion_tokens"] == len(one["completion_ids"])
      # What is in an update has a gap; without a signal it is in none.
      assert (one["logprob_gap"] is None) == (one["advantage"] == 0)
      if one["logprob_gap"] is not None:
        gaps.append((record["step"], one["agent"], one))
  assert gaps
  metrics = small_run.metrics(workdir)
  for step in (1, 2, 3):
    for agent in ("solver", "verifier"):
      own = [t for s, a, t in gaps if (s, a) == (step, agent)]
      if own:  # the metric is the mean over tokens
        sizes = [t["completion_tokens"] for t in own]
        mean = np.average([t["logprob_gap"] for t in own], weights=sizes)
        want = metrics[step, f"logprob_gap/{agent}"]
        np.testing.assert_allclose(mean, want, rtol=1e-3)
  assert show.main([str(workdir), "--agent", "verifier"]) == 0
  assert "verdict" in capsys.readouterr().out


def test_the_first_updates_ratio_is_one(job):
  """Rule 9, in fp32 with the sampler's log-probs as the old ones."""
  found = small_run.metrics(job[0])
  for policy in ("solver", "verifier"):
    errors = [
      found[step, f"ratio_error/{policy}"]
      for step in (1, 2, 3)
      if (step, f"ratio_error/{policy}") in found
    ]
    assert errors and max(errors) <= 1e-3


def test_nothing_imports_tensorflow(job):
  assert json.loads(job[1].splitlines()[-1])["tensorflow"] is False


# -- in this process, 4 and 4 devices ------------------------------------------

# Of the 4 that a policy has 2 are its learner's, and 2 have an engine each.
SPLIT = (
  "--config.placement.strategy=split",
  "--config.placement.rollout_devices=2",
  "--config.placement.rollout_mesh={'data': 2, 'fsdp': 1}",
)


def call(workdir, *flags, config=CONFIG):
  return main.main([f"--config={config}", f"--workdir={workdir}", *flags])


@pytest.fixture
def one_of_8(monkeypatch):
  """A run has a single device, whose programs are those of `job`."""
  one = functools.partial(placement.plan, devices=jax.devices()[:1])
  monkeypatch.setattr(placement, "plan", one)


def test_a_run_that_cannot_go_on_keeps_what_it_has(tmp_path, capsys, one_of_8):
  """Exit 3; the steps since the last checkpoint are saved before."""
  flags = ("--config.eval.num_tasks=0", "--config.checkpoint.every=100")
  assert call(tmp_path, *flags, "--config.steps=1") == 0
  late = ("--config.steps=3", "--config.rollout.turn_timeout_s=1e-6")
  assert call(tmp_path, *flags, *late) == 3
  said = capsys.readouterr().err
  assert "step 2: 16 of 16 episodes failed" in said
  assert "allowed is a share of rollout.max_failed=0.5" in said
  assert "turn past rollout.turn_timeout_s" in said
  assert "Traceback" not in said
  assert call(tmp_path, *flags, "--config.steps=3") == 0
  assert (tmp_path / "checkpoints" / "3").is_dir()


def test_steps_before_a_failure_are_saved(tmp_path, monkeypatch):
  whole = training.Training._check_failures

  def fails(self, shares):
    if self.step_done == 2:
      raise RunError("the third step cannot be")
    whole(self, shares)

  monkeypatch.setattr(training.Training, "_check_failures", fails)
  flags = ("--config.eval.num_tasks=0", "--config.checkpoint.every=100")
  assert call(tmp_path, *flags) == 3
  assert (tmp_path / "checkpoints" / "2").is_dir()


def freeze(folder, *policies):
  """A config file; what a frozen policy has no use for is taken out."""
  path = folder / "frozen.py"
  path.write_text(f"""
import small_run

def get_config():
  config = small_run.get_config()
  for name in {policies}:
    policy = config.policies[name]
    policy.frozen = True
    del policy.optimizer, policy.row_buckets, policy.micro_tokens
  return config
""")
  return path


def check_slices(backbones):
  """Both engines of both policies were used, and hold the newest weights."""
  used = []
  for made in backbones.values():
    trained = placement.fetch(made.state.params)
    used += made.slice.train_mesh.devices.flat
    for sampler in made.sampler.samplers:
      own = sampler.engine
      used += own.mesh.devices.flat
      assert sampler.counts.completion_tokens and own.version == made.version
      want = backbone.transformer.unstack(trained)
      jax.tree.map(np.testing.assert_array_equal, own.params, want)
  assert len(set(used)) == len(used) == 8


def test_two_policies_on_disjoint_slices(tmp_path, monkeypatch, capsys):
  """And a step in which all rewards are equal (rule 12): one token is no
  answer, so nobody is right and nobody is updated, which is said (M16)."""
  monkeypatch.setattr(training, "_FIRST", 2)
  built = {}
  build = training.Training.__init__

  def spy(self, config, backbones, *args):
    built.update(backbones)
    build(self, config, backbones, *args)

  monkeypatch.setattr(training.Training, "__init__", spy)
  workdir = tmp_path / "run"
  assert call(workdir, *SPLIT, "--config.steps=2") == 0
  assert "WARNING" not in capsys.readouterr().err
  check_slices(built)
  trained = small_run.state(workdir, 2)
  assert trained["solver", "['step']"] + trained["verifier", "['step']"] > 0
  mute = [f"--config.agents.{a}.max_tokens=1" for a in ("solver", "verifier")]
  allow = [f"--allow_change=agents.{a}" for a in ("solver", "verifier")]
  assert call(workdir, *SPLIT, "--config.steps=4", *mute, *allow) == 0
  said = capsys.readouterr().err
  assert "WARNING: every reward of the first 2 batches is 0" in said
  assert "solver 100%, verifier 100%; raise agents.*.max_tokens" in said
  small_run.assert_equal(small_run.state(workdir, 4), trained)
  found = small_run.metrics(workdir)
  for step in (3, 4):
    assert found[step, "reward/team"] == 0
    for name in ("solver", "verifier"):
      assert found[step, f"skipped/no_signal/{name}"] == 1
      assert (step, f"grad_norm/{name}") not in found
      assert found[step, f"kappa_groups/{name}"] == 0
  assert None not in found.values()


def test_a_run_goes_on_on_other_devices(job, tmp_path, capsys):
  """Of 1 to 4 and 4, from these to 8 for both, and from these to 1 again."""
  workdir = shutil.copytree(job[0], tmp_path / "copy")
  shutil.rmtree(workdir / "checkpoints" / "3")
  assert call(workdir, *SPLIT, "--config.steps=3", "--config.eval.every=2") == 0
  assert f"goes on from step 2 of {workdir}" in capsys.readouterr().err
  small_run.assert_close(workdir, job[0], 3)
  # A fork saves at once what it begins with.
  fork, alone = tmp_path / "fork", "--config.eval.num_tasks=0"
  flags = (f"--fork={workdir}@3", "--config.steps=3", alone)
  assert call(fork, *flags) == 0
  assert "8 device(s)" in capsys.readouterr().err
  small_run.assert_equal(small_run.state(fork, 3), small_run.state(workdir, 3))
  ours, theirs = (
    checkpoint.Checkpoints(w, read_only=True).run(3) for w in (fork, workdir)
  )
  for name in ("cursor", "versions", "score"):
    assert getattr(ours, name) == getattr(theirs, name)
  for name in ("averages", "before", "deterministic", "folders", "health"):
    assert ours.extra[name] == theirs.extra[name]
  more = ("--config.steps=4", alone)
  assert call(workdir, *SPLIT, *more) == 0
  with pytest.MonkeyPatch.context() as patch:
    one = functools.partial(placement.plan, devices=jax.devices()[:1])
    patch.setattr(placement, "plan", one)
    capsys.readouterr()
    assert call(fork, *more) == 0
  said = capsys.readouterr().err
  assert "1 device(s)" in said and f"goes on from step 3 of {fork}" in said
  small_run.assert_close(workdir, fork, 4)


def test_eval_mode_leaves_a_run_alone(job, tmp_path, capsys):
  """More episodes of more tasks than the run's own, where there would be no
  room for its optimizer."""
  workdir = shutil.copytree(job[0], tmp_path / "copy")
  before = {p.name: p.stat().st_mtime_ns for p in workdir.iterdir()}
  tight = (*SPLIT, "--config.placement.device_memory_gb=0.01")
  assert call(tmp_path / "new", *tight) == 2
  more = ("--config.eval.final_num_tasks=8", "--config.eval.final_k=3")
  assert call(workdir, *tight, "--mode=eval", *more) == 0
  result = results_of(workdir, 3)
  assert result["step"] == 3 and result["k"] == 3
  assert result["sources"]["arithmetic"]["questions"] == list(range(8))
  mean, low, high = result["summary"]["arithmetic"]["avg@3"]
  assert 0 <= low <= mean <= high <= 1
  said = capsys.readouterr().out
  assert "# Evaluation of step_3" in said and f"{mean:.3f} [{low:.3f}" in said
  after = {p.name: p.stat().st_mtime_ns for p in workdir.iterdir()}
  assert after == before
  # Its own final evaluation is the first episodes of the first tasks.
  own = results_of(job[0], 3)["sources"]["arithmetic"]["success"]
  success = result["sources"]["arithmetic"]["success"]
  assert [row[:2] for row in success[:4]] == own


def test_eval_mode_of_an_older_step(job, tmp_path, capsys):
  assert call(tmp_path / "new", "--mode=eval", "--step=7") == 2
  said = capsys.readouterr().err
  assert "has no step '7'; allowed are none" in said
  workdir = shutil.copytree(job[0], tmp_path / "run")
  for step, code in (("2", 0), ("7", 2)):
    assert call(workdir, *SPLIT, "--mode=eval", f"--step={step}") == code
  assert results_of(workdir, 2)["step"] == 2
  said = capsys.readouterr().err
  assert "has no step '7'; allowed are 2, 3, best" in said


@pytest.mark.quick
@pytest.mark.parametrize(
  ("flag", "mode"),
  [
    ("--step=2", "train"),
    ("--fresh", "train"),
    ("--allow_change=data", "eval"),
  ],
)
def test_flags_of_another_mode(tmp_path, capsys, flag, mode):
  assert call(tmp_path, flag, f"--mode={mode}") == 2
  assert f"has no effect with --mode={mode}" in capsys.readouterr().err


def test_eval_mode_with_frozen_policies_and_no_run(tmp_path):
  frozen = freeze(tmp_path, "solver", "verifier")
  assert call(tmp_path / "new", *SPLIT, "--mode=eval", config=frozen) == 0
  assert [p.name for p in (tmp_path / "new").iterdir()] == ["eval"]
  names = {p.name for p in (tmp_path / "new" / "eval" / "step_0").iterdir()}
  names.discard("manifest_diff.patch")  # of what is not committed here
  assert names == {
    *("results.json", "results.md", "identity.json"),
    *("episodes.jsonl", "transcripts.jsonl"),
  }
  result = results_of(tmp_path / "new", 0)
  assert result["step"] == 0
  assert result["policies"] == {
    "solver": "tiny:solver",
    "verifier": "tiny:verifier",
  }


def test_eval_mode_of_a_single_agent(job, tmp_path):
  """The solver of the team, alone."""
  path = tmp_path / "single.py"
  path.write_text("""
import small_run

def get_config():
  config = small_run.get_config()
  del config.policies.verifier, config.agents.verifier
  config.orchestra = dict(name="single")
  return config
""")
  workdir = shutil.copytree(job[0], tmp_path / "run")
  assert call(workdir, "--mode=eval", config=path) == 0
  result = results_of(workdir, 3)
  assert result["policies"] == {"solver": "checkpoint 3"}
  assert result["agents"]["solver"]["turns"] == 1


def test_eval_mode_of_a_mixed_team(job, tmp_path):
  """A trained solver of another run with the verifier as it came."""
  workdir = tmp_path / "mix"
  saved = f"run:{job[0]}/solver@3"
  key = "--config.policies.solver.checkpoint"
  assert call(workdir, *SPLIT, "--mode=eval", f"{key}={saved}") == 0
  result = results_of(workdir, 0)
  assert result["policies"] == {"solver": saved, "verifier": "tiny:verifier"}


def test_a_frozen_policy_takes_part_and_stays(tmp_path):
  frozen = freeze(tmp_path, "verifier")
  for steps in (2, 3):  # resumed from 2
    flags = (*SPLIT, f"--config.steps={steps}")
    assert call(tmp_path, *flags, config=frozen) == 0
  saved = tmp_path / "checkpoints" / "3"
  assert (saved / "policy_solver").is_dir()
  assert not (saved / "policy_verifier").exists()
  found = small_run.metrics(tmp_path)
  for step in (1, 2, 3):
    assert found[step, "turns/verifier"] > 0
    assert (step, "grad_norm/verifier") not in found
    assert (step, "skipped/no_signal/verifier") not in found
  assert small_run.policy(tmp_path, 3, "solver")["['step']"] > 0


# -- the same turns on other slices, other slots -------------------------------


def make(num_devices=8, num_slots=8, **placed):
  """Backbones with weights, ready for a rollout."""
  config = config_lib.read(CONFIG)
  policies = {
    name: dataclasses.replace(
      policy,
      engine=dataclasses.replace(policy.engine, num_slots=num_slots),
    )
    for name, policy in config.policies.items()
  }
  config = dataclasses.replace(
    config,
    policies=policies,
    placement=config_lib.Placement(**placed),
  )
  models = {
    name: backbone.weights.read_config(TINY / name) for name in policies
  }
  plan = placement.plan(config, models, jax.devices()[:num_devices])
  backbones = {
    name: backbone.Backbone(
      [name], config, plan.slices[name], model, TINY / name
    )
    for name, model in models.items()
  }
  for made in backbones.values():
    made.load()
    made.resume()
  return config, backbones


def play(config, backbones):
  """The groups of the first step."""
  made = rollout.Rollout(
    rollout.Team(config), {n: b.sampler for n, b in backbones.items()}, config
  )
  tasks = building.stream(config).tasks(0, config.data.num_tasks)
  key = sampling.root_key(config.seed, "train")
  try:
    return made.collect(tasks, config.data.group_size, key)
  finally:
    made.close()


def turns_of(groups):
  return [t for g in groups for e in g.episodes for t in e.turns]


@pytest.fixture(scope="module")
def one_device():
  config, backbones = make(num_devices=1)
  return config, backbones, play(config, backbones)


def test_4_and_32_slots_play_the_same_episodes(one_device):
  """Rule 26, through orchestra, tags and reward."""
  for num_slots in (4, 32):
    config, backbones = make(num_devices=1, num_slots=num_slots)
    groups = play(config, backbones)
    pairs = zip(turns_of(groups), turns_of(one_device[2]), strict=True)
    for turn, other in pairs:
      assert (turn.agent, turn.index) == (other.agent, other.index)
      np.testing.assert_array_equal(turn.prompt_ids, other.prompt_ids)
      np.testing.assert_array_equal(turn.completion_ids, other.completion_ids)
      assert turn.stop_reason == other.stop_reason
      np.testing.assert_allclose(
        turn.sampler_logprobs, other.sampler_logprobs, atol=1e-5
      )


def update(backbones, groups, values):
  rows = rewards.row_scores(groups, dict.fromkeys(("solver", "verifier"), 0.1))
  outputs = {}
  for name, made in backbones.items():
    work = made.work(rows, values, [name])
    (done,) = made.update(rows, values, work, [work.numbers()])
    outputs[name] = done.output
  return placement.fetch(outputs)


def test_one_update_is_the_same_on_one_device_and_on_4_and_4(one_device):
  _, backbones, groups = one_device
  rows = rewards.row_scores(groups, dict.fromkeys(("solver", "verifier"), 0.1))
  # Advantages of all sizes, whatever the shipped policies know.
  values = np.linspace(-1.5, 1.2, len(rows.turns)).astype(np.float32)
  start = placement.fetch({n: b.state for n, b in backbones.items()})
  one = update(backbones, groups, values)
  _, split = make(strategy="split")
  slices = [set(b.slice.train_mesh.devices.flat) for b in split.values()]
  assert [len(s) for s in slices] == [4, 4] and not slices[0] & slices[1]
  four = update(split, groups, values)
  for name in backbones:
    np.testing.assert_allclose(
      one[name].grad_norm, four[name].grad_norm, rtol=1e-4
    )
    assert one[name].grad_norm[0] > 0 and one[name].ratio_error[0] < 1e-3
    before, got, want = (
      jax.tree.leaves(placement.fetch(s))
      for s in (start[name], split[name].state, backbones[name].state)
    )
    for a, b in zip(got, want, strict=True):
      np.testing.assert_allclose(a, b, atol=1e-5)
    moved = max(np.abs(a - b).max() for a, b in zip(before, want, strict=True))
    assert moved > 1e-4, "an update that moves nothing shows nothing"


# -- bad input -----------------------------------------------------------------


def refused(tmp_path, capsys, *flags):
  """What is said to a run that must not begin; one message, nothing written."""
  workdir = tmp_path / "refused"
  assert call(workdir, *flags) == 2
  captured = capsys.readouterr()
  assert "Traceback" not in captured.err + captured.out
  assert not workdir.exists()
  return captured.err.partition("drmas_jax: ")[2]


@pytest.mark.quick
@pytest.mark.parametrize(
  ("flag", "messages"),
  [
    (
      "--config.data.num_task=3",
      ("data.num_task: unknown key", "did you mean 'num_tasks'?"),
    ),
    ("--steps=3", ("--steps=3: unknown flag", "--config.a.b=value")),
    (
      "--config.policies.solver.checkpoint=/no/such/folder",
      ("checkpoint='/no/such/folder': no such folder",),
    ),
    (
      "--config.policies.solver.checkpoint=tiny:nobody",
      ("checkpoint='tiny:nobody': not shipped", "tiny:solver"),
    ),
    (
      "--config.policies.solver.micro_tokens=0",
      ("policies.solver.micro_tokens: 0 is out of range; write", ">= 1"),
    ),
    (
      "--config.policies.verifier.engine.cache_tokens=40",
      ("policies.verifier.engine.cache_tokens: 40 cannot hold one sequence",),
    ),
    (
      "--config.placement.device_memory_gb=0.001",
      (
        "placement.strategy: 'shared' needs up to 0.0",
        "allowed is 0.00 (placement.device_memory_gb=0.001",
        "GB on device",
      ),
    ),
    (
      "--config.data.sources.arithmetic.options.num_operands=0",
      ("data.sources.arithmetic: num_operands=0 is not allowed",),
    ),
    (
      "--config.eval.sources.sums.options={'low': 1, 'high': 2}",
      ("eval.sources.sums: sums has no rows; choose another split",),
    ),
    (
      "--config.data.sources={'own': {'options': {'rows': "
      "{'train': 'drmas_jax.agents.math:_TEAM'}}}}",
      ("data.sources.own: drmas_jax.agents.math:_TEAM: row 0: str, not a",),
    ),
    (
      "--config.policies.solver.chat_template_kwargs.enable_thinking=False",
      (
        "policies.solver.chat_template_kwargs.enable_thinking: False would "
        "change nothing",
        "allowed are none; correct or remove it",
      ),
    ),
    (
      "--config.agents.solver.policy=nobody",
      ("agents.solver.policy: 'nobody' is no policy",),
    ),
  ],
)
def test_a_wrong_config_is_refused(tmp_path, capsys, flag, messages):
  said = refused(tmp_path, capsys, flag)
  for message in messages:
    assert message in said


@pytest.mark.quick
def test_a_wrong_config_file_is_refused(tmp_path, capsys):
  assert main.main(["--config", str(tmp_path / "none.py")]) == 2
  assert "none.py" in capsys.readouterr().err


def edit_json(path, **changes):
  path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def unknown_architecture(folder):
  edit_json(folder / "config.json", architectures=["MambaForCausalLM"])


def missing_tensor(folder):
  tensors = load_file(folder / "model.safetensors")
  del tensors["model.norm.weight"]
  save_file(tensors, folder / "model.safetensors")


def surplus_tensor(folder):
  tensors = load_file(folder / "model.safetensors")
  tensors["model.layers.7.extra"] = np.zeros(3, np.float32)
  save_file(tensors, folder / "model.safetensors")


def cut_tensors(folder):
  path = folder / "model.safetensors"
  path.write_bytes(path.read_bytes()[:1000])


def no_tokenizer(folder):
  (folder / "tokenizer.json").unlink()


def no_template(folder):
  path = folder / "tokenizer_config.json"
  edit_json(path, chat_template=None)


def no_config(folder):
  (folder / "config.json").unlink()


def broken_config(folder):
  (folder / "config.json").write_text("{")


def no_heads(folder):
  edit_json(folder / "config.json", num_attention_heads=0)


def odd_heads(folder):
  edit_json(folder / "config.json", num_attention_heads=3)


def a_size_in_quotes(folder):
  edit_json(folder / "config.json", hidden_size="64")


def an_end_in_words(folder):
  edit_json(folder / "config.json", eos_token_id="x")


def open_template(folder):
  edit_json(folder / "tokenizer_config.json", chat_template="{% for m in x %}")


def template_that_fails(folder):
  edit_json(folder / "tokenizer_config.json", chat_template="{{ x.y.z }}")


@pytest.mark.quick
@pytest.mark.parametrize(
  ("spoil", "message"),
  [
    (unknown_architecture, "architecture 'MambaForCausalLM' is not supported"),
    (missing_tensor, "model.norm.weight is missing"),
    (surplus_tensor, "model.layers.7.extra is surplus"),
    (cut_tensors, "model.safetensors: cannot be read"),
    (no_tokenizer, "has no tokenizer.json"),
    (no_template, "has no chat template"),
    (no_config, "config.json: no such file"),
    (broken_config, "Expecting property name"),
    (no_heads, "a value is not what its key asks for (integer division"),
    (odd_heads, "3 heads of 21 and 4 kv heads; allowed are"),
    (a_size_in_quotes, "a value is not what its key asks for (unsupported"),
    (an_end_in_words, "the ids of its end tokens are wrong (TypeError"),
    (open_template, "tokens are wrong (TemplateSyntaxError"),
    (template_that_fails, "tokens are wrong (UndefinedError"),
  ],
)
def test_a_broken_folder_is_refused(tmp_path, capsys, spoil, message):
  folder = shutil.copytree(TINY / "solver", tmp_path / "broken")
  spoil(folder)
  key = "policies.solver.checkpoint"
  said = refused(tmp_path, capsys, f"--config.{key}={folder}")
  assert message in said
  assert key in said and str(folder) in said


@pytest.mark.quick
def test_stop_ids_are_said_at_the_start(tmp_path, capsys):
  """Case L12; here of a run that is refused after it."""
  flag = "--config.data.sources.arithmetic.options.num_operands=0"
  said = refused(tmp_path, capsys, flag)
  stops = ", ".join(map(str, Tokenizer.load(TINY / "solver").stop_ids))
  assert f"solver's completions end at the ids {stops}\n" in said


@pytest.mark.quick
def test_a_workdir_that_is_a_file_is_refused(tmp_path, capsys):
  workdir = tmp_path / "file"
  workdir.write_text("mine")
  assert call(workdir) == 2
  said = capsys.readouterr().err
  assert f"--workdir={workdir}" in said and "Traceback" not in said
  assert workdir.read_text() == "mine"
