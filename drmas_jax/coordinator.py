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
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from drmas_jax import (
  advantages,
  checkpoint,
  data,
  evaluate,
  health,
  hosts,
  manifest,
  metrics,
  placement,
  records,
  remote,
  report,
  rewards,
  rollout,
  sampling,
  sft,
  spikes,
  transcripts,
  usercode,
  watchdog,
  writers,
)
from drmas_jax import config as config_lib
from drmas_jax.backbone import (
  Backbone,
  Work,
  checkpoint_folder,
  checkpoint_sizes,
  logprob_gaps,
  pinned,
  without_tokens,
)
from drmas_jax.evaluate import Evaluation, Summary
from drmas_jax.models import weights
from drmas_jax.rollout import Stopped
from drmas_jax.types import Group, RunError, Task, UserError

_GRACE_S = 30.0  # a step may go on for this long after SIGTERM
_FIRST = 5  # batches that a process plays before it wonders at no reward


class Stop:
  """SIGINT and SIGTERM as a wish; a second one ends the process at once.

  Args:
    grace_s: what is under way may go on for so long; none: as a step may.
    says: what becomes of it.
  """

  def __init__(
    self,
    grace_s: float | None = None,
    says: str = "the step is finished (or given up after {grace_s:.0f} s), "
    "then the run is saved",
  ):
    self._grace_s = _GRACE_S if grace_s is None else grace_s
    self._says = says.format(grace_s=self._grace_s)
    self.signal = 0
    self._since = 0.0
    # Python hears of signals in its main thread alone.
    main = threading.current_thread() is threading.main_thread()
    heard = (signal.SIGINT, signal.SIGTERM) if main else ()
    self._before = {s: signal.signal(s, self._wish) for s in heard}

  def _wish(self, number: int, frame: Any) -> None:
    if self.signal:
      signal.signal(number, signal.SIG_DFL)
      signal.raise_signal(number)
    self.signal, self._since = number, time.monotonic()
    # Not print: the signal may have come in the middle of one.
    os.write(
      2,
      f"drmas_jax: {signal.Signals(number).name}: {self._says}; once more to "
      "end at once\n".encode(),
    )

  def check(self) -> None:
    """Called within a step."""
    if self.signal and time.monotonic() - self._since > self._grace_s:
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
  step: str = "",
  fresh: bool = False,
  fork: str = "",
  processes: tuple[str | None, int | None, int | None] = (None, None, None),
  start: float | None = None,
) -> int:
  """Runs a mode; returns the exit code.

  Args:
    config: checked.
    workdir: of the run; one that holds a checkpoint is resumed.
    mode: "train", "eval" or "sft".
    allow_change: keys that may differ from the checkpoint's config.
    step: the checkpoint that "eval" is of, or "best"; "": the newest.
    fresh: "eval" forgets what it has played before.
    fork: "train" in a new workdir begins with the checkpoint WORKDIR[@STEP].
    processes: coordinator address, number, id; see `hosts.initialize`.
    start: of the process, on the clock of `time.monotonic`; None: it is not
      of this run alone, which starts now.
  """
  cpu_start = time.process_time() if start is None else 0.0
  start = time.monotonic() if start is None else start
  hosts.initialize(*processes, timeout_s=config.placement.timeout_s)
  config = _pinned(config)
  if mode == "eval":
    return _evaluate(config, workdir, step, fresh)
  backbones = _build(config)
  if mode == "sft":
    return _sft(config, backbones, workdir)
  stop = Stop()
  try:
    training = Training(config, backbones, workdir, stop, start)
    training.cpu_start = cpu_start
    training.restore(allow_change, fork)
    with training.watch:
      return training.run()
  finally:
    stop.close()


def prepare(
  config: config_lib.Config,
  processes: tuple[str | None, int | None, int | None] = (None, None, None),
  train: bool = True,
) -> tuple[config_lib.Config, dict[str, Backbone]]:
  """The config with the names of checkpoints fixed, and its backbones without
  weights.

  Args:
    config: checked.
    processes: see `main`.
    train: whether anything will be trained.
  """
  hosts.initialize(*processes, timeout_s=config.placement.timeout_s)
  config = _pinned(config)
  return config, _build(config, train)


