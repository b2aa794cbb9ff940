"""The figures of the update, as ratios from one run.

    python tests/benchmarks/updates.py [--parts a,b,..] [--rounds 5]
      [--tunix_python PYTHON] [--torch_python PYTHON] [--checkpoint DIR]

    a  64 rows of 64 + 128 tokens against google-tunix's and torch's update
    b  64 rows of skewed length (median 60 tokens, at most 192), the same
    c  a whole step of 8 prompts x 8 samples by the trainer of each (torch's is
       TRL's), and its phases by hand: decode, reference log-probs, update
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
jax==0.10.2`; `pip install torch transformers trl==1.16.0`), whose interpreter
is given; one that is not given is left out. Figures are medians over the
rounds, by wall and by CPU seconds; what is compared runs in turns, each side in
a process of its own, which says its memory: the most that it has held, and what
before the first update. Compiling is the first call but a later one's time.

Each part's figures are printed when it is done, as a line of JSON, and all of
them as the last line, however the run ends.
"""

import argparse
import functools
import statistics
from collections.abc import Callable

import rollouts_lab as lab
import updates_costs
import updates_lab
import updates_whole
import updates_wide
from updates_lab import UNIFORM, Rows, cost

from drmas_jax import hugepages

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


PARTS = {
  "a": lambda args: against_peers(args, UNIFORM),
  "b": lambda args: against_peers(args, updates_lab.skewed()),
  "c": updates_whole.whole_step,
  "d": updates_wide.wide,
  **updates_costs.PARTS,
}


def main() -> None:
  hugepages.restart()  # as the commands of the project do
  parser = lab.parser(__doc__, PARTS)
  parser.add_argument("--checkpoint", default="")
  args, given = lab.parse(parser, PARTS, torch="torch")
  lab.report(PARTS, args, given)


if __name__ == "__main__":
  main()
