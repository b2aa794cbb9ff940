"""From a checked config to what a mode works with.

    prepare       names of checkpoints fixed, devices planned, backbones built
    stream        the training tasks       make_source  one data set
    team_rollout  the team over the backbones' samplers
    about         what this process is made of

Nothing here reads weights: see `restoring`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from drmas_jax import config as config_lib
from drmas_jax import (
  data,
  hosts,
  manifest,
  placement,
  remote,
  rollout,
  signals,
  usercode,
)
from drmas_jax.backbone import (
  Backbone,
  checkpoint_folder,
  checkpoint_sizes,
  pinned,
)
from drmas_jax.models import weights


def prepare(
  config: config_lib.Config,
  processes: tuple[str | None, int | None, int | None] = (None, None, None),
  train: bool = True,
) -> tuple[config_lib.Config, dict[str, Backbone]]:
  """The config with the names of checkpoints fixed, and its backbones without
  weights.

  Args:
    config: checked.
    processes: coordinator address, number, id; see `hosts.initialize`.
    train: whether anything will be trained.
  """
  config = begin(config, processes)
  return config, build(config, train)


def begin(
  config: config_lib.Config,
  processes: tuple[str | None, int | None, int | None] = (None, None, None),
) -> config_lib.Config:
  """Joins the other processes. The config then has the step in the name of each
  policy that is from another run, which may go on: all hosts mean the same one,
  and so does this run on a resume.

  Args:
    config: checked.
    processes: see `prepare`.
  """
  hosts.initialize(*processes, timeout_s=config.placement.timeout_s)
  values = config_lib.flatten(config_lib.to_dict(config))
  hosts.check_alike("config", values)
  names = {}
  for name, policy in sorted(config.policies.items()):
    path = policy.checkpoint
    with config_lib.blaming(f"policies.{name}.checkpoint={path!r}"):
      names[name] = path and pinned(path)
  names = hosts.agree("checkpoints", names)[0]
  policies = {
    name: dataclasses.replace(policy, checkpoint=names[name])
    for name, policy in config.policies.items()
  }
  config = dataclasses.replace(config, policies=policies)
  if faults := config_lib.check_backbones(config):  # names may be one only now
    raise config_lib.ConfigError("\n".join(faults))
  return config


def build(config: config_lib.Config, train: bool = True) -> dict[str, Backbone]:
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
    with config_lib.blaming(f"policies.{name}.checkpoint={path!r}"):
      models[name] = checkpoint_sizes(path)
  plan = placement.plan(config, models, train=train)
  hosts.say(
    f"{placement.describe(plan)}; {', '.join(names)} from "
    f"{', '.join(names.values())}"
  )
  for name, path in names.items():
    with config_lib.blaming(f"policies.{name}.checkpoint={path!r}"):
      folders[name] = checkpoint_folder(path)
      models[name] = weights.read_config(folders[name])
  plan = placement.plan(config, models, train=train)  # what is there decides
  for name, policies in config.backbones.items():
    first = policies[0]
    if not train and not any(map(config.is_sampled, policies)):
      continue  # it is there for a loss
    with config_lib.blaming(f"policies.{first}.checkpoint={names[first]!r}"):
      backbones[name] = Backbone(
        policies,
        config,
        plan.slices[name],
        models[first],
        folders[first],
        train,
      )
    stops = backbones[name].tokenizer.stop_ids
    ids = ", ".join(map(str, stops))
    hosts.say(f"{name}'s completions end at the ids {ids}")
  if train:
    _check_references(config, backbones)
  return backbones


def homes(backbones: Mapping[str, Backbone]) -> dict[str, Backbone]:
  """By policy."""
  return {name: b for b in backbones.values() for name in b.names}


def _check_references(
  config: config_lib.Config, backbones: Mapping[str, Backbone]
) -> None:
  """Log-probs of the same tokens are compared."""
  home = homes(backbones)
  for name in config.trained:
    other = config.policies[name].loss.reference
    if not other or home[other] is home[name]:
      continue
    key = f"policies.{name}.loss.reference: {other!r}"
    ids = [home[n].tokenizer.vocabulary() for n in (name, other)]
    if ids[0] != ids[1]:
      raise config_lib.ConfigError(
        f"{key} has another tokenizer; allowed is a policy with the same "
        "vocabulary; name another"
      )
    room = home[other].learner.model.max_positions
    longest = home[name].row_buckets[-1]
    if longest > room:
      raise config_lib.ConfigError(
        f"{key} has {room} positions, and {name!r} has rows of {longest} "
        "tokens; allowed are at most as many; lower row_buckets and "
        "engine.max_length, or name another"
      )


# -- tasks and the team --------------------------------------------------------


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
    config_lib.blaming(where),
    usercode.blaming(doing, code=module.make, passes=(ValueError,)),
  ):
    made = module.make(source.split, **source.options)
    len(made), made.fingerprint, made.__getitem__  # what is asked of it
    return made


def stream(config: config_lib.Config) -> data.Stream:
  """The training tasks."""
  sources = config.data.sources
  made = {k: make_source(f"data.sources.{k}", k, s) for k, s in sources.items()}
  with config_lib.blaming("data.sources"):
    return data.Stream(
      made,
      config.seed,
      {key: source.weight for key, source in sources.items()},
    )


def team_rollout(
  config: config_lib.Config,
  backbones: Mapping[str, Backbone],
  stop: signals.Stop,
) -> rollout.Rollout:
  """The config's team over the backbones' samplers; `stop` may end it."""
  with config_lib.blaming("environment.options"):
    team = rollout.Team(config)
  return rollout.Rollout(
    team,
    {n: s for b in backbones.values() for n, s in b.samplers.items()},
    config,
    heartbeat=stop.check,
    remotes=remote.connect(config),
  )


def about(
  config: config_lib.Config, fingerprints: Mapping[str, str]
) -> dict[str, Any]:
  """What this process is made of; for the workdir and for results.

  Args:
    config: as it runs.
    fingerprints: of the data sets, by name.
  """
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
