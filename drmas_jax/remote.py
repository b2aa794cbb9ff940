"""Policies that are elsewhere: chat completions of an OpenAI-style endpoint.

    messages -> a reply that is known -> the call's turn among `concurrency`
      -> tries, one after the other, in one budget of time -> Said, or a Fault

All of it runs in the event loop of the rollout's I/O thread; who waits holds no
thread. What may pass (`http.Passing`, and an answer that is not understood) is
tried again behind a pause, which doubles, or as Retry-After asks.

A reply is kept on disk under a hash of all that was asked: the address, the
model, the messages and every parameter, the seed among them. The seed depends
on the run's, the task's position, the episode and the turn, as that of a policy
here does, so that a run that is played again hears the same. A greedy call has
none: whoever asks the same hears the same.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from drmas_jax import caches, http
from drmas_jax import config as config_lib
from drmas_jax.prompts import Prompt
from drmas_jax.types import Call, Fault, Message, StopReason

_PAUSE_S = (0.5, 30.0)  # behind the first failure; at most
_SHOWN = 80  # characters of an answer that is not understood


@dataclasses.dataclass(frozen=True)
class Said:
  """What a call came to; see `types.Turn` for the fields."""

  text: str
  stop_reason: StopReason
  call: Call
  fault: Fault | None = None


class Chat:
  """One agent's conversation within an episode: `prompts.Chat`, of texts.

  Nothing of a prompt is cut: how long it is, only the endpoint could say.
  """

  def __init__(self):
    self._messages: tuple[dict[str, str], ...] = ()
    self._waits = False

  @property
  def begun(self) -> bool:
    return bool(self._messages)

  @property
  def waits(self) -> bool:
    """A prompt was made and its answer has not been heard."""
    return self._waits

  def ask(self, messages: Sequence[Message]) -> Prompt:
    """The prompt of the next turn, without ids."""
    new = tuple({**m, "content": "".join(m["content"])} for m in messages)
    self._messages, self._waits = (*self._messages, *new), True
    return Prompt(self._messages, "", np.zeros(0, np.int32))

  def hear(self, turn: int, ids: np.ndarray, text: str) -> None:
    """Takes the answer to the prompt made last."""
    del turn, ids
    said = {"role": "assistant", "content": text}
    self._messages, self._waits = (*self._messages, said), False


@dataclasses.dataclass(frozen=True)
class _Reply:
  """Of an endpoint, as it is kept."""

  text: str
  finish: str
  prompt_tokens: int
  completion_tokens: int


class Endpoint:
  """One remote policy.

  Args:
    config: checked; its key is in the environment.
  """

  def __init__(self, config: config_lib.Remote):
    self._config = config
    base_url = config.base_url.rstrip("/")
    key = os.environ[config.key_env] if config.key_env else ""
    self._server = http.Server(f"{base_url}/chat/completions", key)
    self._backoff = http.Backoff(*_PAUSE_S)
    self._places = asyncio.Semaphore(config.concurrency)
    self._known = _Replies(_folder(config.cache)) if config.cache else None
    self._warned = False
    # While somebody asks, who asks the same waits to find it known.
    self._asking: weakref.WeakValueDictionary[str, asyncio.Lock] = (
      weakref.WeakValueDictionary()
    )

  @property
  def concurrency(self) -> int:
    return self._config.concurrency

  def close(self) -> None:
    """Closes connections that are not in use."""
    self._server.close()

  async def complete(
    self,
    messages: Sequence[Mapping[str, str]],
    *,
    max_tokens: int,
    sampling: config_lib.Sampling,
    seed: int,
    wanted: Callable[[], bool] = lambda: True,
  ) -> Said:
    """One reply.

    Args:
      messages: of the chat, with texts as contents.
      max_tokens: limit of the reply.
      sampling: how it is drawn.
      seed: of the sampling, 0 <= seed < 2^31.
      wanted: looked at before each try; of a call that nobody waits for any
        more, none is made.
    """
    asked = self._body(messages, max_tokens, sampling, seed)
    if self._known is None:
      reply, retries = await self._answer(asked, wanted)
      return self._said(asked, reply, retries)
    key = _digest({"url": self._server.url, **asked})
    async with self._asking.setdefault(key, asyncio.Lock()):
      reply = self._known.read(key)
      if reply is not None:
        return self._said(asked, reply, 0, cached=True)
      reply, retries = await self._answer(asked, wanted)
      if isinstance(reply, _Reply):
        self._keep(key, asked, reply)
      return self._said(asked, reply, retries)

  def _keep(self, key: str, asked: Mapping[str, Any], reply: _Reply) -> None:
    """A reply that cannot be kept is none the worse for it."""
    try:
      self._known.write(key, {"url": self._server.url, **asked}, reply)
    except OSError as e:
      if not self._warned:
        print(f"drmas_jax: WARNING: replies are not kept: {e}", file=sys.stderr)
      self._warned = True

  def _body(self, messages, max_tokens, sampling, seed) -> dict[str, Any]:
    """What is asked; plain data."""
    greedy = sampling.temperature == 0
    body = {
      "model": self._config.model,
      "messages": [dict(m) for m in messages],
      "max_tokens": max_tokens,
      "temperature": sampling.temperature,
      "top_p": sampling.top_p if sampling.top_p < 1 else None,
      "top_k": sampling.top_k or None,
      "seed": None if greedy else seed,
    }
    body |= config_lib.to_dict(self._config.options)
    return {key: value for key, value in body.items() if value is not None}

  async def _answer(
    self, asked: Mapping[str, Any], wanted: Callable[[], bool]
  ) -> tuple[_Reply | Fault, int]:
    """It, or why there is none; and how many tries came behind the first."""
    body = json.dumps(asked).encode()
    limit_s, retries, trouble = self._config.timeout_s, 0, "no answer"
    async with self._places:
      loop = asyncio.get_running_loop()
      end = loop.time() + limit_s
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(end):
          while wanted():
            try:
              return _read(await self._server.ask(body)), retries
            except http.Refused as e:
              return Fault("remote", str(e)), retries
            except http.Passing as e:
              trouble = str(e)
              pause = self._backoff.pause(retries + 1, e.after_s)
            if loop.time() + pause >= end:
              break  # nothing comes of waiting for it
            await asyncio.sleep(pause)
            retries += 1
          else:
            return Fault("cancelled", "nobody waits for it"), retries
    message = f"no reply within timeout_s={limit_s:g} s: {trouble}"
    return Fault("remote", message, wall_clock=True), retries

  def _said(
    self,
    asked: Mapping[str, Any],
    reply: _Reply | Fault,
    retries: int,
    cached: bool = False,
  ) -> Said:
    prompt = shown(asked["messages"])
    if isinstance(reply, Fault):
      return Said("", "fault", Call(prompt, retries=retries), reply)
    cost = reply.prompt_tokens * self._config.prompt_price
    cost += reply.completion_tokens * self._config.completion_price
    call = Call(
      prompt=prompt,
      prompt_tokens=reply.prompt_tokens,
      completion_tokens=reply.completion_tokens,
      retries=retries,
      cached=cached,
      cost=0.0 if cached else cost / 1e6,
    )
    cut = reply.finish == "length"
    return Said(reply.text, "length" if cut else "stop", call)


def connect(config: config_lib.Config) -> dict[str, Endpoint]:
  """The remote policies of a config, by name; nothing is asked yet.

  Raises:
    ConfigError: there is no place for the replies of one.
  """
  found = {}
  for name, remote in config.remotes.items():
    try:
      found[name] = Endpoint(remote)
    except OSError as e:
      raise config_lib.ConfigError(
        f"policies.{name}.remote.cache={remote.cache!r}: {e}; name a folder "
        "that can be written, or write '' to keep no replies"
      ) from e
  return found


def shown(messages: Sequence[Mapping[str, str]]) -> str:
  """Messages as one text, for people."""
  return "\n\n".join(f"[{m['role']}]\n{m['content']}" for m in messages)


def _read(body: bytes) -> _Reply:
  """The one choice of an answer.

  Raises:
    http.Passing: it is of another shape.
  """
  try:
    raw = json.loads(body)
    [choice, *_] = raw["choices"]
    text = choice["message"]["content"]
    if not isinstance(text, str | None):
      raise TypeError("content is no text")
  except (ValueError, TypeError, KeyError, RecursionError) as e:
    begins = body[:_SHOWN].decode("utf-8", "replace")
    raise http.Passing(
      f"the answer is not understood: {type(e).__name__}: {e}; it begins "
      f"{begins!r}"
    ) from e
  usage = raw.get("usage")
  usage = usage if isinstance(usage, dict) else {}
  return _Reply(
    # No tokenizer takes half a surrogate pair, which JSON can hold.
    text=(text or "").encode("utf-8", "replace").decode(),
    finish=str(choice.get("finish_reason")),
    prompt_tokens=_count(usage.get("prompt_tokens")),
    completion_tokens=_count(usage.get("completion_tokens")),
  )


def _count(value: Any) -> int:
  return value if type(value) is int and value > 0 else 0


# -- replies on disk -----------------------------------------------------------


class _Replies:
  """A file for each reply, which takes its place once it is whole: several
  processes may read and write, and be killed at any moment.

  Args:
    folder: made if it is not there.
  """

  def __init__(self, folder: pathlib.Path):
    self._folder = folder
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
      raise PermissionError(f"{str(folder)!r} cannot be written")

  def _path(self, key: str) -> pathlib.Path:
    return self._folder / key[:2] / f"{key[2:]}.json"

  def read(self, key: str) -> _Reply | None:
    """None: it is not there, or is what a crash of the machine left."""
    try:
      return _Reply(**json.loads(self._path(key).read_bytes())["reply"])
    except (OSError, ValueError, KeyError, TypeError):
      return None

  def write(self, key: str, asked: Mapping[str, Any], reply: _Reply) -> None:
    path = self._path(key)
    path.parent.mkdir(exist_ok=True)
    record = {"asked": asked, "reply": dataclasses.asdict(reply)}
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
      with open(handle, "w", encoding="utf-8") as f:
        json.dump(record, f)
      os.replace(temporary, path)
    except OSError:  # a full disk
      os.unlink(temporary)
      raise


def _folder(cache: str) -> pathlib.Path:
  if cache != "auto":
    return pathlib.Path(cache).expanduser()
  return caches.folder("replies")


def _digest(asked: Mapping[str, Any]) -> str:
  text = json.dumps(asked, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()
