"""Pages are handed out, shared and taken back; none is lost."""

import random

import pytest

from drmas_jax.pages import Pages, needed

pytestmark = pytest.mark.quick


def test_a_sequence_needs_whole_pages():
  assert [needed(n, 4) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_a_page_is_free_when_its_last_holder_gives_it_back():
  pages = Pages(4)
  assert pages.num_free == 3
  taken = pages.take(3)
  assert sorted(taken) == [1, 2, 3], "page 0 is nobody's"
  assert pages.share(taken[:1]) == taken[:1]
  pages.give(taken)
  assert pages.num_free == 2
  with pytest.raises(RuntimeError, match="3 pages of the cache are wanted, 2"):
    pages.take(3)
  pages.give(taken[:1])
  assert pages.num_free == 3
  for act in (pages.give, pages.share, pages.pin):
    with pytest.raises(RuntimeError, match=f"page {taken[0]} .* nobody's"):
      act(taken[:1])


def test_what_is_pinned_counts_once_and_is_not_freed():
  pages = Pages(5)
  taken = pages.take(3)
  pages.pin(taken)
  pages.pin(taken[:2])
  assert pages.num_pinned == 3 and pages.unpinned(taken) == 0
  pages.unpin(taken)
  assert pages.num_pinned == 2 and pages.unpinned(taken) == 1
  with pytest.raises(RuntimeError, match="while it is pinned"):
    pages.give(taken)


def test_a_pool_grows_and_what_is_out_stays_out():
  pages = Pages(2)
  first = pages.take(1)
  pages.grow(5)
  assert pages.num == 5 and pages.num_free == 3
  assert sorted(first + pages.take(3)) == [1, 2, 3, 4]


def test_any_order_of_holders_ends_where_it_began():
  rng = random.Random(0)
  pages, held = Pages(12), []
  for _ in range(2000):
    if held and rng.random() < 0.5:
      pages.give(held.pop(rng.randrange(len(held))))
    elif held and rng.random() < 0.3:
      held.append(pages.share(rng.choice(held)))
    elif pages.num_free:
      held.append(pages.take(rng.randint(1, pages.num_free)))
    out = {page for some in held for page in some}
    assert pages.num_free == 11 - len(out)
  for some in held:
    pages.give(some)
  assert pages.num_free == 11
