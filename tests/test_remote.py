"""Remote policies: against an endpoint that fails, in rollouts, in a run."""

import asyncio
import dataclasses
import functools
import json
import os
import subprocess
import sys
import time
import types as pytypes

import faulty_remote
import numpy as np
import pytest
import small_run
import xla_flags
from faulty_remote import FAULTS, Late, Raw, Status
from test_rollout import Scripted

from drmas_jax import config as config_lib
from drmas_jax import metrics, remote, rewards, rollout, transcripts
from drmas_jax.config import Remote, Sampling
from drmas_jax.types import Agent, Reply, Task, gather

quick = pytest.mark.quick

KEY = "sk-a-key-that-nobody-may-read"
ASKED = [{"role": "user", "content": "1+1?"}]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
  """Replies that this test keeps, and no others."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  monkeypatch.setenv("TEST_KEY", KEY)
  monkeypatch.setattr(remote, "_PAUSE_S", (0.01, 0.1))


def at(endpoint, **changes):
  settings = {"model": "m", "key_env": "TEST_KEY", "timeout_s": 5.0}
  return Remote(**{"base_url": endpoint.base_url, **settings, **changes})


def complete(settings, *asks, endpoint=None):
  """What calls that are made at the same time come to."""
  default = {"max_tokens": 9, "sampling": Sampling(), "seed": 3}

  async def run():
    one = endpoint or remote.Endpoint(settings)
    try:
      return await asyncio.gather(
        *(one.complete(ASKED, **{**default, **ask}) for ask in asks or [{}])
      )
    finally:
      one.close()

  return asyncio.run(run())


def scripted(*said):
  """Says one after the other, then the last again and again."""
  return lambda body, number: said[min(number, len(said) - 1)]


# -- one endpoint --------------------------------------------------------------


@quick
def test_what_is_asked_and_what_comes_back():
  with faulty_remote.opened(scripted("two")) as endpoint:
    settings = at(
      endpoint,
      base_url=f"{endpoint.base_url}/",
      prompt_price=2.0,
      completion_price=10.0,
      options={"effort": "low", "max_tokens": None, "max_new": 4},
    )
    sampling = Sampling(temperature=0.5, top_k=4, top_p=0.9)
    [said] = complete(settings, {"sampling": sampling})
  assert (said.text, said.stop_reason, said.fault) == ("two", "stop", None)
  assert said.call.prompt == "[user]\n1+1?"
  assert (said.call.prompt_tokens, said.call.completion_tokens) == (11, 5)
  assert said.call.cost == pytest.approx((11 * 2 + 5 * 10) / 1e6)
  assert (said.call.retries, said.call.cached) == (0, False)
  [(path, headers, body)] = endpoint.asked
  assert path == "/v1/chat/completions"
  assert headers["Authorization"] == f"Bearer {KEY}"
  assert body == {
    "model": "m",
    "messages": ASKED,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 4,
    "seed": 3,
    "effort": "low",
    "max_new": 4,
  }


@quick
@pytest.mark.parametrize(
  ("body", "said"),
  [
    (faulty_remote.reply("a", "length"), ("a", "length", 5)),
    (faulty_remote.reply(None), ("", "stop", 5)),
    (faulty_remote.reply("a", completion_tokens="?"), ("a", "stop", 0)),
    (b'{"choices": [{"message": {"content": "a"}}]}', ("a", "stop", 0)),
    (faulty_remote.reply("\ud800 a"), ("? a", "stop", 5)),
  ],
)
def test_replies_that_are_understood(body, said):
  with faulty_remote.opened(scripted(Raw(body, chunked=True))) as endpoint:
    [found] = complete(at(endpoint, key_env=""))
  number = found.call.completion_tokens
  assert (found.text, found.stop_reason, number) == said
  assert "Authorization" not in endpoint.asked[0][1]


@quick
def test_what_may_pass_is_tried_again():
  """Every fault once, then a reply; a cut one is no shorter reply."""
  script = scripted(*FAULTS.values(), "two")
  with faulty_remote.opened(script) as endpoint:
    [said] = complete(at(endpoint, timeout_s=30.0))
  assert said.text == "two" and said.fault is None
  assert said.call.retries == len(FAULTS)


@quick
def test_the_server_says_how_long_to_wait():
  busy = Status(429, "too many", "1")
  with faulty_remote.opened(scripted(busy, "two")) as endpoint:
    began = time.monotonic()
    [said] = complete(at(endpoint))
    assert 1.0 <= time.monotonic() - began < 4.0
    assert said.text == "two"
  # Of a wait that is longer than what is left nothing can come.
  with faulty_remote.opened(scripted(busy)) as endpoint:
    began = time.monotonic()
    [late] = complete(at(endpoint, timeout_s=0.9))
  assert time.monotonic() - began < 0.8
  assert late.fault.kind == "remote" and late.fault.wall_clock
  assert "timeout_s=0.9" in late.fault.message
  assert "too many" in late.fault.message


@quick
@pytest.mark.parametrize("fault", [Late(30.0), Status(500), Raw(b"[]")])
def test_one_budget_for_all_tries(fault):
  with faulty_remote.opened(scripted(fault)) as endpoint:
    began = time.monotonic()
    [said] = complete(at(endpoint, timeout_s=0.4))
    assert time.monotonic() - began < 3.0
    assert said.stop_reason == "fault" and said.fault.wall_clock
    # The last one may have been given up before the server saw it.
    assert said.call.retries in (len(endpoint.asked) - 1, len(endpoint.asked))
    assert (said.call.retries == 0) == isinstance(fault, Late)


@quick
def test_what_is_refused_is_not_tried_again_and_shows_no_key():
  echo = Status(401, "Incorrect API key provided: {key}.")
  with faulty_remote.opened(scripted(echo)) as endpoint:
    [said] = complete(at(endpoint))
  assert len(endpoint.asked) == 1
  assert said.fault.kind == "remote" and not said.fault.wall_clock
  assert "status 401" in said.fault.message
  assert "provided: ***." in said.fault.message


@quick
def test_nobody_listens():
  with faulty_remote.opened(scripted("two")) as endpoint:
    settings = at(endpoint, timeout_s=0.3)
  [said] = complete(settings)
  assert said.fault.wall_clock and "Error" in said.fault.message


@quick
def test_so_many_at_once():
  with faulty_remote.opened(scripted(Late(0.5))) as endpoint:
    asks = [{"seed": i} for i in range(12)]
    said = complete(at(endpoint, concurrency=3, timeout_s=1.9), *asks)
  # All four rounds end: the budget is not of the wait for a turn.
  assert [s.text for s in said] == ["late"] * 12
  assert endpoint.most == 3


@quick
def test_a_call_that_nobody_waits_for_is_not_made():
  with faulty_remote.opened(scripted("two")) as endpoint:
    [said] = complete(at(endpoint), {"wanted": lambda: False})
  assert said.fault.kind == "cancelled" and not endpoint.asked


# -- replies that are kept -----------------------------------------------------


def count(body, number):
  return f"reply {number}"


@quick
def test_the_same_is_asked_once_whoever_asks():
  greedy = Sampling(temperature=0.0)
  with faulty_remote.opened(count) as endpoint:
    settings = at(endpoint, prompt_price=1e6)
    first = complete(settings, {}, {"seed": 4})
    again = complete(settings, {}, {"seed": 4})
    assert {s.text for s in first} == {"reply 0", "reply 1"}
    assert [s.text for s in again] == [s.text for s in first]
    assert [s.call.cached for s in first + again] == [False] * 2 + [True] * 2
    assert [s.call.cost for s in first + again] == [11.0, 11.0, 0.0, 0.0]
    assert again[0].call.completion_tokens == 5
    # Without a draw there is no seed; at the same time one asks for all.
    asks = [{"sampling": greedy, "seed": i} for i in range(4)]
    assert {s.text for s in complete(settings, *asks)} == {"reply 2"}
    for change in (
      {"model": "n"},
      {"options": {"effort": "high"}},
      {"base_url": endpoint.base_url.replace("127.0.0.1", "localhost")},
      {"cache": ""},
    ):
      num = len(endpoint.asked)
      complete(dataclasses.replace(settings, **change))
      assert len(endpoint.asked) == num + 1, change
    num = len(endpoint.asked)
    for change in ({"max_tokens": 8}, {"sampling": Sampling(0.5)}):
      complete(settings, change)
    assert len(endpoint.asked) == num + 2


@quick
def test_a_broken_file_is_no_reply(tmp_path):
  with faulty_remote.opened(count) as endpoint:
    settings = at(endpoint, cache=str(tmp_path / "kept"))
    complete(settings)
    [path] = (tmp_path / "kept").rglob("*.json")
    whole = path.read_bytes()
    assert KEY.encode() not in whole and json.loads(whole)["asked"]["seed"] == 3
    for text in (b"", whole[:-9], b"{}", b'{"reply": {"text": "x"}}'):
      path.write_bytes(text)
      num = len(endpoint.asked)
      [said] = complete(settings)
      assert said.text == f"reply {num}" and not said.call.cached
    # A fault is not kept, and nothing half done is left.
    endpoint.script = scripted(Status(400))
    complete(settings, {"seed": 5})
    files = [p for p in (tmp_path / "kept").rglob("*") if p.is_file()]
    assert files == [path]


@quick
def test_a_disk_that_is_full_costs_no_reply(monkeypatch, capsys):
  def full(*_):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(os, "replace", full)
  with faulty_remote.opened(count) as endpoint:
    said = complete(at(endpoint), {}, {"seed": 4})
  assert {s.text for s in said} == {"reply 0", "reply 1"}
  assert capsys.readouterr().err.count("replies are not kept") == 1


# -- in rollouts ---------------------------------------------------------------


def team_config(endpoint, environment="math", options=None, **changes):
  policies = {
    "p": {"checkpoint": "x"},
    "far": {"remote": dataclasses.asdict(at(endpoint, **changes))},
  }
  agents = {
    "solver": {"role": "math.solver", "policy": "p"},
    "verifier": {"role": "math.verifier", "policy": "far"},
  }
  if environment != "math":
    judge = {"role": "math.verifier", "policy": "far"}
    agents = {"solver": agents["solver"], "judge": judge}
  return config_lib.build(
    {
      "policies": policies,
      "agents": agents,
      "orchestra": {"name": "math" if environment == "math" else "single"},
      "environment": {"name": environment, "options": options or {}},
      "data": {"sources": {"arithmetic": {}}},
    }
  )


def answer(key):
  return rf"\boxed{{{key[1]}}}"


def play(config, run=None, size=3, key=7, **scripts):
  """A group, and the local policies' samplers."""
  import jax

  team = rollout.Team(config)
  if run is not None:
    team.orchestra = pytypes.SimpleNamespace(run=run)
    team.orchestra_options = {}
  samplers = {
    name: Scripted(scripts.get(name, answer))
    for name in config.policies
    if name not in config.remotes
  }
  player = rollout.Rollout(
    team, samplers, config, remotes=remote.connect(config)
  )
  try:
    [group] = player.collect(
      [Task("s", 0, 5, "1+1", "1")], size, jax.random.key(key)
    )
    return group, samplers
  finally:
    player.close()


