"""Held-out evaluation: k episodes of every question of every set.

    main        `--mode=eval`
    run         plays what is missing, each host its share -> Evaluation
    Evaluation  avg@k, maj@k and pass@k by set and over all sets, and by agent
    write       what is left for `compare` and for people

    <workdir>/eval/<label>/episodes.jsonl  a line an episode, once it has ended
                           transcripts.jsonl  of the first questions, whole
                           identity.json   what those episodes depend on
                           results.json    every verdict, and the summary
                           results.md      the summary as tables

What an episode says depends on the seed, the key of its set in the config, its
row and number, the weights, the team and the sampling. Which other sets there
are, how many hosts play, and where an evaluation was killed change nothing.
"""

import collections
import contextlib
import dataclasses
import functools
import pathlib
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from drmas_jax import (
  building,
  data,
  hosts,
  metrics,
  records,
  restoring,
  signals,
  transcripts,
  writers,
)
from drmas_jax import config as config_lib
from drmas_jax import manifest as manifests
from drmas_jax.backbone import Backbone
from drmas_jax.records import Key, Record, Store, sampling
from drmas_jax.rollout import Rollout
from drmas_jax.sampling import root_key
from drmas_jax.types import Episode, RunError, Stopped, Task, UserError

FORMAT = 1  # of results.json
MACRO = "macro"  # the mean over sets, among the names of the sets

Summary = dict[str, dict[str, metrics.Interval]]


# -- results ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Scores:
  """What the team did on one set.

  Attributes:
    questions: [P] rows of the set.
    success: [P, k] bool.
    ok: [P, k], False where an episode failed.
    answers: [P][k] for the vote; None where there was none.
  """

  questions: list[int]
  success: np.ndarray
  ok: np.ndarray
  answers: list[list[str | None]]

  def first(self, num_tasks: int, k: int) -> "Scores":
    return Scores(
      self.questions[:num_tasks],
      self.success[:num_tasks, :k],
      self.ok[:num_tasks, :k],
      [answers[:k] for answers in self.answers[:num_tasks]],
    )

  @property
  def answered(self) -> bool:
    """Whether any episode gave an answer."""
    return any(a is not None for answers in self.answers for a in answers)

  def by_question(self, vote: bool) -> dict[str, np.ndarray]:
    """{"avg@k": a score of each question that has one, "maj@k": .., ..}.

    pass@ has besides k itself each power of 4 below it.

    Args:
      vote: whether maj@ is there.
    """
    k = self.success.shape[1]
    found = {f"avg@{k}": metrics.avg_by_question(self.success, self.ok)}
    if vote:
      found[f"maj@{k}"] = metrics.maj_by_question(
        self.answers, self.success, self.ok
      )
    powers = (4**i for i in range(1, k.bit_length()))
    for few in (*(n for n in powers if n < k), k):
      found[f"pass@{few}"] = metrics.pass_by_question(
        self.success, few, self.ok
      )
    found = {name: values[~np.isnan(values)] for name, values in found.items()}
    return {name: values for name, values in found.items() if len(values)}


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """What the team did on the held-out sets.

  Attributes:
    k: episodes of each question.
    sets: by key.
    agents: {agent: {what: number}}, see `by_agent`.
    records: the episodes of this host.
    num_clocked: episodes in which a clock decided something.
    num_played: episodes that were played now, by all hosts.
    tokens_per_s: sampled now, by all hosts.
    seconds: how long it took now.
  """

  k: int
  sets: dict[str, Scores]
  agents: dict[str, dict[str, float]]
  records: list[Record]
  num_clocked: int
  num_played: int
  tokens_per_s: float
  seconds: float

  def first(self, num_tasks: int, k: int) -> "Evaluation":
    """The first k episodes of each set's first questions: what is compared
    with other evaluations that have no more. Agents stay those of the whole."""
    k = min(k, self.k)
    sets = {name: s.first(num_tasks, k) for name, s in self.sets.items()}
    return dataclasses.replace(self, k=k, sets=sets)

  def summary(self) -> Summary:
    """{set: {"avg@k": (mean, low, high), ..}}, and "macro": the mean over sets
    of what all of them have; {} if there is nothing. maj@ is there if any
    episode of any set gave an answer: a set without one has 0."""
    vote = any(s.answered for s in self.sets.values())
    scores = {name: s.by_question(vote) for name, s in self.sets.items()}
    found = {
      name: {what: metrics.bootstrap(v) for what, v in values.items()}
      for name, values in scores.items()
    }
    common = [w for w in next(iter(scores.values()), {}) if _in_all(w, scores)]
    if common:
      found[MACRO] = {
        what: metrics.bootstrap(*(values[what] for values in scores.values()))
        for what in common
      }
    return {name: values for name, values in found.items() if values}

  @functools.cached_property
  def score(self) -> float | None:
    """Mean avg@k over the sets; None if one of them has nothing."""
    averages = self.summary().get(MACRO)
    return None if averages is None else averages[f"avg@{self.k}"][0]

  def metrics(self) -> dict[str, float]:
    """Numbers for the writers: eval/avg@k over the sets, and by set where
    there are several; eval/<what>/<agent>."""
    summary = self.summary()
    found = {what: v[0] for what, v in summary.pop(MACRO, {}).items()}
    if len(self.sets) > 1:
      for name, values in summary.items():
        found |= {f"{name}/{what}": v[0] for what, v in values.items()}
    for agent, values in self.agents.items():
      found |= {f"{what}/{agent}": value for what, value in values.items()}
    failed = sum((~s.ok).sum() for s in self.sets.values())
    found |= {
      "episodes_failed/team": float(failed),
      "wall_clock_faults/team": float(self.num_clocked),
    }
    return {f"eval/{name}": float(value) for name, value in found.items()}


