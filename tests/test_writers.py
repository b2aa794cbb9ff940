"""What a run leaves on disk and on the terminal."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from drmas_jax import config as config_lib
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
    args = {"flush": (), "close": ()}
    args |= dict.fromkeys(("write_hparams", "write_episodes"), ({},))
    more = {"sample_rate": 8000} if name == "write_audios" else {}
    getattr(many, name)(*args.get(name, (1, {})), **more)
  assert [c[0] for c in calls] == [n for n in names for _ in range(2)]
  assert calls[names.index("write_audios") * 2][2] == {"sample_rate": 8000}


_OWN = """
import json

def make(config, workdir, first):
  if config == "broken":
    raise OSError("no such server")
  assert first == 0
  return Board(workdir / "own.jsonl")

class Board:  # it has no more methods than it cares for
  def __init__(self, path):
    self.path = path

  def write_scalars(self, step, scalars):
    if step == 2:
      raise KeyError("lost")
    self.append([step, scalars])

  def write_episodes(self, episodes):
    self.append(episodes)

  def append(self, line):
    with open(self.path, "a") as f:
      print(json.dumps(line), file=f)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
  """The name of a module of the user's own."""
  (tmp_path / "own_boards").mkdir()
  (tmp_path / "own_boards" / "board.py").write_text(_OWN)
  monkeypatch.syspath_prepend(tmp_path)
  yield "own_boards.board"
  for name in [n for n in sys.modules if n.startswith("own_boards")]:
    del sys.modules[name]


def test_a_writer_that_raises_loses_nothing_but_itself(tmp_path, own, capsys):
  run = writers.RunWriter(tmp_path, 3, names=("jsonl", own))
  for step in (1, 2, 3):
    run.write_scalars(step, {"x": step / 2})
    run.write_episodes(e for e in [{"step": step}])
    run.flush()
  run.close()
  said = capsys.readouterr().err
  assert said.count("WARNING") == 1
  assert "WARNING: " + str(tmp_path / "own_boards" / "board.py:16") in said
  assert f"KeyError: 'lost'\n  write_scalars of the writer {own}.Board" in said
  assert "the run goes on" in said and "Traceback" not in said
  assert lines_of(tmp_path / "own.jsonl") == [[1, {"x": 0.5}], [{"step": 1}]]
  steps = [line["step"] for line in lines_of(tmp_path / "metrics.jsonl")]
  assert steps == [1, 2, 3]
  episodes = lines_of(tmp_path / "transcripts" / "000000.jsonl")
  assert [e["step"] for e in episodes] == [1, 2, 3]


def test_a_writer_that_cannot_be_made_ends_the_start(tmp_path, own):
  with pytest.raises(types.UserError) as e:
    writers.RunWriter(tmp_path, 3, names=("jsonl", own), config="broken")
  first, second, *_ = str(e.value).splitlines()
  assert first.endswith("board.py:6: OSError: no such server")
  assert second == f"  making the writer '{own}'"


@pytest.mark.parametrize("listens", [False, True])
def test_a_writer_of_ones_own_gets_all_episodes(tmp_path, own, listens):
  """Of the step; without one they are not even made."""
  names, made = ("jsonl", own)[: 1 + listens], []

  def episodes():
    for i in range(5):
      made.append(i)
      yield {"step": 1, "episode": i}

  run = writers.RunWriter(tmp_path, 3, names=names, whole=2)
  run.write_episodes(episodes())
  run.close()
  assert made == list(range(5 if listens else 2))
  kept = lines_of(tmp_path / "transcripts" / "000000.jsonl")
  assert [e["episode"] for e in kept] == [0, 1]
  if listens:
    (got,) = lines_of(tmp_path / "own.jsonl")
    assert [e["episode"] for e in got] == made


def own_config(names):
  import small_run

  config = small_run.get_config()
  config.logging = {"writers": names}
  return config_lib.build(config)


def test_writers_are_checked_before_a_run(monkeypatch):
  monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not there
  config_lib.check(own_config(["jsonl", "test_writers.nothing"]), "eval")
  for names, fault in (
    (
      ["tensorbord", "jsonl"],
      "'tensorbord' not found; allowed are jsonl, "
      "tensorboard, wandb, or a module of your own",
    ),
    (["jsonl", "json.decoder"], "'json.decoder' has no make"),
    (["jsonl", "jsonl"], "'jsonl' is there twice"),
    (["tensorboard"], "lacks 'jsonl'"),
    (["jsonl", "wandb"], "drmas-jax[wandb]"),
  ):
    with pytest.raises(
      config_lib.ConfigError, match=r"^logging\.writers: "
    ) as e:
      config_lib.check(own_config(names))
    assert fault in str(e.value) and "\n" not in str(e.value)