def approves(body, number):
  """What a verifier says of a right solution, and of another."""
  right = r"\boxed{1}" in body["messages"][-1]["content"]
  verdict = "approve" if right else "reject"
  return f"<verify>{verdict}</verify> and more that nobody hears"


@quick
def test_its_turns_are_played_and_are_no_rows():
  with faulty_remote.opened(approves) as endpoint:
    group, _ = play(team_config(endpoint))
  assert [[t.agent for t in e.turns] for e in group.episodes] == [
    ["solver", "verifier", "solver"],
    ["solver", "verifier"],
    ["solver", "verifier", "solver"],
  ]
  assert [e.outcome.reward for e in group.episodes] == [0.0, 1.0, 0.0]
  turn = group.episodes[1].turns[1]
  assert turn.text == "<verify>approve</verify>" and turn.stop_reason == "tag"
  assert turn.reply.verdict == "approve" and turn.index == 1
  assert len(turn.prompt_ids) == len(turn.completion_ids) == 0
  assert (turn.num_prompt_tokens, turn.num_tokens) == (11, 5)
  assert r"\boxed{1}" in turn.call.prompt and "[system]" in turn.call.prompt
  assert len({body["seed"] for _, _, body in endpoint.asked}) == 3
  rows = rewards.row_scores([group], {"solver": 0.0, "verifier": 0.0})
  assert [t.agent for t in rows.turns] == ["solver"] * 5
  returns = rewards.step_returns([group], rows.scores, 0.5)
  assert returns.tolist() == [0.0, 0.0, 1.0, 0.0, 0.0]
  found = metrics.rollout([group], rows, ("solver", "verifier"))
  expected = {
    "remote_calls/far": 3,
    "remote_failed/far": 0,
    "remote_retries/far": 0,
    "remote_cached/far": 0,
    "remote_prompt_tokens/far": 33,
    "remote_completion_tokens/far": 15,
    "turns/verifier": 3,
    "valid/verifier": 1,
    "completion_length/verifier": 5,
    "label_approved/verifier": 1 / 3,
    "groups_in/verifier": 0,
    "episodes_in/verifier": 0,
    "turns/solver": 5,
    "tokens/solver": 10,
  }
  assert {name: found[name] for name in expected} == pytest.approx(expected)
  assert all(np.isfinite(list(found.values())))
  assert rollout.count_tokens([group]) == 10  # that were sampled here
  line = transcripts.record(group.episodes[1], 1, "train", lambda *_: "..")
  said = line["turns"][1]
  assert said["prompt"] == turn.call.prompt and said["completion_tokens"] == 5
  assert said["call"] == {"retries": 0, "cached": False, "cost": 0.0}