def _in_all(what: str, scores: Mapping[str, Mapping[str, Any]]) -> bool:
  return all(what in values for values in scores.values())


def rows(summary: Summary) -> dict[str, metrics.Interval]:
  """Flat, for a table: {"gsm8k avg@8": (mean, low, high), ..}; the mean over
  sets only where there are several."""
  alone = len(summary) == 2
  return {
    f"{name} {what}": value
    for name, values in summary.items()
    if not (alone and name == MACRO)
    for what, value in values.items()
  }


# -- by agent: counts that hosts add up, then numbers -------------------------

_JUDGED = [(right, approved) for right in (1, 0) for approved in (1, 0)]


def count(records: Collection[Record]) -> dict[str, dict[str, float]]:
  """{agent: {what: how often}}, over the episodes that did not fail; what
  remote policies took, over all of them."""
  found: dict[str, collections.Counter] = collections.defaultdict(
    collections.Counter
  )
  for record in records:
    for turn in record.turns:
      if turn.get("call"):
        found[turn["agent"]].update(calls=1, **turn["call"])
    if not record.ok:
      continue
    judges = set()
    for turn in record.turns:
      of = found[turn["agent"]]
      of["turns"] += 1
      of["tokens"] += turn["tokens"]
      of["valid"] += turn["valid"]
      of[turn["stop_reason"]] += 1
      judged = turn["verdict"] in ("approve", "reject")
      if judged and turn["agent"] not in judges:
        judges.add(turn["agent"])
        if "first_correct" in record.parts:
          right = int(record.parts["first_correct"])
          approved = int(turn["verdict"] == "approve")
          of[f"judged_{right}{approved}"] += 1
  return {agent: dict(counts) for agent, counts in found.items()}


def by_agent(
  counts: Mapping[str, Mapping[str, float]], num_episodes: int
) -> dict[str, dict[str, float]]:
  """{agent: {what: number}} from what all hosts counted.

  turns, tokens: of an episode. tokens_per_turn. valid, truncated (by
  max_tokens), closed (by a tag): shares of turns. Of an agent that approves or
  rejects, where the environment says whether the first solution was right (the
  part "first_correct"): `metrics.verdicts` of its first verdicts. Of an agent
  whose policy is remote: calls, and of these those failed and cached; retries
  behind them, and their cost.

  Args:
    counts: from `count`.
    num_episodes: that did not fail.
  """
  found = {}
  for agent, of in sorted(counts.items()):
    turns = of.get("turns", 0)
    if turns:
      found[agent] = {
        "turns": turns / num_episodes,
        "tokens": of["tokens"] / num_episodes,
        "tokens_per_turn": of["tokens"] / turns,
        "valid": of["valid"] / turns,
        "truncated": of.get("length", 0) / turns,
        "closed": of.get("tag", 0) / turns,
      }
    calls = ("calls", "failed", "cached", "retries", "cost")
    if "calls" in of:
      found.setdefault(agent, {}).update({n: float(of[n]) for n in calls})
    times = [of.get(f"judged_{r}{a}", 0) for r, a in _JUDGED]
    if sum(times):
      found[agent] |= metrics.verdicts(*np.repeat(_JUDGED, times, axis=0).T)
  return found


