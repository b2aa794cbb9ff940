"""What goes over the wire: OpenAI's chat completions, read and written.

Nothing here knows of sockets, threads or devices. What a request may say is the
table `_READERS`; all else is refused by name, so that no key is accepted that
has no effect (`_IGNORED` apart, which is for the accounts of others).

`Text` turns sampled ids into what a client sees. A stop string and what might
become one are held back, and so is a character that is not whole yet.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from drmas_jax.config import Sampling
from drmas_jax.door import ApiError
from drmas_jax.tokenizer import Growing

TEAM = "team"  # the model that is the config's orchestra

_MAX_N = 128
_MAX_STOPS = 16
_HALF = "\ufffd"  # how a character decodes of which a part is missing


def _refuse(key: str, value: Any, allowed: str) -> ApiError:
  shown = repr(value)
  shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
  return ApiError(
    400, f"{key}: {shown} is not allowed; {allowed}", "invalid_value", key
  )


# -- reading -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Ask:
  """A chat completion that is asked for.

  Attributes:
    model: a policy's name, or `TEAM`.
    messages: [{"role", "content"}], contents as one text each.
    max_tokens: None: what the cache has room for.
    sampling: None: not a word of it was said.
    min_tokens: an end token is not drawn before.
    n: choices.
    stop: texts that end a choice, and are not part of it.
    seed: None: another one each time.
    logprobs: whether tokens come with theirs.
    stream: whether the text comes as it is sampled.
    include_usage: whether a stream ends with the counts of tokens.
  """

  model: str
  messages: tuple[dict[str, str], ...]
  max_tokens: int | None = None
  sampling: Sampling | None = None
  min_tokens: int = 0
  n: int = 1
  stop: tuple[str, ...] = ()
  seed: int | None = None
  logprobs: bool = False
  stream: bool = False
  include_usage: bool = False

  @property
  def question(self) -> str:
    """The last user message: the task of a team."""
    return [m for m in self.messages if m["role"] == "user"][-1]["content"]


def parse(body: bytes, models: Collection[str]) -> Ask:
  """Reads the body of POST /v1/chat/completions.

  Args:
    body: JSON in UTF-8.
    models: names that are served.

  Raises:
    ApiError: of status 404 for another model, 400 for all else.
  """
  raw = _load(body)
  found = {}
  for key, value in raw.items():
    if key in _IGNORED or value is None:
      continue
    if key not in _READERS:
      raise _unknown(key)
    found[key] = _READERS[key](key, value)
  for key in ("model", "messages"):
    if key not in found:
      raise ApiError(400, f"{key}: missing; add it", "missing", key)
  if found["model"] not in models:
    raise ApiError(
      404,
      f"model: {found['model']!r} is not served; allowed are "
      f"{', '.join(models)}",
      "model_not_found",
      "model",
    )
  return _ask(found)


def _load(body: bytes) -> dict[str, Any]:
  try:
    raw = json.loads(body)
  except (ValueError, RecursionError) as e:  # ValueError: not UTF-8, too
    raise ApiError(400, f"the body is not JSON: {e}", "invalid_json") from e
  if not isinstance(raw, dict):
    raise ApiError(400, "the body is not a JSON object", "invalid_json")
  return raw


def _ask(found: dict[str, Any]) -> Ask:
  """From what was read key by key; checks that need two keys."""
  limits = [
    found[k] for k in ("max_tokens", "max_completion_tokens") if k in found
  ]
  if len(set(limits)) > 1:
    raise _refuse("max_tokens", limits[0], "write max_completion_tokens alone")
  sampling = {
    k: found[k] for k in ("temperature", "top_k", "top_p") if k in found
  }
  options = found.get("stream_options", {})
  if options and not found.get("stream"):
    raise _refuse("stream_options", options, "write it with stream=true only")
  if found["model"] == TEAM:
    _check_team(found)
  return Ask(
    model=found["model"],
    messages=found["messages"],
    max_tokens=limits[0] if limits else None,
    sampling=Sampling(**sampling) if sampling else None,
    min_tokens=found.get("min_tokens", 0),
    n=found.get("n", 1),
    stop=found.get("stop", ()),
    seed=found.get("seed"),
    logprobs=found.get("logprobs", False),
    stream=found.get("stream", False),
    include_usage=options.get("include_usage", False),
  )


def _check_team(found: Mapping[str, Any]) -> None:
  """What its agents' entries in the config decide, a request cannot."""
  for key in ("max_tokens", "max_completion_tokens", "min_tokens", "stop"):
    if found.get(key):  # none to stop at, and none at the least, ask nothing
      raise _refuse(
        key, found[key], f"model={TEAM!r} takes it from the config's agents"
      )
  if found.get("logprobs"):
    raise _refuse(
      "logprobs", True, f"model={TEAM!r} has none; ask a policy by its name"
    )
  if all(m["role"] != "user" for m in found["messages"]):
    raise ApiError(
      400,
      f"messages: no user message, and the last one is the task of {TEAM!r}; "
      "add one",
      "invalid_value",
      "messages",
    )


