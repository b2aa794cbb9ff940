"""Turns of one backbone -> rows of a Batch, in micro-batches (numpy).

A row holds a turn: prompt, then completion; or several of a chat, each of which
goes on where the one before ended. Rows are padded at the end with segment 0,
mask 0 and weight 0, and so are whole rows that fill the last micro-batch:
padding never counts anywhere.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from drmas_jax.types import Batch, Turn


class Size(NamedTuple):
  """What decides the shape of a batch; hosts agree on its maximum.

  Attributes:
    num_rows: rows of this host.
    longest: tokens of its longest row.
  """

  num_rows: int
  longest: int


def rows(
  turns: Sequence[Turn], episodes: Sequence[int]
) -> list[tuple[int, ...]]:
  """The turns of each row, by their places in `turns`.

  Args:
    turns: those of an episode in the order of their indices.
    episodes: a number by turn, the same for turns of one episode.
  """
  found: list[list[int]] = []
  row_of: dict[tuple[int, int], list[int]] = {}
  for i, (turn, episode) in enumerate(zip(turns, episodes, strict=True)):
    row = row_of.get((episode, turn.continues))
    if row is None:
      row = []
      found.append(row)
    row.append(i)
    row_of[episode, turn.index] = row
  return [tuple(row) for row in found]


def size(turns: Sequence[Turn]) -> Size:
  """Of rows that end with these turns, one each."""
  lengths = [len(t.prompt_ids) + len(t.completion_ids) for t in turns]
  return Size(len(turns), max(lengths, default=0))


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


def num_micro_batches(num_rows: int, micro_batch: int) -> int:
  """The next power of two: few shapes, and empty ones are never run."""
  need = max(1, -(-num_rows // micro_batch))
  return 1 << (need - 1).bit_length()


def pack(
  turns: Sequence[Turn],
  turn_index: Sequence[int],
  agent_index: Sequence[int],
  *,
  num_micro: int,
  micro_batch: int,
  length: int,
  rows: Sequence[Sequence[int]] | None = None,
  weights: Sequence[float] | None = None,
) -> Batch:
  """Lays turns out as a Batch whose arrays are [num_micro, micro_batch, ..].

  Args:
    turns: one row each, in order, unless `rows` are given.
    turn_index: of each turn among the step's [N] turns.
    agent_index: of each turn's agent.
    num_micro: M.
    micro_batch: b; there is room for M b rows.
    length: T, at least the longest row.
    rows: the turns of each row by their places in `turns`, each of which begins
      with the ids of the one before; turns in none are left out.
    weights: in the loss, of each token that a turn sampled; None: 1.
  """
  num_rows = num_micro * micro_batch
  shape = (num_rows, length)
  tokens, positions, segments, agents, indices = (
    np.zeros(shape, np.int32) for _ in range(5)
  )
  mask, factors, logprobs, kept = (
    np.zeros(shape, np.float32) for _ in range(4)
  )
  if rows is None:
    rows = [(i,) for i in range(len(turns))]
  for row, places in enumerate(rows):
    known = 0  # tokens of the row so far
    for i in places:
      turn = turns[i]
      start = len(turn.prompt_ids)
      end = start + len(turn.completion_ids)
      tokens[row, known:start] = turn.prompt_ids[known:]
      tokens[row, start:end] = turn.completion_ids
      mask[row, start:end] = 1
      factors[row, start:end] = 1 if weights is None else weights[i]
      logprobs[row, start:end] = turn.sampler_logprobs
      kept[row, start:end] = turn.log_kept_mass
      agents[row, known:end] = agent_index[i]
      indices[row, known:end] = turn_index[i]
      known = end
    positions[row, :known] = np.arange(known)
    segments[row, :known] = 1
  batch = Batch(
    tokens=tokens,
    mask=mask,
    positions=positions,
    segment_ids=segments,
    policy_index=np.zeros([num_rows], np.int32),
    agent_index=agents,
    turn_index=indices,
    weights=factors,
    sampler_logprobs=logprobs,
    log_kept_mass=kept,
  )
  return Batch(
    *(a.reshape(num_micro, micro_batch, *a.shape[1:]) for a in batch)
  )


def gather(values: np.ndarray, batch: Batch) -> np.ndarray:
  """[N] numbers by turn -> one per token of the batch, 0 on padding."""
  if not len(values):
    return np.zeros_like(batch.mask)
  return (values[batch.turn_index] * (batch.segment_ids > 0)).astype(np.float32)
