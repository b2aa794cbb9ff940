"""A server of passages that delays, fails and cuts some of its replies.

    python tests/faulty_retrieval.py CORPUS INDEX DELAYED FAILED CUT

serves with these shares of the replies, and prints its address; at the end of
its input, what it has replied.
"""

import json
import random
import socket
import sys
import threading
import time

from drmas_jax.door import ApiError
from drmas_jax.retrieval import serve

_DELAY_S = 2.0


class Faults:
  """Which replies go wrong; drawn with a seed, in the order of requests."""

  def __init__(self, delayed=0.0, failed=0.0, cut=0.0, seed=0):
    self._shares = {"delayed": delayed, "failed": failed, "cut": cut}
    self._random = random.Random(seed)
    self._lock = threading.Lock()
    self.counts = dict.fromkeys([*self._shares, "whole"], 0)

  def draw(self) -> str:
    with self._lock:
      left, drawn = self._random.random(), "whole"
      for name, share in self._shares.items():
        if 0 <= left < share:
          drawn = name
        left -= share
      self.counts[drawn] += 1
    return drawn


class FaultyHandler(serve.Handler):
  """As the server's own, but for `faults` of the door."""

  _cut = False

  def do_POST(self):
    fault = self.server.faults.draw()
    if fault == "delayed":
      time.sleep(_DELAY_S)
    if fault == "failed":
      self.body()
      self.refuse(ApiError(500, "a fault of the test", "internal"))
      return
    self._cut = fault == "cut"
    super().do_POST()

  def write(self, status, body, kind, headers=()):
    if not self._cut:
      super().write(status, body, kind, headers)
      return
    self.send_response(status)
    self.send_header("Content-Length", str(len(body)))
    self.end_headers()
    self.wfile.write(body[: len(body) // 2])
    self.wfile.flush()
    self.connection.shutdown(socket.SHUT_RDWR)
    self.close_connection = True


def open_door(retriever, faults: Faults, **options) -> serve.Door:
  """A door on a free port."""
  door = serve.Door("127.0.0.1", 0, FaultyHandler)
  door.faults = faults
  door.open(retriever, "bm25", **options)
  return door


def main(corpus, index, *shares):
  from drmas_jax.retrieval.bm25 import Bm25

  faults = Faults(*map(float, shares))
  door = open_door(Bm25(corpus, index), faults)
  print(door.url, flush=True)
  sys.stdin.read()  # until whoever started it is done
  print(json.dumps(faults.counts | {"cpu_s": time.process_time()}), flush=True)
  door.close()


if __name__ == "__main__":
  main(*sys.argv[1:])
