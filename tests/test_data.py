"""The stream is a function of seed and position."""

import pytest

from drmas_jax import data

pytestmark = pytest.mark.quick


class Letters:
  name = "letters"

  def __init__(self, num):
    self.num = num

  def __len__(self):
    return self.num

  def __getitem__(self, index):
    return {"question": f"q{index}", "answer": index, "info": {"i": index}}


def _indices(tasks):
  return [task.index for task in tasks]


def test_every_epoch_holds_every_row_once_in_an_order_of_its_own():
  stream = data.Stream(Letters(10), seed=0)
  epochs = [_indices(stream.tasks(10 * e, 10)) for e in range(4)]
  assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
  assert len({tuple(epoch) for epoch in epochs}) == 4


@pytest.mark.parametrize("num", [1, 3, 4, 7, 25])
def test_nothing_depends_on_how_the_stream_is_cut(num):
  whole = data.Stream(Letters(10), seed=3).tasks(0, 40)
  stream = data.Stream(Letters(10), seed=3)
  pieces = [stream.tasks(c, min(num, 40 - c)) for c in range(0, 40, num)]
  assert [task for piece in pieces for task in piece] == whole
  assert [task.position for task in whole] == list(range(40))


@pytest.mark.parametrize("saved", [3, 4, 5])
def test_resuming_at_an_epochs_edge_goes_on(saved):
  # Case C01 (four steps an epoch, saved around its end) and C02 (no repeats).
  straight = data.Stream(Letters(8), seed=1).tasks(0, 16)
  resumed = data.Stream(Letters(8), seed=1).tasks(2 * saved, 16 - 2 * saved)
  assert resumed == straight[2 * saved :]


def test_seeds_differ():
  first, second = (data.Stream(Letters(50), s).tasks(0, 50) for s in (0, 1))
  assert _indices(first) != _indices(second)


def test_a_task_carries_its_row():
  (task,) = data.Stream(Letters(1), seed=0).tasks(5, 1)
  assert (task.source, task.index, task.position) == ("letters", 0, 5)
  assert (task.question, task.answer, task.info) == ("q0", 0, {"i": 0})


def test_held_out_is_the_head_in_order():
  assert _indices(data.held_out(Letters(5), 3)) == [0, 1, 2]
  assert _indices(data.held_out(Letters(2), 3)) == [0, 1]
  assert data.held_out(Letters(2), 0) == []


def test_an_empty_source_is_refused():
  with pytest.raises(ValueError, match="'letters' has no rows"):
    data.Stream(Letters(0), seed=0)
