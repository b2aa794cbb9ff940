"""Passages from a server, over HTTP: one of Search-R1, of Dr. MAS, or `serve`.

    retrieve -> cache -> collected for a moment -> a request of many queries
      -> tries, one after the other or at once -> passages, or a RetrievalFault

All of it runs in the event loop that asks first; who waits holds no thread. A
query has one budget of time, whatever becomes of its tries. A try that fails in
a way that may pass (`http.Passing`) is followed by another behind a pause,
which doubles. One that takes much longer than is usual is not waited for alone:
the same request goes out once more, and the first answer is taken
(https://research.google/pubs/the-tail-at-scale/).
"""

import asyncio
import collections
import dataclasses
from collections.abc import Sequence

from drmas_jax import http
from drmas_jax.retrieval import retriever, wire
from drmas_jax.retrieval.retriever import Passage, RetrievalFault

_MAX_TRIES = 3  # of one request at once
_PAUSE_S = (0.05, 2.0)  # behind the first failure; at most
_PATIENCE_S = (0.05, 10.0)  # least and most that one try is waited for alone
_LOOK_S = 1.0


@dataclasses.dataclass
class _Asked:
  """A query that waits; `trouble` is what the last try met."""

  query: str
  k: int
  future: asyncio.Future
  trouble: str = "no answer"


class _Usual:
  """How long an answer takes, as TCP estimates it (RFC 6298)."""

  def __init__(self):
    self._mean, self._spread = 0.0, 0.0

  def add(self, seconds: float) -> None:
    if not self._mean:
      self._mean, self._spread = seconds, seconds / 2
    self._spread += (abs(seconds - self._mean) - self._spread) / 4
    self._mean += (seconds - self._mean) / 8

  @property
  def patience_s(self) -> float:
    least, most = _PATIENCE_S
    if not self._mean:
      return most
    return min(most, max(least, self._mean + 4 * self._spread))


