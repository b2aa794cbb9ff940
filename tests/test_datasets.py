"""Generated arithmetic, and public sets through the one builder."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from drmas_jax import data
from drmas_jax.agents import math as agents
from drmas_jax.datasets import arithmetic, gsm8k
from drmas_jax.grading import math as grading


def _value(question):
  """The answer by Python's own arithmetic, reduced once at the end."""
  chain, modulus = re.fullmatch(
    r"([\d+*-]+) from left to right, modulo (\d+)", question
  ).groups()
  first, *steps = re.findall(r"[+*-]?\d+", chain)
  expression = "(" * len(steps) + first + "".join(s + ")" for s in steps)
  return eval(expression) % int(modulus)


@pytest.mark.quick
def test_train_and_test_share_no_question_and_repeat_none():
  train, test = arithmetic.make("train"), arithmetic.make("test")
  questions = [s[i]["question"] for s in (train, test) for i in range(len(s))]
  assert len(train) == 100_000 and len(test) == 10_000
  assert len(set(questions)) == len(questions)


@pytest.mark.quick
def test_the_splits_of_a_small_space_are_all_of_it():
  splits = [
    arithmetic.make(split, num_operands=3, modulus=4)
    for split in ("train", "test")
  ]
  sizes = [len(split) for split in splits]
  assert sizes == [576 - 57, 57]
  questions = {s[i]["question"] for s in splits for i in range(len(s))}
  assert len(questions) == 4**3 * 3**2


