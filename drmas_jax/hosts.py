"""Several processes: start, agreement, and the end of a run that lost one.

A program on a mesh that spans processes must be entered by all of them, and a
device collective cannot time out. So processes exchange what decides control
flow through the coordination service's key-value store (`agree`), and a daemon
thread on every host watches the others and ends its own process, even while
the main thread is stuck in a collective:

    killed   no sign of life for min(timeout_s, 60) seconds
    stuck    alive, but has not entered what the others wait in (`together`,
             `agree`) for timeout_s
    gone     left the run while others wait for it

The message on stderr names the host, and the exit code is `EXIT_LOST`. One
case is jax's own: when process 0, which runs the coordination service, is
killed, jax aborts the others at once (SIGABRT, exit code 134) and its message
says that the leader, task 0, has died.

Hosts that were not started alike end before the first step, with a ConfigError
on each: see `check_alike` and `check_folder`.

In one process everything here returns at once.
"""

import atexit
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax

from drmas_jax.config import ConfigError

EXIT_LOST = 70

_BEAT_S = 0.5
_SILENT_S = 60.0
_SEEN_S = 60.0  # a file that one host wrote may take so long to get to another
_PIECE = 1 << 20  # bytes of a value in the store
_PREFIX = "drmas_jax"

T = TypeVar("T")


@dataclasses.dataclass
class _Sign:
  """What a host lets the others know, at every beat.

  Attributes:
    name: of the machine.
    beat: counts up for as long as the process lives.
    entered: how many shared sections its main thread has entered.
    at: the name of the last one.
    left: why it is no longer part of the run; "" while it is.
    failed: it left because it lost another host.
  """

  name: str
  beat: int = 0
  entered: int = 0
  at: str = "start"
  left: str = ""
  failed: bool = False


