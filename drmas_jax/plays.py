"""An episode under way: its coroutines, its turns, and how it may fail.

What an orchestra asks for is numbered by where it is read, and not by when it
is answered (`Strand`): turns have their names, seeds and order from that.
"""

import dataclasses
import itertools
import sys
import zlib
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from drmas_jax import config as config_lib
from drmas_jax import prompts, remote, usercode
from drmas_jax.outside import Question
from drmas_jax.types import (
  Episode,
  Fault,
  Outcome,
  TransientError,
  Turn,
  UserError,
)

_MOST = 1e15  # of a reward: its square, summed, is a float32


class Strand:
  """A coroutine of an episode: the orchestra's own, or a child of gather.

  What a strand asks for is numbered within it, and so has a path that does not
  depend on which of several strands is answered first (rule 26): (2,) is the
  third request of the orchestra, (2, 0, 1) the second one of the first child
  of a gather that is this request. Paths sort as the orchestra reads.
  """

  def __init__(
    self,
    coro,
    parent: "Strand | None" = None,
    path: tuple[int, ...] = (),
  ):
    self.coro, self.parent, self.path = coro, parent, path
    self._asked = itertools.count()
    self._results: list[Any] = []  # of the children it waits for
    self._missing = 0

  def next_path(self) -> tuple[int, ...]:
    return (*self.path, next(self._asked))

  def gather(self, children: Sequence[Coroutine]) -> list[tuple["Strand", Any]]:
    """It waits for children; which strands go on now, and with what."""
    if not children:
      return [(self, [])]
    self._results = [None] * len(children)
    self._missing = len(children)
    path = self.next_path()
    return [
      (Strand(child, self, (*path, place)), None)
      for place, child in enumerate(children)
    ]

  def end(self, value: Any) -> list[tuple["Strand", Any]]:
    """It is a child, and has returned; the last one lets its parent go on."""
    parent = self.parent
    parent._results[self.path[-1]] = value
    parent._missing -= 1
    return [] if parent._missing else [(parent, parent._results)]

  def close(self) -> None:
    self.coro.close()


class Asked(NamedTuple):
  """A turn that has been asked for, at `since` by `time.monotonic()`."""

  asker: Strand | Question
  agent: str
  chat: prompts.Chat | remote.Chat
  prompt: prompts.Prompt
  since: float


class Play:
  """An episode under way."""

  def __init__(
    self,
    episode: Episode,
    root: Strand,
    sampling: config_lib.Sampling | None,
    seed: int,
  ):
    self.episode = episode
    self.root = root
    self.sampling = sampling
    self.seed = seed
    self.waiting: dict[int, Asked] = {}
    self.paths: dict[int, tuple[int, ...]] = {}  # of turns, by their numbers
    self.chats: dict[tuple[str, str], prompts.Chat] = {}  # by agent and name
    self.observed: dict[tuple[int, ...], tuple[Any, Any]] = {}  # by path
    self.judged: dict[int, Turn] = {}  # that a reward asked for, by number
    self.played = False  # the orchestra has returned
    self.done = False  # scored, or failed

  @property
  def key(self) -> tuple[int, int]:
    return (self.episode.task.position, self.episode.index)

  def number(self, path: tuple[int, ...]) -> int:
    """Of a turn while its episode goes on: it seeds the turn's sampling."""
    number = path[0]
    if len(path) > 1:
      number = 1 << 30 | zlib.crc32(str(path).encode()) >> 2
      while number in self.paths:
        number += 1
    self.paths[number] = path
    return number

  def before(self, turn: int, policy: str) -> list[int]:
    """Turns of a policy that have ended whenever this one is asked for.

    By their numbers, in the order of their paths. Those that run at the same
    time may have ended, too, or not: they do not count (rule 26). Nor do any
    for a turn that a reward asks for: nothing is kept of them any more.
    """
    if self.played:
      return []
    path = self.paths[turn]
    return sorted(
      (
        t.index
        for t in self.episode.turns
        if t.policy == policy
        and t.fault is None
        and _precedes(self.paths[t.index], path)
      ),
      key=self.paths.__getitem__,
    )

  def add(self, turn: Turn) -> None:
    """Takes a turn whose index is still its number."""
    if self.played:
      self.judged[turn.index] = turn
    else:
      self.episode.turns.append(turn)

  def settle_judged(self) -> None:
    """Puts the turns that a reward asked for behind the others."""
    turns = self.episode.turns
    for _, turn in sorted(self.judged.items()):
      turns.append(dataclasses.replace(turn, index=len(turns)))

  def settle(self) -> None:
    """Puts turns and observations in the order of their paths, and numbers
    the turns so."""
    self.episode.observations = [v for _, v in sorted(self.observed.items())]
    turns = sorted(self.episode.turns, key=lambda t: self.paths[t.index])
    places = {turn.index: place for place, turn in enumerate(turns)}
    self.episode.turns = [
      dataclasses.replace(
        turn, index=place, continues=places.get(turn.continues)
      )
      for place, turn in enumerate(turns)
    ]

  @property
  def where(self) -> str:
    """Which one it is, for people."""
    task = self.episode.task
    return f"task {task.source}[{task.index}], episode {self.episode.index}"

  def blame(
    self, what: BaseException | str, doing: str, code: Any
  ) -> UserError:
    """See `usercode.describe`."""
    return UserError(usercode.describe(what, doing, self.where, code))

  def close(self) -> None:
    """Gives up its coroutines, and those that wait for a turn of it.

    What their own code raises on the way out is told, and changes nothing: the
    episode is over.
    """
    askers = [asked.asker for asked in self.waiting.values()]
    for asker in dict.fromkeys([*askers, self.root]):
      try:
        asker.close()
      except Exception as e:
        said = usercode.describe(e, "giving up the episode", self.where)
        print(f"drmas_jax: {said}", file=sys.stderr, flush=True)


