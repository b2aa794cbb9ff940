"""What is taken from a run's checkpoint, and whether it may be.

    params        weights for policies that are sampled from and not trained
    to_sample     these and their team, for whoever serves or studies them
    check_*       what a run that goes on must have in common with its past

A run's own state is put together again by `coordinator.Training.load`.
"""

import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from drmas_jax import building, checkpoint, hosts, manifest, rollout, signals
from drmas_jax import config as config_lib
from drmas_jax.backbone import Backbone

# -- policies that are only sampled from ---------------------------------------


def to_sample(
  config: config_lib.Config,
  workdir: pathlib.Path | None,
  step: str,
  stop: signals.Stop,
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
  config, backbones = building.prepare(config, train=False)
  team = None
  if config.agents:
    team = building.team_rollout(config, backbones, stop)
  if workdir is not None:
    params(config, backbones, workdir, step)
  for backbone in backbones.values():
    if workdir is None:
      _load(backbone)
    backbone.resume()
    backbone.drop()  # the engine has its own
  return backbones, team


def params(
  config: config_lib.Config,
  backbones: Mapping[str, Backbone],
  workdir: pathlib.Path,
  step: str,
) -> tuple[int, dict[str, str]]:
  """Fills the backbones; returns the step, and {policy: where its weights are
  from}.

  Args:
    config: of the run.
    backbones: built without training.
    workdir: one without a checkpoint means the policies as they come.
    step: a number or "best"; "": the newest.

  Raises:
    ConfigError: they are not there, or not of this config.
  """
  checkpoints = checkpoint.Checkpoints(workdir, read_only=True)
  with config_lib.blaming("--step"):
    run = checkpoints.run(checkpoints.find(step) if step else None)
  found = of_first(run and run.step, checkpoints)
  if found != (run and run.step):
    run = None if found is None else checkpoints.run(found)
  done = found or 0
  if run is None:
    hosts.say(f"no checkpoint in {workdir}: the policies as they come")
  else:
    hosts.say(f"evaluates step {done} of {workdir}")
    check_folders(run, backbones)
  origins = {name: config.policies[name].origin for name in config.remotes}
  for backbone in backbones.values():
    learned = [n for n in backbone.names if n in config.trained]
    if run is None or not learned:
      _load(backbone)
    else:
      with config_lib.blaming(f"policies.{learned[0]}.checkpoint"):
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


def _load(backbone: Backbone) -> None:
  where = f"policies.{backbone.names[0]}.checkpoint"
  with config_lib.blaming(f"{where}={backbone.policy.checkpoint!r}"):
    backbone.load()


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


def of_first(
  step: int | None, checkpoints: checkpoint.Checkpoints
) -> int | None:
  """The step that the first host has found; None: no checkpoint. The run may be
  under way, and save between two hosts' looks.

  Args:
    step: that this host has found.
    checkpoints: of the run.

  Raises:
    ConfigError: on all hosts, where one does not see that checkpoint.
  """
  step = hosts.agree("step", {"step": step})[0]["step"]
  mine = {"seen": step is None or checkpoints.has(step)}
  seen = [answer["seen"] for answer in hosts.agree("step: seen", mine)]
  if not all(seen):
    raise config_lib.ConfigError(
      f"--workdir={checkpoints.workdir}: host {seen.index(False)} does not see "
      f"the checkpoint of step {step}, which host 0 has found; all must see "
      "the same folder (NFS, a mounted bucket)"
    )
  return step


# -- a run that goes on --------------------------------------------------------


def check_folders(
  run: checkpoint.Run, backbones: Mapping[str, Backbone]
) -> None:
  """The model's shape and the tokenizer never change on resume (rule 25).

  Raises:
    ConfigError: they have.
  """
  homes = building.homes(backbones)
  for name, digest in run.extra["folders"].items():
    if name in homes and homes[name].digest != digest:
      raise config_lib.ConfigError(
        f"policies.{name}.checkpoint: config.json or the tokenizer of "
        f"{str(homes[name].folder)!r} is not what the run began with; put "
        "it back, or start a new --workdir"
      )


def check_alike(run: checkpoint.Run | None, workdir: pathlib.Path) -> None:
  """A host that cannot read what the others can would train other weights.

  Raises:
    ConfigError: hosts have read different checkpoints.
  """
  mine = {"step": run and run.step}
  steps = [s["step"] for s in hosts.agree("resume", mine)]
  if any(step != steps[0] for step in steps):
    raise config_lib.ConfigError(
      f"--workdir={workdir}: the newest checkpoint that can be read is, "
      f"by host, that of step {', '.join(map(str, steps))}; all must see the "
      "same folder (NFS, a mounted bucket), and read the same one: move a "
      "broken one away on all of them"
    )


def check_steps(
  run: checkpoint.Run, config: config_lib.Config, workdir: pathlib.Path
) -> None:
  """A run does not go back.

  Raises:
    ConfigError: more steps are done than the config has.
  """
  if run.step > config.steps:
    raise config_lib.ConfigError(
      f"steps: {config.steps} is less than the {run.step} that are done in "
      f"{workdir}; raise it, or start a new --workdir"
    )


def check_rows(
  workdir: pathlib.Path,
  sources: Collection[str],
  fingerprints: Mapping[str, str],
  allow_change: Sequence[str],
) -> None:
  """The rows of a training set change as its options do: with leave.

  Args:
    workdir: of the run, whose manifest knows what they were.
    sources: keys of the training sets.
    fingerprints: what they are now, as {"train/<key>": fingerprint}.
    allow_change: keys of the config that may differ.

  Raises:
    ConfigError: they have changed.
  """
  before = (manifest.read(workdir) or {}).get("data", {})
  for source in sources:
    old, new = (x.get(f"train/{source}") for x in (before, fingerprints))
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


def changes(
  run: checkpoint.Run,
  config: config_lib.Config,
  allow_change: Sequence[str],
  fork: bool,
) -> list[dict[str, Any]]:
  """All changes of the config since the run began, for changes.json.

  Args:
    run: that goes on.
    config: with which it does.
    allow_change: keys that may differ.
    fork: into a workdir of its own.

  Raises:
    ConfigError: one of them is not allowed.
  """
  now = config_lib.to_dict(config)
  new = checkpoint.compare_config(run.config, now, allow_change, fork)
  return run.extra["changes"] + [
    {"step": run.step, "key": c.key, "old": c.old, "new": c.new} for c in new
  ]
