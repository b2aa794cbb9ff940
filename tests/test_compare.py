"""Comparisons of made-up evaluations whose numbers are known by hand."""

import csv
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from drmas_jax import compare, metrics, writers

pytestmark = pytest.mark.quick

SAMPLING = {"temperature": 0.6, "top_k": 0, "top_p": 0.95}
AGENTS = ("solver", "verifier")


def results(success, **changes):
  """Of sets {name: [P, k]} of successes; an answer is right or wrong."""
  first = next(iter(success.values()))
  return {
    "format": 1,
    "label": "step_4",
    "step": 4,
    "k": len(first[0]),
    "sampling": dict.fromkeys(AGENTS, SAMPLING),
    "seed": 0,
    "sources": {
      key: {
        "fingerprint": f"{key}-f",
        "questions": list(range(len(rows))),
        "success": rows,
        "ok": np.ones_like(rows).tolist(),
        "answers": [["right" if x else None for x in row] for row in rows],
      }
      for key, rows in success.items()
    },
    "manifest": {
      "config": {"seed": 0, "advantage": {"name": "agent_wise"}},
      "grader": {"environment": "math", "version": "1", "options": {}},
    },
    **changes,
  }


def save(workdir, success, *, config=None, step=4, edit=None):
  """A workdir with an evaluation; `edit` changes its results in place."""
  found = results(success, step=step)
  if config is not None:
    found["manifest"]["config"] = config
  if edit is not None:
    edit(found)
  path = workdir / "eval" / f"step_{step}" / "results.json"
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(found))
  return str(workdir)


def recipe(name, seed):
  return {"seed": seed, "advantage": {"name": name, "pool": False}}


def train(workdir, rng, level):
  """A metrics.jsonl of a made-up training."""
  writer = writers.JsonLines(workdir / "metrics.jsonl")
  for step in range(41):
    found = {} if step % 10 else {"eval/avg@2": level + step / 100}
    if step:
      for agent in AGENTS:
        found[f"reward/{agent}"] = float(rng.normal(level, 0.05))
        found[f"grad_norm/p/{agent}"] = float(rng.lognormal(-1, 0.4))
    writer.write_scalars(step, found)
  writer.close()


def call(*flags):
  return compare.main(list(map(str, flags)))


def lines_of(path):
  with open(path, newline="") as f:
    return list(csv.DictReader(f))


ONE = {"gsm8k": [[1, 1], [1, 0], [0, 0], [1, 1]], "math": [[1, 0], [0, 0]]}
TWO = {"gsm8k": [[0, 0], [1, 0], [0, 0], [1, 0]], "math": [[0, 0], [0, 0]]}


def test_numbers_by_hand(tmp_path, capsys):
  ours, base = save(tmp_path / "ours", ONE), save(tmp_path / "base", TWO)
  out = tmp_path / "deep" / "table.csv"
  assert call(ours, base, "--baseline", base, "--out", out) == 0
  lines = {(r["group"], r["set"]): r for r in lines_of(out)}
  means = {key: float(row["mean"]) for key, row in lines.items()}
  assert means == pytest.approx(
    {
      ("ours", "gsm8k"): 5 / 8,
      ("ours", "math"): 1 / 4,
      ("ours", "macro"): 7 / 16,  # of sets, however many questions they have
      ("base", "gsm8k"): 2 / 8,
      ("base", "math"): 0.0,
      ("base", "macro"): 1 / 8,
    }
  )
  gsm8k, macro = lines["ours", "gsm8k"], lines["ours", "macro"]
  assert {r["metric"] for r in lines.values()} == {"avg@2"}
  # Differences by question 1, 0, 0, 1/2: 1/256 of the resamples are all ones
  # and (1/2)^4 = 6 % all zeros, which is more than is cut off below.
  assert float(gsm8k["difference"]) == pytest.approx(3 / 8)
  assert float(gsm8k["difference_low"]) == 0.0
  assert 0.7 <= float(gsm8k["difference_high"]) <= 1.0
  assert float(macro["difference"]) == pytest.approx((3 / 8 + 1 / 4) / 2)
  base_macro = lines["base", "macro"]
  assert {base_macro[f"difference{x}"] for x in ("", "_low", "_high")} == {
    "0.0"
  }
  said = capsys.readouterr().out
  # Of 1, 1/2, 0, 1: 1.95 % of the resamples have a mean below 1/4.
  assert "0.625 [0.250, 1.000] " in said and "+0.375 [+0.000, " in said
  # Of both sets only 1/16 * 1/4 of the resamples have no difference at all.
  (minus,) = (line for line in said.splitlines() if "minus base" in line)
  assert minus.count("*") == 1 and minus.endswith("*")
  assert "temperature=0.6" in said and "95 % bootstrap" in said


