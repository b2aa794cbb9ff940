"""The figures of the update, as ratios from one run.

    python tests/benchmarks/updates.py [--parts a,b,c,d,e]
      [--tunix_python PYTHON] [--torch_python PYTHON] [--rounds 5]

    a  64 rows of 64 + 128 tokens against google-tunix's and torch's update
    b  64 rows of skewed length (median 60 tokens, at most 192), the same
    c  a whole step: 8 prompts x 8 samples, reference log-probs, update
    d  12 layers, d = 768: the share of what plain products reach, and a profile
    e  the cost of a token in updates of 1 k to 64 k tokens

A peer runs in an environment of its own (`pip install google-tunix==0.1.7
jax==0.10.2`; `pip install torch transformers`), whose interpreter is given; one
that is not given is left out. Figures are medians over the rounds, by wall and
by CPU seconds; what is compared runs in turns, each side in a process of its
own, which says its memory. Compiling is the first call but a later one's time.
The last line is JSON.
"""

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
MICRO_TOKENS = 1024
WIDE = lab.SIZES | {
  "embed_dim": 768,
  "num_layers": 12,
  "num_heads": 12,
  "num_kv_heads": 4,
  "mlp_dim": 2048,
}

Rows = Sequence[tuple[int, int]]
Ways = dict[str, Callable[..., dict]]  # (do, rows) -> what a side answers


def skewed() -> Rows:
  """Log-normal; a third of a row is its prompt."""
  drawn = np.random.default_rng(0).lognormal(np.log(60), 0.65, 64)
  lengths = np.clip(np.round(drawn), 6, PROMPT + NEW).astype(int)
  return [(int(n) // 3, int(n) - int(n) // 3) for n in lengths]


# -- sides ---------------------------------------------------------------------


@contextlib.contextmanager
def sides(
  args: argparse.Namespace, sizes: Mapping[str, int] = lab.SIZES, only: str = ""
) -> Iterator[dict[str, lab.Peer]]:
  """New processes, so that the memory of each is of one part alone."""
  pythons = {
    "this": sys.executable,
    "tunix": args.tunix_python,
    "torch": args.torch_python,
  }
  started: dict[str, lab.Peer] = {}
  try:
    for name, python in pythons.items():
      if python and only in ("", name):
        started[name] = lab.Peer.start(name, python, "updates_peer.py", sizes)
    yield started
  finally:
    for peer in started.values():
      peer.stop()


def ways(peers: Mapping[str, lab.Peer]) -> Ways:
  """How each side is run. Torch also with 16 rows at a time, and with one
  thread, which costs it fewer CPU seconds."""

  def way(peer: lab.Peer, **options: int):
    return lambda do, rows: peer.ask({"do": do, "rows": rows} | options)

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


def cost(answer: Mapping[str, Any]) -> lab.Cost:
  return lab.Cost(answer["wall"], answer["cpu"])


# -- parts: (args) -> figures --------------------------------------------------


def against_peers(args: argparse.Namespace, rows: Rows) -> dict:
  """a, b. One update after the other."""
  num_tokens = sum(map(sum, rows))
  answers: dict[str, list[dict]] = {}

  def update(name: str, way: Callable) -> lab.Cost:
    answers.setdefault(name, []).append(way("update", rows))
    return cost(answers[name][-1])

  with sides(args) as peers:
    costs = lab.in_turns(
      {
        name: functools.partial(update, name, way)
        for name, way in ways(peers).items()
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
  """c. Decode, reference log-probs, update; the sum of their costs."""
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
    with sides(args) as peers:
      runs = {
        name: functools.partial(_step, decoders[name], way)
        for name, way in ways(peers).items()
        if name in decoders
      }
      costs = lab.in_turns(runs, args.rounds)
  finally:
    for peer in engines.values():
      peer.stop()
  return lab.compare(costs, "this", 64 * (PROMPT + NEW))


def _group(prompts: np.ndarray) -> list:
  return [
    lab.request((i // 8, i % 8, 0), prompt, NEW, shared_by=8)
    for i, prompt in enumerate(prompts)
  ]


def _step(decode: Callable[[], lab.Cost], way: Callable) -> lab.Cost:
  parts = [decode(), *(cost(way(do, UNIFORM)) for do in ("score", "update"))]
  return lab.Cost(*map(sum, zip(*parts, strict=True)))


def wide(args: argparse.Namespace) -> dict:
  """d. Products of 2048 x 2048 in turns with updates of a wider decoder."""
  rows = UNIFORM[:32]
  with sides(args, WIDE, "this") as peers:
    way = ways(peers)["this"]
    product = {"do": "product", "size": 2048, "num": 8}
    flop = {"update": update_flop(WIDE, rows)}
    runs = {
      "product": lambda: cost(peers["this"].ask(product)),
      "update": lambda: cost(way("update", rows)),
    }
    costs = lab.in_turns(runs, args.rounds)
    flop["product"] = 2 * 8 * 2048**3
    seconds = way("profile", rows)["seconds"]
  rates = {
    name: {
      clock: round(flop[name] / lab.median(spent, clock) / 1e9, 1)
      for clock in ("wall", "cpu")
    }
    for name, spent in costs.items()
  }
  share = {
    clock: round(rates["update"][clock] / rates["product"][clock], 3)
    for clock in ("wall", "cpu")
  }
  return {"gflop_per_s": rates, "share": share, "profile_s": seconds}


def update_flop(sizes: Mapping[str, int], rows: Rows) -> float:
  """Of the products that an update cannot do without: forward, and twice that
  backward; of attention what lies under the diagonal."""
  heads, kv_heads = sizes["num_heads"], sizes["num_kv_heads"]
  d, inner = sizes["embed_dim"], sizes["head_dim"]
  layer = d * inner * (2 * heads + 2 * kv_heads) + 3 * d * sizes["mlp_dim"]
  weights = sizes["num_layers"] * layer + d * sizes["vocab_size"]
  lengths = [sum(pair) for pair in rows]
  pairs = sum(n * (n + 1) / 2 for n in lengths)
  attention = 2 * sizes["num_layers"] * heads * inner * pairs
  return 3 * 2 * (weights * sum(lengths) + attention)


def by_tokens(args: argparse.Namespace) -> dict:
  """e. Rows of 128 tokens; 8 of them are a micro-batch."""
  sizes = lab.SIZES | {"length": 128}
  counts = (8, 32, 128, 512)
  with sides(args, sizes, "this") as peers:
    way = ways(peers)["this"]
    runs = {
      f"{num * 128} tokens": lambda num=num: cost(
        way("update", [(48, 80)] * num)
      )
      for num in counts
    }
    costs = lab.in_turns(runs, args.rounds)
  each = {
    clock: {
      name: 1e6 * lab.median(spent, clock) / int(name.split()[0])
      for name, spent in costs.items()
    }
    for clock in ("wall", "cpu")
  }
  return {
    clock: {name: round(us, 1) for name, us in spent.items()}
    | {"most_over_least": round(max(spent.values()) / min(spent.values()), 3)}
    for clock, spent in each.items()
  }


PARTS = {
  "a": lambda args: against_peers(args, UNIFORM),
  "b": lambda args: against_peers(args, skewed()),
  "c": whole_step,
  "d": wide,
  "e": by_tokens,
}


def main() -> None:
  args, given = lab.parse(lab.parser(__doc__, PARTS), PARTS, torch="torch")
  lab.report(PARTS, args, given)


if __name__ == "__main__":
  main()
