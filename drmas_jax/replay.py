"""`--mode=replay`: what a step was made of.

    --step N   plays from the checkpoint before step N to its end again, bit for
               bit, and compares each step with what the run had measured
    --spike K  takes the batch that the run kept of a step whose update was a
               spike (`spikes`), so that nothing is played

The run's own files stay as they are. <workdir>/replay/step_N (spike_K) gets

    summary.md      all of it for a person
    replay.json     the same as data
    rows.jsonl      each turn: agent, task, text, score, advantage, gradient
    episodes.jsonl  the episodes whole, as `transcripts` has them

Of several processes the first one writes, with the rows and episodes of all,
process by process. Gradients are those of the step's loss at the weights before
it.
"""

import collections
import dataclasses
import itertools
import json
import math
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from drmas_jax import (
  advantages,
  building,
  checkpoint,
  hosts,
  manifest,
  restoring,
  rewards,
  signals,
  spikes,
  writers,
)
from drmas_jax import config as config_lib
from drmas_jax.backbone import Work
from drmas_jax.resample import Played
from drmas_jax.training import Training
from drmas_jax.types import Group, Stopped

_MOST = 10  # rows that the summary names
_TEXT = 160  # characters of each
_CLOCK = ("time/", "memory/", "eval/", "alarms/")  # beginnings of names
# What a kept batch is enough for, at the weights that it was computed with.
_OF_BATCH = ("grad_norm/", "reward/", "ratio_error/")


def main(
  config: config_lib.Config,
  workdir: pathlib.Path,
  step: int,
  *,
  spike: bool = False,
  processes: tuple[str | None, int | None, int | None] = (None, None, None),
) -> int:
  """Replays a step; returns the exit code.

  Args:
    config: of the run, checked.
    workdir: of the run.
    step: its number, from 1.
    spike: take the batch that the run has kept.
    processes: see `building.prepare`.
  """
  began = time.monotonic()
  config, backbones = building.prepare(config, processes)
  config = _of_replay(config)
  flags = {"--workdir": str(workdir), "--spike" if spike else "--step": step}
  hosts.check_alike("flags", flags)
  origin = _origin(config, workdir, step)
  batch = spikes.read(workdir, step) if spike else None
  stop = signals.Stop(0.0, "the replay ends here, and leaves nothing")
  out = workdir / "replay" / f"{'spike' if spike else 'step'}_{step}"
  try:
    replay = Replay(config, backbones, out, stop, began, step)
    try:
      replay.begin(origin, batch)
      replay.play(workdir)
      replay.leave(workdir, origin)
    finally:
      replay.close()
  except Stopped:
    return stop.exit_code
  finally:
    stop.close()
  return 0


def _of_replay(config: config_lib.Config) -> config_lib.Config:
  """Whole episodes of all groups; nothing is kept for a replay of it, and no
  alarm ends it, though it may have ended the run."""
  return dataclasses.replace(
    config,
    logging=dataclasses.replace(
      config.logging, transcript_groups=config.data.num_tasks, spikes_kept=0
    ),
    health=dataclasses.replace(config.health, stop_on=()),
  )


# -- where it begins -----------------------------------------------------------


class Origin(NamedTuple):
  """The checkpoint that a replay begins with.

  Attributes:
    checkpoints: that it is one of.
    step: of it; 0: the policies as they came.
  """

  checkpoints: checkpoint.Checkpoints
  step: int


def _origin(
  config: config_lib.Config, workdir: pathlib.Path, step: int
) -> Origin:
  """The newest checkpoint before a step, with the config in force at the step.

  Raises:
    ConfigError: there is no such run, step or checkpoint, or the config is not
      that of the step.
  """
  path = workdir / "config.json"
  if not path.exists():
    raise config_lib.ConfigError(
      f"--workdir={workdir}: holds no run to replay; name the --workdir of one"
    )
  origin = _newest(workdir, step)
  changes = json.loads((workdir / "changes.json").read_text())
  _check_config(config, json.loads(path.read_text()), changes, origin, step)
  return origin


