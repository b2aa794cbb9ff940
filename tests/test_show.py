"""Episodes in the terminal, and from there into `--mode=sft`."""

import io
import json
import subprocess
import sys
import types

import numpy as np
import pytest
import small_run
from fsspec.implementations import memory

from drmas_jax import config as config_lib
from drmas_jax import data, rollout, sft, show
from drmas_jax.datasets import sampled
from drmas_jax.tokenizer import Tokenizer
from drmas_jax.types import RunError

CONFIG = small_run.ROOT / "tests" / "small_run.py"
TINY = small_run.ROOT / "drmas_jax" / "models" / "tiny"
QUICK = pytest.mark.quick


def turn(index=0, agent="solver", **changes):
  return {
    "index": index,
    "agent": agent,
    "policy": agent,
    "policy_version": 3,
    "prompt": "<|user|>solve: 1+1",
    "completion": f"{agent} says {index}",
    "prompt_ids": [1, 2],
    "completion_ids": [7 + index, 3],
    "prompt_tokens": 2,
    "completion_tokens": 2,
    "stop_reason": "stop",
    "valid": True,
    "reply": None,
    "verdict": None,
    "labels": None,
    "fault": None,
    "call": None,
    "logprobs": {"sum": -2.0, "mean": -1.0, "min": -1.5},
    "logprob_gap": 0.0625,
    "score": 0.5,
    "advantage": 0.25,
  } | changes


def episode(step=1, index=0, number=0, reward=1.0, turns=None, **changes):
  return {
    "schema": 2,
    "step": step,
    "kind": "train",
    "task": {
      "source": "sums",
      "index": index,
      "position": index,
      "question": f"question {index}",
      "answer": "2",
    },
    "episode": number,
    "status": "ok",
    "fault": None,
    "action": "2",
    "reward": reward,
    "success": reward == 1.0,
    "parts": {"correct": 0.75},
    "turns": [turn(), turn(1, "verifier")] if turns is None else turns,
  } | changes


def write(folder, records, pattern="transcripts/000000.jsonl", end=""):
  path = folder / pattern
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("".join(json.dumps(r) + "\n" for r in records) + end)
  return folder


@pytest.fixture
def said(capsys):
  """Runs the command: (exit code, stdout, stderr)."""

  def run(*args):
    code = show.main([str(a) for a in args])
    return code, *capsys.readouterr()

  return run


# -- what a terminal is told ---------------------------------------------------


@QUICK
def test_foreign_text_cannot_speak_to_the_terminal():
  nasty = "a\x1b[31mb\rc\td\x7f\x9be\u202ef\ud800\u2028g\x00"
  shown = show.visible(nasty)
  assert shown == (
    "a\u241b[31mb\u240dc\u2409d\u2421<U+009B>e<U+202E>f<U+D800><U+2028>g\u2400"
  )
  kept = "日本 👩\u200d🚀 é e\u0301 \\x1b ✓\nnext"
  assert show.visible(kept) == kept
  everything = show.visible("".join(map(chr, range(0x3000))))
  assert not {*map(chr, (*range(10), *range(11, 32), *range(127, 160)))} & {
    *everything
  }


@QUICK
def test_every_text_of_an_episode_is_made_visible():
  bad = "x\x1b]0;y\x07z"
  record = episode(
    turns=[
      turn(prompt=bad, completion=bad, reply=bad, verdict=bad)
      | {"labels": {bad: 1.0}, "agent": bad, "policy": bad}
    ],
    parts={bad: 1.0},
    action={"k": bad},
  )
  record["task"] |= {"question": bad, "answer": [bad], "source": bad}
  failed = episode(
    reward=None, status="failed", fault={"kind": bad, "message": bad}
  )
  for one in (record, failed):
    stream = io.StringIO()
    page = show.Page(stream, 60)
    show.show(page, one, one["turns"])
    assert "x\u241b]0;y\u2407z" in stream.getvalue()
    assert not set(map(chr, range(32))) & set(stream.getvalue()) - {"\n"}


