"""Rule 25 under kills at random moments, start and saves included.

    python tests/benchmarks/kill_storm.py [--rounds 5] [--seed 0]

A small run is killed again and again after random delays until it comes to its
end, and is then compared with one that nothing disturbed: weights, optimizer,
metrics, transcripts. One line a round; the exit code is 1 if one differs.
"""

import argparse
import pathlib
import random
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import small_run

_FLAGS = ("--config.checkpoint.every=1",)
_MOST_KILLS = 40  # then one start is left in peace


def storm(workdir: pathlib.Path, seconds: float, rng: random.Random) -> int:
  """Number of kills until the run came to its end."""
  for kills in range(_MOST_KILLS):
    process = small_run.start(workdir, *_FLAGS)
    # From the imports to the end of a start that is left in peace.
    time.sleep(seconds * rng.uniform(0.3, 1.0))
    process.kill()
    code, said = small_run.finish(process)
    if code == 0:
      return kills
    if code != -9:
      raise RuntimeError(said)
  code, said = small_run.run(workdir, *_FLAGS)
  if code:
    raise RuntimeError(said)
  return _MOST_KILLS


def differences(one: pathlib.Path, two: pathlib.Path) -> list[str]:
  """What is not the same in two finished runs."""
  found = []
  try:
    small_run.assert_equal(small_run.state(one), small_run.state(two))
  except AssertionError as e:
    found.append(f"state: {e}")
  for read in (small_run.metrics, small_run.transcripts):
    if read(one) != read(two):
      found.append(read.__name__)
  return found


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--seed", type=int, default=0)
  args = parser.parse_args()
  rng, failed = random.Random(args.seed), 0
  with tempfile.TemporaryDirectory() as folder:
    straight = pathlib.Path(folder) / "straight"
    small_run.run(straight, *_FLAGS, "--config.steps=1")  # it compiles
    start = time.monotonic()
    code, said = small_run.run(straight, *_FLAGS)
    seconds = time.monotonic() - start
    if code:
      raise RuntimeError(said)
    for i in range(args.rounds):
      workdir = pathlib.Path(folder) / str(i)
      kills = storm(workdir, seconds, rng)
      found = differences(workdir, straight)
      failed += bool(found)
      said = "; ".join(found) or "equal"
      print(f"round {i}: {kills} kills, {said}", flush=True)
  return int(failed > 0)


if __name__ == "__main__":
  sys.exit(main())
