"""The command that sets estimators side by side.

    python -m drmas_jax.study --config configs/normaliser_study.py --workdir DIR
        [--part rollouts|training]

Beside `get_config` the config file has `get_study`, which returns

    rules     {name: keys of `advantage`}
    rollouts  steps; cases {name: a config, and for how many steps its policies
              are trained before}
    training  {name: a config, rules, the rule that is the baseline, seeds}

"rollouts" plays each case once, with policies that stay as they are, and takes
advantages and gradients of the same turns under every rule. "training" makes a
run of `drmas_jax.main` for each rule and seed. What is done is not done again:
the command goes on from where it was ended. Tables (.md) and figures (.png) are
left in DIR. Exit codes: 0 done; 2 refused, with one message; that of a run that
failed.
"""

import argparse
import itertools
import json
import math
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from drmas_jax import hugepages

if __name__ == "__main__":
  hugepages.restart()

import numpy as np

from drmas_jax import (
  advantages,
  batching,
  compare,
  losses,
  metrics,
  rewards,
  writers,
)
from drmas_jax import config as config_lib
from drmas_jax import main as main_lib
from drmas_jax.types import Group

_SPIKE = 3  # times the median of the steps before
_WINDOW = 15  # of these, at most
_POWER = 0.8


class Gradients(NamedTuple):
  """What a rule makes of one agent's turns in one step.

  Attributes:
    mean: of the advantages.
    square: of the advantages, mean over turns.
    factor: the same, mean over the groups in which the agent's scores differ.
    most: largest |A|.
    norm: of the gradient.
    terms: mean of |A z|^2 over turns.
    signal: |gradient|^2 less what chance adds to it, groups being independent.
    noise: what chance adds.
  """

  mean: float
  square: float
  factor: float
  most: float
  norm: float
  terms: float
  signal: float
  noise: float


class Step(NamedTuple):
  """The rollouts of one step, and gradients of its turns.

  Attributes:
    rows: the turns.
    groups: that they are of.
    products: by backbone (places of its turns [n], the scalar products of
      their score vectors [n, n] float64, factors of a turn in the loss [n]).
  """

  rows: rewards.Rows
  groups: Sequence[Group]
  products: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]


# -- the same rollouts under every rule ----------------------------------------


def gradients(step: Step, values: np.ndarray, agent: int) -> Gradients | None:
  """Of one agent's turns with these advantages [N]; None: it has no turn.

  The gradient sum_j A_j w_j z_j is not formed: its norm and those of its parts
  by group are sums over the score vectors' products.
  """
  mine = [p for p in step.products if (step.rows.agent[p[0]] == agent).any()]
  if not mine:
    return None
  ((places, products, weights),) = mine
  own = step.rows.agent[places] == agent
  turns = places[own]
  a = values[turns].astype(np.float64)
  by_group = np.unique(step.rows.group, return_inverse=True)[1]
  parts = np.zeros([by_group.max() + 1, len(turns)])
  parts[by_group[turns], np.arange(len(turns))] = a * weights[own]
  products = products[np.ix_(own, own)]
  squares = np.einsum("gi,ij,gj->g", parts, products, parts, optimize=True)
  whole = parts.sum(0)
  total = max(0.0, float(whole @ products @ whole))
  num = len(parts)
  noise = (squares.sum() - total / num) * num / max(num - 1, 1)
  mixed = _mixed(step.rows.scores[turns], step.rows.group[turns])
  return Gradients(
    mean=float(a.mean()),
    square=float((a**2).mean()),
    factor=float(np.mean([(a[m] ** 2).mean() for m in mixed] or [np.nan])),
    most=float(np.abs(a).max()),
    norm=math.sqrt(total),
    terms=float((a**2 * np.diag(products)).mean()),
    signal=total - noise,
    noise=noise,
  )


def _mixed(scores: np.ndarray, group: np.ndarray) -> list[np.ndarray]:
  """Masks of the groups whose scores differ."""
  masks = [group == g for g in np.unique(group)]
  return [m for m in masks if np.ptp(scores[m]) > 1e-5]


def play(
  config: config_lib.Config, num_steps: int, first: int = 0
) -> Iterator[Step]:
  """Plays training steps, from number `first`, with policies that stay as they
  come."""
  from drmas_jax import building, restoring, sampling, signals

  stop = signals.Stop(says="what this case has played is lost")
  backbones, player = restoring.to_sample(config, None, "", stop)
  for backbone in backbones.values():
    backbone.load()
  stream, size = building.stream(config), config.data.num_tasks
  key = sampling.root_key(config.seed, "study")
  penalties = {n: a.invalid_penalty for n, a in config.agents.items()}
  overlong = rewards.overlong_costs(config.agents)
  try:
    for i in range(first, first + num_steps):
      tasks = stream.tasks(i * size, size)
      groups = player.collect(tasks, config.data.group_size, key)
      rows = rewards.row_scores(groups, penalties, overlong)
      yield Step(
        rows,
        groups,
        [_products(config, b, rows) for b in backbones.values()],
      )
  finally:
    player.close()
    stop.close()