# -- playing ------------------------------------------------------------------


def extent(config: config_lib.Eval, final: bool) -> tuple[int, int]:
  """(tasks of each set, episodes of a task) of an evaluation."""
  if not final:
    return config.num_tasks, config.k
  return config.final_num_tasks or config.num_tasks, config.final_k or config.k


def run(
  rollout: Rollout,
  sets: Mapping[str, Sequence[Task]],
  config: config_lib.Config,
  key: jax.Array,
  k: int,
  store: Store | None = None,
) -> Evaluation:
  """Plays k episodes of every task, each host its share of the tasks.

  Args:
    rollout: with samplers that hold the weights.
    sets: held-out tasks by key, the same on every host.
    config: of the run.
    key: of purpose "eval". Each set is sampled with a key of its own, so that
      another set changes nothing in it.
    k: episodes of a task.
    store: what is in it is not played again, and what is played goes there.

  Raises:
    Stopped: a heartbeat gave it up, on this or on another host.
    UserError: the team's own code failed, on this or on another host.
  """
  began = time.monotonic()
  own = {name: hosts.share(tasks) for name, tasks in sorted(sets.items())}
  whole = rollout.team.scores_groups
  known = {} if store is None else _usable(store.records, own, k, whole)

  def transcript(episode: Episode) -> dict[str, Any] | None:
    if store is None or episode.task.index >= config.logging.transcript_groups:
      return None
    return transcripts.record(episode, store.step, "eval", rollout.decode)

  total = k * sum(map(len, own.values()))
  play = _Play(known, total, store, transcript)
  mine: dict[str, Any] = {"stopped": True, "broken": ""}
  with contextlib.closing(play), _told(mine):
    for name, tasks in own.items():
      rollout.collect(
        tasks,
        k,
        jax.random.fold_in(key, np.uint32(zlib.crc32(name.encode()))),
        config.eval.sampling,
        skip={(t.position, i) for t in tasks for i in play.done(t, k)},
        finished=play.finished,
      )
    mine = play.share(own, k)
  # Of hours, equal shares may differ by more than other waits may last.
  limit = config.placement.timeout_s + time.monotonic() - began
  shares = hosts.agree("evaluation", mine, limit)
  if broken := [s["broken"] for s in shares if s["broken"]]:
    raise UserError(broken[0])
  if any(s["stopped"] for s in shares):
    raise Stopped
  return _merge(shares, sets, k, play.records, time.monotonic() - began)


@contextlib.contextmanager
def _told(share: dict[str, Any]) -> Iterator[None]:
  """What ends an evaluation on one host goes into what it tells the others."""
  try:
    yield
  except Stopped:
    pass
  except UserError as e:
    share["broken"] = str(e)


def _usable(
  records: Mapping[Key, Record],
  sets: Mapping[str, Sequence[Task]],
  k: int,
  whole: bool,
) -> dict[Key, Record]:
  """Those that need not be played again: not those in which a clock decided;
  of an environment that scores whole groups, only whole groups."""
  found = {}
  for name, tasks in sets.items():
    for task in tasks:
      keys = [(name, task.index, i) for i in range(k)]
      keys = [x for x in keys if x in records and not records[x].clocked]
      if len(keys) == k or not whole:
        found |= {x: records[x] for x in keys}
  return found


