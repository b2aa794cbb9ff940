"""A training run from Python; see `drmas_jax.run`."""

import dataclasses
import gc
import json
import pathlib
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from drmas_jax import config as config_lib
from drmas_jax import main as command

Interval = tuple[float, float, float]


@dataclasses.dataclass(frozen=True)
class Result:
  """What a run came to.

  Attributes:
    workdir: its folder, absolute.
    metrics: {"step": n, name: number, ..} of every step, in their order, as in
      metrics.jsonl; those of step 0 are of the evaluation before the first.
    before, after: evaluations {set: {"avg@k": (mean, low, high), ..}}, with
      95 % intervals; without tasks to evaluate, {}.
    policies: by name, what the `checkpoint` of another config says to begin
      with them: "run:WORKDIR/NAME" of those that were trained, what the config
      said of those that were frozen.
  """

  workdir: pathlib.Path
  metrics: list[dict[str, float | None]]
  before: dict[str, dict[str, Interval]]
  after: dict[str, dict[str, Interval]]
  policies: dict[str, str]


def run(
  source: Any,
  workdir: str | pathlib.Path,
  allow_change: Sequence[str],
  changes: Mapping[str, Any],
) -> Result:
  """See `drmas_jax.run`."""
  config = config_lib.resolve(source, changes)
  workdir = pathlib.Path(workdir).expanduser().resolve()
  command.set_environment()  # before jax loads, if it has not
  from drmas_jax import coordinator

  try:
    code = coordinator.main(config, workdir, allow_change=allow_change)
  finally:
    gc.collect()  # what is on devices and in a cycle
  if code == 128 + signal.SIGINT:
    raise KeyboardInterrupt(f"saved in {workdir}")
  if code:
    raise SystemExit(code)
  return _result(config, workdir)


def _result(config: config_lib.Config, workdir: pathlib.Path) -> Result:
  summary = json.loads((workdir / "summary.json").read_text())
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  steps: dict[int, dict] = {}
  for record in map(json.loads, lines):
    steps.setdefault(record["step"], {}).update(record)
  policies = {
    name: f"run:{workdir}/{name}" if name in config.trained else p.checkpoint
    for name, p in config.policies.items()
    if p.remote is None
  }
  before, after = (
    {
      key: {what: tuple(values) for what, values in found.items()}
      for key, found in summary[when].items()
    }
    for when in ("before", "after")
  )
  return Result(
    workdir, [steps[n] for n in sorted(steps)], before, after, policies
  )