@quick
def test_another_run_hears_the_same():
  """From the disk; another key of the sampling asks anew."""
  with faulty_remote.opened(count) as endpoint:
    config = team_config(endpoint)
    first, _ = play(config)
    num = len(endpoint.asked)
    again, _ = play(config)
    assert len(endpoint.asked) == num == 3
    play(config, key=8)
    assert len(endpoint.asked) == 6
  texts = [
    [t.text for e in g.episodes for t in e.turns] for g in (first, again)
  ]
  assert texts[0] == texts[1]
  rows = rewards.row_scores([again], {"solver": 0.0, "verifier": 0.0})
  found = metrics.rollout([again], rows, ("solver", "verifier"))
  assert found["remote_cached/far"] == 3
  assert found["valid/verifier"] == 0  # "reply 1" is no verdict


@quick
def test_a_failed_call_is_a_failed_episode():
  def script(body, number):
    wrong = r"\boxed{2}" in body["messages"][-1]["content"]
    return Status(400, "too long") if wrong else approves(body, number)

  with faulty_remote.opened(script) as endpoint:
    group, _ = play(team_config(endpoint))
  assert [e.status for e in group.episodes] == ["ok", "ok", "failed"]
  lost = group.episodes[2]
  assert lost.fault.kind == "remote" and "too long" in lost.fault.message
  assert lost.outcome is None and not metrics.clocked(lost)
  rows = rewards.row_scores([group], {"solver": 0.0, "verifier": 0.0})
  assert len(rows.turns) == 3
  found = metrics.rollout([group], rows, ("solver", "verifier"))
  assert found["remote_failed/far"] == found["turn_faults/verifier"] == 1
  assert found["episodes_failed_remote/team"] == 1


