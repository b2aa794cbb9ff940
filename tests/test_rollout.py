"""Episodes over scripted samplers: turns, rewards, faults, gather."""

import asyncio
import dataclasses
import itertools
import threading
import types as pytypes
import zlib

import families
import jax
import numpy as np
import pytest

from drmas_jax import advantages, metrics, rewards, rollout
from drmas_jax import config as config_lib
from drmas_jax.agents.math import verifier
from drmas_jax.sampler import Completion
from drmas_jax.tokenizer import Tokenizer
from drmas_jax.types import (
  Fault,
  Outcome,
  Reply,
  Task,
  TransientError,
  UserError,
  act,
  gather,
)

pytestmark = pytest.mark.quick


class Words:
  """A tokenizer with three ids for whatever is asked."""

  def render(self, messages):
    return " ".join(m["content"] for m in messages)

  def encode_rendered(self, text):
    return np.arange(1, 4, dtype=np.int32)

  def decode(self, ids, control=False):
    return " ".join(map(str, ids))


class Scripted:
  """A sampler that answers from a function, at most `width` at a time."""

  def __init__(
    self,
    answer,
    width=3,
    order=1,
    tokenizer=None,
    num_slots=32,
    devices=frozenset(),
  ):
    self.answer, self.width, self.order = answer, width, order
    self.queue, self.running, self.asked = [], [], []
    self.faults, self.forgotten = {}, []
    self.rounds = [set()]  # of each, the threads that started a run
    self.engine = pytypes.SimpleNamespace(
      key=None, max_concurrent_decodes=num_slots, devices=devices
    )
    self.tokenizer = tokenizer or Words()

  @property
  def busy(self):
    return bool(self.num_requests)

  @property
  def num_requests(self):
    return len(self.queue) + len(self.running)

  def submit(self, request, fault=None):
    self.asked.append(request)
    self.queue.append(request)
    if fault:
      self.faults[request.id] = fault

  def cancel(self, wanted):
    self.queue = [r for r in self.queue if not wanted(r)]
    self.running = [r for r in self.running if not wanted(r)]

  def forget(self, position, episode):
    assert not any(r.id[:2] == (position, episode) for r in self.running)
    self.forgotten.append((position, episode))

  def dispatch(self):
    self.running += self.queue[: self.width]
    del self.queue[: self.width]
    if self.running:
      self.rounds[-1].add(threading.get_ident())

  def harvest(self):
    self.rounds.append(set())
    done = [self.complete(r) for r in self.running[:: self.order]]
    self.running = []
    return done

  def complete(self, request):
    text = self.faults.get(request.id) or self.answer(request.id)
    fault = text if isinstance(text, Fault) else None
    ids = np.full(0 if fault else 2, 7, np.int32)
    if not isinstance(self.tokenizer, Words):
      ids = self.tokenizer.encode(text)
    num = len(ids)
    return Completion(
      request,
      ids,
      np.full(num, -1.0, np.float32),
      np.zeros(num, np.float32),
      "" if fault else text,
      "fault" if fault else "stop",
      4,
      fault,
    )


class Role:
  tags = ()
  templates = replies = {}  # noqa: RUF012

  def messages(self, template, *args):
    return [{"role": "user", "content": " ".join(map(str, args))}]

  def reply(self, template, *args):
    return self.messages(template, "then:", *args)

  def parse(self, text, stop_reason):
    return Reply(text, valid=text != "bad", verdict=text)


class Environment:
  def __init__(self, score, scores_groups=False):
    setattr(self, "score_group" if scores_groups else "score", score)


def make_config(**changes):
  raw = {
    "policies": {"p": {"checkpoint": "x"}, "q": {"checkpoint": "y"}},
    "agents": {
      "a": {"role": "math.solver", "policy": "p"},
      "b": {"role": "math.verifier", "policy": "q"},
    },
    "orchestra": {"name": "math"},
    "environment": {"name": "math", "reward_timeout_s": 0.3},
    "data": {"sources": {"arithmetic": {}}},
  }
  return dataclasses.replace(config_lib.build(raw), **changes)


