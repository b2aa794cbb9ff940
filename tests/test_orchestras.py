"""Who speaks when, against scripted agents: the exact transcript."""

import asyncio

import pytest

from drmas_jax.agents import math as agents
from drmas_jax.orchestras import math, single
from drmas_jax.types import Task

pytestmark = pytest.mark.quick

TASK = Task("set", 0, 0, "1+1", "2")


def _play(run, script, **options):
  """Runs an orchestra on scripted completions, read by the real parsers."""
  heard, lines = [], iter(script)

  async def call(name, *args):
    role = getattr(agents, name)
    prompt = "".join(role.messages("short", *args)[-1]["content"])
    speaker, text = next(lines)
    assert speaker == name
    heard.append(prompt)
    return role.parse(text, "stop")

  action = asyncio.run(run(TASK, call, **options))
  assert next(lines, None) is None, "the script was not played to its end"
  return action, heard


def test_approved_at_once():
  action, heard = _play(
    math.run,
    [
      ("solver", r"\boxed{2}"),
      ("verifier", "<verify>approve</verify>"),
    ],
  )
  assert action == r"\boxed{2}"
  assert heard == ["solve: 1+1", "verify: 1+1\nsolver: \\boxed{2}"]


def test_rejected_then_the_last_solution_is_final():
  action, heard = _play(
    math.run,
    [
      ("solver", r"<think>hm</think>\boxed{3}"),
      ("verifier", "is 2 <verify>reject</verify> surplus"),
      ("solver", r"\boxed{2}"),
    ],
  )
  assert action == r"\boxed{2}"
  assert heard == [
    "solve: 1+1",
    "verify: 1+1\nsolver: \\boxed{3}",
    "solve: 1+1\nsolver: \\boxed{3}\nverifier: is 2 <verify>reject</verify>",
  ]


def test_missing_verdict_ends_the_episode_as_in_the_reference():
  action, _ = _play(math.run, [("solver", "no box"), ("verifier", "hm")])
  assert action == "no box"


def test_three_loops_keep_everything_said():
  action, heard = _play(
    math.run,
    [
      ("solver", "a"),
      ("verifier", "<verify>reject</verify>"),
      ("solver", "b"),
      ("verifier", "<verify>Reject</verify>"),
      ("solver", "c"),
    ],
    max_loops=3,
  )
  assert action == "c"
  assert heard[-1] == (
    "solve: 1+1\nsolver: a\nverifier: <verify>reject</verify>"
    "\nsolver: b\nverifier: <verify>Reject</verify>"
  )


def test_one_loop_has_no_verifier():
  assert _play(math.run, [("solver", "a")], max_loops=1) == (
    "a",
    ["solve: 1+1"],
  )


def test_no_loop_is_refused():
  with pytest.raises(ValueError, match="max_loops: 0"):
    math.check(max_loops=0)


def test_single():
  assert _play(single.run, [("solver", "a")]) == ("a", ["solve: 1+1"])


def test_roles_are_those_called():
  assert set(math.ROLES) == {"solver", "verifier"}
  assert set(single.ROLES) == {"solver"}