@quick
def test_a_turn_has_its_limit_too():
  with faulty_remote.opened(scripted(Late(30.0))) as endpoint:
    config = team_config(endpoint)
    limits = dataclasses.replace(config.rollout, turn_timeout_s=0.2)
    group, _ = play(dataclasses.replace(config, rollout=limits), size=1)
  [episode] = group.episodes
  assert episode.fault.kind == "remote" and metrics.clocked(episode)
  assert "rollout.turn_timeout_s" in episode.fault.message


@quick
def test_a_chat_goes_on_and_a_gather_is_in_order(monkeypatch):
  """Whichever comes first; with what was said, up to where it closes."""
  speaker = Agent(
    templates={"default": lambda *w: [{"role": "user", "content": list(w)}]},
    replies={"default": lambda *w: [{"role": "user", "content": list(w)}]},
    parse=lambda text, stop_reason: Reply(text),
    tags=("a",),
  )

  async def run(task, call):
    await gather(
      call("verifier", "one", chat="x"), call("verifier", "two", chat="y")
    )
    return (await call("verifier", "three", chat="x")).text

  def script(body, number):
    last = body["messages"][-1]["content"]
    return Late(0.1 * (last == "one"), f"<a>{last}</a>...")

  with faulty_remote.opened(script) as endpoint:
    config = team_config(endpoint)
    load = config_lib.load_role
    monkeypatch.setattr(
      config_lib,
      "load_role",
      lambda name: speaker if "verifier" in name else load(name),
    )
    group, _ = play(config, run, size=1)
  [episode] = group.episodes
  texts = [t.text for t in episode.turns]
  assert texts == ["<a>one</a>", "<a>two</a>", "<a>three</a>"]
  assert [t.index for t in episode.turns] == [0, 1, 2]
  assert endpoint.asked[-1][2]["messages"] == [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "<a>one</a>"},
    {"role": "user", "content": "three"},
  ]