def _precedes(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
  """Whether the turn of a path is asked for because another one has ended.

  Paths are numbers of requests and, between these, places in a gather. What a
  strand asks for comes behind all that it asked for before, children of a
  gather among it; children of one gather do not wait for each other.
  """
  for i, (left, right) in enumerate(zip(one, other, strict=False)):
    if left != right:
      return i % 2 == 0 and left < right
  return False


# -- how it may fail -----------------------------------------------------------


def misscored(plays: Sequence[Play], outcomes: Any) -> str:
  """What is wrong with the outcomes of episodes; "" if nothing is."""
  if not isinstance(outcomes, Sequence) or len(outcomes) != len(plays):
    return (
      f"returned {outcomes!r} for {len(plays)} episodes; write one for each"
    )
  found = (
    _misscored(play.episode, outcome)
    for play, outcome in zip(plays, outcomes, strict=True)
  )
  return next(filter(None, found), "")


def _misscored(episode: Episode, outcome: Any) -> str:
  if not isinstance(outcome, Outcome):
    return f"returned {outcome!r}; write a types.Outcome"
  if isinstance(outcome.reward, Mapping):
    agents = {turn.agent for turn in episode.turns if turn.counts}
    if missing := sorted(agents - outcome.reward.keys()):
      return (
        f"returned no reward for {', '.join(missing)}; write one for each "
        "agent that has spoken, or one number for the team"
      )
  if not isinstance(outcome.turn_rewards, Mapping):
    return (
      f"returned {outcome.turn_rewards!r} as turn_rewards; write a dict, from "
      "the indices of turns"
    )
  if strange := set(outcome.turn_rewards) - set(range(len(episode.turns))):
    return (
      f"returned turn_rewards of {sorted(map(repr, strange))}; allowed are the "
      f"indices of the episode's {len(episode.turns)} turns, from 0"
    )
  named = {f"the part {name!r}": v for name, v in outcome.parts.items()}
  named |= {
    f"the reward of {w}": r for w, r in _rewards(outcome) if r is not None
  }
  for what, number in named.items():
    if not _is_number(number):
      return f"returned {number!r} as {what}; write a number"
  return ""


def _is_number(value: Any) -> bool:
  try:
    float(value)
  except (TypeError, ValueError):
    return False
  return not isinstance(value, str)


def unscored(outcome: Outcome) -> Fault | None:
  """Why an outcome is no score: a reward of it is missing, or not finite.

  The episode is lost then (rule 6); or no mean that it is in would be finite.
  """
  for whose, reward in _rewards(outcome):
    if reward is None or not abs(float(reward)) <= _MOST:
      return Fault(
        "reward",
        f"the reward of {whose} is {reward}; allowed are finite numbers of at "
        f"most {_MOST:.0e} in size",
      )
  return None


def _rewards(outcome: Outcome) -> Iterator[tuple[str, Any]]:
  """(whose, reward) of the team or its agents, and of turns."""
  if isinstance(outcome.reward, Mapping):
    yield from outcome.reward.items()
  else:
    yield "the team", outcome.reward
  for index, reward in outcome.turn_rewards.items():
    yield f"turn {index}", reward


def outside_fault(
  kind: str, error: BaseException, limit: str, play: Play, code: Any
) -> Fault:
  """Of what a coroutine of the environment raised, if the world outside was to
  blame: a time limit, a connection or another `OSError`, a `TransientError`.

  Args:
    kind: "environment" or "reward".
    error: what was raised.
    limit: the key of its time limit.
    play: that it was raised for.
    code: the method that raised it.

  Raises:
    UserError: it is no such thing.
  """
  if isinstance(error, TimeoutError):
    return Fault(kind, f"past {limit}", True)
  clock = isinstance(error, TransientError) and error.wall_clock
  outside = isinstance(error, (TransientError, OSError))
  if isinstance(error, Exception) and not outside:
    doing = (
      f"{'scoring' if kind == 'reward' else 'acting'} (a types.TransientError "
      "would lose the episode, and not the run)"
    )
    raise play.blame(error, doing, code) from error
  return Fault(kind, f"{type(error).__name__}: {error}", clock)
