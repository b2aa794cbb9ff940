"""The HTTP door: the standard library's server, a thread for each connection.

    POST /v1/chat/completions    answers.Desk
    GET  /v1/models, /v1/models/NAME, /health, /metrics

It needs nothing that Python does not bring. A thread that waits costs a stack;
as many connections as there may be are counted, and one more is sent away. All
waits have a limit: of a read or a write `_SOCKET_S`, of an answer the desk's.
"""

import contextlib
import http
import http.server
import json
import select
import socket
import sys
import threading
import time
import traceback
from typing import Any

from drmas_jax.serving import api
from drmas_jax.serving.answers import Answer, Desk, Gone
from drmas_jax.serving.meters import Meters

_SOCKET_S = 30.0
_MAX_BODY = 8 << 20
_SPARE = 64  # connections beyond those of open requests
_GONE = 499  # as nginx counts a client that went away

_LOST = (ConnectionError, TimeoutError, Gone)


class Door(http.server.ThreadingHTTPServer):
  """Listens once it is made; serves between `open` and `close`.

  Args:
    host: name or address.
    port: 0 for any that is free.

  Raises:
    OSError: the address cannot be had.
  """

  daemon_threads = True
  request_queue_size = 1024

  def __init__(self, host: str, port: int):
    if ":" in host:
      self.address_family = socket.AF_INET6
    super().__init__((host, port), _Handler)
    self.meters = Meters()
    self._busy = 0  # requests that are being answered
    self._idle = threading.Condition()

  def server_bind(self) -> None:
    """Without asking the network for a name, which may take seconds."""
    super(http.server.HTTPServer, self).server_bind()
    self.server_name, self.server_port = self.server_address[:2]

  @property
  def url(self) -> str:
    host = (
      f"[{self.server_name}]" if ":" in self.server_name else (self.server_name)
    )
    return f"http://{host}:{self.server_port}"

  def open(self, desk: Desk) -> None:
    """Lets requests in."""
    self.desk = desk
    self._places = threading.BoundedSemaphore(desk.loop.limit + _SPARE)
    threading.Thread(
      target=self.serve_forever, name="drmas-door", daemon=True
    ).start()

  def close(self, timeout_s: float) -> None:
    """Lets nothing more in; answers under way are written first."""
    self.shutdown()
    with self._idle:
      self._idle.wait_for(lambda: not self._busy, timeout_s)
    self.server_close()

  @contextlib.contextmanager
  def answering(self):
    with self._idle:
      self._busy += 1
    try:
      yield
    finally:
      with self._idle:
        self._busy -= 1
        self._idle.notify_all()

  # -- of socketserver ---------------------------------------------------------

  def process_request(self, request: socket.socket, client_address) -> None:
    if self._places.acquire(blocking=False):
      super().process_request(request, client_address)
      return
    with contextlib.suppress(OSError):
      request.settimeout(1)
      request.sendall(
        b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n"
        b"Content-Length: 0\r\nConnection: close\r\n\r\n"
      )
    self.shutdown_request(request)

  def process_request_thread(self, request, client_address) -> None:
    try:
      super().process_request_thread(request, client_address)
    finally:
      self._places.release()

  def handle_error(self, request, client_address) -> None:
    if not isinstance(sys.exception(), _LOST):
      traceback.print_exc()

  # -- what is told about it ---------------------------------------------------

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