def _pinned(config: config_lib.Config) -> config_lib.Config:
  """With the step in the name of each policy that is from another run, which
  may go on: all hosts mean the same one, and so does this run on a resume."""
  names = {}
  for name, policy in sorted(config.policies.items()):
    with _blaming(f"policies.{name}.checkpoint={policy.checkpoint!r}"):
      names[name] = policy.checkpoint and pinned(policy.checkpoint)
  names = hosts.agree("checkpoints", names)[0]
  policies = {
    name: dataclasses.replace(policy, checkpoint=names[name])
    for name, policy in config.policies.items()
  }
  config = dataclasses.replace(config, policies=policies)
  if faults := config_lib.check_backbones(config):  # names may be one only now
    raise config_lib.ConfigError("\n".join(faults))
  return config


def _build(
  config: config_lib.Config, train: bool = True
) -> dict[str, Backbone]:
  """Plans the devices and builds every backbone, without weights.

  Nothing large is fetched for a plan that does not fit.
  """
  names = {
    n: p.checkpoint
    for n, p in sorted(config.policies.items())
    if p.remote is None
  }
  folders, models, backbones = {}, {}, {}
  if not names:
    return backbones
  for name, path in names.items():
    with _blaming(f"policies.{name}.checkpoint={path!r}"):
      models[name] = checkpoint_sizes(path)
  plan = placement.plan(config, models, train=train)
  _say(
    f"{placement.describe(plan)}; {', '.join(names)} from "
    f"{', '.join(names.values())}"
  )
  for name, path in names.items():
    with _blaming(f"policies.{name}.checkpoint={path!r}"):
      folders[name] = checkpoint_folder(path)
      models[name] = weights.read_config(folders[name])
  plan = placement.plan(config, models, train=train)  # what is there decides
  for name, policies in config.backbones.items():
    first = policies[0]
    if not train and not any(map(config.is_sampled, policies)):
      continue  # it is there for a loss
    with _blaming(f"policies.{first}.checkpoint={names[first]!r}"):
      backbones[name] = Backbone(
        policies,
        config,
        plan.slices[name],
        models[first],
        folders[first],
        train,
      )
    stops = backbones[name].tokenizer.stop_ids
    _say(f"{name}'s completions end at the ids {', '.join(map(str, stops))}")
  if train:
    _check_references(config, backbones)
  return backbones


def _homes(backbones: Mapping[str, Backbone]) -> dict[str, Backbone]:
  """By policy."""
  return {name: b for b in backbones.values() for name in b.names}


def _check_references(
  config: config_lib.Config, backbones: Mapping[str, Backbone]
) -> None:
  """Log-probs of the same tokens are compared."""
  homes = _homes(backbones)
  for name in config.trained:
    other = config.policies[name].loss.reference
    if not other or homes[other] is homes[name]:
      continue
    key = f"policies.{name}.loss.reference: {other!r}"
    ids = [homes[n].tokenizer.vocabulary() for n in (name, other)]
    if ids[0] != ids[1]:
      raise config_lib.ConfigError(
        f"{key} has another tokenizer; allowed is a policy with the same "
        "vocabulary; name another"
      )
    room = homes[other].learner.model.max_positions
    longest = homes[name].row_buckets[-1]
    if longest > room:
      raise config_lib.ConfigError(
        f"{key} has {room} positions, and {name!r} has rows of {longest} "
        "tokens; allowed are at most as many; lower row_buckets and "
        "engine.max_length, or name another"
      )


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


def make_source(where: str, key: str, source: config_lib.Source) -> Any:
  """A data set.

  Args:
    where: its entry in the config.
    key: of that entry.
    source: the entry.

  Raises:
    ConfigError: it is not there, or its options are wrong.
    UserError: its own code failed.
  """
  source = config_lib.named(key, source)
  module = config_lib.load_module("datasets", source.name)
  doing = f"making the {source.split!r} split of {where}"
  with (
    _blaming(where),
    usercode.blaming(doing, code=module.make, passes=(ValueError,)),
  ):
    made = module.make(source.split, **source.options)
    len(made), made.fingerprint, made.__getitem__  # what is asked of it
    return made


