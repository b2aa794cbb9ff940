"""Batches of updates that went wrong, kept for `--mode=replay --spike`.

    <workdir>/spikes/step_K/batch.npz    the groups of process 0 (`pack`), and
                            batch.1.npz  of the others, which send them to it
                            spike.json   `Spike`; it comes last

A spike is an update whose gradient is not finite, or of a norm far above those
of the steps before (`health.Monitor.spikes`). Its groups are kept as they were:
ids, log-probs at sampling, rewards. The weights that it was computed with are
kept only where a checkpoint has them: to copy them at every step would be the
price of knowing beforehand. So the newest checkpoint before a spike stays as
long as its batch does. That of step K - 1 gives the update bit for bit; an
earlier one gives it at earlier weights, and `--step K` plays the steps between
again to come to the weights themselves.
"""

import dataclasses
import io
import json
import pathlib
import shutil
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from drmas_jax import config as config_lib
from drmas_jax import hosts, writers
from drmas_jax.types import (
  Call,
  Episode,
  Fault,
  Group,
  Outcome,
  Reply,
  Task,
  Turn,
)

_FORMAT = 1
_IDS = ("prompt_ids", "completion_ids")
_LOGPROBS = ("sampler_logprobs", "log_kept_mass")


class Spike(NamedTuple):
  """What is known of one beside its batch; plain data.

  Attributes:
    step: K.
    policies: whose update it was.
    norms: by policy, of the step's gradients; those that are not finite are
      left out.
    checkpoint: the newest before it; None: there was none.
    cursor: of the stream, behind the step's tasks.
    averages: what the estimator had kept before the step.
  """

  step: int
  policies: Sequence[str]
  norms: Mapping[str, float]
  checkpoint: int | None
  cursor: int
  averages: Sequence[Sequence[float]]


class Spikes:
  """Those of a run.

  Args:
    workdir: of the run.
    limits: number and bytes.
    process: that of this host; the first one writes.
  """

  def __init__(
    self, workdir: pathlib.Path, limits: config_lib.Logging, process: int
  ):
    self._workdir, self._limits, self._process = workdir, limits, process
    self._kept: list[tuple[int, int | None]] = []  # (step, checkpoint)

  @property
  def state(self) -> list[list[int | None]]:
    """For the run's checkpoints."""
    return [list(pair) for pair in self._kept]

  @property
  def checkpoints(self) -> set[int]:
    """Steps whose checkpoints are to stay."""
    return {c for _, c in self._kept if c is not None}

  def save(self, spike: Spike, groups: Sequence[Group]) -> None:
    """Keeps one, and drops the oldest where there are too many; all hosts must
    enter it."""
    if not self._limits.spikes_kept:
      return
    data, limit = pack(groups), self._limits.spikes_mb
    sizes = hosts.agree("spike", {"bytes": len(data)})
    total = sum(s["bytes"] for s in sizes) / 1e6
    batches: list[bytes] = []
    if total <= limit:
      batches = hosts.to_first("spike", data)
    else:
      hosts.say(
        f"WARNING: the batch of step {spike.step}, a spike, is not kept: it "
        f"has {total:.0f} MB, and logging.spikes_mb={limit:g}"
      )
    if self._process == 0:
      self._write(spike, batches)
    self._kept.append((spike.step, spike.checkpoint))
    self._shorten()

  def _write(self, spike: Spike, batches: Sequence[bytes]) -> None:
    out = folder(self._workdir, spike.step)
    out.mkdir(parents=True, exist_ok=True)
    for host, batch in enumerate(batches):
      with writers.replacing(out / _name(host)) as file:
        file.write(batch)
    about = {"format": _FORMAT} | spike._asdict()
    writers.write_json(out / "spike.json", about)

  def go_on(self, state: Iterable[Sequence[int | None]]) -> None:
    """From the state of a checkpoint; what came after it is dropped."""
    self._kept = [(step, before) for step, before in state]
    self._shorten()

  def _shorten(self) -> None:
    most = self._limits.spikes_kept
    self._kept = self._kept[-most:] if most else []
    if self._process:
      return
    kept = {folder(self._workdir, step) for step, _ in self._kept}
    for path in (self._workdir / "spikes").glob("step_*"):
      if path not in kept:
        shutil.rmtree(path)


def folder(workdir: pathlib.Path, step: int) -> pathlib.Path:
  """Of the spike of a step."""
  return workdir / "spikes" / f"step_{step}"


def _name(process: int) -> str:
  return f"batch.{process}.npz" if process else "batch.npz"


