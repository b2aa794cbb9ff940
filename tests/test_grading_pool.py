"""Worker processes: limits, faults, cache, and their end."""

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from drmas_jax import plays, types
from drmas_jax.grading import pool

pytestmark = pytest.mark.quick

EASY = (r"\sqrt{8}", r"2\sqrt{2}")
# About half a second of work.
HARD = "+".join([r"\sin(x)10^{1400}"] * 90)


@pytest.fixture
def workers():
  made = []

  def make(*args, **kwargs):
    made.append(pool.Pool(*args, **kwargs))
    return made[-1]

  yield make
  for each in made:
    each.close()


def _is_alive(pid):
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  with open(f"/proc/{pid}/stat") as stat:
    return stat.read().rpartition(")")[2].split()[0] != "Z"


def test_late_is_a_fault_and_costs_one_worker(workers):
  own = workers(1, limit_s=0.05)
  with pytest.raises(pool.GraderFault, match=r"no answer within 0.05 s") as e:
    own.verdict(HARD, "x+1")
  assert e.value.wall_clock
  assert own.num_faults == 1
  own.limit_s = 30
  assert own.verdict(*EASY)
  assert own.num_faults == 1


def test_a_fault_is_not_remembered(workers):
  own = workers(1, limit_s=0.05)
  with pytest.raises(pool.GraderFault):
    own.verdict(HARD, "x+1")
  own.limit_s = 30
  assert own.verdict(HARD, "x+1") is False


def test_a_worker_that_dies_is_a_fault_of_no_clock(workers):
  own = workers(1)
  assert own.verdict(*EASY)
  own._idle[0]._process.kill()
  own._idle[0]._process.wait()
  with pytest.raises(pool.GraderFault) as e:
    own.verdict(r"\sqrt{3}", "x")
  assert not e.value.wall_clock
  assert own.verdict(r"\sqrt{3}", "x") is False


def test_faults_lose_the_episode_and_say_whether_a_clock_decided():
  for clock in (True, False):
    late = pool.GraderFault("late", clock)
    fault = plays.outside_fault("reward", late, "a limit", None, None)
    assert (fault.kind, fault.wall_clock) == ("reward", clock)
    assert "late" in fault.message
  assert issubclass(pool.GraderFault, types.TransientError)


def test_memory_is_limited(workers):
  """A verdict that needs more is a fault; so is a worker that cannot start."""
  own = workers(1, memory_mb=10)
  with pytest.raises(pool.GraderFault, match="start"):
    own.verdict(*EASY)
  code = (
    "from drmas_jax.grading import worker\n"
    "worker._limit_memory(500 * 2**20)\n"
    "print(worker._answer(lambda: bytearray(600 * 2**20), '[]'))\n"
  )
  assert "out of memory" in subprocess.check_output(
    [sys.executable, "-c", code], text=True, timeout=60
  )


def test_a_defect_in_a_worker_is_an_error_and_no_verdict():
  code = (
    "from drmas_jax.grading import worker\n"
    "print(worker._answer(lambda: 1 / 0, '[]'))\n"
  )
  said = subprocess.check_output(
    [sys.executable, "-c", code], text=True, timeout=60
  )
  assert "ZeroDivisionError" in said and "same" not in said


def test_verdicts_are_remembered_in_either_order(workers, monkeypatch):
  own = workers(1)
  asked = []
  ask = own._ask
  monkeypatch.setattr(own, "_ask", lambda q: asked.append(q) or ask(q))
  a, b = EASY
  assert own.verdict(a, b) and own.verdict(b, a) and own.verdict(a, b)
  assert len(asked) == 1
  # With a gold that may be a percentage the order says which is the gold.
  own.verdict(a, b, percent=True)
  own.verdict(b, a, percent=True)
  assert len(asked) == 3


def test_many_threads_share_few_workers(workers):
  own = workers(2)
  questions = [(rf"\sqrt{{{4 * i}}}", rf"2\sqrt{{{i}}}") for i in range(1, 40)]
  with concurrent.futures.ThreadPoolExecutor(16) as threads:
    assert all(threads.map(lambda q: own.verdict(*q), questions))
  assert len(own._idle) <= 2


def test_workers_import_no_jax_and_no_numpy():
  code = (
    "import sys; from drmas_jax.grading import algebra, worker\n"
    "print(sorted({'jax', 'numpy', 'sympy'} & set(sys.modules)))"
  )
  said = subprocess.check_output(
    [sys.executable, "-c", code], text=True, timeout=60
  )
  assert said.strip() == "[]"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_end_with_their_parent():
  code = (
    "from drmas_jax.grading import pool; import time\n"
    f"own = pool.Pool(1); own.verdict(*{EASY!r})\n"
    "print(own._idle[0]._process.pid, flush=True); time.sleep(60)\n"
  )
  parent = subprocess.Popen(
    [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
  )
  worker = int(parent.stdout.readline())
  assert _is_alive(worker)
  parent.send_signal(signal.SIGKILL)
  parent.wait()
  parent.stdout.close()
  deadline = time.monotonic() + 10
  while _is_alive(worker) and time.monotonic() < deadline:
    time.sleep(0.05)
  assert not _is_alive(worker)


def test_what_a_worker_says():
  """The protocol: a line when ready, then a line a question."""
  code = pool._MAIN.format(root=str(pool._ROOT), memory=500, alarm=10)
  lines = "".join(json.dumps([*EASY, False]) + "\n" for _ in range(2))
  done = subprocess.run(
    [sys.executable, "-c", code],
    input=lines,
    capture_output=True,
    text=True,
    timeout=60,
  )
  said = [json.loads(line) for line in done.stdout.splitlines()]
  assert said == [{}, {"same": True}, {"same": True}]


def test_a_worker_ends_itself_if_nobody_does():
  code = pool._MAIN.format(root=str(pool._ROOT), memory=500, alarm=0.05)
  done = subprocess.run(
    [sys.executable, "-c", code],
    input=json.dumps([HARD, "x+1", False]) + "\n",
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert done.returncode == -signal.SIGALRM
  assert done.stdout == "{}\n"