def stream(config: config_lib.Config) -> data.Stream:
  """The training tasks."""
  sources = config.data.sources
  made = {k: make_source(f"data.sources.{k}", k, s) for k, s in sources.items()}
  with _blaming("data.sources"):
    return data.Stream(
      made,
      config.seed,
      {key: source.weight for key, source in sources.items()},
    )


def _held_out(
  config: config_lib.Config,
) -> tuple[dict[str, list[Task]], dict[str, str]]:
  """The first tasks of each held-out set, no more than are ever played; and
  the sets' fingerprints. None where there are no evaluations."""
  most = max(evaluate.extent(config.eval, final)[0] for final in (False, True))
  tasks, fingerprints = {}, {}
  for key, source in config.held_out.items() if most else ():
    where = f"eval.sources.{key}"
    if not config.eval.sources:
      where = f"eval.sources: empty, so data.sources.{key} gives its test split"
    made = make_source(where, key, source)
    with _blaming(where):
      tasks[key] = data.held_out(key, made, most)
    fingerprints[f"eval/{key}"] = made.fingerprint
  return tasks, fingerprints


def _rollout(
  config: config_lib.Config, backbones: Mapping[str, Backbone], stop: Stop
) -> rollout.Rollout:
  with _blaming("environment.options"):
    team = rollout.Team(config)
  return rollout.Rollout(
    team,
    {n: s for b in backbones.values() for n, s in b.samplers.items()},
    config,
    heartbeat=stop.check,
    remotes=remote.connect(config),
  )


def _manifest(
  config: config_lib.Config, fingerprints: Mapping[str, str]
) -> dict[str, Any]:
  """What this process is made of; for the workdir and for results."""
  device = jax.devices()[0]
  return manifest.collect(
    config,
    data=fingerprints,
    devices={
      "platform": device.platform,
      "kind": device.device_kind,
      "count": jax.device_count(),
      "processes": jax.process_count(),
    },
  )


class Played(NamedTuple):
  """What a step's rollout came to, on this host.

  Attributes:
    groups: that are trained on, in the order of the stream.
    replaced: by some of these, since their rewards tell nothing apart.
    rounds: in which such groups were replaced, on any host.
    cursor: of the stream, behind the tasks of all hosts.
    stopped: the step is given up.
  """

  groups: list[Group]
  replaced: list[Group]
  rounds: int
  cursor: int
  stopped: bool

  @property
  def all(self) -> list[Group]:
    return self.groups + self.replaced