class _Play:
  """The records of an evaluation under way, and its progress line."""

  _LINE_S = 10.0  # between lines where there is no terminal

  def __init__(
    self,
    known: dict[Key, Record],
    total: int,
    store: Store | None,
    transcript: Callable[[Episode], dict[str, Any] | None],
  ):
    self._records, self._store = dict(known), store
    self._transcript = transcript
    self._before = len(known)
    # Of what is played now.
    self._num = self._ok = self._won = self._tokens = 0
    self._began = self._said = time.monotonic()
    self._progress = None
    if total and jax.process_index() == 0:
      self._progress = writers.Progress(
        "held-out episode", total, first=self._before, keep=False
      )

  @property
  def records(self) -> list[Record]:
    return [self._records[key] for key in sorted(self._records)]

  def done(self, task: Task, k: int) -> list[int]:
    keys = ((task.source, task.index, i) for i in range(k))
    return [i for _, _, i in filter(self._records.__contains__, keys)]

  def finished(self, episode: Episode) -> None:
    record = Record.of(episode)
    self._records[record.key] = record
    self._num += 1
    self._ok += record.ok
    self._won += record.won
    self._tokens += record.tokens
    if self._store is not None:
      self._store.add(record, self._transcript(episode))
    if self._progress is None:
      return
    if self._num == 1:  # which compiles
      self._progress.count_from(len(self._records))
    now = time.monotonic()
    due = now - self._said >= self._LINE_S
    speed = self._tokens / max(now - self._began, 1e-9)
    success = self._won / max(self._ok, 1)
    text = f"success {success:.3f}  {speed:.0f} tokens/s"
    self._progress.show(len(self._records), text, due)
    if due:
      self._said = now

  def close(self) -> None:
    if self._progress is not None:
      self._progress.close()

  def share(self, own: Mapping[str, Sequence[Task]], k: int) -> dict[str, Any]:
    """What the other hosts need to know of this one's."""
    by_task = {
      name: [[self._records[name, t.index, i] for i in range(k)] for t in tasks]
      for name, tasks in own.items()
    }
    return {
      "stopped": False,
      "broken": "",
      "sets": {
        name: {
          "ok": [[int(r.ok) for r in group] for group in groups],
          "won": [[int(r.won) for r in group] for group in groups],
          "answers": [[r.answer for r in group] for group in groups],
        }
        for name, groups in by_task.items()
      },
      "counts": count(self._records.values()),
      "ok": sum(r.ok for r in self._records.values()),
      "clocked": sum(r.clocked for r in self._records.values()),
      "played": self._num,
      "tokens_per_s": self._tokens / max(time.monotonic() - self._began, 1e-9),
    }


def _merge(
  shares: Sequence[Mapping[str, Any]],
  sets: Mapping[str, Sequence[Task]],
  k: int,
  records: list[Record],
  seconds: float,
) -> Evaluation:
  """One evaluation from every host's share."""
  scores = {}
  for name, tasks in sorted(sets.items()):
    parts = [s["sets"][name] for s in shares]
    ok, won, answers = (
      _interleave([p[what] for p in parts]) for what in ("ok", "won", "answers")
    )
    scores[name] = Scores(
      [t.index for t in tasks],
      np.array(won, bool).reshape(-1, k),
      np.array(ok, bool).reshape(-1, k),
      answers,
    )
  counts: dict[str, collections.Counter] = collections.defaultdict(
    collections.Counter
  )
  for share in shares:
    for agent, of in share["counts"].items():
      counts[agent].update(of)
  return Evaluation(
    k=k,
    sets=scores,
    agents=by_agent(counts, sum(s["ok"] for s in shares)),
    records=records,
    num_clocked=sum(s["clocked"] for s in shares),
    num_played=sum(s["played"] for s in shares),
    tokens_per_s=sum(s["tokens_per_s"] for s in shares),
    seconds=seconds,
  )


def _interleave(shares: list[list[Any]]) -> list[Any]:
  """The hosts' shares (`hosts.share`) in the order of the tasks."""
  whole = [None] * sum(map(len, shares))
  for host, share in enumerate(shares):
    whole[host :: len(shares)] = share
  return whole


# -- what is left -------------------------------------------------------------