def test_other_metrics(tmp_path, capsys):
  ours = save(tmp_path / "ours", ONE)
  out = tmp_path / "t.csv"
  for metric, gsm8k, math in (
    ("pass@2", 3 / 4, 1 / 2),
    ("pass@1", 5 / 8, 1 / 4),
    ("maj@2", 3 / 4, 1 / 2),  # the only answer given is right
  ):
    assert call(ours, "--metric", metric, "--out", out) == 0
    means = {r["set"]: float(r["mean"]) for r in lines_of(out)}
    macro = pytest.approx((gsm8k + math) / 2)
    assert means == {"gsm8k": gsm8k, "math": math, "macro": macro}
    assert {r["difference"] for r in lines_of(out)} == {""}
  for metric in ("avg@4", "pass@3", "maj@1", "acc", "avg@0"):
    assert call(ours, "--metric", metric) == 2
    assert f"--metric={metric}: " in capsys.readouterr().err
  # All wrong is without an answer here: 0 beside others, no vote alone.
  none = {key: np.zeros_like(rows).tolist() for key, rows in ONE.items()}
  zero = save(tmp_path / "zero", none)
  assert call(ours, zero, "--metric=maj@2") == 0
  assert call(zero, "--metric=maj@2") == 2
  assert "gave an answer to vote by" in capsys.readouterr().err


def test_a_run_against_its_copy(tmp_path):
  rng = np.random.default_rng(0)
  success = {"a": rng.integers(0, 2, [50, 4]).tolist()}
  ours, copy = (save(tmp_path / n, success) for n in ("ours", "copy"))
  out = tmp_path / "t.csv"
  assert call(ours, "--baseline", copy, "--out", out) == 0
  (one, two) = lines_of(out)
  assert one["difference"] == one["difference_low"] == "0.0"
  assert one["difference_high"] == "0.0"
  assert one["mean"] == two["mean"] and one["baseline"] == "copy"
  assert float(one["low"]) < float(one["mean"]) < float(one["high"])
  assert one["set"] == "a"  # the mean of a single set needs no name


def seeds(tmp_path):
  """Two recipes of three seeds; the second is better by 0.2 of the tasks."""
  rng = np.random.default_rng(1)
  hard = rng.random([60, 1])
  for seed in (2, 0, 1):
    for name, gain in (("grpo", 0.0), ("agent_wise", 0.2)):
      success = rng.random([60, 8]) < np.clip(hard * 0.7 + gain, 0, 1)
      folder = tmp_path / f"{name}_{seed}"
      config = recipe(name, seed)
      yield save(folder, {"a": success.astype(int).tolist()}, config=config)


def test_groups_of_seeds(tmp_path, capsys):
  runs = list(seeds(tmp_path))
  base = tmp_path / "grpo_1"
  outs = [tmp_path / f"t.{suffix}" for suffix in ("csv", "md", "tex")]
  flags = [f"--out={out}" for out in outs]
  assert call(*runs, "--baseline", base, "--group", "seed", *flags) == 0
  base, ours = lines_of(outs[0])
  assert (base["group"], ours["group"]) == (
    "advantage.name=grpo",
    "advantage.name=agent_wise",
  )
  assert base["runs"] == ours["runs"] == "3"
  means = [
    np.mean(
      [compare.scores(compare.load(r), "avg", 8)["a"] for r in runs[i::2]]
    )
    for i in (0, 1)
  ]
  assert float(base["mean"]) == pytest.approx(means[0])
  assert float(ours["difference"]) == pytest.approx(means[1] - means[0])
  assert 0.1 < float(ours["difference_low"]) < float(ours["difference_high"])
  said = capsys.readouterr().out
  assert "]*\n" in said and "questions and runs" in said
  # Markdown.
  table = outs[1].read_text().splitlines()
  cells = [[c.strip() for c in line.split("|")[1:-1]] for line in table[:5]]
  assert cells[0] == ["", "runs", "a"] and cells[1][2].endswith("-:")
  assert cells[2][:2] == ["advantage.name=grpo", "3"]
  assert cells[4][:2] == ["minus advantage.name=grpo", ""]
  assert cells[4][2].startswith("+0.") and cells[4][2].endswith("]*")
  assert table[5] == "" and table[6].startswith("- avg@8 of 8 episodes")
  # LaTeX: every line of the table has as many cells, every brace its partner.
  tex = outs[2].read_text()
  body = [line for line in tex.splitlines() if line.endswith(r"\\")]
  assert [line.count("&") for line in body] == [2] * 4
  assert tex.count("{") == tex.count("}") and tex.count("$") % 2 == 0
  assert r"\quad minus advantage.name=grpo" in tex
  assert r"advantage.name=agent\_wise" in tex and r"\toprule" in tex


