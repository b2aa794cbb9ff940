"""A client of HTTP/1.1 on asyncio's streams, for passages and for replies.

A server's answer of status 200 is all that anybody here wants. What comes
instead is one of two things: `Passing`, which another try may not meet (no
connection, a cut one, status 408, 425, 429 or 5xx), or `Refused`. Who tries
again, how often and how long is for whoever asks; `Backoff` says after which
pause.
"""

import asyncio
import contextlib
import datetime
import email.utils
import math
import random
import ssl
import urllib.parse
from collections.abc import Mapping

_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
_MAX_BODY = 64 << 20
_MAX_HEAD = 1 << 16
_CONNECT_S = 10.0
_IDLE_S = 15.0  # after which something between may have dropped a connection
_SHOWN = 200  # bytes of an answer, in a message


class Passing(Exception):
  """A failure that another try may not meet.

  Attributes:
    after_s: how long the server asks to wait; 0: it says nothing.
  """

  def __init__(self, message: str, after_s: float = 0.0):
    super().__init__(message)
    self.after_s = after_s


class Refused(Exception):
  """A failure that another try would meet as well."""


class Backoff:
  """Pauses between tries: each twice the one before, up to a limit, and less or
  more by up to half, so that those who failed together do not come together.

  Args:
    first_s: behind the first failure.
    most_s: of the doubling.
  """

  def __init__(self, first_s: float, most_s: float):
    self._first_s, self._most_s = first_s, most_s
    self._jitter = random.Random()  # hosts are not to draw alike

  def pause(self, num_failed: int, after_s: float = 0.0) -> float:
    """Seconds behind so many failures; at least what the server asks for."""
    pause = min(self._most_s, self._first_s * 2.0 ** min(num_failed - 1, 20))
    return max(after_s, pause * self._jitter.uniform(0.5, 1.5))


def url_fault(url: str) -> str:
  """What is wrong with an address, to be written behind its key; "": nothing.

  It may have no user and no password in it, which would be written with it
  wherever it is, and are not shown here either.
  """
  if "@" in url:
    return ": holds a user or an @, which is not allowed; leave it out"
  try:
    parts = urllib.parse.urlsplit(url)
    good = parts.scheme in ("http", "https") and bool(parts.hostname)
    good = good and parts.port != 0
  except ValueError:  # the port
    good = False
  if good and url.isascii() and url.isprintable() and " " not in url:
    return ""
  return f"={url!r}: write http://HOST:PORT/PATH, or https"


