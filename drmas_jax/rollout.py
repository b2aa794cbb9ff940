"""Episodes as coroutines over samplers: the loop that plays a step's groups.

One thread owns all devices and runs a plain loop: dispatch every sampler,
harvest every sampler, advance the episodes that got an answer, in (task,
episode, turn) order. What environments do as coroutines (rewards, and answers
within an episode, such as passages), and calls of remote policies, run in one
asyncio thread and come back through a queue, which is waited for, with a limit,
only when no engine has work. A reward that asks an agent (`types.ask`) sends
its question through the same queue, and the call is made here.
"""

import dataclasses
import functools
import inspect
import itertools
import queue
import time
import zlib
from collections.abc import (
  Callable,
  Collection,
  Coroutine,
  Iterator,
  Mapping,
  Sequence,
)
from typing import Any, NamedTuple

import jax
import numpy as np

from drmas_jax import config as config_lib
from drmas_jax import dispatch, prompts, remote, scheduler, usercode
from drmas_jax.agents import agent as agent_lib
from drmas_jax.outside import Io, Question
from drmas_jax.plays import (
  Asked,
  Play,
  Strand,
  misscored,
  outside_fault,
  unscored,
)
from drmas_jax.sampler import Completion, Request, Sampler
from drmas_jax.types import (
  ActRequest,
  Call,
  CallRequest,
  Episode,
  Fault,
  GatherRequest,
  Group,
  Reply,
  Task,
  TransientError,
  Turn,
  UserError,
  request,
)

_LATE_S = 2.0  # beyond its limit, for a coroutine that blocks
_MOST_AT_ONCE = 100_000  # steps of an orchestra between two waits
_IO_S = 1.0  # that the I/O thread is waited for, before signals are looked at


@dataclasses.dataclass(frozen=True)
class Member:
  """An agent of the team with its role looked up."""

  name: str
  role: Any
  config: config_lib.Agent


class Team:
  """Agents, orchestra and environment of a config, ready to be run."""

  def __init__(self, config: config_lib.Config):
    self.members = {
      name: Member(name, config_lib.load_role(agent.role), agent)
      for name, agent in config.agents.items()
    }
    self.orchestra = config_lib.load_module("orchestras", config.orchestra.name)
    self.orchestra_options = config.orchestra.options
    environment = config_lib.load_module(
      "environments", config.environment.name
    )
    make = environment.make
    with usercode.blaming(
      "making the environment", code=make, passes=(ValueError,)
    ):
      self.environment = make(**config.environment.options)
    self.reward_timeout_s = config.environment.reward_timeout_s

  @property
  def scores_groups(self) -> bool:
    """Whether the environment scores the episodes of a task at once."""
    return hasattr(self.environment, "score_group")

  def start(self, task: Task) -> Coroutine:
    """The orchestra's coroutine for one episode."""

    def call(agent: str, *args, chat: str | None = None) -> Coroutine:
      return request(CallRequest(agent, args, chat))

    run, where = self.orchestra.run, f"task {task.source}[{task.index}]"
    with usercode.blaming("starting the orchestra", where, run):
      coro = run(task, call, **self.orchestra_options)
    if not inspect.isawaitable(coro):
      what = f"run(..) gave {coro!r}; write 'async def run'"
      raise UserError(usercode.describe(what, "starting it", where, run))
    return coro


_Ready = list[tuple[Strand, Any]]  # coroutines, and what they go on with


class _Outside(NamedTuple):
  """A coroutine in the I/O thread.

  Attributes:
    position: of the task that it is for.
    go_on: takes its result, or what it raised.
    deadline: when it is given up, by `time.monotonic()`.
    heed: takes a `Question` of it.
  """

  position: int
  go_on: Callable[[Any], None]
  deadline: float
  heed: Callable[[Question], None] | None = None