def write(
  folder: pathlib.Path,
  evaluation: Evaluation,
  config: config_lib.Config,
  step: int,
  policies: Mapping[str, str],
  manifest: Mapping[str, Any],
) -> str:
  """Writes results.json and results.md, by one process; returns the latter.

  Args:
    folder: made if it is not there; its name is the label.
    evaluation: of this config.
    config: of the run.
    step: of training.
    policies: {name: where its weights are from}.
    manifest: of this process.
  """
  result = {
    "format": FORMAT,
    "label": folder.name,
    "step": step,
    "k": evaluation.k,
    "sampling": sampling(config),
    "seed": config.seed,
    "policies": dict(policies),
    "deterministic": not evaluation.num_clocked,
    "wall_clock_faults": evaluation.num_clocked,
    "manifest": dict(manifest),
    "sources": {
      name: {
        "fingerprint": manifest["data"][f"eval/{name}"],
        "questions": scores.questions,
        "success": scores.success.astype(int),
        "ok": scores.ok.astype(int),
        "answers": scores.answers,
      }
      for name, scores in evaluation.sets.items()
    },
    "summary": evaluation.summary(),
    "agents": evaluation.agents,
  }
  folder.mkdir(parents=True, exist_ok=True)
  text = _report(result, evaluation)
  writers.write_json(folder / "results.json", result, indent=None)
  writers.write_text(folder / "results.md", text)
  return text


def _report(result: Mapping[str, Any], evaluation: Evaluation) -> str:
  """For people: tables by set and by agent, and how it was run."""
  parts = [f"# Evaluation of {result['label']}", _by_set(evaluation)]
  if evaluation.agents:
    parts.append(_agent_table(evaluation.agents))
  manifest = result["manifest"]
  drawn = ", ".join(
    f"{agent} temperature {s['temperature']:g}, top-p {s['top_p']:g}, "
    f"top-k {s['top_k'] or 'off'}"
    for agent, s in result["sampling"].items()
  )
  grader, devices = manifest["grader"], manifest["devices"]
  kept = sum(s.ok.size for s in evaluation.sets.values())
  kept -= evaluation.num_played
  lines = [
    f"{evaluation.k} episodes of each question, seed {result['seed']}; "
    f"95 % intervals by bootstrap over questions",
    f"sampling: {drawn}",
    "policies: "
    + ", ".join(f"{n} from {where}" for n, where in result["policies"].items()),
    f"environment: {grader['environment']}, version {grader['version']}",
    f"code: commit {manifest['commit'] or 'unknown'}"
    + (" with changes" if manifest["dirty"] else "")
    + "".join(f", {n} {v}" for n, v in manifest["versions"].items()),
    f"devices: {devices['count']} x {devices['kind']}",
    f"time: {evaluation.seconds:.0f} s for {evaluation.num_played} episodes at "
    f"{evaluation.tokens_per_s:.0f} tokens/s"
    + (f"; {kept} were there already" if kept else ""),
  ]
  failed = [r.fault for r in evaluation.records if r.fault and not r.ok]
  if failed:
    lines.append(
      "episodes that failed are left out and never count as wrong; the first: "
      f"{failed[0]['kind']}: {failed[0]['message']}"
    )
  if evaluation.num_clocked:
    lines.append(
      f"a time limit decided in {evaluation.num_clocked} episodes, so that the "
      "same command may come to another result"
    )
  parts.append("\n".join(f"- {line}" for line in lines))
  return "\n\n".join(parts) + "\n"


def _by_set(evaluation: Evaluation) -> str:
  summary = evaluation.summary()
  names = [*evaluation.sets, *([MACRO] if len(evaluation.sets) > 1 else [])]
  found = {what: None for values in summary.values() for what in values}
  table = []
  for name in names:
    scores = [s for n, s in evaluation.sets.items() if name in (n, MACRO)]
    values = summary.get(name, {})
    table.append(
      [
        name,
        str(sum(len(s.questions) for s in scores)),
        str(sum(int((~s.ok).sum()) for s in scores)),
        *(writers.shown(values[w]) if w in values else "-" for w in found),
      ]
    )
  return writers.markdown(("set", "questions", "failed", *found), table)