def play(run, score, answer=lambda key: "ok", num_tasks=2, size=3, **kw):
  config = kw.pop("config", None) or make_config()
  groups_too = kw.pop("scores_groups", False)
  team = object.__new__(rollout.Team)
  team.members = {
    n: rollout.Member(n, Role(), a) for n, a in config.agents.items()
  }
  team.orchestra = pytypes.SimpleNamespace(run=run)
  team.orchestra_options = {}
  team.environment = Environment(score, groups_too)
  team.reward_timeout_s = config.environment.reward_timeout_s
  samplers = {"p": Scripted(answer, **kw), "q": Scripted(answer, **kw)}
  made = rollout.Rollout(team, samplers, config)
  tasks = [Task("s", i, 10 + i, f"question {i}", i) for i in range(num_tasks)]
  try:
    return made.collect(tasks, size, key="root"), samplers
  finally:
    made.close()


async def two_turns(task, call):
  first = await call("a", task)
  second = await call("b", task, first.text)
  return f"{first.text}/{second.text}"


def won(task, episode):
  return Outcome(1.0)


def test_every_episode_is_played_in_order_with_its_turns():
  def answer(key):
    return f"{key}"

  for width, order in ((1, 1), (3, -1), (64, 1)):
    groups, samplers = play(two_turns, won, answer, width=width, order=order)
    assert [g.task.position for g in groups] == [10, 11]
    for group in groups:
      assert [e.index for e in group.episodes] == [0, 1, 2]
      for e in group.episodes:
        key = (group.task.position, e.index)
        assert [t.agent for t in e.turns] == ["a", "b"]
        assert [t.index for t in e.turns] == [0, 1]
        assert e.action == f"{(*key, 0)}/{(*key, 1)}"
        assert e.status == "ok" and e.outcome.reward == 1.0
        assert e.turns[1].policy == "q" and e.turns[1].policy_version == 4
    shared = {r.shared_by for r in samplers["p"].asked}
    assert shared == {3}, "the first turn of a group shares its prefill"
    assert {r.shared_by for r in samplers["q"].asked} == {1}
    assert samplers["p"].engine.key == "root"


@pytest.mark.parametrize("cores", [1, 2])
def test_engines_of_one_cpu_run_together_if_it_has_the_cores(
  cores, monkeypatch
):
  monkeypatch.setattr("os.cpu_count", lambda: cores)
  devices = frozenset(jax.devices()[:1])
  groups, samplers = play(two_turns, won, width=1, devices=devices)
  assert all(e.status == "ok" for g in groups for e in g.episodes)
  rounds = [samplers[name].rounds for name in ("p", "q")]
  together = [p and q for p, q in zip(*rounds, strict=True)]
  assert any(together) == (cores == 2)
  first, second = (set().union(*threads) for threads in rounds)
  assert first == {threading.get_ident()}
  assert (second == first) == (cores == 1)


def test_gather_orders_and_seeds_turns_whichever_ends_first(tmp_path):
  """Narrow samplers of unequal load answer one agent sooner than the other."""

  async def run(task, call):
    async def chain(agent, chat):
      return [await call(agent, task, chat=chat) for _ in range(3)]

    first = await call("a", task)
    left, one, two, three = await gather(
      call("b", task), chain("a", "one"), chain("a", "two"), chain("b", "three")
    )
    assert await gather() == []
    last = await call("b", task)
    return [r.text for r in (first, left, *one, *two, *three, last)]

  tokenizer = Tokenizer.load(families.write(tmp_path, "qwen25"))
  found = []
  for width, order in ((64, 1), (64, -1), (1, 1), (2, -1)):
    groups, _ = play(
      run,
      won,
      lambda key: str(key[2]),
      width=width,
      order=order,
      tokenizer=tokenizer,
    )
    episodes = [e for group in groups for e in group.episodes]
    for episode in episodes:
      # What was sampled, each time by a seed of its own, in the order of turns.
      assert [t.text for t in episode.turns] == episode.action
      assert len(set(episode.action)) == 12 and episode.action[0] == "0"
      assert [t.index for t in episode.turns] == list(range(12))
      continues = [t.continues for t in episode.turns]
      assert continues == (
        [None, None] + [None, 2, 3] + [None, 5, 6] + [None, 8, 9] + [None]
      )
    found.append([e.action for e in episodes])
  assert all(actions == found[0] for actions in found)


