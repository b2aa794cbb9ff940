"""The command that sets evaluations side by side.

    python -m drmas_jax.compare RUN .. [--baseline RUN] [--group seed]
        [--metric avg@16] [--out table.md] [--out table.tex] [--figure f.pdf]

A RUN is a workdir (its newest evaluation is taken), a folder of an evaluation,
or a results.json. Only what was measured alike is compared: the same questions,
sampling and grader. Exit codes: 0 done; 2 refused, with one message.
"""

import argparse
import csv
import dataclasses
import functools
import io
import json
import pathlib
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from drmas_jax import config as config_lib
from drmas_jax import figures, manifest, metrics, writers

_FORMAT = 1  # of results.json
_LOOKS = ("-", "--", ":", "-.")  # of agents, in the figure
_TABLES = (".md", ".tex", ".csv")
_FIGURES = (".png", ".pdf", ".svg")
_MAX_KEYS = 3  # that name a group; more are no name
_FEW = 3  # runs; the interval of two covers 84 % where runs differ by 0.05


class Refused(ValueError):
  """What cannot be compared, and why."""


@dataclasses.dataclass(frozen=True)
class Run:
  """One evaluation.

  Attributes:
    name: last part of the path that was given for it.
    path: of its results.json.
    results: what that holds.
    config: {dotted key: value} that the run was trained with, or, where
      nothing was trained, evaluated with; the team is that evaluated in any
      case; and the "step" of the evaluation.
  """

  name: str
  path: pathlib.Path
  results: Mapping[str, Any]
  config: Mapping[str, Any]

  @property
  def workdir(self) -> pathlib.Path | None:
    """<workdir>/eval/<label>/results.json."""
    folders = self.path.parents
    inside = len(folders) > 2 and folders[1].name == "eval"
    return folders[2] if inside else None


@dataclasses.dataclass(frozen=True)
class Group:
  """Runs that count as one, such as the seeds of a recipe.

  Attributes:
    name: what sets it apart from the other groups.
    runs: in the order of `members`.
    members: of each run the values of the keys that are grouped over.
  """

  name: str
  runs: tuple[Run, ...]
  members: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Row:
  """A group's line of the table, {column: (mean, low, high)}.

  Attributes:
    group: whose.
    scores: by set, and "macro" where there are several.
    differences: to the baseline; empty where there is none.
  """

  group: Group
  scores: Mapping[str, metrics.Interval]
  differences: Mapping[str, metrics.Interval]


# -- what there is -------------------------------------------------------------


def load(text: str) -> Run:
  """Reads the evaluation that a RUN names.

  Raises:
    Refused: there is none, or it is of another format.
  """
  path = _find(pathlib.Path(text), text)
  try:
    results = json.loads(path.read_text())
    version = results["format"]
  except (OSError, ValueError, KeyError, TypeError) as e:
    raise Refused(f"{path}: no results of an evaluation ({e!r})") from e
  if version != _FORMAT:
    raise Refused(
      f"{path}: has format {version}, allowed is {_FORMAT}; evaluate the run "
      "again with this version"
    )
  name = pathlib.Path(text).resolve().name
  run = Run(name, path.resolve(), results, {})
  config = config_lib.flatten(_config(run)) | {"step": results["step"]}
  return dataclasses.replace(run, config=config)


def _find(path: pathlib.Path, text: str) -> pathlib.Path:
  """The results.json of a RUN; of a workdir, that of the newest step."""
  if path.is_file():
    return path
  if not path.is_dir():
    raise Refused(f"{text}: no such file or folder; name a run's workdir")
  if (path / "results.json").is_file():
    return path / "results.json"
  found = list(path.glob("eval/*/results.json"))
  if not found:
    raise Refused(
      f"{text}: holds no evaluation; make one with python -m drmas_jax.main "
      f"--mode=eval --config CONFIG --workdir {text}"
    )
  return max(found, key=_step_of)


def _step_of(path: pathlib.Path) -> tuple[int, str]:
  label = path.parent.name
  number = re.search(r"\d+$", label)
  return int(number.group()) if number else -1, label


