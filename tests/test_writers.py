"""What a run leaves on disk and on the terminal."""

import io
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from drmas_jax import types, writers

pytestmark = pytest.mark.quick


def lines_of(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_are_one_line_a_step(tmp_path):
  path = tmp_path / "metrics.jsonl"
  writer = writers.JsonLines(path)
  writer.write_scalars(0, {"eval/avg@8": np.float32(0.25)})
  writer.write_scalars(1, {"reward/team": 0.5})
  writer.write_scalars(1, {"eval/avg@8": 0.5, "bad": float("nan")})
  assert lines_of(path) == [{"step": 0, "eval/avg@8": 0.25}]
  writer.flush()
  want = {"step": 1, "reward/team": 0.5, "eval/avg@8": 0.5, "bad": None}
  assert lines_of(path)[1:] == [want]  # on disk while the file is open
  writer.flush()
  writer.write_scalars(2, {"reward/team": 1})
  writer.close()
  assert [line["step"] for line in lines_of(path)] == [0, 1, 2]
  steps, values = writers.read_metrics(path)["eval/avg@8"]
  assert steps.tolist() == [0, 1]
  assert values.tolist() == [0.25, 0.5]
  assert "bad" not in writers.read_metrics(path)


@pytest.mark.parametrize("cut", [1, 7, 20])
def test_truncation_repairs_a_half_line(tmp_path, cut):
  path = tmp_path / "metrics.jsonl"
  whole = [f'{{"step": {s}, "x": {s}.5, "name": "é"}}\n' for s in range(5)]
  path.write_bytes("".join(whole).encode()[:-cut])
  writers.truncate_after(path, 10)
  assert path.read_text() == "".join(whole[:4])
  writers.truncate_after(path, 2)
  assert path.read_text() == "".join(whole[:3])
  writers.truncate_after(path, -1)
  assert path.read_text() == ""
  assert list(tmp_path.iterdir()) == [path]
  writers.truncate_after(tmp_path / "not there", 2)


def test_a_cut_character_is_no_error(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_bytes(b'{"step": 1}\n' + '{"step": 2, "q": "é'.encode()[:-1])
  assert writers.read_metrics(path) == {}
  writers.truncate_after(path, 5)
  assert path.read_bytes() == b'{"step": 1}\n'


_CHILD = """
import sys
from drmas_jax import writers
run = writers.RunWriter(sys.argv[1], 1000, resume_from=int(sys.argv[2]))
for step in range(int(sys.argv[2]) + 1, 1000):
  run.write_scalars(step, {f"metric/{i}": step + i for i in range(20)})
  run.write_episodes([{"step": step, "text": "x" * 20000}])
  run.flush()
  run.write_json("summary.json", {"step": step, "text": "y" * 20000})
  print(step, flush=True)
"""


def test_kill_and_resume_leave_a_straight_record(tmp_path):
  kept = 0
  for after in (5, 3, 8):
    child = subprocess.Popen(
      [sys.executable, "-c", _CHILD, str(tmp_path), str(kept)],
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      text=True,
    )
    for _ in range(after):
      step = int(child.stdout.readline())
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()
    kept = step - 2  # as if the last checkpoint were of two steps before
    json.loads((tmp_path / "summary.json").read_text())
  run = writers.RunWriter(tmp_path, 1000, resume_from=kept)
  run.write_scalars(kept + 1, {"metric/0": kept + 1.0})
  run.close()
  steps = [line["step"] for line in lines_of(tmp_path / "metrics.jsonl")]
  assert steps == list(range(1, kept + 2))
  steps = [
    line["step"]
    for path in sorted((tmp_path / "transcripts").iterdir())
    for line in lines_of(path)
  ]
  assert steps == list(range(1, kept + 1))


def test_a_new_run_starts_from_empty_files(tmp_path):
  for _ in range(2):
    run = writers.RunWriter(tmp_path, 1)
    run.write_scalars(0, {"x": 1.0})
    run.write_episodes([{"step": 0}])
    run.close()
  assert lines_of(tmp_path / "metrics.jsonl") == [{"step": 0, "x": 1.0}]
  assert len(list((tmp_path / "transcripts").iterdir())) == 1


def test_other_processes_write_nothing(tmp_path, capfd):
  run = writers.RunWriter(tmp_path / "run", 1, primary=False)
  run.write_scalars(1, {"x": 1.0})
  run.write_texts(1, {"x": "y"})
  run.write_episodes(iter([{"step": 0}]))
  run.write_json("summary.json", {})
  run.write_report()
  run.close()
  assert list(tmp_path.iterdir()) == []
  assert capfd.readouterr() == ("", "")


def test_every_writer_of_a_list_gets_every_call():
  calls = []

  class Recorder:
    def __getattr__(self, name):
      return lambda *args, **kwargs: calls.append((name, args, kwargs))

  many = writers.MultiWriter([Recorder(), writers.Writer(), Recorder()])
  names = [n for n in dir(writers.Writer) if not n.startswith("_")]
  for name in names:
    args = {"flush": (), "close": (), "write_hparams": ({},)}
    more = {"sample_rate": 8000} if name == "write_audios" else {}
    getattr(many, name)(*args.get(name, (1, {})), **more)
  assert [c[0] for c in calls] == [n for n in names for _ in range(2)]
  assert calls[names.index("write_audios") * 2][2] == {"sample_rate": 8000}


def test_same_methods_as_clu():
  """clu's interface file imports jax and no TensorFlow; its package does."""
  import ast
  import importlib.util
  import pathlib

  clu = pathlib.Path(importlib.util.find_spec("clu").origin).parent
  tree = ast.parse((clu / "metric_writers" / "interface.py").read_text())
  (cls,) = (n for n in tree.body if isinstance(n, ast.ClassDef))
  for method in cls.body:
    if isinstance(method, ast.FunctionDef):
      code = getattr(writers.Writer, method.name).__code__
      num = code.co_argcount + code.co_kwonlyargcount
      want = [a.arg for a in method.args.args + method.args.kwonlyargs]
      assert list(code.co_varnames[:num]) == want


def test_tensorboard_events_are_purged_on_resume(tmp_path):
  for first in (0, 2):
    board = writers.TensorBoard(tmp_path, first)
    board.write_hparams({"a.b": 1})
    for step in range(first, first + 3):
      board.write_scalars(step, {"x": step * 10.0 + first})
    board.write_texts(first, {"note": "text"})
    board.flush()
    board.close()
  scalars, purged = [], []
  for path in sorted(tmp_path.iterdir()):
    for event in _events(path):
      if event.HasField("session_log"):
        purged.append(event.step)
        scalars = [s for s in scalars if s[0] < event.step]
      for value in event.summary.value:
        if value.tag == "x":
          scalars.append((event.step, value.simple_value))
  assert purged == [0, 2]
  assert scalars == [(0, 0.0), (1, 10.0), (2, 22.0), (3, 32.0), (4, 42.0)]


def _events(path):
  """Records of an event file: length, its checksum, bytes, their checksum."""
  from tensorboardX.proto import event_pb2

  data = path.read_bytes()
  while data:
    size = int.from_bytes(data[:8], "little")
    yield event_pb2.Event.FromString(data[12 : 12 + size])
    data = data[16 + size :]


# -- console -------------------------------------------------------------------


class Clock:
  now = 0.0

  def __call__(self):
    return self.now


SCALARS = {
  "reward/team": 0.625,
  "grad_norm/solver": 0.3123,
  "grad_norm/verifier": 12.34,
  "grad_norm/solver/solver": 9.0,
  "rollout/tokens_per_s": 1234.5,
  "time/step_s": 0.5,
}


def run_console(total, seconds):
  stream, clock = io.StringIO(), Clock()
  console = writers.Console(total, stream=stream, clock=clock)
  console.write_scalars(0, {"eval/avg@8": 0.25, "eval/pass@8": 0.5})
  console.flush()
  for step in range(1, total + 1):
    clock.now += seconds
    console.write_scalars(step, SCALARS)
    console.flush()
  console.close()
  return stream.getvalue().splitlines()


def test_console_lines_without_a_terminal():
  lines = run_console(total=100, seconds=0.1)
  assert lines[0] == "step 0/100  held-out avg@8 0.250"
  assert lines[1] == (
    "step 1/100  reward 0.625  held-out avg@8 0.250  grad norm solver 0.31, "
    "verifier 12  1234 tokens/s"
  )
  assert lines[2].startswith("step 6/100  ")
  assert lines[2].endswith("  0:09 left")
  assert lines[-1].startswith("step 100/100  ")
  assert lines[-1].endswith("  0:00 left")
  assert len(lines) <= 23


def test_slow_steps_are_seen_every_ten_seconds():
  lines = run_console(total=1000, seconds=4)
  assert lines[2].startswith("step 4/1000  ")
  assert lines[3].startswith("step 7/1000  ")
  assert lines[2].endswith("  1:06:24 left")


def test_console_is_a_bar_on_a_terminal():
  class Terminal(io.StringIO):
    def isatty(self):
      return True

  stream = Terminal()
  console = writers.Console(10, first=4, stream=stream)
  console.write_scalars(5, SCALARS)
  console.close()
  last = stream.getvalue().split("\r")[-1]
  assert " 5/10 [" in last
  assert "reward 0.625  grad norm solver 0.31, verifier 12" in last


# -- transcripts ---------------------------------------------------------------


def test_transcripts_are_bounded_and_the_newest_stay(tmp_path):
  limit = 0.05
  transcripts = writers.Transcripts(tmp_path, limit)
  rng = np.random.default_rng(0)
  for step in range(200):
    text = "x" * int(rng.integers(10, 3000))
    transcripts.write([{"step": step, "text": text}])
    sizes = [p.stat().st_size for p in tmp_path.iterdir()]
    assert sum(sizes) <= limit * 1e6
  assert sum(sizes) >= 0.7 * limit * 1e6
  steps = [r["step"] for p in sorted(tmp_path.iterdir()) for r in lines_of(p)]
  assert steps == list(range(steps[0], 200))
  transcripts.write([{"step": 200, "text": "x" * 100_000}])  # more than all
  assert sum(p.stat().st_size for p in tmp_path.iterdir()) == sum(sizes)

  resumed = writers.Transcripts(tmp_path, limit, resume_from=190)
  resumed.write([{"step": 191, "text": "again"}])
  steps = [r["step"] for p in sorted(tmp_path.iterdir()) for r in lines_of(p)]
  assert steps == list(range(steps[0], 192))


def test_no_transcripts_where_the_limit_is_zero(tmp_path):
  writers.Transcripts(tmp_path, 0).write([{"step": 1}])
  assert list(tmp_path.iterdir()) == []


def make_turn(**changes):
  fields = {
    "agent": "verifier",
    "policy": "judge",
    "index": 1,
    "prompt_ids": np.array([1, 2, 3], np.int32),
    "completion_ids": np.array([4, 5], np.int32),
    "sampler_logprobs": np.array([-0.5, -1.5], np.float32),
    "log_kept_mass": np.zeros(2, np.float32),
    "stop_reason": "tag",
    "policy_version": 7,
    "valid": True,
    "text": "<verify>approve</verify>",
    "reply": types.Reply("approve", verdict="approve", labels={"right": 1.0}),
  }
  return types.Turn(**fields | changes)


def test_episode_record(tmp_path):
  task = types.Task("arithmetic", 3, 40, "1 + 1 = ? \ud800 日本", np.int64(2))
  fault = types.Fault("deadline", "too slow", wall_clock=True)
  silent = make_turn(
    index=2,
    completion_ids=np.zeros(0, np.int32),
    sampler_logprobs=np.zeros(0, np.float32),
    stop_reason="fault",
    text="",
    reply=None,
    fault=fault,
  )
  episode = types.Episode(
    task,
    5,
    [make_turn(), silent],
    action=np.float32(2),
    outcome=types.Outcome(1.0, parts={"exact": 1.0}),
  )
  record = writers.episode_record(
    episode,
    12,
    "train",
    decode=lambda policy, ids: f"{policy}:{ids.tolist()}",
    scores={1: 0.9},
    advantages={1: -0.25},
  )
  transcripts = writers.Transcripts(tmp_path, 1.0)
  transcripts.write([record])
  (read,) = lines_of(tmp_path / "000000.jsonl")
  assert "日本" in (tmp_path / "000000.jsonl").read_text()
  turns = read.pop("turns")
  assert read == {
    "schema": 1,
    "step": 12,
    "kind": "train",
    "task": {
      "source": "arithmetic",
      "index": 3,
      "position": 40,
      "question": "1 + 1 = ? \ud800 日本",
      "answer": 2,
    },
    "episode": 5,
    "status": "ok",
    "fault": None,
    "action": 2.0,
    "reward": 1.0,
    "success": True,
    "parts": {"exact": 1.0},
  }
  assert turns[0] == {
    "index": 1,
    "agent": "verifier",
    "policy": "judge",
    "policy_version": 7,
    "prompt": "judge:[1, 2, 3]",
    "completion": "<verify>approve</verify>",
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "stop_reason": "tag",
    "valid": True,
    "verdict": "approve",
    "labels": {"right": 1.0},
    "fault": None,
    "logprobs": {"sum": -2.0, "mean": -1.0, "min": -1.5},
    "score": 0.9,
    "advantage": -0.25,
  }
  assert turns[1]["fault"] == {"kind": "deadline", "message": "too slow"}
  assert turns[1]["logprobs"] is None
  assert turns[1]["score"] is None


# -- files that are replaced whole ---------------------------------------------


def test_a_failed_write_leaves_the_old_file(tmp_path):
  path = tmp_path / "summary.json"
  value = {"reward": np.float32(0.5), "list": np.arange(3)}
  writers.write_json(path, value)
  assert json.loads(path.read_text()) == {"reward": 0.5, "list": [0, 1, 2]}
  with pytest.raises(ValueError, match="Circular"):
    value["self"] = value
    writers.write_json(path, value)
  assert json.loads(path.read_text()) == {"reward": 0.5, "list": [0, 1, 2]}


def made_up_run(path, steps=80):
  rng = np.random.default_rng(0)
  writer = writers.JsonLines(path)
  for step in range(steps + 1):
    level = 0.35 + 0.55 * (1 - np.exp(-step / 25))
    scalars = {}
    if step:
      scalars["reward/team"] = float(np.clip(rng.normal(level, 0.05), 0, 1))
      for policy in ("solver", "verifier"):
        scalars[f"grad_norm/{policy}"] = float(rng.lognormal(-1, 0.4))
        scalars[f"kappa/{policy}"] = float(rng.lognormal(0.1, 0.2))
      if step % 10 == 1:
        scalars["grad_norm/solver/solver"] = float(rng.lognormal(-1, 0.4))
    if step % 10 == 0:
      scalars |= {"eval/avg@8": level, "eval/pass@8": level**0.3}
    writer.write_scalars(step, scalars)
  writer.close()


def test_report_is_a_picture(tmp_path):
  import matplotlib.image

  made_up_run(tmp_path / "metrics.jsonl")
  metrics = writers.read_metrics(tmp_path / "metrics.jsonl")
  writers.report(metrics, tmp_path / "report.png")
  data = (tmp_path / "report.png").read_bytes()
  assert data[:8] == b"\x89PNG\r\n\x1a\n"
  picture = matplotlib.image.imread(tmp_path / "report.png")
  assert picture.shape == (750, 1100, 4)
  names = {p.name for p in tmp_path.iterdir()}
  assert names == {"metrics.jsonl", "report.png"}

  writers.report({}, tmp_path / "empty.png")  # a run cut before its first step
  empty = matplotlib.image.imread(tmp_path / "empty.png")
  assert [_colored_rows(q) for q in _quarters(empty)] == [0, 0, 0, 0]
  for quarter in _quarters(picture):  # lines that spread over their panel
    assert _colored_rows(quarter) > 100


def _quarters(picture):
  return [q for half in np.split(picture, 2) for q in np.split(half, 2, axis=1)]


def _colored_rows(picture):
  return int((np.ptp(picture[..., :3], axis=-1) > 0.2).any(axis=1).sum())


def test_table():
  before = {"avg@8": (0.35, 0.3, 0.4), "pass@8": 0.6, "gone": 1.0}
  after = {"avg@8": (0.875, 0.8, 0.9), "pass@8": 0.95}
  assert writers.table(before, after) == (
    "                      before                 after  change\n"
    "avg@8   0.350 [0.300, 0.400]  0.875 [0.800, 0.900]  +0.525\n"
    "pass@8                 0.600                 0.950  +0.350"
  )
