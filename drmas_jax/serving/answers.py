"""From a request to a job of the loop, and from what comes of it to an answer.

    Desk.take    checks what needs a tokenizer, and submits the job -> Answer
    Answer       waits for it: a body, or the chunks of a stream

All of this runs in the threads of the door. They have tokenizers of their own:
the loop's belong to its thread.
"""

import contextlib
import itertools
import queue
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from drmas_jax.config import Sampling
from drmas_jax.door import Gone
from drmas_jax.serving import api
from drmas_jax.serving.loop import (
  Chat,
  Closed,
  Event,
  Full,
  Job,
  Loop,
  Question,
)
from drmas_jax.tokenizer import Tokenizer
from drmas_jax.types import Episode, Fault, Turn

_MIN_CHARACTERS = 1 << 16  # that are encoded; a word unknown may have many
_LOOK_S = 0.25  # between two looks whether the client is there
_RETRY_S = 1


class Codec:
  """A policy's tokenizer, for one thread at a time: it keeps what it was asked
  last as a setting, which another thread would change."""

  def __init__(self, tokenizer: Tokenizer, max_length: int):
    self.max_length = max_length
    longest = max(map(len, tokenizer.vocabulary()))
    # More cannot fit: a character takes one of a token's, or several.
    self.max_characters = max(max_length * longest, _MIN_CHARACTERS)
    self._tokenizer = tokenizer
    self._lock = threading.Lock()

  def encode(self, messages: Sequence[Mapping[str, str]]) -> np.ndarray:
    """Ids of a chat [tokens].

    Raises:
      ApiError: the checkpoint's chat template refuses it.
    """
    import jinja2

    try:
      with self._lock:
        return self._tokenizer.encode_chat(messages)
    except jinja2.TemplateError as e:
      raise api.ApiError(
        400,
        f"messages: the model's chat template refuses them: {e}",
        "invalid_value",
        "messages",
      ) from e

  def decode(self, ids: Sequence[int], control: bool = False) -> str:
    with self._lock:
      return self._tokenizer.decode(ids, control)


class Desk:
  """Where requests are taken.

  Args:
    loop: to be given the jobs.
    codecs: by policy.
    team: whether there is one.
    timeout_s: limit of a request, from here to its last token.
  """

  def __init__(
    self,
    loop: Loop,
    codecs: Mapping[str, Codec],
    team: bool,
    timeout_s: float,
  ):
    self.loop, self.codecs = loop, dict(codecs)
    self.models = (*self.codecs, *([api.TEAM] if team else []))
    self._timeout_s = timeout_s

  def take(self, ask: api.Ask) -> "Answer":
    """Submits what is asked for.

    Raises:
      ApiError: it cannot be served, or not now.
    """
    if ask.n > self.loop.limit:  # not now, nor later
      raise api.ApiError(
        400,
        f"n: {ask.n} is more than this server has open at a time; write at "
        f"most {self.loop.limit}",
        "invalid_value",
        "n",
      )
    self._check_size(ask)
    deadline = time.monotonic() + self._timeout_s
    common = {"num": ask.n, "seed": _seed(ask.seed), "deadline": deadline}
    if ask.model == api.TEAM:
      job = Question(text=ask.question, sampling=ask.sampling, **common)
      answer = TeamAnswer(ask, job, self)
    else:
      job = self._chat(ask, common)
      answer = Answer(ask, job, self)
    try:
      self.loop.submit(job)
    except Full as e:
      raise api.ApiError(
        429,
        "as many requests are open as may be; try again later",
        "queue_full",
        retry_after_s=_RETRY_S,
      ) from e
    except Closed as e:
      raise _stopping() from e
    return answer

  def _check_size(self, ask: api.Ask) -> None:
    """Of a text that no prompt has room for: to encode it takes long."""
    own = self.codecs.values()
    if ask.model != api.TEAM:
      own = [self.codecs[ask.model]]
    num = len(ask.messages)  # none is written with less than a token
    most = max((codec.max_length for codec in own), default=num)
    if num > most:
      raise _too_long(
        "messages",
        f"{num} of them, and model={ask.model!r} has room for {most} tokens; "
        "send fewer",
      )
    size = sum(len(message["content"]) for message in ask.messages)
    most = max((codec.max_characters for codec in own), default=size)
    if size > most:
      raise _too_long(
        "messages",
        f"{size} characters, and model={ask.model!r} has room for less than "
        f"{most}; shorten them",
      )

  def _chat(self, ask: api.Ask, common: Mapping[str, Any]) -> Chat:
    codec = self.codecs[ask.model]
    prompt = codec.encode(ask.messages)
    room = codec.max_length - len(prompt)
    has = f"model={ask.model!r} has room for {codec.max_length} in all"
    if room < 1:
      raise _too_long(
        "messages", f"a prompt of {len(prompt)} tokens; {has}; shorten it"
      )
    limit = room if ask.max_tokens is None else ask.max_tokens
    if limit > room:
      raise _too_long(
        "max_tokens",
        f"{limit} behind a prompt of {len(prompt)} tokens; {has}; write at "
        f"most {room}",
      )
    if ask.min_tokens > limit:
      raise api.ApiError(
        400,
        f"min_tokens: {ask.min_tokens} is more than the {limit} tokens that "
        "may be sampled; lower it",
        "invalid_value",
        "min_tokens",
      )
    return Chat(
      policy=ask.model,
      prompt_ids=prompt,
      max_tokens=limit,
      min_tokens=ask.min_tokens,
      sampling=ask.sampling or Sampling(),
      closes=_closes(ask.stop),
      stream=ask.stream,
      **common,
    )