class Training:
  """A run: its state, and what it does with it."""

  def __init__(
    self,
    config: config_lib.Config,
    backbones: dict[str, Backbone],
    workdir: pathlib.Path,
    stop: Stop,
    start: float,
  ):
    self.config, self.backbones, self.workdir = config, backbones, workdir
    self.homes = _homes(backbones)
    self.stop = stop
    self.stream = stream(config)
    self.held_out, self.fingerprints = _held_out(config)
    for key, source in self.stream.sources.items():
      self.fingerprints[f"train/{key}"] = source.fingerprint
    self.rollout = _rollout(config, backbones, stop)
    self.checkpoints = checkpoint.Checkpoints(workdir, config.checkpoint.keep)
    self.penalties = {n: a.invalid_penalty for n, a in config.agents.items()}
    self.overlong = {
      n: rewards.Overlong(a.max_tokens, a.overlong_tokens, a.overlong_penalty)
      for n, a in config.agents.items()
      if a.overlong_tokens
    }
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
    self.watch = watchdog.Watchdog(
      workdir / "stacks" if jax.process_index() == 0 else None,
      factor=config.health.slow_factor,
      floor_s=config.health.slow_floor_s,
      say=lambda text: print(f"drmas_jax: {text}", file=sys.stderr, flush=True),
    )

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

  def step(self) -> None:
    """One step.

    Raises:
      Stopped: by a signal, on any host; the state is that before or after it.
    """
    began, before = time.monotonic(), self._counts()
    with self.watch.during("rollout", self.rollout.waiting):
      collected = self._collect()
    played, after = time.monotonic(), self._counts()
    groups = collected.groups
    rows = rewards.row_scores(groups, self.penalties, self.overlong)
    estimate, averages = self.estimate(self.config.advantage, groups, rows)
    due = self._due()
    work = self.work(rows, estimate.values, due)
    shares = self._agree(work, collected)
    if broken := [s["broken"] for s in shares if s["broken"]]:
      raise UserError(broken[0])
    if max(s["abandoned"] for s in shares):
      raise Stopped
    self._check_failures(shares)
    scored = time.monotonic()
    updates, skipped, norms, gaps = self._update(
      rows, estimate.values, work, shares
    )
    updated = time.monotonic()
    earlier, self.averages = self.averages, averages
    self.score = None
    self.step_done += 1
    self.cursor = collected.cursor
    found = self._of_rollout(collected, rows)
    found |= metrics.baselines(
      estimate.num_singleton,
      estimate.num_zero_variance,
      self.config.agent_names,
    )
    for name, counts in before.items():
      found |= metrics.sampling(counts, after[name], name)
    for name in due:
      for reason in ("no_rows", "no_signal", "non_finite"):
        found[f"skipped/{reason}/{name}"] = float(skipped.get(name) == reason)
    for name, done in updates.items():
      found |= metrics.update(done, self.backbones[name].agents)
    found |= norms
    tokens = rollout.count_tokens(collected.all)
    self._say_shapes()
    found |= {
      f"memory/{of}_bytes": float(num) for of, num in placement.peaks().items()
    }
    found |= {
      "time/outside_s": began - self.ended,
      "time/step_s": time.monotonic() - began,
      "time/rollout_s": played - began,
      "time/score_s": scored - played,
      "time/update_s": updated - scored,
      "rollout/tokens_per_s": tokens / (played - began),
    }
    self._keep_spike(found, skipped, collected, earlier)
    self.ended = time.monotonic()
    unwell = self._record(found, tokens, played - began)
    self._write_episodes(groups, rows, estimate.values, gaps)
    if max(s["stop"] for s in shares):
      raise Stopped
    if unwell:
      raise RunError(unwell)

  def _keep_spike(
    self,
    found: Mapping[str, float],
    skipped: Mapping[str, str],
    collected: Played,
    averages: np.ndarray,
  ) -> None:
    """Keeps the batch, if the step is a spike for one of the policies; all
    hosts know the same norms."""
    names = [n for n, why in skipped.items() if why == "non_finite"]
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
    self.spikes.save(spike, collected.groups)
    self.checkpoints.held = self.spikes.checkpoints

  def _of_rollout(
    self, collected: Played, rows: rewards.Rows
  ) -> dict[str, float]:
    """Metrics of a rollout. Rewards and faults are of all that was played, so
    that they do not depend on what is replaced; turns of what is trained on."""
    mixed = self.stream.sources if len(self.stream.sources) > 1 else ()
    names = self.config.agent_names
    members = self.rollout.team.members.items()
    found = metrics.rollout(
      collected.all,
      rows,
      names,
      tuple(mixed),
      {name: member.role.verdicts for name, member in members},
    )
    found |= metrics.overlong(rows, self.overlong)
    if self.config.data.resample:
      found["resample_rounds/team"] = float(collected.rounds)
      found["resample_dropped/team"] = float(len(collected.replaced))
    return found

  def _say_shapes(self) -> None:
    """What the engines have had to compile since the step before."""
    for name, backbone in self.backbones.items():
      new = backbone.sampler.engine.shapes - self.shapes[name]
      self.shapes[name] |= new
      if new:
        lines = [f"\n  {program:<9} {sizes}" for program, sizes in sorted(new)]
        _say(f"{name}'s engine has compiled" + "".join(lines))

  def _counts(self) -> dict[str, Any]:
    """What the samplers have counted so far."""
    return {
      name: dataclasses.replace(backbone.sampler.counts)
      for name, backbone in self.backbones.items()
      if backbone.engines
    }

  def _collect(self) -> Played:
    """Plays this host's tasks and, if so configured, fresh ones in the place of
    those whose rewards tell nothing apart.

    In a further round every host plays as many as it lacks, each the tasks
    behind those of the hosts before it, so that the cursor is the same on all.
    What is lacking after the last round is made up for with the first others.
    """
    settings = self.config.data
    cursor = self.cursor + settings.num_tasks
    tasks = hosts.share(self.stream.tasks(self.cursor, settings.num_tasks))
    wanted, rounds = len(tasks), 0
    telling: list[Group] = []
    flat: list[Group] = []
    while True:
      groups, stopped = self._play(tasks)
      for group in groups:
        tells = rewards.is_mixed(group, self.config.advantage.zero_tolerance)
        (telling if tells else flat).append(group)
      if rounds == settings.resample:
        break
      missing = self._missing(wanted - len(telling), stopped)
      if not any(missing):
        break
      first = cursor + sum(missing[: jax.process_index()])
      tasks = self.stream.tasks(first, missing[jax.process_index()])
      cursor += sum(missing)
      rounds += 1
    lacking = wanted - len(telling)
    groups = sorted(telling + flat[:lacking], key=lambda g: g.task.position)
    return Played(groups, flat[lacking:], rounds, cursor, stopped)

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

  def _missing(self, mine: int, stopped: bool) -> list[int]:
    """How many groups each host plays again; none if one has given up."""
    shares = hosts.agree(
      "resample",
      {"missing": mine, "stopped": int(stopped)},
      self.config.placement.timeout_s,
    )
    if any(s["stopped"] for s in shares):
      return []
    return [s["missing"] for s in shares]

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

  def _agree(self, work, collected: Played) -> list[dict]:
    """One exchange between hosts; nothing else decides between branches."""
    episodes = [e for g in collected.all for e in g.episodes]
    failed = [e for e in episodes if not rewards.ok(e)]
    mine = {
      "abandoned": int(collected.stopped),
      "broken": self.broken,
      "stop": int(self.stop.signal > 0),
      "episodes": len(episodes),
      "failed": len(failed),
      "fault": next((e.fault.message for e in failed if e.fault), ""),
      "work": {name: w.numbers() for name, w in work.items()},
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

  def work(
    self, rows: rewards.Rows, values: np.ndarray, due: Sequence[str]
  ) -> dict[str, Work]:
    """By backbone, what the step would train on."""
    return {
      name: backbone.work(rows, values, due)
      for name, backbone in self.backbones.items()
      if any(n in due for n in backbone.trained)
    }

  def _due(self) -> tuple[str, ...]:
    """The policies that this step updates."""
    return tuple(
      name
      for name in self.config.trained
      if self.step_done % self.config.policies[name].update_every
      == self.config.policies[name].update_phase
    )

  def _update(self, rows, values, work, shares):
    """Dispatches every backbone's updates, then every weight sync; the updates
    by backbone, why policies were not updated, norms of the turns' score
    vectors before that, as metrics, and [N] gaps to the sampler."""
    updates, skipped = {}, {}
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
    return updates, skipped, score_norms, gaps

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

  def _record(self, found: dict, tokens: int, rollout_s: float) -> str:
    """Merges the hosts' metrics, and writes them; says why an alarm ends the
    run, if one does."""
    found["rollout/tokens"] = float(tokens)
    found = metrics.merge(
      hosts.agree("metrics", found, self.config.placement.timeout_s)
    )
    if found["wall_clock_faults/team"]:
      self.deterministic = False
    self.rewarded.append(found["episodes_rewarded/team"])
    if len(self.rewarded) == _FIRST and not any(self.rewarded):
      _say(_no_reward(self.config, found))
    self.totals["tokens"] += found["rollout/tokens"]
    self.totals["rollout_s"] += rollout_s
    if self.first_step_s is None:
      self.first_step_s = time.monotonic() - self.start - self.eval_s
    seen = self.health.see(self.step_done, found)
    for alarm in seen.begun:
      _say(f"ALARM at step {self.step_done}: {alarm.name}: {alarm.text}")
    if self.writer.primary and seen.begun:
      health.write(self._alarms, self.step_done, seen.begun)
    self.writer.write_scalars(self.step_done, found | seen.metrics)
    return seen.stop

  @property
  def _alarms(self) -> pathlib.Path:
    return self.workdir / "alarms.jsonl"

  def _write_episodes(self, groups: list[Group], rows, values, gaps) -> None:
    names = ("score", "advantage", "logprob_gap")
    by_turn = {
      id(turn): {
        name: None if np.isnan(number) else float(number)
        for name, number in zip(names, numbers, strict=True)
      }
      for turn, *numbers in zip(
        rows.turns, rows.scores, values, gaps, strict=True
      )
    }
    self.writer.write_episodes(
      transcripts.record(
        episode,
        self.step_done,
        "train",
        self.rollout.decode,
        {t.index: by_turn[id(t)] for t in episode.turns if id(t) in by_turn},
      )
      for group in groups[: self.config.logging.transcript_groups]
      for episode in group.episodes
    )

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

  def _compare(self, score: float | None) -> None:
    """Tells of the held-out score of the step done, where a longer run would
    have it too."""
    every, num = self.config.eval.every, self.config.eval.num_tasks
    at = self.step_done == 0 or (every > 0 and self.step_done % every == 0)
    if at and score is not None:
      num = sum(min(num, len(tasks)) for tasks in self.held_out.values())
      self.health.evaluated(self.step_done, score, num)

  # -- save, restore, end --

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
    self.fork = self._find_fork(fork)
    begins = self.fork is not None and not self.checkpoints.steps()

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
    self._check_alike(run)
    check(run)
    for backbone in self.backbones.values():
      if run is None or not backbone.trained:
        with _blaming(f"policies.{backbone.names[0]}.checkpoint"):
          backbone.load()
    if run is not None:
      trained = [b for b in self.backbones.values() if b.trained]
      states, run = source.restore(
        {n: s for b in trained for n, s in b.abstract_states().items()}, step
      )
      self._check_alike(run)  # it may be an older one
      check(run)
      _say(f"goes on from step {run.step} of {source.workdir}")
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

  def _check_alike(self, run: checkpoint.Run | None) -> None:
    """A host that cannot read what the others can would train other weights."""
    mine = {"step": run and run.step}
    steps = [s["step"] for s in hosts.agree("resume", mine)]
    if any(step != steps[0] for step in steps):
      raise config_lib.ConfigError(
        f"--workdir={self.workdir}: the newest checkpoint that can be read is, "
        f"by host, that of step {', '.join(map(str, steps))}; all must see the "
        "same folder (NFS, a mounted bucket), and read the same one: move a "
        "broken one away on all of them"
      )

  def _check_resume(
    self,
    run: checkpoint.Run | None,
    allow_change: Sequence[str],
    fork: bool,
  ) -> None:
    if run is None:
      return
    check_folders(run, self.backbones)
    changes = checkpoint.compare_config(
      run.config, config_lib.to_dict(self.config), allow_change, fork
    )
    self._check_rows(allow_change)
    if run.step > self.config.steps:
      raise config_lib.ConfigError(
        f"steps: {self.config.steps} is less than the {run.step} that are "
        f"done in {self.fork.workdir if fork else self.workdir}; raise it, or "
        "start a new --workdir"
      )
    self.changes = run.extra["changes"] + [
      {"step": run.step, "key": c.key, "old": c.old, "new": c.new}
      for c in changes
    ]

  def _check_rows(self, allow_change: Sequence[str]) -> None:
    """The rows of a training set change as its options do: with leave."""
    before = (manifest.read(self.workdir) or {}).get("data", {})
    for source in self.stream.sources:
      old, new = (x.get(f"train/{source}") for x in (before, self.fingerprints))
      key = f"data.sources.{source}"
      allowed = any(
        f"{key}.".startswith(f"{a}.") or f"{a}.".startswith(f"{key}.")
        for a in allow_change
      )
      if old not in (None, new) and not allowed:
        raise config_lib.ConfigError(
          f"{key}: its rows are not those that the run was trained on "
          f"(fingerprint {new}, was {old}); bring those back, or pass "
          f"--allow_change={key}"
        )

  def _open_writer(self, run: checkpoint.Run | None) -> None:
    self.writer = writers.RunWriter(
      self.workdir,
      self.config.steps,
      names=self.config.logging.writers,
      config=self.config,
      transcripts_mb=self.config.logging.transcripts_mb,
      resume_from=None if run is None else run.step,
      primary=jax.process_index() == 0,
      extra=(report.Live(self.workdir),),
    )
    self.writer.write_json("config.json", config_lib.to_dict(self.config))
    self.writer.write_json("changes.json", self.changes)
    if self.writer.primary:
      records.cut_after(self.workdir, self.step_done)
      writers.truncate_after(self._alarms, self.step_done)
      manifest.record(self.workdir, self._manifest(), self.step_done)
    if run is None:
      self.writer.write_hparams(
        config_lib.flatten(config_lib.to_dict(self.config))
      )

  def _manifest(self) -> dict[str, Any]:
    about = _manifest(self.config, self.fingerprints)
    models = {name: b.learner.model for name, b in self.homes.items()}
    planned = placement.plan(self.config, models).memory
    about["devices"]["planned_bytes"] = planned
    if self.fork is not None:
      about["fork"] = self.fork._asdict()
    return about

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
        folder, result, self.config, self.step_done, origins, self._manifest()
      )

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
    _say(
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

  def close(self) -> None:
    self.writer.close()
    self.rollout.close()
    self.checkpoints.close()


def _evaluate(
  config: config_lib.Config, workdir: pathlib.Path, step: str, fresh: bool
) -> int:
  """`--mode=eval`: a checkpoint of the workdir, or the policies as they come
  where it has none, on the held-out sets; leaves <workdir>/eval/step_<N>."""
  tasks, fingerprints = _held_out(config)
  backbones = _build(config, train=False)
  stop = Stop(0.0, "the evaluation ends here, and what it has played is kept")
  player = _rollout(config, backbones, stop)
  try:
    done, origins = _restore_params(config, backbones, workdir, step)
    about = _manifest(config, fingerprints)
    num, k = evaluate.extent(config.eval, final=True)
    grouped = k if player.team.scores_groups else 0
    known = {
      name: (checksum, backbone.digest)
      for backbone in backbones.values()
      for name, checksum in backbone.checksums().items()
    }
    identity = records.identity(config, known, about, grouped)
    folder = records.folder(workdir, done)
    with records.Store(folder, identity, fresh, done) as store:
      for backbone in backbones.values():
        backbone.resume()
      key = sampling.root_key(config.seed, "eval")
      sets = {name: of[:num] for name, of in tasks.items()}
      result = evaluate.run(player, sets, config, key, k, store)
  except Stopped:
    _say(f"{folder}: the same command goes on from there")
    return stop.exit_code
  finally:
    player.close()
    stop.close()
  if jax.process_index() == 0:
    print(evaluate.write(folder, result, config, done, origins, about))
    manifest.write_patches(folder)
    print(
      f"{folder}: results.md, results.json, episodes.jsonl, transcripts.jsonl"
    )
  _check_lost(result, config.rollout.max_failed)
  return 0


def to_sample(
  config: config_lib.Config,
  workdir: pathlib.Path | None,
  step: str,
  stop: Stop,
) -> tuple[dict[str, Backbone], rollout.Rollout | None]:
  """Policies that are sampled from and not trained, and the team, if any.

  Args:
    config: checked.
    workdir: whose checkpoint they are of; None: they are as they come.
    step: as for `--mode=eval`.
    stop: ends a rollout.

  Raises:
    ConfigError: they cannot be had.
  """
  config, backbones = prepare(config, train=False)
  team = _rollout(config, backbones, stop) if config.agents else None
  if workdir is not None:
    _restore_params(config, backbones, workdir, step)
  for backbone in backbones.values():
    if workdir is None:
      _load(backbone)
    backbone.resume()
    backbone.drop()  # the engine has its own
  return backbones, team


def _check_lost(result: Evaluation, allowed: float) -> None:
  """What was lost counts as nothing (rule 6), so too much of it says nothing.

  Raises:
    RunError: it is more than `rollout.max_failed`.
  """
  lost = sum(int((~s.ok).sum()) for s in result.sets.values())
  total = sum(s.ok.size for s in result.sets.values())
  if lost > allowed * total:
    raise RunError(
      f"{lost} of {total} episodes failed; allowed is a share of "
      f"rollout.max_failed={allowed:g}; what failed, and what did not, is kept"
    )


def _restore_params(
  config: config_lib.Config,
  backbones: Mapping[str, Backbone],
  workdir: pathlib.Path,
  step: str,
) -> tuple[int, dict[str, str]]:
  """Weights for an evaluation: (step, {policy: where its weights are from})."""
  checkpoints = checkpoint.Checkpoints(workdir, read_only=True)
  with _blaming("--step"):
    run = checkpoints.run(checkpoints.find(step) if step else None)
  # The run may be under way: all hosts take what the first one found.
  found = hosts.agree("step", {"step": run and run.step})[0]["step"]
  if found != (run and run.step):
    run = None if found is None else checkpoints.run(found)
  done = found or 0
  if run is None:
    _say(f"no checkpoint in {workdir}: the policies as they come")
  else:
    _say(f"evaluates step {done} of {workdir}")
    check_folders(run, backbones)
  origins = {name: config.policies[name].origin for name in config.remotes}
  for backbone in backbones.values():
    learned = [n for n in backbone.names if n in config.trained]
    if run is None or not learned:
      _load(backbone)
    else:
      with _blaming(f"policies.{learned[0]}.checkpoint"):
        saved = {
          n: checkpoint.SavedPolicy(workdir, n, str(done)) for n in learned
        }
        _check_below(config, saved)
        backbone.restore(saved)
    for name in backbone.names:
      origins[name] = config.policies[name].checkpoint
      if run is not None and name in learned:
        origins[name] = f"checkpoint {done}"
        backbone.updates[name] = run.versions[name]
  return done, origins


def _check_below(
  config: config_lib.Config, saved: Mapping[str, checkpoint.SavedPolicy]
) -> None:
  """Adapters are what they were trained to be on the weights below them only.

  Raises:
    ConfigError: the config has others.
  """
  for name, policy in saved.items():
    now = config.policies[name]
    pairs = {
      "checkpoint": (now.checkpoint, policy.checkpoint),
      "adapter": (config_lib.to_dict(now.adapter), policy.adapter),
    }
    for key, (mine, its) in pairs.items():
      if now.adapter is not None and mine != its:
        raise config_lib.ConfigError(
          f"policies.{name}.{key}: {mine!r} is not what the adapter was "
          f"trained with, {its!r}; write that"
        )


def _load(backbone: Backbone) -> None:
  where = f"policies.{backbone.names[0]}.checkpoint"
  with _blaming(f"{where}={backbone.policy.checkpoint!r}"):
    backbone.load()


def _no_reward(config: config_lib.Config, found: Mapping[str, float]) -> str:
  """What to look at when nobody was ever right."""
  cut, valid = (
    ", ".join(
      f"{agent} {found[f'{what}/{agent}']:.0%}"
      for agent in config.agent_names
      if f"{what}/{agent}" in found
    )
    for what in ("truncated", "valid")
  )
  return (
    f"WARNING: every reward of the first {_FIRST} batches is 0, and from equal "
    "rewards nothing is learned. Likely causes: answers in a form that the "
    f"environment {config.environment.name!r} does not read, or golds that are "
    "(see transcripts/); completions cut before the answer (cut in the last "
    f"batch: {cut}; raise agents.*.max_tokens); a prompt or chat template that "
    f"the model does not follow (valid turns: {valid}); tasks that are too "
    "hard for it"
  )


def check_folders(
  run: checkpoint.Run, backbones: Mapping[str, Backbone]
) -> None:
  """The model's shape and the tokenizer never change on resume (rule 25)."""
  homes = _homes(backbones)
  for name, digest in run.extra["folders"].items():
    if name in homes and homes[name].digest != digest:
      raise config_lib.ConfigError(
        f"policies.{name}.checkpoint: config.json or the tokenizer of "
        f"{str(homes[name].folder)!r} is not what the run began with; put "
        "it back, or start a new --workdir"
      )


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
  saved = checkpoint.Checkpoints(workdir / "sft", keep=1)
  begun = sft.begun(config, saved)
  if begun is not None:
    _say(f"goes on from step {begun.step} of {workdir}")
  writer = writers.RunWriter(
    workdir,
    config.sft.steps * len(config.trained),
    names=config.logging.writers,
    config=config,
    resume_from=begun and begun.step,
  )

  def tell(step: int, found: dict[str, float]) -> None:
    writer.write_scalars(step, found)
    writer.flush()

  stop = Stop()
  try:
    written = sft.train(
      config,
      backbones,
      stream(config),
      sft.Session(workdir, tell, lambda: stop.signal > 0, saved, begun),
    )
  finally:
    stop.close()
  writer.close()
  print(f"{workdir}/policies: {', '.join(written)}")
  return stop.exit_code if stop.signal else 0