def _newest(workdir: pathlib.Path, step: int) -> Origin:
  own = checkpoint.Checkpoints(workdir, read_only=True)
  fork = checkpoint.Fork.of(workdir, "")
  if fork is not None and step <= fork.step:
    raise config_lib.ConfigError(
      f"--step={step}: the run in {workdir} began behind step {fork.step} of "
      f"{fork.workdir}; replay that one"
    )
  done = max((0, *own.steps(), *_steps(workdir / "metrics.jsonl")))
  if step > done + 1:
    raise config_lib.ConfigError(
      f"--step={step}: the run in {workdir} has done {done}; allowed are 1 to "
      f"{done + 1}"
    )
  before = [s for s in own.steps() if s < step]
  found = restoring.of_first(before[-1] if before else None, own)
  if found is not None:
    return Origin(own, found)
  return Origin(own, 0) if fork is None else Origin(fork.checkpoints, fork.step)


def _steps(path: pathlib.Path) -> list[int]:
  """That metrics are of."""
  if not path.is_file():
    return []
  return [int(s.max()) for s, _ in writers.read_metrics(path).values()]


def _check_config(
  config: config_lib.Config,
  newest: Mapping[str, Any],
  changes: Sequence[Mapping[str, Any]],
  origin: Origin,
  step: int,
) -> None:
  """The config must be what the run had at the step, as far as it matters."""
  then = json.loads(json.dumps(newest))
  for change in reversed(changes):
    if change["step"] >= step:
      _undo(then, change)
  now = json.loads(json.dumps(config_lib.to_dict(config)))
  faults = [
    f"{c.key}: is {c.new!r}, and was {c.old!r} at step {step}; write that"
    for c in checkpoint.changes_between(then, now)
    if c.kind != "free"
  ]
  faults += [
    f"--step={step}: {c['key']} was changed behind step {c['step']}, and the "
    f"newest checkpoint that is kept is of step {origin.step}, before that; no "
    "config is that of all steps between, so it cannot be replayed"
    for c in changes
    if origin.step < c["step"] < step and checkpoint.kind_of(c["key"]) != "free"
  ]
  if faults:
    raise config_lib.ConfigError("\n".join(faults))


def _undo(tree: dict[str, Any], change: Mapping[str, Any]) -> None:
  *path, last = change["key"].split(".")
  for name in path:
    tree = tree.setdefault(name, {})
  tree[last] = change["old"]


# -- the replay ----------------------------------------------------------------


class _Held(writers.Writer):
  """Holds what a run would write.

  Attributes:
    primary: as a run's writer has it; nothing is to be written.
    scalars: by step.
    episodes: of the last step.
  """

  primary = False

  def __init__(self):
    self.scalars: dict[int, dict[str, float]] = {}
    self.episodes: list[Mapping[str, Any]] = []

  def write_scalars(self, step, scalars):
    self.scalars.setdefault(step, {}).update(scalars)

  def write_episodes(self, episodes):
    self.episodes = list(episodes)


def _own_part(by_host: Sequence[Sequence[Group]]) -> list[Group]:
  """What this host had; with another number of hosts than the run, a share."""
  if len(by_host) == jax.process_count():
    return list(by_host[jax.process_index()])
  groups = itertools.chain.from_iterable(by_host)
  return list(hosts.share(sorted(groups, key=lambda g: g.task.position)))


class Analysis(NamedTuple):
  """What a step's batch says, before the update.

  Attributes:
    rows: of this host's turns, plain data, in the order of the batch.
    most: of all hosts, those that carry most of the norm.
    estimators: {name: {agent: {"turns", "mean", "square", "most", "norm"}}} of
      the advantages and of the gradient; the run's own first.
  """

  rows: list[dict[str, Any]]
  most: list[dict[str, Any]]
  estimators: dict[str, dict[str, dict[str, float]]]


