"""Two real processes of 4 fake devices, gloo on loopback.

A shared machine may stall a process for a while, so the limits inside are a few
seconds and those around are generous; what must end the wait is asserted by its
message.
"""

import os
import socket
import subprocess
import sys

import pytest

from drmas_jax import hosts

ABORTED = -6  # SIGABRT, jax's own end when the leader is killed


FAULTS = ("killed", "stuck", "silent", "left", "leader_killed")


def start(root, scenario, timeout_s):
  """The two processes of a scenario of multihost_worker.py."""
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    port = s.getsockname()[1]
  worker = root / "tests" / "multihost_worker.py"
  return [
    subprocess.Popen(
      [sys.executable, worker, scenario, str(i), str(port), str(timeout_s)],
      env=os.environ | {"PYTHONPATH": str(root)},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for i in range(2)
  ]


def finish(processes):
  """[(exit code, output)] by host."""
  try:
    outputs = [p.communicate(timeout=100)[0] for p in processes]
  finally:
    for p in processes:
      p.kill()
  return [(p.returncode, o) for p, o in zip(processes, outputs, strict=True)]


@pytest.fixture(scope="module")
def ended(root):
  """How each fault ended. They mostly wait, so they do it side by side."""
  started = {name: start(root, name, timeout_s=5) for name in FAULTS}
  return {name: finish(processes) for name, processes in started.items()}


def test_two_hosts_train_in_columns(root):
  for code, output in finish(start(root, "work", timeout_s=60)):
    assert code == 0, output
    assert "worked" in output


def test_a_killed_host_ends_the_other_and_is_named(ended):
  (code, output), (killed, _) = ended["killed"]
  assert killed == -9
  assert code == hosts.EXIT_LOST, output
  assert "host 0: host 1 (" in output
  assert "has not answered for" in output


def test_a_stuck_host_ends_all_and_is_named(ended):
  (code, output), (other, told) = ended["stuck"]
  assert code == hosts.EXIT_LOST, output
  assert "host 1 (" in output and "it is alive" in output
  assert "has not come to: the update" in output
  assert other == hosts.EXIT_LOST, told
  assert "host 0 (" in told and "has left the run: host 1 (" in told


def test_a_round_has_a_limit_and_names_the_missing(ended):
  (leader, told), (code, output) = ended["silent"]
  assert code == hosts.EXIT_LOST, output
  assert "host 0 (" in output and "agree on 'step'" in output
  assert leader == hosts.EXIT_LOST, told


def test_a_host_that_fails_alone_is_named(ended):
  (code, output), (failed, told) = ended["left"]
  assert code == hosts.EXIT_LOST, output
  assert "host 1 (" in output and "has left the run: it exited" in output
  assert failed == 1 and "only here" in told


def test_a_killed_leader_ends_the_other(ended):
  (killed, _), (code, output) = ended["leader_killed"]
  assert killed == -9
  assert code in (ABORTED, hosts.EXIT_LOST), output
  assert "leader" in output or "host 0" in output


@pytest.mark.quick
def test_one_process_needs_no_start():
  hosts.initialize(None, None, None, timeout_s=1)
  assert hosts.agree("step", {"a": (1, 2)}) == [{"a": [1, 2]}]
  assert hosts.share([1, 2, 3]) == [1, 2, 3]
  with hosts.together("update"):
    pass


@pytest.mark.quick
def test_incomplete_flags_are_refused():
  with pytest.raises(hosts.ConfigError, match="--coordinator_address: missing"):
    hosts.initialize(None, 2, 0, timeout_s=1)