def test_turns_go_on_from_those_that_have_ended_in_any_case():
  """Rule 26: what ended by chance, among what runs side by side, is no parent.

  Numbers of turns in a gather stand for their paths here.
  """

  async def run(task, call):
    async def chain(agent):
      await call(agent, "1")
      await gather(call(agent, "2"), call(agent, "3"))
      return await call(agent, "4")

    await call("a", "0")
    await call("b", "0")
    await gather(chain("a"), chain("a"), chain("b"), call("a", "5"))
    return await call("a", "6")

  before = None
  for width, order in ((64, 1), (64, -1), (1, 1), (2, -1)):
    _, samplers = play(run, won, width=width, order=order, num_tasks=1, size=1)
    asked = [r for s in samplers.values() for r in s.asked]
    assert all(p[:2] == r.id[:2] for r in asked for p in r.parents)
    parents = {r.id[2]: [p[2] for p in r.parents] for r in asked}
    assert before is None or parents == before
    before = parents
    for sampler in samplers.values():
      assert sampler.forgotten == [(10, 0)]
    assert {r.kind for r in samplers["p"].asked} == {"a"}
  names = {
    zlib.crc32(str(path).encode()) >> 2 | 1 << 30: path
    for path in itertools.chain(
      [(2, c, i) for c in range(4) for i in range(3)],
      [(2, c, 1, j, 0) for c in range(3) for j in range(2)],
    )
  }
  found = {
    names.get(turn, (turn,)): [names.get(p, (p,)) for p in of]
    for turn, of in before.items()
  }
  assert found[0,] == found[1,] == []
  assert found[2, 3, 0] == found[2, 1, 0] == [(0,)]
  assert found[2, 1, 1, 0, 0] == found[2, 1, 1, 1, 0] == [(0,), (2, 1, 0)]
  of_child = [(2, 0, 0), (2, 0, 1, 0, 0), (2, 0, 1, 1, 0)]
  assert found[2, 0, 2] == [(0,), *of_child]
  assert found[2, 2, 2][0] == (1,), "of the same policy"
  assert len(found[3,]) == 10 and found[3,] == sorted(found[3,])


def test_a_fault_loses_its_episode_and_nothing_else():
  def answer(key):
    return Fault("deadline", "late", True) if key == (11, 1, 0) else "ok"

  groups, samplers = play(two_turns, won, answer)
  assert [e.status for g in groups for e in g.episodes] == (
    ["ok"] * 4 + ["failed", "ok"]
  )
  for sampler in samplers.values():  # nothing is kept of any episode
    assert len(set(sampler.forgotten)) == len(sampler.forgotten) == 6
  failed = groups[1].episodes[1]
  assert failed.fault.kind == "deadline" and failed.outcome is None
  rows = rewards.row_scores(groups, {"a": 0.0, "b": 0.0})
  assert len(rows.turns) == 10


def test_async_reward_that_fails_or_hangs_loses_its_episode():
  """The step goes on (rules 1 and 6); a time-out is marked as the clock's."""

  async def slow(task, episode):
    if episode.index == 0:
      raise OSError("connection reset")
    if episode.index == 1:
      await asyncio.sleep(30)
    await asyncio.sleep(0.01)
    return Outcome(1.0)

  groups, _ = play(two_turns, slow)
  for group in groups:
    broken, late, fine = group.episodes
    assert broken.status == "failed"
    assert "OSError: connection reset" in broken.fault.message
    assert late.status == "failed" and late.fault.wall_clock
    assert "reward_timeout_s" in late.fault.message
    assert fine.status == "ok" and fine.outcome.reward == 1.0


