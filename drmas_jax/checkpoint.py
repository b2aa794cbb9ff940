"""Checkpoints with Orbax, and what may change between a save and a resume.

One folder per step, written in the background and renamed into place when it
is whole, so that a kill leaves either all of a step or none of it:

    <workdir>/checkpoints/<step>/policy_<name>   a TrainState, readable alone
                                 run             JSON: `Run`

The last `keep` steps stay, the one with the highest score, and those that are
held for a spike (`spikes`).
"""

import contextlib
import dataclasses
import fnmatch
import functools
import json
import logging
import pathlib
import shutil
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from drmas_jax import config as config_lib
from drmas_jax import writers
from drmas_jax.types import RunError, TrainState

FORMAT = 1  # of `Run` and of the item names; raised when either changes

_log = logging.getLogger(__name__)


class FormatError(config_lib.ConfigError):
  """A checkpoint of another version of this package."""


@dataclasses.dataclass(frozen=True)
class Run:
  """What a checkpoint holds beside the policies; plain data only.

  Attributes:
    step: steps done.
    cursor: position in the task stream.
    config: the resolved config, `config.to_dict`.
    versions: number of updates behind each policy's weights.
    extra: for the coordinator.
    score: held-out success, higher is better; None claims nothing.
  """

  step: int
  cursor: int
  config: dict[str, Any]
  versions: dict[str, int]
  extra: dict[str, Any] = dataclasses.field(default_factory=dict)
  score: float | None = None


