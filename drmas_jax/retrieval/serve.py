"""A server of passages, for clients of Search-R1 and of Dr. MAS alike.

    python -m drmas_jax.retrieval.serve --corpus data/wiki-18
    python -m drmas_jax.retrieval.serve --corpus data/wiki-18 --kind dense
        --encoder /models/e5-base-v2 --prefixes 'query: ' 'passage: '

    POST /retrieve    `wire` has what goes in and out
    GET  /health      {"status", "kind", "passages", "open"}

Requests that come within --wait_ms are searched together. The index is made
first, with a progress bar, where there is none or the corpus has changed.

Exit codes: 0 after SIGTERM, 130 after Ctrl-C, both behind the last answers; 2
something asked for is not there or does not fit.
"""

import argparse
import concurrent.futures
import signal
import sys
import threading
import time
from collections.abc import Sequence

from drmas_jax import door
from drmas_jax.door import ApiError
from drmas_jax.retrieval import retriever, wire

_CLOSE_S = 10.0
_SPARE = 64  # connections beyond those of open queries


class Door(door.Door):
  """Listens once it is made; serves between `open` and `close`."""

  def __init__(self, host: str, port: int, handler=None):
    super().__init__(host, port, handler or Handler)

  def open(
    self,
    found: retriever.Retriever,
    kind: str,
    *,
    wait_s: float = 0.003,
    max_batch: int = 256,
    max_open: int = 4096,
    timeout_s: float = 30.0,
  ) -> None:
    """Lets requests in.

    Args:
      found: what searches; used by one thread.
      kind: what /health calls it.
      wait_s: how long the first of a search waits for others.
      max_batch: queries of one search (but always those of one request).
      max_open: queries that wait; what comes then is refused, status 429.
      timeout_s: of a request.
    """
    self.kind, self.max_open, self.timeout_s = kind, max_open, timeout_s
    self.batcher = retriever.Batcher(found, wait_s, max_batch)
    self.start(max_open + _SPARE)

  def close(self, timeout_s: float = _CLOSE_S) -> None:
    """Lets nothing more in; answers under way are written first."""
    super().close(timeout_s)
    self.batcher.close()


class Handler(door.Handler):
  """One connection."""

  server: Door
  posts = ("/retrieve",)
  gets = ("/health",)

  def do_GET(self) -> None:
    if self.path.partition("?")[0] != "/health":
      self.refuse(self.no_such_path())
      return
    batcher = self.server.batcher
    self.send(
      200,
      {
        "status": "ok",
        "kind": self.server.kind,
        "passages": len(batcher.retriever),
        "open": batcher.num_open,
      },
    )

  def do_POST(self) -> None:
    with self.server.answering():
      self.attempt(self._retrieve)

  def _retrieve(self) -> int:
    ask = wire.read_ask(self.body())
    batcher = self.server.batcher
    if batcher.num_open + len(ask.queries) > self.server.max_open:
      raise ApiError(
        429,
        f"{batcher.num_open} queries wait; come again later",
        "queue_full",
      )
    future = batcher.submit(ask.queries, ask.k)
    try:
      found = future.result(self.server.timeout_s)
    except concurrent.futures.TimeoutError as e:
      future.cancel()
      raise ApiError(
        503,
        f"no answer within {self.server.timeout_s:g} s",
        "timeout",
        retry_after_s=1,
      ) from e
    self.send(200, wire.write_answer(found, ask.scores))
    return 200


