"""Turns of one backbone -> rows of a Batch, in micro-batches (numpy).

    turns  --chats-->  chats  --fill-->  rows of T tokens  --pack-->  [M, b, T]

A chat is a turn, prompt then completion, or several of which each goes on where
the one before ended. Chats are packed into rows: segments 1, 2, .. of a row,
each with positions of its own, that do not see each other. All chats of a row
are of one policy, where several share a backbone. T is the bucket of the
longest chat.

Rows are padded at the end with segment 0, mask 0 and weight 0, and so are whole
rows that fill the last micro-batch: padding never counts anywhere.
"""

import bisect
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from drmas_jax import config as config_lib
from drmas_jax.types import Batch, Turn

SMALLEST_BUCKET = 32


class Size(NamedTuple):
  """What decides the shape of a batch; hosts tell each other theirs.

  Attributes:
    longest: tokens of this host's longest chat; 0: it has none.
    rows: that its chats fill, by bucket; 0 where one is shorter than `longest`.
  """

  longest: int
  rows: tuple[int, ...]


class Shape(NamedTuple):
  """Of a batch, the same on every host.

  Attributes:
    num_micro: M, micro-batches that the arrays have room for.
    micro_rows: b, rows of one on this host.
    length: T, tokens of a row.
    trips: micro-batches that are computed; the others are empty.
  """

  num_micro: int
  micro_rows: int
  length: int
  trips: int


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
) -> Size:
  """Of the chats of this host; arguments as `pack` has them."""
  lengths, owners = _measure(turns, chats, policy_index)
  longest = max(lengths, default=0)
  return Size(
    longest,
    tuple(
      len(fill(lengths, owners, width)) if width >= longest else 0
      for width in buckets
    ),
  )


def shape(
  sizes: Sequence[Size],
  buckets: Sequence[int],
  *,
  micro_tokens: int,
  shards: int,
) -> Shape:
  """The smallest that holds what any host has.

  Args:
    sizes: of every host, for the same `buckets`.
    buckets: rising lengths of a row.
    micro_tokens: of a micro-batch, over all hosts.
    shards: devices, of all hosts, among which rows are divided.

  Raises:
    ValueError: a chat is longer than the last bucket.
  """
  length = bucket(max(s.longest for s in sizes), buckets)
  num_rows = max(s.rows[buckets.index(length)] for s in sizes)
  local = micro_rows(micro_tokens, length, shards) // len(sizes)
  trips = max(1, -(-num_rows // local))
  return Shape(num_micro(trips), local, length, trips)


def micro_rows(micro_tokens: int, length: int, shards: int) -> int:
  """Rows of a micro-batch, over all hosts: one a shard at the least."""
  return max(shards, micro_tokens // length // shards * shards)


def num_micro(trips: int) -> int:
  """Micro-batches that arrays have room for: 16, 64, 256, ..

  Most runs see one, and compile once. Empty micro-batches are never run, and
  one of 8192 tokens takes 0.4 MB.
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
) -> tuple[list[int], list[int]]:
  """(tokens, policy) of each chat."""
  ends = [turns[c[-1]] for c in chats]
  lengths = [len(t.prompt_ids) + len(t.completion_ids) for t in ends]
  if policy_index is None:
    return lengths, [0] * len(chats)
  return lengths, [int(policy_index[c[0]]) for c in chats]


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
  lengths, owners = _measure(turns, chats, policy_index)
  batch = _empty(shape.num_micro * shape.micro_rows, shape.length)
  for row, places in enumerate(fill(lengths, owners, shape.length)):
    start = 0
    for segment, k in enumerate(places, 1):
      end = start + lengths[k]
      batch.positions[row, start:end] = np.arange(lengths[k])
      batch.segment_ids[row, start:end] = segment
      batch.policy_index[row] = owners[k]
      known = start
      for i in chats[k]:
        added, sampled = _lay(batch, row, start, known, turns[i])
        batch.turn_index[row, added] = turn_index[i]
        batch.agent_index[row, added] = agent_index[i]
        batch.weights[row, sampled] = 1 if weights is None else weights[i]
        known = added.stop
      start = end
  lead = (shape.num_micro, shape.micro_rows)
  return Batch(*(a.reshape(*lead, *a.shape[1:]) for a in batch))


def _empty(num_rows: int, length: int) -> Batch:
  numbers = {"mask", "weights", "sampler_logprobs", "log_kept_mass"}
  arrays = {
    name: np.zeros(
      [num_rows] if name == "policy_index" else [num_rows, length],
      np.float32 if name in numbers else np.int32,
    )
    for name in Batch._fields
  }
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