def _seed(seed: int | None) -> int:
  """A task position (`types.Task`): the seed itself where it can be one."""
  if seed is None:
    return secrets.randbits(31)
  return seed if 0 <= seed < 1 << 31 else zlib.crc32(str(seed).encode()) >> 1


def _closes(stops: Sequence[str]) -> Callable[[str], int | None] | None:
  if not stops:
    return None

  def closes(text: str) -> int | None:
    found = api.find_stop(text, stops)
    return None if found is None else found[1]

  return closes


def _too_long(key: str, message: str) -> api.ApiError:
  return api.ApiError(400, f"{key}: {message}", "context_length_exceeded", key)


def _stopping() -> api.ApiError:
  return api.ApiError(
    503, "the server is stopping", "stopping", retry_after_s=_RETRY_S
  )


def _timeout() -> api.ApiError:
  return api.ApiError(
    503, "not done within the server's --timeout_s", "timeout"
  )


def _error(fault: Fault) -> api.ApiError:
  if fault.kind == "prompt":
    return _too_long("messages", fault.message)
  if fault.kind == "deadline":
    return _timeout()
  if fault.kind == "cancelled":
    return _stopping()
  if fault.kind == "request":
    return api.ApiError(400, fault.message, "invalid_value")
  return api.ApiError(500, fault.message, fault.kind)


