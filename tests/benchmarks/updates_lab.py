"""What the parts of `updates.py` share: rows, sizes, processes."""

import argparse
import contextlib
import functools
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import rollouts_lab as lab

PROMPT, NEW = lab.PROMPT, lab.NEW
UNIFORM = [(PROMPT, NEW)] * 64
MICRO_TOKENS = 6 * (PROMPT + NEW)
WIDE = lab.SIZES | {
  "embed_dim": 768,
  "num_layers": 12,
  "num_heads": 12,
  "num_kv_heads": 4,
  "mlp_dim": 2048,
}

Rows = Sequence[tuple[int, int]]  # tokens of a prompt and of its completion
Ways = dict[str, Callable[..., dict]]  # (do, rows) -> what a side answers


def skewed() -> Rows:
  """Log-normal; a third of a row is its prompt."""
  drawn = np.random.default_rng(0).lognormal(np.log(60), 0.65, 64)
  lengths = np.clip(np.round(drawn), 6, PROMPT + NEW).astype(int)
  return [(int(n) // 3, int(n) - int(n) // 3) for n in lengths]


def cost(answer: Mapping[str, Any]) -> lab.Cost:
  return lab.Cost(answer["wall"], answer["cpu"])


# -- sides ---------------------------------------------------------------------


@contextlib.contextmanager
def sides(args: argparse.Namespace) -> Iterator[dict[str, lab.Peer]]:
  """New processes, so that the memory of each is of one part alone."""
  pythons = {
    "this": sys.executable,
    "tunix": args.tunix_python,
    "torch": args.torch_python,
  }
  started: dict[str, lab.Peer] = {}
  try:
    for name, python in pythons.items():
      if python:
        started[name] = lab.Peer.start(name, python, "updates_peer.py")
    yield started
  finally:
    for peer in started.values():
      peer.stop()


def ways(peers: Mapping[str, lab.Peer]) -> Ways:
  """How each side is run. Torch also with 16 rows at a time, and with one
  thread, which costs it fewer CPU seconds."""

  def way(peer: lab.Peer, **options: int):
    return lambda do, rows, **more: peer.ask(
      {"do": do, "rows": rows} | options | more
    )

  found = {}
  if "this" in peers:
    found["this"] = way(peers["this"], micro_tokens=MICRO_TOKENS)
  if "tunix" in peers:
    found["tunix"] = way(peers["tunix"])
  if "torch" in peers:
    cores = os.cpu_count()
    found["torch"] = way(peers["torch"], micro=64, threads=cores)
    found["torch, 16 rows"] = way(peers["torch"], micro=16, threads=cores)
    found["torch, 1 thread"] = way(peers["torch"], micro=64, threads=1)
  return found


# -- variants of this side -----------------------------------------------------


@contextlib.contextmanager
def one(sizes: Mapping[str, Any]) -> Iterator[lab.Peer]:
  """This side, in a new process."""
  peer = lab.Peer.start("this", sys.executable, "updates_peer.py", sizes)
  try:
    yield peer
  finally:
    peer.stop()


def memory(answer: Mapping[str, Any]) -> dict[str, float]:
  """The most that its process has held, and what it held before."""
  return {name: round(answer[name], 2) for name in ("rss_gb", "before_gb")}


def variants(
  args: argparse.Namespace,
  made: Mapping[str, Mapping[str, Any]],
  rows: Rows,
  *,
  micro_tokens: int,
) -> dict:
  """Seconds of an update and the most memory, of each of some SIZES in a
  process of its own, and how many times the first one's these are."""
  job = {"do": "update", "rows": rows, "micro_tokens": micro_tokens}
  firsts: dict[str, dict] = {}
  lasts: dict[str, dict] = {}

  def update(name: str, peer: lab.Peer) -> lab.Cost:
    lasts[name] = peer.ask(job)
    firsts.setdefault(name, lasts[name])
    return cost(lasts[name])

  with contextlib.ExitStack() as stack:
    costs = lab.in_turns(
      {
        name: functools.partial(update, name, stack.enter_context(one(sizes)))
        for name, sizes in made.items()
      },
      args.rounds,
    )
  first = next(iter(made))
  return {
    name: {
      "wall_s": round(lab.median(spent, "wall"), 3),
      "cpu_s": round(lab.median(spent, "cpu"), 3),
      "rss_gb": round(lasts[name]["rss_gb"], 2),
      "before_gb": round(firsts[name]["before_gb"], 2),
      "wall_ratio": lab.ratio(spent, costs[first], "wall"),
      "cpu_ratio": lab.ratio(spent, costs[first], "cpu"),
      "rss_ratio": round(lasts[name]["rss_gb"] / lasts[first]["rss_gb"], 2),
    }
    for name, spent in costs.items()
  }


def compiling(
  args: argparse.Namespace,
  jobs: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]],
) -> dict:
  """Seconds by which a job's first run in a process is longer than its second;
  of (SIZES, job) by name."""
  found: dict[str, list[lab.Cost]] = {name: [] for name in jobs}
  for _ in range(args.rounds):
    for name, (sizes, job) in jobs.items():
      with one(sizes) as peer:
        if job["do"] == "rollout":  # weights and a sampler are made before
          peer.ask(job | {"num": 0})
        first, second = (cost(peer.ask(job)) for _ in range(2))
      found[name].append(
        lab.Cost(first.wall - second.wall, first.cpu - second.cpu)
      )
  return {
    name: {
      f"{clock}_s": round(
        statistics.median(getattr(c, clock) for c in spent), 1
      )
      for clock in lab.Cost._fields
    }
    for name, spent in found.items()
  }