@pytest.mark.quick
@pytest.mark.parametrize(("operands", "modulus"), [(2, 10), (4, 10), (6, 97)])
def test_answers(operands, modulus):
  source = arithmetic.make("test", num_operands=operands, modulus=modulus)
  for i in range(0, len(source), max(1, len(source) // 200)):
    row = source[i]
    assert row["answer"] == str(_value(row["question"]))
    assert len(row["info"]["operands"]) == operands
  again = arithmetic.make("test", num_operands=operands, modulus=modulus)
  assert again[7] == source[7]


@pytest.mark.quick
def test_answers_and_operators_are_spread():
  source = arithmetic.make("train")
  rows = [source[i] for i in range(5000)]
  answers = np.bincount([int(r["answer"]) for r in rows], minlength=10)
  # Of 5000; a product with 0 or an even number makes those likelier.
  assert answers.min() > 250 and answers.max() < 1500
  operators = "".join(r["info"]["operators"] for r in rows)
  assert all(6200 < operators.count(o) < 7200 for o in "+-*")


@pytest.mark.quick
@pytest.mark.parametrize(
  ("split", "options", "message"),
  [
    ("val", {}, "split='val'"),
    ("train", {"num_operands": 1}, "num_operands=1"),
    ("train", {"modulus": 1}, "modulus=1"),
    ("train", {"num_tasks": 0}, "num_tasks=0"),
  ],
)
def test_bad_options(split, options, message):
  with pytest.raises(ValueError, match=message):
    arithmetic.make(split, **options)


@pytest.mark.quick
def test_an_index_outside_is_refused():
  source = arithmetic.make("test", num_operands=2)
  with pytest.raises(IndexError, match=r"index 30 is not in \[0, 30\)"):
    source[len(source)]


def _demonstrations(num, **options):
  rng = np.random.default_rng(0)
  tasks = data.Stream(arithmetic.make("train"), seed=0).tasks(0, num)
  return [
    (task, arithmetic.demonstrations(task, rng, **options)) for task in tasks
  ]


@pytest.mark.quick
def test_without_noise_a_team_is_right_and_says_so():
  none = dict.fromkeys(
    ("solver_noise", "solver_slip", "verifier_noise", "verifier_flip"), 0.0
  )
  for task, shown in _demonstrations(200, **none):
    (solution,), (verdict,) = shown["solver"], shown["verifier"]
    assert solution.args == (task, ())
    assert grading.grade(solution.completion, task.answer)
    # The steps are there, and the verifier's are the same ones.
    steps = re.findall(r"\d+", solution.completion)
    assert len(steps) == 4
    assert verdict.completion == f"{','.join(steps)}<verify>approve</verify>"
    assert verdict.args == (task, (("solver", solution.completion),))


@pytest.mark.quick
def test_demonstrated_team():
  first, last, rejected = [], [], []
  for task, shown in _demonstrations(3000):
    solutions, (verdict,) = shown["solver"], shown["verifier"]
    reply = agents.verifier.parse(verdict.completion, "tag")
    assert reply.valid
    assert len(solutions) == (2 if reply.verdict == "reject" else 1)
    for d in solutions:
      assert agents.solver.parse(d.completion, "stop").valid
    if len(solutions) == 2:
      assert solutions[1].args[1] == (
        ("solver", solutions[0].completion),
        ("verifier", verdict.completion),
      )
    right = [grading.grade(d.completion, task.answer) for d in solutions]
    first.append(right[0])
    last.append(right[-1])
    rejected.append(reply.verdict == "reject")
  first, last, rejected = map(np.array, (first, last, rejected))
  # Something is left to learn, and the verifier is worth listening to.
  assert 0.2 < first.mean() < last.mean() < 0.5
  assert last.mean() - first.mean() > 0.05
  balanced = ((~rejected)[first].mean() + rejected[~first].mean()) / 2
  assert balanced > 0.85


@pytest.mark.quick
def test_demonstrations_are_a_function_of_the_generator():
  assert _demonstrations(20) == _demonstrations(20)


# -- public sets ---------------------------------------------------------------

READ = """
import sys
from drmas_jax.datasets import gsm8k
source = gsm8k.make(sys.argv[1], data_dir=sys.argv[2], cache_dir=sys.argv[3])
assert len(source) == 3
print([(source[i]["question"], source[i]["answer"]) for i in (2, 0, 1)])
print(sorted({"tensorflow", "jax", "torch"} & set(sys.modules)))
"""


def _write(folder, answers):
  folder.mkdir(exist_ok=True)
  for split in ("train", "test"):
    rows = [
      {"id": i, "problem": f"{split} é {i}", "answer": answer, "solution": "?"}
      for i, answer in enumerate(answers)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"gsm8k_{split}.jsonl").write_text(text)


def test_gsm8k_is_built_and_read_without_tensorflow(tmp_path):
  _write(tmp_path / "in", ["1", "1,000", "-3"])
  for _ in ("build", "read"):
    done = subprocess.run(
      [sys.executable, "-c", READ, "test", tmp_path / "in", tmp_path / "out"],
      capture_output=True,
      text=True,
      timeout=120,
      check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows, loaded = done.stdout.splitlines()[-2:]
    assert eval(rows) == [
      ("test é 2", "-3"),
      ("test é 0", "1"),
      ("test é 1", "1,000"),
    ]
    assert loaded == "[]"


def test_a_changed_file_is_built_anew(tmp_path):
  for answers in (["1", "2"], ["3", "4", "5"]):
    _write(tmp_path / "in", answers)
    source = gsm8k.make(
      "train", data_dir=str(tmp_path / "in"), cache_dir=str(tmp_path / "out")
    )
    assert [source[i]["answer"] for i in range(len(source))] == answers


def test_what_is_missing_is_named(tmp_path):
  with pytest.raises(ValueError, match=r"data_dir=.*gsm8k_train\.jsonl"):
    gsm8k.make("train", data_dir=str(tmp_path))
  with pytest.raises(ValueError, match=r"split='dev'.*train, test"):
    gsm8k.make("dev", data_dir=str(tmp_path))


def test_the_real_gsm8k(shared, tmp_path):
  folder = shared / "data" / "math"
  source = gsm8k.make("test", data_dir=str(folder), cache_dir=str(tmp_path))
  lines = (folder / "gsm8k_test.jsonl").read_text().splitlines()
  assert len(source) == len(lines) == 1319
  for i in (0, 700, 1318):
    row = json.loads(lines[i])
    assert source[i] == {"question": row["problem"], "answer": row["answer"]}
    assert grading.grade(rf"\boxed{{{row['answer']}}}", source[i]["answer"])
