"""What rewards an episode, and what answers within it.

A module of this folder has `make(*, option=..) -> Environment`; its
keyword-only parameters are the options of the config's entry.
"""

from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

from drmas_jax.types import Episode, Group, Outcome, Task


class Environment(Protocol):
  """Scores episodes one by one, or a whole group once it is complete.

  `act` may be absent, where no orchestra asks for it.

  Attributes:
    scores_groups: which of the two `score` methods is called; the other may be
      absent.

  What a coroutine raises, or a time limit, loses its episodes and no more: it
  depends on the world outside. An exception of a plain function is a bug and
  stops the run, except `types.TransientError`, which loses the episodes.
  """

  scores_groups: bool

  def score(self, task: Task, episode: Episode) -> Outcome | Awaitable[Outcome]:
    """The outcome of one finished episode."""
    ...

  def score_group(
    self, group: Group
  ) -> Sequence[Outcome] | Awaitable[Sequence[Outcome]]:
    """The outcomes of all episodes of one task, in their order."""
    ...

  def act(self, task: Task, action: Any) -> Any | Awaitable[Any]:
    """What an orchestra's `await types.act(action)` returns.

    It is kept in `Episode.observations`. A coroutine runs in the rollout's I/O
    thread, where it must not block, for `environment.act_timeout_s` at most.
    """
    ...
