"""What goes over the wire: queries and passages as JSON, two ways.

    Search-R1   {"queries": [..], "topk": 3, "return_scores": true}
    Dr. MAS     {"query": "..", "topk": 3, "return_scores": true}

    both             {"result": [[{"document": {"id", "contents"}, "score"}]]}
    without scores   {"result": [[{"id", "contents"}]]}

The outer list has an entry for each query. Sources: PeterGriffinJin/Search-R1
and langfengQ/DrMAS. A shape that is neither is an error, never an empty result.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from drmas_jax.door import ApiError
from drmas_jax.retrieval import retriever
from drmas_jax.retrieval.retriever import Passage, RetrievalFault

FORMATS = ("search_r1", "drmas")
MAX_QUERIES = 1024
_DEFAULT_K = 3


class Ask(NamedTuple):
  """What a request asks for."""

  queries: list[str]
  k: int
  scores: bool


# -- the client's side ---------------------------------------------------------


def write_ask(queries: Sequence[str], k: int, form: str) -> bytes:
  """A request's body; `form` "drmas" has one query."""
  body: dict[str, Any] = {"topk": k, "return_scores": True}
  if form == "drmas":
    (body["query"],) = queries
  else:
    body["queries"] = list(queries)
  return json.dumps(body).encode()


def read_answer(body: bytes, num: int, k: int) -> list[list[Passage]]:
  """The passages of `num` queries, k at most of each.

  Raises:
    RetrievalFault: it is of another shape, or for another number of queries.
  """
  try:
    raw = json.loads(body)
    result = raw.get("result") if isinstance(raw, dict) else None
    if not isinstance(result, list):
      raise ValueError('it holds no list "result"')
    if num == 1 and not result:
      result = [[]]
    if len(result) != num:
      raise ValueError(f"it holds {len(result)} results for {num} queries")
    return [[_read_hit(hit) for hit in _list(hits)[:k]] for hits in result]
  except (ValueError, OverflowError, RecursionError) as e:
    shown = body[:80].decode("utf-8", "replace")
    raise RetrievalFault(
      f"the server's answer is not understood: {e}; it begins {shown!r}"
    ) from e


def _list(hits: Any) -> list:
  if not isinstance(hits, list):
    raise ValueError("a result is no list")
  return hits


def _read_hit(hit: Any) -> Passage:
  score = 0.0
  if isinstance(hit, dict) and "document" in hit:
    hit, score = hit["document"], hit.get("score", 0.0)
  if not isinstance(hit, dict):
    raise ValueError("a document is no object")
  if isinstance(score, bool) or not isinstance(score, int | float):
    raise ValueError("a score is no number")
  return retriever.passage(hit, float(score))


# -- the server's side ---------------------------------------------------------


def read_ask(body: bytes) -> Ask:
  """A request of either format.

  Raises:
    ApiError: of status 400.
  """
  try:
    raw = json.loads(body)
  except (ValueError, RecursionError) as e:
    raise ApiError(400, f"the body is not JSON: {e}", "invalid_json") from e
  if not isinstance(raw, dict):
    raise ApiError(400, "the body is not a JSON object", "invalid_json")
  for key in raw.keys() - {"query", "queries", "topk", "return_scores"}:
    raise ApiError(
      400,
      f"{key[:80]}: unknown key; allowed are query or queries, topk, "
      "return_scores",
      "unknown_key",
      key[:80],
    )
  return Ask(_queries(raw), _k(raw), _scores(raw))


def _queries(raw: Mapping[str, Any]) -> list[str]:
  if ("query" in raw) == ("queries" in raw):
    raise ApiError(400, "write either query or queries", "missing", "query")
  key = "query" if "query" in raw else "queries"
  queries = [raw[key]] if key == "query" else raw[key]
  if not isinstance(queries, list) or not all(
    isinstance(q, str) for q in queries
  ):
    allowed = "a text" if key == "query" else "a list of texts"
    raise ApiError(400, f"{key}: must be {allowed}", "invalid_value", key)
  if len(queries) > MAX_QUERIES:
    raise ApiError(
      400,
      f"queries: {len(queries)} are too many; allowed are {MAX_QUERIES}",
      "invalid_value",
      key,
    )
  return queries


def _k(raw: Mapping[str, Any]) -> int:
  k = raw.get("topk")
  k = _DEFAULT_K if k is None else k
  if type(k) is not int or not 0 < k <= retriever.MAX_K:
    raise ApiError(
      400,
      f"topk: must be an integer from 1 to {retriever.MAX_K}",
      "invalid_value",
      "topk",
    )
  return k


def _scores(raw: Mapping[str, Any]) -> bool:
  scores = raw.get("return_scores", False)
  if not isinstance(scores, bool):
    raise ApiError(
      400, "return_scores: must be a boolean", "invalid_value", "return_scores"
    )
  return scores


def write_answer(
  found: Sequence[Sequence[Passage]], scores: bool
) -> dict[str, Any]:
  """What `ask` is answered with."""
  return {"result": [[_write_hit(p, scores) for p in hits] for hits in found]}


def _write_hit(passage: Passage, scores: bool) -> dict[str, Any]:
  document = {"id": passage.id, "contents": passage.contents}
  if not scores:
    return document
  return {"document": document, "score": passage.score}
