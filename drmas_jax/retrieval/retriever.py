"""What is found, who finds it, and how many queries become one search.

Retriever   search(queries, k): blocks, many at once     bm25, dense
Source      await retrieve(query, k): one of an episode  Batcher, client
Batcher     a Source (and what the server waits for) over a Retriever
"""

import asyncio
import concurrent.futures
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from drmas_jax.types import TransientError

MAX_QUERY = 2048  # characters that are searched for
MAX_K = 1000


class Passage(NamedTuple):
  """A document, or the part of one that a corpus holds as a row.

  Attributes:
    id: of the row in its corpus; "" where a server does not tell.
    title: "" where there is none.
    text: foreign text: never parsed.
    score: the higher, the better; 0 where a server does not tell.
  """

  id: str
  title: str
  text: str
  score: float = 0.0

  @property
  def contents(self) -> str:
    """Title and text as one, in the layout of the public wiki-18 corpus."""
    if not self.title and "\n" not in self.text:
      return self.text
    return f'"{self.title}"\n{self.text}'


class RetrievalFault(TransientError):
  """There is no answer. It loses the episode, and is never a wrong answer.

  Attributes:
    wall_clock: whether a clock decided, so that the run is not reproducible.
  """

  def __init__(self, message: str, wall_clock: bool = False):
    super().__init__(message)
    self.wall_clock = wall_clock


class Retriever(Protocol):
  """Finds passages; called by one thread at a time."""

  def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
    """Up to k passages for each query, the best first; of equal scores, those
    that come first in the corpus. Fewer, or none, where no more are alike."""
    ...

  def __len__(self) -> int:
    """Passages that there are."""
    ...


class Source(Protocol):
  """Where an episode gets passages from; any number may wait at a time."""

  async def retrieve(self, query: str, k: int) -> list[Passage]:
    """Up to k passages; none for a query without a word.

    Raises:
      RetrievalFault: there is no answer.
    """
    ...


def clean(query: str) -> str:
  """A query as it is searched for: one that a model wrote may be anything.

  Of a long one, the first `MAX_QUERY` characters; halves of a surrogate pair,
  which no encoding has, become question marks.
  """
  return query.strip()[:MAX_QUERY].encode("utf-8", "replace").decode()


def passage(document: Mapping[str, Any], score: float = 0.0) -> Passage:
  """From {"id", "contents": "title\\ntext"} or {"id", "title", "text"}.

  Raises:
    ValueError: neither is there, or something in it is no text.
  """
  name = document.get("id", "")
  if isinstance(name, int) and not isinstance(name, bool):
    name = str(name)
  if "contents" in document:
    contents = document["contents"]
    title, text = _split(contents) if isinstance(contents, str) else ("", None)
  else:
    title, text = document.get("title", ""), document.get("text")
  for key, value in (("id", name), ("title", title), ("text", text)):
    if not isinstance(value, str):
      raise ValueError(
        f"its {key} is {type(value).__name__}, not a text; allowed are objects "
        'with "id" and "contents", or "id", "title" and "text"'
      )
  return Passage(name, title, text, score)


def _split(contents: str) -> tuple[str, str]:
  first, newline, rest = contents.partition("\n")
  if not newline:
    return "", contents
  first = first.strip()
  if len(first) > 1 and first[0] == first[-1] == '"':
    first = first[1:-1]
  return first, rest


class _Job(NamedTuple):
  """What was asked for at once."""

  queries: list[str]
  k: int
  future: concurrent.futures.Future


class Batcher:
  """One thread that searches for all who wait: a `Source`.

  What comes within a moment is one search. Where that fails, each asker's part
  is searched by itself, so that one query costs nobody else's episode.
  """

  def __init__(
    self, retriever: Retriever, wait_s: float = 0.003, max_batch: int = 256
  ):
    """Starts the thread.

    Args:
      retriever: from now on used by that thread alone.
      wait_s: how long the first of a batch waits for others.
      max_batch: queries of one search (but always those of one asker).
    """
    self.retriever = retriever
    self.num_open = 0  # queries asked for and not answered
    self._wait_s, self._max_batch = wait_s, max_batch
    self._lock = threading.Lock()
    self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
    self._thread = threading.Thread(
      target=self._run, name="drmas-retrieval", daemon=True
    )
    self._thread.start()

  def submit(
    self, queries: Sequence[str], k: int
  ) -> "concurrent.futures.Future[list[list[Passage]]]":
    """Asks; what comes of it is an entry for each query. From any thread."""
    queries = [clean(q) for q in queries]
    future = concurrent.futures.Future()
    with self._lock:
      self.num_open += len(queries)
    future.add_done_callback(lambda _: self._closed(len(queries)))
    self._jobs.put(_Job(queries, k, future))
    return future

  async def retrieve(self, query: str, k: int) -> list[Passage]:
    """As `Source` says."""
    try:
      (found,) = await asyncio.wrap_future(self.submit([query], k))
    except Exception as e:
      raise RetrievalFault(f"the search failed: {type(e).__name__}: {e}") from e
    return found

  def close(self) -> None:
    """Ends the thread; what was asked for before is answered."""
    self._jobs.put(None)
    self._thread.join(timeout=10)

  def _closed(self, num: int) -> None:
    with self._lock:
      self.num_open -= num

  def _run(self) -> None:
    while (job := self._jobs.get()) is not None:
      jobs, last = self._gather(job)
      self._answer([j for j in jobs if j.future.set_running_or_notify_cancel()])
      if last:
        return

  def _gather(self, first: _Job) -> tuple[list[_Job], bool]:
    """A batch, and whether it is the last one."""
    jobs, num = [first], len(first.queries)
    deadline = time.monotonic() + self._wait_s
    while num < self._max_batch:
      try:
        job = self._jobs.get(timeout=max(0.0, deadline - time.monotonic()))
      except queue.Empty:
        break
      if job is None:
        return jobs, True
      jobs.append(job)
      num += len(job.queries)
    return jobs, False

  def _answer(self, jobs: list[_Job]) -> None:
    try:
      found = self._search(jobs)
    except Exception as e:
      if len(jobs) > 1:
        for job in jobs:
          self._answer([job])
      else:
        jobs[0].future.set_exception(e)
      return
    for job in jobs:
      job.future.set_result([found[q][: job.k] for q in job.queries])

  def _search(self, jobs: list[_Job]) -> dict[str, list[Passage]]:
    """Each query once, however many ask for it."""
    queries = list(dict.fromkeys(q for job in jobs for q in job.queries if q))
    found: dict[str, list[Passage]] = {"": []}
    if queries:
      k = max(job.k for job in jobs)
      answers = self.retriever.search(queries, k)
      found |= zip(queries, answers, strict=True)
    return found