@QUICK
@pytest.mark.parametrize(
  ("text", "lines"),
  [
    ("one two three", ["one two", "three"]),
    ("abcdefghij", ["abcdefgh", "ij"]),
    ("ab\n\ncd ", ["ab", "", "cd "]),
    ("日本語日本", ["日本語日", "本"]),  # two columns each
    ("e\u0301" * 8 + "f", ["e\u0301" * 8, "f"]),  # a mark takes none
    ("12345678 9", ["12345678", " 9"]),
  ],
)
def test_lines_are_as_wide_as_the_terminal(text, lines):
  assert show.wrap(text, 8) == lines


@QUICK
def test_long_texts_are_folded_and_say_by_how_much():
  text = "".join(f"{i:05}" for i in range(400))
  pages = {}
  for full in (False, True):
    stream = io.StringIO()
    show.Page(stream, 2100, full=full).quote("prompt", text, 600)
    pages[full] = stream.getvalue()
  assert text in pages[True] and "left out" not in pages[True]
  assert ".. 1400 characters left out, --full shows them .." in pages[False]
  shown = [line.removeprefix("  | ") for line in pages[False].splitlines()]
  assert shown[1] == text[:300] and shown[3] == text[-300:]


@QUICK
@pytest.mark.parametrize("color", [False, True])
def test_colors_are_ours_alone(color):
  stream = io.StringIO()
  record = episode(turns=[turn(completion="\x1b[5m")])
  show.show(show.Page(stream, 80, color), record, record["turns"])
  assert ("\x1b[" in stream.getvalue()) == color
  assert "\x1b[5m" not in stream.getvalue()