# -- judges --------------------------------------------------------------------

JUDGED = functools.partial(team_config, environment="judged.environment")


@quick
@pytest.mark.parametrize("scores_groups", [False, True])
@pytest.mark.parametrize("policy", ["far", "near"])
def test_a_reward_asks_a_judge(scores_groups, policy):
  """Remote or here; its turns come last, and are no rows."""
  with faulty_remote.opened(approves) as endpoint:
    config = JUDGED(
      endpoint, options={"times": 2, "scores_groups": scores_groups}
    )
    raw = config_lib.to_dict(config)
    raw["policies"]["near"] = {"checkpoint": "y", "frozen": True}
    raw["agents"]["judge"]["policy"] = policy

    def near(key):
      return "<verify>approve</verify>" if key[1] == 1 else "nothing"

    group, samplers = play(config_lib.build(raw), near=near)
  if policy == "far":
    assert [e.outcome.reward for e in group.episodes] == [0.0, 1.0, 0.0]
    assert len(endpoint.asked) == 6
  elif not scores_groups:  # where no verdict is approval
    assert [e.outcome.reward for e in group.episodes] == [1.0, 1.0, 1.0]
    assert not endpoint.asked and len(samplers["near"].asked) == 6
    assert set(samplers["near"].forgotten) == {(5, i) for i in range(3)}
  agents = [[t.agent for t in e.turns] for e in group.episodes]
  if scores_groups:  # all are the first one's
    assert agents == [["solver", *["judge"] * 6], ["solver"], ["solver"]]
  else:
    assert agents == [["solver", "judge", "judge"]] * 3
  for episode in group.episodes:
    assert [t.index for t in episode.turns] == list(range(len(episode.turns)))
    assert not any(t.counts for t in episode.turns if t.agent == "judge")
  rows = rewards.row_scores([group], {"solver": 0.0, "judge": 0.0})
  assert [t.agent for t in rows.turns] == ["solver"] * 3
  found = metrics.rollout([group], rows, ("judge", "solver"))
  assert found["turns/judge"] == 6 and found["episodes_in/judge"] == 0
  assert rewards.is_mixed(group, 1e-5) == (policy == "far")


@quick
@pytest.mark.parametrize(
  ("fault", "clocked"), [(Status(400, "no"), False), (Status(500), True)]
)
def test_a_judge_without_an_answer(fault, clocked):
  """The reward fails, and so the episode: it is not a wrong answer."""
  with faulty_remote.opened(scripted(fault)) as endpoint:
    group, _ = play(JUDGED(endpoint, timeout_s=0.2), size=2)
  for episode in group.episodes:
    assert episode.outcome is None and episode.fault.kind == "reward"
    assert "'judge': remote:" in episode.fault.message
    assert metrics.clocked(episode) == clocked
    assert [t.fault is None for t in episode.turns] == [True, False]


@quick
def test_a_judge_that_is_too_late():
  with faulty_remote.opened(scripted(Late(30.0))) as endpoint:
    raw = config_lib.to_dict(JUDGED(endpoint))
    raw["environment"]["reward_timeout_s"] = 0.2
    group, _ = play(config_lib.build(raw), size=1)
  [episode] = group.episodes
  assert episode.fault.kind == "reward" and episode.fault.wall_clock


# -- the config ----------------------------------------------------------------


def raw_config(policy="far", **changes):
  far = {"base_url": "https://example.com/v1", "model": "m"}
  return {
    "policies": {
      "p": {"checkpoint": "tiny:solver", "engine": {"max_length": 600}},
      "far": {"remote": far | changes.pop("remote", {}), **changes},
    },
    "agents": {
      "solver": {"role": "math.solver", "policy": "p", "max_tokens": 9},
      "verifier": {"role": "math.verifier", "policy": policy},
    },
    "orchestra": {"name": "math"},
    "environment": {"name": "math"},
    "data": {"sources": {"arithmetic": {}}},
  }


