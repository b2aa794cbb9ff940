"""Dynamic sampling: which groups a step is made of, on one host and on two."""

import itertools
import threading
import types as pytypes

import jax
import pytest

from drmas_jax import config as config_lib
from drmas_jax import hosts, resample
from drmas_jax.types import Episode, Group, Outcome, Task

pytestmark = pytest.mark.quick

NUM_TASKS, GROUP = 4, 3
LIMIT_S = 20


class Stream:
  def tasks(self, cursor, num):
    positions = range(cursor, cursor + num)
    return [Task("s", p, p, f"question {p}", p) for p in positions]


class Rollout:
  """Episodes of a task have different rewards where its position `tells`."""

  def __init__(self, tells, stops=lambda positions: False):
    self.tells, self.stops, self.rounds = tells, stops, []

  def play(self, tasks):
    positions = [t.position for t in tasks]
    self.rounds.append(positions)
    if self.stops(positions):
      return [], True
    return [self.group(t, self.tells(t.position)) for t in tasks], False

  def group(self, task, tells):
    return Group(
      task,
      [
        Episode(task, i, outcome=Outcome(float(tells and i == 0)))
        for i in range(GROUP)
      ],
    )


def collect(tells, rounds, cursor=0, **kwargs):
  """(what the step is made of, positions of each round)."""
  config = pytypes.SimpleNamespace(
    data=config_lib.Data({}, NUM_TASKS, GROUP, rounds),
    advantage=config_lib.Advantage(),
    placement=config_lib.Placement(timeout_s=LIMIT_S),
  )
  rollout = Rollout(tells, **kwargs)
  played = resample.collect(config, Stream(), cursor, rollout.play)
  return played, rollout.rounds


def positions(groups):
  return [g.task.position for g in groups]


def test_without_it_every_group_stays(monkeypatch):
  monkeypatch.delattr(hosts, "agree")  # and nothing is asked
  found, rounds = collect(lambda p: False, 0, cursor=8)
  assert rounds == [[8, 9, 10, 11]] == [positions(found.groups)]
  assert found[1:] == ([], 0, 12, False)


def test_flat_groups_are_replaced_by_fresh_tasks():
  found, rounds = collect({0, 2, 5, 7}.__contains__, 5)
  assert rounds == [[0, 1, 2, 3], [4, 5], [6], [7]]
  assert positions(found.groups) == [0, 2, 5, 7]
  assert positions(found.replaced) == [1, 3, 4, 6]
  assert found[2:] == (3, 8, False)
  assert positions(found.all) == [0, 2, 5, 7, 1, 3, 4, 6]


def test_a_step_that_tells_everything_is_played_once():
  found, rounds = collect(lambda p: True, 5)
  assert rounds == [[0, 1, 2, 3]] and found[1:] == ([], 0, 4, False)


@pytest.mark.parametrize("bound", [1, 2])
def test_what_is_lacking_at_the_bound_is_made_up_for(bound):
  """With the first that were played; the order is the stream's."""
  found, rounds = collect({3, 5}.__contains__, bound)
  assert rounds == [[0, 1, 2, 3], [4, 5, 6], [7, 8]][: bound + 1]
  assert positions(found.groups) == [0, 1, 3, 5]
  assert len(found.groups) == NUM_TASKS
  assert positions(found.all) == [0, 1, 3, 5, 2, 4, 6, 7, 8][: found.cursor]
  assert found.cursor == sum(map(len, rounds)) and found.rounds == bound


def test_the_next_step_goes_on_behind_and_from_a_cursor_alone():
  """Rule 25."""

  def tells(position):
    return position % 3 == 0

  steps = []
  for _ in range(3):
    steps.append(collect(tells, 2, steps[-1].cursor if steps else 0)[0])
  played = [p for s in steps for p in sorted(positions(s.all))]
  assert played == list(range(steps[-1].cursor))
  for before, after in itertools.pairwise(steps):
    again, _ = collect(tells, 2, cursor=before.cursor)
    assert again == after


def test_a_step_that_is_given_up():
  found, rounds = collect(lambda p: False, 3, stops=lambda p: p[0] == 4)
  assert found.stopped and rounds == [[0, 1, 2, 3], [4, 5, 6, 7]]


# -- two hosts, a thread each --------------------------------------------------


@pytest.fixture
def two_hosts(monkeypatch):
  """Runs a function of the host's number on both."""
  here = threading.local()
  barrier = threading.Barrier(2, timeout=LIMIT_S)
  said = {}

  def agree(name, values, timeout_s):
    said[here.index] = (name, values)
    barrier.wait()
    answers = [said[i] for i in range(2)]
    barrier.wait()
    assert answers[0][0] == answers[1][0]
    return [v for _, v in answers]

  monkeypatch.setattr(hosts, "agree", agree)
  monkeypatch.setattr(hosts, "share", lambda items: items[here.index :: 2])
  monkeypatch.setattr(jax, "process_index", lambda: here.index)

  def run(function):
    results = {}

    def one(index):
      here.index = index
      results[index] = function(index)

    threads = [threading.Thread(target=one, args=[i]) for i in range(2)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(LIMIT_S)
    return [results[i] for i in range(2)]

  return run


@pytest.mark.parametrize("lucky", [0, 1])
def test_hosts_play_what_each_lacks_and_agree_on_the_cursor(two_hosts, lucky):
  """The lucky host has all it needs from the first round on."""

  def tells(position):
    return position % 2 == lucky if position < 4 else position in (5, 6)

  (one, rounds), (two, others) = two_hosts(lambda i: collect(tells, 4))
  assert one.cursor == two.cursor == 7 and one.rounds == two.rounds == 2
  both = [rounds, others]
  assert both[lucky] == [[lucky, 2 + lucky], [], []]
  assert both[1 - lucky] == [[1 - lucky, 3 - lucky], [4, 5], [6]]
  assert positions([one, two][1 - lucky].groups) == [5, 6]


def test_hosts_that_both_lack_play_different_tasks(two_hosts):
  (one, rounds), (two, others) = two_hosts(
    lambda i: collect(lambda p: p in (0, 4, 6), 2)
  )
  # Host 0 lacks one, host 1 two; then host 1 lacks one.
  assert rounds == [[0, 2], [4], []] and others == [[1, 3], [5, 6], [7]]
  assert positions(one.groups) == [0, 4] and positions(two.groups) == [1, 6]
  assert one.cursor == two.cursor == 8


def test_a_host_that_gives_up_keeps_none_waiting(two_hosts):
  (one, rounds), (two, others) = two_hosts(
    lambda i: collect(lambda p: False, 3, stops=lambda p: 1 in p)
  )
  assert rounds == [[0, 2]] and others == [[1, 3]]
  assert not one.stopped and two.stopped
