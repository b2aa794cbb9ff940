"""The main job in two processes of four fake devices, gloo on loopback."""

import json
import pathlib
import signal
import socket
import time
import types

import pytest
import small_run

from drmas_jax import checkpoint, coordinator, hosts, placement
from drmas_jax import config as config_lib

STEPS = 2
# The compile cache serves process 0 alone, so the other compiles every time.
XLA_FLAGS = (
  "--xla_force_host_platform_device_count=4 "
  "--xla_backend_optimization_level=0 "
  "--xla_llvm_disable_expensive_passes=true"
)


def start(workdir, *flags, faults=("none", "none"), **env):
  """Both processes of a run in columns, two engines of a policy on each."""
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    port = s.getsockname()[1]
  return [
    small_run.start(
      workdir,
      "--config.placement.strategy=columns",
      "--config.placement.rollout_mesh={'data': 2, 'fsdp': 1}",
      f"--config.steps={STEPS}",
      f"--coordinator_address=127.0.0.1:{port}",
      "--num_processes=2",
      f"--process_id={i}",
      *flags,
      fault=fault,
      XLA_FLAGS=XLA_FLAGS,
      **env,
    )
    for i, fault in enumerate(faults)
  ]


def finish(processes):
  try:
    return [small_run.finish(p) for p in processes]
  finally:
    for p in processes:
      p.kill()


@pytest.fixture(scope="module")
def job(tmp_path_factory):
  """(workdir, what each host said of itself)."""
  workdir = tmp_path_factory.mktemp("job")
  ended = finish(start(workdir))
  for code, said in ended:
    assert code == 0, said
  return workdir, [said for _, said in ended]


def own_words(said):
  return json.loads(said.splitlines()[-1])


def test_both_end_with_the_same_weights(job):
  workdir, said = job
  first, second = map(own_words, said)
  assert first["learner"] == second["learner"]
  assert first["engine"] == second["engine"]
  assert len({*first["learner"].values(), *first["engine"].values()}) == 4
  found = small_run.metrics(workdir)
  updates = [
    (s, f"grad_norm/{p}") for s in (1, 2) for p in ("solver", "verifier")
  ]
  assert any(u in found for u in updates)
  # Counts and evaluations are of both hosts' episodes.
  assert found[1, "episodes/team"] == 16
  assert found[2, "step"] == 2 and (2, "eval/avg@2") in found


def test_only_process_0_writes(job):
  """But for its own shards of the checkpoints."""
  workdir, said = job
  first, second = (
    {
      pathlib.Path(p).relative_to(workdir).parts[0]
      for p in own_words(words)["opened"]
      if pathlib.Path(p).is_relative_to(workdir)
    }
    for words in said
  )
  assert {"metrics.jsonl", "checkpoints", "tensorboard"} < first
  assert second <= {"checkpoints"}
  assert "step 2/2" in said[0] and "before" in said[0]
  assert "step" not in said[1].partition("{")[0]


def test_a_killed_process_ends_the_other_and_is_named(job, tmp_path):
  """Within its limit, and in a collective; what was saved stays."""
  del job  # its programs are in the compile cache
  faults = ("none", "SIGKILL:update:2")
  flags = ("--config.checkpoint.every=1",)
  processes = start(tmp_path, *flags, faults=faults, SILENT_S="8")
  (code, said), (killed, _) = finish(processes)
  assert killed == -signal.SIGKILL, said
  assert code == hosts.EXIT_LOST, said
  assert "host 0: host 1 (" in said and "has not answered for" in said
  assert (tmp_path / "checkpoints" / "1").is_dir()
  assert not (tmp_path / "summary.json").exists()


@pytest.mark.quick
def test_tasks_that_hosts_cannot_share_are_refused():
  config = config_lib.read(
    small_run.ROOT / "tests" / "small_run.py", ["data.num_tasks=5"]
  )
  with pytest.raises(config_lib.ConfigError, match=r"data\.num_tasks: 5 tasks"):
    placement.lay_out(config, num_hosts=2, num_local=4)
  placement.lay_out(config, num_hosts=1, num_local=4)


@pytest.mark.quick
def test_hosts_that_read_other_checkpoints_are_refused(monkeypatch):
  """One would train other weights than the rest, and nobody would know."""
  others = {"step": 2}
  monkeypatch.setattr(hosts, "agree", lambda name, mine: [mine, others])
  training = object.__new__(coordinator.Training)
  training.workdir = "run"
  training._check_alike(checkpoint.Run(2, 0, {}, {}))
  for run, seen in ((checkpoint.Run(4, 0, {}, {}), "4, 2"), (None, "None, 2")):
    with pytest.raises(config_lib.ConfigError, match=f"of step {seen}"):
      training._check_alike(run)


@pytest.mark.quick
@pytest.mark.parametrize(
  ("first", "reads", "says"),
  [(7, [None, 7], "evaluates step 7"), (None, [None], "no checkpoint in run")],
)
def test_an_evaluation_is_of_what_the_first_host_found(
  monkeypatch, capsys, first, reads, says
):
  """The run that it is of may save between two hosts' looks."""
  asked = []

  class Newer:
    def __init__(self, workdir, read_only):
      pass

    def run(self, step=None):
      asked.append(step)
      return checkpoint.Run(step or 9, 0, {}, {}, {"folders": {}})

  monkeypatch.setattr(checkpoint, "Checkpoints", Newer)
  found = {"step": first}
  monkeypatch.setattr(hosts, "agree", lambda name, mine: [found, mine])
  config = types.SimpleNamespace(remotes=())
  assert coordinator._restore_params(config, {}, "run", "") == (first or 0, {})
  assert asked == reads and says in capsys.readouterr().err


@pytest.mark.quick
def test_a_wait_that_is_over_names_who_is_silent():
  """It may have come to the section and died in it."""
  now = time.monotonic()
  watch = object.__new__(hosts._Hosts)
  watch.timeout_s = 20.0
  watch._waiting = ("update", 3, now - 1)
  watch._seen = {1: (hosts._Sign("b", entered=3, at="update"), now - 6)}
  assert "host 1 (b) has not answered for 6 s" in watch._problem()
  watch._seen = {1: (hosts._Sign("b", entered=3, at="update"), now)}
  assert "all hosts came to: update" in watch._problem()
  watch._waiting = ("update", 3, now + 1)
  assert watch._problem() is None