def _products(config: config_lib.Config, backbone: Any, rows: rewards.Rows):
  """See `Step.products`."""
  from drmas_jax import scores

  sizes = {
    i: len(t.prompt_ids) + len(t.completion_ids)
    for i, t in enumerate(rows.turns)
    if t.policy in backbone.names
  }
  places = np.array(sorted(sizes, key=sizes.__getitem__), int)
  all_turns = [rows.turns[i] for i in places]
  lengths = np.array([len(t.completion_ids) for t in all_turns], int)
  loss = backbone.policy.loss
  weights, denominator = losses.aggregate(
    lengths, backbone.in_loss(all_turns), loss.aggregation, loss.divisor
  )
  factors = [config.agents[t.agent].loss_weight for t in all_turns]
  chunks, width = [], 64  # rows of one program
  for start in range(0, len(places), width):
    some = places[start : start + width]
    turns = [rows.turns[i] for i in some]
    batch = scores.lay_out(
      turns,
      rows.agent[some],
      [backbone.policy_index[t.policy] for t in turns],
      num_micro=1,
      micro_rows=width,
      length=batching.bucket(sizes[int(some[-1])], backbone.row_buckets),
    )
    chunks.append(backbone.score_vectors(batch)[: len(some)])
  vectors = np.concatenate(chunks) if chunks else np.zeros([0, 1])
  products = (vectors @ vectors.T).astype(np.float64)
  return places, products, weights * factors / max(denominator, 1)


def measure(
  config: config_lib.Config,
  rules: Mapping[str, config_lib.Advantage],
  num_steps: int,
  first: int = 0,
) -> dict[str, Any]:
  """A case: {"agents": {agent: {rule: measures}}, "lemma": {metric: value}}."""
  agents = config.agent_names
  found: dict[str, dict[str, list[Gradients]]] = {
    agent: {rule: [] for rule in rules} for agent in agents
  }
  averages: dict[str, Any] = dict.fromkeys(rules)
  lemma, calls = [], []
  for i, step in enumerate(play(config, num_steps, first)):
    for rule, settings in rules.items():
      estimate, averages[rule] = advantages.of_rows(
        settings,
        step.rows,
        step.groups,
        num_agents=len(agents),
        averages=averages[rule],
      )
      for k, agent in enumerate(agents):
        said = gradients(step, estimate.values, k)
        if said is not None:
          found[agent][rule].append(said)
    lemma.append(_lemma(step, agents))
    calls.append(len(step.rows.turns) / len(np.unique(step.rows.episode)))
    print(f"  step {i + 1} of {num_steps}", end="\r", file=sys.stderr)
  return {
    "agents": {
      agent: {rule: _summary(steps) for rule, steps in by_rule.items()}
      for agent, by_rule in found.items()
    },
    "lemma": metrics.merge(lemma),
    "turns_per_episode": float(np.mean(calls)),
  }


def _lemma(step: Step, agents: Sequence[str]) -> dict[str, float]:
  squares = np.zeros(len(step.rows.turns))
  for places, products, _ in step.products:
    squares[places] = np.diag(products)
  said = {}
  for k, agent in enumerate(agents):
    for part in (
      metrics.moments(step.rows, k),
      metrics.score_norms(step.rows, squares, k),
    ):
      said |= {f"{name}/{agent}": value for name, value in part.items()}
  return said


def _summary(steps: Sequence[Gradients]) -> dict[str, float]:
  """Over steps: means, the largest of `most` and `norm`, and the spread."""
  if not steps:
    return {}
  columns = {
    name: np.array([getattr(s, name) for s in steps])
    for name in Gradients._fields
  }
  norm = columns["norm"]
  found = {
    name: float(np.nanmean(columns[name]))
    for name in ("mean", "square", "factor", "norm", "terms")
    if not np.isnan(columns[name]).all()
  }
  found |= {
    "most": float(columns["most"].max()),
    "norm_sd": float(norm.std(ddof=1)) if len(norm) > 1 else 0.0,
    "norm_max": float(norm.max()),
    "signal_to_noise": float(
      columns["signal"].sum() / max(columns["noise"].sum(), 1e-30)
    ),
  }
  return found