def _unknown(key: str) -> ApiError:
  return ApiError(
    400,
    f"{key[:80]}: unknown key; allowed are {', '.join(_READERS)}",
    "unknown_parameter",
    key[:80],
  )


def _string(key: str, value: Any) -> str:
  if not isinstance(value, str):
    raise _refuse(key, value, "write a string")
  return value


def _boolean(key: str, value: Any) -> bool:
  if not isinstance(value, bool):
    raise _refuse(key, value, "write true or false")
  return value


def _integer(low: float = -math.inf, high: float = math.inf) -> Callable:
  def read(key: str, value: Any) -> int:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not low <= value <= high:
      raise _refuse(key, value, f"write an integer{_bounds(low, high)}")
    return value

  return read


def _number(low: float, high: float, above: bool = False) -> Callable:
  """`low` <= value <= `high`; with `above`, not `low` itself."""

  def read(key: str, value: Any) -> float:
    fits = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not fits or not low <= value <= high or (above and value == low):
      least = ">" if above else ">="
      raise _refuse(key, value, f"write a number {least} {low:g}, <= {high:g}")
    return float(value)

  return read


def _bounds(low: float, high: float) -> str:
  found = [f">= {low}"] if low > -math.inf else []
  found += [f"<= {high}"] if high < math.inf else []
  return " " + ", ".join(found) if found else ""


def _messages(key: str, value: Any) -> tuple[dict[str, str], ...]:
  if not isinstance(value, list) or not value:
    raise _refuse(key, value, "write a list of at least one message")
  return tuple(_message(f"{key}[{i}]", m) for i, m in enumerate(value))


_ROLES = ("system", "developer", "user", "assistant")


def _message(key: str, value: Any) -> dict[str, str]:
  if not isinstance(value, dict):
    raise _refuse(key, value, 'write {"role": .., "content": ..}')
  for other in value:
    # Clients send a name, which no template has a place for, or say that a
    # message is text; an answer of OpenAI's, sent back, has empty lists.
    known = other in ("role", "content") or (
      isinstance(value[other], str)
      and (other == "name" or (other, value[other]) == ("type", "text"))
    )
    if not known and value[other] not in (None, []):
      raise _refuse(
        f"{key}.{other[:80]}", value[other], "a message has role and content"
      )
  role = value.get("role")
  if role not in _ROLES:
    raise _refuse(f"{key}.role", role, f"write one of {', '.join(_ROLES)}")
  # Models know the newer name by the older one.
  role = "system" if role == "developer" else role
  content = _content(f"{key}.content", value.get("content"))
  return {"role": role, "content": content}


def _content(key: str, value: Any) -> str:
  if isinstance(value, str):
    return value
  parts = value if isinstance(value, list) else [value]
  texts = [
    p["text"]
    for p in parts
    if isinstance(p, dict)
    and p.keys() == {"type", "text"}
    and p["type"] == "text"
    and isinstance(p["text"], str)
  ]
  if not parts or len(texts) != len(parts):
    raise _refuse(
      key, value, 'write a string, or a list of {"type": "text", "text": ..}'
    )
  return "".join(texts)


def _stop(key: str, value: Any) -> tuple[str, ...]:
  texts = [value] if isinstance(value, str) else value
  if (
    not isinstance(texts, list)
    or len(texts) > _MAX_STOPS
    or not all(isinstance(t, str) and t for t in texts)
  ):
    raise _refuse(
      key,
      value,
      f"write a string, or a list of at most {_MAX_STOPS}, none of them empty",
    )
  return tuple(texts)


def _stream_options(key: str, value: Any) -> dict[str, bool]:
  known = isinstance(value, dict) and value.keys() <= {"include_usage"}
  if not known or not isinstance(value.get("include_usage", False), bool):
    raise _refuse(key, value, 'write {"include_usage": true}')
  return value


