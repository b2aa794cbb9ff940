"""Chats that begin alike -> rows in which a token is there once.

    three chats of one prompt     p p p q a a   p p p q b b b   p p p q c
    their row of W tokens         p p p q a a q b b b q c

What a decoder computes of a token depends on the tokens up to it alone, so the
prompt of a group, or a template's head, is worth one pass, not one for each
chat. A learner takes such rows; for attention alone each chat is laid out
whole, in one of A rows of T tokens (`types.Spread`), where kernels, masks and
sums are what they are without any of this.

Nothing is shared from a chat's first prompt's last token on (the q above): what
follows that one is another token in each chat, and has a loss.

Chats are taken in the order of their tokens. What begins alike is then side by
side, and a chat shares with the one before it.

Copies for attention may be asked for in pages of so many tokens, which a TPU
adds up many times faster than tokens one by one. Then what is shared is whole
pages, and what a chat has of its own begins with one.
"""

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Chat(NamedTuple):
  """What is packed.

  Attributes:
    ids: its tokens.
    prompt: how many of them are its first prompt.
    owner: the policy; those of different ones share no row.
  """

  ids: np.ndarray
  prompt: int
  owner: int


class Place(NamedTuple):
  """Where a chat is.

  Attributes:
    chat: its number.
    start: of what it does not share, in the row.
    shared: tokens that it has of the chat before it in the row.
    row: of the row's A rows for attention.
    offset: in that.
  """

  chat: int
  start: int
  shared: int
  row: int
  offset: int


Row = list[Place]


def order(chats: Sequence[Chat]) -> list[tuple[int, int]]:
  """(number, tokens that it may share with the one before it), in the order in
  which rows take them."""
  keys = [(c.owner, c.ids.astype(">i4").tobytes()) for c in chats]
  found: list[tuple[int, int]] = []
  for k in sorted(range(len(chats)), key=keys.__getitem__):
    before = chats[found[-1][0]] if found else None
    found.append((k, _shared(before, chats[k]) if before else 0))
  return found


def _shared(one: Chat, two: Chat) -> int:
  if one.owner != two.owner:
    return 0
  most = max(0, min(one.prompt, two.prompt) - 1)
  alike = one.ids[:most] == two.ids[:most]
  return most if alike.all() else int(alike.argmin())


def fill(
  chats: Sequence[Chat],
  in_order: Sequence[tuple[int, int]],
  *,
  width: int,
  length: int,
  most: int,
  page: int = 1,
) -> list[Row]:
  """Rows of what the chats have to be computed of, one filled after the other.

  Args:
    chats: no longer than `length`.
    in_order: as `order` returns it.
    width: W, tokens of a row; at least `length`.
    length: T, tokens of a row for attention.
    most: A at most.
    page: that both widths are multiples of.
  """
  rows: list[Row] = []
  owner, used, num = -1, 0, 0
  open_: list[tuple[int, int]] = []  # of the row: rising (room, row of the A)
  for k, shared in in_order:
    chat = chats[k]
    size = -(-len(chat.ids) // page) * page
    shared -= shared % page
    at = bisect.bisect_left(open_, (size, 0))
    full = at == len(open_) and num == most
    if owner != chat.owner or used + size - shared > width or full:
      rows.append([])
      owner, used, num, shared = chat.owner, 0, 0, 0
      open_, at = [], 0
    if at < len(open_):
      room, row = open_.pop(at)
    else:
      room, row, num = length, num, num + 1
    rows[-1].append(Place(k, used, shared, row, length - room))
    used += size - shared
    if room > size:
      bisect.insort(open_, (room - size, row))
  return rows