_COLUMNS = {
  "mean": "E[A]",
  "square": "E[A^2]",
  "factor": "factor",
  "most": "max |A|",
  "norm": "gradient",
  "norm_sd": "sd",
  "norm_max": "max",
  "signal_to_noise": "signal/noise",
}


def rollouts_table(cases: Mapping[str, Mapping[str, Any]]) -> str:
  """Markdown, a table for each case and agent, and what the lemma says."""
  parts = []
  for name, case in cases.items():
    calls = case["turns_per_episode"]
    parts.append(f"## {name}: {calls:.1f} turns an episode\n")
    for agent, rules in case["agents"].items():
      lines = [
        [rule, *(f"{m[key]:.3f}" if key in m else "" for key in _COLUMNS)]
        for rule, m in rules.items()
      ]
      parts.append(writers.markdown([agent, *_COLUMNS.values()], lines))
      parts.append(_lemma_line(case["lemma"], agent))
  return "\n".join([*parts, _ROLLOUTS_NOTE])


_ROLLOUTS_NOTE = """
- The same turns under every rule; means over steps, and the largest of any.
- factor: mean of A^2 over the agent's turns of a group, over those groups in
  which its scores differ: that of lemma 4.2, which is (n - 1) / n for rules
  with the deviation of a sample of n.
- gradient: its norm for the agent's turns, mean over steps, with its standard
  deviation and maximum over steps.
- signal/noise: squared norm of the mean gradient over the variance of a step's,
  estimated from the groups of each step; chance may make it negative.
"""


def _lemma_line(lemma: Mapping[str, float], agent: str) -> str:
  if f"score_norm/{agent}" not in lemma:
    return "\nNo group of mixed episodes.\n"
  kappa, most, norm, inflated, delta = (
    lemma[f"{name}/{agent}"]
    for name in ("kappa", "kappa_max", "score_norm", "inflated", "delta")
  )
  return (
    f"\nLemma 4.2 (grpo, population): kappa {kappa:.3f} (at most {most:.2f} in "
    f"a group), E|z|^2 {norm:.4g}, E|z|^2 kappa {inflated:.4g}, Delta "
    f"{delta:+.4g}, that is {delta / inflated:+.0%} of it.\n"
  )


def rollouts_figure(
  cases: Mapping[str, Mapping[str, Any]], path: pathlib.Path
) -> None:
  """A point for each rule, case and agent: factor, bound, spread."""
  from matplotlib.figure import Figure

  rules = list(next(iter(next(iter(cases.values()))["agents"].values())))
  pairs = [(c, a) for c, case in cases.items() for a in case["agents"]]
  panels = {
    "Mean square of A (factor)": lambda m: m.get("factor"),
    "Largest |A|": lambda m: m.get("most"),
    "Gradient norm: sd / mean": lambda m: m["norm_sd"] / max(m["norm"], 1e-30),
  }
  figure = Figure(figsize=(15, 0.35 * len(rules) + 2), layout="constrained")
  all_axes = figure.subplots(1, len(panels), sharey=True)
  for axes, (title, value) in zip(all_axes, panels.items(), strict=True):
    for i, (case, agent) in enumerate(pairs):
      shown = [cases[case]["agents"][agent][rule] for rule in rules]
      shift = 0.6 * (i / max(len(pairs) - 1, 1) - 0.5)
      points = [(value(m), place + shift) for place, m in enumerate(shown) if m]
      points = [p for p in points if p[0] is not None]
      axes.plot(*zip(*points, strict=True), "o", label=f"{case}: {agent}")
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_yticks(range(len(rules)), rules)
    axes.grid(alpha=0.3)
  all_axes[0].invert_yaxis()
  all_axes[-1].legend(frameon=False, fontsize=8, loc="best")
  figure.savefig(path)


def rollouts(study: Mapping[str, Any], workdir: pathlib.Path) -> None:
  """Part one: every case that has no results of the same settings."""
  rules = _rules(study)
  cases, num = {}, study["rollouts"]["steps"]
  for name, case in study["rollouts"]["cases"].items():
    path = workdir / "rollouts" / f"{name}.json"
    raw = case["config"]
    if case["trained"]:
      raw = _trained(raw, case["trained"], path.with_suffix(""))
    config = config_lib.check(config_lib.build(raw))
    settings = {
      "config": config_lib.to_dict(config),
      "rules": {n: config_lib.to_dict(r) for n, r in rules.items()},
      "steps": num,
    }
    cases[name] = _kept(path, settings)
    if cases[name] is None:
      print(f"rollouts of {name}", file=sys.stderr)
      cases[name] = measure(config, rules, num, case["trained"])
      path.parent.mkdir(parents=True, exist_ok=True)
      writers.write_json(path, {"settings": settings, "found": cases[name]})
    writers.write_text(workdir / "rollouts.md", rollouts_table(cases))
  rollouts_figure(cases, workdir / "rollouts.png")
  print(rollouts_table(cases))


