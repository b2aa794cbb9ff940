"""The loop: who runs, where, in which order.

    data.tasks      [P] tasks, each host its share
    rollout         [P] groups of G episodes of turns
    rewards         [N] row scores
    advantages      [N]
    agree           sizes, denominators, signals: the same branch on all hosts
    backbone.update pack, train step; all dispatched before any is awaited
    backbone.resume train slice -> rollout slice
    writers, evaluation, checkpoint

State changes only in `Training.step`, and is saved only between steps, so that
a kill at any moment leaves a run that continues bit for bit.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import resource
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from drmas_jax import (
  advantages,
  batching,
  checkpoint,
  data,
  evaluate,
  hosts,
  metrics,
  placement,
  rewards,
  rollout,
  sampling,
  sft,
  writers,
)
from drmas_jax import config as config_lib
from drmas_jax.backbone import Backbone, checkpoint_folder
from drmas_jax.models import weights
from drmas_jax.rollout import Stopped
from drmas_jax.types import Group, RunError

_GRACE_S = 30.0  # a step may go on for this long after SIGTERM


class Stop:
  """SIGINT and SIGTERM as a wish; a second one ends the process at once."""

  def __init__(self):
    self.signal = 0
    self._since = 0.0
    self._before = {
      s: signal.signal(s, self._wish) for s in (signal.SIGINT, signal.SIGTERM)
    }

  def _wish(self, number: int, frame: Any) -> None:
    if self.signal:
      signal.signal(number, signal.SIG_DFL)
      signal.raise_signal(number)
    self.signal, self._since = number, time.monotonic()
    # Not print: the signal may have come in the middle of one.
    os.write(
      2,
      f"drmas_jax: {signal.Signals(number).name}: the step is finished (or "
      f"given up after {_GRACE_S:.0f} s), then the run is saved; once more "
      "to end at once\n".encode(),
    )

  def check(self) -> None:
    """Called within a step."""
    if self.signal and time.monotonic() - self._since > _GRACE_S:
      raise Stopped

  @property
  def exit_code(self) -> int:
    return 128 + (self.signal or signal.SIGTERM)  # or another host's wish

  def close(self) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)


def main(
  config: config_lib.Config,
  workdir: pathlib.Path,
  *,
  mode: str = "train",
  allow_change: Sequence[str] = (),
  processes: tuple[str | None, int | None, int | None] = (None, None, None),
  start: float | None = None,
) -> int:
  """Runs a mode; returns the exit code.

  Args:
    config: checked.
    workdir: of the run; one that holds a checkpoint is resumed.
    mode: "train", "eval" or "sft".
    allow_change: keys that may differ from the checkpoint's config.
    processes: coordinator address, number, id; see `hosts.initialize`.
    start: of the process, on the clock of `time.monotonic`.
  """
  start = time.monotonic() if start is None else start
  hosts.initialize(*processes, timeout_s=config.placement.timeout_s)
  backbones = _build(config)
  if mode == "sft":
    return _sft(config, backbones, workdir)
  stop = Stop()
  try:
    training = Training(config, backbones, workdir, stop, start, mode)
    training.restore(allow_change)
    return _report(training) if mode == "eval" else training.run()
  finally:
    stop.close()


def _build(config: config_lib.Config) -> dict[str, Backbone]:
  """Plans the devices and builds every backbone, without weights."""
  folders, models = {}, {}
  for name, policy in sorted(config.policies.items()):
    with _blaming(f"policies.{name}.checkpoint={policy.checkpoint!r}"):
      folders[name] = checkpoint_folder(policy.checkpoint)
      models[name] = weights.read_config(folders[name])
  plan = placement.plan(config, models)
  _say(
    f"{placement.describe(plan)}; {', '.join(models)} from "
    f"{', '.join(config.policies[n].checkpoint for n in models)}"
  )
  backbones = {}
  for name, model in models.items():
    path = config.policies[name].checkpoint
    with _blaming(f"policies.{name}.checkpoint={path!r}"):
      backbones[name] = Backbone(
        name, config, plan.slices[name], model, folders[name]
      )
  return backbones


@contextlib.contextmanager
def _blaming(key: str) -> Iterator[None]:
  """Around what reads a value of the config: a fault there is the key's."""
  try:
    yield
  except config_lib.ConfigError:
    raise
  except ValueError as e:
    raise config_lib.ConfigError(f"{key}: {e}") from e


