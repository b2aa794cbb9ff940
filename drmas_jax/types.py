"""The values that flow through a step, and the legend of shape letters.

    Task --orchestra--> Turn.. --environment--> Outcome   = Episode
    G episodes of one task                                = Group
    turns of all groups --batching--> Batch (per backbone) --learner--> state

Shape letters, used in every module: P tasks, G episodes in a group, N turns,
B rows, T tokens, V vocabulary; in models D embed, H heads, K kv heads, C head
dim, F mlp, S cache length, L layers.

Orchestras, agents and environments import this module and nothing else of the
package: what is here is what a user's own team may rely on.
"""

import contextvars
import dataclasses
import types as _types
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

StopReason = Literal["stop", "tag", "length", "fault"]
Status = Literal["ok", "failed", "cancelled"]


@dataclasses.dataclass(frozen=True)
class Fault:
  """Why something has no result; a value, so that nothing is lost with it.

  Attributes:
    kind: "deadline", "environment", "reward", "prompt", "request", "remote",
      "cancelled", "worker".
    message: one sentence for a person.
    wall_clock: True where a clock decided, so that the run is no longer
      reproducible bit for bit (RULES 26 in the docs of `metrics`).
  """

  kind: str
  message: str
  wall_clock: bool = False


class TransientError(Exception):
  """What user code raises to lose one episode instead of the whole run.

  Attributes:
    wall_clock: whether a clock decided, see `Fault`.
  """

  wall_clock = False


class Stopped(Exception):
  """What a heartbeat raises: the rollout under way is given up."""


class RunError(RuntimeError):
  """The run cannot go on; `main` exits with code 3."""


class UserError(RunError):
  """Code of the user's own failed; the message names its file and line."""


@dataclasses.dataclass(frozen=True)
class Task:
  """One problem.

  Attributes:
    source: key of the data set in the config.
    index: row of the data set.
    position: place in the endless stream (data.py); it seeds the sampling.
    question: the text shown to agents. Foreign text: never parsed.
    answer: what the environment compares with.
    info: further fields of the row.
  """

  source: str
  index: int
  position: int
  question: str
  answer: Any
  info: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Reply:
  """What an agent's parser reads from a completion; given to the orchestra.

  Attributes:
    text: what other agents and the environment may see of it.
    valid: False costs the agent's `invalid_penalty`.
    verdict: a decision (approve, search, ..) where the role makes one.
    labels: booleans and numbers to be averaged into metrics by agent.
  """

  text: str
  valid: bool = True
  verdict: str | None = None
  labels: Mapping[str, float] = dataclasses.field(default_factory=dict)


# -- roles --------------------------------------------------------------------

Content = str | list[str]
Message = dict[str, Content]
Template = Callable[..., list[Message]]


class Foreign(str):
  """A part of a message's content that may be shortened.

  Where a prompt is too long for its limit, parts of a high age lose text first,
  down to nothing; those of age 0 come last and always keep some of both their
  ends. Plain strings beside them (the template's own words, the question) stay.

  Attributes:
    age: 0 for what the agent is asked about now, and for the newest of a kind.
  """

  __slots__ = ("age",)

  def __new__(cls, text: str, age: int = 0) -> "Foreign":
    self = super().__new__(cls, text)
    self.age = age
    return self


@dataclasses.dataclass(frozen=True)
class Agent:
  """A role: how its prompt is written, how its completion is read.

  Attributes:
    templates: by name, functions from the orchestra's arguments (the task,
      then whatever it passes on) to chat messages. "default" must be there.
    parse: `parse(text, stop_reason, *, option=..) -> Reply` reads a completion,
      behind the `<think>` that the prompt ends with where a chat template opens
      the reasoning; its keyword-only parameters are the options of the agent's
      config entry.
    tags: names of the action blocks at whose end sampling stops. Empty where
      the whole completion is the action.
    replies: by the same names, what a later call of the same chat adds: new
      messages, from the arguments of that call. A role may be without.
    examples: valid completions, for `--mode=check`: an agent's calls get them
      in turns. "{answer}" in one stands for the task's answer. A role may be
      without.
    verdicts: those among which it decides (`Reply.verdict`). The share of each
      is a metric, and a role that always gives one raises an alarm. Empty: it
      has no choice.
  """

  templates: Mapping[str, Template]
  parse: Callable[..., Reply]
  tags: tuple[str, ...] = ()
  replies: Mapping[str, Template] = dataclasses.field(default_factory=dict)
  examples: tuple[str, ...] = ()
  verdicts: tuple[str, ...] = ()

  def messages(self, template: str, *args) -> list[Message]:
    """The chat messages of one turn: [{"role": .., "content": ..}].

    A content is a string, or a list of strings to be joined, of which those
    that may be shortened are `Foreign`.
    """
    return self.templates[template](*args)

  def reply(self, template: str, *args) -> list[Message]:
    """The messages that a later call of a chat adds.

    Raises:
      ValueError: the role cannot continue a chat.
    """
    if template not in self.replies:
      raise ValueError(
        f"chat=: the role has no replies[{template!r}] to go on with; allowed "
        f"are {', '.join(self.replies) or 'none'}; add one to the Agent, or "
        "call it without chat="
      )
    return self.replies[template](*args)


