"""The episodes of an evaluation, as they are kept and gone on from.

    episodes.jsonl  a line an episode, once it has ended
    identity.json   what those episodes depend on

An evaluation that was killed plays what is not there, and nothing twice.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

import jax

from drmas_jax import config as config_lib
from drmas_jax import hosts, metrics, rewards, writers
from drmas_jax.types import Episode

FORMAT = 1  # of identity.json and of a line of episodes.jsonl

Key = tuple[str, int, int]  # set, row, episode


@dataclasses.dataclass(frozen=True)
class Record:
  """What is kept of an episode.

  Attributes:
    source: key of its set.
    index: row of the set.
    episode: 0 to k - 1.
    ok: it has an outcome; one that failed is never counted as wrong (rule 6).
    won: it has, and succeeded.
    answer: the outcome's, for the vote.
    parts: the outcome's.
    turns: {"agent", "tokens", "valid", "verdict", "stop_reason", "call"} of
      each; the last is for those of remote policies, otherwise null.
    fault: {"kind", "message"} of one that failed.
    clocked: a clock decided something, so it might come out otherwise.
  """

  source: str
  index: int
  episode: int
  ok: bool
  won: bool
  answer: str | None
  parts: dict[str, float]
  turns: list[dict[str, Any]]
  fault: dict[str, str] | None
  clocked: bool

  @property
  def key(self) -> Key:
    return (self.source, self.index, self.episode)

  @property
  def tokens(self) -> int:
    """Sampled here."""
    return sum(t["tokens"] for t in self.turns if t.get("call") is None)

  @classmethod
  def of(cls, episode: Episode) -> "Record":
    """What there is to keep of an episode that has ended."""
    ok, outcome, fault = rewards.ok(episode), episode.outcome, episode.fault
    return cls(
      source=episode.task.source,
      index=episode.task.index,
      episode=episode.index,
      ok=ok,
      won=ok and outcome.won,
      answer=outcome.answer if ok else None,
      parts={n: float(v) for n, v in outcome.parts.items()} if ok else {},
      turns=[
        {
          "agent": turn.agent,
          "tokens": turn.num_tokens,
          "valid": bool(turn.valid),
          "verdict": turn.reply and turn.reply.verdict,
          "stop_reason": turn.stop_reason,
          "call": turn.call
          and {
            "failed": turn.fault is not None,
            "cached": turn.call.cached,
            "retries": turn.call.retries,
            "cost": turn.call.cost,
          },
        }
        for turn in episode.turns
      ],
      fault=fault and {"kind": fault.kind, "message": fault.message},
      clocked=metrics.clocked(episode),
    )


def identity(
  config: config_lib.Config,
  policies: Mapping[str, tuple[str, str]],
  manifest: Mapping[str, Any],
  k: int,
) -> dict[str, Any]:
  """All that an episode depends on, as plain data.

  Slots, meshes and time limits are not in it (rule 26), nor is how many
  episodes and questions there are: more may be asked for later. An environment
  that scores whole groups sees k.

  Args:
    config: of the run.
    policies: {name: (checksum of its weights, digest of its tokenizer)}, of
      those that are sampled.
    manifest: `manifest.collect`, for what it says of grader and data.
    k: episodes of a task, where groups are scored whole; 0 elsewhere.
  """
  played = ("chat_template_kwargs", "rollout_dtype")
  training = (  # keys of an agent that no episode depends on
    *("invalid_penalty", "overlong_tokens", "overlong_penalty"),
    *("train", "loss_weight"),
  )
  return {
    "format": FORMAT,
    "seed": config.seed,
    "policies": {
      name: {
        **dict(zip(("weights", "tokenizer"), known, strict=True)),
        **{key: getattr(config.policies[name], key) for key in played},
        "max_length": config.policies[name].engine.max_length,
      }
      for name, known in policies.items()
    }
    | {
      name: {
        "base_url": remote.base_url,
        "model": remote.model,
        "options": config_lib.to_dict(remote.options),
      }
      for name, remote in config.remotes.items()
    },
    "agents": {
      name: _without(config_lib.to_dict(agent), *training)
      | {"sampling": sampling(config)[name]}
      for name, agent in config.agents.items()
    },
    "orchestra": config_lib.to_dict(config.orchestra),
    "grader": manifest["grader"],
    "group_size": k,
    "sources": {
      name: manifest["data"][f"eval/{name}"] for name in config.held_out
    },
  }


def sampling(config: config_lib.Config) -> dict[str, dict[str, float]]:
  """{agent: how its completions are drawn}."""
  return {
    name: config_lib.to_dict(config.eval.sampling or agent.sampling)
    for name, agent in config.agents.items()
  }


def _without(values: Mapping[str, Any], *keys: str) -> dict[str, Any]:
  return {k: v for k, v in values.items() if k not in keys}


def folder(workdir: pathlib.Path, step: int) -> pathlib.Path:
  """Of the evaluation of a step; 0: of policies as they come."""
  return workdir / "eval" / f"step_{step}"


def cut_after(workdir: pathlib.Path, step: int) -> None:
  """Drops evaluations of later steps, which a run that goes on plays anew."""
  for path in (workdir / "eval").glob("step_*"):
    number = path.name.removeprefix("step_")
    if number.isdigit() and int(number) > step:  # not a copy of the user's
      shutil.rmtree(path)


class Store:
  """The episodes of an evaluation on disk, shared by all hosts.

  Each host appends to files of its own and, at the start, reads the records of
  all. Some episodes are also kept whole, for people: `transcripts.jsonl`.

  Args:
    folder: of the evaluation; made if it is not there.
    identity: what its episodes depend on.
    fresh: forget what is there.
    step: of the weights.

  Raises:
    ConfigError: what is there is of another evaluation.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    identity: Mapping[str, Any],
    fresh: bool = False,
    step: int = 0,
  ):
    self.step = step
    path, host = folder / "identity.json", jax.process_index()
    identity = json.loads(json.dumps(identity))
    if host == 0:
      with _writable():
        folder.mkdir(parents=True, exist_ok=True)
        if fresh or not path.exists():
          old = [path, *folder.glob("episodes*.jsonl")]
          old += folder.glob("transcripts*.jsonl")
          old += folder.glob("results.*") if fresh else ()
          for file in old:
            file.unlink(missing_ok=True)
    hosts.check_folder(folder)
    if path.exists():
      identity = _same(json.loads(path.read_text()), identity, folder)
    self.records = _read(folder)
    hosts.agree("evaluation: read", {})
    suffix = f".{host}.jsonl" if host else ".jsonl"
    with _writable():
      if host == 0:
        writers.write_json(path, identity)
      self._lines, self._transcripts = (
        _appended(folder / f"{name}{suffix}")
        for name in ("episodes", "transcripts")
      )

  def add(self, record: Record, transcript: Any = None) -> None:
    """`transcript` is plain data; none: the episode's text is not kept."""
    if transcript is not None:
      self._transcripts.write(writers.json_line(transcript))
      self._transcripts.flush()
    self._lines.write(json.dumps(dataclasses.asdict(record)) + "\n")
    self._lines.flush()

  def __enter__(self) -> "Store":
    return self

  def __exit__(self, *_: Any) -> None:
    self._lines.close()
    self._transcripts.close()