def _trained(raw, steps: int, workdir: pathlib.Path) -> dict[str, Any]:
  """The config with the policies that so many steps of it leave.

  Raises:
    ConfigError: adapters are trained.
  """
  run = raw | {"steps": steps}
  config = config_lib.build(run)
  for name in config.trained:
    if config.policies[name].adapter is not None:
      raise config_lib.ConfigError(
        f"policies.{name}.adapter: a case with trained={steps} reads weights "
        "that a run leaves, and these stay as they are; write trained=0, or "
        "remove the adapter"
      )
  _train(run, raw.get("advantage", {}), raw.get("seed", 0), workdir)
  policies = {
    name: policy | {"checkpoint": f"run:{workdir}/{name}@{steps}"}
    for name, policy in raw["policies"].items()
    if name in config.trained
  }
  return raw | {"policies": {**raw["policies"], **policies}}


def _rules(study: Mapping[str, Any]) -> dict[str, config_lib.Advantage]:
  """Checked as those of a run."""
  raw = next(iter(study["rollouts"]["cases"].values()))["config"]
  return {
    name: config_lib.check(
      config_lib.build(raw | {"advantage": keys})
    ).advantage
    for name, keys in study["rules"].items()
  }


def _kept(path: pathlib.Path, settings: Mapping[str, Any]) -> Any:
  """Results that are there, unless they are of something else."""
  if not path.is_file():
    return None
  there = json.loads(path.read_text())
  return there["found"] if _same(there["settings"], settings) else None


def _same(written: Any, settings: Any) -> bool:
  return written == json.loads(json.dumps(settings))


# -- training under every rule -------------------------------------------------


def training(study: Mapping[str, Any], workdir: pathlib.Path) -> None:
  """Part two: every run that is not finished; then tables and figures.

  Raises:
    subprocess.CalledProcessError: a run ended with an exit code.
  """
  for name, part in study["training"].items():
    runs = {}
    for seed, rule in itertools.product(part["seeds"], part["rules"]):
      runs[rule, seed] = workdir / name / rule / f"seed_{seed}"
      _train(part["config"], study["rules"][rule], seed, runs[rule, seed])
    rules, seeds, base = part["rules"], part["seeds"], part["baseline"]
    out = workdir / f"{name}.md"
    done = compare.main(
      [str(path) for path in runs.values()]
      + ["--group", "seed", "--baseline", str(runs[base, seeds[0]])]
      + ["--out", str(out), "--figure", str(out.with_suffix(".png"))]
    )
    if done:
      raise compare.Refused(f"{name}: its runs cannot be compared")
    measures = {
      rule: [stability(runs[rule, seed]) for seed in seeds] for rule in rules
    }
    text = stability_table(measures, base)
    writers.write_text(out.with_name(f"{name}_stability.md"), text)
    print(text)


def _train(raw, keys, seed: int, workdir: pathlib.Path) -> None:
  """One run, in a process of its own, unless it is finished; one of another
  config is the main job's to refuse."""
  config = config_lib.check(
    config_lib.build(raw | {"advantage": keys, "seed": seed})
  )
  settings, summary = config_lib.to_dict(config), workdir / "summary.json"
  if summary.is_file():
    done = json.loads(summary.read_text())["steps"]
    there = json.loads((workdir / "config.json").read_text())
    if done == config.steps and _same(there, settings):
      return
  asked = workdir.with_name(f"{workdir.name}_config") / "config.json"
  asked.parent.mkdir(parents=True, exist_ok=True)
  writers.write_json(asked, settings)
  print(workdir, file=sys.stderr)
  command = [sys.executable, "-m", "drmas_jax.main", f"--config={asked}"]
  # A config's own modules lie beside the file of the study.
  path = os.pathsep.join(filter(None, sys.path))
  subprocess.run(
    [*command, f"--workdir={workdir}"],
    check=True,
    env=os.environ | {"PYTHONPATH": path},
  )