def test_a_group_is_scored_at_once_when_complete():
  seen = []

  def score(group):
    seen.append([e.index for e in group.episodes])
    best = max(e.action for e in group.episodes)
    return [Outcome(float(e.action == best)) for e in group.episodes]

  def answer(key):
    if key == (11, 2, 1):
      return Fault("prompt", "too long")
    return str(key[1])

  groups, _ = play(two_turns, score, answer, scores_groups=True)
  assert seen == [[0, 1, 2], [0, 1]]
  assert [e.outcome.reward for e in groups[0].episodes] == [0, 0, 1]
  assert [e.status for e in groups[1].episodes] == ["ok", "ok", "failed"]
  assert [e.outcome.reward for e in groups[1].episodes[:2]] == [0, 1]


def test_transient_errors_lose_an_episode_and_others_stop_the_run():
  async def flaky(task, call):
    await call("a", task)
    if task.position == 11:
      raise TransientError("the simulator was restarted")
    return "x"

  groups, _ = play(flaky, won)
  assert {e.status for e in groups[1].episodes} == {"failed"}
  assert {e.status for e in groups[0].episodes} == {"ok"}

  def broken(task, episode):
    raise ZeroDivisionError("in user code")

  with pytest.raises(UserError, match=r"task s\[0\], episode 0") as caught:
    play(two_turns, broken)
  assert isinstance(caught.value.__cause__, ZeroDivisionError)

  async def stranger(task, call):
    await call("nobody", task)

  with pytest.raises(UserError, match="called 'nobody'; allowed are a, b"):
    play(stranger, won)

  async def listed(task, call):
    await gather([call("a", task), call("b", task)])

  with pytest.raises(UserError, match=r"write gather\(\*cor"):
    play(listed, won)


@pytest.mark.parametrize(
  "missing",
  [
    None,
    np.nan,
    -np.inf,
    1e39,
    1e16,
    {"a": 1.0, "b": np.nan},
    {"a": None, "b": 0.0},
  ],
)
@pytest.mark.parametrize("groups_too", [False, True])
def test_an_episode_without_a_reward_is_lost(missing, groups_too):
  """Case G02: it drops out of mean, deviation and loss, and is no wrong one."""
  own = isinstance(missing, dict)

  def score(task, episode):
    if episode.index == 0:
      return Outcome(missing)
    gain = float(episode.index - 1)
    return Outcome({"a": gain, "b": gain} if own else gain)

  def score_group(group):
    return [score(group.task, episode) for episode in group.episodes]

  groups, _ = play(
    two_turns, score_group if groups_too else score, scores_groups=groups_too
  )
  lost = [e for g in groups for e in g.episodes if e.status == "failed"]
  assert [e.index for e in lost] == [0, 0]
  assert {e.fault.kind for e in lost} == {"reward"}
  rows = rewards.row_scores(groups, {"a": 0.1, "b": 0.1})
  assert rows.scores.tolist() == [0, 0, 1, 1] * 2
  found, _ = advantages.of_rows(
    config_lib.Advantage(), rows, groups, num_agents=2
  )
  half = np.sqrt(0.5)
  np.testing.assert_allclose(
    found.values, [-half, -half, half, half] * 2, rtol=1e-5
  )
  said = metrics.rollout(groups, rows, ["a", "b"])
  assert all(map(np.isfinite, said.values()))
  assert said["episodes_failed_reward/team"] == 2


def test_a_reward_of_a_turn_may_be_missing_too():
  def score(task, episode):
    extra = {1: np.nan} if episode.index == 0 else {np.int64(1): 0.5}
    return Outcome(1.0, turn_rewards=extra)

  groups, _ = play(two_turns, score, num_tasks=1)
  assert [e.status for e in groups[0].episodes] == ["failed", "ok", "ok"]
  rows = rewards.row_scores(groups, {"a": 0.1, "b": 0.1})
  assert rows.scores.tolist() == [1, 1.5] * 2


