"""Policies, and the team, behind OpenAI's chat completions.

    python -m drmas_jax.serve --workdir RUN [--step N|best]
    python -m drmas_jax.serve --policy NAME=FOLDER [--policy ..]
    python -m drmas_jax.serve --config configs/math_tiny.py
        [--host 127.0.0.1] [--port 8000] [--config.a.b=value ..]

Any client of that API can ask for a policy by its name (`model`), or for
"team": the config's orchestra plays the last user message as its task. The
sampler and the engine are those of training (`serving.loop`).

Exit codes: 0 after SIGTERM, 130 after Ctrl-C: no more is taken, and what was
taken is finished within --drain_s; 2 something asked for is not there or does
not fit, as for `main`.
"""

import argparse
import pathlib
import signal
import sys
from collections.abc import Sequence

from drmas_jax import hugepages

if __name__ == "__main__":
  hugepages.restart()

from drmas_jax import config as config_lib
from drmas_jax.main import overrides, set_environment

_CLOSE_S = 10.0  # for the last answers to be written


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m drmas_jax.serve",
    description="Serves policies and their team as OpenAI's chat completions.",
    epilog="Any key of the config: --config.policies.NAME.engine.num_slots=64",
    allow_abbrev=False,
  )
  what = parser.add_argument_group("what is served")
  what.add_argument(
    "--workdir", help="folder of a run: its policies at a checkpoint, its team"
  )
  what.add_argument(
    "--step",
    default="",
    help="--workdir's checkpoint, a number or 'best'; default: the newest",
  )
  what.add_argument(
    "--config",
    help="file with get_config(); default: that of --workdir",
  )
  what.add_argument(
    "--policy",
    action="append",
    default=[],
    metavar="NAME=FOLDER",
    help="a policy and its checkpoint, as in a config; with --config, in place "
    "of the one there",
  )
  how = parser.add_argument_group("how")
  how.add_argument("--host", default="127.0.0.1")
  how.add_argument("--port", type=int, default=8000, help="0: any free one")
  how.add_argument(
    "--timeout_s",
    type=float,
    default=600.0,
    help="limit of a request (default: %(default)g)",
  )
  how.add_argument(
    "--max_open",
    type=int,
    default=1024,
    help="choices asked for and not done, waiting ones included; more are "
    "refused with status 429 (default: %(default)d)",
  )
  how.add_argument(
    "--drain_s",
    type=float,
    default=30.0,
    help="limit of what is still answered after SIGTERM (default: %(default)g)",
  )
  return parser


def _config(
  args: argparse.Namespace, extra: Sequence[str]
) -> config_lib.Config:
  """The config that flags ask for.

  Raises:
    ConfigError: they do not fit together, or it is wrong.
  """
  _check_flags(args)
  named = dict(text.split("=", 1) for text in args.policy)
  if args.policy and not args.config:
    return config_lib.policies_alone(named, extra)
  path = args.config or pathlib.Path(args.workdir) / "config.json"
  if not args.config and not path.is_file():
    raise config_lib.ConfigError(
      f"--workdir={args.workdir}: holds no config.json; name the folder of a "
      "run, or add --config"
    )
  own = [f"policies.{name}.checkpoint={of!r}" for name, of in named.items()]
  return config_lib.read(path, [*own, *extra], "serve")


def _check_flags(args: argparse.Namespace) -> None:
  faults = []
  if not (args.workdir or args.config or args.policy):
    faults.append("nothing to serve; name a --workdir, --policy or --config")
  if args.workdir and args.policy:
    faults.append(
      "--policy: has no effect on the checkpoints of --workdir; remove one"
    )
  if args.workdir and not pathlib.Path(args.workdir).is_dir():
    faults.append(f"--workdir={args.workdir}: no such folder")
  if args.step and not args.workdir:
    faults.append("--step: has no effect without --workdir; remove it")
  names = [text.partition("=")[0] for text in args.policy]
  for name in {name for name in names if names.count(name) > 1}:
    faults.append(f"--policy={name}=..: is there twice; write each NAME once")
  for text in args.policy:
    name, _, folder = text.partition("=")
    if not name.isidentifier() or not folder or name == "team":
      faults.append(
        f"--policy={text}: write NAME=FOLDER, with letters, digits and _ in "
        "NAME, which may not be 'team'"
      )
  for name in ("timeout_s", "max_open", "drain_s"):
    value = getattr(args, name)
    if not 0 < value < float("inf"):
      faults.append(f"--{name}={value:g}: is out of range; write a value > 0")
  if not 0 <= args.port < 1 << 16:
    faults.append(f"--port={args.port}: allowed are 0 to 65535")
  if faults:
    raise config_lib.ConfigError("\n".join(faults))


def _serve(args: argparse.Namespace, config: config_lib.Config) -> int:
  """Until a signal; returns the exit code."""
  from drmas_jax import restoring, signals
  from drmas_jax.serving.door import Door

  try:
    door = Door(args.host, args.port)
  except OSError as e:
    raise config_lib.ConfigError(
      f"--host={args.host} --port={args.port}: {e}; name another"
    ) from e
  stop = signals.Stop(
    args.drain_s,
    "no more is taken, and what was taken is finished (for {grace_s:g} s at "
    "most)",
  )
  try:
    workdir = pathlib.Path(args.workdir) if args.workdir else None
    backbones, rollout = restoring.to_sample(config, workdir, args.step, stop)
    loop = open_door(args, config, backbones, rollout, door)
    print(
      f"drmas_jax: serves {', '.join(door.desk.models)} at {door.url}/v1",
      flush=True,
    )
    try:
      loop.run(lambda: stop.signal > 0, args.drain_s)
    finally:
      door.close(_CLOSE_S)
  finally:
    stop.close()
  return 130 if stop.signal == signal.SIGINT else 0


def open_door(args, config, backbones, rollout, door):
  """Opens the door to a loop, which is about to run."""
  from drmas_jax import sampling
  from drmas_jax.serving.answers import Codec, Desk
  from drmas_jax.serving.loop import Loop
  from drmas_jax.tokenizer import Tokenizer

  key = sampling.root_key(config.seed, "eval")
  codecs, samplers = {}, {}
  for backbone in backbones.values():
    backbone.sampler.engine.key = key
    samplers |= backbone.samplers
    policy = backbone.policy
    for name in backbone.names:
      own = Tokenizer.load(backbone.folder, policy.chat_template_kwargs)
      codecs[name] = Codec(own, policy.engine.max_length)
  loop = Loop(samplers, rollout, args.max_open)
  door.open(Desk(loop, codecs, rollout is not None, args.timeout_s))
  return loop


def main(argv: Sequence[str] | None = None) -> int:
  """Returns the exit code."""
  args, extra = _parser().parse_known_args(argv)
  try:
    config = _config(args, overrides(extra))
    if "team" in config.policies:
      raise config_lib.ConfigError(
        "policies.team: the name is that of the team itself; rename it"
      )
    set_environment()
    return _serve(args, config)
  except config_lib.ConfigError as e:
    print(f"drmas_jax: {e}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    return 130


if __name__ == "__main__":
  sys.exit(main())
