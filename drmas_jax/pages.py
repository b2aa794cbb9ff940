"""Which pages of an engine's cache are free, held and pinned.

Pages 1 .. num - 1 are handed out; page 0 is nobody's. A page may have several
holders, since sequences share the pages of a common beginning, and is free
again once the last one has given it back. A page that a running sequence needs
is pinned: everything else can be had, by moving it to the host or by dropping
what can be made again.
"""

from collections.abc import Sequence


def needed(num_tokens: int, page_size: int) -> int:
  """Pages of a sequence of `num_tokens`."""
  return -(-num_tokens // page_size)


class Pages:
  """The pages of a pool that may grow.

  Attributes:
    num: of the pool now, page 0 included.
    num_pinned: pages that are pinned.
  """

  def __init__(self, num: int):
    self.num = 1
    self.num_pinned = 0
    self._holders = [0]
    self._pins = [0]
    self._free: list[int] = []
    self.grow(num)

  @property
  def num_free(self) -> int:
    return len(self._free)

  def grow(self, num: int) -> None:
    """Makes it a pool of `num` pages."""
    more = num - self.num
    self._free = [*range(num - 1, self.num - 1, -1), *self._free]
    self._holders += [0] * more
    self._pins += [0] * more
    self.num = num

  def take(self, num: int) -> list[int]:
    """`num` free pages, held once.

    Raises:
      RuntimeError: there are not as many.
    """
    if num > len(self._free):
      raise RuntimeError(
        f"{num} pages of the cache are wanted, {len(self._free)} are free"
      )
    taken = [self._free.pop() for _ in range(num)]
    for page in taken:
      self._holders[page] = 1
    return taken

  def share(self, pages: Sequence[int]) -> list[int]:
    """The same pages, held once more."""
    for page in pages:
      self._check(page)
      self._holders[page] += 1
    return list(pages)

  def give(self, pages: Sequence[int]) -> None:
    """Takes back what was taken or shared.

    Raises:
      RuntimeError: nobody holds one of them, or it is still pinned.
    """
    for page in pages:
      self._check(page)
      self._holders[page] -= 1
      if not self._holders[page]:
        if self._pins[page]:
          raise RuntimeError(f"page {page} is given back while it is pinned")
        self._free.append(page)

  def pin(self, pages: Sequence[int]) -> None:
    for page in pages:
      self._check(page)
      self.num_pinned += not self._pins[page]
      self._pins[page] += 1

  def unpin(self, pages: Sequence[int]) -> None:
    for page in pages:
      self._pins[page] -= 1
      self.num_pinned -= not self._pins[page]

  def unpinned(self, pages: Sequence[int]) -> int:
    """How many of them nothing pins."""
    return sum(not self._pins[page] for page in pages)

  def _check(self, page: int) -> None:
    if not self._holders[page]:
      raise RuntimeError(f"page {page} of the cache is nobody's")