def _config(run: Run) -> dict[str, Any]:
  """Of the training, which knows the run's seed and rates, with the team that
  was evaluated: it may have been another, such as one agent of it alone."""
  played = run.results["manifest"]["config"]
  trained = run.workdir and manifest.read(run.workdir)
  if not trained:
    return played
  team = {key: played[key] for key in ("agents", "orchestra") if key in played}
  return trained["config"] | team


# -- what may be compared ------------------------------------------------------


def check_alike(runs: Sequence[Run]) -> None:
  """Raises `Refused` on the first run that was not measured as the first."""
  for run in runs[1:]:
    faults = _differences(runs[0].results, run.results)
    if faults:
      raise Refused(
        f"{runs[0].path} and {run.path} cannot be compared: they differ in "
        f"{'; '.join(faults)}. Evaluate both alike (--mode=eval)"
      )


def _differences(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
  """What differs of questions, episodes, sampling and grader, in words."""
  if one["sources"].keys() != two["sources"].keys():
    sets = (", ".join(sorted(r["sources"])) for r in (one, two))
    return [f"their sets ({' and '.join(sets)})"]
  faults = []
  for key, source in one["sources"].items():
    other = two["sources"][key]
    prints = source["fingerprint"], other["fingerprint"]
    questions = source["questions"], other["questions"]
    if prints[0] != prints[1]:
      faults.append(f"the rows of {key} (fingerprints {_and(prints)})")
    elif questions[0] != questions[1]:
      sizes = _and(map(len, questions))
      faults.append(f"the questions of {key} ({sizes}, not the same rows)")
  if one["k"] != two["k"]:
    faults.append(f"k, the episodes of a question ({one['k']} and {two['k']})")
  return faults + _sampling(one, two) + _grader(one, two)


def _sampling(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
  """By agent; of teams without an agent in common, any setting that only one
  of them has."""
  ours, theirs = one["sampling"], two["sampling"]
  common = sorted(ours.keys() & theirs.keys())
  if not common:
    settings = [_distinct(own.values()) for own in (ours, theirs)]
    alike = settings[0] == settings[1]
    return [] if alike else [f"sampling ({_and(settings)})"]
  return [
    f"sampling of {agent} ({_and((_show(ours[agent]), _show(theirs[agent])))})"
    for agent in common
    if ours[agent] != theirs[agent]
  ]


def _grader(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
  graders = [r["manifest"]["grader"] for r in (one, two)]
  return [
    f"the grader's {key} ({_and(g.get(key) for g in graders)})"
    for key in sorted(graders[0].keys() | graders[1].keys())
    if graders[0].get(key) != graders[1].get(key)
  ]


def _and(pair: Any) -> str:
  return " and ".join(map(str, pair))


def _show(sampling: Mapping[str, Any]) -> str:
  return " ".join(f"{key}={value}" for key, value in sorted(sampling.items()))


def _distinct(settings: Any) -> str:
  return ", ".join(sorted(set(map(_show, settings))))


# -- groups --------------------------------------------------------------------


def group(runs: Sequence[Run], over: Sequence[str]) -> list[Group]:
  """Runs whose configs differ in the keys `over` alone, in the given order.

  Without a key every run stands for itself.

  Raises:
    Refused: two runs of a group have the same values of these keys, or no
      config has such a key.
  """
  for key in over:
    if not any(key in run.config for run in runs):
      raise Refused(f"--group={key}: not a key of these configs, as seed is")
  gathered: dict[str, dict[str, Run]] = {}
  for run in runs:
    rest = {k: v for k, v in run.config.items() if k not in over}
    identity = json.dumps(rest, sort_keys=True) if over else str(run.path)
    member = json.dumps([run.config.get(key) for key in over])
    known = gathered.setdefault(identity, {})
    if member in known:
      raise Refused(
        f"{known[member].path} and {run.path}: the same config, also in "
        f"{', '.join(over)}; leave one out"
      )
    known[member] = run
  parts = [dict(sorted(members.items())) for members in gathered.values()]
  names = _names([list(p.values()) for p in parts], over)
  return [
    Group(name, tuple(part.values()), tuple(part))
    for name, part in zip(names, parts, strict=True)
  ]


def _names(groups: Sequence[Sequence[Run]], over: Sequence[str]) -> list[str]:
  """The config keys that differ between groups, or the runs' names, or their
  paths: the first that tells all apart."""
  firsts = [runs[0] for runs in groups]
  keys = sorted({key for run in firsts for key in run.config} - set(over))
  differ = [
    key
    for key in keys
    if len({json.dumps(run.config.get(key)) for run in firsts}) > 1
  ]
  choices = [[run.name for run in firsts], [str(run.path) for run in firsts]]
  if over and 0 < len(differ) <= _MAX_KEYS:
    choices.insert(
      0,
      [", ".join(f"{k}={run.config.get(k)}" for k in differ) for run in firsts],
    )
  return next(names for names in choices if len(set(names)) == len(names))


# -- numbers -------------------------------------------------------------------


def parse_metric(text: str | None, k: int) -> tuple[str, int]:
  """("avg", 16) of "avg@16"; None is the mean of all k episodes.

  Raises:
    Refused: no such metric, or not of k episodes.
  """
  match = re.fullmatch(r"(avg|maj|pass)@([1-9]\d*)", text or f"avg@{k}")
  if not match:
    raise Refused(
      f"--metric={text}: allowed are avg@{k}, maj@{k} and pass@1 to pass@{k}"
    )
  kind, number = match.group(1), int(match.group(2))
  if number > k or (kind != "pass" and number != k):
    raise Refused(
      f"--metric={text}: these runs have {k} episodes of a question; allowed "
      f"are avg@{k}, maj@{k} and pass@1 to pass@{k}"
    )
  return kind, number


def scores(run: Run, kind: str, number: int) -> dict[str, np.ndarray]:
  """{set: [P]}, nan for a question whose episodes failed."""
  found = {}
  for key, source in run.results["sources"].items():
    success, ok = np.array(source["success"]), np.array(source["ok"])
    if kind == "pass":
      found[key] = metrics.pass_by_question(success, number, ok)
    elif kind == "maj":
      found[key] = metrics.maj_by_question(source["answers"], success, ok)
    else:
      found[key] = metrics.avg_by_question(success, ok)
  return found


def _answered(run: Run) -> bool:
  sources = run.results["sources"].values()
  return any(
    a is not None for s in sources for row in s["answers"] for a in row
  )


class Scores:
  """Scores of all runs on the questions that all of them have.

  Attributes:
    sets: their names.
    left_out: {set: questions without a score in some run}, where there are.

  Raises:
    Refused: nothing is left of a set, or there is nothing to vote by.
  """

  def __init__(self, runs: Sequence[Run], kind: str, number: int):
    if kind == "maj" and not any(map(_answered, runs)):
      raise Refused(
        f"--metric=maj@{number}: no episode of these runs gave an answer to "
        "vote by; compare avg@ or pass@"
      )
    by_run = {run.path: scores(run, kind, number) for run in runs}
    self.sets = tuple(runs[0].results["sources"])
    self.left_out = {}
    self._values: dict[str, dict[pathlib.Path, np.ndarray]] = {}
    for key in self.sets:
      lost = np.any([np.isnan(found[key]) for found in by_run.values()], axis=0)
      if lost.all():
        raise Refused(f"{key}: no question has {kind}@{number} in every run")
      if lost.any():
        self.left_out[key] = int(lost.sum())
      self._values[key] = {p: found[key][~lost] for p, found in by_run.items()}

  def of(self, group: Group) -> dict[str, list[np.ndarray]]:
    """{column: sets of [P, S]} of the S runs; the column "macro" has all."""
    found = {
      key: [np.stack([values[run.path] for run in group.runs], axis=1)]
      for key, values in self._values.items()
    }
    if len(found) > 1:
      found["macro"] = [values for (values,) in found.values()]
    return found


def compare(
  groups: Sequence[Group], baseline: Group | None, found: Scores
) -> list[Row]:
  """A row of each group: means over runs, and differences to the baseline."""
  rows = []
  for one in groups:
    own, differences = found.of(one), {}
    if baseline is not None:
      same = one.members == baseline.members
      differences = {
        column: metrics.paired_bootstrap(own[column], theirs, same_seeds=same)
        for column, theirs in found.of(baseline).items()
      }
    means = {column: metrics.bootstrap(*sets) for column, sets in own.items()}
    rows.append(Row(one, means, differences))
  return rows


# -- tables --------------------------------------------------------------------


def _cell(interval: metrics.Interval, sign: str = "") -> tuple[str, str, str]:
  """(value, interval, mark); the mark stands where the interval excludes 0."""
  value, low, high = (f"{x:{sign}.3f}" for x in interval)
  excludes = sign and (interval[1] > 1e-9 or interval[2] < -1e-9)
  return value, f"[{low}, {high}]", "*" if excludes else ""


def _grid(
  rows: Sequence[Row], baseline: Group | None, style: str
) -> list[list[str]]:
  """Header and lines of text; `style` is a format of value, interval, mark."""
  columns = list(rows[0].scores)
  lines = [["", "runs", *columns]]
  for row in rows:
    cells = [style.format(*_cell(row.scores[c])) for c in columns]
    lines.append([row.group.name, str(len(row.group.runs)), *cells])
    if baseline is not None and row.group is not baseline:
      cells = [style.format(*_cell(row.differences[c], "+")) for c in columns]
      lines.append([f"  minus {baseline.name}", "", *cells])
  return lines


def text(rows: Sequence[Row], baseline: Group | None) -> str:
  """For the terminal."""
  return writers.aligned(_grid(rows, baseline, "{} {}{}"))


def markdown(
  rows: Sequence[Row], baseline: Group | None, notes: Sequence[str]
) -> str:
  """A table, and the notes under it."""
  header, *lines = _grid(rows, baseline, "{} {}{}")
  table = writers.markdown(header, lines)
  return "\n".join([table, "", *(f"- {note}" for note in notes), ""])


def latex(
  rows: Sequence[Row], baseline: Group | None, notes: Sequence[str]
) -> str:
  """A tabular of the package booktabs, the notes as comments over it."""
  style = r"${}$ {{\scriptsize ${}$}}{}"
  (_, *columns), *lines = _grid(rows, baseline, style)
  heads = " & ".join(_escape(column) for column in columns)
  body = []
  for name, count, *cells in lines:
    indent = r"\quad " if name.startswith(" ") else ""
    first = indent + _escape(name.strip())
    body.append(" & ".join([first, count, *cells]) + r" \\")
  return "\n".join(
    [
      r"% needs \usepackage{booktabs}",
      *(f"% {note}" for note in notes),
      rf"\begin{{tabular}}{{l{'r' * len(columns)}}}",
      r"\toprule",
      rf" & {heads} \\",
      r"\midrule",
      *body,
      r"\bottomrule",
      r"\end{tabular}",
      "",
    ]
  )


_LATEX = {c: rf"\{c}" for c in "&%$#_{}"} | {
  "\\": r"\textbackslash{}",
  "~": r"\textasciitilde{}",
  "^": r"\textasciicircum{}",
}


def _escape(plain: str) -> str:
  return "".join(_LATEX.get(c, c) for c in plain)


def as_csv(rows: Sequence[Row], baseline: Group | None, metric: str) -> str:
  """One line for each group and set, for a program to read."""
  out = io.StringIO()
  table = csv.writer(out, lineterminator="\n")
  table.writerow(
    ["group", "runs", "set", "metric", "mean", "low", "high"]
    + ["baseline", "difference", "difference_low", "difference_high"]
  )
  for row in rows:
    for column, interval in row.scores.items():
      difference = row.differences.get(column, ("", "", ""))
      name = "" if baseline is None else baseline.name
      table.writerow(
        [row.group.name, len(row.group.runs), column, metric, *interval]
        + [name, *difference]
      )
  return out.getvalue()


def notes(
  rows: Sequence[Row], baseline: Group | None, found: Scores, metric: str
) -> list[str]:
  """What a reader must know of the numbers."""
  groups = [row.group for row in rows]
  first = groups[0].runs[0].results
  several = any(len(g.runs) > 1 for g in groups)
  drawn = "questions and runs" if several else "questions"
  lines = [
    f"{metric} of {first['k']} episodes a question, mean over runs, with a "
    f"95 % bootstrap interval over {drawn}; sampling: "
    + "; ".join(f"{a} {_show(s)}" for a, s in sorted(first["sampling"].items()))
  ]
  if baseline is not None:
    lines.append(
      f"differences to {baseline.name} by a paired bootstrap over {drawn}; "
      "* where the interval excludes 0"
    )
  few = [g.name for g in groups if len(g.runs) < _FEW]
  if several and few:
    lines.append(
      f"fewer than {_FEW} runs of {', '.join(few)}: so few do not show how far "
      "runs differ, and the interval is too narrow where they do"
    )
  steps = {g.name: sorted({r.results["step"] for r in g.runs}) for g in groups}
  if len(set(map(str, steps.values()))) > 1 or any(
    len(s) > 1 for s in steps.values()
  ):
    each = (f"{n} at {', '.join(map(str, s))}" for n, s in steps.items())
    lines.append(f"not of the same training step: {'; '.join(each)}")
  return lines + [
    f"{number} question(s) of {key} left out: their episodes failed in a run"
    for key, number in found.left_out.items()
  ]


# -- figure --------------------------------------------------------------------


def figure(groups: Sequence[Group], path: pathlib.Path) -> list[str]:
  """Held-out score, reward and gradient norm by agent, over training steps.

  Args:
    groups: a color each.
    path: to write; not written where no run has metrics.

  Returns:
    Remarks: who is not in it.
  """
  series, missing = [], []
  for one in groups:
    files = [r.workdir and r.workdir / "metrics.jsonl" for r in one.runs]
    there = [f for f in files if f and f.is_file()]
    series.append([writers.read_metrics(f) for f in there])
    if len(there) < len(files):
      missing.append(one.name)
  if not any(series):
    return ["no figure: no run has a metrics.jsonl"]
  figures.draw(_panels([one.name for one in groups], series), path, columns=3)
  left_out = ", ".join(missing)
  return (
    [f"runs without metrics.jsonl not drawn: {left_out}"] if missing else []
  )


def _panels(
  names: Sequence[str], series: Sequence[Sequence[Mapping[str, Any]]]
) -> list[figures.Panel]:
  several = any(len(runs) > 1 for runs in series)
  spread = " (mean and range of runs)" if several else ""
  held_out = _held_out_name(series)
  contents = [
    (f"Held-out {held_out}", rf"eval/({held_out})", "share"),
    ("Reward by agent (training)", r"reward/(?!team$)(.+)", "linear"),
    ("Gradient norm by agent", r"grad_norm/[^/]+/(.+)", "log"),
  ]
  panels = []
  for title, pattern, scale in contents:
    by_group = [[writers.matching(m, pattern) for m in runs] for runs in series]
    kinds = sorted({kind for runs in by_group for m in runs for kind in m})
    lines = []
    for color, (name, runs) in enumerate(zip(names, by_group, strict=True)):
      for i, kind in enumerate(kinds):
        curves = [m[kind] for m in runs if kind in m]
        look = "o-" if scale == "share" else _LOOKS[i % len(_LOOKS)]
        label = name if scale == "share" else f"{name}: {kind}"
        lines += _line(label, curves, color, look)
    panels.append(figures.Panel(title + spread, scale, lines))
  return panels


def _held_out_name(series: Sequence[Sequence[Mapping[str, Any]]]) -> str:
  """The avg@k that was measured most often: not that of the last step alone."""
  counts: dict[str, int] = {}
  for one in (m for runs in series for m in runs):
    found = writers.matching(one, r"eval/(avg@\d+)")
    for name, (steps, _) in found.items():
      counts[name] = counts.get(name, 0) + len(steps)
  return max(counts, key=lambda name: counts[name], default="score")


def _line(
  label: str,
  curves: Sequence[tuple[np.ndarray, np.ndarray]],
  color: int,
  look: str,
) -> list[figures.Line]:
  """The mean at the steps that all have; none where there are no such steps."""
  if not curves:
    return []
  steps = functools.reduce(np.intersect1d, [steps for steps, _ in curves])
  values = np.array([v[np.isin(s, steps)] for s, v in curves])
  if not len(steps):
    return []
  band = (values.min(axis=0), values.max(axis=0)) if len(curves) > 1 else None
  return [figures.Line(label, steps, values.mean(axis=0), color, look, band)]


# -- the command ---------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m drmas_jax.compare",
    description="Evaluations side by side, with intervals and differences.",
    allow_abbrev=False,
  )
  parser.add_argument(
    "runs", nargs="+", metavar="RUN", help="a workdir, or a results.json"
  )
  parser.add_argument(
    "--baseline",
    metavar="RUN",
    help="differences are to it, or to the group that it is in",
  )
  parser.add_argument(
    "--group",
    action="append",
    default=[],
    metavar="KEY",
    help="runs whose configs differ in this key alone are one, such as seed; "
    "may be given several times",
  )
  parser.add_argument("--metric", help="avg@k (the default), maj@k or pass@j")
  parser.add_argument(
    "--out",
    action="append",
    default=[],
    type=pathlib.Path,
    help=f"file to write, as its suffix says: {', '.join(_TABLES)}; may be "
    "given several times",
  )
  parser.add_argument(
    "--figure",
    type=pathlib.Path,
    help=f"learning curves ({', '.join(_FIGURES)}); the default is a .png "
    "beside the first --out",
  )
  return parser


def _check_suffix(
  flag: str, path: pathlib.Path, allowed: Sequence[str]
) -> None:
  if path.suffix not in allowed:
    raise Refused(f"--{flag}={path}: allowed suffixes are {', '.join(allowed)}")


def _write(
  path: pathlib.Path,
  rows: Sequence[Row],
  baseline: Group | None,
  remarks: Sequence[str],
  metric: str,
) -> None:
  if path.suffix == ".csv":
    content = as_csv(rows, baseline, metric)
  else:
    render = markdown if path.suffix == ".md" else latex
    content = render(rows, baseline, remarks)
  path.parent.mkdir(parents=True, exist_ok=True)
  writers.write_text(path, content)


def _run(args: argparse.Namespace) -> None:
  for path in args.out:
    _check_suffix("out", path, _TABLES)
  picture = args.figure or (args.out and args.out[0].with_suffix(".png"))
  if picture:
    _check_suffix("figure", picture, _FIGURES)
  reference = load(args.baseline) if args.baseline else None
  loaded = [*map(load, args.runs), *filter(None, [reference])]
  runs = list({run.path: run for run in loaded}.values())
  check_alike(runs)
  kind, number = parse_metric(args.metric, runs[0].results["k"])
  groups = group(runs, args.group)
  baseline = reference and next(
    g for g in groups if reference.path in {run.path for run in g.runs}
  )
  found = Scores(runs, kind, number)
  rows = compare(groups, baseline, found)
  metric = f"{kind}@{number}"
  remarks = notes(rows, baseline, found, metric)
  print(text(rows, baseline), *map(textwrap.fill, remarks), sep="\n")
  for path in args.out:
    _write(path, rows, baseline, remarks, metric)
  if picture:
    picture.parent.mkdir(parents=True, exist_ok=True)
    for remark in figure(groups, picture):
      print(remark)


def main(argv: Sequence[str] | None = None) -> int:
  """Returns the exit code."""
  args = _parser().parse_args(argv)
  try:
    _run(args)
  except (Refused, OSError) as e:
    print(f"drmas_jax.compare: {e}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  sys.exit(main())
