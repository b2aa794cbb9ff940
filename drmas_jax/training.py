"""A run's state, and a step of it.

    data.tasks      [P] tasks, each host its share
    rollout         [P] groups of G episodes of turns
    rewards         [N] row scores
    advantages      [N]
    agree           sizes, denominators, signals: the same branch on all hosts
    backbone.update pack, train step; all dispatched before any is awaited
    backbone.resume train slice -> rollout slice
    metrics, alarms, episodes

State changes only in `Training.step`: what is done with it between steps is
the `coordinator`'s, or that of who plays a step again (`replay`).
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from drmas_jax import (
  advantages,
  building,
  checkpoint,
  evaluate,
  health,
  hosts,
  metrics,
  placement,
  resample,
  restoring,
  rewards,
  rollout,
  sampling,
  signals,
  spikes,
  transcripts,
  watching,
  writers,
)
from drmas_jax import config as config_lib
from drmas_jax.backbone import Backbone, Work, logprob_gaps, without_tokens
from drmas_jax.evaluate import Summary
from drmas_jax.resample import Played
from drmas_jax.types import Group, RunError, Stopped, Task, UserError

_FIRST = 5  # batches that a process plays before it wonders at no reward


class Laps:
  """Seconds of the parts of a step, one behind the other."""

  def __init__(self):
    self.began = self._last = time.monotonic()
    self.seconds: dict[str, float] = {}

  def end(self, part: str) -> None:
    now = time.monotonic()
    self.seconds[part] = now - self._last
    self._last = now


class Updated(NamedTuple):
  """What a step's updates came to.

  Attributes:
    outputs: by backbone, of each of its updates.
    skipped: {policy: why it was not updated}.
    norms: of the turns' score vectors before them, as metrics.
    gaps: [N] mean log-prob difference to the sampler.
  """

  outputs: dict[str, Any]
  skipped: dict[str, str]
  norms: dict[str, float]
  gaps: np.ndarray


class Training:
  """See the module's docstring.

  Args:
    config: of the run, checked.
    backbones: by name, without weights.
    workdir: of the run.
    stop: ends it.
    start: when it began, on the clock of `time.monotonic`.
  """

  def __init__(
    self,
    config: config_lib.Config,
    backbones: dict[str, Backbone],
    workdir: pathlib.Path,
    stop: signals.Stop,
    start: float,
  ):
    self.config, self.backbones, self.workdir = config, backbones, workdir
    self.homes = building.homes(backbones)
    self.stop = stop
    self.stream = building.stream(config)
    self.held_out, self.fingerprints = evaluate.held_out(config)
    for key, source in self.stream.sources.items():
      self.fingerprints[f"train/{key}"] = source.fingerprint
    self.rollout = building.team_rollout(config, backbones, stop)
    self.checkpoints = checkpoint.Checkpoints(workdir, config.checkpoint.keep)
    self.penalties = {n: a.invalid_penalty for n, a in config.agents.items()}
    self.overlong = rewards.overlong_costs(config.agents)
    self.keys = {
      p: sampling.root_key(config.seed, p) for p in ("train", "eval")
    }
    # What a checkpoint holds beside the policies.
    self.step_done = 0
    self.cursor = 0
    self.score: float | None = None  # held-out, of the step done
    self.before: Summary = {}
    self.averages = np.zeros((len(config.agent_names), 2))  # of advantages
    self.deterministic = True
    self.health = health.Monitor(config)
    self.totals = dict.fromkeys(
      ("seconds", "cpu_seconds", "tokens", "rollout_s"), 0.0
    )
    self.changes: list[dict[str, Any]] = []  # of the config, on resumes
    self.fork: checkpoint.Fork | None = None
    self.spikes = spikes.Spikes(workdir, config.logging, jax.process_index())
    # Of this process.
    self.start = start
    self.cpu_start = 0.0  # CPU seconds of the process before the run
    self.ended = time.monotonic()  # the last step, or what came before it
    self.first_step_s: float | None = None
    self.eval_s = 0.0
    self.rewarded: list[float] = []  # episodes with a reward, by batch
    self.broken = ""  # how the team's own code failed
    self.shapes: dict[str, set] = {n: set() for n in backbones}
    self._earlier = dict(self.totals)
    self.writer: Any = writers.Writer()  # of nothing, unless training
    self.watch = watching.watchdog(config, workdir)

  def step(self) -> None:
    """One step.

    Raises:
      Stopped: by a signal, on any host; the state is that before or after it.
    """
    laps, before = Laps(), self._counts()
    with self.watch.during("rollout", self.rollout.waiting):
      played = self._collect()
    laps.end("rollout")
    after = self._counts()
    rows = rewards.row_scores(played.groups, self.penalties, self.overlong)
    estimate, averages = self.estimate(
      self.config.advantage, played.groups, rows
    )
    work = self.work(rows, estimate.values, self._due())
    shares = self._agree(work, played)
    self._check_shares(shares)
    laps.end("score")
    updated = self._update(rows, estimate.values, work, shares)
    laps.end("update")
    found = self._of_rollout(played, rows, estimate)
    found |= self._of_samplers(before, after)
    found |= self._of_updates(updated)
    found |= metrics.sequence_ratios(rows, updated.gaps, self.config.agents)
    earlier = self._advance(played, averages)
    self._keep_spike(found, updated, played, earlier)
    unwell = self._record(found, played, laps)
    self._write_episodes(played, rows, estimate.values, updated.gaps)
    if max(s["stop"] for s in shares):
      raise Stopped
    if unwell:
      raise RunError(unwell)

  # -- tasks to episodes --

  def _collect(self) -> Played:
    return resample.collect(self.config, self.stream, self.cursor, self._play)

  def _play(self, tasks: Sequence[Task]) -> tuple[list[Group], bool]:
    """Groups of the tasks, or none if the step is given up."""
    size = self.config.data.group_size
    try:
      return self.rollout.collect(tasks, size, self.keys["train"]), False
    except Stopped:
      return [], True
    except UserError as e:
      self.broken = str(e)
      return [], True

  # -- rows to updates --

  def estimate(
    self,
    settings: config_lib.Advantage,
    groups: Sequence[Group],
    rows: rewards.Rows,
  ) -> tuple[advantages.Advantages, np.ndarray]:
    """Advantages, and what the estimator keeps for the next step."""

    def total(sums: np.ndarray) -> np.ndarray:
      shares = hosts.agree(
        "advantages",
        {"sums": sums.tolist()},
        self.config.placement.timeout_s,
      )
      return np.sum([s["sums"] for s in shares], axis=0)

    return advantages.of_rows(
      settings,
      rows,
      groups,
      num_agents=len(self.config.agent_names),
      averages=self.averages,
      total=total,
    )

  def _due(self) -> tuple[str, ...]:
    """The policies that this step updates."""
    return tuple(
      name
      for name in self.config.trained
      if self.step_done % self.config.policies[name].update_every
      == self.config.policies[name].update_phase
    )

  def work(
    self, rows: rewards.Rows, values: np.ndarray, due: Sequence[str]
  ) -> dict[str, Work]:
    """By backbone, what the step would train on."""
    return {
      name: backbone.work(rows, values, due)
      for name, backbone in self.backbones.items()
      if any(n in due for n in backbone.trained)
    }

  def _agree(self, work, played: Played) -> list[dict]:
    """One exchange between hosts; nothing else decides between branches."""
    episodes = [e for g in played.all for e in g.episodes]
    failed = [e for e in episodes if not rewards.ok(e)]
    mine = {
      "abandoned": int(played.stopped),
      "broken": self.broken,
      "stop": int(self.stop.signal > 0),
      "episodes": len(episodes),
      "failed": len(failed),
      "fault": next((e.fault.message for e in failed if e.fault), ""),
      "work": {name: w.numbers() for name, w in work.items()},
    }
    return hosts.agree("step", mine, self.config.placement.timeout_s)

  def _check_shares(self, shares: list[dict]) -> None:
    """Raises what ends the step, on all hosts alike."""
    if broken := [s["broken"] for s in shares if s["broken"]]:
      raise UserError(broken[0])
    if max(s["abandoned"] for s in shares):
      raise Stopped
    self._check_failures(shares)

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

  def _update(self, rows, values, work, shares) -> Updated:
    """Dispatches every backbone's updates, then every weight sync."""
    updates = {}
    every = self.config.logging.agent_norm_every
    with self.watch.during("update"), hosts.together("update"):
      for backbone in self.backbones.values():
        backbone.release()
      score_norms = self._score_norms(rows)
      for name in work:
        backbone = self.backbones[name]
        # In turns: every so many of its own.
        turn = self.step_done // backbone.policy.update_every
        shared = any(len(own) > 1 for own in backbone.agents.values())
        updates[name] = backbone.update(
          rows,
          values,
          work[name],
          [s["work"][name] for s in shares],
          reference=self.homes.get(backbone.policy.loss.reference),
          agent_norms=shared and every > 0 and turn % every == 0,
        )
      for backbone in self.backbones.values():
        backbone.resume()
      gaps = logprob_gaps(updates, len(rows.turns))
      updates = placement.fetch(
        {name: without_tokens(done) for name, done in updates.items()}
      )
    skipped = self._skipped(updates, shares)
    return Updated(updates, skipped, score_norms, gaps)

  def _skipped(self, updates, shares: list[dict]) -> dict[str, str]:
    """Why policies were not updated; a lost update does not count."""
    skipped = {}
    for name, done in updates.items():
      backbone = self.backbones[name]
      tokens = np.sum([s["work"][name]["tokens"] for s in shares], axis=0)
      for k, policy in enumerate(backbone.names[: backbone.num_policies]):
        lost = sum(bool(u.live[k]) and not u.output.finite[k] for u in done)
        if lost:
          skipped[policy] = "non_finite"
          backbone.count_updates(policy, -lost)
        elif not any(u.live[k] for u in done):
          skipped[policy] = "no_signal" if tokens[k] else "no_rows"
    return skipped

  def _score_norms(self, rows: rewards.Rows) -> dict[str, float]:
    every, found = self.config.logging.score_norm_every, {}
    if not every or self.step_done % every:
      return found
    for backbone in self.backbones.values():
      if not backbone.trained:
        continue
      shares = hosts.agree(
        "score_norms",
        backbone.extent(rows),
        self.config.placement.timeout_s,
      )
      squares = backbone.score_norms(rows, shares)
      for name in backbone.trained:
        for agent, i in backbone.agents[name].items():
          said = metrics.score_norms(rows, squares, i)
          found |= {f"{what}/{agent}": value for what, value in said.items()}
    return found

  def _advance(self, played: Played, averages: np.ndarray) -> np.ndarray:
    """The step is done; returns the estimator's averages before it."""
    earlier, self.averages = self.averages, averages
    self.score = None
    self.step_done += 1
    self.cursor = played.cursor
    return earlier

  def _keep_spike(
    self,
    found: Mapping[str, float],
    updated: Updated,
    played: Played,
    averages: np.ndarray,
  ) -> None:
    """Keeps the batch, if the step is a spike for one of the policies; all
    hosts know the same norms."""
    names = [n for n, why in updated.skipped.items() if why == "non_finite"]
    names += self.health.spikes(found)
    if not names:
      return
    before = self.checkpoints.steps()
    spike = spikes.Spike(
      step=self.step_done,
      policies=sorted(names),
      norms={
        n: found[f"grad_norm/{n}"]
        for n in self.config.trained
        if f"grad_norm/{n}" in found
      },
      checkpoint=before[-1] if before else None,
      cursor=self.cursor,
      averages=averages.tolist(),
    )
    self.spikes.save(spike, played.groups)
    self.checkpoints.held = self.spikes.checkpoints

  # -- what is told of a step --

  def _of_rollout(
    self, played: Played, rows: rewards.Rows, estimate: advantages.Advantages
  ) -> dict[str, float]:
    """Metrics of a rollout. Rewards and faults are of all that was played, so
    that they do not depend on what is replaced; turns of what is trained on."""
    mixed = self.stream.sources if len(self.stream.sources) > 1 else ()
    names = self.config.agent_names
    members = self.rollout.team.members.items()
    found = metrics.rollout(
      played.all,
      rows,
      names,
      tuple(mixed),
      {name: member.role.verdicts for name, member in members},
    )
    found |= metrics.overlong(rows, self.overlong)
    if self.config.data.resample:
      found["resample_rounds/team"] = float(played.rounds)
      found["resample_dropped/team"] = float(len(played.replaced))
    return found | metrics.baselines(
      estimate.num_singleton, estimate.num_zero_variance, names
    )

  def _counts(self) -> dict[str, Any]:
    """What the samplers have counted so far."""
    return {
      name: dataclasses.replace(backbone.sampler.counts)
      for name, backbone in self.backbones.items()
      if backbone.engines
    }

  def _of_samplers(
    self, before: Mapping[str, Any], after: Mapping[str, Any]
  ) -> dict[str, float]:
    """Metrics of what the samplers have counted meanwhile."""
    found = {}
    for name, counts in before.items():
      found |= metrics.sampling(counts, after[name], name)
    return found

  def _of_updates(self, updated: Updated) -> dict[str, float]:
    """Metrics of the step's updates, before it counts as done."""
    found = dict(updated.norms)
    for name in self._due():
      for reason in ("no_rows", "no_signal", "non_finite"):
        skipped = updated.skipped.get(name) == reason
        found[f"skipped/{reason}/{name}"] = float(skipped)
    for name, outputs in updated.outputs.items():
      found |= metrics.update(outputs, self.backbones[name].agents)
    return found

  def _of_machine(self, laps: Laps, tokens: int) -> dict[str, float]:
    """Seconds and bytes; what comes from here on is between two steps."""
    outside, self.ended = laps.began - self.ended, time.monotonic()
    return {
      **{f"time/{part}_s": s for part, s in laps.seconds.items()},
      "time/step_s": self.ended - laps.began,
      "time/outside_s": outside,
      "rollout/tokens": float(tokens),
      "rollout/tokens_per_s": tokens / laps.seconds["rollout"],
      **{f"memory/{of}_bytes": float(n) for of, n in placement.peaks().items()},
    }

  def _record(self, found: dict[str, float], played: Played, laps: Laps) -> str:
    """Merges the hosts' metrics, and writes them; says why an alarm ends the
    run, if one does."""
    self._say_shapes()
    found |= self._of_machine(laps, rollout.count_tokens(played.all))
    found = metrics.merge(
      hosts.agree("metrics", found, self.config.placement.timeout_s)
    )
    if found["wall_clock_faults/team"]:
      self.deterministic = False
    self.rewarded.append(found["episodes_rewarded/team"])
    if len(self.rewarded) == _FIRST and not any(self.rewarded):
      hosts.say(health.no_reward(self.config, found, _FIRST))
    self.totals["tokens"] += found["rollout/tokens"]
    self.totals["rollout_s"] += laps.seconds["rollout"]
    if self.first_step_s is None:
      self.first_step_s = time.monotonic() - self.start - self.eval_s
    return watching.tell(self.health, self.writer, self.step_done, found)

  def _say_shapes(self) -> None:
    """What the engines have had to compile since the step before."""
    for name, backbone in self.backbones.items():
      new = backbone.sampler.engine.shapes - self.shapes[name]
      self.shapes[name] |= new
      if new:
        lines = [f"\n  {program:<9} {sizes}" for program, sizes in sorted(new)]
        hosts.say(f"{name}'s engine has compiled" + "".join(lines))

  def _write_episodes(self, played: Played, rows, values, gaps) -> None:
    numbers = transcripts.rows_of(
      rows.turns, score=rows.scores, advantage=values, logprob_gap=gaps
    )
    self.writer.write_episodes(
      transcripts.record(
        episode, self.step_done, "train", self.rollout.decode, numbers
      )
      for group in played.all
      for episode in group.episodes
    )

  # -- from a checkpoint --

  def load(
    self,
    source: checkpoint.Checkpoints,
    check: Callable[[checkpoint.Run | None], None],
    step: int | None = None,
  ) -> checkpoint.Run | None:
    """Takes weights and state from a checkpoint; returns its record.

    Args:
      source: of this run or of another.
      check: refuses a record.
      step: of the checkpoint; None: the newest that can be read, or the
        checkpoint folders where there is none; 0: these.
    """
    run = None if step == 0 else source.run(step)
    restoring.check_alike(run, self.workdir)
    check(run)
    for backbone in self.backbones.values():
      if run is None or not backbone.trained:
        with config_lib.blaming(f"policies.{backbone.names[0]}.checkpoint"):
          backbone.load()
    if run is not None:
      trained = [b for b in self.backbones.values() if b.trained]
      states, run = source.restore(
        {n: s for b in trained for n, s in b.abstract_states().items()}, step
      )
      restoring.check_alike(run, self.workdir)  # it may be an older one
      check(run)
      hosts.say(f"goes on from step {run.step} of {source.workdir}")
      for backbone in trained:
        backbone.put(states)
      self._take(run)
    self._earlier = dict(self.totals)
    for backbone in self.backbones.values():
      backbone.resume()
    return run

  def _take(self, run: checkpoint.Run) -> None:
    """What a checkpoint holds beside the policies."""
    for name, backbone in self.homes.items():
      backbone.updates[name] = run.versions[name]
    self.step_done, self.cursor = run.step, run.cursor
    self.score = run.score
    self.before = run.extra["before"]
    if "averages" in run.extra:  # not in those of versions without `rae`
      self.averages = np.array(run.extra["averages"])
    self.deterministic = run.extra["deterministic"]
    self.totals = run.extra["totals"]
    if "health" in run.extra:  # likewise
      self.health.restore(run.extra["health"])
      self._compare(run.score)  # it may have come after the save

  def _compare(self, score: float | None) -> None:
    """Tells of the held-out score of the step done, where a longer run would
    have it too."""
    every, num = self.config.eval.every, self.config.eval.num_tasks
    at = self.step_done == 0 or (every > 0 and self.step_done % every == 0)
    if at and score is not None:
      num = sum(min(num, len(tasks)) for tasks in self.held_out.values())
      self.health.evaluated(self.step_done, score, num)

  def close(self) -> None:
    self.writer.close()
    self.rollout.close()
    self.checkpoints.close()

  def about(self) -> dict[str, Any]:
    about = building.about(self.config, self.fingerprints)
    models = {name: b.learner.model for name, b in self.homes.items()}
    planned = placement.plan(self.config, models).memory
    about["devices"]["planned_bytes"] = planned
    if self.fork is not None:
      about["fork"] = self.fork._asdict()
    return about
