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

import dataclasses
import types as _types
from collections.abc import Awaitable, Coroutine, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

StopReason = Literal["stop", "tag", "length", "fault"]
Status = Literal["ok", "failed", "cancelled"]


@dataclasses.dataclass(frozen=True)
class Fault:
  """Why something has no result; a value, so that nothing is lost with it.

  Attributes:
    kind: "deadline", "environment", "reward", "prompt", "request", "cancelled",
      "worker".
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


class RunError(RuntimeError):
  """The run cannot go on; `main` exits with code 3."""


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


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What an environment says of an episode.

  Attributes:
    reward: one number for the team, or one per agent's name.
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
    turns: in the order in which the orchestra reads.
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
  return await request(GatherRequest(tuple(children)))