class _Handler(http.server.BaseHTTPRequestHandler):
  """One connection."""

  server: Door
  protocol_version = "HTTP/1.1"
  timeout = _SOCKET_S
  disable_nagle_algorithm = True

  def do_GET(self) -> None:
    path, models = self.path.partition("?")[0], self.server.models()
    if path == "/v1/models":
      self._send(200, {"object": "list", "data": models})
    elif path == "/health":
      closed = self.server.desk.loop.closed
      status = (503, "stopping") if closed else (200, "ok")
      self._send(status[0], {"status": status[1]})
    elif path == "/metrics":
      text = self.server.meters.text(self.server.gauges())
      self._write(200, text.encode(), "text/plain; version=0.0.4")
    else:
      name = path.removeprefix("/v1/models/")
      found = [m for m in models if m["id"] == name and name != path]
      if found:
        self._send(200, found[0])
      else:
        self._refuse(self._no_such_path(path))

  def do_POST(self) -> None:
    began, model = time.monotonic(), ""
    answer: Answer | None = None
    with self.server.answering():
      try:
        ask = api.parse(self._body(), self.server.desk.models)
        model = ask.model
        answer = self.server.desk.take(ask)
        status = self._answer(answer)
      except api.ApiError as e:
        status = e.status
        self._refuse(e)
      except _LOST:
        status = _GONE
        self.close_connection = True
      except Exception:  # a fault of ours, told as such
        traceback.print_exc()
        status = 500
        self._refuse(api.ApiError(500, "see the server's log", "internal"))
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

  def _no_such_path(self, path: str) -> api.ApiError:
    return api.ApiError(
      404,
      f"{self.command} {path[:80]}: no such path; allowed are POST "
      "/v1/chat/completions, GET /v1/models, /health and /metrics",
      "not_found",
    )

  def _body(self) -> bytes:
    """Of a request; one that is not read ends the connection."""
    path = self.path.partition("?")[0]
    size = self.headers.get("Content-Length", "")
    self.close_connection, keep = True, self.close_connection
    if not size.isdecimal() or "Transfer-Encoding" in self.headers:
      raise api.ApiError(411, "write a Content-Length", "length_required")
    if len(size) > 12 or int(size) > _MAX_BODY:
      raise api.ApiError(
        413,
        f"a body of {size[:20]} bytes; allowed are at most {_MAX_BODY}",
        "request_too_large",
      )
    body = self.rfile.read(int(size))
    if len(body) < int(size):
      raise Gone
    self.close_connection = keep
    if path != "/v1/chat/completions":
      raise self._no_such_path(path)
    return body

  def _answer(self, answer: Answer) -> int:
    """Writes it; returns the status that it came to."""
    if not answer.ask.stream:
      self._send(200, answer.body(self._gone))
      return 200
    chunks = answer.chunks(self._gone)
    first = next(chunks)  # what fails before it has a status of its own
    self._begin_stream()
    status = 200
    try:
      self._event(first)
      for chunk in chunks:
        self._event(chunk)
    except api.ApiError as e:
      status = e.status
      self._event(e.body())
    else:
      self._event("[DONE]")
    self._end_stream()
    return status

  def _gone(self) -> bool:
    """Whether the client has closed its end."""
    poll = select.poll()
    poll.register(self.connection, select.POLLIN)
    return bool(poll.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)

  # -- writing -----------------------------------------------------------------

  def _refuse(self, error: api.ApiError) -> None:
    headers = {}
    if error.retry_after_s is not None:
      headers["Retry-After"] = str(error.retry_after_s)
    self._send(error.status, error.body(), headers)

  def _send(self, status: int, body: Any, headers: Any = ()) -> None:
    text = json.dumps(body).encode()
    self._write(status, text, "application/json", headers)

  def _write(
    self, status: int, body: bytes, kind: str, headers: Any = ()
  ) -> None:
    self.send_response(status)
    self.send_header("Content-Type", kind)
    self.send_header("Content-Length", str(len(body)))
    for key, value in dict(headers).items():
      self.send_header(key, value)
    if self.close_connection:
      self.send_header("Connection", "close")
    self.end_headers()
    self.wfile.write(body)

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

  def send_error(self, code: int, message=None, explain=None) -> None:
    """What the base class refuses, in the words of the others."""
    del explain
    self.close_connection = True
    message = message or http.HTTPStatus(code).phrase
    self._refuse(api.ApiError(code, message, "bad_request"))

  def log_message(self, format, *args) -> None:
    """Nothing: `/metrics` counts."""
