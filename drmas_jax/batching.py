"""Turns of one backbone -> rows of a Batch, in micro-batches (numpy).

    turns  --chats-->  chats  --fill-->  rows of T tokens  --pack-->  [M, b, T]
                              --trie-->  fewer, of W tokens

A chat is a turn, prompt then completion, or several of which each goes on where
the one before ended. Chats are packed into rows: segments 1, 2, .. of a row,
each with positions of its own, that do not see each other. All chats of a row
are of one policy, where several share a backbone. T is the bucket of the
longest chat.

Where chats begin alike (the prompt of a group, a template's head) and it saves
enough, rows hold what they share once; see `trie`.

Rows are padded at the end with segment 0, mask 0 and weight 0, and so are whole
rows that fill the last micro-batch: padding never counts anywhere.
"""

import bisect
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from drmas_jax import config as config_lib
from drmas_jax import trie
from drmas_jax.types import Batch, Spread, Turn

SMALLEST_BUCKET = 32
# Rows of shared tokens are taken if they are so many times fewer: what is saved
# has to be worth the copies for attention, and another program to compile.
_WORTH = 1.2
# Rows for attention, by those that would hold as many tokens.
_VIEWS = (1.5, 3)
MOST_VIEWS = _VIEWS[-1]


class Fit(NamedTuple):
  """Rows of one kind.

  Attributes:
    rows: how many this host's chats fill.
    sampled: tokens that were sampled, of one row at most.
    views: rows for attention, of one row at most; 0: it is one itself.
  """

  rows: int = 0
  sampled: int = 0
  views: int = 0


class Size(NamedTuple):
  """What decides the shape of a batch; hosts tell each other theirs.

  Attributes:
    longest: tokens of this host's longest chat; 0: it has none.
    whole: by bucket, rows of whole chats; none where it is shorter than
      `longest`.
    shared: by bucket, rows in which what chats share is there once; empty:
      nobody asked.
  """

  longest: int
  whole: tuple[Fit, ...]
  shared: tuple[Fit, ...] = ()

  @classmethod
  def of(cls, numbers: Sequence) -> "Size":
    """Back from plain data."""
    longest, *kinds = numbers
    return cls(longest, *(tuple(Fit(*f) for f in fits) for fits in kinds))


class Shape(NamedTuple):
  """Of a batch, the same on every host.

  Attributes:
    num_micro: M, micro-batches that the arrays have room for.
    micro_rows: b, rows of one on this host.
    length: T, tokens of a row.
    trips: micro-batches that are computed; the others are empty.
    sampled: H, of a row, that log-probs are computed of; 0: of all.
    views: A, rows for attention of a row of shared tokens; 0: it is whole.
    view_length: tokens of one.
    page: tokens that are copied there together.
  """

  num_micro: int
  micro_rows: int
  length: int
  trips: int
  sampled: int = 0
  views: int = 0
  view_length: int = 0
  page: int = 1


def chats(
  turns: Sequence[Turn], episodes: Sequence[int]
) -> list[tuple[int, ...]]:
  """The turns of each chat, by their places in `turns`.

  Args:
    turns: those of an episode in the order of their indices.
    episodes: a number by turn, the same for turns of one episode.
  """
  found: list[list[int]] = []
  chat_of: dict[tuple[int, int], list[int]] = {}
  for i, (turn, episode) in enumerate(zip(turns, episodes, strict=True)):
    chat = chat_of.get((episode, turn.continues))
    if chat is None:
      chat = []
      found.append(chat)
    chat.append(i)
    chat_of[episode, turn.index] = chat
  return [tuple(chat) for chat in found]