@quick
def test_it_has_no_weights():
  config = config_lib.check(config_lib.build(raw_config()))
  assert config.trained == ("p",) and list(config.backbones) == ["p"]
  assert list(config.remotes) == ["far"]
  assert config.policies["far"].origin == "m at https://example.com/v1"


@quick
@pytest.mark.parametrize(
  ("changes", "said"),
  [
    ({"checkpoint": "x"}, "policies.far.checkpoint: has no effect with remote"),
    ({"frozen": True}, "policies.far.frozen: has no effect with remote"),
    ({"engine": {"num_slots": 3}}, "policies.far.engine: has no effect"),
    ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs: has no effect"),
    ({"remote": {"base_url": "example.com"}}, "base_url='example.com': write"),
    ({"remote": {"base_url": "https://a?b=c"}}, "leave them out"),
    ({"remote": {"concurrency": 0}}, "concurrency: 0 is out of range"),
    ({"remote": {"options": {"stream": True}}}, "options.stream: is not an"),
    ({"remote": {"key": "x"}}, "policies.far.remote.key: unknown key"),
    ({"policy": "p", "remote": {}}, "policies.far: no agent uses it"),
  ],
)
def test_wrong_configs(changes, said):
  with pytest.raises(config_lib.ConfigError) as e:
    config_lib.check(config_lib.build(raw_config(**changes)))
  assert said in str(e.value)


@quick
@pytest.mark.parametrize("value", [None, "", "two words", "tab\t", "é"])
def test_a_key_that_is_none_is_not_shown(monkeypatch, value):
  if value is None:
    monkeypatch.delenv("TEST_KEY")
  else:
    monkeypatch.setenv("TEST_KEY", value)
  raw = raw_config(remote={"key_env": "TEST_KEY"})
  with pytest.raises(config_lib.ConfigError, match=r"far\.remote\.key_env"):
    config_lib.check(config_lib.build(raw))
  config_lib.check(config_lib.build(raw), "sft")  # which asks nobody
  for secret in ({"key_env": KEY}, {"base_url": f"https://me:{KEY}@a/v1"}):
    with pytest.raises(config_lib.ConfigError) as e:
      config_lib.check(config_lib.build(raw_config(remote=secret)))
    assert KEY not in str(e.value)


@quick
def test_one_of_the_two_is_needed():
  raw = raw_config()
  raw["policies"]["p"] = {}
  with pytest.raises(config_lib.ConfigError, match=r"p\.checkpoint: missing"):
    config_lib.check(config_lib.build(raw))


@quick
@pytest.mark.parametrize(
  ("changes", "said"),
  [
    ({"policy": "p"}, "agents.judge.policy: 'p' is trained"),
    ({"invalid_penalty": 0.5}, "invalid_penalty: has no effect"),
    ({"max_prompt_tokens": 5}, "max_prompt_tokens: has no effect"),
    ({"train": False}, "agents.judge.train: has no effect"),
    (None, "agents.judge: missing; the environment 'judged.environment' asks"),
  ],
)
def test_agents_that_environments_ask(changes, said):
  raw = raw_config()
  raw["environment"] = {"name": "judged.environment"}
  config_lib.check(
    config_lib.build(
      raw
      | {"agents": raw["agents"] | {"judge": dict(raw["agents"]["verifier"])}}
    )
  )
  if changes is not None:
    raw["agents"]["judge"] = raw["agents"]["verifier"] | changes
  with pytest.raises(config_lib.ConfigError) as e:
    config_lib.check(config_lib.build(raw))
  assert said in str(e.value)


# -- runs ----------------------------------------------------------------------

# One process on one device, where all that is compiled serves all runs.
RUNS = """
import json, sys
from drmas_jax import main

for argv in json.loads(sys.argv[1]):
  print("exit code", main.main(argv), flush=True)
"""


