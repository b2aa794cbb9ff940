"""Rule 25 under kills at random moments.

    python tests/benchmarks/kill_storm.py [--kills 100] [--seed 0]

Small jobs are killed (SIGKILL) again and again and started again, until each
comes to its end and is compared with one that nothing disturbed:

    train  at any moment from the imports to the end
    save   the same job, while a checkpoint is being written
    sft    `--mode=sft`
    eval   `--mode=eval`

After each kill what was committed must be there still. One line a round, and a
JSON object last; the exit code is 1 if anything differs or was lost.
"""

import argparse
import contextlib
import json
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import small_run

_TRAIN = ("--config.checkpoint.every=1",)
_SFT = (
  "--mode=sft",
  *("--config.sft.steps=24", "--config.sft.batch_rows=16"),
  "--config.checkpoint.every=3",
)
_EVAL = ("--mode=eval", "--config.eval.num_tasks=48", "--config.eval.k=4")
_LIMIT_S = 120.0  # of one start


class Job(NamedTuple):
  """What is killed, and what is to come of it.

  Attributes:
    flags: of the command.
    share: of all kills.
    left: workdir -> what a finished one leaves, to be compared.
    kept: workdir -> how much of it is committed; it never shrinks.
    whole: (workdir, straight one) -> what is there only in part.
    saving: it is killed as soon as a checkpoint is begun.
  """

  flags: tuple[str, ...]
  share: float
  left: Callable[[pathlib.Path], dict]
  kept: Callable[[pathlib.Path], int]
  whole: Callable[[pathlib.Path, pathlib.Path], list[str]] = lambda *_: []
  saving: bool = False


def _steps(folder: pathlib.Path) -> int:
  """The newest committed step."""
  names = [p.name for p in folder.glob("checkpoints/*")]
  return max((int(n) for n in names if n.isdigit()), default=-1)


def _run_left(workdir: pathlib.Path) -> dict:
  state = small_run.state(workdir)
  return {key: (a.dtype, a.shape, a.tobytes()) for key, a in state.items()} | {
    "metrics": small_run.metrics(workdir),
    "transcripts": small_run.transcripts(workdir),
  }


def _files(folder: pathlib.Path) -> dict[str, bytes]:
  return {p.name: p.read_bytes() for p in folder.iterdir()}


def _sft_left(workdir: pathlib.Path) -> dict:
  policies = {p.name: _files(p) for p in (workdir / "policies").iterdir()}
  return policies | {"metrics": small_run.metrics(workdir)}


def _sft_whole(workdir: pathlib.Path, straight: pathlib.Path) -> list[str]:
  """A policy's folder is there as it will be, or not at all."""
  return [
    str(folder)
    for folder in workdir.glob("policies/[!.]*")
    if _files(folder) != _files(straight / "policies" / folder.name)
  ]


def _episodes(workdir: pathlib.Path) -> list[str]:
  return [
    line
    for path in workdir.glob("eval/step_*/episodes.jsonl")
    for line in path.read_text().splitlines(keepends=True)
    if line.endswith("\n")
  ]


def _eval_left(workdir: pathlib.Path) -> dict:
  return {"episodes": sorted(_episodes(workdir))}


JOBS = {
  "train": Job(_TRAIN, 0.5, _run_left, _steps),
  "save": Job(_TRAIN, 0.2, _run_left, _steps, saving=True),
  "sft": Job(
    _SFT, 0.15, _sft_left, lambda w: _steps(w / "sft"), whole=_sft_whole
  ),
  "eval": Job(_EVAL, 0.15, _eval_left, lambda w: len(_episodes(w))),
}


class Tally:
  """Kills that hit, and what went wrong."""

  def __init__(self, rng: random.Random):
    self.rng = rng
    self.kills = dict.fromkeys(JOBS, 0)
    self.rounds = dict.fromkeys(JOBS, 0)
    self.lost: list[str] = []
    self.different: list[str] = []


