"""The figures of the tiny job: cost, success, and whether the team is a team.

    python tests/benchmarks/tiny_team.py [--seeds 0,1,2] [--out DIR]

Per seed, in a fresh process each: the main job with an empty compile cache,
and again with the cache it left. Then, from the end state, 512 held-out tasks
x 8: the verifier's balanced accuracy on first solutions, the share of wrong
ones that it rejects, and the team's success minus that of the same episodes'
first solutions, with its paired 95 % interval over tasks. The last line is
JSON; medians over seeds.
"""

import argparse
import json
import pathlib
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "math_tiny.py"


def call(workdir: pathlib.Path, cache: pathlib.Path, *flags: str) -> None:
  """The command in a process of its own."""
  subprocess.run(
    [
      *(sys.executable, "-m", "drmas_jax.main", "--config", str(CONFIG)),
      *("--workdir", str(workdir), *flags),
    ],
    check=True,
    cwd=ROOT,
    capture_output=True,
    env={
      "PATH": "/usr/bin:/bin",
      "JAX_COMPILATION_CACHE_DIR": str(cache),
      "JAX_PLATFORMS": "cpu",
      "HOME": str(cache),
    },
  )


def run_job(
  workdir: pathlib.Path, cache: pathlib.Path, seed: int, *flags: str
) -> dict:
  """One run; seconds of wall clock and CPU."""
  shutil.rmtree(workdir, ignore_errors=True)
  before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
  call(workdir, cache, f"--config.seed={seed}", *flags)
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  summary = json.loads((workdir / "summary.json").read_text())
  success = {
    k: summary[k].get("macro", {}).get("avg@8", [None])[0]
    for k in ("before", "after")
  }
  return {
    "wall_s": time.monotonic() - start,
    "cpu_s": after.ru_utime
    + after.ru_stime
    - before.ru_utime
    - before.ru_stime,
    "first_step_s": summary["seconds_to_first_step"],
    "peak_gb": summary["peak_memory_gb"],
    **success,
    "deterministic": summary["deterministic"],
  }


def first_step_s(folder: pathlib.Path, seed: int, cache: str) -> float:
  """From the start of the process to the end of the first update, without any
  evaluation, whose programs are the rollout's."""
  if cache == "cold":
    shutil.rmtree(folder, ignore_errors=True)
  (folder / "cache").mkdir(parents=True, exist_ok=True)
  flags = ("--config.steps=1", "--config.eval.num_tasks=0")
  run = run_job(folder / "run", folder / "cache", seed, *flags)
  return run["first_step_s"]


def analyse(
  workdir: pathlib.Path, cache: pathlib.Path, seed: int, num_tasks: int
) -> dict:
  """What the team of a finished run does on held-out tasks."""
  from drmas_jax import metrics

  flags = ("--mode=eval", f"--config.eval.final_num_tasks={num_tasks}")
  call(workdir, cache, f"--config.seed={seed}", *flags)
  steps = json.loads((workdir / "summary.json").read_text())["steps"]
  folder = workdir / "eval" / f"step_{steps}"
  found = json.loads((folder / "results.json").read_text())
  verifier = found["agents"]["verifier"]
  lines = (folder / "episodes.jsonl").read_text().splitlines()
  records = {(r["index"], r["episode"]): r for r in map(json.loads, lines)}
  success, first = (
    np.array([records[key]["parts"][part] for key in sorted(records)])
    for part in ("correct", "first_correct")
  )
  gain = metrics.paired_bootstrap(
    *([x.reshape(-1, found["k"]).mean(axis=1)] for x in (success, first))
  )
  return {
    "avg@8": found["summary"]["macro"]["avg@8"],
    "first_success": float(first.mean()),
    "balanced_accuracy": verifier["balanced_accuracy"],
    "wrong_rejected": verifier["reject_recall"],
    "right_rejected": 1 - verifier["approve_recall"],
    "gain": gain,
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--seeds", default="0,1,2")
  parser.add_argument("--out", default="")
  parser.add_argument("--num_tasks", type=int, default=512)
  args = parser.parse_args()
  out = pathlib.Path(args.out or tempfile.mkdtemp(prefix="tiny-team-"))
  results = []
  for seed in map(int, args.seeds.split(",")):
    cache = out / f"cache-{seed}"
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir(parents=True)
    workdir = out / f"run-{seed}"
    cold = run_job(workdir, cache, seed)
    warm = run_job(workdir, cache, seed)
    team = analyse(workdir, cache, seed, args.num_tasks)
    first = {c: first_step_s(out / "first", seed, c) for c in ("cold", "warm")}
    results.append(
      {"seed": seed, "cold": cold, "warm": warm, "first": first, "team": team}
    )
    print(json.dumps(results[-1], indent=2), flush=True)

  def median(*path):
    values = []
    for value in results:
      for key in path:
        value = value[key]
      values.append(value)
    return round(statistics.median(values), 3)

  print(
    json.dumps(
      {
        "cpu_s": {c: median(c, "cpu_s") for c in ("cold", "warm")},
        "wall_s": {c: median(c, "wall_s") for c in ("cold", "warm")},
        "first_step_s": {c: median("first", c) for c in ("cold", "warm")},
        "peak_gb": median("cold", "peak_gb"),
        "before": median("cold", "before"),
        "after": [round(r["team"]["avg@8"][0], 3) for r in results],
        "balanced_accuracy": [
          round(r["team"]["balanced_accuracy"], 3) for r in results
        ],
        "wrong_rejected": [
          round(r["team"]["wrong_rejected"], 3) for r in results
        ],
        "gain": [[round(x, 3) for x in r["team"]["gain"]] for r in results],
      }
    )
  )


if __name__ == "__main__":
  main()
