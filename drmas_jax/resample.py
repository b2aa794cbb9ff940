"""Dynamic sampling: which groups a step is made of, of those that were played.

Groups whose rewards tell nothing apart teach nothing; `data.resample` rounds of
fresh tasks are played in their place.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from drmas_jax import config as config_lib
from drmas_jax import data, hosts, rewards
from drmas_jax.types import Group, Task

# Groups of the tasks, or none if the step is given up.
Play = Callable[[Sequence[Task]], tuple[list[Group], bool]]


class Played(NamedTuple):
  """What a step's rollout came to, on this host.

  Attributes:
    groups: that are trained on, in the order of the stream.
    replaced: by some of these, since their rewards tell nothing apart.
    rounds: in which such groups were replaced, on any host.
    cursor: of the stream, behind the tasks of all hosts.
    stopped: the step is given up.
  """

  groups: list[Group]
  replaced: list[Group]
  rounds: int
  cursor: int
  stopped: bool

  @property
  def all(self) -> list[Group]:
    return self.groups + self.replaced


def collect(
  config: config_lib.Config, stream: data.Stream, cursor: int, play: Play
) -> Played:
  """Plays this host's tasks and, if so configured, fresh ones in the place of
  those whose rewards tell nothing apart.

  In a further round every host plays as many as it lacks, each the tasks behind
  those of the hosts before it, so that the cursor is the same on all. What is
  lacking after the last round is made up for with the first others.

  Args:
    config: of the run.
    stream: of its tasks.
    cursor: where the step begins in it.
    play: plays tasks; (their groups, False), or ([], True) to give up.
  """
  settings, tolerance = config.data, config.advantage.zero_tolerance
  tasks = hosts.share(stream.tasks(cursor, settings.num_tasks))
  cursor += settings.num_tasks
  wanted, rounds = len(tasks), 0
  telling: list[Group] = []
  flat: list[Group] = []
  while True:
    groups, stopped = play(tasks)
    for group in groups:
      (telling if rewards.is_mixed(group, tolerance) else flat).append(group)
    if rounds == settings.resample:
      break
    mine = wanted - len(telling)
    missing = _missing(mine, stopped, config.placement.timeout_s)
    if not any(missing):
      break
    first = cursor + sum(missing[: jax.process_index()])
    tasks = stream.tasks(first, missing[jax.process_index()])
    cursor += sum(missing)
    rounds += 1
  lacking = wanted - len(telling)
  groups = sorted(telling + flat[:lacking], key=lambda g: g.task.position)
  return Played(groups, flat[lacking:], rounds, cursor, stopped)


def _missing(mine: int, stopped: bool, timeout_s: float) -> list[int]:
  """How many groups each host plays again; none if one has given up."""
  shares = hosts.agree(
    "resample", {"missing": mine, "stopped": int(stopped)}, timeout_s
  )
  if any(s["stopped"] for s in shares):
    return []
  return [s["missing"] for s in shares]
