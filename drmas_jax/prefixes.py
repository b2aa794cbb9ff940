"""What stays in an engine's cache beside the sequences that run.

    turns     sequences of turns that have ended, until their episode is over
    prompts   prefilled once for the requests of a group that share them
    heads     what a template begins with, shared between tasks

What a request goes on from is decided by the request alone (`choose`), so that
its shapes, and with them its numbers, never depend on what happens to be here
(rule 26): a turn is never lost, but moved to the host and back as it is; a
prompt or a head that had to go is prefilled again as it was.

Room is made in this order: the pool grows as far as it may; the turns kept
longest go to the host; prompts and heads are dropped. What running sequences
need is pinned, and never goes.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from drmas_jax import decoding
from drmas_jax import engine as engine_lib
from drmas_jax.pages import Pages, needed
from drmas_jax.tokenizer import common_length

_LEAST = 16  # tokens in common that are worth going on from
_MOST_HEADS = 8

TurnId = tuple[int, int, int]  # task position, episode, turn


@dataclasses.dataclass(eq=False)
class Prefix:
  """Tokens that are in the cache, or in a copy of its pages on the host.

  Attributes:
    num_tokens: how many.
    pages: theirs; none while there is a copy.
    version: of the weights behind them; None: they have been given up.
    copy: from `PolicyEngine.spill`.
  """

  num_tokens: int
  pages: list[int]
  version: int | None
  copy: Any = None


@dataclasses.dataclass(eq=False)
class Row:
  """A chunk, and once it is prefilled, which row of what it came to."""

  chunk: decoding.Chunk
  hidden: Any = None
  index: int = 0


@dataclasses.dataclass(eq=False)
class Prompt(Prefix):
  """A prefilled prompt; `row` has its last hidden state."""

  row: Row | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Turn:
  """A turn that has ended.

  Attributes:
    ids: [tokens] of its prompt and completion.
    prefix: what is kept of it; it begins with `ids`.
    exact: the engine stopped at the last of them.
  """

  ids: np.ndarray
  prefix: Prefix
  exact: bool


class Source(NamedTuple):
  """What a request goes on from.

  Attributes:
    start: tokens of its prompt that are not prefilled for it; 0: it begins.
    turn: they are of this turn's sequence.
    head: the policy's index and their bytes, if they are a template's head.
  """

  start: int = 0
  turn: Turn | None = None
  head: tuple[int, bytes] | None = None


class Asks(Protocol):
  """Of a request, what `choose` looks at; see `sampler.Request`."""

  prompt_ids: np.ndarray
  shared_by: int
  parents: Sequence[TurnId]
  head: int
  policy_index: int


@dataclasses.dataclass
class Counts:
  """What requests have cost, in all.

  Attributes:
    prompt_tokens: of the prompts of those that were given a slot.
    prefilled_tokens: of these, prefilled and not found in the cache.
    completion_tokens: sampled and kept.
    steps: decode steps.
    slot_steps: the same times the number of slots.
    busy_steps: of `slot_steps`, those with a sequence in the slot.
    parked: how often a running sequence had to make room.
    spilled: how often a kept turn was moved to the host.
  """

  prompt_tokens: int = 0
  prefilled_tokens: int = 0
  completion_tokens: int = 0
  steps: int = 0
  slot_steps: int = 0
  busy_steps: int = 0
  parked: int = 0
  spilled: int = 0


class Prefixes:
  """See the module's docstring.

  Attributes:
    pages: of the engine's pool.
    prompts: by the keys that their requests have in common.
    new_heads: heads whose prefill is still to be started.
  """

  def __init__(self, engine: engine_lib.PolicyEngine, counts: Counts):
    self._engine, self._counts = engine, counts
    self._size = engine.spec.page_size
    self.clear()

  def clear(self) -> None:
    """Everything goes; the pool is empty."""
    self.pages = Pages(self._engine.num_pages)
    self.prompts: dict[Any, Prompt] = {}
    self.new_heads: list[Row] = []
    self._heads: collections.OrderedDict[tuple[int, bytes], Prefix] = (
      collections.OrderedDict()
    )
    self._turns: dict[tuple[int, int], dict[int, Turn]] = {}
    self._resident: dict[Prefix, None] = {}  # of turns, the longest kept first
    self._held: list[int] = []

  # -- memory ------------------------------------------------------------------

  @property
  def available(self) -> int:
    """Pages that can be had: all but those that are pinned."""
    return self._engine.spec.max_pages - 1 - self.pages.num_pinned

  def take(self, num: int) -> list[int]:
    """`num` pages; at most `available`."""
    while self.pages.num_free < num and self._make_room(num):
      pass
    return self.pages.take(num)

  def _make_room(self, num: int) -> bool:
    """Does one thing towards `num` free pages, if there is one left to do."""
    size, most = self.pages.num, self._engine.spec.max_pages
    if size < most:
      short = num - self.pages.num_free
      size = min(max(size + size // 2, size + short), most)
      self._engine.grow(size)
      self.pages.grow(size)
      return True
    # Pins are of the beginnings of sequences: if anything can go, the last can.
    for prefix in self._resident:
      if self.pages.unpinned(prefix.pages[-1:]):
        self._spill(prefix)
        return True
    for stored in (self.prompts, self._heads):
      for key, prefix in stored.items():
        if self.pages.unpinned(prefix.pages[-1:]):
          del stored[key]
          self._drop(prefix)
          return True
    return False

  def _spill(self, prefix: Prefix) -> None:
    prefix.copy = self._engine.spill(None, prefix.pages)
    self.pages.give(prefix.pages)
    prefix.pages = []
    del self._resident[prefix]
    self._counts.spilled += 1

  def _drop(self, prefix: Prefix) -> None:
    self.pages.give(prefix.pages)
    self._resident.pop(prefix, None)
    prefix.pages, prefix.copy, prefix.version = [], None, None

  # -- turns -------------------------------------------------------------------

  def choose(self, request: Asks) -> Source:
    """What a request goes on from: a function of it alone.

    The turn of `parents` that has most tokens in common with the prompt, the
    latest of equals, or its head where that is longer. At least one token of
    the prompt is left to be prefilled.

    Raises:
      RuntimeError: a parent is not here.
    """
    ids = request.prompt_ids
    source = Source()
    if request.shared_by == 1:
      for parent in request.parents:
        turn = self._turn(parent)
        common = min(common_length(turn.ids, ids), len(ids) - 1)
        whole = turn.exact and common == len(turn.ids)
        if common >= max(_LEAST, source.start) and (
          whole or self._engine.rewinds
        ):
          source = Source(common, turn)
    if source.start < request.head < len(ids):
      head = request.policy_index, ids[: request.head].tobytes()
      source = Source(request.head, head=head)
    return source

  def _turn(self, turn: TurnId) -> Turn:
    try:
      return self._turns[turn[:2]][turn[2]]
    except KeyError:
      raise RuntimeError(
        f"stale prefix: turn {turn} is not kept; it has not ended, its episode "
        "is over, or the weights were updated since"
      ) from None

  def __contains__(self, turn: TurnId) -> bool:
    return turn[2] in self._turns.get(turn[:2], ())

  def keep(
    self,
    turn: TurnId,
    ids: np.ndarray,
    pages: list[int],
    source: Source,
    exact: bool,
  ) -> None:
    """A turn has ended.

    Args:
      turn: its name.
      ids: [tokens] of its prompt and completion.
      pages: theirs; now held here.
      source: what it went on from.
      exact: see `Turn`.
    """
    prefix = self._extended(source)
    if prefix is None:
      prefix = Prefix(len(ids), pages, self._engine.version)
    else:
      self.pages.give(prefix.pages)
      self._resident.pop(prefix, None)
      prefix.num_tokens, prefix.pages, prefix.copy = len(ids), pages, None
    self._resident[prefix] = None
    position, episode, number = turn
    turns = self._turns.setdefault((position, episode), {})
    turns[number] = Turn(ids, prefix, exact)

  def _extended(self, source: Source) -> Prefix | None:
    """What was kept of a turn that is wholly gone on from: the longer sequence
    serves both, so that a chat is kept once and not once a turn."""
    turn = source.turn
    if turn is None or not self._engine.rewinds:
      return None
    whole = source.start == len(turn.ids) == turn.prefix.num_tokens
    return turn.prefix if whole and turn.prefix.version is not None else None

  def forget(self, position: int, episode: int) -> None:
    """The episode is over: its turns go."""
    turns = self._turns.pop((position, episode), {})
    for prefix in {t.prefix: None for t in turns.values()}:
      self._drop(prefix)

  # -- going on ----------------------------------------------------------------

  def cost(self, source: Source) -> int:
    """Pages that `hold` would pin, of those that are `available`."""
    num = needed(source.start, self._size)
    prefix = self._prefix(source)
    if prefix is None or prefix.copy is not None:
      return num
    return self.pages.unpinned(prefix.pages[:num])

  def hold(self, source: Source) -> list[int]:
    """Pages of what a request goes on from, pinned until `release`.

    Raises:
      RuntimeError: they are of other weights than the engine's.
    """
    num = needed(source.start, self._size)
    prefix = self._prefix(source)
    if prefix is None and source.head is not None:
      prefix = self._new_head(source)
    if prefix is None:
      return []
    self.check(prefix)
    if source.head is not None:
      self._heads.move_to_end(source.head)
    if prefix.copy is None:
      return self.hold_pages(prefix.pages[:num])
    fresh = self.take(num)
    self._engine.restore(prefix.copy, None, fresh)
    self._pin(fresh)
    return fresh

  def hold_pages(self, pages: Sequence[int]) -> list[int]:
    """Pins pages until `release`, whatever becomes of their holders."""
    shared = self.pages.share(pages)
    self._pin(shared)
    return shared

  def _pin(self, pages: list[int]) -> None:
    self.pages.pin(pages)
    self._held += pages

  def release(self) -> None:
    """What was held has been read."""
    self.pages.unpin(self._held)
    self.pages.give(self._held)
    self._held = []

  def check(self, prefix: Prefix) -> None:
    """Raises RuntimeError if a prefix is of other weights than the engine's."""
    if prefix.version != self._engine.version:
      raise RuntimeError(
        f"stale prefix: of weights of version {prefix.version}, and the engine "
        f"has version {self._engine.version}; resume() the sampler, and not "
        "its engine, and do not go on from turns of before"
      )

  def _prefix(self, source: Source) -> Prefix | None:
    if source.turn is not None:
      return source.turn.prefix
    return None if source.head is None else self._heads.get(source.head)

  def _new_head(self, source: Source) -> Prefix:
    if len(self._heads) >= _MOST_HEADS:
      self._drop(self._heads.popitem(last=False)[1])
    pages = self.take(needed(source.start, self._size))
    policy, raw = source.head
    ids = np.frombuffer(raw, np.int32)
    self.new_heads.append(Row(decoding.Chunk(ids, 0, pages, 0, policy)))
    self._counts.prefilled_tokens += len(ids)
    prefix = Prefix(len(ids), pages, self._engine.version)
    self._heads[source.head] = prefix
    return prefix
