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
  phases: dict[str, dict[str, list[lab.Cost]]] = {}
  with contextlib.ExitStack() as stack:
    for name, python in other.items():
      if python:
        peer = lab.Peer.start(name, python)
        stack.callback(peer.stop)
        decoders["torch" if name == "transformers" else name] = (
          lambda peer=peer: peer.decode(prompts, NEW, 64, os.cpu_count())
        )
    peers = stack.enter_context(updates_lab.sides(args))
    runs = {
      name: functools.partial(_phase, phases, name, decoders[name], way)
      for name, way in updates_lab.ways(peers).items()
      if name in decoders
    }
    lab.in_turns(runs, args.rounds)
  return {
    phase: lab.compare(
      {name: each[-args.rounds :] for name, each in spent.items()},
      "this",
      NUM_TOKENS,
    )
    for phase, spent in phases.items()
  }


def _group(prompts: np.ndarray) -> list:
  return [
    lab.request((i // 8, i % 8, 0), prompt, NEW, shared_by=8)
    for i, prompt in enumerate(prompts)
  ]


def _phase(
  phases: dict, name: str, decode: Callable[[], lab.Cost], way: Callable
) -> lab.Cost:
  """All of them once; returns the sum, which is of no interest."""
  spent = {"decode": decode()}
  for do in ("score", "update"):
    spent[do] = cost(way(do, UNIFORM, group=8))
  for phase, each in spent.items():
    phases.setdefault(phase, {}).setdefault(name, []).append(each)
  return lab.Cost(*map(sum, zip(*spent.values(), strict=True)))
