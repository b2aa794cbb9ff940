"""An HTTP door: the standard library's server, a thread for each connection.

It needs nothing that Python does not bring. A thread that waits costs a stack;
as many connections as there may be are counted, and one more is sent away. What
is behind a door is a subclass of `Handler`. All waits have a limit: of a read
or a write `_SOCKET_S`, of an answer that of whoever gives it.
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
from collections.abc import Callable
from typing import Any

_SOCKET_S = 30.0
_LINGER_S = 2.0
_MAX_BODY = 8 << 20
_GONE = 499  # as nginx counts a client that went away


class ApiError(Exception):
  """What a client gets in place of an answer.

  Attributes:
    status: of HTTP.
    code: one word for programs.
    param: the key at fault, if one is.
    retry_after_s: when another try may do better.
  """

  def __init__(
    self,
    status: int,
    message: str,
    code: str | None = None,
    param: str | None = None,
    retry_after_s: int | None = None,
  ):
    super().__init__(message)
    self.status, self.code, self.param = status, code, param
    self.retry_after_s = retry_after_s

  @property
  def kind(self) -> str:
    if self.status == 429:
      return "rate_limit_error"
    return "server_error" if self.status >= 500 else "invalid_request_error"

  def body(self) -> dict[str, Any]:
    return {
      "error": {
        "message": str(self),
        "type": self.kind,
        "param": self.param,
        "code": self.code,
      }
    }


class Gone(Exception):
  """The client has gone away."""


LOST = (ConnectionError, TimeoutError, Gone)  # nobody is there to be told


def internal() -> ApiError:
  """For the client, of the exception that is being handled; printed here."""
  traceback.print_exc()
  return ApiError(500, "see the server's log", "internal")


class Door(http.server.ThreadingHTTPServer):
  """Listens once it is made; serves between `start` and `close`.

  Args:
    host: name or address.
    port: 0 for any that is free.
    handler: what answers.

  Raises:
    OSError: the address cannot be had.
  """

  daemon_threads = True
  request_queue_size = 1024

  def __init__(self, host: str, port: int, handler: type["Handler"]):
    if ":" in host:
      self.address_family = socket.AF_INET6
    super().__init__((host, port), handler)
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

  def start(self, num_connections: int) -> None:
    """Lets requests in, of so many connections at a time."""
    self._places = threading.BoundedSemaphore(num_connections)
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
      try:
        super().process_request(request, client_address)
      except BaseException:  # no thread can be started
        self._places.release()
        raise
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
    if not isinstance(sys.exception(), LOST):
      traceback.print_exc()


class Handler(http.server.BaseHTTPRequestHandler):
  """One connection.

  A subclass has `do_GET` and `do_POST`, which read with `body`, and write with
  `send` and what is made of it.

  Attributes:
    posts: the paths that take a body.
    gets: those that take none.
  """

  server: Door
  posts: tuple[str, ...]
  gets: tuple[str, ...]
  protocol_version = "HTTP/1.1"
  timeout = _SOCKET_S
  disable_nagle_algorithm = True
  _unread = False  # there is a body that nobody will read

  def parse_request(self) -> bool:
    good = super().parse_request()
    if good and self.command != "POST":  # of these no body is read
      self._unread = bool(
        self.headers.get("Content-Length", "0") != "0"
        or self.headers.get("Transfer-Encoding")
      )
      self.close_connection |= self._unread
    return good

  def do_HEAD(self) -> None:
    """As GET; `write` leaves the body out."""
    self.do_GET()

  def finish(self) -> None:
    """Reads on for a moment where a body was refused: whoever still sends would
    find the connection cut, and not the answer that says why."""
    super().finish()
    if not self._unread:
      return
    end = time.monotonic() + _LINGER_S
    with contextlib.suppress(OSError):
      self.connection.shutdown(socket.SHUT_WR)
      while (left := end - time.monotonic()) > 0:
        self.connection.settimeout(left)
        if not self.connection.recv(1 << 16):
          break

  def attempt(self, answer: Callable[[], int]) -> int:
    """Answers, or tells why not; returns the status that it came to."""
    try:
      return answer()
    except ApiError as e:
      self.refuse(e)
      return e.status
    except LOST:
      self.close_connection = True
      return _GONE
    except Exception:  # a fault of ours, told as such
      self.refuse(internal())
      return 500

  def body(self) -> bytes:
    """Of a request; one that is not read ends the connection.

    Raises:
      ApiError: there is none, or too much, or it is for no such path.
      Gone: the client has not sent all of it.
    """
    size, *others = self.headers.get_all("Content-Length", [""])
    size = size.strip()
    self.close_connection, keep = True, self.close_connection
    self._unread = True
    told = size.isascii() and size.isdecimal() and not others
    if not told or "Transfer-Encoding" in self.headers:
      raise ApiError(411, "write a Content-Length", "length_required")
    if len(size) > 12 or int(size) > _MAX_BODY:
      raise ApiError(
        413,
        f"a body of {size[:20]} bytes; allowed are at most {_MAX_BODY}",
        "request_too_large",
      )
    body = self.rfile.read(int(size))
    if len(body) < int(size):
      raise Gone
    self.close_connection, self._unread = keep, False
    if self.path.partition("?")[0] not in self.posts:
      raise self.no_such_path()
    return body

  def no_such_path(self) -> ApiError:
    return ApiError(
      404,
      f"{self.command} {self.path[:80]}: no such path; allowed are POST "
      f"{', '.join(self.posts)}, GET {', '.join(self.gets)}",
      "not_found",
    )

  def gone(self) -> bool:
    """Whether the client has closed its end."""
    poll = select.poll()
    poll.register(self.connection, select.POLLIN)
    return bool(poll.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)

  # -- writing -----------------------------------------------------------------

  def refuse(self, error: ApiError) -> None:
    headers = {}
    if error.retry_after_s is not None:
      headers["Retry-After"] = str(error.retry_after_s)
    self.send(error.status, error.body(), headers)

  def send(self, status: int, body: Any, headers: Any = ()) -> None:
    text = json.dumps(body).encode()
    self.write(status, text, "application/json", headers)

  def write(
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
    if self.command != "HEAD":
      self.wfile.write(body)

  def send_error(self, code: int, message=None, explain=None) -> None:
    """What the base class refuses, in the words of the others."""
    del explain
    self.close_connection = True
    message = message or http.HTTPStatus(code).phrase
    self.refuse(ApiError(code, message, "bad_request"))

  def log_message(self, format, *args) -> None:
    """Nothing: a line for each request would drown all else."""