class Checkpoints:
  """The checkpoints of a workdir.

  With several processes, all of them call every method, and the workdir is on
  a file system that they share.

  Args:
    workdir: folder of the run.
    keep: how many of the newest stay.
    read_only: for a reader beside a run: nothing is cleaned, renamed, saved.
  """

  def __init__(
    self, workdir: str | pathlib.Path, keep: int = 2, read_only: bool = False
  ):
    import orbax.checkpoint as ocp  # 1 s

    self._ocp = ocp
    self._keep = keep
    self._read_only = read_only
    self.held: set[int] = set()  # steps that stay, too
    self._scores: dict[int, float | None] = {}
    self._folder = pathlib.Path(workdir).absolute() / "checkpoints"

  @functools.cached_property
  def _manager(self) -> Any:
    """Made when there is something to read or to save: a run that is refused
    at its start leaves no folder."""
    if not self._read_only:
      self._folder.mkdir(parents=True, exist_ok=True)
    absl = logging.getLogger("absl")
    level = absl.level
    try:
      if self._read_only:  # it warns that it is
        absl.setLevel(logging.ERROR)
      return self._ocp.CheckpointManager(
        self._folder,
        options=self._ocp.CheckpointManagerOptions(
          create=not self._read_only,
          read_only=self._read_only,
          cleanup_tmp_directories=not self._read_only,
        ),
      )
    finally:
      absl.setLevel(level)

  def save(self, run: Run, states: Mapping[str, TrainState]) -> None:
    """Copies the states to the host, and writes them in the background.

    The caller may donate the states as soon as this returns. A step that is
    already there is left as it is.

    Raises:
      RunError: this save could not begin, or the one before it failed.
    """
    self.wait()
    if run.step in self._manager.all_steps():
      self._add_score(run)
      return
    args = self._ocp.args
    record = {"format": FORMAT} | dataclasses.asdict(run)
    items = {_item(n): args.StandardSave(s) for n, s in states.items()}
    self._scores[run.step] = run.score
    # force: the policy of intervals is the caller's.
    with self._writing():
      self._manager.save(
        run.step,
        args=args.Composite(run=args.JsonSave(record), **items),
        force=True,
      )

  def wait(self) -> None:
    """Until the save under way is committed; then old steps are deleted."""
    steps = self.steps()
    if self._read_only:
      return
    kept = {*steps[-self._keep :], self.best(), *self.held}
    for step in steps:
      if step not in kept:
        self._manager.delete(step)

  @property
  def workdir(self) -> pathlib.Path:
    return self._folder.parent

  def close(self) -> None:
    self.wait()
    if "_manager" in vars(self):
      self._manager.close()

  def steps(self) -> list[int]:
    """Committed steps, rising."""
    if not self._folder.is_dir():
      return []
    with self._writing():
      self._manager.wait_until_finished()
    return sorted(self._manager.all_steps())

  @contextlib.contextmanager
  def _writing(self) -> Iterator[None]:
    try:
      yield
    except (OSError, ValueError) as e:  # the latter is tensorstore's
      what = str(e).partition("\n")[0]
      # Each of its many files would tell of the same.
      logging.getLogger("asyncio").setLevel(logging.CRITICAL)
      raise RunError(
        f"{self._folder}: a checkpoint could not be written: {what:.300}; see "
        "that there is room and that it may be written to, and start again: "
        "the run goes on from the last one that is whole"
      ) from e

  def has(self, step: int) -> bool:
    """Whether it is committed, also since `steps` has looked."""
    return (self._folder / str(step)).is_dir()

  def find(self, name: str) -> int:
    """The step that a number or "best" names.

    Raises:
      ValueError: it is not there; it says which are.
    """
    steps, best = self.steps(), self.best()
    named = {str(s): s for s in steps}
    if best is not None:
      named["best"] = best
    if name not in named:
      raise ValueError(
        f"{self._folder.parent}: has no step {name!r}; allowed are "
        f"{', '.join(named) or 'none'}"
      )
    return named[name]

  def best(self) -> int | None:
    """The step of the highest score; of equal ones the later."""
    scores = {s: self._score(s) for s in self.steps()}
    known = [(score, s) for s, score in scores.items() if score is not None]
    return max(known)[1] if known else None

  def run(self, step: int | None = None) -> Run | None:
    """The record of a step; without one, of the newest that can be read.

    Raises:
      ConfigError: where there are checkpoints and none can be read.
    """
    if step is not None:
      return self._read(step, {})[1]
    failed: dict[int, str] = {}
    for step in reversed(self.steps()):
      try:
        return self._read(step, {})[1]
      except FormatError:
        raise
      except Exception as e:
        failed[step] = _brief(e)
        _log.warning("checkpoint %s: %s", self._folder / str(step), _brief(e))
    if failed:
      raise self._unreadable(failed)
    return None

  def restore(
    self, abstract: Mapping[str, TrainState], step: int | None = None
  ) -> tuple[dict[str, TrainState], Run] | None:
    """The newest checkpoint that can be read, laid out as `abstract` says.

    Args:
      abstract: by policy, a TrainState of `jax.ShapeDtypeStruct` with the
        sharding wanted, whatever mesh it was saved from.
      step: that one and no other, which `find` has found.

    Returns:
      States and record; None where there is no checkpoint. Newer ones that
      could not be read, on one host or on all, are renamed to `<step>.broken`.

    Raises:
      ConfigError: where there are checkpoints and none can be read.
    """
    failed: dict[int, str] = {}
    steps = reversed(self.steps()) if step is None else [step]
    for step in steps:
      restored, fault = None, ""
      try:
        restored = self._read(step, abstract)
      except FormatError:
        raise
      except Exception as e:
        fault = _brief(e)
      if fault := _on_any_host(fault):
        failed[step] = fault
        continue
      self._set_aside(failed, step)
      return restored
    if failed:
      raise self._unreadable(failed)
    return None

  def _unreadable(self, failed: Mapping[int, str]) -> Exception:
    newest = max(failed)
    return config_lib.ConfigError(
      f"{self._folder}: none of the checkpoints {sorted(failed)} can be "
      f"read; the newest, {newest}: {failed[newest]}; if it was made "
      "with another config or version, use that one, or start a new --workdir"
    )

  def restore_params(self, step: int, name: str, abstract: Any) -> Any:
    """One policy's weights of one step; nothing else is read.

    Args:
      step: a committed one.
      name: of the policy.
      abstract: the tree of parameters, or some branches of it, as
        `jax.ShapeDtypeStruct`: laid out by its sharding, or on the host as
        numpy where it has none.
    """
    import jax

    def restore_args(x):
      if x.sharding is None:
        return self._ocp.RestoreArgs(restore_type=np.ndarray)
      return self._ocp.ArrayRestoreArgs(
        sharding=x.sharding, global_shape=x.shape
      )

    tree = {"params": abstract}
    args = self._ocp.args.PyTreeRestore(
      item=tree,
      restore_args=jax.tree.map(restore_args, tree),
      partial_restore=True,
    )
    # Not the manager: it reads an item in one way only, here as a whole.
    handler = self._ocp.PyTreeCheckpointHandler()
    with self._ocp.Checkpointer(handler) as reader:
      item = self._folder / str(step) / _item(name)
      return reader.restore(item, args=args)["params"]

  def _read(
    self, step: int, abstract: Mapping[str, TrainState]
  ) -> tuple[dict[str, TrainState], Run]:
    args = self._ocp.args
    # The record first, alone: it says whether the rest can be understood.
    record = self._manager.restore(
      step, args=args.Composite(run=args.JsonRestore())
    )["run"]
    if record["format"] != FORMAT:
      raise FormatError(
        f"{self._folder / str(step)}: format {record['format']}, and this "
        f"version reads {FORMAT}; use the version that wrote it"
      )
    run = Run(**{k: v for k, v in record.items() if k != "format"})
    if not abstract:
      return {}, run
    items = {_item(n): args.StandardRestore(s) for n, s in abstract.items()}
    restored = self._manager.restore(step, args=args.Composite(**items))
    return {name: restored[_item(name)] for name in abstract}, run

  @property
  def _late_scores(self) -> pathlib.Path:
    return self._folder.with_name("scores.json")

  def _add_score(self, run: Run) -> None:
    """A step that was saved before it was evaluated, by a run that was stopped
    in between, gets its score beside the checkpoint."""
    import jax

    if run.score is None or self._score(run.step) is not None:
      return
    self._scores[run.step] = run.score
    if jax.process_index() == 0:
      known = {str(k): v for k, v in self._scores.items() if v is not None}
      writers.write_json(self._late_scores, known)

  def _score(self, step: int) -> float | None:
    if self._late_scores.is_file() and self._scores.get(step) is None:
      late = {}
      with contextlib.suppress(ValueError):  # cut short: no claim on best
        late = json.loads(self._late_scores.read_text())
      if str(step) in late:
        self._scores[step] = late[str(step)]
    if step not in self._scores:
      try:
        self._scores[step] = self._read(step, {})[1].score
      except Exception:  # half deleted or broken: no claim on best
        self._scores[step] = None
    return self._scores[step]

  def _set_aside(self, failed: Mapping[int, str], good: int) -> None:
    """Renames broken steps, so that they can be saved again."""
    for step, fault in failed.items():
      _log.warning(
        "checkpoint %s cannot be read (%s); going on from step %d",
        self._folder / str(step),
        fault,
        good,
      )
    if not failed or self._read_only:
      return
    import jax

    from drmas_jax import hosts

    if jax.process_index() == 0:
      for step in failed:
        aside = self._folder / f"{step}.broken"
        shutil.rmtree(aside, ignore_errors=True)
        (self._folder / str(step)).rename(aside)
    hosts.agree("checkpoints set aside", {})
    self._manager.reload()