@QUICK
@pytest.mark.parametrize(
  ("env", "colored"),
  [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
)
def test_colors_need_a_terminal_that_wants_them(
  env, colored, monkeypatch, tmp_path
):
  class Terminal(io.StringIO):
    def isatty(self):
      return True

    def reconfigure(self, **_):
      pass

  monkeypatch.delenv("NO_COLOR", raising=False)
  monkeypatch.setenv("TERM", "xterm")
  for name, value in env.items():
    monkeypatch.setenv(name, value)
  terminal = Terminal()
  monkeypatch.setattr(sys, "stdout", terminal)
  write(tmp_path, [episode()])
  assert show.main([str(tmp_path)]) == 0
  assert ("\x1b[1m" in terminal.getvalue()) == colored


@QUICK
def test_an_episode_has_all_that_is_known_of_it(said, tmp_path):
  turns = [
    turn(reply="as read"),
    turn(
      1,
      "verifier",
      verdict="reject",
      labels={"rejected": 1.0},
      stop_reason="length",
      valid=False,
    ),
    turn(
      2,
      "judge",
      prompt_ids=None,
      completion_ids=None,
      logprobs=None,
      logprob_gap=None,
      score=None,
      advantage=None,
      call={"retries": 2, "cached": True, "cost": 0.5},
    ),
  ]
  reward = {"solver": 0.5, "verifier": -1.0}
  write(tmp_path, [episode(4, 7, 3, reward, turns, success=False)])
  code, out, _ = said(tmp_path, "--width", 120)
  assert code == 0
  for text in (
    "step 4  sums[7]  episode 3",
    "question  question 7",
    "answer    2",
    "turn 0  solver",
    "  prompt\n  | <|user|>solve: 1+1",
    "  completion\n  | solver says 0",
    "  as others see it\n  | as read",
    "score 0.5  advantage 0.25  log-prob -1  least -1.5  log-prob gap 0.0625",
    "policy solver at update 3, 2 + 2 tokens, ended by stop",
    "parsed  verdict reject  rejected 1",
    "  invalid\n  cut by its limit",
    "remote: retries 2  cached True  cost 0.5",
    "  action\n  | 2",
    "no success  reward (solver 0.5  verifier -1)  correct 0.75",
  ):
    assert text in out, text
  assert "None" not in out


# -- which episodes ------------------------------------------------------------


RECORDS = [
  episode(1, 0, 0, 0.0),
  episode(1, 0, 1, 1.0),
  episode(2, 0, 0, 0.5, [turn(advantage=-1.0), turn(1, "verifier")]),
  episode(2, 0, 1, 0.5, [turn(advantage=1.0)]),
  episode(2, 5, 0, 1.0, [turn(), turn(1, "verifier", valid=False)]),
  episode(2, 5, 1, 0.0, [turn(stop_reason="length")]),
  episode(
    2,
    5,
    2,
    None,
    [],
    status="failed",
    success=None,
    fault={"kind": "reward", "message": "no answer"},
  ),
]


def picked(out):
  """(step, task, episode) of each that was shown."""
  heads = [x for x in out.splitlines() if x.startswith("step ")]
  return [
    (int(w[1]), int(w[2].removeprefix("sums[").rstrip("]")), int(w[4]))
    for w in map(str.split, heads)
  ]


@QUICK
@pytest.mark.parametrize(
  ("flags", "episodes"),
  [
    ("", [(2, 0, 0), (2, 0, 1), (2, 5, 0)]),
    ("--num 9", [(2, 0, 0), (2, 0, 1), (2, 5, 0), (2, 5, 1), (2, 5, 2)]),
    ("--step 1", [(1, 0, 0), (1, 0, 1)]),
    ("--task 5 --num 9", [(2, 5, 0), (2, 5, 1), (2, 5, 2)]),
    ("--task sums[0] --num 9", [(1, 0, 0), (1, 0, 1), (2, 0, 0), (2, 0, 1)]),
    ("--worst 2", [(2, 5, 1), (2, 0, 0)]),  # of equal ones by advantage
    ("--best 3", [(2, 5, 0), (2, 0, 1), (2, 0, 0)]),
    ("--best 3 --num 1", [(2, 5, 0)]),
    ("--success", [(2, 5, 0)]),
    ("--invalid", [(2, 5, 0)]),
    ("--truncated", [(2, 5, 1)]),
    ("--agent verifier", [(2, 0, 0), (2, 5, 0)]),
    ("--agent verifier --invalid", [(2, 5, 0)]),
    ("--step 1 --success", [(1, 0, 1)]),
  ],
)
def test_what_is_asked_for(flags, episodes, said, tmp_path):
  code, out, _ = said(write(tmp_path, RECORDS), *flags.split())
  assert code == 0
  assert picked(out) == episodes
  if flags == "":
    assert "3 of 5 episodes (--num N)" in out
  if "--invalid" in flags:
    assert "turn 0  solver  (not asked for)" in out


@QUICK
def test_the_newest_step_that_has_it(said, tmp_path):
  records = [episode(1), episode(2, reward=0.0)]
  _, out, _ = said(write(tmp_path, records), "--success")
  assert picked(out) == [(1, 0, 0)]


@QUICK
@pytest.mark.parametrize(
  ("flags", "message"),
  [
    ("--step 9", "steps 1, 2,"),
    ("--task 3", r"tasks sums\[0\], sums\[5\]"),
    ("--agent critic", "agents solver, verifier"),
    ("--truncated --step 1", "7 episodes .* 1 truncated turns"),
    ("--task a[b]", "--task=a.b.: write source.index."),
    ("--num 0", "--num=0: write a number >= 1"),
    ("--export x --invalid", "--export: leaves out"),
  ],
)
def test_nothing_to_show_says_what_there_is(
  flags, message, capsys, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  assert show.main([str(write(tmp_path, RECORDS)), *flags.split()]) == 2
  out, err = capsys.readouterr()
  assert not out and len(err.splitlines()) == 1
  assert show.re.search(message, err), err


@QUICK
def test_a_folder_without_episodes(said, tmp_path):
  code, _, err = said(tmp_path)
  assert code == 2 and "no episodes" in err and "transcript_groups" in err


# -- where from ----------------------------------------------------------------


@QUICK
def test_a_run_under_way(said, tmp_path):
  half = json.dumps(episode(3))[:-20]
  write(tmp_path, RECORDS, end=half)
  code, out, _ = said(tmp_path, "--num", 9)
  assert code == 0 and len(picked(out)) == 5


@QUICK
def test_evaluations(said, tmp_path):
  for step in (2, 10):
    name = f"eval/step_{step}/transcripts.jsonl"
    one = episode(step, 1, kind="eval", parts=None)
    write(tmp_path, [one], name)
  _, out, _ = said(tmp_path)  # there is nothing else
  assert "evaluation of step 10  sums[1]" in out
  write(tmp_path, RECORDS)
  assert "evaluation" not in said(tmp_path)[1]
  assert "evaluation of step 2 " in said(tmp_path, "--eval", "--step", 2)[1]


@QUICK
def test_a_bucket(said, monkeypatch):
  monkeypatch.setattr(memory.MemoryFileSystem, "store", {})
  system = memory.MemoryFileSystem()
  for name, records in (("000001", RECORDS[2:]), ("000000", RECORDS[:2])):
    lines = "".join(json.dumps(r) + "\n" for r in records)
    path = f"/bucket/runs/a/transcripts/{name}.jsonl"
    system.pipe_file(path, (lines + '{"half').encode())
  code, out, err = said("memory://bucket/runs/a", "--num", 9)
  assert code == 0, err
  assert len(picked(out)) == 5
  code, _, err = said("nosuch://bucket/runs/a")
  assert code == 2 and "nosuch://bucket/runs/a: cannot be fetched" in err


@QUICK
def test_a_reader_that_has_seen_enough(tmp_path):
  write(tmp_path, [episode(1, i) for i in range(2000)])
  command = [sys.executable, "-m", "drmas_jax.show", tmp_path, "--num", "2000"]
  with subprocess.Popen(
    command,
    cwd=small_run.ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  ) as process:
    assert process.stdout.readline().startswith(b"step 1")
    process.stdout.close()
    assert process.wait(60) == 0
    assert process.stderr.read() == b""


# -- demonstrations ------------------------------------------------------------


def lines_of(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


@QUICK
def test_export_keeps_what_can_be_learned_from(said, tmp_path):
  out = tmp_path / "new" / "demos.jsonl"
  records = [
    *RECORDS,
    episode(3, 9, 0, 1.0, [turn(prompt_ids=None, completion_ids=None)]),
    episode(3, 9, 1, 1.0, [turn(5), turn(6, stop_reason="length")]),
  ]
  code, text, _ = said(write(tmp_path, records), "--success", "--export", out)
  assert code == 0
  assert (
    f"{out}: 3 demonstrations (2 of solver, 1 of verifier) from 4 episodes; "
    "left out: 1 the same again, 1 invalid, 1 without token ids, 1 cut"
  ) in text
  assert 'name="sampled"' in text and f"path={str(out)!r}" in text
  rows = lines_of(out)
  assert [(r["step"], r["turn"]) for r in rows] == [(1, 0), (1, 1), (3, 5)]
  assert rows[2]["completion_ids"] == [12, 3] and rows[2]["format"] == 1
  source = sampled.make("train", path=str(out))
  assert len(source) == 3
  assert source[1]["info"]["agent"] == "verifier"


@QUICK
def test_nothing_to_export_leaves_the_file(said, tmp_path):
  out = tmp_path / "demos.jsonl"
  out.write_text("old")
  records = [episode(turns=[turn(valid=False)])]
  code, _, err = said(write(tmp_path, records), "--export", out)
  assert code == 2 and "left out: 1 invalid" in err
  assert out.read_text() == "old"


GOOD = {
  "format": 1,
  "agent": "solver",
  "prompt": "p",
  "prompt_ids": [1],
  "completion_ids": [2],
  "question": "q",
  "answer": "2",
}


@QUICK
@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"format": 2}, "has format 2; allowed is 1"),
    ({"agent": 3}, "agent is a int; write a str"),
    ({"prompt_ids": None}, "prompt_ids is a NoneType"),
    ({"completion_ids": []}, "completion_ids is no list of token ids"),
    ({"completion_ids": [1, "2"]}, "completion_ids is no list of token ids"),
    ({"prompt_ids": [-1]}, "prompt_ids is no list of token ids"),
  ],
)
def test_a_file_that_is_no_export(change, message, tmp_path):
  path = tmp_path / "demos.jsonl"
  path.write_text(f"{json.dumps(GOOD)}\n{json.dumps(GOOD | change)}\n")
  with pytest.raises(ValueError, match=f"demos.jsonl:2: {message}"):
    sampled.make("train", path=str(path))
  path.write_text(json.dumps({k: GOOD[k] for k in ("format", "agent")}))
  with pytest.raises(ValueError, match="has no prompt, question, prompt_ids"):
    sampled.make("train", path=str(path))
  with pytest.raises(ValueError, match="split='test' is not allowed"):
    sampled.make("test", path=str(path))
  with pytest.raises(ValueError, match="no such file; write one with"):
    sampled.make("train", path=str(tmp_path / "none"))


