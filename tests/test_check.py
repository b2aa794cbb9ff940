"""`--mode=check`: what it plays, what it shows, what it says is missing."""

import json
import sys
import time

import pytest
import small_run

from drmas_jax import main

pytestmark = pytest.mark.quick

CONFIGS = small_run.ROOT / "configs"


@pytest.fixture
def check(capsys):
  """Runs it; (exit code, stdout, stderr)."""

  def run(config, *flags):
    code = main.main(["--config", str(config), "--mode=check", *flags])
    return code, *capsys.readouterr()

  return run


def test_every_prompt_and_what_is_made_of_the_answers(check):
  code, said, _ = check(CONFIGS / "math_tiny.py")
  assert code == 0
  # A rejected solution is written anew, with all that was said in sight.
  prompts = [
    line.strip()
    for line in said.splitlines()
    if line.strip().startswith("| <|user|>")
  ]
  asked = [p.removeprefix("| <|user|>").partition(":")[0] for p in prompts]
  assert asked == ["solve", "verify", "solve"]
  assert "    | verifier: <verify>reject</verify><|end|><|assistant|>\n" in said
  assert "read: valid, verdict 'reject', approved 0, rejected 1" in said
  assert "ended by 'tag'" in said and "ended by 'stop'" in said
  assert "tokens; at most 44; max_prompt_tokens=0; engine.max_length=56" in said
  assert "of at most max_tokens=12" in said
  assert "part first_correct: 1" in said, "the gold answer is the solution"
  assert "score of turns: 0 solver 1, 1 verifier 1, 2 solver 1" in said
  assert "GB on device" in said and "solver: updates on devices" in said
  assert "not here" not in said


@pytest.mark.parametrize(
  ("name", "missing"),
  [
    (
      "math_qwen3_4b_share_drmas",
      ("policies.team.checkpoint='Qwen/Qwen3-4B'", "data.sources.dapo_math"),
    ),
    (
      "search_qwen25_3b_single_grpo",
      ("policies.researcher.checkpoint='Qwen/Qwen2.5-3B'", "nq_hotpotqa"),
    ),
  ],
)
def test_what_is_not_here_is_named_and_stood_in_for(
  check, monkeypatch, tmp_path, name, missing
):
  monkeypatch.setenv("HF_HOME", str(tmp_path))
  began = time.process_time()
  code, said, _ = check(CONFIGS / f"{name}.py")
  assert code == 0 and time.process_time() - began < 5
  head, _, tail = said.partition(" thing(s) are not here")
  for what in missing:
    assert what in tail
  assert "a made-up task stands in" in head
  assert "bytes and a ChatML template stand in for its tokenizer" in head
  assert "about " in head and "<|im_start|>" in head
  assert "success: True" in head, "the whole path has been gone"
  if "search" in name:
    assert "act('an example') -> " in head and "This stands for" in head


@pytest.fixture
def team(tmp_path, monkeypatch):
  """A copy of own_team, of which a test changes a line: returns its config."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  (tmp_path / "own_team").mkdir()

  def write(old="", new=""):
    for path in (small_run.ROOT / "tests" / "own_team").glob("*.*"):
      text = path.read_text()
      if path.name == "debate.py":
        assert old in text
        text = text.replace(old, new, 1)
      (tmp_path / "own_team" / path.name).write_text(text)
    return "own_team/config.py"

  yield write
  for name in [n for n in sys.modules if n.split(".")[0] == "own_team"]:
    del sys.modules[name]


def test_a_team_without_examples(check, team):
  """Guesses at what its parsers take; its rows are those of a file."""
  code, said, _ = check(team())
  assert code == 0 and "data.sources.own: 4 rows" in said
  assert said.count("completion (a guess that its parser takes)") == 6
  assert "INVALID" not in said
  assert "reward left: 1\nreward right: 1\nreward judge: 0\n" in said


def test_a_parser_that_takes_no_guess(check, team):
  code, said, _ = check(team("valid=bool(found)", "valid=False"))
  assert code == 0
  assert said.count("no guess is valid to its parser; give its Agent") == 6
  assert said.count("read: INVALID") == 6
  assert "score of turns: 0 left 0.9, 1 right 0.9, 2 judge -0.1" in said


def test_a_fault_of_the_team_ends_it(check, team):
  """What was asked until then is shown, then the line."""
  code, said, err = check(team("found and found[found.lastindex]", "found[3]"))
  assert code == 2
  assert "own_team/debate.py:" in err and "IndexError" in err
  assert "parsing" in err and "left" in err
  assert "| <|user|>solve: " in said
  line = (
    small_run.ROOT.joinpath("tests/own_team/debate.py")
    .read_text()
    .splitlines()
    .index("  verdict = found and found[found.lastindex]")
  )
  assert f"own_team/debate.py:{line + 1}: " in err


def test_a_prompt_over_its_limit(check, team):
  code, _, err = check(team(), "--config.agents.judge.max_prompt_tokens=8")
  assert code == 2
  assert "the episode is lost: prompt: prompt of" in err


def test_a_wrong_config_is_refused_as_ever(check, team):
  code, _, err = check(team(), "--config.agents.judge.role=own_team.debate.x")
  assert code == 2 and "has no role 'x'; allowed are debater, judge" in err


def test_a_remote_policy_is_not_asked(check, team):
  remote = json.dumps({"base_url": "http://127.0.0.1:9/v1", "model": "m"})
  code, said, err = check(
    team(), f"--config.policies.one={{'remote': {remote}}}"
  )
  assert code == 0, err
  assert "one: m at http://127.0.0.1:9/v1" in said
  assert "as it is remote" in said
