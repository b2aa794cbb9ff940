"""A run as it is watched: its files as they grow, alarms, waits too long.

What `--mode=train` and `--mode=sft` have in common.
"""

import pathlib
import sys
from collections.abc import Mapping

import jax

from drmas_jax import config as config_lib
from drmas_jax import health, hosts, report, writers
from drmas_jax.watchdog import Watchdog

_ALARMS = "alarms.jsonl"


def open_writer(
  config: config_lib.Config,
  workdir: pathlib.Path,
  total_steps: int,
  resume_from: int | None,
) -> writers.RunWriter:
  """What a run writes as it goes.

  Args:
    config: as it runs.
    workdir: of the run.
    total_steps: that it will have done.
    resume_from: what came behind this step is cut; None: it is a new run.

  Raises:
    ConfigError: a writer is not there.
    UserError: a writer cannot be made.
  """
  writer = writers.RunWriter(
    workdir,
    total_steps,
    names=config.logging.writers,
    config=config,
    transcripts_mb=config.logging.transcripts_mb,
    whole=config.logging.transcript_groups * config.data.group_size,
    resume_from=resume_from,
    primary=jax.process_index() == 0,
    extra=(report.Live(workdir),),
  )
  values = config_lib.to_dict(config)
  writer.write_json("config.json", values)
  if writer.primary:
    writers.truncate_after(workdir / _ALARMS, resume_from or 0)
  if resume_from is None:
    writer.write_hparams(config_lib.flatten(values))
  return writer


def tell(
  monitor: health.Monitor,
  writer: writers.RunWriter,
  step: int,
  found: Mapping[str, float],
) -> str:
  """Writes a step's metrics, and the alarms that they raise; returns why one of
  these ends the run, or "".

  Args:
    monitor: of the run.
    writer: likewise.
    step: that is done.
    found: its metrics, of all hosts.
  """
  seen = monitor.see(step, found)
  for alarm in seen.begun:
    hosts.say(f"ALARM at step {step}: {alarm.name}: {alarm.text}")
  if seen.begun and writer.primary:
    health.write(writer.workdir / _ALARMS, step, seen.begun)
  writer.write_scalars(step, {**found, **seen.metrics})
  return seen.stop


def watchdog(config: config_lib.Config, workdir: pathlib.Path) -> Watchdog:
  """Of this host; stacks are left by process 0, and said by others."""
  return Watchdog(
    workdir / "stacks" if jax.process_index() == 0 else None,
    factor=config.health.slow_factor,
    floor_s=config.health.slow_floor_s,
    say=lambda text: print(f"drmas_jax: {text}", file=sys.stderr, flush=True),
  )