# -- the command ---------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m drmas_jax.retrieval.serve",
    description="Serves passages of a corpus over HTTP.",
    allow_abbrev=False,
  )
  what = parser.add_argument_group("what is served")
  what.add_argument(
    "--corpus", required=True, help=".jsonl file, or folder of them"
  )
  what.add_argument("--kind", choices=("bm25", "dense"), default="bm25")
  what.add_argument(
    "--index", default="", help="folder of the index; default: beside --corpus"
  )
  what.add_argument(
    "--build",
    choices=("auto", "only", "never"),
    default="auto",
    help="make the index where it is missing or stale (auto), and end then "
    "(only), or refuse (never); default: %(default)s",
  )
  dense = parser.add_argument_group("of --kind=dense")
  dense.add_argument("--encoder", help="folder of a BERT-like checkpoint")
  dense.add_argument(
    "--prefixes",
    nargs=2,
    metavar=("QUERY", "PASSAGE"),
    help="before each text, as 'query: ' 'passage: ' for e5; default: what "
    "the folder says",
  )
  dense.add_argument(
    "--dtype", choices=("float16", "float32"), help="default: float16"
  )
  dense.add_argument(
    "--stream",
    action="store_true",
    default=None,
    help="vectors stay on the host: they need not fit on the devices",
  )
  how = parser.add_argument_group("how")
  how.add_argument("--host", default="127.0.0.1")
  how.add_argument("--port", type=int, default=8000, help="0: any free one")
  how.add_argument(
    "--wait_ms",
    type=float,
    default=3.0,
    help="how long the first query of a search waits for others "
    "(default: %(default)g)",
  )
  how.add_argument(
    "--max_batch",
    type=int,
    default=256,
    help="queries of one search (default: %(default)d)",
  )
  how.add_argument(
    "--max_open",
    type=int,
    default=4096,
    help="queries that wait; more get status 429 (default: %(default)d)",
  )
  how.add_argument(
    "--timeout_s",
    type=float,
    default=30.0,
    help="limit of a request (default: %(default)g)",
  )
  return parser


_DENSE = ("encoder", "prefixes", "dtype", "stream")


def _check(args: argparse.Namespace) -> None:
  """Raises a ValueError that names all that is wrong with the flags."""
  faults = []
  if args.kind == "dense" and not args.encoder:
    faults.append("--kind=dense: needs --encoder")
  if args.kind != "dense":
    faults += [
      f"--{name}: has no effect without --kind=dense; remove it"
      for name in _DENSE
      if getattr(args, name) is not None
    ]
  for name in ("max_batch", "max_open", "timeout_s"):
    if not 0 < (value := getattr(args, name)) < float("inf"):
      faults.append(f"--{name}={value:g}: write a value > 0")
  if not 0 <= args.wait_ms <= 1000:
    faults.append(f"--wait_ms={args.wait_ms:g}: allowed are 0 to 1000")
  if not 0 <= args.port < 1 << 16:
    faults.append(f"--port={args.port}: allowed are 0 to 65535")
  if faults:
    raise ValueError("\n".join(faults))


def _open(args: argparse.Namespace) -> retriever.Retriever:
  if args.kind == "bm25":
    from drmas_jax.retrieval.bm25 import Bm25

    return Bm25(args.corpus, args.index, args.build)
  import jax
  import numpy as np

  from drmas_jax.retrieval.dense import Dense

  return Dense(
    args.corpus,
    args.encoder,
    jax.sharding.Mesh(np.asarray(jax.local_devices()), ("rows",)),
    index=args.index,
    build=args.build,
    prefixes=args.prefixes,
    dtype=args.dtype or "float16",
    stream=bool(args.stream),
  )


def _listen(args: argparse.Namespace) -> Door:
  try:
    return Door(args.host, args.port)
  except OSError as e:
    raise ValueError(
      f"--host={args.host} --port={args.port}: {e}; name another"
    ) from e


def _serve(args: argparse.Namespace) -> int:
  """Until a signal; returns the exit code."""
  came = threading.Event()
  signals = []

  def stop(number, frame) -> None:
    del frame
    signals.append(number)
    came.set()

  if args.build == "only":
    print(f"drmas_jax: the index holds {len(_open(args))} passages")
    return 0
  listening = _listen(args)  # before an index is made for it
  began = time.monotonic()
  found = _open(args)
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, stop)
  listening.open(
    found,
    args.kind,
    wait_s=args.wait_ms / 1000,
    max_batch=args.max_batch,
    max_open=args.max_open,
    timeout_s=args.timeout_s,
  )
  print(
    f"drmas_jax: serves {len(found)} passages by {args.kind} "
    f"({time.monotonic() - began:.1f} s) at {listening.url}/retrieve",
    flush=True,
  )
  came.wait()
  listening.close()
  return 130 if signals[0] == signal.SIGINT else 0


def main(argv: Sequence[str] | None = None) -> int:
  """Returns the exit code."""
  args = _parser().parse_args(argv)
  try:
    _check(args)
    return _serve(args)
  except ValueError as e:
    print(f"drmas_jax: {e}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    return 130


if __name__ == "__main__":
  sys.exit(main())