def _only(*neutral: Any) -> Callable:
  """Of what is not served: the values that ask for nothing."""

  def read(key: str, value: Any) -> None:
    same = [v for v in neutral if v == value and type(v) is type(value)]
    if not same:
      shown = " or ".join(json.dumps(v) for v in neutral)
      raise _refuse(key, value, f"it is not served; write {shown}, or nothing")

  return read


_READERS: dict[str, Callable[[str, Any], Any]] = {
  "model": _string,
  "messages": _messages,
  "max_tokens": _integer(1),
  "max_completion_tokens": _integer(1),
  "min_tokens": _integer(0),
  "temperature": _number(0, 2),
  "top_p": _number(0, 1, above=True),
  "top_k": _integer(0, 2**31 - 1),
  "n": _integer(1, _MAX_N),
  "stop": _stop,
  "seed": _integer(),
  "logprobs": _boolean,
  "top_logprobs": _only(0),
  "stream": _boolean,
  "stream_options": _stream_options,
  "frequency_penalty": _only(0, 0.0),
  "presence_penalty": _only(0, 0.0),
  "logit_bias": _only({}),
  "response_format": _only({"type": "text"}),
  "tools": _only([]),
  "tool_choice": _only("none"),
}
_IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier")


# -- from ids to what is seen --------------------------------------------------


def find_stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
  """(begin, end) of the stop string that is complete first, or None."""
  found = [
    (at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0
  ]
  if not found:
    return None
  end, begin = min(found)
  return begin, end


def _begun(text: str, stops: Sequence[str]) -> int:
  """Length of the longest end of a text with which a stop string begins."""
  longest = 0
  for stop in stops:
    for num in range(min(len(stop) - 1, len(text)), longest, -1):
      if text.endswith(stop[:num]):
        longest = num
        break
  return longest


@dataclasses.dataclass(frozen=True)
class Token:
  """A sampled token as a client sees it: the text that it added."""

  text: str
  logprob: float

  def body(self) -> dict[str, Any]:
    return {
      "token": self.text,
      "logprob": self.logprob,
      "bytes": list(self.text.encode("utf-8", "replace")),
      "top_logprobs": [],
    }


class Text:
  """A choice's text, as it grows by ids.

  What all calls return, joined, is the text up to the first stop string. Tokens
  are returned with the text that they end in, so theirs joined is the same,
  unless a token reaches beyond it: that one is the last, and whole.

  Args:
    decode: ids -> text.
    stops: see `Ask.stop`.
    tokens: whether tokens are wanted; they cost a decoding each.
  """

  def __init__(
    self,
    decode: Callable[[Sequence[int]], str],
    stops: Sequence[str] = (),
    tokens: bool = False,
  ):
    self._read = Growing(decode)
    self._each = Growing(decode) if tokens else None
    self._stops = stops
    self._ids: list[int] = []
    self._logprobs: list[float] = []
    self._shown = 0  # characters
    self._tokens = self._spelled = 0  # returned, and characters in them

  def add(
    self, ids: Sequence[int], logprobs: Sequence[float], last: bool = False
  ) -> tuple[str, list[Token]]:
    """(text, tokens) that may be shown beyond what was shown before.

    Args:
      ids: new ones.
      logprobs: theirs.
      last: no more will come, so nothing is held back.
    """
    self._ids += ids
    self._logprobs += logprobs
    text = self._read(self._ids)
    stop = find_stop(text, self._stops)
    if stop is not None:
      text = text[: stop[0]]
    elif not last:
      text = text.rstrip(_HALF)
      text = text[: len(text) - _begun(text, self._stops)]
    new = text[self._shown :]
    self._shown = max(self._shown, len(text))
    return new, self._spell(last)

  def _spell(self, last: bool) -> list[Token]:
    """The tokens that end in what is shown."""
    found = []
    while self._each is not None and self._spelled < self._shown:
      num = self._tokens + 1
      text = self._each(self._ids[:num])
      if not last or num < len(self._ids):
        text = text.rstrip(_HALF)
      if not last and len(text) > self._shown:
        break
      piece = text[self._spelled :]
      found.append(Token(piece, self._logprobs[self._tokens]))
      self._tokens, self._spelled = num, max(self._spelled, len(text))
    return found