def far_flags(endpoint, workdir, **changes):
  """Of tests/small_run.py, with a verifier that is elsewhere."""
  settings = dataclasses.asdict(at(endpoint, prompt_price=1.0, **changes))
  return [
    f"--config={small_run.__file__}",
    f"--workdir={workdir}",
    f"--config.policies.verifier={ {'remote': settings} }",
    "--config.advantage.name=grpo",  # whose baselines are over all agents
    "--config.eval.every=0",
    "--config.steps=2",
  ]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
  """Two steps with a remote verifier, which is right about what it sees; what
  comes after them; and a run in which it refuses all."""
  folder = tmp_path_factory.mktemp("remote")
  refusal = Status(401, "Incorrect API key provided: {key}.")
  with (
    faulty_remote.opened(approves) as endpoint,
    faulty_remote.opened(scripted(refusal)) as refuses,
  ):
    flags = far_flags(endpoint, folder / "run")
    lost = far_flags(refuses, folder / "lost")
    more = [*far_flags(endpoint, folder / "run", concurrency=2)]
    runs = [
      flags,
      [*flags, "--mode=eval"],
      [*more, "--config.steps=3"],
      [*far_flags(endpoint, folder / "run", model="n"), "--config.steps=4"],
      [*lost, "--config.eval.num_tasks=0"],
    ]
    done = subprocess.run(
      [sys.executable, "-c", RUNS, json.dumps(runs)],
      cwd=small_run.ROOT,
      env=os.environ
      | {
        "XLA_FLAGS": xla_flags.flags(),
        "PYTHONPATH": str(small_run.ROOT),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "TEST_KEY": KEY,
      },
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      timeout=300,
      check=False,
    )
  return pytypes.SimpleNamespace(
    folder=folder,
    workdir=folder / "run",
    said=done.stdout,
    codes=[
      line.split()[-1]
      for line in done.stdout.splitlines()
      if line.startswith("exit code")
    ],
    endpoint=endpoint,
  )


def test_two_steps_train_on_their_own_turns(job):
  assert job.codes[:1] == ["0"], job.said
  found = small_run.metrics(job.workdir)
  for step in (1, 2):
    calls = found[step, "remote_calls/verifier"]
    assert calls >= 16 and found[step, "turns/verifier"] == calls
    assert found[step, "remote_failed/verifier"] == 0
    assert found[step, "remote_cost/verifier"] == pytest.approx(11e-6 * calls)
    assert (step, "grad_norm/solver") in found
    assert (step, "grad_norm/verifier") not in found
  turns = [t for e in small_run.transcripts(job.workdir) for t in e["turns"]]
  own = [t for t in turns if t["agent"] == "solver"]
  others = [t for t in turns if t["agent"] == "verifier"]
  assert own and all(t["advantage"] is not None for t in own)
  assert others and all(t["advantage"] is t["score"] is None for t in others)
  assert all(
    t["call"]["retries"] == 0 and "[user]" in t["prompt"] for t in others
  )
  names = {p.name for p in (job.workdir / "checkpoints" / "2").iterdir()}
  assert "policy_solver" in names and "policy_verifier" not in names
  for _, headers, _ in job.endpoint.asked:
    assert headers["Authorization"] == f"Bearer {KEY}"


def test_an_evaluation_hears_what_was_said_before(job):
  """That of the last step, played again by `--mode=eval`, asks nobody."""
  assert job.codes[1:2] == ["0"], job.said
  folder = job.workdir / "eval" / "step_2"
  results = json.loads((folder / "results.json").read_text())
  origin = f"m at {job.endpoint.base_url}"
  assert results["policies"]["verifier"] == origin
  judge = results["agents"]["verifier"]
  assert judge["valid"] == 1 and judge["tokens_per_turn"] == 5
  assert judge["calls"] == judge["cached"] == 8 and judge["cost"] == 0
  identity = json.loads((folder / "identity.json").read_text())
  assert identity["policies"]["verifier"]["model"] == "m"


def test_what_changes_what_it_says_needs_leave(job):
  assert job.codes[2:4] == ["0", "2"], job.said
  assert "--allow_change=policies.verifier.remote.model" in job.said


def test_too_many_failures_end_the_run(job):
  assert job.codes[4:] == ["3"], job.said
  assert "16 of 16 episodes failed" in job.said


def test_the_key_is_nowhere(job):
  """The replies that are kept are in the folder, too."""
  assert "Incorrect API key provided: ***." in job.said
  assert KEY not in job.said
  files = [p for p in job.folder.rglob("*") if p.is_file()]
  assert {"run", "lost", "cache"} <= {
    p.relative_to(job.folder).parts[0] for p in files
  }
  for path in files:
    assert KEY.encode() not in path.read_bytes(), path