def _saving(workdir: pathlib.Path, process) -> None:
  """Until a checkpoint is being written, or the process has ended."""
  end = time.monotonic() + _LIMIT_S
  while process.poll() is None and time.monotonic() < end:
    if any(workdir.glob("checkpoints/*orbax-checkpoint-tmp*")):
      return
    time.sleep(0.002)


def _start(job: Job, workdir: pathlib.Path, seconds: float, tally: Tally):
  """One start and, if it comes in time, its kill: whether that hit, and how
  long the process was there."""
  process, start = small_run.start(workdir, *job.flags), time.monotonic()
  if job.saving:
    _saving(workdir, process)
    time.sleep(tally.rng.uniform(0, 0.05))
  else:
    with contextlib.suppress(subprocess.TimeoutExpired):
      process.wait(seconds * tally.rng.uniform(0.2, 1.0))
  took = time.monotonic() - start
  process.kill()
  code, said = small_run.finish(process)
  if code not in (0, -9):
    raise RuntimeError(said)
  return code == -9, took


def storm(name: str, num: int, base: pathlib.Path, seconds: float, tally):
  """Rounds of a job until `num` kills have hit.

  Args:
    name: of the job.
    num: kills.
    base: what all its workdirs begin as; its straight run lies beside it.
    seconds: that the straight run took; less, once a round takes less.
    tally: is added to.
  """
  job, straight = JOBS[name], base.with_name(f"{name}_straight")
  left = job.left(straight)
  while tally.kills[name] < num:
    workdir = base.with_name(f"{name}_{tally.rounds[name]}")
    shutil.copytree(base, workdir)
    kept, kills, done = job.kept(workdir), 0, False
    while not done and tally.kills[name] < num:
      hit, took = _start(job, workdir, seconds, tally)
      done = not hit
      if done:  # the straight run may have had a busier machine
        seconds = min(seconds, took)
      now = job.kept(workdir)
      if now < kept:
        tally.lost.append(f"{workdir.name}: {kept} -> {now}")
      tally.lost += job.whole(workdir, straight)
      kept = now
      kills += not done
      tally.kills[name] += not done
    if not done:
      code, said = small_run.run(workdir, *job.flags)
      if code:
        raise RuntimeError(said)
    found = job.left(workdir)
    wrong = sorted(str(k) for k in found if found[k] != left.get(k))
    wrong += sorted(str(k) for k in left if k not in found)
    tally.rounds[name] += 1
    tally.different += [f"{workdir.name}: {key}" for key in wrong]
    said = ", ".join(wrong) or "equal"
    print(f"{workdir.name}: {kills} kills, {said}", flush=True)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--kills", type=int, default=100)
  parser.add_argument("--seed", type=int, default=0)
  args = parser.parse_args()
  tally, began = Tally(random.Random(args.seed)), time.monotonic()
  with tempfile.TemporaryDirectory() as folder:
    trained = pathlib.Path(folder) / "train_straight"
    for name, job in JOBS.items():
      base = pathlib.Path(folder) / f"{name}_base"
      base.mkdir()
      if name == "eval":  # of the trained policies
        shutil.copytree(trained / "checkpoints", base / "checkpoints")
      for run in ("compiles", "straight"):
        workdir = base.with_name(f"{name}_{run}")
        shutil.copytree(base, workdir)
        start = time.monotonic()
        code, said = small_run.run(workdir, *job.flags)
        seconds = time.monotonic() - start
        if code:
          raise RuntimeError(said)
      storm(name, round(args.kills * job.share), base, seconds, tally)
  said = {
    "kills": sum(tally.kills.values()),
    "by_job": tally.kills,
    "rounds": tally.rounds,
    "lost": tally.lost,
    "different": tally.different,
    "seconds": round(time.monotonic() - began),
  }
  print(json.dumps(said))
  return int(bool(tally.lost or tally.different))


if __name__ == "__main__":
  sys.exit(main())