class Client:
  """A `retriever.Source`."""

  def __init__(
    self,
    url: str | Sequence[str],
    *,
    form: str = "search_r1",
    budget_s: float = 30.0,
    connections: int = 8,
    batch: int = 64,
    wait_s: float = 0.002,
    cached: int = 10_000,
  ):
    """Connects to nothing yet.

    Args:
      url: such as "http://127.0.0.1:8000/retrieve"; of several, each try takes
        the next one.
      form: "search_r1", or "drmas", which has one query a request.
      budget_s: of a query, with all that it takes.
      connections: requests at once, repeated ones apart.
      batch: queries of one request.
      wait_s: how long the first of a request waits for others.
      cached: answers that are kept; 0: none.

    Raises:
      ValueError: an argument is out of range.
    """
    urls = [url] if isinstance(url, str) else list(url)
    _check(urls, form, budget_s, connections, batch, wait_s, cached)
    self._servers = [http.Server(one) for one in urls]
    self._form, self._budget_s = form, budget_s
    self._free = connections
    self._batch = 1 if form == "drmas" else batch
    self._wait_s, self._cached = wait_s, cached
    self._cache: collections.OrderedDict = collections.OrderedDict()
    self._waiting: collections.deque[_Asked] = collections.deque()
    self._flush_at: asyncio.TimerHandle | None = None
    self._tasks: set[asyncio.Task] = set()
    self._usual = _Usual()
    self._turn = 0
    self._backoff = http.Backoff(*_PAUSE_S)
    self.num_tries = self.num_failed_tries = 0

  async def retrieve(self, query: str, k: int) -> list[Passage]:
    """As `retriever.Source` says."""
    query = retriever.clean(query)
    if not query:
      return []
    if (query, k) in self._cache:
      self._cache.move_to_end((query, k))
      return list(self._cache[query, k])
    loop = asyncio.get_running_loop()
    asked = _Asked(query, k, loop.create_future())
    self._waiting.append(asked)
    self._wake(loop)
    try:
      async with asyncio.timeout(self._budget_s):
        found = await asked.future
    except TimeoutError:
      raise RetrievalFault(
        f"no passages within {self._budget_s:g} s from "
        f"{', '.join(s.url for s in self._servers)}: {asked.trouble}",
        wall_clock=True,
      ) from None
    self._keep((query, k), found)
    return list(found)

  async def close(self) -> None:
    """Gives up what is under way, and closes connections."""
    for task in self._tasks:
      task.cancel()
    await asyncio.gather(*self._tasks, return_exceptions=True)
    for server in self._servers:
      server.close()

  def _keep(self, key: tuple[str, int], found: list[Passage]) -> None:
    if self._cached:
      self._cache[key] = found
      while len(self._cache) > self._cached:
        self._cache.popitem(last=False)

  # -- requests ----------------------------------------------------------------

  def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
    if len(self._waiting) >= self._batch:
      self._flush()
    elif self._flush_at is None:
      self._flush_at = loop.call_later(self._wait_s, self._flush)

  def _flush(self) -> None:
    """Sends what waits, as far as requests may be under way."""
    if self._flush_at is not None:
      self._flush_at.cancel()
      self._flush_at = None
    while self._free and self._waiting:
      batch = self._take()
      if batch:
        self._free -= 1
        task = asyncio.create_task(self._send(batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

  def _take(self) -> list[_Asked]:
    """Those who wait longest, and ask for the same number of passages."""
    batch, others = [], []
    while self._waiting and len(batch) < self._batch:
      asked = self._waiting.popleft()
      if asked.future.done():
        continue
      alike = not batch or asked.k == batch[0].k
      (batch if alike else others).append(asked)
    self._waiting.extendleft(reversed(others))
    return batch

  async def _send(self, batch: list[_Asked]) -> None:
    """Answers all of a batch."""
    queries = list(dict.fromkeys(asked.query for asked in batch))
    try:
      found = await self._answer(batch, queries)
      answers = dict(zip(queries, found, strict=True))
      for asked in _open(batch):
        asked.future.set_result(answers[asked.query])
    except RetrievalFault as e:
      for asked in _open(batch):
        asked.future.set_exception(RetrievalFault(str(e), e.wall_clock))
    except Exception as e:  # a fault of ours: not to be waited for
      for asked in _open(batch):
        asked.future.set_exception(e)
    finally:
      self._free += 1
      self._flush()

  async def _answer(
    self, batch: list[_Asked], queries: list[str]
  ) -> list[list[Passage]]:
    """By as many tries as it takes, while anybody waits."""
    k = batch[0].k
    body = wire.write_ask(queries, k, self._form)
    loop = asyncio.get_running_loop()
    tries: set[asyncio.Task] = set()
    next_at, num_failed = loop.time(), 0
    try:
      while _open(batch):
        if loop.time() >= next_at and len(tries) < _MAX_TRIES:
          tries.add(asyncio.create_task(self._try(body, len(queries), k)))
          next_at = loop.time() + self._usual.patience_s
        pause = min(_LOOK_S, max(0.001, next_at - loop.time()))
        if not tries:
          await asyncio.sleep(pause)
          continue
        if len(tries) == _MAX_TRIES:
          pause = _LOOK_S
        done, tries = await asyncio.wait(
          tries, timeout=pause, return_when=asyncio.FIRST_COMPLETED
        )
        for ended in done:
          trouble = ended.exception()
          if trouble is None:
            return ended.result()
          if not isinstance(trouble, http.Passing):
            raise trouble
          num_failed += 1
          for asked in batch:
            asked.trouble = str(trouble)
          pause = self._backoff.pause(num_failed, trouble.after_s)
          next_at = loop.time() + pause
    finally:
      for one in tries:
        one.cancel()
      await asyncio.gather(*tries, return_exceptions=True)
    return [[] for _ in queries]  # nobody waits for it

  async def _try(self, body: bytes, num: int, k: int) -> list[list[Passage]]:
    """One request.

    Raises:
      http.Passing: another one may do better.
      RetrievalFault: none will.
    """
    server = self._servers[self._turn % len(self._servers)]
    self._turn += 1
    self.num_tries += 1
    began = asyncio.get_running_loop().time()
    try:
      answer = await server.ask(body)
    except http.Passing:
      self.num_failed_tries += 1
      raise
    except http.Refused as e:
      raise RetrievalFault(str(e)) from e
    try:
      found = wire.read_answer(answer, num, k)
    except RetrievalFault as e:
      raise RetrievalFault(f"{server.url}: {e}") from e
    self._usual.add(asyncio.get_running_loop().time() - began)
    return found


def _check(urls, form, budget_s, connections, batch, wait_s, cached) -> None:
  for url in urls:
    if fault := http.url_fault(url):
      raise ValueError(f"url{fault}")
  if not urls:
    raise ValueError("url: names no server")
  if form not in wire.FORMATS:
    raise ValueError(f"form={form!r}: allowed are {', '.join(wire.FORMATS)}")
  for name, value, least in (
    ("budget_s", budget_s, 0.001),
    ("connections", connections, 1),
    ("batch", batch, 1),
    ("wait_s", wait_s, 0),
    ("cached", cached, 0),
  ):
    if not value >= least:
      raise ValueError(f"{name}={value!r}: allowed are {least} and more")
  if batch > wire.MAX_QUERIES:
    raise ValueError(f"batch={batch}: allowed are at most {wire.MAX_QUERIES}")


def _open(batch: Sequence[_Asked]) -> list[_Asked]:
  return [asked for asked in batch if not asked.future.done()]


def make(
  *,
  url: str | list[str],
  form: str = "search_r1",
  budget_s: float = 30.0,
  connections: int = 8,
  batch: int = 64,
  wait_s: float = 0.002,
  cached: int = 10_000,
) -> Client:
  """A source that asks a server; see `Client`."""
  return Client(
    url,
    form=form,
    budget_s=budget_s,
    connections=connections,
    batch=batch,
    wait_s=wait_s,
    cached=cached,
  )
