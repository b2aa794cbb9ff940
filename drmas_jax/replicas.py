"""Several engines of one policy behind the interface of one sampler.

    submit    to the engine that the episode began on; a new episode goes where
              the others are that share its prompt, or else to the engine with
              the fewest tokens still to do
    dispatch  a run is started on every engine; nothing is waited for
    harvest   the runs are read, in the order of the engines

An episode's kept prefixes are where it began. All engines run the same programs
on the same shapes, so what a request comes to does not depend on its engine.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from drmas_jax.sampler import Completion, Counts, Request, Sampler
from drmas_jax.tokenizer import Tokenizer
from drmas_jax.types import Fault


class Engines:
  """What the engines of a policy have in common, read and set for all."""

  def __init__(self, samplers: Sequence[Sampler]):
    self._all = [s.engine for s in samplers]

  @property
  def spec(self) -> Any:
    """Of the first; the others differ in their meshes."""
    return self._all[0].spec

  @property
  def devices(self) -> frozenset[Any]:
    return frozenset().union(*(engine.devices for engine in self._all))

  @property
  def shapes(self) -> set[tuple[str, str]]:
    return set().union(*(engine.shapes for engine in self._all))

  @property
  def max_concurrent_decodes(self) -> int:
    return sum(engine.max_concurrent_decodes for engine in self._all)

  @property
  def key(self) -> Any:
    return self._all[0].key

  @key.setter
  def key(self, key: Any) -> None:
    for engine in self._all:
      engine.key = key

  @property
  def version(self) -> int:
    return self._all[0].version

  @version.setter
  def version(self, version: int) -> None:
    for engine in self._all:
      engine.version = version


class Replicas:
  """See the module's docstring."""

  def __init__(self, samplers: Sequence[Sampler]):
    self.samplers = tuple(samplers)
    self.engine = Engines(samplers)
    self._load = [0] * len(samplers)  # tokens still to do, at most
    self._placed: dict[tuple[int, int, int], tuple[Request, int]] = {}
    # Of each task, where its episodes began, and its shared prompts by turn.
    self._episodes: dict[int, dict[int, int]] = {}
    self._shared: dict[int, dict[int, int]] = {}

  @property
  def tokenizer(self) -> Tokenizer:
    return self.samplers[0].tokenizer

  @property
  def busy(self) -> bool:
    return any(s.busy for s in self.samplers)

  @property
  def num_requests(self) -> int:
    return sum(s.num_requests for s in self.samplers)

  @property
  def num_running(self) -> int:
    return sum(s.num_running for s in self.samplers)

  @property
  def counts(self) -> Counts:
    """Of all engines together."""
    each = [dataclasses.astuple(s.counts) for s in self.samplers]
    return Counts(*map(sum, zip(*each, strict=True)))

  def resume(self, params: Sequence[Any], version: int) -> None:
    """Takes the weights of each engine; all that is kept is dropped."""
    for sampler, own in zip(self.samplers, params, strict=True):
      sampler.resume(own, version)
    self._episodes.clear()
    self._shared.clear()

  def release(self) -> None:
    for sampler in self.samplers:
      sampler.release()

  def submit(self, request: Request, fault: Fault | None = None) -> None:
    """Queues a request on one engine; see `Sampler.submit`."""
    place = self._place(request)
    self.samplers[place].submit(request, fault)
    self._placed[request.id] = request, place
    self._load[place] += _tokens(request)

  def cancel(self, wanted: Callable[[Request], bool]) -> None:
    """Drops requests, waiting or running; nothing comes back for them."""
    for request, _ in list(self._placed.values()):
      if wanted(request):
        self._settle(request)
    for sampler in self.samplers:
      sampler.cancel(wanted)

  def forget(self, position: int, episode: int) -> None:
    """The episode is over: its kept sequences go."""
    for sampler in self.samplers:
      sampler.forget(position, episode)
    episodes = self._episodes.get(position, {})
    episodes.pop(episode, None)
    if not episodes:
      self._episodes.pop(position, None)
      self._shared.pop(position, None)

  def dispatch(self) -> None:
    """Starts a run on every engine that has work; does not wait."""
    for sampler in self.samplers:
      sampler.dispatch()

  def harvest(self) -> list[Completion]:
    """Waits for the runs started last; returns what ended."""
    done = [c for sampler in self.samplers for c in sampler.harvest()]
    for completion in done:
      self._settle(completion.request)
    return done

  def progress(self) -> dict[tuple[int, int, int], tuple[list, list]]:
    """Of running requests; see `Sampler.progress`."""
    return {
      key: so_far
      for sampler in self.samplers
      for key, so_far in sampler.progress().items()
    }

  def _place(self, request: Request) -> int:
    """The number of the request's engine."""
    position, episode, turn = request.id
    episodes = self._episodes.setdefault(position, {})
    place = episodes.get(episode)
    if place is None and request.shared_by > 1:
      least = self._load.index(min(self._load))
      place = self._shared.setdefault(position, {}).setdefault(turn, least)
    elif place is None:
      place = self._load.index(min(self._load))
    episodes[episode] = place
    return place

  def _settle(self, request: Request) -> None:
    _, place = self._placed.pop(request.id)
    self._load[place] -= _tokens(request)


class Seat:
  """One policy's view of the engines that it shares with others.

  Its requests carry its index. A run is of all policies at once, so the first
  one's `dispatch` starts it and its `harvest` hands back what ended, for all.
  """

  def __init__(self, samplers: Replicas, policy_index: int):
    self._samplers = samplers
    self._policy_index = policy_index

  def submit(self, request: Request, fault: Fault | None = None) -> None:
    request = dataclasses.replace(request, policy_index=self._policy_index)
    self._samplers.submit(request, fault)

  def dispatch(self) -> None:
    if not self._policy_index:
      self._samplers.dispatch()

  def harvest(self) -> list[Completion]:
    return [] if self._policy_index else self._samplers.harvest()

  def __getattr__(self, name: str) -> Any:
    return getattr(self._samplers, name)


def _tokens(request: Request) -> int:
  return len(request.prompt_ids) + request.max_tokens
