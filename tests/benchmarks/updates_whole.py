"""Part c of `updates.py`: a whole step, and its phases."""

import argparse
import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Callable

import numpy as np
import rollouts_lab as lab
import updates_lab
from updates_lab import NEW, PROMPT, UNIFORM, cost

NUM_TOKENS = 64 * (PROMPT + NEW)


def whole_step(args: argparse.Namespace) -> dict:
  """c. Each one's trainer; then decode, score and update alone."""
  return {"step": _trainers(args)} | _phases(args)


def _trainers(args: argparse.Namespace) -> dict:
  """See `updates_steps`. The peers also update on 16 rows at a time."""
  ways = {
    "this": ("this", sys.executable, 64),
    "tunix": ("tunix", args.tunix_python, 64),
    "tunix, 16 rows": ("tunix", args.tunix_python, 16),
    "trl": ("trl", args.torch_python, 64),
    "trl, 16 rows": ("trl", args.torch_python, 16),
  }
  answers: dict[str, dict] = {}

  def step(name: str, peer: lab.Peer, rows: int) -> lab.Cost:
    answers[name] = peer.ask({"rows": rows})
    return cost(answers[name])

  with contextlib.ExitStack() as stack:
    runs = {}
    for name, (kind, python, rows) in ways.items():
      if python:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        sizes = lab.SIZES | {"folder": folder}
        peer = lab.Peer.start(kind, python, "updates_steps.py", sizes)
        stack.callback(peer.stop)
        runs[name] = functools.partial(step, name, peer, rows)
        runs[name]()  # compiles, or is told its rows
    costs = lab.in_turns(runs, args.rounds)
  found = lab.compare(costs, "this", NUM_TOKENS)
  for name, answer in answers.items():
    found[name]["rss_gb"] = round(answer["rss_gb"], 2)
  return found


def _phases(args: argparse.Namespace) -> dict:
  prompts = np.repeat(lab.prompts(8), 8, axis=0)
  sampler = lab.make_sampler(lab.random_params(), num_slots=64)
  decoders = {
    "this": lambda: lab.timed(lambda: lab.serve(sampler, _group(prompts)))
  }
  other = {"tunix": args.tunix_python, "transformers": args.torch_python}
  with contextlib.ExitStack() as stack:
    for name, python in other.items():
      if python:
        peer = lab.Peer.start(name, python)
        stack.callback(peer.stop)
        decoders["torch" if name == "transformers" else name] = (
          lambda peer=peer: peer.decode(prompts, NEW, 64, os.cpu_count())
        )
    peers = stack.enter_context(updates_lab.sides(args))
    phases: dict[str, dict[str, Callable[[], lab.Cost]]] = {"decode": decoders}
    ways = updates_lab.ways(peers).items()
    for do in ("score", "update"):
      phases[do] = {
        name: lambda do=do, way=way: cost(way(do, UNIFORM, group=8))
        for name, way in ways
      }
    return {
      phase: lab.compare(lab.in_turns(runs, args.rounds), "this", NUM_TOKENS)
      for phase, runs in phases.items()
    }


def _group(prompts: np.ndarray) -> list:
  return [
    lab.request((i // 8, i % 8, 0), prompt, NEW, shared_by=8)
    for i, prompt in enumerate(prompts)
  ]
