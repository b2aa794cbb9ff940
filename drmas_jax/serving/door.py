"""The door of the policies: chat completions over HTTP.

    POST /v1/chat/completions    answers.Desk
    GET  /v1/models, /v1/models/NAME, /health, /metrics

Of an answer, the limit of waiting is the desk's.
"""

import json
import time
from typing import Any

from drmas_jax import door
from drmas_jax.door import ApiError
from drmas_jax.serving import api
from drmas_jax.serving.answers import Answer, Desk
from drmas_jax.serving.meters import Meters

_SPARE = 64  # connections beyond those of open requests


class Door(door.Door):
  """Listens once it is made; serves between `open` and `close`.

  Args:
    host: name or address.
    port: 0 for any that is free.

  Raises:
    OSError: the address cannot be had.
  """

  def __init__(self, host: str, port: int):
    super().__init__(host, port, _Handler)
    self.meters = Meters()

  def open(self, desk: Desk) -> None:
    """Lets requests in."""
    self.desk = desk
    self.start(desk.loop.limit + _SPARE)

  def models(self) -> list[dict[str, Any]]:
    return [
      {"id": name, "object": "model", "created": 0, "owned_by": "drmas_jax"}
      for name in self.desk.models
    ]

  def gauges(self) -> dict[str, tuple[str, dict[str, float]]]:
    loop = self.desk.loop
    in_use = {name: load.in_use for name, load in loop.load.items()}
    slots = {name: load.slots for name, load in loop.load.items()}
    num_open = loop.num_open
    waiting = max(0, num_open - sum(in_use.values()))
    return {
      "open": ("Choices asked for and not done.", {"": num_open}),
      "queue": ("Of these, those that hold no slot.", {"": waiting}),
      "slots_in_use": ("Completions being sampled.", in_use),
      "slots": ("Most completions at once.", slots),
    }


class _Handler(door.Handler):
  """One connection."""

  server: Door
  posts = ("/v1/chat/completions",)
  gets = ("/v1/models", "/health", "/metrics")

  def do_GET(self) -> None:
    path, models = self.path.partition("?")[0], self.server.models()
    if path == "/v1/models":
      self.send(200, {"object": "list", "data": models})
    elif path == "/health":
      closed = self.server.desk.loop.closed
      status = (503, "stopping") if closed else (200, "ok")
      self.send(status[0], {"status": status[1]})
    elif path == "/metrics":
      text = self.server.meters.text(self.server.gauges())
      self.write(200, text.encode(), "text/plain; version=0.0.4")
    else:
      name = path.removeprefix("/v1/models/")
      found = [m for m in models if m["id"] == name and name != path]
      if found:
        self.send(200, found[0])
      else:
        self.refuse(self.no_such_path())

  def do_POST(self) -> None:
    began, model = time.monotonic(), ""
    answer: Answer | None = None

    def post() -> int:
      nonlocal model, answer
      ask = api.parse(self.body(), self.server.desk.models)
      model = ask.model
      answer = self.server.desk.take(ask)
      return self._answer(answer)

    with self.server.answering():
      try:
        status = self.attempt(post)
      finally:
        if answer is not None:
          answer.close()
      self.server.meters.count(
        model,
        status,
        time.monotonic() - began,
        answer.prompt_tokens if answer else 0,
        answer.completion_tokens if answer else 0,
      )

  def _answer(self, answer: Answer) -> int:
    """Writes it; returns the status that it came to."""
    if not answer.ask.stream:
      self.send(200, answer.body(self.gone))
      return 200
    chunks = answer.chunks(self.gone)
    first = next(chunks)  # what fails before it has a status of its own
    self._begin_stream()
    status = 200
    try:
      self._event(first)
      for chunk in chunks:
        self._event(chunk)
    except ApiError as e:
      status = e.status
      self._event(e.body())
    except door.LOST:
      raise
    except Exception:  # a fault of ours; the status is out already
      error = door.internal()
      status = error.status
      self._event(error.body())
    else:
      self._event("[DONE]")
    self._end_stream()
    return status

  # -- a stream ----------------------------------------------------------------

  def _begin_stream(self) -> None:
    self.send_response(200)
    self.send_header("Content-Type", "text/event-stream; charset=utf-8")
    self.send_header("Cache-Control", "no-cache")
    self._chunked = self.request_version == "HTTP/1.1"
    if self._chunked:
      self.send_header("Transfer-Encoding", "chunked")
    else:
      self.close_connection = True
    self.end_headers()

  def _event(self, data: Any) -> None:
    text = data if isinstance(data, str) else json.dumps(data)
    self._chunk(f"data: {text}\n\n".encode())

  def _end_stream(self) -> None:
    if self._chunked:
      self._chunk(b"")

  def _chunk(self, data: bytes) -> None:
    if self._chunked:
      data = b"%x\r\n%s\r\n" % (len(data), data)
    self.wfile.write(data)