class Rollout:
  """Plays groups of episodes on the samplers of all policies."""

  def __init__(
    self,
    team: Team,
    samplers: Mapping[str, Sampler],
    config: config_lib.Config,
    heartbeat: Callable[[], None] = lambda: None,
    remotes: Mapping[str, remote.Endpoint] | None = None,
  ):
    """`heartbeat` is called once a round: signals are looked at there. Each
    policy is among the `samplers` or the `remotes`."""
    self.team = team
    self.samplers = dict(samplers)
    self.remotes = dict(remotes or {})
    self.seed = 0  # of what is asked of remotes
    self.config = config
    self._heartbeat = heartbeat
    self._io: Io | None = None
    self._under_way: Episodes | None = None

  def collect(
    self,
    tasks: Sequence[Task],
    group_size: int,
    key: jax.Array,
    sampling: config_lib.Sampling | None = None,
    *,
    skip: Collection[tuple[int, int]] = frozenset(),
    finished: Callable[[Episode], None] | None = None,
  ) -> list[Group]:
    """Plays group_size episodes of every task.

    Twice as many episodes as there are slots are under way at a time, so that
    a turn's time limit runs while it is played and not while it queues.

    Args:
      tasks: of different positions.
      group_size: G.
      key: root of the sampling; tokens depend on it, the task's position, the
        episode, the turn and the weights, and on nothing else.
      sampling: for all agents; None: each agent's own.
      skip: (position, episode) of those that are not played; of an environment
        that scores groups, whole groups.
      finished: called with each episode once it has its outcome or its fault.
        Its turns are then given up, so that a long evaluation does not hold
        them all.

    Returns:
      One group a task, in order; episodes that failed are in it, marked so.
    """
    for sampler in self.samplers.values():
      sampler.engine.key = key
    if self.remotes:
      self.seed = zlib.crc32(np.asarray(jax.random.key_data(key)).tobytes())
    groups = [
      Group(
        task,
        [
          Episode(task, i)
          for i in range(group_size)
          if (task.position, i) not in skip
        ],
      )
      for task in tasks
    ]
    self._under_way = Episodes(self, finished)
    try:
      return self._under_way.collect(groups, sampling)
    finally:
      self._under_way = None

  def waiting(self) -> str:
    """What is being waited for, for people; from any thread."""
    under_way = self._under_way
    return "" if under_way is None else under_way.waiting()

  def decode(self, policy: str, ids: np.ndarray) -> str:
    """Text of a turn's ids, control tokens kept."""
    return self.samplers[policy].tokenizer.decode(ids, control=True)

  @property
  def io(self) -> Io:
    if self._io is None:
      self._io = Io()
    return self._io

  def close(self) -> None:
    if self._io is not None:
      self._io.close(self.remotes.values())
      self._io = None