def read(
  workdir: pathlib.Path, step: int
) -> tuple[Spike, Sequence[Sequence[Group]]]:
  """A spike and its groups, by the processes that had them.

  Raises:
    ConfigError: it is not there; it says which are.
  """
  where = folder(workdir, step)
  if not (where / "spike.json").exists():
    numbers = (
      p.parent.name.removeprefix("step_")
      for p in workdir.glob("spikes/step_*/spike.json")
    )
    known = ", ".join(map(str, sorted(map(int, numbers))))
    raise config_lib.ConfigError(
      f"--spike={step}: {workdir} has kept no batch of that step; allowed are "
      f"{known or 'none'}; --step={step} plays it again"
    )
  about = json.loads((where / "spike.json").read_text())
  if about.pop("format") != _FORMAT:
    raise config_lib.ConfigError(
      f"--spike={step}: {where} is of another version; use the one that wrote "
      "it"
    )
  batches: list[list[Group]] = []
  while (path := where / _name(len(batches))).exists():
    batches.append(unpack(path.read_bytes()))
  if not batches:
    raise config_lib.ConfigError(
      f"--spike={step}: its batch was larger than logging.spikes_mb, and not "
      f"kept; --step={step} plays it again"
    )
  return Spike(**about), batches


# -- groups as bytes -----------------------------------------------------------


def pack(groups: Sequence[Group]) -> bytes:
  """Groups as an .npz file: `json` (UTF-8, as uint8) with the place of each
  turn's arrays in `ids` [n] int32 and `logprobs` [2, n] float32.

  Numbers stay bit for bit; what JSON does not know (an answer of a user's own
  type, say) becomes text.
  """
  ids: list[np.ndarray] = []
  logprobs: list[np.ndarray] = []

  def plain(turn: Turn) -> dict[str, Any]:
    ids.extend(getattr(turn, name) for name in _IDS)
    logprobs.append(np.stack([getattr(turn, name) for name in _LOGPROBS]))
    said = {
      f.name: getattr(turn, f.name)
      for f in dataclasses.fields(turn)
      if f.name not in (*_IDS, *_LOGPROBS)
    }
    for name in ("reply", "fault", "call"):
      said[name] = said[name] and dataclasses.asdict(said[name])
    return said | {"lengths": [len(getattr(turn, name)) for name in _IDS]}

  found = [
    {
      "task": _fields(group.task),
      "episodes": [
        _fields(episode, "task")
        | {
          "turns": [plain(turn) for turn in episode.turns],
          "outcome": episode.outcome and _fields(episode.outcome),
          "fault": episode.fault and _fields(episode.fault),
        }
        for episode in group.episodes
      ],
    }
    for group in groups
  ]
  text = writers.json_line(found).encode(errors="backslashreplace")
  out = io.BytesIO()
  np.savez_compressed(
    out,
    json=np.frombuffer(text, np.uint8),
    ids=np.concatenate([np.zeros(0, np.int32), *ids]),
    logprobs=np.concatenate([np.zeros([2, 0], np.float32), *logprobs], axis=1),
  )
  return out.getvalue()


def _fields(value: Any, *without: str) -> dict[str, Any]:
  """One level of a dataclass."""
  return {
    f.name: getattr(value, f.name)
    for f in dataclasses.fields(value)
    if f.name not in without
  }


def unpack(data: bytes) -> list[Group]:
  """What `pack` was given."""
  with np.load(io.BytesIO(data)) as arrays:
    found = json.loads(arrays["json"].tobytes())
    ids, logprobs = arrays["ids"], arrays["logprobs"]
  at = [0, 0]  # of ids and of logprobs

  def turn(said: dict[str, Any]) -> Turn:
    prompt, completion = said.pop("lengths")
    ends = at[0] + prompt, at[0] + prompt + completion
    here = slice(at[1], at[1] + completion)
    for name, kind in (("reply", Reply), ("fault", Fault), ("call", Call)):
      said[name] = said[name] and kind(**said[name])
    made = Turn(
      **said,
      prompt_ids=ids[at[0] : ends[0]],
      completion_ids=ids[ends[0] : ends[1]],
      sampler_logprobs=logprobs[0, here],
      log_kept_mass=logprobs[1, here],
    )
    at[:] = ends[1], here.stop
    return made

  def episode(task: Task, said: dict[str, Any]) -> Episode:
    outcome, fault = said.pop("outcome"), said.pop("fault")
    turns = [turn(t) for t in said.pop("turns")]
    if outcome is not None:
      by_turn = outcome["turn_rewards"].items()
      outcome["turn_rewards"] = {int(i): r for i, r in by_turn}
      outcome = Outcome(**outcome)
    return Episode(
      task=task,
      turns=turns,
      outcome=outcome,
      fault=fault and Fault(**fault),
      **said,
    )

  groups = []
  for group in found:
    task = Task(**group["task"])
    episodes = [episode(task, said) for said in group["episodes"]]
    groups.append(Group(task, episodes))
  return groups