def _say(text: str) -> None:
  """What is going on, for whoever watches; on stderr, by process 0."""
  if jax.process_index() == 0:
    print(f"drmas_jax: {text}", file=sys.stderr, flush=True)


def _source(config_source: config_lib.Source) -> Any:
  module = config_lib.load_module("datasets", config_source.name)
  with _blaming(f"data source {config_source.name!r}"):
    return module.make(config_source.split, **config_source.options)


def _held_out_source(config: config_lib.Config) -> config_lib.Source:
  """`eval.source`, or the test split of the training source."""
  if config.eval.source is not None:
    return config.eval.source
  return dataclasses.replace(config.data.source, split="test")


class Training:
  """A run: its state, and what it does with it."""

  def __init__(
    self,
    config: config_lib.Config,
    backbones: dict[str, Backbone],
    workdir: pathlib.Path,
    stop: Stop,
    start: float,
    mode: str,
  ):
    self.config, self.backbones, self.workdir = config, backbones, workdir
    self.stop, self.mode = stop, mode
    with _blaming("data.source"):
      self.stream = data.Stream(_source(config.data.source), config.seed)
    self.held_out = data.held_out(
      _source(_held_out_source(config)),
      max(config.eval.num_tasks, config.eval.final_num_tasks),
    )
    with _blaming("environment.options"):
      team = rollout.Team(config)
    self.rollout = rollout.Rollout(
      team,
      {n: b.sampler for n, b in backbones.items()},
      config,
      heartbeat=stop.check,
    )
    self.checkpoints = checkpoint.Checkpoints(
      workdir, config.checkpoint.keep, read_only=mode == "eval"
    )
    self.penalties = {n: a.invalid_penalty for n, a in config.agents.items()}
    self.keys = {
      p: sampling.root_key(config.seed, p) for p in ("train", "eval")
    }
    # What a checkpoint holds beside the policies.
    self.step_done = 0
    self.cursor = 0
    self.score: float | None = None  # held-out, of the step done
    self.before: dict[str, metrics.Interval] = {}
    self.deterministic = True
    self.totals = dict.fromkeys(
      ("seconds", "cpu_seconds", "tokens", "rollout_s"), 0.0
    )
    self.changes: list[dict[str, Any]] = []  # of the config, on resumes
    # Of this process.
    self.start = start
    self.first_step_s: float | None = None
    self.eval_s = 0.0
    self._earlier = dict(self.totals)
    self.writer: Any = writers.Writer()  # of nothing, unless training

  # -- the run --

  def run(self) -> int:
    """Trains to `config.steps`; returns the exit code."""
    try:
      if not self.before and self.step_done == 0:
        if self.config.eval.num_tasks:
          _say(f"first the held-out tasks; then {self.config.steps} steps")
        self.before = self.evaluate(final=True).summary()
      while self.step_done < self.config.steps:
        self._follow_up()
        self.step()
      after = self._follow_up()
    except Stopped:
      return self._interrupted()
    except RunError:  # on all hosts alike; what was learned is kept
      self._interrupted()
      raise
    self._finish(after)
    return 0

  def _follow_up(self) -> dict[str, metrics.Interval]:
    """What is due after the step done, unless it was before a resume."""
    result: dict[str, metrics.Interval] = {}
    step, every = self.step_done, self.config.eval.every
    last = step == self.config.steps
    if last or (self.score is None and every and step and step % every == 0):
      evaluation = self.evaluate(final=last)
      self.score = evaluation.score(self.config.eval.num_tasks)
      result = evaluation.summary()
    self.writer.flush()
    if last or (step and step % self.config.checkpoint.every == 0):
      self.save()
    return result

  def step(self) -> None:
    """One step.

    Raises:
      Stopped: by a signal, on any host; the state is that before or after it.
    """
    began = time.monotonic()
    groups, stopping = self._collect()
    played = time.monotonic()
    rows = rewards.row_scores(groups, self.penalties)
    estimate = advantages.estimate(
      self.config.advantage,
      rows.scores,
      rows.group,
      rows.agent,
      rows.episode,
      num_agents=len(self.config.agent_names),
      per_agent=rows.per_agent,
    )
    trained = [self.backbones[n] for n in self.config.trained]
    work = {b.name: b.work(rows, estimate.values) for b in trained}
    shares = self._agree(work, groups, stopping)
    if max(s["abandoned"] for s in shares):
      raise Stopped
    self._check_failures(shares)
    outputs, skipped = self._update(rows, estimate.values, work, shares)
    self.score = None
    self.step_done += 1
    self.cursor += self.config.data.num_tasks
    found = metrics.rollout(groups, rows, self.config.agent_names)
    found |= metrics.baselines(
      estimate.num_singleton,
      estimate.num_zero_variance,
      self.config.agent_names,
    )
    for name in self.config.trained:
      for reason in ("no_rows", "no_signal", "non_finite"):
        found[f"skipped/{reason}/{name}"] = float(skipped.get(name) == reason)
    for name, (output, norms) in outputs.items():
      agents = self.backbones[name].agent_index
      found |= metrics.update(output, norms, name, agents)
    tokens = rollout.count_tokens(groups)
    found |= {
      "time/step_s": time.monotonic() - began,
      "time/rollout_s": played - began,
      "rollout/tokens_per_s": tokens / (played - began),
    }
    self._record(found, tokens, played - began)
    self._write_episodes(groups, rows, estimate.values)
    if max(s["stop"] for s in shares):
      raise Stopped

  def _collect(self) -> tuple[list[Group], bool]:
    """This host's groups of the step, or none if the step is given up."""
    tasks = hosts.share(
      self.stream.tasks(self.cursor, self.config.data.num_tasks)
    )
    size = self.config.data.group_size
    try:
      return self.rollout.collect(tasks, size, self.keys["train"]), False
    except Stopped:
      return [], True

  def _agree(self, work, groups: list[Group], abandoned: bool) -> list[dict]:
    """One exchange between hosts; nothing else decides between branches."""
    episodes = [e for g in groups for e in g.episodes]
    failed = [e for e in episodes if not rewards.ok(e)]
    mine = {
      "abandoned": int(abandoned),
      "stop": int(self.stop.signal > 0),
      "episodes": len(episodes),
      "failed": len(failed),
      "fault": next((e.fault.message for e in failed if e.fault), ""),
      "work": {
        name: {
          "tokens": w.tokens,
          "num_rows": w.size.num_rows,
          "longest": w.size.longest,
        }
        for name, w in work.items()
      },
    }
    return hosts.agree("step", mine, self.config.placement.timeout_s)

  def _check_failures(self, shares: list[dict]) -> None:
    total = sum(s["episodes"] for s in shares)
    failed = sum(s["failed"] for s in shares)
    if failed > self.config.rollout.max_failed * total:
      fault = next(s["fault"] for s in shares if s["failed"])
      raise RunError(
        f"step {self.step_done + 1}: {failed} of {total} episodes failed; "
        f"allowed is a share of rollout.max_failed="
        f"{self.config.rollout.max_failed}; the first: {fault}"
      )

  def _update(self, rows, values, work, shares):
    """Dispatches every backbone's update, then every weight sync."""
    outputs, skipped = {}, {}
    every = self.config.logging.agent_norm_every
    norms = every > 0 and self.step_done % every == 0
    with hosts.together("update"):
      for backbone in self.backbones.values():
        backbone.release()
      for name in self.config.trained:
        asked = [s["work"][name] for s in shares]
        tokens = sum(a["tokens"] for a in asked)
        if not sum(a["num_rows"] for a in asked):
          skipped[name] = "no_signal" if tokens else "no_rows"
          continue
        backbone = self.backbones[name]
        outputs[name] = backbone.update(
          rows,
          values,
          work[name],
          batching.Size(
            max(a["num_rows"] for a in asked), max(a["longest"] for a in asked)
          ),
          tokens,
          num_hosts=len(shares),
          agent_norms=norms and len(backbone.agents) > 1,
        )
      for name, backbone in self.backbones.items():
        backbone.count_updates(int(name in outputs))
        backbone.resume()
      outputs = placement.fetch(outputs)
    for name, (output, _) in outputs.items():
      if not output.finite:
        skipped[name] = "non_finite"
        self.backbones[name].count_updates(-1)
    return outputs, skipped

  def _record(self, found: dict, tokens: int, rollout_s: float) -> None:
    """Merges the hosts' metrics, and writes them."""
    found["rollout/tokens"] = float(tokens)
    found = metrics.merge(
      hosts.agree("metrics", found, self.config.placement.timeout_s)
    )
    if found["wall_clock_faults/team"]:
      self.deterministic = False
    self.totals["tokens"] += found["rollout/tokens"]
    self.totals["rollout_s"] += rollout_s
    if self.first_step_s is None:
      self.first_step_s = time.monotonic() - self.start - self.eval_s
    self.writer.write_scalars(self.step_done, found)

  def _write_episodes(self, groups: list[Group], rows, values) -> None:
    by_turn = {
      id(turn): (float(score), float(value))
      for turn, score, value in zip(
        rows.turns, rows.scores, values, strict=True
      )
    }
    self.writer.write_episodes(
      writers.episode_record(
        episode,
        self.step_done,
        "train",
        self._decode,
        {t.index: by_turn[id(t)][0] for t in episode.turns if id(t) in by_turn},
        {t.index: by_turn[id(t)][1] for t in episode.turns if id(t) in by_turn},
      )
      for group in groups[: self.config.logging.transcript_groups]
      for episode in group.episodes
    )

  def _decode(self, policy: str, ids: np.ndarray) -> str:
    return self.backbones[policy].tokenizer.decode(ids, control=True)

  # -- evaluation --

  def evaluate(self, final: bool = False) -> evaluate.Evaluation:
    """On the held-out tasks, written as metrics of the step done."""
    began = time.monotonic()
    num = self.config.eval.num_tasks
    if final and num:
      num = self.config.eval.final_num_tasks or num
    result = evaluate.run(
      self.rollout, self.held_out[:num], self.config, self.keys["eval"]
    )
    if not num:  # no evaluations are asked for
      return result
    if result.scalars["wall_clock_faults/team"]:
      self.deterministic = False
    found = result.metrics()
    found["time/eval_s"] = time.monotonic() - began
    self.eval_s += found["time/eval_s"]
    self.writer.write_scalars(self.step_done, found)
    if self.step_done == 0:
      self.writer.flush()
    return result

  # -- save, restore, end --

  def save(self) -> None:
    self.totals |= self._used()
    self.checkpoints.save(
      checkpoint.Run(
        step=self.step_done,
        cursor=self.cursor,
        config=config_lib.to_dict(self.config),
        versions={n: b.updates for n, b in self.backbones.items()},
        extra={
          "before": self.before,
          "deterministic": self.deterministic,
          "totals": self.totals,
          "changes": self.changes,
          "folders": {n: b.digest for n, b in self.backbones.items()},
        },
        score=self.score,
      ),
      {n: self.backbones[n].state for n in self.config.trained},
    )

  def restore(self, allow_change: Sequence[str]) -> None:
    """The newest checkpoint of the workdir, or the checkpoint folders."""
    run = self.checkpoints.run()
    self._check_resume(run, allow_change)
    if run is None and self.mode == "eval":
      _say(f"no checkpoint in {self.workdir}: the policies as they come")
    for name, backbone in self.backbones.items():
      if run is None or name not in self.config.trained:
        with _blaming(f"policies.{name}.checkpoint"):
          backbone.load()
    if run is not None:
      states, run = self.checkpoints.restore(
        {n: self.backbones[n].abstract_state() for n in self.config.trained}
      )
      self._check_resume(run, allow_change)  # it may be an older one
      _say(f"goes on from step {run.step} of {self.workdir}")
      for name, state in states.items():
        self.backbones[name].state = state
        self.backbones[name].updates = run.versions[name]
      self.step_done, self.cursor = run.step, run.cursor
      self.score = run.score
      self.before = run.extra["before"]
      self.deterministic = run.extra["deterministic"]
      self.totals = run.extra["totals"]
    self._earlier = dict(self.totals)
    for backbone in self.backbones.values():
      backbone.resume()
    if self.mode == "train":
      try:
        self._open_writer(run)
      except OSError as e:
        raise config_lib.ConfigError(f"--workdir={self.workdir}: {e}") from e

  def _check_resume(
    self, run: checkpoint.Run | None, allow_change: Sequence[str]
  ) -> None:
    if run is None:
      return
    _check_folders(run, self.backbones)
    if self.mode != "train":
      return
    changes = checkpoint.compare_config(
      run.config, config_lib.to_dict(self.config), allow_change
    )
    if run.step > self.config.steps:
      raise config_lib.ConfigError(
        f"steps: {self.config.steps} is less than the {run.step} that are "
        f"done in {self.workdir}; raise it, or start a new --workdir"
      )
    self.changes = run.extra["changes"] + [
      {"step": run.step, "key": c.key, "old": c.old, "new": c.new}
      for c in changes
    ]

  def _open_writer(self, run: checkpoint.Run | None) -> None:
    self.writer = writers.RunWriter(
      self.workdir,
      self.config.steps,
      transcripts_mb=self.config.logging.transcripts_mb,
      resume_from=None if run is None else run.step,
      primary=jax.process_index() == 0,
    )
    self.writer.write_json("config.json", config_lib.to_dict(self.config))
    self.writer.write_json("changes.json", self.changes)
    if run is None:
      self.writer.write_hparams(
        config_lib.flatten(config_lib.to_dict(self.config))
      )

  def _used(self) -> dict[str, float]:
    """Seconds of the run so far, earlier processes of it included."""
    return {
      "seconds": self._earlier["seconds"] + time.monotonic() - self.start,
      "cpu_seconds": self._earlier["cpu_seconds"] + time.process_time(),
    }

  def _interrupted(self) -> int:
    self.writer.flush()
    self.save()
    self.close()
    _say(
      f"saved step {self.step_done} of {self.config.steps} in {self.workdir}; "
      "the same command goes on from there"
    )
    return self.stop.exit_code

  def _finish(self, after: dict[str, metrics.Interval]) -> None:
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
        "peak_memory_gb": _peak_memory_gb(),
        "deterministic": self.deterministic,
        "best_step": self.checkpoints.best(),
      },
    )
    self.writer.write_report()
    self.close()
    if self.writer.primary:
      if after:
        print(writers.table(self.before, after))
      print(f"{self.workdir}: summary.json, report.png, checkpoints/")

  def close(self) -> None:
    self.writer.close()
    self.rollout.close()
    self.checkpoints.close()


