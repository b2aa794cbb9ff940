"""An OpenAI-style endpoint whose replies, and faults, follow a script.

`script(body, number)` is given each request, and its number from 0; it returns
the text of a reply, or one of the faults below.
"""

import contextlib
import http.server
import json
import socket
import threading
import time
from typing import NamedTuple


class Late(NamedTuple):
  """The reply comes so late."""

  seconds: float
  text: str = "late"


class Status(NamedTuple):
  """In place of a reply; `{key}` in the message is the key that was sent."""

  status: int
  message: str = "a fault of the test"
  retry_after: str = ""


class Raw(NamedTuple):
  """A body as it is, of status 200."""

  body: bytes
  chunked: bool = False


class Cut(NamedTuple):
  """The connection ends behind so many bytes of a reply."""

  num_bytes: int


FAULTS = {
  "cut before": Cut(0),
  "cut in the head": Cut(20),
  "cut in the body": Cut(200),
  "busy": Status(429, "too many", "0.01"),
  "internal": Status(500),
  "overloaded": Status(503),
  "no JSON": Raw(b"<html>a proxy's page</html>"),
  "half of it": Raw(b'{"choices": [{"mess'),
  "no UTF-8": Raw(b'{"choices": [{"message": {"content": "\xff\xfe"}}]}'),
  "no choices": Raw(b'{"choices": []}'),
  "no message": Raw(b'{"choices": [{"index": 0}]}'),
  "no object": Raw(b"[1, 2]"),
  "no text": Raw(b'{"choices": [{"message": {"content": 7}}]}'),
  "deep": Raw(b"[" * 100_000),
}


def reply(text, finish="stop", **usage):
  """A reply's body, with usage."""
  usage = {"prompt_tokens": 11, "completion_tokens": 5} | usage
  message = {"role": "assistant", "content": text}
  choice = {"index": 0, "message": message, "finish_reason": finish}
  return json.dumps({"choices": [choice], "usage": usage}).encode()


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"

  def log_message(self, *_):
    pass

  def do_POST(self):
    size = int(self.headers["Content-Length"])
    body = json.loads(self.rfile.read(size))
    with self.server.taken(self.path, self.headers, body) as number:
      self._answer(self.server.script(body, number))

  def _answer(self, said):
    if isinstance(said, Late):
      time.sleep(said.seconds)
      said = said.text
    if isinstance(said, Status):
      key = self.headers.get("Authorization", "").removeprefix("Bearer ")
      said = said._replace(message=said.message.replace("{key}", key))
      extra = {"Retry-After": said.retry_after} if said.retry_after else {}
      body = json.dumps({"error": {"message": said.message}}).encode()
      self._write(said.status, body, extra)
    elif isinstance(said, Cut):
      head = b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n"
      self.wfile.write((head + b" " * 500)[: said.num_bytes])
      self.wfile.flush()
      with contextlib.suppress(OSError):
        self.connection.shutdown(socket.SHUT_RDWR)
      self.close_connection = True
    elif isinstance(said, Raw) and said.chunked:
      self._write_chunks(said.body)
    else:
      raw = said.body if isinstance(said, Raw) else reply(said)
      self._write(200, raw, {})

  def _write(self, status, body, headers):
    self.send_response(status)
    for name, value in headers.items():
      self.send_header(name, value)
    self.send_header("Content-Length", str(len(body)))
    self.end_headers()
    self.wfile.write(body)

  def _write_chunks(self, body):
    self.send_response(200)
    self.send_header("Transfer-Encoding", "chunked")
    self.end_headers()
    for start in range(0, len(body), 30):
      part = body[start : start + 30]
      self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
    self.wfile.write(b"0\r\n\r\n")


class Endpoint(http.server.ThreadingHTTPServer):
  """See the module's docstring.

  Attributes:
    asked: (path, headers, body) of each request.
    most: how many were under way at once.
  """

  daemon_threads = True

  def handle_error(self, *_):
    """A client that does not wait for its answer is no trouble."""

  def __init__(self, script):
    super().__init__(("127.0.0.1", 0), _Handler)
    self.script, self.asked, self.most = script, [], 0
    self._under_way, self._lock = 0, threading.Lock()

  @property
  def base_url(self):
    return f"http://127.0.0.1:{self.server_address[1]}/v1"

  @contextlib.contextmanager
  def taken(self, path, headers, body):
    with self._lock:
      number = len(self.asked)
      self.asked.append((path, headers, body))
      self._under_way += 1
      self.most = max(self.most, self._under_way)
    try:
      yield number
    finally:
      with self._lock:
        self._under_way -= 1


@contextlib.contextmanager
def opened(script):
  """An endpoint on a free port."""
  with Endpoint(script) as endpoint:
    thread = threading.Thread(
      target=endpoint.serve_forever, kwargs={"poll_interval": 0.01}
    )
    thread.start()
    try:
      yield endpoint
    finally:
      endpoint.shutdown()
      thread.join(timeout=10)