def _agent_table(agents: Mapping[str, Mapping[str, float]]) -> str:
  found = {what: None for values in agents.values() for what in values}
  rows = [
    [agent, *(_number(values[w]) if w in values else "-" for w in found)]
    for agent, values in agents.items()
  ]
  return writers.markdown(
    ("agent", *(w.replace("_", " ") for w in found)), rows
  )


def _number(value: float) -> str:
  return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


# -- the mode -----------------------------------------------------------------


def main(
  config: config_lib.Config,
  workdir: pathlib.Path,
  *,
  step: str = "",
  fresh: bool = False,
  processes: tuple[str | None, int | None, int | None] = (None, None, None),
) -> int:
  """`--mode=eval`: a checkpoint of the workdir, or the policies as they come
  where it has none, on the held-out sets; leaves <workdir>/eval/step_<N>.

  Args:
    config: checked.
    workdir: of the run.
    step: the checkpoint, a number or "best"; "": the newest.
    fresh: forget what was played before.
    processes: see `building.prepare`.

  Returns:
    The exit code.

  Raises:
    RunError: too many episodes failed.
  """
  config = building.begin(config, processes)
  tasks, fingerprints = held_out(config)
  flags = {"--workdir": str(workdir), "--step": step, "--fresh": fresh}
  hosts.check_alike("flags and data", flags | fingerprints)
  backbones = building.build(config, train=False)
  stop = signals.Stop(
    0.0, "the evaluation ends here, and what it has played is kept"
  )
  player = building.team_rollout(config, backbones, stop)
  try:
    done, origins = restoring.params(config, backbones, workdir, step)
    about = building.about(config, fingerprints)
    folder = records.folder(workdir, done)
    identity = _identity(config, backbones, player, about)
    with Store(folder, identity, fresh, done) as store:
      for backbone in backbones.values():
        backbone.resume()
      num, k = extent(config.eval, final=True)
      sets = {name: of[:num] for name, of in tasks.items()}
      key = root_key(config.seed, "eval")
      result = run(player, sets, config, key, k, store)
  except Stopped:
    hosts.say(f"{folder}: the same command goes on from there")
    return stop.exit_code
  finally:
    player.close()
    stop.close()
  if jax.process_index() == 0:
    print(write(folder, result, config, done, origins, about))
    manifests.write_patches(folder)
    print(
      f"{folder}: results.md, results.json, episodes.jsonl, transcripts.jsonl"
    )
  _check_lost(result, config.rollout.max_failed)
  return 0


def _identity(
  config: config_lib.Config,
  backbones: Mapping[str, Backbone],
  player: Rollout,
  about: Mapping[str, Any],
) -> dict[str, Any]:
  """What the episodes of a final evaluation depend on."""
  known = {
    name: (checksum, backbone.digest)
    for backbone in backbones.values()
    for name, checksum in backbone.checksums().items()
  }
  _, k = extent(config.eval, final=True)
  grouped = k if player.team.scores_groups else 0
  return records.identity(config, known, about, grouped)


def held_out(
  config: config_lib.Config,
) -> tuple[dict[str, list[Task]], dict[str, str]]:
  """The first tasks of each held-out set, no more than are ever played; and
  the sets' fingerprints. None where there are no evaluations."""
  most = max(extent(config.eval, final)[0] for final in (False, True))
  tasks, fingerprints = {}, {}
  for key, source in config.held_out.items() if most else ():
    where = f"eval.sources.{key}"
    if not config.eval.sources:
      where = f"eval.sources: empty, so data.sources.{key} gives its test split"
    made = building.make_source(where, key, source)
    with config_lib.blaming(where):
      tasks[key] = data.held_out(key, made, most)
    fingerprints[f"eval/{key}"] = made.fingerprint
  return tasks, fingerprints


def _check_lost(result: Evaluation, allowed: float) -> None:
  """What was lost counts as nothing (rule 6), so too much of it says nothing.

  Raises:
    RunError: it is more than `rollout.max_failed`.
  """
  lost = sum(int((~s.ok).sum()) for s in result.sets.values())
  total = sum(s.ok.size for s in result.sets.values())
  if lost > allowed * total:
    raise RunError(
      f"{lost} of {total} episodes failed; allowed is a share of "
      f"rollout.max_failed={allowed:g}; what failed, and what did not, is kept"
    )