def stability(workdir: pathlib.Path) -> dict[str, float]:
  """Measures of a finished run; gradient norms are of each policy.

  A spike is a norm above three times the median of the (up to 15) steps before
  it, of which there must be five.
  """
  summary = json.loads((workdir / "summary.json").read_text())
  series = writers.read_metrics(workdir / "metrics.jsonl")
  held_out = summary["after"]["macro"]
  name = next(n for n in held_out if n.startswith("avg@"))
  found = {
    f"held-out {name} at the end": held_out[name][0],
    "success, mean over steps": float(series["success/team"][1].mean()),
    "CPU seconds": summary["cpu_seconds"],
  }
  for name, (_, norms) in writers.matching(
    series, r"grad_norm/([^/]+)"
  ).items():
    before = [norms[max(0, i - _WINDOW) : i] for i in range(len(norms))]
    found |= {
      f"gradient norm, mean: {name}": float(norms.mean()),
      f"gradient norm, max: {name}": float(norms.max()),
      f"spikes: {name}": float(
        sum(
          len(b) >= 5 and n > _SPIKE * np.median(b)
          for n, b in zip(norms, before, strict=True)
        )
      ),
    }
  for name, (_, lost) in writers.matching(
    series, r"skipped/non_finite/(.+)"
  ).items():
    found[f"non-finite updates: {name}"] = float(lost.sum())
  return found


def paired(
  ours: Sequence[float], theirs: Sequence[float]
) -> tuple[float, float, float]:
  """Of runs with the same seeds: the mean difference, half of its 95 % interval
  (Student's t), and the smallest true difference that would have been told from
  0 at that level with a chance of 80 %."""
  from scipy import stats

  gains = np.subtract(ours, theirs)
  n = len(gains)
  if n < 2:
    return float(gains.mean()), math.inf, math.inf
  error = gains.std(ddof=1) / math.sqrt(n)
  level, power = (stats.t.ppf(p, n - 1) for p in (0.975, _POWER))
  return float(gains.mean()), level * error, (level + power) * error


def stability_table(
  measures: Mapping[str, Sequence[Mapping[str, float]]], baseline: str
) -> str:
  """Markdown: a line for each measure, and its differences to the baseline."""
  # A run has no line for updates that it never lost.
  every = (run for runs in measures.values() for run in runs)
  names = dict.fromkeys(name for run in every for name in run)
  lines = []
  for name in names:
    columns = {
      rule: [run.get(name, 0.0) for run in runs]
      for rule, runs in measures.items()
    }
    lines.append([name, *(f"{np.mean(c):.3f}" for c in columns.values())])
    against = {
      rule: paired(c, columns[baseline]) for rule, c in columns.items()
    }
    others = [(r, a) for r, a in against.items() if r != baseline]
    cells = {
      r: f"{d:+.3f} [{d - half:+.3f}, {d + half:+.3f}]"
      for r, (d, half, _) in others
    }
    least = {r: f"{m:.3f}" for r, (*_, m) in others}
    for title, row in ((f"  minus {baseline}", cells), ("  could see", least)):
      lines.append([title, *(row.get(rule, "") for rule in measures)])
  num = len(measures[baseline])
  return "\n".join(
    [
      writers.markdown(["", *measures], lines),
      "",
      f"- means over {num} paired seeds; differences with a 95 % interval "
      "(Student's t over seeds); could see: the smallest true difference that "
      f"such an interval would have told from 0 with a chance of {_POWER:.0%}",
      f"- a spike is a norm above {_SPIKE} times the median of the {_WINDOW} "
      "steps before",
      "",
    ]
  )


# -- the command ---------------------------------------------------------------

_PARTS = {"rollouts": rollouts, "training": training}


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m drmas_jax.study",
    description="Estimators on the same rollouts, and in training.",
    allow_abbrev=False,
  )
  parser.add_argument(
    "--config", required=True, help="file with get_config() and get_study()"
  )
  parser.add_argument(
    "--workdir", required=True, type=pathlib.Path, help="folder of the study"
  )
  parser.add_argument("--part", choices=_PARTS, help="only this one")
  return parser


def main(argv: Sequence[str] | None = None) -> int:
  """Returns the exit code."""
  args = _parser().parse_args(argv)
  main_lib.set_environment()
  try:
    study = config_lib.load_file(args.config, "get_study")
    args.workdir.mkdir(parents=True, exist_ok=True)
    for name, run in _PARTS.items():
      if args.part in (None, name):
        run(study, args.workdir)
  except (config_lib.ConfigError, compare.Refused) as e:
    print(f"drmas_jax.study: {e}", file=sys.stderr)
    return 2
  except subprocess.CalledProcessError as e:
    print(
      f"drmas_jax.study: a run ended with exit code {e.returncode}; the same "
      "command goes on from there",
      file=sys.stderr,
    )
    return e.returncode
  return 0


if __name__ == "__main__":
  sys.exit(main())
