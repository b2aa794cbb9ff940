"""The command: flags, distributed start, config -> a mode: train, eval, sft, ..

    python -m drmas_jax.main --config configs/math_tiny.py
        [--workdir DIR] [--mode train|eval|sft|check|replay]
        [--config.a.b=value ..]
        [--fork WORKDIR[@STEP]] [--allow_change KEY]  (training)
        [--step N|best] [--fresh]  (with --mode=eval)
        [--step N | --spike N]  (with --mode=replay)

Exit codes: 0 done; 2 the config, the checkpoint or the plan is wrong (one
message, before any device work where possible); 3 the run cannot go on; 130
Ctrl-C and 143 SIGTERM, after saving; 70 another process is gone or stuck (134,
from jax itself, where process 0 was killed).
"""

import argparse
import os
import pathlib
import re
import sys
import time
from collections.abc import Sequence

from drmas_jax import hugepages

if __name__ == "__main__":
  hugepages.restart()

from drmas_jax import caches, signals
from drmas_jax import config as config_lib
from drmas_jax.types import RunError

_START = time.monotonic()


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m drmas_jax.main",
    description="Reinforcement learning of multi-agent LLM teams (Dr. MAS).",
    epilog="Any key of the config: --config.steps=3, "
    "--config.policies.solver.optimizer.learning_rate=1e-4",
    allow_abbrev=False,
  )
  parser.add_argument("--config", required=True, help="file with get_config()")
  parser.add_argument(
    "--workdir",
    help="folder of the run; the default is runs/<config>, or runs/<folder> of "
    "a config.py; a run that is there already is resumed",
  )
  parser.add_argument(
    "--mode",
    default="train",
    choices=("train", "eval", "sft", "replay", "check"),
    help="check: one task with scripted completions, and no weights",
  )
  parser.add_argument(
    "--allow_change",
    action="append",
    default=[],
    metavar="KEY",
    help="a config key that may differ from the checkpoint's on resume",
  )
  parser.add_argument(
    "--step",
    default="",
    help="--mode=eval: the checkpoint, a number or 'best'; default: the newest;"
    " --mode=replay: the step that is played again",
  )
  parser.add_argument(
    "--spike",
    default="",
    help="--mode=replay: a step whose batch was kept, so that none is played",
  )
  parser.add_argument(
    "--fork",
    default="",
    metavar="WORKDIR[@STEP]",
    help="a new run that begins with a checkpoint of another one, the newest, "
    "that of a step, or '@best': weights, optimizer, place in the data",
  )
  parser.add_argument(
    "--fresh",
    action="store_true",
    help="--mode=eval: forget what an earlier evaluation played",
  )
  hosts = parser.add_argument_group("several processes")
  hosts.add_argument(
    "--coordinator_address", help="host:port of process 0, or auto"
  )
  hosts.add_argument("--num_processes", type=int)
  hosts.add_argument("--process_id", type=int)
  return parser


def overrides(extra: Sequence[str]) -> list[str]:
  """`--config.a.b=v` and `--config.a.b v` as `a.b=v`."""
  found, rest = [], list(extra)
  while rest:
    text = rest.pop(0)
    if not text.startswith("--config."):
      raise config_lib.ConfigError(
        f"{text}: unknown flag; see --help, or write --config.a.b=value"
      )
    if "=" not in text and rest and not rest[0].startswith("--"):
      text = f"{text}={rest.pop(0)}"
    found.append(text.removeprefix("--config."))
  return found


def _check_mode(args: argparse.Namespace) -> None:
  """Flags that another mode has no use for, and those that one needs."""
  for flag, modes in (
    ("step", ("eval", "replay")),
    ("spike", ("replay",)),
    ("fresh", ("eval",)),
    ("allow_change", ("train",)),
    ("fork", ("train",)),
  ):
    if getattr(args, flag) and args.mode not in modes:
      raise config_lib.ConfigError(
        f"--{flag}: has no effect with --mode={args.mode}; remove it, or use "
        f"{' or '.join(f'--mode={m}' for m in modes)}"
      )
  if args.mode == "replay" and bool(args.step) == bool(args.spike):
    raise config_lib.ConfigError(
      "--mode=replay: write either --step=N, a step to play again, or "
      "--spike=N, one whose batch lies in <workdir>/spikes"
    )
  for flag in ("step", "spike") if args.mode == "replay" else ():
    value = getattr(args, flag)
    if value and not re.fullmatch("0*[1-9][0-9]{0,17}", value):
      raise config_lib.ConfigError(
        f"--{flag}={value}: allowed is the number of a step, from 1"
      )


def _default_workdir(config: str, mode: str) -> str:
  suffix = "_sft" if mode == "sft" else ""
  path = pathlib.Path(config)
  name = path.resolve().parent.name if path.name == "config.py" else path.stem
  return f"runs/{name}{suffix}"


def set_environment() -> None:
  """What jax reads when it loads; a user's own settings stand.

  Compiled programs are kept in the user's cache folder. GPU kernels are asked
  to add in a fixed order: the same run gives the same bits (rule 26).
  """
  flag = "--xla_gpu_deterministic_ops"
  flags = os.environ.get("XLA_FLAGS", "")
  if flag not in flags:
    os.environ["XLA_FLAGS"] = f"{flags} {flag}=true".strip()
  os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(caches.folder("xla")))
  os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")


def main(argv: Sequence[str] | None = None) -> int:
  """Returns the exit code."""
  args, extra = _parser().parse_known_args(argv)
  try:
    mode = "train" if args.mode == "replay" else args.mode
    config = config_lib.read(args.config, overrides(extra), mode)
    _check_mode(args)
    workdir = args.workdir or _default_workdir(args.config, args.mode)
    if "://" in workdir:
      raise config_lib.ConfigError(
        f"--workdir={workdir}: not a folder; name one that all processes see, "
        "such as a mounted bucket or NFS"
      )
    set_environment()
    signals.listen()
    if args.mode == "check":
      from drmas_jax import check

      return check.main(config, _START)
    processes = (
      args.coordinator_address,
      args.num_processes,
      args.process_id,
    )
    # Heavy from here on: --help and a wrong config never get this far.
    if args.mode == "replay":
      from drmas_jax import replay

      return replay.main(
        config,
        pathlib.Path(workdir),
        int(args.step or args.spike),
        spike=bool(args.spike),
        processes=processes,
      )
    if args.mode == "eval":
      from drmas_jax import evaluate

      return evaluate.main(
        config,
        pathlib.Path(workdir),
        step=args.step,
        fresh=args.fresh,
        processes=processes,
      )
    if args.mode == "sft":
      from drmas_jax import sft

      return sft.main(config, pathlib.Path(workdir), processes=processes)
    from drmas_jax import coordinator

    return coordinator.main(
      config,
      pathlib.Path(workdir),
      allow_change=args.allow_change,
      fork=args.fork,
      processes=processes,
      start=_START,
    )
  except config_lib.ConfigError as e:
    print(f"drmas_jax: {e}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    print("drmas_jax: interrupted; nothing was saved", file=sys.stderr)
    return 130
  except RunError as e:
    print(f"drmas_jax: {e}", file=sys.stderr)
    return 3


if __name__ == "__main__":
  sys.exit(main())