# -- what becomes of an episode -----------------------------------------------


@dataclasses.dataclass(frozen=True)
class Call:
  """What a turn of a remote policy took.

  Attributes:
    prompt: what was asked, for people.
    prompt_tokens, completion_tokens: as the reply counts them; 0 if it does
      not.
    retries: tries behind the first one.
    cached: it was known, and nobody was asked.
    cost: by the prices of the policy; 0 for one that was known.
  """

  prompt: str
  prompt_tokens: int = 0
  completion_tokens: int = 0
  retries: int = 0
  cached: bool = False
  cost: float = 0.0


@dataclasses.dataclass(frozen=True)
class Turn:
  """One LLM call by one agent: the training row.

  Attributes:
    agent: name of the role that spoke.
    policy: name of the policy that played it.
    index: number of the call within its episode, in the order in which the
      orchestra reads.
    prompt_ids: [prompt] int32.
    completion_ids: [completion] int32, as sampled, end token included.
    sampler_logprobs: [completion] float32, under the tempered full softmax.
    log_kept_mass: [completion] float32 at most 0, log-probability of the set
      that top-k and top-p kept.
    stop_reason: "stop" (an end token), "tag" (an action block closed),
      "length" (cut), "fault".
    policy_version: number of updates behind the weights that sampled it.
    valid: as parsed.
    text: the completion decoded, cut where its action block closes.
    reply: what the parser made of it; None if the turn failed.
    fault: why there is no completion, if there is none.
    continues: index of the turn of the same chat whose prompt and completion
      `prompt_ids` begin with; None: there is none.
    chat_split: its chat had such a turn, and could not go on with its ids.
    prompt_cut: the prompt was too long, and something of it had to go.
    call: of a remote policy: what it took. There are no ids then, and no
      log-probs.
    counts: whether it is a row: False for those of remote policies, and for
      those that a reward asked for, which are in no statistics and no loss.
  """

  agent: str
  policy: str
  index: int
  prompt_ids: np.ndarray
  completion_ids: np.ndarray
  sampler_logprobs: np.ndarray
  log_kept_mass: np.ndarray
  stop_reason: StopReason
  policy_version: int
  valid: bool
  text: str = ""
  reply: Reply | None = None
  fault: Fault | None = None
  continues: int | None = None
  chat_split: bool = False
  prompt_cut: bool = False
  call: Call | None = None
  counts: bool = True

  @property
  def num_tokens(self) -> int:
    """Of the completion, wherever it was sampled."""
    if self.call is not None:
      return self.call.completion_tokens
    return len(self.completion_ids)

  @property
  def num_prompt_tokens(self) -> int:
    if self.call is not None:
      return self.call.prompt_tokens
    return len(self.prompt_ids)


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What an environment says of an episode.

  Attributes:
    reward: one number for the team, or one per agent's name. Where it is None
      or not finite the episode is lost (rule 6).
    turn_rewards: extra reward by turn index (a turn left out gets 0).
    parts: named numbers behind the reward, logged.
    success: what evaluation counts; by default reward >= 1 of a team reward.
    answer: the final answer in a normal form, by which evaluation takes votes;
      none: no answer was given.
  """

  reward: float | Mapping[str, float]
  turn_rewards: Mapping[int, float] = dataclasses.field(default_factory=dict)
  parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
  success: bool | None = None
  answer: str | None = None

  def of(self, agent: str) -> float:
    """The reward of one agent, or the team's where there is only one."""
    if isinstance(self.reward, Mapping):
      return float(self.reward[agent])
    return float(self.reward)

  @property
  def won(self) -> bool:
    if self.success is not None:
      return bool(self.success)
    if isinstance(self.reward, Mapping):
      return all(r >= 1 for r in self.reward.values())
    return self.reward >= 1


@dataclasses.dataclass
class Episode:
  """One attempt of the team at a task.

  Attributes:
    turns: in the order in which the orchestra reads; those that a reward asked
      for come last.
    action: what the orchestra returned.
    observations: (action, what the environment answered) of each `act`, in the
      same order.
  """

  task: Task
  index: int
  turns: list[Turn] = dataclasses.field(default_factory=list)
  action: Any = None
  outcome: Outcome | None = None
  status: Status = "ok"
  fault: Fault | None = None
  observations: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Group:
  """The G episodes of one task."""

  task: Task
  episodes: list[Episode]