def demonstrations(path, policy="solver", source="sampled"):
  """What `--mode=sft` makes of a file, and the tasks of it."""
  config = config_lib.read(CONFIG, [], "sft")
  backbone = types.SimpleNamespace(
    tokenizer=Tokenizer.load(TINY / policy),
    names=(policy,),
    agents={policy: {policy: 0}},
    policy=config.policies[policy],
  )
  shown = sft._Demonstrations(
    config, backbone, rollout.Team(config), {source: sampled.demonstrations}
  )
  return shown, data.Stream({source: sampled.make("train", path=path)}, 0)


@QUICK
@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"prompt": "another"}, "its token ids are not of the tokenizer of pol"),
    ({"completion_ids": [99999]}, "its token ids are not of the tokenizer"),
    ({"completion_ids": [5] * 13}, r"it has 13 tokens; .*max_tokens=12"),
    ({"prompt_ids": [5] * 50}, r"its prompt has 50 tokens; allowed are 44"),
  ],
)
def test_ids_that_are_not_the_policys(change, message, tmp_path):
  tokenizer = Tokenizer.load(TINY / "solver")
  row = GOOD | {"prompt_ids": [5, 6]} | change
  row["prompt"] = change.get(
    "prompt", tokenizer.decode(row["prompt_ids"], True)
  )
  path = tmp_path / "demos.jsonl"
  path.write_text(json.dumps(row) + "\n")
  shown, stream = demonstrations(path)
  (task,) = stream.tasks(0, 1)
  match = rf"demonstration of 'solver' for sampled\[0\]: {message}"
  with pytest.raises(RunError, match=match):
    shown.turns(task, np.random.default_rng(0))


