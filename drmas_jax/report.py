"""report.html: a run on one page that opens offline in a browser.

    python -m drmas_jax.report WORKDIR    of a run that is under way, or ended

A training run rewrites its page as it goes (`Live`). It is made of what lies in
the workdir and of nothing else:

    metrics.jsonl                curves, time, memory; thinned out
    alarms.jsonl                 {"step", "name", "agent", "text"} a line
    transcripts/*.jsonl          episodes of the newest step
    config.json changes.json manifest.json summary.json

Nothing is loaded from elsewhere, and what a model, a data set or a file says
stays text (`charts`).
"""

import argparse
import datetime
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from drmas_jax import config as config_lib
from drmas_jax import manifest, transcripts, writers
from drmas_jax.charts import (
  Chart,
  Html,
  Line,
  bar,
  document,
  figure,
  folded,
  join,
  number,
  section,
  table,
  tag,
)

NAME = "report.html"

_EPISODES = 6
_TEXT = 4000  # characters of a text that are shown
_TAIL = 4_000_000  # bytes at the end of the transcripts that are looked at
_GB = 1e9

Metrics = Mapping[str, tuple[np.ndarray, np.ndarray]]


class Live(writers.Writer):
  """Keeps the page of a run up to date, in a small part of its time.

  A rewrite that took t seconds is followed by none for t / `share`, but for the
  one at the end. It belongs behind the writer of metrics.jsonl.

  Args:
    workdir: of the run.
    share: of the time that goes by.
    clock: seconds, for tests.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    share: float = 0.01,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._workdir, self._share, self._clock = workdir, share, clock
    self._next = -math.inf

  def flush(self):
    if self._clock() >= self._next:
      self.close()

  def close(self):
    began = self._clock()
    write(self._workdir)
    ended = self._clock()
    self._next = ended + (ended - began) / self._share


def write(workdir: pathlib.Path) -> pathlib.Path:
  """Writes the page of a run into its workdir.

  Raises:
    OSError: there is no metrics.jsonl, or the page cannot be written.
  """
  path = workdir / NAME
  # What UTF-8 cannot hold (half of a surrogate pair) becomes "?".
  text = page(workdir).encode(errors="replace").decode()
  writers.write_text(path, text)
  return path


# -- what the charts are of ----------------------------------------------------


class _Curves(NamedTuple):
  """A chart of all metrics whose name is `pattern`; see `charts.Chart`."""

  title: str
  pattern: str
  scale: str
  note: str


_AGENT = "([^/]+)"
_NORM = _Curves(
  "Gradient norm by policy", f"grad_norm/{_AGENT}", "log", "Before clipping."
)
_SHARED = _Curves(
  "Gradient norm by agent",
  f"grad_norm/[^/]+/{_AGENT}",
  "log",
  "Of its own part of the loss.",
)
_CURVES = (
  _Curves(
    "Held-out score",
    r"eval/((?:\w+/)?(?:avg|maj|pass)@\d+)",
    "share",
    "On questions that are never trained on.",
  ),
  _Curves(
    "Reward (training)",
    f"reward/{_AGENT}",
    "linear",
    "Mean over the episodes of a step.",
  ),
  _Curves("Loss by policy", f"loss/{_AGENT}", "linear", "As it is minimised."),
  _NORM,
  _SHARED,
  _Curves(
    "kappa",
    f"kappa/{_AGENT}",
    "linear",
    "How much the team's baseline would inflate the squared norm of an "
    "agent's gradient; 1: not at all.",
  ),
  _Curves("Valid turns", f"valid/{_AGENT}", "share", "The share that parses."),
  _Curves(
    "Truncated turns",
    f"truncated/{_AGENT}",
    "share",
    "The share that was cut at max_tokens.",
  ),
  _Curves(
    "Length of completions [tokens]",
    f"completion_length/{_AGENT}",
    "linear",
    "Mean over turns.",
  ),
  _Curves(
    "Entropy [nats per token]",
    f"entropy/{_AGENT}",
    "linear",
    "At 0 an agent always says the same.",
  ),
  _Curves(
    "Log-prob gap of learner and sampler",
    f"logprob_gap/{_AGENT}",
    "log",
    "Mean difference of a token; rounding, if all is well.",
  ),
  _Curves(
    "Groups with equal scores",
    f"zero_variance_groups/{_AGENT}",
    "linear",
    "An agent learns nothing from them.",
  ),
  _Curves(
    "Held-out verdicts",
    "eval/((?:approve|reject)_recall/[^/]+)",
    "share",
    "The shares of right solutions approved, and of wrong ones rejected.",
  ),
)


def _charts(metrics: Metrics, config: Mapping[str, Any]) -> list[Chart]:
  looks, shared = _looks(config), _shared(config)
  # A run of an earlier version has no such keys.
  health = config.get("health", {"norm_spike": 3.0, "window": 20})
  spikes = {"factor": health["norm_spike"], "window": health["window"]}
  found = []
  for curves in _CURVES:
    if curves is _SHARED and not shared:
      continue  # it says what the policy's norm does
    series = writers.matching(metrics, curves.pattern)
    lines = [
      Line(name, *values, looks.get(name, i))
      for i, (name, values) in enumerate(series.items(), 1)
    ]
    marked = spikes if curves is _NORM else {}
    chart = Chart(curves.title, curves.note, curves.scale, lines, **marked)
    found.append(chart)
  found += _confusion(metrics)
  return [chart for chart in found if chart.lines]


def _looks(config: Mapping[str, Any]) -> dict[str, int]:
  """The same agent looks the same everywhere."""
  names = [*config.get("agents", {}), *config.get("policies", {})]
  return {"team": 0} | {n: i for i, n in enumerate(dict.fromkeys(names), 1)}


def _shared(config: Mapping[str, Any]) -> bool:
  """Whether agents share a policy."""
  policies = [agent["policy"] for agent in config.get("agents", {}).values()]
  return len(set(policies)) < len(policies)


def _confusion(metrics: Metrics) -> list[Chart]:
  """By judge, the four kinds of its verdicts, as shares of them."""
  found = []
  kinds = (
    "right_approved",
    "right_rejected",
    "wrong_approved",
    "wrong_rejected",
  )
  for agent in writers.matching(metrics, r"verdict_right_approved/([^/]+)"):
    series = [metrics[f"verdict_{kind}/{agent}"] for kind in kinds]
    counts = np.array([values for _, values in series])
    total = np.maximum(counts.sum(axis=0), 1)
    lines = [
      Line(f"solution {kind.replace('_', ', ')}", steps, values / total, i + 1)
      for i, (kind, (steps, values)) in enumerate(
        zip(kinds, series, strict=True)
      )
    ]
    note = "Shares of its first verdicts, by whether the solution was right."
    found.append(Chart(f"Verdicts of {agent} (training)", note, "share", lines))
  return found


# -- the page ------------------------------------------------------------------


def page(workdir: pathlib.Path) -> str:
  """The page of a run, as its files are now.

  Raises:
    OSError: there is no metrics.jsonl.
  """
  metrics = writers.read_metrics(workdir / "metrics.jsonl")
  config = _json(workdir / "config.json", {})
  summary = _json(workdir / "summary.json", {})
  alarms = _alarms(workdir / "alarms.jsonl")
  curves = [figure(chart) for chart in _charts(metrics, config)]
  name = workdir.resolve().name
  return document(
    f"{name}: report",
    tag("h1", name),
    _headline(metrics, _planned(workdir, config), summary, alarms),
    section("Alarms", _alarm_table(alarms)) if alarms else None,
    section("Curves", tag("div", *curves, class_="charts")) if curves else None,
    section("Time", _time(metrics)),
    section("Memory", _memory(metrics, manifest.read(workdir) or {})),
    section("Episodes", *_episodes(workdir / "transcripts")),
    section("Config and versions", *_origin(workdir, config)),
    section("Numbers", folded("Every metric", _numbers(metrics))),
  )


def _json(path: pathlib.Path, default: Any) -> Any:
  return json.loads(path.read_text()) if path.is_file() else default


def _alarms(path: pathlib.Path) -> list[dict[str, Any]]:
  if not path.is_file():
    return []
  lines = path.read_bytes().splitlines(keepends=True)
  return [json.loads(line) for line in lines if line.endswith(b"\n")]


def _alarm_table(alarms: Sequence[Mapping[str, Any]]) -> Html:
  rows = [
    [a["step"], a["name"], a["agent"] or "", a["text"]]
    for a in reversed(alarms[-100:])
  ]
  return table(("step", "alarm", "agent", "what it says"), rows, "alarms")


def _planned(workdir: pathlib.Path, config: Mapping[str, Any]) -> int | None:
  """Steps that the run will have done; those of `--mode=sft` are of all
  policies."""
  sft = (workdir / "sft").is_dir() and not (workdir / "checkpoints").is_dir()
  if not sft or "sft" not in config:
    return config.get("steps")
  policies = config["policies"].values()
  learn = [p for p in policies if not p["frozen"] and p["remote"] is None]
  return config["sft"]["steps"] * len(learn)


def _headline(metrics, planned, summary, alarms) -> Html:
  done = max((int(steps[-1]) for steps, _ in metrics.values()), default=0)
  ended = summary.get("steps") == done == planned
  facts = {"steps": f"{done} of {'?' if planned is None else planned}"}
  facts["state"] = "finished" if ended else "not finished"
  for name in ("reward/team", "time/step_s"):
    if name in metrics:
      label = {"reward/team": "reward", "time/step_s": "seconds a step"}[name]
      facts[f"{label}, last 10 steps"] = number(np.mean(metrics[name][1][-10:]))
  for name, (_, values) in writers.matching(metrics, r"eval/(avg@\d+)").items():
    if len(values) > 1:
      facts[f"held-out {name}"] = f"{values[0]:.3f} → {values[-1]:.3f}"
  facts["alarms"] = str(len(alarms))
  facts["written"] = datetime.datetime.now().astimezone().strftime("%F %T %Z")
  return tag(
    "dl", *(tag("div", tag("dt", k), tag("dd", v)) for k, v in facts.items())
  )


_PARTS = {
  "rollout": "rollout, with the environment",
  "score": "rewards and advantages",
  "update": "updates, and new weights for the engines",
  "rest": "rest of the step",
  "outside": "between steps: evaluation, checkpoints, files",
}


def _time(metrics: Metrics) -> Html:
  """Where the time of training went, by part of a step."""
  series = writers.matching(metrics, r"time/(\w+)_s")
  if "step" not in series:
    return tag("p", "No step has been done.")
  spent = {
    part: np.array([np.median(values), values.sum()])
    for part, (_, values) in series.items()
  }
  inside = [spent[p] for p in ("rollout", "score", "update") if p in spent]
  spent["rest"] = np.maximum(spent["step"] - sum(inside), 0)
  total = sum(spent[part][1] for part in _PARTS if part in spent)
  rows = []
  for part, words in _PARTS.items():
    if part in spent:
      median, whole = spent[part]
      share = whole / total
      rows.append(
        [words, number(median), number(whole), bar(share, f"{share:.0%}")]
      )
  parts = [part for part in ("rollout", "score", "update") if part in series]
  chart = Chart(
    "Seconds of a step, by part",
    "Steps in which something is compiled take longer.",
    "log",
    [Line(_PARTS[p], *series[p], i) for i, p in enumerate(parts, 1)],
  )
  header = ("part", "median [s]", "sum [s]", "share")
  shown = [figure(chart)] if parts else []  # fine-tuning has none
  return tag("div", table(header, rows), *shown, class_="charts")


def _memory(metrics: Metrics, about: Mapping[str, Any]) -> Html:
  """What was planned for the fullest device, and what was measured."""
  planned = about.get("devices", {}).get("planned_bytes", {})
  rows = {
    f"planned for {phase}, fullest device": max(values)
    for phase, values in planned.items()
  }
  for kind, words in (
    ("device", "measured: the most on one device"),
    ("host", "measured: the most of the process itself"),
  ):
    if f"memory/{kind}_bytes" in metrics:
      rows[words] = metrics[f"memory/{kind}_bytes"][1].max()
  if not rows:
    return tag("p", "Not measured.")
  most = max(rows.values())
  cells = [
    [words, f"{size / _GB:.3f}", bar(size / most)]
    for words, size in rows.items()
  ]
  note = (
    "The plan is weights, optimizer, caches and activations. The process also "
    "holds Python, its libraries and compiled programs, and on CPU what is "
    "planned for all devices."
  )
  return join((table(("", "GB", ""), cells), tag("p", note, class_="note")))


# -- episodes ------------------------------------------------------------------


def _episodes(folder: pathlib.Path) -> list[Html]:
  """The best and the worst of the newest step's."""
  found = _newest(folder)
  if not found:
    return [tag("p", "None have been written.")]
  ranked = sorted(found, key=_reward, reverse=True)
  if len(ranked) > _EPISODES:
    half = _EPISODES // 2
    ranked = ranked[:half] + ranked[-half:]
  note = (
    f"Of the {len(found)} of step {found[0]['step']} that were written whole, "
    "those with the highest and the lowest reward."
  )
  return [tag("p", note, class_="note"), *map(_episode, ranked)]


