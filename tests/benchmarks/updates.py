"""The figures of the update, as ratios from one run.

    python tests/benchmarks/updates.py [--parts a,b,..] [--rounds 5]
      [--tunix_python PYTHON] [--torch_python PYTHON] [--checkpoint DIR]

    a  64 rows of 64 + 128 tokens against google-tunix's and torch's update
    b  64 rows of skewed length (median 60 tokens, at most 192), the same
    c  a whole step of 8 prompts x 8 samples: decode, reference log-probs and
       update, and each of them alone
    d  12 layers, d = 768: the share of what plain products reach, and where
       the rest goes
    e  the cost of a token in updates of 1 k to 64 k tokens
    f  the rows of b packed, and each in a row of its own
    g  a large vocabulary's log-probs in chunks, and at once
    h  the three kinds of remat
    i  all weights, one adapter, four adapters
    j  seconds to compile an update and a rollout
    k  --checkpoint (Qwen2.5-Coder-0.5B): one update of 16 rows of 512 tokens,
       with the head in chunks and at once
    l  the same with an adapter

A peer runs in an environment of its own (`pip install google-tunix==0.1.7
jax==0.10.2`; `pip install torch transformers`), whose interpreter is given; one
that is not given is left out. Figures are medians over the rounds, by wall and
by CPU seconds; what is compared runs in turns, each side in a process of its
own, which says its memory: the most that it has held, and what before the first
update. Compiling is the first call but a later one's time.

Each part's figures are printed when it is done, as a line of JSON, and all of
them as the last line, however the run ends.
"""

import argparse
import functools
import os
import statistics
from collections.abc import Callable

import numpy as np
import rollouts_lab as lab
import updates_costs
import updates_lab
import updates_wide
from updates_lab import NEW, PROMPT, UNIFORM, Rows, cost

# -- parts: (args) -> figures --------------------------------------------------


def against_peers(args: argparse.Namespace, rows: Rows) -> dict:
  """a, b. One update after the other."""
  num_tokens = sum(map(sum, rows))
  answers: dict[str, list[dict]] = {}

  def update(name: str, way: Callable) -> lab.Cost:
    answers.setdefault(name, []).append(way("update", rows))
    return cost(answers[name][-1])

  with updates_lab.sides(args) as peers:
    costs = lab.in_turns(
      {
        name: functools.partial(update, name, way)
        for name, way in updates_lab.ways(peers).items()
      },
      args.rounds,
    )
  found = lab.compare(costs, "this", num_tokens)
  for name, said in answers.items():
    later = statistics.median(a["wall"] for a in said[1:])
    if "," not in name:  # another way of a process that has begun
      found[name]["compile_s"] = round(said[0]["wall"] - later, 1)
      found[name]["rss_gb"] = round(said[0]["rss_gb"], 2)
  return {"tokens": num_tokens} | found


def whole_step(args: argparse.Namespace) -> dict:
  """c. Decode, reference log-probs, update: their costs, and the sum."""
  phases: dict[str, dict[str, list[lab.Cost]]] = {}
  prompts = np.repeat(lab.prompts(8), 8, axis=0)
  sampler = lab.make_sampler(lab.random_params())
  decoders = {
    "this": lambda: lab.timed(lambda: lab.serve(sampler, _group(prompts)))
  }
  other = {"tunix": args.tunix_python, "transformers": args.torch_python}
  engines = {
    n: lab.Peer.start(n, python) for n, python in other.items() if python
  }
  for name, peer in engines.items():
    key = "torch" if name == "transformers" else name
    decoders[key] = lambda peer=peer: peer.decode(
      prompts, NEW, 64, os.cpu_count()
    )
  try:
    with updates_lab.sides(args) as peers:
      runs = {
        name: functools.partial(_step, phases, name, decoders[name], way)
        for name, way in updates_lab.ways(peers).items()
        if name in decoders
      }
      costs = lab.in_turns(runs, args.rounds)
  finally:
    for peer in engines.values():
      peer.stop()
  phases["step"] = costs
  found = {}
  for phase, spent in phases.items():
    spent = {name: each[-args.rounds :] for name, each in spent.items()}
    found[phase] = lab.compare(spent, "this", 64 * (PROMPT + NEW))
  return found


def _group(prompts: np.ndarray) -> list:
  return [
    lab.request((i // 8, i % 8, 0), prompt, NEW, shared_by=8)
    for i, prompt in enumerate(prompts)
  ]


def _step(phases, name: str, decode: Callable[[], lab.Cost], way: Callable):
  spent = {"decode": decode()}
  for do in ("score", "update"):
    spent[do] = cost(way(do, UNIFORM, group=8))
  for phase, each in spent.items():
    phases.setdefault(phase, {}).setdefault(name, []).append(each)
  return lab.Cost(*map(sum, zip(*spent.values(), strict=True)))


PARTS = {
  "a": lambda args: against_peers(args, UNIFORM),
  "b": lambda args: against_peers(args, updates_lab.skewed()),
  "c": whole_step,
  "d": updates_wide.wide,
  **updates_costs.PARTS,
}


def main() -> None:
  parser = lab.parser(__doc__, PARTS)
  parser.add_argument("--checkpoint", default="")
  args, given = lab.parse(parser, PARTS, torch="torch")
  lab.report(PARTS, args, given)


if __name__ == "__main__":
  main()
