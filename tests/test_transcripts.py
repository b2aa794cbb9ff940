"""What a line of the transcripts holds, and who can read it."""

import json

import numpy as np
import pytest

from drmas_jax import transcripts, types, writers

pytestmark = pytest.mark.quick


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


NOTHING = {
  "completion_ids": np.zeros(0, np.int32),
  "sampler_logprobs": np.zeros(0, np.float32),
}


def make_episode(*turns):
  return types.Episode(
    types.Task("arithmetic", 3, 40, "1 + 1 = ? \ud800 日本", np.int64(2)),
    5,
    list(turns),
    action=np.float32(2),
    outcome=types.Outcome(1.0, parts={"exact": 1.0}),
  )


def written(folder, episode, rows=None):
  """The line of an episode, as it is read from disk."""
  record = transcripts.record(
    episode,
    12,
    "train",
    decode=lambda policy, ids: f"{policy}:{ids.tolist()}",
    rows=rows,
  )
  writers.Transcripts(folder, 1.0).write_episodes([record])
  path = folder / "000000.jsonl"
  with open(path, "rb") as lines:
    (found,) = transcripts.read(lines, str(path))
  return found


def test_a_line(tmp_path):
  fault = types.Fault("deadline", "too slow", wall_clock=True)
  silent = make_turn(
    index=2, stop_reason="fault", text="", reply=None, fault=fault, **NOTHING
  )
  spoken, none = make_turn(), np.nan
  rows = transcripts.rows_of(
    [spoken, silent],
    score=[0.9, none],
    advantage=np.array([-0.25, none]),
    logprob_gap=np.array([0.125, none], np.float32),
  )
  read = written(tmp_path, make_episode(spoken, silent), rows)
  assert "日本" in (tmp_path / "000000.jsonl").read_text()
  turns = read.pop("turns")
  assert read == {
    "schema": 2,
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
    "prompt_ids": [1, 2, 3],
    "completion_ids": [4, 5],
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "stop_reason": "tag",
    "valid": True,
    "reply": "approve",
    "verdict": "approve",
    "labels": {"right": 1.0},
    "fault": None,
    "call": None,
    "logprobs": {"sum": -2.0, "mean": -1.0, "min": -1.5},
    "logprob_gap": 0.125,
    "score": 0.9,
    "advantage": -0.25,
  }
  assert turns[1]["fault"] == {"kind": "deadline", "message": "too slow"}
  for key in ("completion_ids", "logprobs", "score", "logprob_gap", "reply"):
    assert turns[1][key] is None, key


def test_a_remote_turn_has_text_and_no_ids(tmp_path):
  call = types.Call("[user]\n1 + 1?", 9, 4, retries=2, cost=0.5)
  turn = make_turn(
    prompt_ids=np.zeros(0, np.int32),
    call=call,
    counts=False,
    reply=types.Reply("<verify>approve</verify>"),
    **NOTHING,
  )
  (read,) = written(tmp_path, make_episode(turn))["turns"]
  assert read["prompt"] == "[user]\n1 + 1?"
  assert (read["prompt_tokens"], read["completion_tokens"]) == (9, 4)
  assert read["call"] == {"retries": 2, "cached": False, "cost": 0.5}
  assert read["prompt_ids"] is read["completion_ids"] is read["reply"] is None


def test_the_docstring_is_the_schema(tmp_path):
  read = written(tmp_path, make_episode(make_turn()))
  for key in {*read, *read["task"], *read["turns"][0]}:
    assert key in transcripts.__doc__, key
  assert f"of schema {transcripts.SCHEMA}" in transcripts.__doc__


def test_older_lines_are_read_and_newer_ones_are_not():
  turn = {"index": 0, "agent": "solver", "completion": "4"}
  old = {"schema": 1, "step": 3, "turns": [turn]}
  lines = [json.dumps(old).encode() + b"\n"]
  (read,) = transcripts.read(lines, "old.jsonl")
  (found,) = read["turns"]
  assert found["completion"] == "4"
  for key in ("prompt_ids", "completion_ids", "reply", "call", "logprob_gap"):
    assert found[key] is None
  newer = json.dumps(old | {"schema": transcripts.SCHEMA + 1}).encode() + b"\n"
  with pytest.raises(ValueError, match=r"old\.jsonl:2: has schema 3; allowed"):
    list(transcripts.read([*lines, newer], "old.jsonl"))


def test_a_line_under_way_is_no_line_and_a_broken_one_is_named():
  line = b'{"schema": 1, "turns": []}\n'
  for cut in range(1, len(line)):
    assert len(list(transcripts.read([line, line[:-cut]], "x"))) == 1
  for broken in (b'{"schema": 1, "tu\n', b"[]\n", b'{"step": 1}\n'):
    with pytest.raises(ValueError, match="x:2: not an episode"):
      list(transcripts.read([line, broken], "x"))
