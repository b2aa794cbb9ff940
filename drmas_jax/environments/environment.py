"""What rewards an episode.

A module of this folder has `make(*, option=..) -> Environment`; its
keyword-only parameters are the options of the config's entry.
"""

from collections.abc import Awaitable, Sequence
from typing import Protocol

from drmas_jax.types import Episode, Group, Outcome, Task


class Environment(Protocol):
  """Scores episodes one by one, or a whole group once it is complete.

  Attributes:
    scores_groups: which of the two methods is called; the other may be absent.

  An exception that `score` or `score_group` raises stops the run, except
  `types.TransientError`, which loses the episode (or the group's) alone.
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
