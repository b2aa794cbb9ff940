"""Parts e to l of `updates.py`: what a switch of the update costs and saves."""

import argparse
from typing import Any

import rollouts_lab as lab
import updates_lab
from updates_lab import MICRO_TOKENS, UNIFORM, WIDE, cost

QWEN_ROWS = [(128, 384)] * 16


def by_tokens(args: argparse.Namespace) -> dict:
  """e. Rows of 128 tokens; 8 of them are a micro-batch."""
  sizes = lab.SIZES | {"length": 128}
  counts, micro_tokens = (8, 32, 128, 512), 8 * 128
  with updates_lab.one(sizes) as peer:
    way = updates_lab.ways({"this": peer})["this"]
    runs = {
      f"{num * 128} tokens": lambda num=num: cost(
        way("update", [(48, 80)] * num, micro_tokens=micro_tokens)
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


def packing(args: argparse.Namespace) -> dict:
  """f. Rows of skewed length, several in a row of the batch or one."""
  rows = updates_lab.skewed()
  job = {"do": "update", "rows": rows, "micro_tokens": MICRO_TOKENS}
  with updates_lab.one(lab.SIZES) as peer:
    costs = lab.in_turns(
      {
        name: lambda packed=packed: cost(peer.ask(job | {"packed": packed}))
        for name, packed in (("packed", True), ("alone", False))
      },
      args.rounds,
    )
  return lab.compare(costs, "packed", sum(map(sum, rows)))


def head(args: argparse.Namespace) -> dict:
  """g. A vocabulary of 151,936; 1024 tokens at a time."""
  sizes = lab.SIZES | {"vocab_size": 151_936, "num_layers": 2}
  made = {
    "in chunks": sizes,
    "at once": sizes | {"chunks": False},
  }
  return updates_lab.variants(
    args, made, UNIFORM[:16], micro_tokens=MICRO_TOKENS
  )


def remat(args: argparse.Namespace) -> dict:
  """h. 8192 tokens at a time, as is the default."""
  made = {
    name: lab.SIZES | {"remat": name} for name in ("none", "dots", "full")
  }
  return updates_lab.variants(args, made, UNIFORM, micro_tokens=8192)


def lora(args: argparse.Namespace) -> dict:
  """i. d = 768, 12 layers; adapters of rank 16 on all seven products."""
  made = {
    "all weights": WIDE,
    "1 adapter": WIDE | {"adapters": 1},
    "4 adapters": WIDE | {"adapters": 4},
  }
  return updates_lab.variants(
    args, made, UNIFORM[:32], micro_tokens=MICRO_TOKENS
  )


def compiling(args: argparse.Namespace) -> dict:
  """j. Seconds of the first call above a later one's, in a new process."""
  rows = UNIFORM[:8]
  update = {"do": "update", "rows": rows, "micro_tokens": MICRO_TOKENS}
  deep = lab.SIZES | {"num_layers": 24}
  return updates_lab.compiling(
    args,
    {
      "update": (lab.SIZES, update),
      "update, 24 layers": (deep, update),
      "update of 4 adapters": (lab.SIZES | {"adapters": 4}, update),
      "update of 4 adapters, 24 layers": (deep | {"adapters": 4}, update),
      "rollout": (lab.SIZES, {"do": "rollout", "num": 32}),
    },
  )


def checkpoint(args: argparse.Namespace, num_adapters: int) -> dict:
  """k, l. One update of 16 rows of 512 tokens, remat "full", 1024 tokens at a
  time; in a process each, one after the other."""
  sizes = {
    "checkpoint": args.checkpoint,
    "length": 512,
    "remat": "full",
    "adapters": num_adapters,
  }
  if not args.checkpoint:
    return {"left out": "no --checkpoint"}
  job = {"do": "update", "rows": QWEN_ROWS, "micro_tokens": MICRO_TOKENS}
  found: dict[str, Any] = {}
  for name, chunks in (("in chunks", True), ("at once", False)):
    with updates_lab.one(sizes | {"chunks": chunks}) as peer:
      peer.limit_s = 1800
      said = peer.ask(job)
    found[name] = {
      "wall_s": round(said["wall"], 1),
      "cpu_s": round(said["cpu"], 1),
      "finite": said["finite"],
      **updates_lab.memory(said),
    }
  return found


PARTS = {
  "e": by_tokens,
  "f": packing,
  "g": head,
  "h": remat,
  "i": lora,
  "j": compiling,
  "k": lambda args: checkpoint(args, 0),
  "l": lambda args: checkpoint(args, 1),
}
