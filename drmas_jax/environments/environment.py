"""What rewards an episode, and what answers within it.

A module of this folder has `make(*, option=..) -> Environment`; its
keyword-only parameters are the options of the config's entry. Agents that its
rewards ask (`types.ask`) are named in its `JUDGES`, a tuple.
"""

from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

from drmas_jax.types import Episode, Group, Outcome, Task


class Environment(Protocol):
  """Scores episodes one by one with `score`, or with `score_group`, if it has
  one, all of a task once they are complete. `act` may be absent, where no
  orchestra asks for it.

  A `types.TransientError`, what a coroutine does not do within its limit, and
  an `OSError` of a coroutine (a connection that is cut) depend on the world
  outside: they lose their episodes and no more. Any other exception is a bug,
  and stops the run.
  """

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