def evaluate_workdir(
  config: config_lib.Config, workdir: pathlib.Path
) -> evaluate.Evaluation:
  """The newest checkpoint of a workdir, or the policies as they come, on the
  held-out tasks; writes nothing."""
  stop = Stop()
  training = Training(
    config, _build(config), workdir, stop, time.monotonic(), "eval"
  )
  try:
    training.restore(())
    return training.evaluate(final=True)
  finally:
    training.close()
    stop.close()


def _report(training: Training) -> int:
  """`--mode=eval`: prints the evaluation, and writes it as eval.json."""
  try:
    result = training.evaluate(final=True)
  except Stopped:
    training.close()
    return training.stop.exit_code
  summary = {
    "step": training.step_done,
    "num_tasks": len(result.success),
    "result": result.summary(),
    "metrics": result.metrics(),
  }
  if jax.process_index() == 0:
    training.workdir.mkdir(parents=True, exist_ok=True)
    writers.write_json(training.workdir / "eval.json", summary)
    print(json.dumps(summary, indent=2))
  training.close()
  return 0


def _check_folders(
  run: checkpoint.Run, backbones: Mapping[str, Backbone]
) -> None:
  """The model's shape and the tokenizer never change on resume (rule 25)."""
  for name, digest in run.extra["folders"].items():
    if name in backbones and backbones[name].digest != digest:
      raise config_lib.ConfigError(
        f"policies.{name}.checkpoint: config.json or the tokenizer of "
        f"{str(backbones[name].folder)!r} is not what the run began with; put "
        "it back, or start a new --workdir"
      )


def _peak_memory_gb() -> float:
  """Of this process; ru_maxrss is in kB (bytes on macOS)."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak / (1 << 30 if sys.platform == "darwin" else 1 << 20)


def _sft(
  config: config_lib.Config,
  backbones: dict[str, Backbone],
  workdir: pathlib.Path,
) -> int:
  if jax.process_count() > 1:
    raise config_lib.ConfigError(
      f"--mode=sft: runs in one process, and there are {jax.process_count()}; "
      "start it without --coordinator_address"
    )
  if (workdir / "checkpoints").exists():
    raise config_lib.ConfigError(
      f"--workdir={workdir}: holds a training run; name another for --mode=sft"
    )
  writer = writers.RunWriter(workdir, config.sft.steps)

  def report(step: int, found: dict[str, float]) -> None:
    writer.write_scalars(step, found)
    writer.flush()

  sft.train(config, backbones, _source(config.data.source), workdir, report)
  writer.close()
  print(f"{workdir}/policies: {', '.join(config.trained)}")
  return 0