def test_seeds_are_paired_where_both_have_them(tmp_path, monkeypatch, capsys):
  paired = []
  bootstrap = metrics.paired_bootstrap

  def record(*args, same_seeds):
    paired.append(same_seeds)
    return bootstrap(*args, same_seeds=same_seeds)

  monkeypatch.setattr(metrics, "paired_bootstrap", record)
  runs = list(seeds(tmp_path))
  assert call(*runs, "--baseline", runs[0], "--group=seed") == 0
  assert paired == [True, True]
  assert "fewer than 3 runs" not in capsys.readouterr().out
  paired.clear()
  assert call(*runs[:-1], "--baseline", runs[0], "--group=seed") == 0
  assert paired == [True, False]
  said = " ".join(capsys.readouterr().out.split())
  assert "fewer than 3 runs of advantage.name=agent_wise: " in said


def test_groups_and_their_names(tmp_path):
  configs = {
    "a": recipe("x", 0) | {"steps": 1},
    "b": recipe("y", 0) | {"steps": 1},
    "c": recipe("y", 1) | {"steps": 2},
    "d": recipe("y", 1) | {"steps": 1},
  }
  runs = [
    compare.load(save(tmp_path / name, ONE, config=config))
    for name, config in configs.items()
  ]

  def named(runs, *over):
    return [
      (g.name, [r.name for r in g.runs]) for g in compare.group(runs, over)
    ]

  assert named(runs) == [(n, [n]) for n in "abcd"]
  assert named(runs, "seed") == [
    ("advantage.name=x, steps=1", ["a"]),
    ("advantage.name=y, steps=1", ["b", "d"]),
    ("advantage.name=y, steps=2", ["c"]),
  ]
  assert named(runs[1:], "seed", "steps") == [("b", ["b", "d", "c"])]
  # Before and after, of the same runs.
  later = [
    compare.load(save(tmp_path / f"{n}9", TWO, config=configs[n], step=9))
    for n in "bd"
  ]
  assert named([runs[1], *later, runs[3]], "seed") == [
    ("step=4", ["b", "d"]),
    ("step=9", ["b9", "d9"]),
  ]
  # The training's own manifest decides, as its last session left it.
  (tmp_path / "d" / "manifest.json").write_text(
    json.dumps(
      {
        "config": configs["d"],
        "sessions": [{"step": 3, "config": recipe("z", 1) | {"steps": 1}}],
      }
    )
  )
  runs[3] = compare.load(str(tmp_path / "d"))
  assert named([runs[1], runs[3]], "seed") == [
    ("advantage.name=y", ["b"]),
    ("advantage.name=z", ["d"]),
  ]
  # But the team is that which was evaluated.
  alone = configs["d"] | {"orchestra": {"name": "single"}}
  save(tmp_path / "d", ONE, config=alone)
  found = compare.load(str(tmp_path / "d")).config
  assert (found["orchestra.name"], found["advantage.name"]) == ("single", "z")
  with pytest.raises(compare.Refused, match="--group=sed: not a key"):
    compare.group(runs, ["sed"])


def test_one_seed_twice_is_refused(tmp_path, capsys):
  twins = [save(tmp_path / n, ONE, config=recipe("x", 0)) for n in "ab"]
  assert call(*twins, "--group=seed") == 2
  said = capsys.readouterr().err
  assert "a/eval/step_4" in said and "b/eval/step_4" in said
  assert "the same config, also in seed; leave one out" in said
  assert call(twins[0], twins[0], "--group=seed") == 0  # it is named twice


def set_at(*path_and_value):
  *path, name, value = path_and_value

  def edit(found):
    for key in path:
      found = found[key]
    found[name] = value

  return edit


HOT = SAMPLING | {"temperature": 1.0}