def _on_any_host(fault: str) -> str:
  """What went wrong here, or else on the first host where something did."""
  from drmas_jax import hosts

  faults = [s["fault"] for s in hosts.agree("restored", {"fault": fault})]
  where = next((h for h, text in enumerate(faults) if text), None)
  return fault or ("" if where is None else f"host {where}: {faults[where]}")


def _item(policy: str) -> str:
  return f"policy_{policy}"  # Orbax's item names hold no slash


def _brief(error: Exception) -> str:
  text = " ".join(str(error).split())
  return f"{type(error).__name__}: {text[:300]}"


# -- the policies of another run -----------------------------------------------


class SavedPolicy:
  """A trained policy as a run's checkpoints hold it.

  Args:
    workdir: of the run.
    policy: its name there.
    step: a number, "best", or "" for the newest.

  Raises:
    ValueError: there is no such run or policy in it, and which there are.
  """

  def __init__(self, workdir: str | pathlib.Path, policy: str, step: str = ""):
    self._checkpoints = Checkpoints(
      pathlib.Path(workdir).expanduser(), read_only=True
    )
    self._step = step
    self.workdir, self.policy = workdir, policy
    run = self._checkpoints.run()
    if run is None:
      raise ValueError(
        f"{workdir}: holds no checkpoint; name the --workdir of a run that has "
        "saved one"
      )
    policies = run.config["policies"]
    trained = [
      n
      for n, p in sorted(policies.items())
      if not p["frozen"] and not p.get("remote")
    ]
    if policy in policies and policies[policy]["frozen"]:
      raise ValueError(
        f"{workdir}: policy {policy!r} is frozen, so its weights are those of "
        f"{policies[policy]['checkpoint']!r}; use that checkpoint itself"
      )
    if policy not in trained:
      raise ValueError(
        f"{workdir}: trains no policy {policy!r}; allowed are "
        f"{', '.join(trained)}"
      )
    # Neither ever changes on resume, so those of any step do.
    self.checkpoint: str = policies[policy]["checkpoint"]
    # Of an adapter on it, what `config.Adapter` holds; runs from before there
    # were adapters have none.
    self.adapter: dict[str, Any] | None = policies[policy].get("adapter")
    self.digest: str = run.extra["folders"][policy]
    self._newest = run.step

  @classmethod
  def parse(cls, name: str) -> "SavedPolicy":
    """ "run:WORKDIR/POLICY" or "run:WORKDIR/POLICY@STEP"."""
    workdir, _, last = name.removeprefix("run:").rpartition("/")
    policy, at, step = last.partition("@")
    if not workdir or not policy or bool(at) != bool(step):
      raise ValueError(
        f"{name}: write run:WORKDIR/POLICY, run:WORKDIR/POLICY@STEP or "
        "run:WORKDIR/POLICY@best"
      )
    return cls(workdir, policy, step)

  @functools.cached_property
  def step(self) -> int:
    """The step meant.

    Raises:
      ValueError: it is not there; names those that are.
    """
    return self._checkpoints.find(self._step) if self._step else self._newest

  def restore(self, abstract: Any) -> Any:
    """Its weights, as `Checkpoints.restore_params`.

    Raises:
      ValueError: they cannot be read.
    """
    step = self.step
    try:
      return self._checkpoints.restore_params(step, self.policy, abstract)
    except Exception as e:
      steps = ", ".join(map(str, self._checkpoints.steps()))
      raise ValueError(
        f"{self}: cannot be read: {_brief(e)}; name another step of {steps}"
      ) from e

  @property
  def pinned(self) -> str:
    """Its name with a step's number in it, as the run may go on."""
    step = self._step if self._step.isdigit() else self.step
    return f"run:{self.workdir}/{self.policy}@{step}"

  def __str__(self) -> str:
    name = f"run:{self.workdir}/{self.policy}"
    return f"{name}@{self._step}" if self._step else name