class Replay(Training):
  """A run that writes nothing, and looks into the batch of its last step.

  Args:
    config: of the run.
    backbones: likewise.
    out: where the replay is left.
    stop: ends it.
    start: when it began.
    target: the step.
  """

  def __init__(self, config, backbones, out, stop, start, target: int):
    super().__init__(config, backbones, out, stop, start)
    self.writer = self.held = _Held()
    self.target = target
    self.spike: spikes.Spike | None = None
    self.kept: list[Group] = []  # of the spike
    self.groups: list[Group] = []  # of the step
    self.differ: dict[int, list[tuple[str, Any, Any]]] = {}
    self.analysis: Analysis | None = None

  def begin(
    self,
    origin: Origin,
    batch: tuple[spikes.Spike, Sequence[Sequence[Group]]] | None,
  ) -> None:
    """Takes the weights, and this host's part of the batch of a spike."""
    self.checkpoints = origin.checkpoints
    self.load(origin.checkpoints, self._check, origin.step)
    if batch is not None:
      self.spike, by_host = batch
      self.kept = _own_part(by_host)
      self.step_done = self.target - 1
      self.averages = np.array(self.spike.averages)

  def _check(self, run: checkpoint.Run | None) -> None:
    if run is not None:
      restoring.check_folders(run, self.backbones)

  def play(self, workdir: pathlib.Path) -> None:
    """To the end of the step; says how it compares.

    Raises:
      Stopped: by a signal.
    """
    known = _measured(workdir / "metrics.jsonl")
    while self.step_done < self.target:
      self.step()
      done = self.step_done
      if done in known:
        found = differences(
          known[done], self.held.scalars[done], self.spike is not None
        )
        self.differ[done] = found
        said = f"{len(found)} numbers differ" if found else "as it was"
        hosts.say(f"step {done}: {said}")

  def _collect(self) -> Played:
    if self.spike is None:
      played = super()._collect()
    else:
      cursor = self.spike.cursor
      played = Played(self.kept, [], 0, cursor, False)
    self.groups = played.groups
    return played

  def _update(self, rows, values, work, shares):
    if self.step_done + 1 == self.target:
      for backbone in self.backbones.values():
        backbone.release()
      with hosts.together("replay"):
        self.analysis = self._analyse(rows, values, work, shares)
    return super()._update(rows, values, work, shares)

  # -- what is in the batch --

  def _analyse(self, rows, values, work, shares) -> Analysis:
    norms = self._row_norms(rows, values, work, shares)
    found = self._rows(rows, values, norms)
    worst = sorted(found, key=_weight, reverse=True)[:_MOST]
    brief = [r | {"text": _cut(r["text"], _TEXT)} for r in worst]
    all_ = hosts.agree("replay: rows", {"rows": brief})
    most = [row for share in all_ for row in share["rows"]]
    return Analysis(
      found,
      sorted(most, key=_weight, reverse=True)[:_MOST],
      {
        name: self._estimator(settings, rows, shares)
        for name, settings in advantages.others(self.config.advantage).items()
      },
    )

  def _row_norms(self, rows, values, work: Mapping[str, Work], shares):
    norms = np.zeros(len(rows.turns), np.float32)
    for name in work:
      backbone = self.backbones[name]
      extents = hosts.agree("replay: extent", backbone.extent(rows))
      norms += backbone.row_norms(
        rows,
        values,
        work[name],
        [s["work"][name] for s in shares],
        extents,
        reference=self._reference(name),
      )
    return norms

  def _reference(self, name: str) -> Any:
    return self.homes.get(self.backbones[name].policy.loss.reference)

  def _rows(self, rows: rewards.Rows, values, norms) -> list[dict[str, Any]]:
    """Each row as plain data."""
    owner = {
      id(turn): episode
      for group in self.groups
      for episode in group.episodes
      for turn in episode.turns
    }
    total: dict[str, float] = collections.defaultdict(float)
    for turn, norm in zip(rows.turns, norms, strict=True):
      total[turn.policy] += float(norm)
    found = []
    for turn, score, value, norm in zip(
      rows.turns, rows.scores, values, norms, strict=True
    ):
      episode = owner[id(turn)]
      task, whole = episode.task, total[turn.policy]
      found.append(
        {
          "agent": turn.agent,
          "policy": turn.policy,
          "source": task.source,
          "index": task.index,
          "position": task.position,
          "episode": episode.index,
          "turn": turn.index,
          "tokens": len(turn.completion_ids),
          "stop_reason": turn.stop_reason,
          "valid": turn.valid,
          "score": float(score),
          "advantage": float(value),
          "norm": float(norm),
          "share": float(norm) / whole if whole else 0.0,
          "text": turn.text,
        }
      )
    return found

  def _estimator(
    self, settings: config_lib.Advantage, rows: rewards.Rows, shares
  ) -> dict[str, dict[str, float]]:
    """By agent, of the same rows under an estimator."""
    estimate, _ = self.estimate(settings, self.groups, rows)
    values = estimate.values
    work = self.work(rows, values, self._due())
    numbers = {name: w.numbers() for name, w in work.items()}
    shares = hosts.agree("replay: work", {"work": numbers})
    names = self.config.agent_names
    norms: dict[int, float] = {}
    for name in work:
      norms |= self.backbones[name].agent_norms(
        rows,
        values,
        work[name],
        [s["work"][name] for s in shares],
        reference=self._reference(name),
      )
    sums = {
      agent: _sums(values[rows.agent == k]) for k, agent in enumerate(names)
    }
    every = hosts.agree("replay: sums", sums)
    return {
      agent: _moments([s[agent] for s in every])
      | ({"norm": norms[k]} if k in norms else {})
      for k, agent in enumerate(names)
    }

  # -- what is left of it --

  def leave(self, workdir: pathlib.Path, origin: Origin) -> None:
    """Writes all of it, and prints the summary."""
    files = {
      name: hosts.to_first(name, _lines(records))
      for name, records in (
        ("rows", self.analysis.rows),
        ("episodes", self.held.episodes),
      )
    }
    if jax.process_index():
      return
    out = self.workdir
    out.mkdir(parents=True, exist_ok=True)
    for name, parts in files.items():
      with writers.replacing(out / f"{name}.jsonl") as file:
        file.writelines(parts)
    found = self.report(workdir, origin)
    writers.write_json(out / "replay.json", found)
    text = summary(found)
    writers.write_text(out / "summary.md", text)
    print(text)
    print(f"{out}: summary.md, replay.json, rows.jsonl, episodes.jsonl")

  def report(self, workdir: pathlib.Path, origin: Origin) -> dict[str, Any]:
    """What `summary` shows, as plain data."""
    mine = self.held.scalars[self.target]
    return {
      "step": self.target,
      "kind": "step" if self.spike is None else "spike",
      "checkpoint": origin.step,
      "of": str(origin.checkpoints.workdir),
      "spike": self.spike and self.spike._asdict(),
      "compared": {
        str(step): [list(d) for d in found]
        for step, found in self.differ.items()
      },
      "reasons": self._reasons(workdir) if any(self.differ.values()) else [],
      "metrics": {k: v if math.isfinite(v) else None for k, v in mine.items()},
      "estimators": self.analysis.estimators,
      "most": self.analysis.most,
    }

  def _reasons(self, workdir: pathlib.Path) -> list[str]:
    """Why a replay may not be what the run was; the likely ones that hold."""
    found = []
    then, now = manifest.read(workdir, self.target), self.about()
    fresh = json.loads(json.dumps(now))
    for key in ("versions", "devices", "python", "data", "grader"):
      if then.get(key) != fresh[key]:
        found.append(
          f"{key}: {_difference(then.get(key), fresh[key])} (then -> now)"
        )
    if (then.get("commit"), then.get("diff_sha256")) != (
      fresh["commit"],
      fresh["diff_sha256"],
    ):
      found.append("the code of the working directory has changed")
    if not self.deterministic:
      found.append(
        "a clock decided (a time limit of a reward, of retrieval, of a turn): "
        "the run says that it is not deterministic"
      )
    if self.spike is not None and self.spike.checkpoint != self.target - 1:
      found.append("the weights are not those that the update began with")
    free = ("placement", "rollout", "steps")
    recorded = json.loads((workdir / "config.json").read_text())
    mine = json.loads(json.dumps(config_lib.to_dict(self.config)))
    found += [
      f"{c.key} is {c.new!r}, and the run has {c.old!r}"
      for c in checkpoint.changes_between(recorded, mine)
      if c.key.partition(".")[0] in free
    ]
    return found or ["none of those that are known: this is a defect"]