@contextlib.contextmanager
def _writable() -> Iterator[None]:
  try:
    yield
  except OSError as e:
    raise config_lib.ConfigError(f"--workdir: {e}") from e


def _appended(path: pathlib.Path) -> TextIO:
  """A file of lines to go on with, without a last one that a kill cut short."""
  if path.exists():
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
  return open(path, "a", encoding="utf-8")


def _read(folder: pathlib.Path) -> dict[Key, Record]:
  """Of one that was played again, the episode in which no clock decided."""
  records: dict[Key, Record] = {}
  for path in sorted(folder.glob("episodes*.jsonl")):
    for line in path.read_bytes().splitlines(keepends=True):
      if line.endswith(b"\n"):
        record = Record(**json.loads(line))
        if record.key not in records or records[record.key].clocked:
          records[record.key] = record
  return records


def _same(
  old: Mapping[str, Any], new: Mapping[str, Any], folder: pathlib.Path
) -> dict[str, Any]:
  """The new identity with the sets of both.

  Raises:
    ConfigError: anything else differs, or a set that both have.
  """
  sources = {**old["sources"], **new["sources"]}
  before, now = (
    config_lib.flatten({**x, "sources": {**sources, **x["sources"]}})
    for x in (old, new)
  )
  faults = [
    f"{key}: was {before.get(key)!r} there, is now {now.get(key)!r}"
    for key in sorted({*before, *now})
    if before.get(key) != now.get(key)
  ]
  if faults:
    raise config_lib.ConfigError(
      f"{folder}: holds episodes of another evaluation, from which this one "
      "cannot go on; set back what differs, or give them up with --fresh, or, "
      "to keep both, name another --workdir (where checkpoint='run:WORKDIR/"
      "POLICY@STEP' is a policy that was trained in this one):\n"
      + "\n".join(faults)
    )
  return {**new, "sources": sources}