# -- a run that begins where another one was -----------------------------------

_FORK = "fork.json"


class Fork(NamedTuple):
  """The checkpoint that a run began with.

  Attributes:
    workdir: of the other run, absolute.
    step: a committed one of it.
    asked: the step as it was written: "", "best" or a number.
  """

  workdir: str
  step: int
  asked: str

  @classmethod
  def find(cls, name: str) -> "Fork":
    """What `--fork=WORKDIR`, `WORKDIR@STEP` or `WORKDIR@best` means now.

    Raises:
      ConfigError: there is no such run, or no such step in it.
    """
    workdir, asked = _split(name)
    checkpoints = Checkpoints(workdir, read_only=True)
    try:
      steps = checkpoints.steps()
      if not steps:
        raise ValueError(f"{workdir}: holds no checkpoint to begin with")
      step = checkpoints.find(asked) if asked else steps[-1]
    except ValueError as e:
      raise config_lib.ConfigError(f"--fork={name}: {e}") from e
    return cls(workdir, step, asked)

  @classmethod
  def of(cls, workdir: pathlib.Path, name: str) -> "Fork | None":
    """That of a workdir whose run has begun or is to begin, with --fork=NAME or
    without ("").

    Raises:
      ConfigError: the run that is there did not begin so.
    """
    path = workdir / _FORK
    known = cls(**json.loads(path.read_text())) if path.exists() else None
    if not name:
      return known
    if known is None:
      if (workdir / "config.json").exists():
        raise config_lib.ConfigError(
          f"--fork={name}: --workdir={workdir} holds a run that began without "
          "it; leave the flag out to go on with that run, or name a new "
          "--workdir"
        )
      return cls.find(name)
    if _split(name) not in (
      (known.workdir, known.asked),
      (known.workdir, str(known.step)),
    ):
      raise config_lib.ConfigError(
        f"--fork={name}: the run in --workdir={workdir} began at step "
        f"{known.step} of {known.workdir}; leave the flag out to go on with "
        "it, or name a new --workdir"
      )
    return known

  def write(self, workdir: pathlib.Path) -> None:
    """Before anything else of the run is there."""
    workdir.mkdir(parents=True, exist_ok=True)
    writers.write_json(workdir / _FORK, self._asdict())

  @property
  def checkpoints(self) -> Checkpoints:
    return Checkpoints(self.workdir, read_only=True)


