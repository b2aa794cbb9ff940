"""A foreign orchestrator accepts our contract: JetStream's Driver and server.

They run in a process of their own, jetstream_worker.py, whose greedy tokens
must be those of whole forward passes over one sequence at a time.
"""

import json
import os
import subprocess
import sys

import pytest

KILLED = -9  # by JetStream, where a thread of its driver fails


@pytest.fixture(scope="module")
def answers(root):
  done = subprocess.run(
    [sys.executable, str(root / "tests" / "jetstream_worker.py")],
    env=os.environ | {"PYTHONPATH": str(root)},
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )
  assert done.returncode != KILLED, done.stdout
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
  ("scenario", "num"),
  [("interleaved", 10), ("apart", 10), ("last_slot_comes_free", 6)],
)
def test_jetstreams_driver_serves_the_engine(answers, scenario, num):
  answer = answers[scenario]
  assert answer["got"] == answer["wanted"]
  assert len(answer["got"]) == num


def test_jetstreams_server_serves_many_clients_at_once(answers):
  """Twenty on 4 slots, and some that ask for what they should not."""
  answer = answers["server"]
  assert answer["live"]
  assert answer["got"] == answer["wanted"]
  assert len(answer["got"]) == 25
  lengths = {len(ids) for ids in answer["got"]}
  assert len(lengths) > 5, "requests must differ for this to mean something"


def test_jetstream_brings_nothing_with_it(answers):
  assert answers["foreign"] == []
  assert answers["log_level"] == 30  # WARNING, a root logger's own