def _lines(records: Sequence[Mapping[str, Any]]) -> bytes:
  text = "".join(map(writers.json_line, records))
  return text.encode(errors="backslashreplace")


def _weight(row: Mapping[str, Any]) -> float:
  """For an order; what is not finite comes first."""
  return row["norm"] if math.isfinite(row["norm"]) else math.inf


def _sums(values: np.ndarray) -> list[float]:
  a = values.astype(np.float64)
  return [
    float(len(a)),
    float(a.sum()),
    float((a**2).sum()),
    float(np.abs(a).max(initial=0.0)),
  ]


def _moments(sums: Sequence[Sequence[float]]) -> dict[str, float]:
  """Of the advantages of all hosts."""
  num, total, square = np.sum([s[:3] for s in sums], axis=0).tolist()
  return {
    "turns": num,
    "mean": total / max(num, 1),
    "square": square / max(num, 1),
    "most": max(s[3] for s in sums),
  }


def _cut(text: str, most: int) -> str:
  text = " ".join(text.split())
  return text if len(text) <= most else f"{text[: most - 3]}..."


def _difference(then: Any, now: Any) -> str:
  if not isinstance(then, Mapping) or not isinstance(now, Mapping):
    return f"{then} -> {now}"
  return ", ".join(
    f"{key} {then.get(key)} -> {now.get(key)}"
    for key in sorted({*then, *now})
    if then.get(key) != now.get(key)
  )


