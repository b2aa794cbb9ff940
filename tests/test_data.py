"""The stream is a function of seed and position."""

import pytest

from drmas_jax import data

pytestmark = pytest.mark.quick


class Letters:
  fingerprint = "letters"

  def __init__(self, num):
    self.num = num

  def __len__(self):
    return self.num

  def __getitem__(self, index):
    return {"question": f"q{index}", "answer": index, "info": {"i": index}}


def _indices(tasks):
  return [task.index for task in tasks]


def test_every_epoch_holds_every_row_once_in_an_order_of_its_own():
  stream = data.Stream({"letters": Letters(10)}, seed=0)
  epochs = [_indices(stream.tasks(10 * e, 10)) for e in range(4)]
  assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
  assert len({tuple(epoch) for epoch in epochs}) == 4


@pytest.mark.parametrize("num", [1, 3, 4, 7, 25])
def test_nothing_depends_on_how_the_stream_is_cut(num):
  whole = data.Stream({"letters": Letters(10)}, seed=3).tasks(0, 40)
  stream = data.Stream({"letters": Letters(10)}, seed=3)
  pieces = [stream.tasks(c, min(num, 40 - c)) for c in range(0, 40, num)]
  assert [task for piece in pieces for task in piece] == whole
  assert [task.position for task in whole] == list(range(40))


@pytest.mark.parametrize("saved", [3, 4, 5])
def test_resuming_at_an_epochs_edge_goes_on(saved):
  # Case C01 (four steps an epoch, saved around its end) and C02 (no repeats).
  straight = data.Stream({"letters": Letters(8)}, seed=1).tasks(0, 16)
  resumed = data.Stream({"letters": Letters(8)}, seed=1).tasks(
    2 * saved, 16 - 2 * saved
  )
  assert resumed == straight[2 * saved :]


def test_seeds_differ():
  first, second = (
    data.Stream({"letters": Letters(50)}, s).tasks(0, 50) for s in (0, 1)
  )
  assert _indices(first) != _indices(second)


def test_a_task_carries_its_row():
  (task,) = data.Stream({"letters": Letters(1)}, seed=0).tasks(5, 1)
  assert (task.source, task.index, task.position) == ("letters", 0, 5)
  assert (task.question, task.answer, task.info) == ("q0", 0, {"i": 0})


def test_held_out_is_the_head_in_order():
  assert _indices(data.held_out("letters", Letters(5), 3)) == [0, 1, 2]
  assert _indices(data.held_out("letters", Letters(2), 3)) == [0, 1]
  assert data.held_out("letters", Letters(2), 0) == []


def test_an_empty_source_is_refused():
  with pytest.raises(ValueError, match="letters has no rows"):
    data.Stream({"letters": Letters(0)}, seed=0)
  with pytest.raises(ValueError, match="letters has no rows"):
    data.held_out("letters", Letters(0), 3)


def _mixture(seed=0, **weights):
  sources = {key: Letters(7 + len(key)) for key in weights}
  return data.Stream(sources, seed, weights)


def test_a_mixture_keeps_its_shares_in_every_cycle():
  tasks = _mixture(a=1.0, bb=2.0, ccc=5.0).tasks(0, 3000)
  for cycle in range(3):
    part = [t.source for t in tasks[1000 * cycle :][:1000]]
    assert [part.count(k) for k in ("a", "bb", "ccc")] == [125, 250, 625]
  # Shuffled: no long stretch is without one of them.
  assert all(
    "bb" in {t.source for t in tasks[i : i + 60]} for i in range(0, 2940, 60)
  )


def test_every_source_of_a_mixture_goes_epoch_by_epoch():
  tasks = _mixture(a=1.0, bb=2.0).tasks(0, 2000)
  for key, num in (("a", 8), ("bb", 9)):
    own = _indices([t for t in tasks if t.source == key])
    for start in range(0, len(own) - num + 1, num):
      assert sorted(own[start : start + num]) == list(range(num))


@pytest.mark.parametrize("num", [1, 7, 999])
def test_a_mixture_does_not_depend_on_how_it_is_cut(num):
  whole = _mixture(a=1.0, bb=0.3).tasks(0, 2500)
  stream = _mixture(a=1.0, bb=0.3)
  pieces = [stream.tasks(c, min(num, 2500 - c)) for c in range(0, 2500, num)]
  assert [t for piece in pieces for t in piece] == whole
  assert whole != _mixture(seed=1, a=1.0, bb=0.3).tasks(0, 2500)


def test_the_order_of_a_mixtures_entries_means_nothing():
  one, other = _mixture(bb=0.3, a=1.0), _mixture(a=1.0, bb=0.3)
  assert one.tasks(0, 1200) == other.tasks(0, 1200)


def test_a_source_that_would_never_be_drawn_is_refused():
  with pytest.raises(ValueError, match=r"bb\.weight is less than 1/1000"):
    _mixture(a=1.0, bb=1e-4)