def test_wandb_goes_on_with_its_run(tmp_path, monkeypatch):
  pytest.importorskip("wandb", reason="needs the extra: drmas-jax[wandb]")
  monkeypatch.setenv("WANDB_MODE", "offline")
  monkeypatch.setenv("WANDB_SILENT", "true")
  logged = []
  for resume_from in (None, 1):
    run = writers.RunWriter(
      tmp_path, 3, names=("jsonl", "wandb"), resume_from=resume_from
    )
    if resume_from is None:
      run.write_hparams({"a.b": 1})
    first = 1 if resume_from is None else 2
    for step in (first, first + 1):
      run.write_scalars(step, {"x": float(step)})
    run.close()
    logged.append((tmp_path / "wandb_id").read_text())
  assert logged[0] == logged[1]
  folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
  assert [logged[0] in f.name for f in folders] == [True, True]
  rows = [row for folder in folders for row in _wandb_rows(folder)]
  assert [(r["step"], r["x"]) for r in rows] == [(1, 1), (2, 2), (2, 2), (3, 3)]
  writers.RunWriter(tmp_path, 3, names=("jsonl", "wandb")).close()
  assert (tmp_path / "wandb_id").read_text() != logged[0]  # a new run


def _wandb_rows(folder):
  """What was logged: the file is LevelDB's log of records, behind 7 bytes."""
  from wandb.proto import wandb_internal_pb2

  (path,) = folder.glob("*.wandb")
  data, at, whole, block = path.read_bytes(), 7, b"", 1 << 15
  while at + 7 <= len(data):
    if block - at % block < 7:  # too little room for a head: padding
      at += block - at % block
      continue
    size, part = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
    whole += data[at + 7 : at + 7 + size]
    at += 7 + size
    if part in (1, 4):  # all of a record, or its last part
      record = wandb_internal_pb2.Record.FromString(whole)
      whole = b""
      if record.HasField("history"):
        yield {
          item.key or ".".join(item.nested_key): json.loads(item.value_json)
          for item in record.history.item
        }


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


@pytest.mark.filterwarnings(
  "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)
def test_a_board_on_a_full_disk_is_left_out(tmp_path, capfd):
  """Its thread ends then, and its queue is emptied by nobody."""
  board = writers.TensorBoard(tmp_path)
  kept = []
  own = type("Own", (), {"write_scalars": lambda _, *args: kept.append(args)})()
  both = writers.MultiWriter([board, own])
  events = board._events.file_writer.event_writer

  def full(event):
    raise OSError(28, "No space left on device")

  events._ev_writer.write_event = full
  end = time.monotonic() + 20
  while board in both.writers and time.monotonic() < end:
    both.write_scalars(len(kept), {"x": 1.0})
    time.sleep(0.01)
  assert both.writers == [own] and len(kept) > 1
  both.close()
  assert "its thread has ended, as where the disk" in capfd.readouterr().err


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
    transcripts.write_episodes([{"step": step, "text": text}])
    sizes = [p.stat().st_size for p in tmp_path.iterdir()]
    assert sum(sizes) <= limit * 1e6
  assert sum(sizes) >= 0.7 * limit * 1e6
  steps = [r["step"] for p in sorted(tmp_path.iterdir()) for r in lines_of(p)]
  assert steps == list(range(steps[0], 200))
  transcripts.write_episodes(
    [{"step": 200, "text": "x" * 100_000}]
  )  # more than all
  assert sum(p.stat().st_size for p in tmp_path.iterdir()) == sum(sizes)

  resumed = writers.Transcripts(tmp_path, limit, resume_from=190)
  resumed.write_episodes([{"step": 191, "text": "again"}])
  steps = [r["step"] for p in sorted(tmp_path.iterdir()) for r in lines_of(p)]
  assert steps == list(range(steps[0], 192))

  many = [{"step": 200, "text": f"{i:03}" * 1000} for i in range(40)]
  resumed.write_episodes(many)  # of which not all fit
  assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= limit * 1e6
  lines = [r for p in sorted(tmp_path.iterdir()) for r in lines_of(p)]
  assert lines == many[-len(lines) :] and len(lines) > 10


def test_no_transcripts_where_the_limit_is_zero(tmp_path):
  writers.Transcripts(tmp_path, 0).write_episodes([{"step": 1}])
  assert list(tmp_path.iterdir()) == []


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


def test_table():
  before = {"avg@8": (0.35, 0.3, 0.4), "pass@8": 0.6, "gone": 1.0}
  after = {"avg@8": (0.875, 0.8, 0.9), "pass@8": 0.95}
  assert writers.table(before, after) == (
    "                      before                 after  change\n"
    "avg@8   0.350 [0.300, 0.400]  0.875 [0.800, 0.900]  +0.525\n"
    "pass@8                 0.600                 0.950  +0.350"
  )
