"""What hosts tell each other, in two threads over a store in memory.

Real processes are in test_multihost.py and test_two_hosts.py.
"""

import concurrent.futures
import pathlib
import threading
import time

import jax
import pytest
import small_run

from drmas_jax import (
  building,
  checkpoint,
  coordinator,
  evaluate,
  hosts,
  replay,
  restoring,
  spikes,
)
from drmas_jax import config as config_lib
from drmas_jax.types import Group, Task

pytestmark = pytest.mark.quick


class Store:
  """The coordination service's, for the threads of one process."""

  def __init__(self):
    self.values = {}
    self._changed = threading.Condition()

  def key_value_set(self, key, value, allow_overwrite=False):
    with self._changed:
      assert allow_overwrite or key not in self.values
      self.values[key] = value
      self._changed.notify_all()

  key_value_set_bytes = key_value_set

  def blocking_key_value_get(self, key, limit_ms):
    with self._changed:
      assert self._changed.wait_for(lambda: key in self.values, timeout=20)
      return self.values[key]

  blocking_key_value_get_bytes = blocking_key_value_get

  def key_value_delete(self, key):
    with self._changed:
      self.values.pop(key, None)

  def key_value_dir_get(self, prefix):
    with self._changed:
      return [p for p in self.values.items() if p[0].startswith(prefix)]


class _Own(threading.local):
  """Stands for `hosts._hosts` of the thread that asks."""

  host = None

  def __getattr__(self, name):
    return getattr(self.host, name)


@pytest.fixture
def both(monkeypatch):
  """Runs a function of the index on two hosts; what each returns or raises."""
  store, own = Store(), _Own()
  made = [hosts._Hosts(store, i, 2, timeout_s=20.0) for i in range(2)]
  monkeypatch.setattr(hosts, "_hosts", own)

  def on(index, function):
    own.host = made[index]
    try:
      return function(index)
    except Exception as e:
      return e

  def run(function):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
      return list(pool.map(on, range(2), [function] * 2))

  run.store = store
  yield run
  for host in made:
    host._stop.set()
    host._thread.join()


def test_hosts_that_were_given_other_values_all_end(both):
  values = {"seed": 1, "policies.a.rate": 0.5, "data": (1, None)}

  def check(index):
    hosts.check_alike("config", values)
    mine = {"seed": 1 + index} | ({"--fork": "x"} if index else {})
    hosts.check_alike("config", values | mine)

  for said in both(check):
    assert isinstance(said, config_lib.ConfigError)
    lines = str(said).splitlines()
    assert len(lines) == 2  # of what differs alone
    assert (
      '--fork: is absent on host 0, and "x" on host 1; start all'
      in said.args[0]
    )
    assert lines[1].startswith("seed: is 1 on host 0, and 2 on host 1;")


def test_a_run_begins_with_the_same_config_flags_and_data(both):
  """Whichever way it begins."""
  config = small_run.ROOT / "tests" / "small_run.py"
  read = [config_lib.read(config, [f"seed={i}"]) for i in range(2)]

  def trains(index):
    run = object.__new__(coordinator.Run)
    run.workdir, run.fingerprints = "run", {"train/sums": f"row {index}"}
    run.restore((), ["", "other@4"][index])

  for begins, named in (
    (lambda i: building.begin(read[i]), ["seed"]),
    (lambda i: evaluate.main(read[0], "run", step=str(i)), ["--step"]),
    (trains, ["--fork", "train/sums"]),
  ):
    for said in both(begins):
      assert isinstance(said, config_lib.ConfigError), said
      lines = str(said).splitlines()
      assert [line.partition(":")[0] for line in lines] == named


def test_hosts_on_different_branches_are_told(both):
  for index, said in enumerate(both(lambda i: hosts.agree("ab"[i], {}))):
    assert isinstance(said, RuntimeError)
    assert f"host {index} asks to agree on" in str(said)


def test_what_is_sent_to_the_first_host(both, monkeypatch):
  """In pieces, whole, in order, and it stays with nobody."""
  monkeypatch.setattr(hosts, "_PIECE", 3)
  mine = [b"of zero", b"\x00of the other\xff"]
  for sent in (mine, [b"", b""], mine[::-1]):
    assert both(lambda i, sent=sent: hosts.to_first("x", sent[i])) == [sent, []]
  assert not [key for key in both.store.values if "/sent/" in key]


def test_all_hosts_see_one_folder(both, tmp_path, monkeypatch):
  assert both(lambda i: hosts.check_folder(tmp_path)) == [None, None]
  assert not list(tmp_path.iterdir())
  monkeypatch.setattr(hosts, "_SEEN_S", 0.0)
  folders = [tmp_path / "a", tmp_path / "b"]
  for folder in folders:
    folder.mkdir()
  (folders[1] / ".hosts").write_text("of a run before")
  for said in both(lambda i: hosts.check_folder(folders[i])):
    assert isinstance(said, config_lib.ConfigError)
    assert "--workdir: host 1 (" in str(said)