class _Hosts:
  """This process among the others."""

  def __init__(self, client: Any, index: int, count: int, timeout_s: float):
    self.index, self.count, self.timeout_s = index, count, timeout_s
    self.client = client
    self._sign = _Sign(socket.gethostname())
    self._lock = threading.Lock()
    self._waiting: tuple[str, int, float] | None = None
    self._round = 0
    self._stop = threading.Event()
    now = time.monotonic()
    self._seen = {h: (_Sign("?"), now) for h in range(count) if h != index}
    self._publish()
    self._thread = threading.Thread(
      target=self._watch, name="hosts", daemon=True
    )
    self._thread.start()

  # -- the main thread's side --------------------------------------------------

  @contextlib.contextmanager
  def together(self, name: str, timeout_s: float) -> Iterator[None]:
    """The section in which this host may wait for the others."""
    if self._waiting is not None:  # within another; that one's limit holds
      yield
      return
    number = self._sign.entered + 1
    self._publish(entered=number, at=name)
    self._waiting = name, number, time.monotonic() + timeout_s
    try:
      yield
    except jax.errors.JaxRuntimeError:
      # Most likely a connection that broke with a host: the watching thread
      # gets the time to find out which one. If it finds none, it is not that.
      time.sleep(min(self.timeout_s, _SILENT_S) + 8 * _BEAT_S)
      raise
    finally:
      self._waiting = None

  def agree(
    self, name: str, values: Mapping[str, Any], timeout_s: float
  ) -> list[dict[str, Any]]:
    self._round += 1
    where = f"{_PREFIX}/agree/{self._round}"
    with self.together(f"agree on {name!r}", timeout_s):
      self.client.key_value_set(
        f"{where}/{self.index}", _dump({"name": name, "values": values})
      )
      limit_ms = _limit_ms(timeout_s)
      answers = [
        json.loads(self.client.blocking_key_value_get(f"{where}/{h}", limit_ms))
        for h in range(self.count)
      ]
    for host, answer in enumerate(answers):
      if answer["name"] != name:
        raise RuntimeError(
          f"host {self.index} asks to agree on {name!r} and host {host} on "
          f"{answer['name']!r}: the hosts took different branches"
        )
    # All have answered this round, so all have read the one before.
    self.client.key_value_delete(
      f"{_PREFIX}/agree/{self._round - 1}/{self.index}"
    )
    return [answer["values"] for answer in answers]

  def to_first(self, name: str, data: bytes) -> list[bytes]:
    pieces = [data[i : i + _PIECE] for i in range(0, len(data), _PIECE)]
    counts = self.agree(name, {"pieces": len(pieces)}, self.timeout_s)
    where = f"{_PREFIX}/sent/{self._round}"
    with self.together(f"sending {name!r} to host 0", self.timeout_s):
      if self.index:
        for i, piece in enumerate(pieces):
          self.client.key_value_set_bytes(f"{where}/{self.index}/{i}", piece)
        return []
      return [data] + [
        b"".join(
          self._take(f"{where}/{host}/{i}")
          for i in range(counts[host]["pieces"])
        )
        for host in range(1, self.count)
      ]

  def _take(self, key: str) -> bytes:
    limit_ms = _limit_ms(self.timeout_s)
    value = self.client.blocking_key_value_get_bytes(key, limit_ms)
    self.client.key_value_delete(key)
    return value

  def missing(self) -> str:
    """Whom the main thread waits for, and in what; from any thread."""
    waiting = self._waiting
    if waiting is None:
      return ""
    late = [
      f"host {host} ({sign.name}), which is at: {sign.at}"
      for host, (sign, _) in self._seen.items()
      if sign.entered < waiting[1]
    ]
    return f"{waiting[0]} waits for {', '.join(late) or 'no host any more'}"

  def leave(self) -> None:
    """At exit: waits for the others to leave too, as jax demands."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      self._publish(left="it exited; its own output says why")
      self._stop.set()
      self._thread.join()
      jax.distributed.shutdown()

  # -- the watching thread's side ----------------------------------------------

  def _publish(self, **changes: Any) -> None:
    with self._lock:
      self._sign = dataclasses.replace(
        self._sign, beat=self._sign.beat + 1, **changes
      )
      self.client.key_value_set(
        f"{_PREFIX}/signs/{self.index}",
        _dump(dataclasses.asdict(self._sign)),
        allow_overwrite=True,
      )

  def _watch(self) -> None:
    while not self._stop.wait(_BEAT_S):
      try:
        self._publish()
        self._look()
      except jax.errors.JaxRuntimeError as e:
        self._end(f"host 0, which leads, has not answered: {e}")
      if problem := self._problem():
        self._end(problem)

  def _look(self) -> None:
    now = time.monotonic()
    for key, value in self.client.key_value_dir_get(f"{_PREFIX}/signs"):
      host, sign = int(key.rpartition("/")[2]), _Sign(**json.loads(value))
      if host != self.index and sign.beat != self._seen[host][0].beat:
        self._seen[host] = sign, now

  def _problem(self) -> str | None:
    """Why the run cannot go on, if it cannot."""
    now, waiting = time.monotonic(), self._waiting
    over = waiting is not None and now > waiting[2]
    # Once a wait is over, a host that has missed a few beats is the reason.
    limit = 8 * _BEAT_S if over else min(self.timeout_s, _SILENT_S)
    for host, (sign, since) in self._seen.items():
      who = f"host {host} ({sign.name})"
      late = waiting is not None and sign.entered < waiting[1]
      if sign.left:
        if sign.failed or late:
          return f"{who} has left the run: {sign.left}"
      elif now - since > limit:
        return (
          f"{who} has not answered for {now - since:.0f} s; it was last seen "
          f"at: {sign.at}"
        )
      elif late and over:
        return (
          f"{who} has not come to: {waiting[0]}, within the limit of "
          f"placement.timeout_s={self.timeout_s:g}; it is alive, at: {sign.at}"
        )
    if over:
      return (
        f"all hosts came to: {waiting[0]}, but it did not end within "
        f"placement.timeout_s={self.timeout_s:g}"
      )
    return None

  def _end(self, problem: str) -> None:
    """Ends this process from whichever thread finds the problem."""
    sys.stdout.flush()
    os.write(2, f"drmas_jax: host {self.index}: {problem}\n".encode())
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      self._publish(left=problem, failed=True)
      if self.index == 0:
        # jax aborts the others once this process is gone; let them find the
        # problem and say so first.
        time.sleep(4 * _BEAT_S)
      if any(s.left and not s.failed for s, _ in self._seen.values()):
        # That one waits in the same call, and so keeps its own exit code.
        jax.distributed.shutdown()
    os._exit(EXIT_LOST)


_hosts: _Hosts | None = None


def initialize(
  address: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
  *,
  timeout_s: float,
) -> None:
  """Joins the other processes; before the first use of a device.

  Args:
    address: host:port of process 0, or "auto": the cluster says it all (TPU
      pods, Slurm, Open MPI). None: a run of one process.
    num_processes: may be left out where the cluster says it.
    process_id: likewise.
    timeout_s: limit of this and, by default, of every later wait.

  Raises:
    ConfigError: the flags are incomplete, or the others did not come.
  """
  global _hosts
  if address is None:
    if num_processes is not None or process_id is not None:
      raise ConfigError(
        f"--coordinator_address: missing, with --num_processes={num_processes} "
        f"and --process_id={process_id}; add host:port of process 0, or 'auto'"
      )
    return
  # SIGTERM stays the coordinator's own: jax would catch and keep it.
  jax.config.update("jax_enable_preemption_service", False)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  try:
    jax.distributed.initialize(
      None if address == "auto" else address,
      num_processes,
      process_id,
      initialization_timeout=math.ceil(timeout_s),
      # Later than this module's own, whose message says more.
      heartbeat_timeout_seconds=math.ceil(timeout_s + 2 * _SILENT_S),
      shutdown_timeout_seconds=math.ceil(timeout_s),
    )
  except (ValueError, jax.errors.JaxRuntimeError) as e:
    raise ConfigError(
      f"--coordinator_address={address} --num_processes={num_processes} "
      f"--process_id={process_id}: {e}"
    ) from e
  from jax._src import distributed  # the store has no public name

  client = distributed.global_state.client
  _hosts = _Hosts(client, jax.process_index(), jax.process_count(), timeout_s)
  atexit.register(_hosts.leave)


def agree(
  name: str, values: Mapping[str, Any], timeout_s: float | None = None
) -> list[dict[str, Any]]:
  """Every host's `values`, in the order of the hosts.

  One round through the key-value store, not a device collective, so it has a
  time limit: a host that does not come in time ends the run and is named. It
  is called by all hosts in the same order.

  Args:
    name: of the exchange; hosts that disagree on it took different branches.
    values: what JSON holds, and numpy numbers; a few kB.
    timeout_s: default that of `initialize`.
  """
  if _hosts is None:
    return [json.loads(_dump(values))]
  return _hosts.agree(name, values, timeout_s or _hosts.timeout_s)


def to_first(name: str, data: bytes) -> list[bytes]:
  """At process 0 every host's bytes, in the order of the hosts; [] elsewhere.

  Through the key-value store, so for what is written now and then, of some MB.
  It is called by all hosts in the same order.

  Args:
    name: of what is sent.
    data: of this host.
  """
  return [data] if _hosts is None else _hosts.to_first(name, data)


def check_alike(what: str, values: Mapping[str, Any]) -> None:
  """Hosts that were given different values would train apart, or wait for each
  other in vain.

  Args:
    what: the values are of.
    values: by the name that a user knows; what `agree` takes.

  Raises:
    ConfigError: on all hosts, with each name that has different values.
  """
  if _hosts is None:
    return
  texts = {name: _dump(value) for name, value in values.items()}
  digest = hashlib.sha256(_dump(texts).encode()).hexdigest()
  digests = [x["digest"] for x in agree(what, {"digest": digest})]
  odd = next((h for h, d in enumerate(digests) if d != digests[0]), None)
  if odd is None:
    return
  answers = agree(f"{what}, in full", texts)
  one, other = answers[0], answers[odd]
  raise ConfigError(
    "\n".join(
      f"{name}: is {one.get(name, 'absent')} on host 0, and "
      f"{other.get(name, 'absent')} on host {odd}; start all processes with "
      "the same command, config and data"
      for name in sorted({*one, *other})
      if one.get(name) != other.get(name)
    )
  )


def check_folder(folder: pathlib.Path) -> None:
  """All hosts must see what process 0 writes there.

  Args:
    folder: which process 0 has made.

  Raises:
    ConfigError: on all hosts, naming those that do not.
  """
  if _hosts is None:
    return
  path, mine = folder / ".hosts", os.urandom(8).hex()
  if _hosts.index == 0:
    path.write_text(mine)
  token = agree("a file", {"token": mine})[0]["token"]
  limit = time.monotonic() + _SEEN_S
  while not (seen := _reads(path, token)) and time.monotonic() < limit:
    time.sleep(_BEAT_S)
  me = {"seen": seen, "name": socket.gethostname()}
  answers = agree("who sees it", me, _hosts.timeout_s + _SEEN_S)
  if _hosts.index == 0:
    path.unlink()
  if blind := [
    f"host {host} ({answer['name']})"
    for host, answer in enumerate(answers)
    if not answer["seen"]
  ]:
    raise ConfigError(
      f"--workdir: {', '.join(blind)} does not see what host 0 writes in "
      f"{folder.absolute()}; all must see the same folder under the same name "
      "(NFS, a mounted bucket); name such a one"
    )


def _reads(path: pathlib.Path, text: str) -> bool:
  try:
    return path.read_text() == text
  except OSError:
    return False


@contextlib.contextmanager
def together(name: str, timeout_s: float | None = None) -> Iterator[None]:
  """Around programs that all hosts must enter, up to the wait for their end.

  Within another `together` it does nothing.
  """
  if _hosts is None:
    yield
    return
  with _hosts.together(name, timeout_s or _hosts.timeout_s):
    yield


def waiting() -> str:
  """What this host waits in for which others; "" if it does not."""
  return "" if _hosts is None else _hosts.missing()


def share(items: Sequence[T]) -> Sequence[T]:
  """This host's part: item i belongs to host i modulo their number."""
  if _hosts is None:
    return items
  return items[_hosts.index :: _hosts.count]


def say(text: str) -> None:
  """What is going on, for whoever watches; on stderr, by process 0."""
  if jax.process_index() == 0:
    print(f"drmas_jax: {text}", file=sys.stderr, flush=True)


def _limit_ms(timeout_s: float) -> int:
  """Of a call that waits: never met, as the watching thread ends the process
  first."""
  return int(2000 * timeout_s) + 60_000


def _dump(values: Any) -> str:
  return json.dumps(values, default=lambda x: x.tolist())