def parts(num: int, count: int) -> list[slice]:
  """Cuts `num` things, in order, into `count` parts of nearly equal size."""
  ends = [num * i // count for i in range(count + 1)]
  return [slice(*pair) for pair in itertools.pairwise(ends)]


# -- shapes --------------------------------------------------------------------


def bucket(length: int, buckets: Sequence[int]) -> int:
  """The smallest of the rising `buckets` that holds `length`."""
  for width in buckets:
    if length <= width:
      return width
  raise ValueError(
    f"row of {length} tokens; allowed are at most {buckets[-1]}; raise the "
    "last of row_buckets"
  )


def powers_of_two(low: int, high: int) -> tuple[int, ...]:
  """low, 2 low, 4 low, .. and `high` last."""
  lengths = []
  while low < high:
    lengths.append(low)
    low *= 2
  return (*lengths, high)


def row_buckets(policy: config_lib.Policy) -> tuple[int, ...]:
  """Lengths that a row may have, rising."""
  return policy.row_buckets or powers_of_two(
    SMALLEST_BUCKET, policy.engine.max_length
  )


def size(
  turns: Sequence[Turn],
  chats: Sequence[Sequence[int]],
  buckets: Sequence[int],
  policy_index: Sequence[int] | None = None,
  *,
  row_tokens: int = 0,
  page: int = 1,
) -> Size:
  """Of the chats of this host; the first arguments as `pack` has them.

  Args:
    turns: see there.
    chats: see there.
    buckets: rising lengths of a row.
    policy_index: see there.
    row_tokens: of a micro-batch on each device that holds rows of it; 0: chats
      share nothing.
    page: tokens that chats share at a time; none where it does not divide
      their rows.
  """
  measured = _measure(turns, chats, policy_index)
  longest = max((len(c.ids) for c in measured), default=0)
  sampled = [sum(len(turns[i].completion_ids) for i in c) for c in chats]
  in_order = trie.order(measured) if row_tokens else []

  def fit(rows: Sequence[Sequence[int]], views: int = 0) -> Fit:
    most = max((sum(sampled[k] for k in row) for row in rows), default=0)
    return Fit(len(rows), most, views)

  whole, shared = [], []
  for length in buckets:
    if length < longest:
      whole.append(Fit())
      shared.append(Fit())
      continue
    whole.append(fit(_fill(measured, length)))
    if row_tokens:
      num = _whole_rows(row_tokens, length)
      rows = _share(measured, in_order, num, length, page)
      views = max((p.row + 1 for row in rows for p in row), default=0)
      shared.append(fit([[p.chat for p in row] for row in rows], views))
  return Size(longest, tuple(whole), tuple(shared) if row_tokens else ())


def shape(
  sizes: Sequence[Size],
  buckets: Sequence[int],
  *,
  micro_tokens: int,
  shards: int,
  only_sampled: bool = False,
  page: int = 1,
) -> Shape:
  """The smallest that holds what any host has.

  Args:
    sizes: of every host, for the same `buckets`.
    buckets: rising lengths of a row.
    micro_tokens: of a micro-batch, over all hosts.
    shards: devices, of all hosts, among which rows are divided.
    only_sampled: log-probs are computed of tokens that were sampled; otherwise
      of all.
    page: as `size` was given it.

  Raises:
    ValueError: a chat is longer than the last bucket.
  """
  length = bucket(max(s.longest for s in sizes), buckets)
  at, num_hosts = buckets.index(length), len(sizes)

  def shaped(fits: Sequence[Fit], rows: int, length: int) -> Shape:
    trips = max(1, -(-max(f.rows for f in fits) // rows))
    most = _eighths(max(f.sampled for f in fits), length)
    return Shape(
      num_micro(trips), rows, length, trips, most if only_sampled else 0
    )

  rows = micro_rows(micro_tokens, length, shards) // num_hosts
  whole = shaped([s.whole[at] for s in sizes], rows, length)
  if length % page or not all(s.shared for s in sizes):
    return whole
  num = _whole_rows(micro_tokens // shards, length)
  fits = [s.shared[at] for s in sizes]
  shared = shaped(fits, shards // num_hosts, num * length)
  if _WORTH * shared.trips > whole.trips:
    return whole
  views = max(f.views for f in fits)
  ladder = (math.ceil(num * step) for step in _VIEWS)
  views = next(num for num in ladder if num >= views)
  return shared._replace(views=views, view_length=length, page=page)


def _whole_rows(row_tokens: int, length: int) -> int:
  """As many tokens as a row of shared ones; as `micro_rows` has them."""
  return max(1, row_tokens // length)


def _eighths(num: int, length: int) -> int:
  """At least `num` of `length`, one of eight values."""
  return -(-length * max(1, -(-8 * num // length)) // 8)


def micro_rows(micro_tokens: int, length: int, shards: int) -> int:
  """Rows of a micro-batch, over all hosts: one a shard at the least."""
  return max(shards, micro_tokens // length // shards * shards)


def num_micro(trips: int) -> int:
  """Micro-batches that arrays have room for: 16, 64, 256, ..

  Most runs see one, and compile once. Empty micro-batches are never run, and
  one of 8192 tokens takes 0.7 MB at most.
  """
  num = 16
  while num < trips:
    num *= 4
  return num


# -- rows ----------------------------------------------------------------------


def fill(
  lengths: Sequence[int], owners: Sequence[int], width: int
) -> list[list[int]]:
  """Packs things of different lengths into rows, those of an owner apart.

  Best fit, the longest first (at most 11/9 of the fewest rows possible): each
  goes where the least room is left that it fits. Equal ones go in order, so the
  result is a function of the arguments alone.

  Args:
    lengths: at most `width` each.
    owners: of each thing.
    width: of a row.

  Returns:
    The things of each row, by their places in `lengths`.
  """
  rows: list[list[int]] = []
  free: dict[int, list[tuple[int, int]]] = {}  # by owner: rising (room, row)
  for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
    open_ = free.setdefault(owners[i], [])
    at = bisect.bisect_left(open_, (lengths[i], 0))
    if at < len(open_):
      room, row = open_.pop(at)
    else:
      room, row = width, len(rows)
      rows.append([])
    rows[row].append(i)
    if room > lengths[i]:
      bisect.insort(open_, (room - lengths[i], row))
  return rows


def _measure(
  turns: Sequence[Turn],
  chats: Sequence[Sequence[int]],
  policy_index: Sequence[int] | None,
) -> list[trie.Chat]:
  found = []
  for chat in chats:
    first, last = turns[chat[0]], turns[chat[-1]]
    ids = np.concatenate([last.prompt_ids, last.completion_ids])
    owner = 0 if policy_index is None else int(policy_index[chat[0]])
    found.append(trie.Chat(ids, len(first.prompt_ids), owner))
  return found


def _fill(measured: Sequence[trie.Chat], width: int) -> list[list[int]]:
  return fill(
    [len(c.ids) for c in measured], [c.owner for c in measured], width
  )


def _share(
  measured: Sequence[trie.Chat],
  in_order: Sequence[tuple[int, int]],
  num: int,
  length: int,
  page: int,
) -> list[trie.Row]:
  """Rows as long as `num` whole ones; none of a page that does not divide
  these."""
  if length % page:
    return []
  most = math.ceil(num * MOST_VIEWS)
  width = num * length
  return trie.fill(
    measured, in_order, width=width, length=length, most=most, page=page
  )


def _one_by_one(row: Sequence[int], measured: Sequence[trie.Chat]) -> trie.Row:
  """Chats that are whole, each behind the one before."""
  lengths = [len(measured[k].ids) for k in row]
  starts = itertools.accumulate([0, *lengths])
  return [
    trie.Place(k, start, 0, 0, start)
    for k, start in zip(row, starts, strict=False)
  ]


def pack(
  turns: Sequence[Turn],
  turn_index: Sequence[int],
  agent_index: Sequence[int],
  shape: Shape,
  *,
  chats: Sequence[Sequence[int]] | None = None,
  policy_index: Sequence[int] | None = None,
  weights: Sequence[float] | None = None,
) -> Batch:
  """Lays turns out as a Batch whose arrays are [M, b, ..].

  Args:
    turns: with a prompt of at least one token, so that no token of a row has to
      be told from what stands before its segment.
    turn_index: of each turn among the step's [N] turns.
    agent_index: of each turn's agent.
    shape: M, b and T; there must be room.
    chats: the turns of each by their places in `turns`, each of which begins
      with the ids of the one before; turns in none are left out. None: every
      turn is one.
    policy_index: of each turn's policy, the same in a chat; None: all are 0.
    weights: in the loss, of each token that a turn sampled; None: 1.
  """
  if chats is None:
    chats = [(i,) for i in range(len(turns))]
  measured = _measure(turns, chats, policy_index)
  if shape.views:
    in_order = trie.order(measured)
    num = shape.length // shape.view_length
    rows = _share(measured, in_order, num, shape.view_length, shape.page)
  else:
    filled = _fill(measured, shape.length)
    rows = [_one_by_one(row, measured) for row in filled]
  batch = _empty(shape)
  for row, places in enumerate(rows):
    for segment, place in enumerate(places, 1):
      chat, first = measured[place.chat], place.start - place.shared
      end = first + len(chat.ids)
      own = slice(place.start, end)
      batch.positions[row, own] = np.arange(place.shared, len(chat.ids))
      batch.segment_ids[row, own] = segment
      batch.policy_index[row] = chat.owner
      known = place.start
      for i in chats[place.chat]:
        added, sampled = _lay(batch, row, first, known, turns[i])
        batch.turn_index[row, added] = turn_index[i]
        batch.agent_index[row, added] = agent_index[i]
        batch.weights[row, sampled] = 1 if weights is None else weights[i]
        known = added.stop
    if batch.spread is not None:
      _fill_spread(batch.spread, row, places, measured, shape.page)
  if batch.sampled is not None:
    _note_sampled(batch)
  lead = (shape.num_micro, shape.micro_rows)
  return jax.tree.map(lambda a: a.reshape(*lead, *a.shape[1:]), batch)


def _fill_spread(
  spread: Spread,
  row: int,
  places: trie.Row,
  measured: Sequence[trie.Chat],
  page: int,
) -> None:
  """Writes where the chats of a row are whole."""
  before = np.zeros(0, np.int32)
  for segment, place in enumerate(places, 1):
    size, shared = len(measured[place.chat].ids), place.shared // page
    here = slice(place.offset, place.offset + size)
    spread.segment_ids[row, place.row, here] = segment
    num, first = -(-size // page), place.offset // page
    own = np.arange(num - shared, dtype=np.int32) + place.start // page
    source = np.concatenate([before[:shared], own])
    spread.source[row, place.row, first : first + num] = source
    home = place.row * spread.source.shape[-1] + first + np.arange(num)
    spread.home[row, own] = home[shared:]
    before = source


def _note_sampled(batch: Batch) -> None:
  """The places of each row where the mask is 1."""
  length, room = batch.mask.shape[1], batch.sampled.shape[1]
  first = np.argsort(batch.mask == 0, axis=1, kind="stable")[:, :room]
  there = np.take_along_axis(batch.mask, first, axis=1) > 0
  batch.sampled[:] = np.where(there, first, length)


def _empty(shape: Shape) -> Batch:
  num, length = shape.num_micro * shape.micro_rows, shape.length

  def integers(*dims: int) -> np.ndarray:
    return np.zeros([num, *dims], np.int32)

  numbers = {"mask", "weights", "sampler_logprobs", "log_kept_mass"}
  arrays = {
    name: np.zeros([num, length], np.float32 if name in numbers else np.int32)
    for name in Batch._fields
  }
  arrays |= {"policy_index": integers(), "sampled": None, "spread": None}
  if shape.sampled:
    arrays["sampled"] = integers(shape.sampled)
  if shape.views:
    arrays["spread"] = Spread(
      source=integers(shape.views, shape.view_length // shape.page),
      segment_ids=integers(shape.views, shape.view_length),
      home=integers(length // shape.page),
    )
  return Batch(**arrays)


def _lay(
  batch: Batch, row: int, start: int, known: int, turn: Turn
) -> tuple[slice, slice]:
  """Writes what a turn adds to its chat; (that, and what of it was sampled).

  The chat begins at `start` of the row, and is there up to `known`.
  """
  middle = start + len(turn.prompt_ids)
  end = middle + len(turn.completion_ids)
  sampled = slice(middle, end)
  batch.tokens[row, known:middle] = turn.prompt_ids[known - start :]
  batch.tokens[row, sampled] = turn.completion_ids
  batch.mask[row, sampled] = 1
  batch.sampler_logprobs[row, sampled] = turn.sampler_logprobs
  batch.log_kept_mass[row, sampled] = turn.log_kept_mass
  return slice(known, end), sampled


def gather(values: np.ndarray, batch: Batch) -> np.ndarray:
  """[N] numbers by turn -> one per token of the batch, 0 on padding."""
  if not len(values):
    return np.zeros_like(batch.mask)
  return (values[batch.turn_index] * (batch.segment_ids > 0)).astype(np.float32)