def test_a_file_may_come_late(both, tmp_path, monkeypatch):
  monkeypatch.setattr(hosts, "_BEAT_S", 0.01)
  reads, looks = hosts._reads, []

  def late(path, text):
    looks.append(path)
    return len(looks) > 4 and reads(path, text)

  monkeypatch.setattr(hosts, "_reads", late)
  assert both(lambda i: hosts.check_folder(tmp_path)) == [None, None]


class Seen:
  """Checkpoints of which a host sees these."""

  workdir = pathlib.Path("run")

  def __init__(self, *steps):
    self.has = steps.__contains__


def test_a_checkpoint_that_one_host_does_not_see(both):
  """All take what the first has found, whatever is newer by then."""
  runs = Seen(4), Seen(4, 6)
  assert both(lambda i: restoring.of_first(4 + 2 * i, runs[i])) == [4, 4]
  assert both(lambda i: restoring.of_first(None, runs[i])) == [None, None]
  for said in both(lambda i: restoring.of_first(6, (Seen(6), Seen(4))[i])):
    assert isinstance(said, config_lib.ConfigError)
    assert "host 1 does not see the checkpoint of step 6" in str(said)


def test_a_checkpoint_that_one_host_cannot_read(both, tmp_path, monkeypatch):
  """The others leave it too, and all go on from the same one."""
  monkeypatch.setattr(checkpoint.Checkpoints, "steps", lambda self: [2, 4])
  aside = []

  def read(self, step, abstract):
    if step == 4 and self.index == 1:
      raise OSError("stale file handle")
    return {}, step

  monkeypatch.setattr(checkpoint.Checkpoints, "_read", read)
  monkeypatch.setattr(
    checkpoint.Checkpoints,
    "_set_aside",
    lambda self, failed, good: aside.append((failed, good)),
  )

  def restore(index):
    mine = checkpoint.Checkpoints(tmp_path)
    mine.index = index
    return mine.restore({})

  assert both(restore) == [({}, 2), ({}, 2)]
  (one, other) = sorted(aside, key=lambda a: len(a[0][4]))
  assert one == ({4: "OSError: stale file handle"}, 2)
  assert other == ({4: "host 1: OSError: stale file handle"}, 2)


def test_a_spikes_batch_is_kept_by_the_first_host(both, tmp_path, capsys):
  """With the groups of all; too large is what they have together."""
  groups = [[Group(Task("m", i, i, "?", "", {}), [])] for i in range(2)]
  size = max(len(spikes.pack(g)) for g in groups) / 1e6

  def keep(step, spikes_mb):
    limits = config_lib.Logging(spikes_mb=spikes_mb)
    spike = spikes.Spike(step, ["p"], {"p": 2.0}, None, 5, [[0, 0]])
    workdirs = tmp_path / "0", tmp_path / "1"
    both(lambda i: spikes.Spikes(workdirs[i], limits, i).save(spike, groups[i]))

  keep(3, 2.1 * size)
  _, found = spikes.read(tmp_path / "0", 3)
  assert [[g.task.position for g in host] for host in found] == [[0], [1]]
  keep(4, 1.9 * size)
  with pytest.raises(config_lib.ConfigError, match="larger than logging"):
    spikes.read(tmp_path / "0", 4)
  assert not (tmp_path / "1").exists()


def test_a_spikes_batch_on_other_hosts_than_the_runs(both, monkeypatch):
  """Each takes what it had then, or its share."""
  groups = [Group(Task("m", i, i, "?", "", {}), []) for i in (2, 0, 1)]
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  found = both(lambda i: replay._own_part([groups]))
  positions = [[g.task.position for g in own] for own in found]
  assert positions == [[0, 2], [1]]
  monkeypatch.setattr(jax, "process_count", lambda: 1)
  assert replay._own_part([groups]) == groups


def test_a_wait_that_is_over_names_who_is_silent():
  """It may have come to the section and died in it."""
  now = time.monotonic()
  watch = object.__new__(hosts._Hosts)
  watch.timeout_s = 20.0
  watch._waiting = ("update", 3, now - 1)
  watch._seen = {1: (hosts._Sign("b", entered=3, at="update"), now - 6)}
  assert "host 1 (b) has not answered for 6 s" in watch._problem()
  watch._seen = {1: (hosts._Sign("b", entered=3, at="update"), now)}
  assert "all hosts came to: update" in watch._problem()
  watch._waiting = ("update", 3, now + 1)
  assert watch._problem() is None