# -- the comparison ------------------------------------------------------------


def _measured(path: pathlib.Path) -> dict[int, dict[str, float | None]]:
  """By step, what the run has measured; null is what was not finite."""
  found: dict[int, dict[str, float | None]] = {}
  if path.exists():
    for line in path.read_bytes().splitlines(keepends=True):
      if line.endswith(b"\n"):
        record = json.loads(line)
        found.setdefault(record.pop("step"), {}).update(record)
  return found


def differences(
  then: Mapping[str, float | None],
  now: Mapping[str, float],
  of_batch: bool = False,
) -> list[tuple[str, Any, Any]]:
  """(name, then, now) of numbers that are not the same, bit for bit.

  What a clock measures, evaluations and alarms are left out.

  Args:
    then: as metrics.jsonl has them.
    now: of the replay.
    of_batch: only what the batch says, as nothing was played.
  """
  found = []
  for name in sorted({*then, *now}):
    if name.startswith(_CLOCK) or name.endswith("_per_s"):
      continue
    if of_batch and not name.startswith(_OF_BATCH):
      continue
    value = now.get(name)
    if value is not None:
      value = float(value) if math.isfinite(value) else None
    if then.get(name) != value or (name in then) != (name in now):
      found.append((name, then.get(name), value))
  return found


# -- the summary ---------------------------------------------------------------