class Server:
  """One address, and connections to it that are not in use.

  Args:
    url: that is asked, with its path; without a `url_fault`.
    key: sent as `Authorization: Bearer ..`, and taken out of whatever the
      server says; "": none.
  """

  def __init__(self, url: str, key: str = ""):
    self.url = url
    self._key = key.encode("ascii")
    parts = urllib.parse.urlsplit(url)
    self._host = parts.hostname
    self._tls = (
      ssl.create_default_context() if parts.scheme == "https" else None
    )
    self._port = parts.port or (443 if self._tls else 80)
    path = parts.path or "/"
    path = f"{path}?{parts.query}" if parts.query else path
    lines = [
      f"POST {path} HTTP/1.1",
      f"Host: {parts.netloc}",
      "Content-Type: application/json",
      "Accept: application/json",
      *([f"Authorization: Bearer {key}"] if key else ()),
      "Content-Length: ",
    ]
    self._head = "\r\n".join(lines).encode("ascii")
    # (reader, writer, since when, on the loop's clock)
    self._idle: list[
      tuple[asyncio.StreamReader, asyncio.StreamWriter, float]
    ] = []

  async def ask(self, body: bytes) -> bytes:
    """What a POST is answered with, of status 200.

    Raises:
      Passing: another try may do better.
      Refused: none will.
    """
    try:
      status, headers, answer = await self._post(body)
    except (OSError, EOFError) as e:
      raise Passing(f"{self.url}: {type(e).__name__}: {e}") from e
    except ValueError as e:
      raise Refused(f"{self.url}: this is no HTTP: {e}") from e
    if self._key:
      answer = answer.replace(self._key, b"***")
    if status == 200:
      return answer
    said = answer[:_SHOWN].decode("utf-8", "replace")
    message = f"{self.url}: status {status}: {said}"
    if status in _PASSING:
      raise Passing(message, _after(headers))
    raise Refused(message)

  async def _post(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers by lower-cased name, and body of an answer.

    Raises:
      OSError: there is no connection, or no longer.
      EOFError: the answer ends before its end.
      ValueError: it is none of HTTP/1.
    """
    reader, writer = await self._connection()
    keep = False
    try:
      writer.write(self._head + b"%d\r\n\r\n" % len(body) + body)
      await writer.drain()
      status, headers = await _read_head(reader)
      while 100 <= status < 200:
        status, headers = await _read_head(reader)
      answer, ended = await _read_body(reader, headers)
      keep = not ended and headers.get("connection", "").lower() != "close"
      return status, headers, answer
    except asyncio.LimitOverrunError as e:
      raise ValueError(str(e)) from e
    finally:
      if keep:
        now = asyncio.get_running_loop().time()
        self._idle.append((reader, writer, now))
      else:
        writer.close()

  async def _connection(self):
    now = asyncio.get_running_loop().time()
    while self._idle:
      reader, writer, since = self._idle.pop()
      fresh = now - since < _IDLE_S
      if fresh and not reader.at_eof() and not writer.is_closing():
        return reader, writer
      writer.close()
    async with asyncio.timeout(_CONNECT_S):
      return await asyncio.open_connection(
        self._host, self._port, ssl=self._tls, limit=_MAX_HEAD
      )

  def close(self) -> None:
    """Closes what is not in use."""
    while self._idle:
      with contextlib.suppress(OSError):
        self._idle.pop()[1].close()


def _after(headers: Mapping[str, str]) -> float:
  """Seconds that Retry-After asks for, as a number or as a date."""
  said = headers.get("retry-after", "")
  try:
    seconds = float(said)
  except ValueError:
    try:
      until = email.utils.parsedate_to_datetime(said)
      seconds = (until - datetime.datetime.now(datetime.UTC)).total_seconds()
    except (ValueError, TypeError):  # no date; one without a zone
      return 0.0
  return seconds if math.isfinite(seconds) and seconds > 0 else 0.0


async def _read_head(
  reader: asyncio.StreamReader,
) -> tuple[int, dict[str, str]]:
  head = await reader.readuntil(b"\r\n\r\n")
  first, *lines = head.decode("latin-1").split("\r\n")
  version, _, rest = first.partition(" ")
  if not version.startswith("HTTP/1") or not rest[:3].isdecimal():
    raise ValueError(f"it begins {first[:80]!r}")
  headers = {}
  for line in lines:
    name, _, value = line.partition(":")
    headers[name.strip().lower()] = value.strip()
  return int(rest[:3]), headers


async def _read_body(
  reader: asyncio.StreamReader, headers: Mapping[str, str]
) -> tuple[bytes, bool]:
  """It, and whether the connection ended with it."""
  if headers.get("transfer-encoding", "").lower() == "chunked":
    return await _read_chunks(reader), False
  if "content-length" in headers:
    size = int(headers["content-length"])
    _check_size(size)
    return await reader.readexactly(size), False
  parts, total = [], 0
  while part := await reader.read(_MAX_HEAD):
    parts.append(part)
    total += len(part)
    _check_size(total)
  return b"".join(parts), True


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
  parts, total = [], 0
  while True:
    line = await reader.readuntil(b"\r\n")
    size = int(line.partition(b";")[0], 16)
    total += size
    _check_size(total)
    if not size:
      break
    parts.append((await reader.readexactly(size + 2))[:-2])
  while await reader.readuntil(b"\r\n") != b"\r\n":
    pass  # trailers
  return b"".join(parts)


def _check_size(size: int) -> None:
  if not 0 <= size <= _MAX_BODY:
    raise ValueError(f"an answer of {size} bytes; allowed are {_MAX_BODY}")
