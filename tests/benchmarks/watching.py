"""What it costs to watch a run: transcripts, report, alarms, watchdog.

    python tests/benchmarks/watching.py [--steps 12]

The job of configs/math_tiny.py in this process, without evaluations. In every
step its transcripts are written twice, as the config says and with all groups,
so that both shares are of the same steps. Times are medians over the steps
behind the first two, which compile. The last line is a JSON object: shares of a
step's time, seconds, bytes.
"""

import argparse
import collections
import functools
import json
import pathlib
import statistics
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[2]
_COMPILE = 2  # steps
_LOOKS = 10_000  # of the watchdog's sections

_spent: dict[str, list[float]] = collections.defaultdict(list)


def timed(name, function):
  """The function, whose seconds go under the name."""

  @functools.wraps(function)
  def wrapped(*args, **kwargs):
    began = time.perf_counter()
    try:
      return function(*args, **kwargs)
    finally:
      _spent[name].append(time.perf_counter() - began)

  return wrapped


def write_twice(write, folder):
  """`Training._write_episodes`, and once more with all groups elsewhere."""
  from drmas_jax import writers

  class Everything(writers.Writer):
    """As `RunWriter` where all are written whole."""

    kept = writers.Transcripts(folder, 64.0)

    def write_episodes(self, episodes):
      self.kept.write_episodes(episodes)

  everything = Everything()
  default, full = timed("default", write), timed("all", write)

  def both(self, *args):
    default(self, *args)
    own, self.writer = self.writer, everything
    try:
      full(self, *args)
    finally:
      self.writer = own

  return both


def section_s() -> float:
  """Seconds of entering and leaving a section of the watchdog."""
  from drmas_jax import watchdog

  watch = watchdog.Watchdog(None, factor=2, floor_s=60, say=print)
  began = time.perf_counter()
  for _ in range(_LOOKS):
    with watch.during("step"):
      pass
  return (time.perf_counter() - began) / _LOOKS


def run(steps: int, folder: pathlib.Path) -> dict:
  """What the job came to."""
  from drmas_jax import config as config_lib
  from drmas_jax import health, main, report, training, watchdog, writers

  main.set_environment()
  from drmas_jax import coordinator

  write = training.Training._write_episodes
  training.Training._write_episodes = write_twice(write, folder / "all")
  health.Monitor.see = timed("alarms", health.Monitor.see)
  report.write = timed("report", report.write)
  watchdog.Watchdog.look = timed("looks", watchdog.Watchdog.look)
  config = config_lib.read(
    ROOT / "configs" / "math_tiny.py",
    [f"steps={steps}", "eval.num_tasks=0", "eval.every=0"],
  )
  workdir = folder / "run"
  began = time.perf_counter()
  code = coordinator.main(config, workdir)
  seconds = time.perf_counter() - began
  assert code == 0, code
  found = writers.read_metrics(workdir / "metrics.jsonl")
  step_s = statistics.median(found["time/step_s"][1][_COMPILE:])
  episodes = config.data.num_tasks * config.data.group_size

  def of_step(name):
    return statistics.median(_spent[name][_COMPILE:])

  return {
    "steps": steps,
    "step_s": step_s,
    "episodes": episodes,
    "transcripts_share": of_step("default") / step_s,
    "transcripts_all_share": of_step("all") / step_s,
    "transcripts_us_per_episode": of_step("all") / episodes * 1e6,
    "transcripts_all_bytes": sum(
      p.stat().st_size for p in (folder / "all").iterdir()
    ),
    "report_s": statistics.median(_spent["report"]),
    "report_share": sum(_spent["report"]) / seconds,
    "report_bytes": (workdir / report.NAME).stat().st_size,
    "alarms_share": of_step("alarms") / step_s,
    "watchdog_section_s": section_s(),
    "watchdog_looks_share": sum(_spent["looks"]) / seconds,
  }


def command() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--steps", type=int, default=12)
  steps = parser.parse_args().steps
  with tempfile.TemporaryDirectory() as folder:
    found = run(steps, pathlib.Path(folder))
  for name, value in found.items():
    print(f"{name:<28} {value:.4g}", file=sys.stderr)
  print(json.dumps(found))


if __name__ == "__main__":
  command()