def _newest(folder: pathlib.Path) -> list[dict[str, Any]]:
  """The episodes of the last step in the transcripts."""
  files = sorted(folder.glob("*.jsonl"))
  if not files:
    return []
  with open(files[-1], "rb") as f:
    size = f.seek(0, 2)
    f.seek(max(0, size - _TAIL))
    lines = f.read().splitlines(keepends=True)
  if size > _TAIL:
    lines = lines[1:]  # the first is not whole
  found = list(transcripts.read(lines, files[-1].name))
  return [e for e in found if e["step"] == found[-1]["step"]]


def _reward(episode: Mapping[str, Any]) -> float:
  reward = episode["reward"]
  if isinstance(reward, Mapping):
    return sum(reward.values()) / max(len(reward), 1)
  return -math.inf if reward is None else reward


def _episode(episode: Mapping[str, Any]) -> Html:
  task, reward = episode["task"], episode["reward"]
  shown = reward if isinstance(reward, Mapping) else number(reward)
  about = f"{task['source']} #{task['index']}, episode {episode['episode']}: "
  about += f"reward {shown}" if episode["status"] == "ok" else episode["status"]
  return folded(
    about,
    tag("h4", "Task"),
    _text(task["question"]),
    table(
      ("answer", "the team's", "parts"),
      [[_cut(task["answer"]), _cut(episode["action"]), _cut(episode["parts"])]],
    ),
    *map(_turn, episode["turns"]),
    class_="episode",
  )