class Episodes:
  """Episodes under way.

  `collect` plays groups to their end. A loop that serves others too adds groups
  as they come, hands over the completions that are theirs, and drops them.
  """

  def __init__(
    self,
    rollout: Rollout,
    finished: Callable[[Episode], None] | None = None,
    scored: bool = True,
  ):
    """`finished` is as in `Rollout.collect`; if not `scored`, the environment
    is not asked, and an episode is over when its orchestra has returned."""
    self.rollout = rollout
    self.team = rollout.team
    self.samplers = rollout.samplers
    # Several policies may be on the same engines.
    self.engines = {id(s.engine): s for s in self.samplers.values()}
    devices = [s.engine.devices for s in self.engines.values()]
    together = frozenset().union(*devices)
    self.turns = scheduler.Turns(devices, dispatch.at_once(together))
    self.strands = dispatch.Strands(together)
    self.finished = finished
    self.scored = scored
    self.outside: dict[int, _Outside] = {}  # by their numbers
    self.numbers = itertools.count()
    self.plays: dict[tuple[int, int], Play] = {}
    self.groups: dict[int, Group] = {}  # by position
    self.under_way = 0  # begun, and the orchestra has not returned
    self.missing = 0  # not done

  def collect(
    self, groups: list[Group], sampling: config_lib.Sampling | None
  ) -> list[Group]:
    """Plays groups, and returns them."""
    room = 2 * sum(
      s.engine.max_concurrent_decodes for s in self.engines.values()
    )
    room += 2 * sum(e.concurrency for e in self.rollout.remotes.values())
    coming = iter([p for g in groups for p in self._make(g, sampling)])
    try:
      self._begin(coming, room)
      while self.missing:
        self._round()
        self._begin(coming, room)
    except BaseException:
      self._abandon()
      raise
    return groups

  def waiting(self) -> str:
    """What is being waited for, for people; from any thread."""
    now, turns, others = time.monotonic(), [], []
    for play in list(self.plays.values()):
      begun = inspect.getcoroutinestate(play.root.coro) != inspect.CORO_CREATED
      if not begun or play.done:
        continue
      where = play.where
      for asked in list(play.waiting.values()):
        turns.append((asked.since, asked.agent, where))
      if not play.waiting:
        others.append((play.key, "reward" if play.played else "act", where))
    said = [f"{self.missing} episodes are not done"]
    for since, agent, where in sorted(turns)[:1]:
      policy = self.team.members[agent].config.policy
      said.append(
        f"the oldest turn of {len(turns)} is {agent!r}'s, by the policy "
        f"{policy!r}, asked for {now - since:.0f} s ago in {where}"
      )
    for _, what, where in sorted(others)[:1]:
      said.append(f"{len(others)} wait for the environment: {where}, {what}")
    said += [
      f"{name!r} has slots for {sampler.num_running} of its "
      f"{sampler.num_requests} requests"
      for name, sampler in self.samplers.items()
      if sampler.busy
    ]
    if self.outside:
      places = ", ".join(self.rollout.io.places()[:3])
      said.append(f"the I/O thread has {len(self.outside)}, at {places}")
    return "; ".join(said)

  def add(
    self,
    group: Group,
    sampling: config_lib.Sampling | None,
    seed: int | None = None,
  ) -> None:
    """Begins the episodes of a group, all at once.

    Args:
      group: of a task whose position is its name among all that are there.
      sampling: for all agents; None: each agent's own.
      seed: a task's position, to sample as for that one; None: its own.
    """
    plays = self._make(group, sampling, seed)
    self.under_way += len(plays)
    for play in plays:
      if not play.done:
        self._advance(play, play.root, None)

  def drop(self, position: int) -> None:
    """Forgets a task's episodes, if any; those not done are given up."""
    if position not in self.groups:
      return
    for sampler in self.samplers.values():
      sampler.cancel(lambda r: r.id[0] == position)
    for episode in self.groups.pop(position).episodes:
      play = self.plays.pop((position, episode.index))
      if not play.done:
        self.missing -= 1
        self.under_way -= not play.played
        self._give_up(play)

  def _make(
    self,
    group: Group,
    sampling: config_lib.Sampling | None,
    seed: int | None = None,
  ) -> list[Play]:
    position = group.task.position
    seed = position if seed is None else seed
    plays = [
      Play(e, Strand(self.team.start(group.task)), sampling, seed)
      for e in group.episodes
    ]
    self.groups[position] = group
    self.plays |= {play.key: play for play in plays}
    self.missing += len(plays)
    return plays

  def _begin(self, coming: Iterator[Play], room: int) -> None:
    """Starts what there is room for; more, where it ends without a wait."""
    while self.under_way < room and (play := next(coming, None)):
      self.under_way += 1
      self._advance(play, play.root, None)

  def _round(self) -> None:
    self.rollout._heartbeat()
    samplers = self.samplers.values()
    self._dispatch()
    completions = [c for s in samplers for c in s.harvest()]
    for completion in sorted(completions, key=lambda c: c.request.id):
      self.answer(completion)
    idle = not any(s.busy for s in samplers)
    for _, go_on in self.heard(_IO_S if idle else 0.0):
      go_on()

  def _dispatch(self) -> None:
    """Starts the engines whose turn it is."""
    loads = [
      s.num_requests / s.engine.max_concurrent_decodes
      for s in self.engines.values()
    ]
    engines = list(self.engines)
    now = {engines[i] for i in self.turns.next(loads)}
    for sampler in self.samplers.values():
      if (engine := id(sampler.engine)) in now:
        self.strands(engine, sampler.dispatch)

  def heard(self, wait_s: float) -> Iterator[tuple[int, Callable[[], None]]]:
    """What the I/O thread finished: (position of the task, what to call).

    Args:
      wait_s: how long to wait for the first of it.
    """
    while self.outside:
      try:
        (owner, number), result = self.rollout.io.finished.get(
          block=wait_s > 0, timeout=wait_s
        )
      except queue.Empty:
        break
      if owner is self and number in self.outside:
        done = self.outside[number]
        go_on = done.heed if isinstance(result, Question) else done.go_on
        if go_on is done.go_on:
          del self.outside[number]
        yield done.position, functools.partial(go_on, result)
      wait_s = 0.0
    now = time.monotonic()
    for number in [n for n, o in self.outside.items() if o.deadline < now]:
      late = self.outside.pop(number)
      error = TimeoutError("it blocks its thread")
      yield late.position, functools.partial(late.go_on, error)

  def _send(
    self,
    position: int,
    awaitable: Any,
    limit_s: float,
    go_on: Callable[[Any], None],
    heed: Callable[[Question], None] | None = None,
  ) -> None:
    """Runs something in the I/O thread, and then `go_on` in this one; `heed`
    for what it asks in between."""
    number = next(self.numbers)
    # A coroutine that blocks cannot be timed out in its own thread.
    deadline = time.monotonic() + limit_s + _LATE_S
    self.outside[number] = _Outside(position, go_on, deadline, heed)
    self.rollout.io.run((self, number), awaitable, limit_s, heed is not None)

  # -- turns -------------------------------------------------------------------

  def _advance(self, play: Play, strand: Strand, value: Any) -> None:
    """Runs a coroutine, and what goes on with it, until all of it waits or has
    ended; however much is answered at once, no deeper in the stack."""
    ready: _Ready = [(strand, value)]
    for _ in range(_MOST_AT_ONCE):
      if not ready or play.done:
        return
      ready += reversed(self._step(play, *ready.pop()))
    what = f"went on {_MOST_AT_ONCE} times without a turn; does its loop end?"
    raise play.blame(what, "running the orchestra", strand.coro)

  def _step(self, play: Play, strand: Strand, value: Any) -> _Ready:
    """Runs a coroutine to its next request, or to its end; returns which go on
    at once, the first of them first, and with what."""
    try:
      asked = strand.coro.send(value)
    except StopIteration as stop:
      return self._finish(play, strand, stop.value)
    except TransientError as e:
      self._fail(play, Fault("orchestra", str(e)))
      return []
    except Exception as e:
      raise play.blame(e, "running the orchestra", strand.coro) from e
    if isinstance(asked, CallRequest):
      self._call(play, strand, asked, strand.next_path())
      return []
    if isinstance(asked, GatherRequest):
      return strand.gather(asked.children)
    if isinstance(asked, ActRequest):
      return self._act(play, strand, asked)
    what = f"awaited {asked!r}; allowed are call(..), act(..), gather(..)"
    raise play.blame(what, "running the orchestra", strand.coro)

  def _finish(self, play: Play, strand: Strand, value: Any) -> _Ready:
    if strand.parent is not None:
      return strand.end(value)
    play.episode.action = value
    self._score(play)
    return []

  def _call(
    self,
    play: Play,
    asker: Strand | Question,
    asked: CallRequest,
    path: tuple[int, ...],
  ) -> None:
    if asked.agent not in self.team.members:
      question = isinstance(asker, Question)
      what = (
        f"the {'environment asked' if question else 'orchestra called'} "
        f"{asked.agent!r}; allowed are {', '.join(self.team.members)}; add it "
        "to agents"
      )
      code = self._scorer if question else asker.coro
      raise play.blame(what, "calling an agent", code)
    member = self.team.members[asked.agent]
    chat, prompt = self._prompt(play, member, asker, asked)
    turn = play.number(path)
    play.waiting[turn] = Asked(
      asker, asked.agent, chat, prompt, time.monotonic()
    )
    request = self._request(play, member, turn, prompt)
    policy = member.config.policy
    if policy in self.rollout.remotes:
      self._post(play, self.rollout.remotes[policy], request, prompt)
    else:
      self.samplers[policy].submit(request, prompt.fault)

  def _request(
    self, play: Play, member: Member, turn: int, prompt: prompts.Prompt
  ) -> Request:
    # Of all episodes of the group it is the same.
    first = turn == 0 and not play.played
    earlier = play.before(turn, member.config.policy)
    return Request(
      id=(*play.key, turn),
      seed=(play.seed, play.episode.index, turn),
      prompt_ids=prompt.ids,
      max_tokens=member.config.max_tokens,
      sampling=play.sampling or member.config.sampling,
      closes=_closes_behind(prompt.opened, agent_lib.closes(member.role.tags)),
      shared_by=len(self.groups[play.key[0]].episodes) if first else 1,
      deadline=time.monotonic() + self.rollout.config.rollout.turn_timeout_s,
      parents=tuple((*play.key, number) for number in earlier),
      head=prompt.head,
      kind=member.name,
    )

  def _post(
    self,
    play: Play,
    endpoint: remote.Endpoint,
    request: Request,
    prompt: prompts.Prompt,
  ) -> None:
    """Asks a remote policy, in the I/O thread."""
    seed = zlib.crc32(repr((self.rollout.seed, *request.seed)).encode()) >> 1
    said = endpoint.complete(
      prompt.messages,
      max_tokens=request.max_tokens,
      sampling=request.sampling,
      seed=seed,
      wanted=lambda: not play.done,
    )
    limit_s = self.rollout.config.rollout.turn_timeout_s
    go_on = functools.partial(self._posted, request, prompt)
    self._send(play.key[0], said, limit_s, go_on)

  def _posted(
    self, request: Request, prompt: prompts.Prompt, said: Any
  ) -> None:
    if isinstance(said, TimeoutError):
      fault = Fault("remote", "past rollout.turn_timeout_s", wall_clock=True)
      call = Call(remote.shown(prompt.messages))
      said = remote.Said("", "fault", call, fault)
    elif isinstance(said, BaseException):
      raise said
    self.answer(
      Completion(
        request,
        ids=prompt.ids,  # it has none, and no log-probs
        logprobs=np.zeros(0, np.float32),
        log_kept_mass=np.zeros(0, np.float32),
        version=0,
        call=said.call,
        fault=said.fault,
        **_until_closed(said, request.closes),
      )
    )

  def _prompt(
    self,
    play: Play,
    member: Member,
    asker: Strand | Question,
    asked: CallRequest,
  ) -> tuple[prompts.Chat | remote.Chat, prompts.Prompt]:
    """Of a chat that goes on, or of one that begins."""
    policy = member.config.policy
    if policy in self.rollout.remotes:
      chat = remote.Chat()
    else:
      chat = prompts.Chat(self.samplers[policy].tokenizer)
    if asked.chat is not None:
      chat = play.chats.setdefault((asked.agent, asked.chat), chat)
    if chat.waits:
      what = (
        f"chat={asked.chat!r}: {asked.agent!r} is called in it while it has "
        "not answered yet; await its reply first, or give each call of a "
        "gather a chat of its own"
      )
      raise play.blame(what, "calling an agent", asker.coro)
    return chat, self._write(play, member, chat, asked.args)

  def _write(
    self,
    play: Play,
    member: Member,
    chat: prompts.Chat | remote.Chat,
    args: tuple,
  ) -> prompts.Prompt:
    """The role's messages, and the prompt that is made of them."""
    role, agent = member.role, member.config
    write, table = role.messages, role.templates
    if chat.begun:
      write, table = role.reply, role.replies
    doing = f"writing a prompt of {member.name!r}"
    code = table.get(agent.template)
    with usercode.blaming(doing, play.where, code):
      messages = write(agent.template, *args)
      if isinstance(chat, remote.Chat):
        return chat.ask(messages)
      engine = self.rollout.config.policies[agent.policy].engine
      return chat.ask(messages, prompts.limit(agent, engine), agent.cut)

  def answer(self, completion: Completion) -> None:
    """Goes on with the episode that asked for a completion."""
    position, episode, turn_index = completion.request.id
    play = self.plays[position, episode]
    if play.done:
      return
    asked = play.waiting.pop(turn_index)
    asked.chat.hear(turn_index, completion.ids, completion.text)
    member = self.team.members[asked.agent]
    reply = self._parse(play, member, asked.prompt.opened, completion)
    play.add(
      Turn(
        agent=asked.agent,
        policy=member.config.policy,
        index=turn_index,
        prompt_ids=completion.request.prompt_ids,
        completion_ids=completion.ids,
        sampler_logprobs=completion.logprobs,
        log_kept_mass=completion.log_kept_mass,
        stop_reason=completion.stop_reason,
        policy_version=completion.version,
        valid=reply is not None and reply.valid,
        text=completion.text,
        reply=reply,
        fault=completion.fault,
        continues=asked.prompt.continues,
        chat_split=asked.prompt.split,
        prompt_cut=asked.prompt.cut,
        call=completion.call,
        counts=completion.call is None and not play.played,
      )
    )
    if isinstance(asked.asker, Question):
      asked.asker.settle(completion.fault or reply)
    elif completion.fault is not None:
      self._fail(play, completion.fault)
    elif not play.done:
      self._advance(play, asked.asker, reply)

  def _parse(
    self, play: Play, member: Member, opened: str, completion: Completion
  ) -> Reply | None:
    if completion.fault is not None:
      return None
    text, parse = opened + completion.text, member.role.parse
    doing = f"parsing a turn of {member.name!r}"
    with usercode.blaming(doing, play.where, parse):
      reply = parse(text, completion.stop_reason, **member.config.options)
    if not isinstance(reply, Reply):
      what = f"parse returned {reply!r}; write a types.Reply"
      raise play.blame(what, doing, parse)
    return reply

  # -- the environment within an episode ---------------------------------------

  def _act(self, play: Play, strand: Strand, asked: ActRequest) -> _Ready:
    """Asks the environment; what takes waiting does so in the I/O thread."""
    environment = self.rollout.config.environment
    if not hasattr(self.team.environment, "act"):
      what = (
        f"the orchestra awaited act(..), and the environment "
        f"{environment.name!r} has none; name one that has, such as 'search'"
      )
      raise play.blame(what, "acting", strand.coro)
    act, path = self.team.environment.act, strand.next_path()
    try:
      with usercode.blaming("acting", play.where, act):
        answer = act(play.episode.task, asked.action)
    except TransientError as e:
      answer = e
    if inspect.isawaitable(answer):
      go_on = functools.partial(self._acted, play, strand, path, asked.action)
      position, limit_s = play.episode.task.position, environment.act_timeout_s
      self._send(position, answer, limit_s, go_on)
      return []
    if self._observe(play, path, asked.action, answer):
      return [(strand, answer)]
    return []

  def _acted(
    self,
    play: Play,
    strand: Strand,
    path: tuple[int, ...],
    action: Any,
    answer: Any,
  ) -> None:
    if play.done:  # it was given up meanwhile
      return
    if self._observe(play, path, action, answer):
      self._advance(play, strand, answer)

  def _observe(
    self, play: Play, path: tuple[int, ...], action: Any, answer: Any
  ) -> bool:
    """Takes what the environment answered; whether the episode goes on."""
    if isinstance(answer, BaseException):
      limit, act = "environment.act_timeout_s", self.team.environment.act
      fault = outside_fault("environment", answer, limit, play, act)
      self._fail(play, fault)
      return False
    play.observed[path] = (action, answer)
    return True

  # -- rewards -----------------------------------------------------------------

  def _score(self, play: Play) -> None:
    self._forget(play)
    play.settle()
    play.played = True
    self.under_way -= 1
    environment = self.team.environment
    task = play.episode.task
    if not self.scored:
      self._end(play)
    elif self.team.scores_groups:
      self._score_group(task)
    else:
      self._ask([play], lambda: environment.score(task, play.episode))

  def _score_group(self, task: Task) -> None:
    """Once all episodes of the task are played; those that failed stay out."""
    plays = [
      self.plays[task.position, e.index]
      for e in self.groups[task.position].episodes
    ]
    good = [p for p in plays if p.episode.status == "ok"]
    if good and all(p.played or p.done for p in plays):
      group = Group(task, [p.episode for p in good])
      self._ask(good, lambda: self.team.environment.score_group(group))

  def _ask(self, plays: list[Play], score: Callable[[], Any]) -> None:
    """Scores plays now, or in the I/O thread where that takes waiting."""
    try:
      with usercode.blaming("scoring", plays[0].where, self._scorer):
        result = score()
    except TransientError as e:
      result = e
    if inspect.isawaitable(result):
      self._send(
        plays[0].episode.task.position,
        result,
        self.team.reward_timeout_s,
        functools.partial(self._scored, plays),
        functools.partial(self._heed, plays[0]),
      )
    else:
      self._scored(plays, result)

  def _heed(self, play: Play, question: Question) -> None:
    """Calls an agent that the reward of a play asks."""
    if play.done:
      question.close()
    else:
      self._call(play, question, question.asked, play.root.next_path())

  def _scored(self, plays: list[Play], result: Any) -> None:
    outcomes = result if self.team.scores_groups else [result]
    if isinstance(result, BaseException):
      limit, code = "environment.reward_timeout_s", self._scorer
      fault = outside_fault("reward", result, limit, plays[0], code)
      outcomes = [fault] * len(plays)
    elif wrong := misscored(plays, outcomes):
      raise plays[0].blame(wrong, "scoring", self._scorer)
    for play, outcome in zip(plays, outcomes, strict=True):
      if play.waiting or play.judged:
        self._hush(play)
      fault = outcome if isinstance(outcome, Fault) else unscored(outcome)
      if fault is None:
        play.episode.outcome = outcome
      else:
        play.episode.status, play.episode.fault = "failed", fault
      self._end(play)

  @property
  def _scorer(self) -> Callable[..., Any]:
    environment = self.team.environment
    if self.team.scores_groups:
      return environment.score_group
    return environment.score

  def _fail(self, play: Play, fault: Fault) -> None:
    """Rule 6: the episode takes no part in statistics or loss."""
    play.episode.status, play.episode.fault = "failed", fault
    play.settle()
    for sampler in self.samplers.values():
      sampler.cancel(lambda r: r.id[:2] == play.key)
    self._forget(play)
    play.close()
    self._end(play)
    if self.scored and self.team.scores_groups:
      self._score_group(play.episode.task)

  def _hush(self, play: Play) -> None:
    """What its reward asked for is over, answered or not."""
    for sampler in self.samplers.values():
      sampler.cancel(lambda r: r.id[:2] == play.key)
    self._forget(play)
    play.close()
    play.settle_judged()

  def _end(self, play: Play) -> None:
    play.done = True
    self.missing -= 1
    self.under_way -= not play.played
    if self.finished is not None:
      self.finished(play.episode)
      play.episode.turns, play.episode.observations = [], []

  def _forget(self, play: Play) -> None:
    """No turn of it follows: what samplers keep of it goes."""
    for sampler in self.samplers.values():
      sampler.forget(*play.key)

  def _abandon(self) -> None:
    """Frees every slot and coroutine; the groups are given up."""
    for sampler in self.samplers.values():
      sampler.cancel(lambda r: True)
      sampler.harvest()
    for play in self.plays.values():
      if not play.done:
        self._give_up(play)

  def _give_up(self, play: Play) -> None:
    self._forget(play)
    play.episode.status = "cancelled"
    play.done = True
    play.close()


def _closes_behind(
  opened: str, closes: Callable[[str], int | None] | None
) -> Callable[[str], int | None] | None:
  """`closes` for what stands behind `opened`."""
  if closes is None or not opened:
    return closes

  def behind(text: str) -> int | None:
    end = closes(opened + text)
    return None if end is None else end - len(opened)

  return behind


def _until_closed(
  said: remote.Said, closes: Callable[[str], int | None] | None
) -> dict[str, Any]:
  """Text and stop reason of what was said, up to where an action closes."""
  end = closes(said.text) if closes and said.fault is None else None
  if end is None:
    return {"text": said.text, "stop_reason": said.stop_reason}
  return {"text": said.text[:end], "stop_reason": "tag"}


def count_tokens(groups: Sequence[Group]) -> int:
  """Sampled tokens of all turns."""
  return int(
    np.sum(
      [
        len(t.completion_ids)
        for g in groups
        for e in g.episodes
        for t in e.turns
      ]
    )
  )
