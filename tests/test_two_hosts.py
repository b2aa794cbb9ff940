"""The main job in two processes of four fake devices, gloo on loopback.

Adapters on two hosts are in test_adapter_run.py.
"""

import signal
import types

import pytest
import small_run

from drmas_jax import checkpoint, hosts, placement, restoring
from drmas_jax import config as config_lib

CONFIG = small_run.ROOT / "tests" / "reference_run.py"


def start(workdir, *flags, faults, **env):
  """Both processes of a run in columns, two engines of the solver on each."""
  port = small_run.free_port()
  return [
    small_run.start(
      workdir,
      f"--config={CONFIG}",
      f"--coordinator_address=127.0.0.1:{port}",
      "--num_processes=2",
      f"--process_id={i}",
      *flags,
      fault=fault,
      num_devices=4,
      **env,
    )
    for i, fault in enumerate(faults)
  ]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
  """(workdir, how each host ended) of a run that lost one in step 3, behind the
  save of step 2, which has waited for that of step 1."""
  workdir = tmp_path_factory.mktemp("killed")
  return workdir, small_run.finish_all(
    start(
      workdir,
      "--config.steps=3",
      "--config.checkpoint.every=1",
      faults=("none", "SIGKILL:update:3"),
      SILENT_S="8",
      TELL="1",
    )
  )


def test_a_killed_process_ends_the_other_and_is_named(killed):
  """Within its limit, and in a collective; what was saved stays."""
  workdir, ((code, said), (ended, _)) = killed
  assert ended == -signal.SIGKILL, said
  assert code == hosts.EXIT_LOST, said
  assert "host 0: host 1 (" in said and "has not answered for" in said
  assert (workdir / "checkpoints" / "1").is_dir()
  assert not (workdir / "summary.json").exists()


def test_hosts_have_the_same_weights(killed):
  """Before the first update and behind each, in every engine."""
  workdir, ended = killed
  one, other = (
    [line for line in said.splitlines() if line.startswith("engines of ")]
    for _, said in ended
  )
  assert one == other and len(set(one)) == len(one) == 2 * 3
  found = small_run.metrics(workdir)
  for name in ("solver", "verifier"):
    assert found[1, f"grad_norm/{name}"] > 0
  # Counts and evaluations are of both hosts' episodes.
  assert found[1, "episodes/team"] == 16 and (1, "eval/avg@2") in found


def test_a_reference_on_devices_of_its_own(killed):
  found = small_run.metrics(killed[0])
  assert found[1, "kl/solver"] > 0.01
  assert (1, "kl/verifier") not in found


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
  restoring.check_alike(checkpoint.Run(2, 0, {}, {}), "run")
  for run, seen in ((checkpoint.Run(4, 0, {}, {}), "4, 2"), (None, "None, 2")):
    with pytest.raises(config_lib.ConfigError, match=f"of step {seen}"):
      restoring.check_alike(run, "run")


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

    def has(self, step):
      return True

  def agree(name, mine):
    return [{"step": first} if "step" in mine else mine, mine]

  monkeypatch.setattr(checkpoint, "Checkpoints", Newer)
  monkeypatch.setattr(hosts, "agree", agree)
  config = types.SimpleNamespace(remotes=())
  assert restoring.params(config, {}, "run", "") == (first or 0, {})
  assert asked == reads and says in capsys.readouterr().err