def _turn(turn: Mapping[str, Any]) -> Html:
  facts = [
    "valid" if turn["valid"] else "INVALID",
    f"{turn['completion_tokens']} tokens, stopped by {turn['stop_reason']}",
  ]
  facts += [f"verdict {turn['verdict']}"] if turn["verdict"] else []
  facts += [
    f"{key.replace('_', ' ')} {number(turn[key])}"
    for key in ("score", "advantage", "logprob_gap")
    if turn.get(key) is not None
  ]
  facts += [f"fault: {turn['fault']['message']}"] if turn["fault"] else []
  return join(
    (
      tag(
        "h4",
        f"{turn['index']} {turn['agent']} ",
        tag("small", " · ".join(facts)),
      ),
      _text(turn["completion"]),
      folded("prompt", _text(turn["prompt"])),
    )
  )


def _text(text: Any) -> Html:
  return tag("pre", _cut(text))


def _cut(text: Any) -> str:
  text = "" if text is None else str(text)
  rest = len(text) - _TEXT
  return text if rest <= 0 else f"{text[:_TEXT]} [and {rest:,} characters]"


# -- tables --------------------------------------------------------------------


def _origin(workdir: pathlib.Path, config: Mapping[str, Any]) -> list[Html]:
  """Config, what was changed in it, and what the run was made of."""
  about = dict(manifest.read(workdir) or {})
  about.pop("config", None)
  changes = _json(workdir / "changes.json", [])
  tables = [
    folded("Config", _keys(config)),
    folded("Versions, code, devices, data", _keys(about)),
  ]
  if changes:
    header = ("step", "key", "old", "new")
    rows = [[_cut(change[key]) for key in header] for change in changes]
    tables.append(folded("Changes on resumes", table(header, rows)))
  return tables


def _keys(tree: Mapping[str, Any]) -> Html:
  flat = config_lib.flatten(tree)
  return table(("key", "value"), [[k, _cut(v)] for k, v in flat.items()])


def _numbers(metrics: Metrics) -> Html:
  header = ("metric", "first", "last", "least", "greatest", "steps")
  rows = [
    [
      name,
      *map(number, (v[0], v[-1], v.min(), v.max())),
      f"{steps[0]} to {steps[-1]}",
    ]
    for name, (steps, v) in sorted(metrics.items())
  ]
  return table(header, rows)


def main(arguments: Sequence[str] | None = None) -> int:
  """The command; returns the exit code."""
  parser = argparse.ArgumentParser(
    prog="python -m drmas_jax.report",
    description=f"Writes WORKDIR/{NAME}, the page of a run.",
  )
  parser.add_argument("workdir", type=pathlib.Path, metavar="WORKDIR")
  workdir = parser.parse_args(arguments).workdir
  try:
    print(write(workdir))
  except OSError as e:
    print(f"error: WORKDIR={workdir}: {e}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  sys.exit(main())