@pytest.mark.parametrize(
  "edit, message",
  [
    (
      set_at("sources", "math", "fingerprint", "other"),
      "the rows of math (fingerprints math-f and other)",
    ),
    (
      set_at("sources", "gsm8k", "questions", [0, 1, 2, 7]),
      "the questions of gsm8k (4 and 4, not the same rows)",
    ),
    (lambda r: r["sources"].pop("math"), "their sets (gsm8k, math and gsm8k)"),
    (set_at("k", 16), "k, the episodes of a question (2 and 16)"),
    (
      set_at("sampling", "verifier", HOT),
      "sampling of verifier (temperature=0.6 top_k=0 top_p=0.95 and "
      "temperature=1.0 top_k=0 top_p=0.95)",
    ),
    (set_at("sampling", {"other": HOT}), "sampling (temperature=0.6"),
    (
      set_at("manifest", "grader", "version", "2"),
      "the grader's version (1 and 2)",
    ),
    (
      set_at("manifest", "grader", "options", {"rule": "em"}),
      "the grader's options ({} and {'rule': 'em'})",
    ),
  ],
)
def test_what_was_not_measured_alike_is_refused(
  tmp_path, capsys, edit, message
):
  good, also = (save(tmp_path / n, ONE) for n in ("good", "also"))
  bad = save(tmp_path / "bad", ONE, edit=edit)
  out = tmp_path / "t.md"
  assert call(good, also, bad, "--out", out) == 2
  said, err = capsys.readouterr()
  assert message in err and said == "" and not out.exists()
  assert f"{good}/eval" in err and f"{bad}/eval" in err and also not in err
  assert err.count("\n") == 1


def test_several_differences_are_named_at_once(tmp_path, capsys):
  def edit(found):
    set_at("k", 4)(found)
    set_at("manifest", "grader", "version", "2")(found)

  good, bad = save(tmp_path / "a", ONE), save(tmp_path / "b", ONE, edit=edit)
  assert call(good, "--baseline", bad) == 2
  said = capsys.readouterr().err
  assert "k, the episodes" in said and "; the grader's version" in said


def test_a_team_against_a_single_agent(tmp_path):
  team = save(tmp_path / "team", ONE)
  alone = save(
    tmp_path / "alone", TWO, edit=set_at("sampling", {"me": SAMPLING})
  )
  assert call(team, alone) == 0


def test_failed_episodes_are_left_out_everywhere(tmp_path, capsys):
  def edit(found):
    found["sources"]["gsm8k"]["ok"][0] = [0, 0]
    found["sources"]["gsm8k"]["ok"][1] = [1, 0]

  ours, lost = save(tmp_path / "o", ONE), save(tmp_path / "l", ONE, edit=edit)
  out = tmp_path / "t.csv"
  assert call(ours, lost, "--baseline", ours, "--out", out) == 0
  assert "1 question(s) of gsm8k left out" in capsys.readouterr().out
  means = {(r["group"], r["set"]): float(r["mean"]) for r in lines_of(out)}
  assert means["o", "gsm8k"] == pytest.approx((0.5 + 0 + 1) / 3)
  assert means["l", "gsm8k"] == pytest.approx((1 + 0 + 1) / 3)
  # The second has one episode left: no estimate of pass@2.
  assert call(ours, lost, "--metric=pass@2") == 0
  assert "2 question(s) of gsm8k left out" in capsys.readouterr().out
  everything = set_at("sources", "math", "ok", [[0, 0], [0, 0]])
  gone = save(tmp_path / "gone", ONE, edit=everything)
  assert call(ours, gone) == 2
  assert "math: no question has avg@2 in every run" in capsys.readouterr().err


def test_which_evaluation(tmp_path, capsys):
  folder = tmp_path / "run"
  save(folder, ONE, step=90)
  save(folder, TWO, step=100)
  newest = compare.load(str(folder))
  assert newest.results["step"] == 100 and newest.name == "run"
  assert newest.workdir == folder.resolve()
  older = folder / "eval" / "step_90"
  assert compare.load(str(older)).results["step"] == 90
  assert (
    compare.load(str(older / "results.json")).path.parent == older.resolve()
  )
  assert call(older, folder) == 0
  said = capsys.readouterr().out
  assert "not of the same training step: step_90 at 90; run at 100" in said
  loose = tmp_path / "loose.json"
  loose.write_text((older / "results.json").read_text())
  assert compare.load(str(loose)).workdir is None


@pytest.mark.parametrize(
  "content, message",
  [
    (None, "no such file or folder; name a run's workdir"),
    ({}, "--mode=eval --config CONFIG --workdir"),
    ({"results.json": "{"}, "no results of an evaluation"),
    ({"results.json": "[]"}, "no results of an evaluation"),
    ({"results.json": '{"format": 2}'}, "has format 2, allowed is 1"),
  ],
)
def test_no_evaluation(tmp_path, capsys, content, message):
  folder = tmp_path / "run"
  if content is not None:
    folder.mkdir()
    for name, text in content.items():
      (folder / name).write_text(text)
  assert call(folder) == 2
  assert message in capsys.readouterr().err