class Spread(NamedTuple):
  """Where attention looks, in rows whose chats share their beginnings (`trie`).

  Each row of W tokens has A rows of T tokens, in which chats are whole. Places
  are counted in pages of g tokens.

  Attributes:
    source: [B, A, T / g] int32, place in the row of the page that stands here.
    segment_ids: [B, A, T] int32, 1.. per chat, 0 for padding.
    home: [B, W / g] int32, place in the A rows of each page of the row.
  """

  source: Any
  segment_ids: Any
  home: Any


class Batch(NamedTuple):
  """Packed rows of one backbone, all [B, T]; a padding token has mask 0.

  Attributes:
    tokens: int32 ids.
    mask: float32, 1 where the policy sampled the token (rule 7).
    positions: int32 within the segment.
    segment_ids: int32, 1.. per chat in a row, 0 for padding.
    policy_index: [B] int32, the adapter of a row; 0 until adapters exist.
    agent_index: int32 into the run's sorted agent names.
    turn_index: int32 into the step's [N] turns.
    weights: float32 factor of a token in the loss; 0 for padding.
    sampler_logprobs: float32, 0 where mask is 0.
    log_kept_mass: float32, 0 where mask is 0.
    sampled: [B, H] int32, places in the row where mask is 1, rising, and T
      behind them; None: nobody looks for them, all logits are computed.
    spread: of rows whose chats share tokens; None: each is whole.
  """

  tokens: Any
  mask: Any
  positions: Any
  segment_ids: Any
  policy_index: Any
  agent_index: Any
  turn_index: Any
  weights: Any
  sampler_logprobs: Any
  log_kept_mass: Any
  sampled: Any = None
  spread: Spread | None = None


class TrainState(NamedTuple):
  """What a checkpoint holds of a policy. `step` counts its own updates."""

  step: Any
  params: Any
  opt_state: Any


# -- requests: what `call`, `act` and `gather` hand to the rollout loop -------


@dataclasses.dataclass(frozen=True)
class CallRequest:
  """One turn to be played: a named agent, and what its prompt is made of.

  With a `chat`, the turn continues the agent's chat of that name, if it has
  been begun in the episode.
  """

  agent: str
  args: tuple
  chat: str | None = None


@dataclasses.dataclass(frozen=True)
class ActRequest:
  """Something that the environment is to do within the episode."""

  action: Any


@dataclasses.dataclass(frozen=True)
class GatherRequest:
  """Several awaitables to be run at the same time."""

  children: tuple[Coroutine, ...]


@_types.coroutine
def request(value):
  """Hands `value` to the rollout loop and returns what it answers."""
  return (yield value)


async def act(action: Any) -> Any:
  """What the environment answers, such as passages to a query.

  Meanwhile the episode holds no slot and no thread, and others go on. Without
  an answer (`Environment.act` fails, or is too late) the episode is lost, and
  this never returns.
  """
  return await request(ActRequest(action))


async def gather(*children: Awaitable) -> list:
  """Runs calls at the same time; results in the order of the arguments.

  An episode's turns are ordered as the orchestra reads, children in the order
  of the arguments, whichever ends first; and so are the seeds of its sampling.
  """
  for child in children:
    if not hasattr(child, "send"):
      raise TypeError(f"gather({child!r}): write gather(*coroutines)")
  return await request(GatherRequest(tuple(children)))


Asker = Callable[[CallRequest], Awaitable[Reply]]
ASKER: contextvars.ContextVar[Asker] = contextvars.ContextVar("asker")


async def ask(agent: str, *args: Any) -> Reply:
  """What an agent says to a reward that is a coroutine: a judge.

      JUDGES = ("judge",)

      async def score(self, task, episode):
        verdict = await ask("judge", task, episode.action)
        return Outcome(reward=float(verdict.verdict == "approve"))

  The agent has an entry in the config as any other, with a frozen or a remote
  policy, and its name is in `JUDGES` of the environment's module. Its turns are
  added to the episode's (of a group that is scored whole, to its first one's)
  and are no rows. Several may be asked at once (`asyncio.gather`).

  Args:
    agent: its name.
    *args: what the role's template takes.

  Raises:
    TransientError: it has no answer; uncaught, the episode is lost.
  """
  try:
    asker = ASKER.get()
  except LookupError:
    raise RuntimeError(
      f"ask({agent!r}, ..): only a reward that is a coroutine may ask; an "
      "orchestra has its `call`"
    ) from None
  return await asker(CallRequest(agent, args))