def _split(name: str) -> tuple[str, str]:
  """(absolute workdir, step) of WORKDIR[@STEP]."""
  workdir, at, step = name.rpartition("@")
  if not at or not (step == "best" or step.isdigit()):  # a folder with an @
    workdir, step = name, ""
  return str(pathlib.Path(workdir).expanduser().resolve()), step


# -- what may change on resume (rule 25) ---------------------------------------

Kind = Literal["free", "guarded", "never"]

_FREE = (
  *("steps", "eval", "logging", "checkpoint", "placement", "rollout"),
  "health",
  "sft",  # of another mode
)
_NEVER = (
  "policies.*.checkpoint",
  "policies.*.compute_dtype",
  "policies.*.frozen",
  "policies.*.adapter.rank",
  "policies.*.adapter.alpha",
  "policies.*.adapter.targets",
  "policies.*.adapter",
  "agents.*.role",
  "agents.*.policy",
  "agents.*.template",
  "orchestra.name",
)
_FREE_OF_REMOTE = (
  *("policies.*.remote.concurrency", "policies.*.remote.timeout_s"),
  *("policies.*.remote.key_env", "policies.*.remote.cache"),
  "policies.*.remote.*_price",
)
_ABSENT = "(absent)"


@dataclasses.dataclass(frozen=True)
class Change:
  """A key of the config whose value is not that of the checkpoint."""

  key: str
  old: Any
  new: Any
  kind: Kind


def compare_config(
  saved: Mapping[str, Any],
  now: Mapping[str, Any],
  allow: Collection[str] = (),
  fork: bool = False,
) -> list[Change]:
  """What a resumed run changes, all of it allowed.

  Number of steps, evaluation, logging, checkpointing, placement and rollout
  limits change freely; the team and the shape of its policies never; any other
  key only where `allow` names it or a group above it.

  Args:
    saved: `config.to_dict` of the checkpoint's config (`Run.config`).
    now: that of this run's.
    allow: keys given by --allow_change.
    fork: into a workdir of its own, where all but the last kind is free.

  Raises:
    ConfigError: with every change refused, one line each.
  """
  changes = changes_between(saved, now)
  faults = [
    f"allow_change={key}: no such key in the config; write one such as "
    "policies.NAME.optimizer"
    for key in allow
    if not any(_under(k, key) for k in config_lib.flatten(now))
  ]
  for c in changes:
    what = f"{c.key}: was {c.old!r} in the checkpoint, is now {c.new!r}"
    if c.kind == "never":
      faults.append(
        f"{what}; it cannot change on resume; write it back, or "
        "start a new --workdir"
      )
    elif c.kind == "guarded" and not (
      fork or any(_under(c.key, a) for a in allow)
    ):
      faults.append(f"{what}; write it back, or pass --allow_change={c.key}")
  if faults:
    raise config_lib.ConfigError("\n".join(faults))
  return changes


def changes_between(
  saved: Mapping[str, Any], now: Mapping[str, Any]
) -> list[Change]:
  """All that two configs (`config.to_dict`) do not have in common."""
  changes, old, new = [], dict(saved), dict(now)
  for group in ("policies", "agents"):
    common = sorted(set(old[group]) & set(new[group]))
    if set(old[group]) != set(new[group]):
      names = sorted(old[group]), sorted(new[group])
      changes.append(Change(group, *names, "never"))
    old[group] = {n: old[group][n] for n in common}
    new[group] = {n: new[group][n] for n in common}
  # An empty group has no value of its own.
  old, new = (
    {k: v for k, v in config_lib.flatten(tree).items() if v != {}}
    for tree in (old, new)
  )
  for key in sorted({*old, *new}):
    before, after = old.get(key, _ABSENT), new.get(key, _ABSENT)
    if before == _ABSENT and after is None:
      continue  # a key that the version of the checkpoint did not have
    if before != after:
      changes.append(Change(key, before, after, kind_of(key)))
  return changes


def kind_of(key: str) -> Kind:
  """Whether a key of the config may change on resume."""
  if any(fnmatch.fnmatchcase(key, p) for p in _NEVER):
    return "never"
  if any(_under(key, p) for p in _FREE):
    return "free"
  if any(fnmatch.fnmatchcase(key, p) for p in _FREE_OF_REMOTE):
    return "free"
  return "guarded"


def _under(key: str, group: str) -> bool:
  return key == group or key.startswith(f"{group}.")