@pytest.mark.parametrize(
  "flag, message",
  [
    ("--out=t.html", "--out=t.html: allowed suffixes are .md, .tex, .csv"),
    ("--figure=f.gif", "--figure=f.gif: allowed suffixes are .png, .pdf"),
    ("--out={tmp}/run/eval/step_4/results.json/t.md", "results.json"),
  ],
)
def test_files_that_cannot_be_written(tmp_path, capsys, flag, message):
  run = save(tmp_path / "run", ONE)
  assert call(run, flag.format(tmp=tmp_path)) == 2
  assert message in capsys.readouterr().err


# -- figure --------------------------------------------------------------------


def test_the_figure(tmp_path, capsys):
  import matplotlib.image

  runs = list(seeds(tmp_path))
  rng = np.random.default_rng(0)
  for i, run in enumerate(runs):
    train(tmp_path / run, rng, 0.2 + 0.1 * (i % 2))
  out = tmp_path / "table.md"
  assert call(*runs, "--group=seed", "--out", out) == 0
  picture = matplotlib.image.imread(tmp_path / "table.png")
  assert picture.shape == (375, 1650, 4)
  for third in np.split(picture, 3, axis=1):  # lines all over each panel
    colored = np.ptp(third[..., :3], axis=-1) > 0.2
    assert colored.any(axis=1).sum() > 60 and colored.any(axis=0).sum() > 200
  spread = np.ptp(picture[:, 550:1100, :3], axis=-1)  # of the rewards
  assert ((spread > 0.04) & (spread < 0.2)).mean() > 0.05  # pale bands
  assert "not drawn" not in capsys.readouterr().out
  # Of one without a training, and of none.
  alone = save(tmp_path / "hf", {"a": np.ones([60, 8], int).tolist()})
  pdf = tmp_path / "f.pdf"
  assert call(runs[0], alone, "--figure", pdf) == 0
  assert pdf.read_bytes().startswith(b"%PDF")
  said = capsys.readouterr().out
  assert "runs without metrics.jsonl not drawn: hf" in said
  assert call(alone, "--figure", tmp_path / "none.png") == 0
  assert "no figure: no run has a metrics.jsonl" in capsys.readouterr().out
  assert not (tmp_path / "none.png").exists()


def test_lines_of_the_figure():
  steps = np.array([0, 10, 20])
  runs = [
    {
      "eval/avg@2": (steps, np.array([0.1, 0.2, 0.3])),
      "eval/avg@16": (steps[::2], np.array([0.0, 1.0])),
      "reward/team": (steps, np.zeros(3)),
      "reward/solver": (steps, np.array([0.1, 0.2, 0.3])),
      "grad_norm/p": (steps, np.ones(3)),
      "grad_norm/p/solver": (steps, np.ones(3)),
    },
    {"eval/avg@2": (steps[:2], np.array([0.3, 0.6]))},
  ]
  held_out, reward, norm = compare._panels(["x", "y"], [runs, runs[:1]])
  band, single = held_out.lines
  assert held_out.title == "Held-out avg@2 (mean and range of runs)"
  assert band.label == "x" and band.steps.tolist() == [0, 10]
  assert band.values == pytest.approx([0.2, 0.4])
  assert np.array(band.band) == pytest.approx(
    np.array([[0.1, 0.2], [0.3, 0.6]])
  )
  assert single.band is None and single.color != band.color
  assert [line.label for line in reward.lines] == ["x: solver", "y: solver"]
  assert [line.label for line in norm.lines] == ["x: solver", "y: solver"]


def test_the_door_is_light(tmp_path, root):
  """Neither help nor a comparison imports jax."""
  run = save(tmp_path / "run", ONE)
  for flags, code in ((["--help"], 0), ([run], 0), ([str(tmp_path)], 2)):
    done = subprocess.run(
      [sys.executable, "-X", "importtime", "-m", "drmas_jax.compare", *flags],
      cwd=root,
      env=os.environ | {"PYTHONPATH": str(root)},
      capture_output=True,
      text=True,
      timeout=60,
      check=False,
    )
    assert done.returncode == code, done.stderr[-2000:]
    loaded = {
      line.rpartition("|")[2].strip().split(".")[0]
      for line in done.stderr.splitlines()
      if line.startswith("import time:")
    }
    assert "argparse" in loaded
    assert not loaded & {"jax", "matplotlib", "orbax", "transformers", "scipy"}