@pytest.mark.parametrize(
  ("outcome", "said"),
  [
    (Outcome("high"), "'high' as the reward of the team; write a number"),
    (Outcome("1"), "'1' as the reward of the team; write a number"),
    (Outcome({"a": 1.0, "b": []}), "as the reward of b; write a number"),
    (Outcome(1.0, turn_rewards={2: 1.0}), "allowed are the indices"),
    (Outcome(1.0, turn_rewards={"0": 1.0}), "allowed are the indices"),
    (Outcome(1.0, turn_rewards=[0.0, 1.0]), "write a dict"),
    (Outcome(1.0, parts={"x": "much"}), "'much' as the part 'x'; write a"),
  ],
)
def test_what_is_no_score_at_all_stops_the_run(outcome, said):
  with pytest.raises(UserError, match=said):
    play(two_turns, lambda task, episode: outcome, num_tasks=1)


def test_what_is_answered_at_once_goes_no_deeper(monkeypatch):
  """However long an episode goes on without a wait."""
  monkeypatch.setattr(
    Environment, "act", lambda self, task, action: action + 1, raising=False
  )

  async def child(number):
    return number

  async def run(task, call):
    number = 0
    for _ in range(1000):
      number = await act(number)
      assert await gather() == []
      number += sum(await gather(child(0), child(1)))
    return number

  groups, _ = play(run, won, num_tasks=1, size=1)
  (episode,) = groups[0].episodes
  assert episode.action == 2000 and len(episode.observations) == 1000
  monkeypatch.setattr(rollout, "_MOST_AT_ONCE", 3000)
  with pytest.raises(UserError, match="3000 times without a turn"):
    play(run, won, num_tasks=1, size=1)


def test_zero_sum_rewards_by_agent_with_hand_checked_advantages():
  """Agent a wins what b loses; each is measured against itself alone."""
  gains = {0: 1.0, 1: 0.0, 2: -1.0}

  def score(task, episode):
    gain = gains[episode.index]
    return Outcome({"a": gain, "b": -gain}, parts={"gain": gain})

  def answer(key):
    return "bad" if key == (10, 1, 1) else "ok"

  groups, _ = play(two_turns, score, answer, num_tasks=1)
  rows = rewards.row_scores(groups, {"a": 0.5, "b": 0.5})
  np.testing.assert_allclose(rows.scores, [1, -1, 0, -0.5, -1, 1])
  result, _ = advantages.estimate(
    config_lib.Advantage(),
    rows.scores,
    rows.group,
    rows.agent,
    rows.episode,
    turn=np.array([turn.index for turn in rows.turns]),
    tokens=np.ones(len(rows.turns), np.int32),
    num_agents=2,
    per_agent=rows.per_agent,
  )
  # a: mean 0, deviation 1. b: -1, -0.5, 1: mean -1/6, deviation 1.0408.
  np.testing.assert_allclose(
    result.values, [1, -0.8006, 0, -0.3203, -1, 1.1209], atol=2e-4
  )


# -- chats and limits of prompts -----------------------------------------------


def test_chats_interleave_and_go_on_with_their_ids(tmp_path):
  """Rule 8: by agent and name; a call without a name is a chat of its own."""

  async def run(task, call):
    await gather(call("a", "p", chat="x"), call("a", "q", chat="y"))
    await call("b", "r", chat="x")
    await gather(call("a", "s", chat="y"), call("a", "t", chat="x"))
    await call("a", "u")
    return (await call("a", "v", chat="y")).text

  tokenizer = Tokenizer.load(families.write(tmp_path, "qwen25"))
  for order in (1, -1):
    groups, _ = play(
      run,
      won,
      lambda key: f"answer {key[2]}",
      order=order,
      size=2,
      tokenizer=tokenizer,
    )
    for episode in (e for g in groups for e in g.episodes):
      turns = episode.turns
      assert [t.continues for t in turns] == [None] * 3 + [1, 0, None, 3]
      assert not any(t.chat_split or t.prompt_cut for t in turns)
      for turn in turns:
        if turn.continues is not None:
          before = turns[turn.continues]
          known = [*before.prompt_ids, *before.completion_ids]
          assert turn.prompt_ids[: len(known)].tolist() == known
      text = tokenizer.decode(turns[6].prompt_ids)
      words = ["q", turns[1].text, "then: s", turns[3].text, "then: v"]
      assert [w for w in text.split("\n") if w in words] == words
      assert "p" not in text.split("\n") and "then: t" not in text