class Answer:
  """What becomes of a chat.

  Attributes:
    prompt_tokens, completion_tokens: so far.
  """

  def __init__(self, ask: api.Ask, job: Job, desk: Desk):
    self.ask, self.job, self.desk = ask, job, desk
    self.prompt_tokens = self.completion_tokens = 0
    self._head = {
      "id": f"chatcmpl-{secrets.token_hex(12)}",
      "created": int(time.time()),
      "model": ask.model,
    }

  def close(self) -> None:
    """Frees what it holds, if it is not done."""
    self.desk.loop.cancel(self.job)

  def body(self, gone: Callable[[], bool]) -> dict[str, Any]:
    """The whole of it.

    Args:
      gone: whether the client has.

    Raises:
      ApiError: it came to nothing.
      Gone: nobody waits any more.
    """
    parts = [[] for _ in range(self.job.num)]
    for part in self._parts(gone):
      parts[part["index"]].append(part)
    choices = [self._join(mine) for mine in parts]
    head = self._head | {"object": "chat.completion"}
    return head | {"choices": choices, "usage": self.usage()}

  def chunks(self, gone: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """The same in the chunks of a stream."""
    head = self._head | {"object": "chat.completion.chunk"}
    begun = set()
    for part in self._parts(gone):
      delta = {"content": part.pop("text")}
      if part["index"] not in begun:
        begun.add(part["index"])
        delta = {"role": "assistant"} | delta
      chunk = head | {"choices": [part | {"delta": delta}]}
      yield chunk | ({"usage": None} if self.ask.include_usage else {})
    if self.ask.include_usage:
      yield head | {"choices": [], "usage": self.usage()}

  def usage(self) -> dict[str, int]:
    return {
      "prompt_tokens": self.prompt_tokens,
      "completion_tokens": self.completion_tokens,
      "total_tokens": self.prompt_tokens + self.completion_tokens,
    }

  def _join(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A choice from its parts; what else there is, the last one has."""
    text = "".join(p["text"] for p in parts)
    tokens = [p["logprobs"]["content"] for p in parts if p["logprobs"]]
    logprobs = None
    if self.ask.logprobs:
      logprobs = {"content": list(itertools.chain(*tokens))}
    whole = {k: v for k, v in parts[-1].items() if k != "text"}
    message = {"role": "assistant", "content": text}
    return whole | {"message": message, "logprobs": logprobs}

  def _events(self, gone: Callable[[], bool]) -> Iterator[Event]:
    """Those of the job, until every choice has its result."""
    missing = self.job.num
    while missing:
      event = self._next(gone)
      if event.fault is not None:
        raise _error(event.fault)
      missing -= event.result is not None
      yield event

  def _next(self, gone: Callable[[], bool]) -> Event:
    while (left := self.job.deadline - time.monotonic()) > 0:
      with contextlib.suppress(queue.Empty):
        return self.job.events.get(timeout=min(left, _LOOK_S))
      if gone():
        raise Gone
    raise _timeout()

  def _parts(self, gone: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """What is new of a choice: index, text, logprobs, finish_reason."""
    self.prompt_tokens = len(self.job.prompt_ids)
    decode = self.desk.codecs[self.ask.model].decode
    texts = [
      api.Text(decode, self.ask.stop, self.ask.logprobs)
      for _ in range(self.job.num)
    ]
    for event in self._events(gone):
      last = event.result is not None
      self.completion_tokens += len(event.ids)
      add = texts[event.choice].add
      text, tokens = add(event.ids, event.logprobs, last)
      if text or last:
        yield {
          "index": event.choice,
          "text": text,
          "logprobs": _logprobs(tokens) if self.ask.logprobs else None,
          "finish_reason": _finish(event.result.stop_reason) if last else None,
        }


class TeamAnswer(Answer):
  """What becomes of a task: the action, and the transcript of the episode."""

  def _parts(self, gone: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    for event in self._events(gone):
      episode: Episode = event.result
      for turn in episode.turns:
        self.prompt_tokens += turn.num_prompt_tokens
        self.completion_tokens += turn.num_tokens
      yield {
        "index": event.choice,
        "text": str(episode.action),
        "logprobs": None,
        "finish_reason": "stop",
        "transcript": [self._turn(turn) for turn in episode.turns],
      }

  def _turn(self, turn: Turn) -> dict[str, Any]:
    if turn.call is None:
      codec = self.desk.codecs[turn.policy]
      prompt = codec.decode(turn.prompt_ids, control=True)
    else:
      prompt = turn.call.prompt
    return {
      "agent": turn.agent,
      "policy": turn.policy,
      "prompt": prompt,
      "completion": turn.text,
      "prompt_ids": turn.prompt_ids.tolist(),
      "completion_ids": turn.completion_ids.tolist(),
      "stop_reason": turn.stop_reason,
      "valid": turn.valid,
    }


def _logprobs(tokens: Sequence[api.Token]) -> dict[str, Any]:
  return {"content": [token.body() for token in tokens]}


def _finish(stop_reason: str) -> str:
  return "length" if stop_reason == "length" else "stop"