def summary(found: Mapping[str, Any]) -> str:
  """Markdown, of `Replay.report`."""
  parts = [
    f"# {found['kind'].capitalize()} {found['step']}",
    _provenance(found),
    _compared(found),
    "## Rows that carry most of the norm",
    _rows_table(found["most"]),
    "norm: of the gradient of what the row adds to its policy's loss; share: "
    "of the sum of the policy's rows.",
    "## The same batch under every estimator",
    *_estimator_tables(found["estimators"]),
    "gradient: its norm for the agent's rows, at the weights before the "
    "update, before clipping. The first line is the run's estimator. `rae` "
    "compares with averages of earlier steps, which only a run of it has; "
    "elsewhere it is 0.",
  ]
  return "\n\n".join(filter(None, parts)) + "\n"


def _provenance(found: Mapping[str, Any]) -> str:
  began = (
    f"checkpoint {found['checkpoint']} of {found['of']}"
    if found["checkpoint"]
    else "the policies as they came"
  )
  if found["kind"] == "step":
    first = found["checkpoint"] + 1
    return (
      f"Played from {began}: steps {first} to {found['step']}. All of the step "
      "is rebuilt but what a clock measures and the evaluation behind it."
    )
  spike = found["spike"]
  norms = ", ".join(f"{n} {v:.4g}" for n, v in spike["norms"].items())
  said = (
    f"A spike of {', '.join(spike['policies'])}; norms of the step: "
    f"{norms or 'none was finite'}. The batch is the run's, kept as it was."
  )
  if found["checkpoint"] == found["step"] - 1:
    return f"{said} Weights: {began}, those that the update began with."
  return (
    f"{said} Weights: {began}, {found['step'] - 1 - found['checkpoint']} steps "
    "before the update. Rewards, advantages and lengths are exact; gradients "
    f"are those at the earlier weights. `--step={found['step']}` plays the "
    "steps between again and comes to the weights themselves."
  )


def _compared(found: Mapping[str, Any]) -> str:
  compared = found["compared"]
  if not compared:
    return "Nothing to compare with: the run's metrics.jsonl lacks these steps."
  wrong = {step: d for step, d in compared.items() if d}
  if not wrong:
    what = "numbers of the batch" if found["kind"] == "spike" else "numbers"
    return (
      f"EQUAL: all {what} of step {', '.join(compared)} are those of the run, "
      "bit for bit."
    )
  step, names = next(iter(wrong.items()))
  lines = [
    f"- {name}: {then} in the run, {now} here" for name, then, now in names[:20]
  ]
  more = len(names) - 20
  lines += [f"- and {more} more (replay.json)"] if more > 0 else []
  reasons = "\n".join(f"- {reason}" for reason in found["reasons"])
  return (
    f"DIFFERENT: {len(names)} numbers of step {step}, the first that differs:\n"
    + "\n".join(lines)
    + f"\n\nLikely reasons:\n{reasons}"
  )


def _rows_table(rows: Sequence[Mapping[str, Any]]) -> str:
  header = ("agent", "task", "turn", "tokens", "A", "norm", "share", "text")
  return writers.markdown(
    header,
    [
      (
        row["agent"],
        f"{row['source']}[{row['index']}]#{row['episode']}",
        str(row["turn"]),
        str(row["tokens"]),
        f"{row['advantage']:+.3f}",
        f"{row['norm']:.3g}",
        f"{row['share']:.1%}",
        _cut(row["text"], 60).replace("|", "\\|"),
      )
      for row in rows
    ],
  )


def _estimator_tables(
  estimators: Mapping[str, Mapping[str, Mapping[str, float]]],
) -> list[str]:
  agents = next(iter(estimators.values()))
  columns = {
    "mean": "E[A]",
    "square": "E[A^2]",
    "most": "max abs A",
    "norm": "gradient",
  }
  return [
    writers.markdown(
      (f"{agent}: {agents[agent]['turns']:.0f} turns", *columns.values()),
      [
        (
          name,
          *(
            f"{found[agent][key]:.4g}" if key in found[agent] else ""
            for key in columns
          ),
        )
        for name, found in estimators.items()
      ],
    )
    for agent in agents
  ]