def test_history_that_the_template_rewrites_is_counted(tmp_path):
  async def run(task, call):
    for _ in range(3):
      await call("a", task.question, chat="x")

  tokenizer = Tokenizer.load(families.write(tmp_path, "qwen3"))
  groups, _ = play(
    run, won, lambda key: "<think>hm</think>ok", size=1, tokenizer=tokenizer
  )
  turns = [t for g in groups for e in g.episodes for t in e.turns]
  assert [t.chat_split for t in turns] == [False, True, True] * 2
  assert [t.continues for t in turns] == [None] * 6
  found = metrics.turns(turns)
  assert found["chat_splits"] == 4 and found["turns"] == 6


@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize("ends", [True, False])
def test_reasoning_that_the_template_opens(tmp_path, monkeypatch, opens, ends):
  """Q13, rule 13: tags before its end do not count, and it has to end."""
  said = "hm <verify>approve</verify>"
  first, said = len(said), said + "</think>so <verify>reject</verify>" * ends
  monkeypatch.setattr(Role, "tags", verifier.tags)
  monkeypatch.setattr(Role, "parse", staticmethod(verifier.parse))

  async def run(task, call):
    # What the question says opens nothing.
    return await call("b", "<think>")

  template = families.TEMPLATES["qwen25"] + "<think>\n" * opens
  folder = families.write(tmp_path, "qwen25", template)
  groups, samplers = play(
    run,
    won,
    lambda key: said,
    num_tasks=1,
    size=1,
    tokenizer=Tokenizer.load(folder),
  )
  reply = groups[0].episodes[0].action
  assert reply.verdict == ("reject" if opens and ends else "approve")
  assert reply.valid == (ends or not opens)
  assert reply.labels["missing"] == (opens and not ends)
  [asked] = samplers["q"].asked
  end = len(said) if ends else None
  assert asked.closes(said) == (end if opens else first)
  assert groups[0].episodes[0].turns[0].text == said


def test_a_chat_in_two_places_at_once():
  async def run(task, call):
    await gather(call("a", task, chat="x"), call("a", task, chat="x"))

  with pytest.raises(UserError, match=r"'x': 'a' is called.*not answered yet"):
    play(run, won)


@pytest.mark.parametrize("cut", ["error", "foreign", "left"])
def test_a_prompt_over_its_limit(cut):
  """It loses its episode or is cut, and is counted (rule 6)."""
  raw = config_lib.to_dict(make_config())
  raw["agents"]["b"] |= {"max_prompt_tokens": 2, "cut": cut}
  groups, samplers = play(two_turns, won, config=config_lib.build(raw))
  (group, _) = groups
  turns = [t for e in group.episodes for t in e.turns if t.agent == "b"]
  assert len(turns) == 3
  lost = cut != "left"
  assert {e.status for e in group.episodes} == {"failed" if lost else "ok"}
  assert {bool(t.fault) for t in turns} == {lost}
  assert {len(r.prompt_ids) for r in samplers["q"].asked} == {3 if lost else 2}
  assert metrics.turns(turns)["prompt_cut"] == (0 if lost else 3)
  rows = rewards.row_scores(groups, {"a": 0.0, "b": 0.0})
  assert metrics.rollout(groups, rows, ["a", "b"])["turn_faults/b"] == (
    6 if lost else 0
  )
  if lost:
    assert group.episodes[0].fault.kind == "prompt"
