"""Questions with short answers, and passages to be searched for.

The retriever is a module of `retrieval/` (or your own, by dotted name) whose
`make(**options)` gives a `retrieval.retriever.Source`:

    environment=dict(name="search", options=dict(
      retriever=dict(kind="bm25", corpus="data/wiki-18")))

A search that fails loses its episode; it is never a wrong answer.
"""

import importlib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from drmas_jax.grading import qa
from drmas_jax.retrieval import retriever as retrieval
from drmas_jax.types import Episode, Outcome, Task

VERSION = f"search {qa.VERSION}"

_KINDS = ("bm25", "dense", "client", "memory")
_METRICS = {"em": qa.em, "em_search_r1": qa.em_search_r1}
_ANSWER = re.compile("<answer>(.*?)</answer>", re.DOTALL)


class SearchEnvironment:
  """Reward 1 for a right answer, 0 for any other and for none.

  Parts: `answered`; `searches` made; and `gold_found`, whether a gold answer
  stands in a passage of the episode, but for case: what was not found cannot
  well be answered.
  """

  def __init__(
    self,
    source: retrieval.Source,
    *,
    topk: int = 3,
    passage_chars: int = 4000,
    passages: Literal["plain", "json"] = "plain",
    metric: Literal["em", "em_search_r1"] = "em",
    scored: Literal["answer", "history"] = "answer",
  ):
    """See `make`."""
    self._source, self._topk = source, topk
    self._passage_chars, self._passages = passage_chars, passages
    self._equal, self._scored = _METRICS[metric], scored

  async def act(self, task: Task, action: str) -> tuple[str, ...]:
    """Passages for a query, the best first.

    Raises:
      RetrievalFault: there is no answer.
    """
    del task
    found = await self._source.retrieve(action, self._topk)
    shown = [p.contents.strip()[: self._passage_chars] for p in found]
    if self._passages == "plain":
      return tuple(shown)
    lines = [f"Doc {i}: {text}\n" for i, text in enumerate(shown, 1)]
    text = "".join(lines) or "No search results found."
    return (json.dumps({"result": text}),)

  def score(self, task: Task, episode: Episode) -> Outcome:
    golds = [task.answer] if isinstance(task.answer, str) else task.answer
    answer = episode.action
    if self._scored == "history":
      answer = _last_answer(episode)
    right = self._equal(answer, golds) and bool(answer)
    found = [
      text for _, documents in episode.observations for text in documents
    ]
    return Outcome(
      reward=float(right),
      parts={
        "answered": float(bool(answer)),
        "searches": float(len(episode.observations)),
        "gold_found": float(_stands_in(golds, found)),
      },
      answer=qa.normalize(answer) or None,
    )


def _last_answer(episode: Episode) -> str:
  """Of all that the reference keeps: queries, passages, the action."""
  history = [
    f"<search>{query}</search>{' '.join(documents)}"
    for query, documents in episode.observations
  ]
  if episode.action:
    history.append(f"<answer>{episode.action}</answer>")
  return "".join(_ANSWER.findall("".join(history))[-1:]).strip()


def _stands_in(golds: Sequence[str], documents: Sequence[str]) -> bool:
  wanted, folded = ([t.casefold() for t in ts] for ts in (golds, documents))
  return any(gold in text for text in folded for gold in wanted)


# -- from options --------------------------------------------------------------


def check(
  *,
  retriever: Mapping[str, Any],
  topk: int = 3,
  passage_chars: int = 4000,
  **others: Any,
) -> None:
  """Refuses options that cannot run, before anything starts."""
  del others
  _maker(retriever)
  for name, value in (("topk", topk), ("passage_chars", passage_chars)):
    if value < 1:
      raise ValueError(f"{name}: {value} is not allowed; write one >= 1")
  if topk > retrieval.MAX_K:
    raise ValueError(
      f"topk: {topk} is not allowed; write at most {retrieval.MAX_K}"
    )


def make(
  *,
  retriever: dict[str, Any],
  topk: int = 3,
  passage_chars: int = 4000,
  passages: Literal["plain", "json"] = "plain",
  metric: Literal["em", "em_search_r1"] = "em",
  scored: Literal["answer", "history"] = "answer",
) -> SearchEnvironment:
  """An environment with a retriever of its own.

  Args:
    retriever: {"kind": of the module, option: value, ..}.
    topk: passages to a query, at most.
    passage_chars: of a passage, so many characters are shown at most.
    passages: each as it is, or all in one JSON text, escaped, as in the
      reference.
    metric: how an answer is compared with the gold ones; see `grading.qa`.
    scored: the answer that acted; or the last `<answer>..</answer>` in all
      queries, passages and the answer, as in the reference.

  Raises:
    ValueError: a retriever that there is not, or that cannot be made.
  """
  make_source, options = _maker(retriever)
  return SearchEnvironment(
    make_source(**options),
    topk=topk,
    passage_chars=passage_chars,
    passages=passages,
    metric=metric,
    scored=scored,
  )


def _maker(retriever: Mapping[str, Any]):
  """`make` of the named module, and its options.

  Raises:
    ValueError: there is none, or it has no such options.
  """
  if not isinstance(retriever, Mapping):
    raise ValueError(
      f"retriever: {retriever!r} is no group of keys; write dict(kind=.., ..)"
    )
  options = dict(retriever)
  kind = options.pop("kind", "bm25")
  name = kind if "." in kind else f"drmas_jax.retrieval.{kind}"
  try:
    maker = importlib.import_module(name).make
  except (ModuleNotFoundError, AttributeError) as e:
    raise ValueError(
      f"retriever.kind: {kind!r} cannot be used ({e}); allowed are "
      f"{', '.join(_KINDS)}, or a module of your own with make(..)"
    ) from e
  try:
    inspect.signature(maker).bind(**options)
  except TypeError as e:
    allowed = ", ".join(inspect.signature(maker).parameters)
    raise ValueError(
      f"retriever: {e} of the kind {kind!r}; its options are {allowed}"
    ) from None
  return maker, options
