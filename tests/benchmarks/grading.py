r"""Verdicts a second, on plain answers and on those that take algebra.

    python tests/benchmarks/grading.py --data FOLDER [--threads 4]

FOLDER holds gsm8k_train.jsonl and math500.jsonl, lines of JSON with "answer".
Every pair is graded once, so the pool's cache of verdicts does not help. Plain:
GSM8K's golds against themselves, with commas and against the next one. Others,
with MATH-500's golds: spelled another way (`\left`, `\dfrac`, spaces, `$`), the
next gold in their place, and rewritten (times \sqrt{3}, divided by it), which a
worker process has to decide. The last line is JSON.
"""

import argparse
import concurrent.futures
import itertools
import json
import pathlib
import time

from drmas_jax.grading import latex, tree
from drmas_jax.grading import math as grading


def _golds(path: pathlib.Path) -> list[str]:
  with path.open(encoding="utf-8") as lines:
    return [str(json.loads(line)["answer"]) for line in lines]


def _spelled(gold: str) -> str:
  for plain, long in (
    (r"\frac", r"\dfrac"),
    ("(", r"\left("),
    (")", r"\right)"),
  ):
    gold = gold.replace(plain, long)
  return f"$ {gold} $"


def _rewritten(gold: str) -> str | None:
  node = latex.parse(gold)
  if node is None or not tree.is_expression(node):
    return None
  return rf"\frac{{\sqrt{{3}} \cdot {{{gold}}}}}{{\sqrt{{3}}}}"


def pairs(
  folder: pathlib.Path,
) -> dict[str, list[tuple[str, str, bool | None]]]:
  """{name: [(answer, gold, verdict that is due or None)]}."""
  plain = _golds(folder / "gsm8k_train.jsonl")
  golds = _golds(folder / "math500.jsonl")
  following = golds[1:] + golds[:1]
  return {
    "plain": [
      *((g, g, True) for g in plain),
      *((f"{float(g):,}", g, True) for g in plain),
      *((a, b, None) for a, b in itertools.pairwise(plain)),
    ],
    "spelled": [(_spelled(g), g, True) for g in golds],
    "neighbour": [(a, b, None) for a, b in zip(golds, following, strict=True)],
    "rewritten": [(r, g, True) for g in golds if (r := _rewritten(g))],
  }


def measure(rows, threads: int) -> float:
  """Verdicts a second; a wrong one is an error."""

  def right(row) -> bool:
    answer, gold, due = row
    verdict = grading.grade(rf"so \boxed{{{answer}}}", gold)
    return due is None or verdict is due

  start = time.perf_counter()
  with concurrent.futures.ThreadPoolExecutor(threads) as pool:
    wrong = [
      r for r, ok in zip(rows, pool.map(right, rows), strict=True) if not ok
    ]
  seconds = time.perf_counter() - start
  if wrong:
    raise RuntimeError(f"{len(wrong)} wrong verdicts, the first: {wrong[0]}")
  return len(rows) / seconds


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--data", type=pathlib.Path, required=True)
  parser.add_argument("--threads", type=int, default=4)
  flags = parser.parse_args()
  start = time.perf_counter()
  grading.equal(r"\sqrt{8}", r"2\sqrt{2}")  # starts a worker
  rates = {"start_s": time.perf_counter() - start}
  for name, rows in pairs(flags.data).items():
    rates[name] = measure(rows, 1 if name == "plain" else flags.threads)
    print(f"{name}: {len(rows)} verdicts, {rates[name]:.0f} a second")
  print(json.dumps({k: round(v, 2) for k, v in rates.items()}))


if __name__ == "__main__":
  main()