@QUICK
def test_a_policy_without_demonstrations_is_said_at_the_start(tmp_path):
  path = tmp_path / "demos.jsonl"
  path.write_text(json.dumps(GOOD | {"agent": "verifier"}) + "\n")
  shown, stream = demonstrations(path)
  match = r"policies\.solver: .* no demonstration of its agents \(solver\);"
  with pytest.raises(RunError, match=match):
    shown.check_any("solver", stream)


@QUICK
def test_demonstrations_are_what_was_sampled(tmp_path):
  """Token by token, also where a tokenizer would cut the text in other ones."""
  tokenizer = Tokenizer.load(TINY / "solver")
  whole = tokenizer.encode("solve: 10+10").tolist()
  letters = [i for c in "solve: 10+10" for i in tokenizer.encode(c).tolist()]
  rows = [
    GOOD
    | {"prompt_ids": ids, "prompt": tokenizer.decode(ids, True)}
    | {"completion_ids": [*ids[:4], tokenizer.end_of_turn_id]}
    for ids in (whole, letters, whole[::-1])
  ]
  path = tmp_path / "demos.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  shown, stream = demonstrations(path)
  found = set()
  for task in stream.tasks(0, 3):
    (turn,) = shown.turns(task, np.random.default_rng(0))
    found.add((*turn.prompt_ids.tolist(), -1, *turn.completion_ids.tolist()))
  assert found == {(*r["prompt_ids"], -1, *r["completion_ids"]) for r in rows}
