"""Who runs, where, in which order: a run from its start to its end.

    restore     the newest checkpoint, or the policies as they come
    evaluate    the held-out tasks
    step        see `training`
    evaluate, flush, save   where they are due
    summary, report

The state is saved only between steps, so that a kill at any moment leaves a run
that continues bit for bit. Policies and devices come from `building`.
"""

import pathlib
import time
from collections.abc import Sequence

import jax

from drmas_jax import (
  building,
  checkpoint,
  evaluate,
  hosts,
  manifest,
  placement,
  records,
  restoring,
  signals,
  watching,
  writers,
)
from drmas_jax import config as config_lib
from drmas_jax.evaluate import Evaluation, Summary
from drmas_jax.training import Training
from drmas_jax.types import RunError, Stopped


def main(
  config: config_lib.Config,
  workdir: pathlib.Path,
  *,
  allow_change: Sequence[str] = (),
  fork: str = "",
  processes: tuple[str | None, int | None, int | None] = (None, None, None),
  start: float | None = None,
) -> int:
  """Trains; returns the exit code.

  Args:
    config: checked.
    workdir: of the run; one that holds a checkpoint is resumed.
    allow_change: keys that may differ from the checkpoint's config.
    fork: a new workdir begins with the checkpoint WORKDIR[@STEP].
    processes: see `building.prepare`.
    start: of the process, on the clock of `time.monotonic`; None: it is not
      of this run alone, which starts now.
  """
  cpu_start = time.process_time() if start is None else 0.0
  start = time.monotonic() if start is None else start
  config, backbones = building.prepare(config, processes)
  stop = signals.Stop()
  try:
    run = Run(config, backbones, workdir, stop, start)
    run.cpu_start = cpu_start
    run.restore(allow_change, fork)
    with run.watch:
      return run.run()
  finally:
    stop.close()


class Run(Training):
  """A run that is trained to its end, in its workdir."""

  def run(self) -> int:
    """Trains to `config.steps`; returns the exit code."""
    try:
      if not self.before and self.step_done == 0:
        if self.config.eval.num_tasks:
          hosts.say(f"first the held-out tasks; then {self.config.steps} steps")
        self.before = self.evaluate(final=True).summary()
      while self.step_done < self.config.steps:
        self._follow_up()
        with self.watch.during("step"):
          self.step()
      after = self._follow_up()
    except Stopped:
      return self._interrupted()
    except RunError:  # on all hosts alike; what was learned is kept
      self._interrupted()
      raise
    self._finish(after)
    return 0

  def _follow_up(self) -> Summary:
    """What is due after the step done, unless it was before a resume."""
    result: Summary = {}
    step, every = self.step_done, self.config.eval.every
    last = step == self.config.steps
    if last:  # its evaluation may take long; no step is to be lost with it
      self.writer.flush()
      self.save()
      self.checkpoints.wait()
    if last or (self.score is None and every and step and step % every == 0):
      evaluation = self.evaluate(final=last)
      # What a final one has more of, in tasks or episodes, is left out: scores
      # are compared with each other.
      always = evaluate.extent(self.config.eval, final=False)
      self.score = evaluation.first(*always).score
      result = evaluation.summary()
    self.writer.flush()
    if last or (step and step % self.config.checkpoint.every == 0):
      self.save()
    return result

  # -- evaluation --

  def evaluate(self, final: bool = False) -> Evaluation:
    """On the held-out sets, written as metrics of the step done."""
    num, k = evaluate.extent(self.config.eval, final)
    sets = {name: tasks[:num] for name, tasks in self.held_out.items() if num}
    with self.watch.during("evaluation", self.rollout.waiting):
      result = evaluate.run(
        self.rollout, sets, self.config, self.keys["eval"], k
      )
    if not sets:  # no evaluations are asked for
      return result
    if result.num_clocked:
      self.deterministic = False
    self.eval_s += result.seconds
    found = result.metrics()
    # A curve is of the same tasks and episodes at every step.
    compared = result.first(*evaluate.extent(self.config.eval, final=False))
    self._compare(compared.score)
    if final:
      found |= compared.metrics()
      self._write_results(result)
    found["time/eval_s"] = result.seconds
    self.writer.write_scalars(self.step_done, found)
    if self.step_done == 0:
      self.writer.flush()
    return result

  def _write_results(self, result: Evaluation) -> None:
    if self.writer.primary:
      folder = records.folder(self.workdir, self.step_done)
      origins = {
        name: policy.origin
        if not policy.trained or not self.step_done
        else f"checkpoint {self.step_done}"
        for name, policy in self.config.policies.items()
      }
      evaluate.write(
        folder, result, self.config, self.step_done, origins, self.about()
      )

  # -- save, restore --

  def save(self) -> None:
    self.totals |= self._used()
    with self.watch.during("checkpoint"):
      self.checkpoints.save(
        checkpoint.Run(
          step=self.step_done,
          cursor=self.cursor,
          config=config_lib.to_dict(self.config),
          versions={n: b.updates[n] for n, b in self.homes.items()},
          extra={
            "before": self.before,
            "averages": self.averages.tolist(),
            "deterministic": self.deterministic,
            "totals": self.totals,
            "health": self.health.state(),
            "spikes": self.spikes.state,
            "changes": self.changes,
            "folders": {n: b.digest for n, b in self.homes.items()},
          },
          score=self.score,
        ),
        {n: s for b in self.backbones.values() for n, s in b.states().items()},
      )

  def restore(self, allow_change: Sequence[str], fork: str = "") -> None:
    """The newest checkpoint of the workdir, else the one that it is a fork of,
    else the checkpoint folders.

    Args:
      allow_change: keys that may differ from the checkpoint's config.
      fork: what `--fork` says.
    """
    hosts.check_alike(
      "flags and data",
      {
        "--workdir": str(self.workdir),
        "--allow_change": sorted(allow_change),
        "--fork": fork,
        **self.fingerprints,
      },
    )
    self.fork = self._find_fork(fork)
    begins = self.fork is not None and not self.checkpoints.steps()
    begins = hosts.agree("fork begins", {"begins": begins})[0]["begins"]

    def check(run: checkpoint.Run | None) -> None:
      self._check_resume(run, allow_change, fork=begins)

    if begins:
      run = self.load(self.fork.checkpoints, check, self.fork.step)
      if jax.process_index() == 0:
        self.fork.write(self.workdir)
    else:
      run = self.load(self.checkpoints, check)
    try:
      self._open_writer(run)
      hosts.check_folder(self.workdir)
    except OSError as e:
      raise config_lib.ConfigError(f"--workdir={self.workdir}: {e}") from e
    known = {} if begins or run is None else run.extra
    self.spikes.go_on(known.get("spikes", ()))  # earlier versions had none
    self.checkpoints.held = self.spikes.checkpoints
    if begins:  # from here on it needs nothing of the other run
      self.save()
      self.checkpoints.wait()

  def _find_fork(self, name: str) -> checkpoint.Fork | None:
    """The run meant may go on: all hosts take what the first one found."""
    fork = checkpoint.Fork.of(self.workdir, name)
    found = hosts.agree("fork", {"fork": fork and fork._asdict()})[0]["fork"]
    return found and checkpoint.Fork(**found)

  def _check_resume(
    self,
    run: checkpoint.Run | None,
    allow_change: Sequence[str],
    fork: bool,
  ) -> None:
    if run is None:
      return
    restoring.check_folders(run, self.backbones)
    changes = restoring.changes(run, self.config, allow_change, fork)
    restoring.check_rows(
      self.workdir, self.stream.sources, self.fingerprints, allow_change
    )
    workdir = self.fork.workdir if fork else self.workdir
    restoring.check_steps(run, self.config, workdir)
    self.changes = changes

  def _open_writer(self, run: checkpoint.Run | None) -> None:
    done = None if run is None else run.step
    self.writer = watching.open_writer(
      self.config, self.workdir, self.config.steps, done
    )
    self.writer.write_json("changes.json", self.changes)
    if self.writer.primary:
      records.cut_after(self.workdir, self.step_done)
      manifest.record(self.workdir, self.about(), self.step_done)

  # -- the end --

  def _used(self) -> dict[str, float]:
    """Seconds of the run so far, earlier processes of it included."""
    return {
      "seconds": self._earlier["seconds"] + time.monotonic() - self.start,
      "cpu_seconds": self._earlier["cpu_seconds"]
      + time.process_time()
      - self.cpu_start,
    }

  def _interrupted(self) -> int:
    self.writer.flush()
    self.save()
    self.close()
    hosts.say(
      f"saved step {self.step_done} of {self.config.steps} in {self.workdir}; "
      "the same command goes on from there"
    )
    return self.stop.exit_code

  def _finish(self, after: Summary) -> None:
    """Summary, figure and table."""
    self.checkpoints.wait()
    self.totals |= self._used()
    tokens = self.totals["tokens"]
    self.writer.write_json(
      "summary.json",
      {
        "steps": self.step_done,
        "before": self.before,
        "after": after,
        "seconds": self.totals["seconds"],
        "cpu_seconds": self.totals["cpu_seconds"],
        "seconds_to_first_step": self.first_step_s,
        "tokens": tokens,
        "rollout_seconds": self.totals["rollout_s"],
        "tokens_per_s": tokens / max(self.totals["rollout_s"], 1e-9),
        "peak_memory_gb": placement.peaks()["host"] / (1 << 30),
        "deterministic": self.deterministic,
        "best_step": self.checkpoints.best(),
        "alarms": self.health.summary(),
      },
    )
    self.close()
    if self.writer.primary:
      if after:
        tables = map(evaluate.rows, (self.before, after))
        print(writers.table(*tables))
      print(f"{self.workdir}: summary.json, report.html, checkpoints/")
