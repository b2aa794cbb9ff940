"""Generated sums and arithmetic, public sets, and rows of one's own."""

import collections
import json
import re
import signal
import subprocess
import sys
import types
import typing

import fsspec
import fsspec.implementations.memory
import huggingface_hub
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from drmas_jax import config, data
from drmas_jax.agents import math as agents
from drmas_jax.datasets import arithmetic, own, public, sums
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
  stream = data.Stream({"arithmetic": arithmetic.make("train")}, seed=0)
  tasks = stream.tasks(0, num)
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


# -- sums ----------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
  ("options", "sizes"),
  [
    ({}, (2 * 90**2 - 1620, 1620)),
    ({"low": 1, "high": 9, "operators": "*"}, (73, 8)),
    ({"low": 0, "high": 20, "operators": "+", "test_share": 0.25}, (331, 110)),
    ({"num_terms": 3, "operators": "*+-", "num_tasks": 3000}, (3000, 10_000)),
    (
      {"num_terms": 6, "low": 100, "num_tasks": 500, "high": 999},
      (500, 10_000),
    ),
  ],
)
def test_sums(options, sizes):
  splits = [sums.make(split, **options) for split in ("train", "test")]
  assert tuple(map(len, splits)) == sizes
  rows = [split[i] for split in splits for i in range(len(split))]
  assert len({row["question"] for row in rows}) == len(rows)
  low, high = options.get("low", 10), options.get("high", 99)
  signs = re.escape(options.get("operators", "+-"))
  form = re.compile(
    rf"\d+( [{signs}] \d+){{{options.get('num_terms', 2) - 1}}}"
  )
  for row in rows:
    assert form.fullmatch(row["question"])
    assert row["answer"] == str(eval(row["question"]))
    terms = map(int, re.findall(r"\d+", row["question"]))
    assert all(low <= term <= high for term in terms)


@pytest.mark.quick
def test_terms_and_operators_of_sums_are_spread():
  # Of the test split, all and at its start, from which evaluations take.
  source = sums.make("test", num_terms=3, operators="+-*")
  for num, tolerance in ((len(source), 0.05), (300, 0.25)):
    rows = [source[i]["question"].split() for i in range(num)]
    for place in range(0, 5, 2):
      tens = collections.Counter(row[place][0] for row in rows)
      assert len(tens) == 9
      assert max(tens.values()) < (1 + 2 * tolerance) * num / 9
    for place in (1, 3):
      counts = collections.Counter(row[place] for row in rows)
      assert all(
        abs(c - num / 3) < tolerance * num / 3 for c in counts.values()
      )


@pytest.mark.quick
def test_fingerprints_of_generated_sets():
  made = [
    sums.make("train"),
    sums.make("test"),
    sums.make("train", num_terms=3),
    sums.make("train", low=1),
    sums.make("train", high=98),
    sums.make("train", test_share=0.2),
    sums.make("train", operators="+"),
    sums.make("train", num_tasks=5),
    arithmetic.make("train"),
    arithmetic.make("train", modulus=9),
  ]
  prints = [source.fingerprint for source in made]
  assert len(set(prints)) == len(prints)
  # Operators in another order are the same questions.
  assert sums.make("train", operators="-+").fingerprint == prints[0]
  assert sums.make("train", operators="-+")[7] == made[0][7]


@pytest.mark.quick
@pytest.mark.parametrize(
  ("split", "options", "message"),
  [
    ("val", {}, "split='val' is not allowed; it has train, test"),
    ("train", {"num_terms": 1}, "num_terms=1 is not allowed; write one >= 2"),
    ("train", {"low": -1}, "low=-1"),
    ("train", {"high": 10}, "high=10 is not allowed; write one above low=10"),
    ("train", {"high": 10_000}, "high=10000"),
    ("train", {"test_share": 1.0}, "test_share=1.0"),
    ("train", {"num_tasks": 0}, "num_tasks=0"),
    ("train", {"operators": ""}, "operators=''"),
    (
      "train",
      {"operators": "+/"},
      "operators='\\+/' is not allowed; write some",
    ),
    ("train", {"operators": "++"}, "each once"),
  ],
)
def test_bad_options_of_sums(split, options, message):
  with pytest.raises(ValueError, match=message):
    sums.make(split, **options)


# -- public sets ---------------------------------------------------------------

READ = """
import json, sys
from drmas_jax.datasets import public
make = public.SETS["gsm8k"].make
source = make(sys.argv[1], data_dir=sys.argv[2], cache_dir=sys.argv[3])
assert len(source) == 3
rows = [(source[i]["question"], source[i]["answer"]) for i in (2, 0, 1)]
print(json.dumps([rows, source.fingerprint]))
print(sorted({"tensorflow", "jax", "torch"} & set(sys.modules)))
"""


def _python(*args, **kwargs):
  return subprocess.run(
    [sys.executable, "-c", *args],
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
    **kwargs,
  )


def _lines(path, rows):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _parquet(path, rows):
  path.parent.mkdir(parents=True, exist_ok=True)
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def _gsm8k(folder, answers):
  for split in ("train", "test"):
    rows = [
      {"id": i, "problem": f"{split} é {i}", "answer": answer, "solution": "?"}
      for i, answer in enumerate(answers)
    ]
    _lines(folder / f"gsm8k_{split}.jsonl", rows)


def _make(name, split, folder, tmp_path):
  cache = str(tmp_path / "cache")
  return public.SETS[name].make(split, data_dir=str(folder), cache_dir=cache)


def _all(source):
  return [source[i] for i in range(len(source))]


def test_a_set_is_built_and_read_without_tensorflow(tmp_path):
  _gsm8k(tmp_path / "in", ["1", "1,000", "-3"])
  seen = set()
  for _ in ("build", "read"):
    done = _python(READ, "test", tmp_path / "in", tmp_path / "out")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr == ""  # no bar where no terminal shows it
    rows, loaded = done.stdout.splitlines()
    seen.add(rows)
    assert json.loads(rows)[0] == [
      ["test é 2", "-3"],
      ["test é 0", "1"],
      ["test é 1", "1000"],
    ]
    assert loaded == "[]"
  assert len(seen) == 1


def test_a_changed_file_is_built_anew(tmp_path):
  prints = set()
  for answers in (["1", "2"], ["3", "4", "5"], ["3", "4", "6"]):
    _gsm8k(tmp_path / "in", answers)
    source = _make("gsm8k", "train", tmp_path / "in", tmp_path)
    assert [row["answer"] for row in _all(source)] == answers
    prints.add(source.fingerprint)
  assert len(prints) == 3


def test_what_is_missing_is_named(tmp_path):
  with pytest.raises(ValueError, match=r"data_dir=.*gsm8k_train\.jsonl"):
    _make("gsm8k", "train", tmp_path, tmp_path)
  with pytest.raises(ValueError, match=r"split='dev'.*train, test"):
    _make("gsm8k", "dev", tmp_path, tmp_path)
  with pytest.raises(ValueError, match=r"split='train'.*aime24 has test$"):
    _make("aime24", "train", tmp_path, tmp_path)


# What each repository of the hub has in a row, and what becomes of it.
_QA = {"question": "q", "golden_answers": ["a", "b"], "id": "test_0"}
HUB = {
  "dapo_math": (
    {
      "prompt": [
        {
          "role": "user",
          "content": "How many?\n\nLet's think step by step and output the "
          "final answer within \\boxed{}.",
        }
      ],
      "ability": "math",
      "reward_model": {"ground_truth": "34", "style": "rule"},
    },
    ("How many?", "34"),
  ),
  "math": ({"question": "q", "answer": "(3,4)"}, ("q", "(3,4)")),
  "gsm8k": (
    {"question": "q", "answer": "So 1+1=2.\n#### 1,234"},
    ("q", "1234"),
  ),
  "aime24": ({"id": 60, "problem": "p", "answer": "025"}, ("p", "025")),
  "aime25": ({"problem_idx": 1, "problem": "p", "answer": 70}, ("p", "70")),
  "amc23": (
    {"id": 0, "problem": "p", "answer": 27.0, "question": "other"},
    ("p", "27"),
  ),
  "math500": ({"problem": "p", "answer": "p - q", "level": 2}, ("p", "p - q")),
  "minerva": ({"problem": "p", "answer": "4.5e33"}, ("p", "4.5e33")),
  "olympiadbench": (
    {"problem": "p", "answer": ["$69$", "$84$"]},
    ("p", "$69$, $84$"),
  ),
  "nq_hotpotqa": (_QA | {"data_source": "nq"}, ("q", ["a", "b"])),
  "two_wiki": (_QA | {"data_source": "2wikimultihopqa"}, ("q", ["a", "b"])),
} | {
  name: (_QA | {"data_source": name}, ("q", ["a", "b"]))
  for name in ("nq", "hotpotqa", "triviaqa", "popqa", "musique", "bamboogle")
}


def _hub_file(name, split):
  return public.SETS[name].hub[split].pattern.replace("*", "00000-of-00001")


@pytest.mark.parametrize("name", public.SETS)
def test_the_layout_of_the_hub(name, tmp_path, monkeypatch):
  raw, ours = HUB[name]
  other = raw | {"data_source": "another"}
  asked = []

  def snapshot_download(repo, *, repo_type, allow_patterns, etag_timeout):
    assert repo_type == "dataset" and etag_timeout <= 60
    asked.append((repo, allow_patterns))
    return str(tmp_path / repo)

  monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
  row = public.SETS[name]
  for split in row.splits:
    file = tmp_path / row.repo / _hub_file(name, split)
    write = _lines if file.suffix == ".jsonl" else _parquet
    write(file, [other, raw] if row.hub[split].data_source else [raw])
  for split in row.splits:
    source = row.make(split, cache_dir=str(tmp_path / "cache"))
    [found] = _all(source)
    assert (found["question"], found["answer"]) == ours
    assert asked[-1] == (row.repo, [row.hub[split].pattern])
    # A snapshot in the folder gives the same rows, under either name.
    same = _make(name, split, tmp_path, tmp_path)
    assert same.fingerprint == source.fingerprint
    owner = tmp_path / row.repo.partition("/")[0]
    assert _make(name, split, owner, tmp_path).fingerprint == same.fingerprint


@pytest.mark.parametrize("folder", ["", "drmas_math"])
def test_the_layout_of_the_authors(folder, tmp_path):
  def prepared(name, question, answer):
    fields = {"ground_truth": answer, "question": question}
    return {
      "data_source": name,
      "prompt": [{"role": "user", "content": "?"}],
      "reward_model": {"style": "rule", "ground_truth": "?"},
      "env_kwargs": fields | {"data_source": name},
    }

  _parquet(
    tmp_path / folder / "test.parquet",
    [prepared("math500", "m", "1"), prepared("aime24", "a", "2")],
  )
  _parquet(
    tmp_path / folder / "train.parquet", [prepared("dapo_filter", "d", "3")]
  )
  for name, split, question, answer in (
    ("math500", "test", "m", "1"),
    ("aime24", "test", "a", "2"),
    ("dapo_math", "train", "d", "3"),
  ):
    [row] = _all(_make(name, split, tmp_path, tmp_path))
    assert row == {"question": question, "answer": answer, "info": {}}
  with pytest.raises(
    ValueError, match="no rows with data_source='amc23'; it has aime24, math500"
  ):
    _make("amc23", "test", tmp_path, tmp_path)


def test_search_rows_of_the_authors(tmp_path):
  golds = {"target": ["a", "b"]}
  row = {
    "data_source": "hotpotqa",
    "env_kwargs": {"ground_truth": golds, "question": "q"},
    "metadata": None,
  }
  _parquet(tmp_path / "drmas_search" / "train.parquet", [row])
  [found] = _all(_make("nq_hotpotqa", "train", tmp_path, tmp_path))
  assert found == {
    "question": "q",
    "answer": ["a", "b"],
    "info": {"data_source": "hotpotqa"},
  }


def test_parts_of_a_split_are_read_in_order(tmp_path):
  folder = tmp_path / "gsm8k" / "main"
  for i in (1, 0):
    _parquet(
      folder / f"train-0000{i}-of-00002.parquet",
      [{"question": f"q{i}", "answer": str(i)}],
    )
  rows = _all(_make("gsm8k", "train", tmp_path, tmp_path))
  assert [row["question"] for row in rows] == ["q0", "q1"]


@pytest.mark.parametrize(
  ("raw", "ours"),
  [
    ("['9.6\\n']", "9.6"),
    ("['6630.65\\n', '6630\\n']", "6630"),
    (r"['\\frac{1}{2}']", r"\frac{1}{2}"),
    ("[0,1]", "[0,1]"),
    ("[0,\\infty)", "[0,\\infty)"),
    ("__import__('os')", "__import__('os')"),
  ],
)
def test_answers_of_minerva(raw, ours, tmp_path):
  _lines(tmp_path / "minerva.jsonl", [{"problem": "p", "answer": raw}])
  [row] = _all(_make("minerva", "test", tmp_path, tmp_path))
  assert row["answer"] == ours


def test_answers_of_olympiadbench(tmp_path):
  """A list, or what the authors' preprocessing makes of one."""
  raw = [["2"], "['2']", "['$69$', '$84$']", "[0,1]", "$[1,2]$", []]
  rows = [{"problem": "p", "answer": answer} for answer in raw]
  _lines(tmp_path / "olympiadbench.jsonl", rows[:-1])
  made = _all(_make("olympiadbench", "test", tmp_path, tmp_path))
  golds = ["2", "2", "$69$, $84$", "[0,1]", "$[1,2]$"]
  assert [row["answer"] for row in made] == golds
  _lines(tmp_path / "olympiadbench.jsonl", rows[-1:])
  with pytest.raises(ValueError, match=r"row 0: the answer is ''"):
    _make("olympiadbench", "test", tmp_path, tmp_path)


def test_the_suffix_of_dapo_goes_and_nothing_else(tmp_path):
  end = (
    "let's  think step by step and output the final answer within \\boxed{}."
  )
  asked = [
    "Let's think step by step. How many?",
    "x" + "\\n\\n" + end,
    end + " y",
  ]
  _lines(
    tmp_path / "dapo_math.jsonl", [{"problem": q, "answer": 1} for q in asked]
  )
  rows = _all(_make("dapo_math", "train", tmp_path, tmp_path))
  assert [row["question"] for row in rows] == [asked[0], "x", asked[2]]


def test_only_math_leaves_rows_without_an_answer_out(tmp_path):
  rows = [{"problem": "a", "answer": ""}, {"problem": "b", "answer": "2"}]
  for file in ("math_train", "amc23"):
    _lines(tmp_path / f"{file}.jsonl", rows)
  [row] = _all(_make("math", "train", tmp_path, tmp_path))
  assert row["question"] == "b"
  with pytest.raises(
    ValueError, match=r"amc23\.jsonl: row 0: the answer is ''"
  ):
    _make("amc23", "test", tmp_path, tmp_path)


def test_columns_that_do_not_fit_are_named(tmp_path):
  _lines(tmp_path / "aime24.jsonl", [{"Problem": "p", "Answer": "1"}])
  for _ in range(2):  # nothing half is left by the first
    with pytest.raises(ValueError) as caught:
      _make("aime24", "test", tmp_path, tmp_path)
    text = str(caught.value)
    assert "aime24.jsonl: row 0: has the columns Problem, Answer; the " in text
    assert "is expected in env_kwargs.ground_truth or answer" in text
  (tmp_path / "aime25.jsonl").write_text("")
  with pytest.raises(ValueError, match=r"aime25\.jsonl: no rows"):
    _make("aime25", "test", tmp_path, tmp_path)
  (tmp_path / "test.parquet").write_text("not parquet")
  with pytest.raises(ValueError, match=r"test\.parquet: not a parquet file"):
    _make("amc23", "test", tmp_path, tmp_path)


def test_no_hub(tmp_path):
  # conftest.py keeps the hub's library off the network.
  with pytest.raises(ValueError) as caught:
    public.SETS["aime24"].make("test", cache_dir=str(tmp_path))
  text = str(caught.value)
  assert text.startswith("data_dir='hub': HuggingFaceH4/aime_2024 could not")
  assert "write data_dir=FOLDER" in text


def test_a_folder_in_a_bucket(tmp_path, monkeypatch):
  class Bucket(fsspec.implementations.memory.MemoryFileSystem):
    protocol = ("gs",)
    store: typing.ClassVar = {}
    pseudo_dirs: typing.ClassVar = [""]
    read: typing.ClassVar = []

    @classmethod
    def _strip_protocol(cls, path):
      return "/" + path.removeprefix("gs://").strip("/")

    def get_file(self, path, *args, **kwargs):
      self.read.append(path)
      return super().get_file(path, *args, **kwargs)

  fsspec.register_implementation("gs", Bucket, clobber=True)
  try:
    bucket = fsspec.filesystem("gs")
    text = json.dumps({"problem": "p", "answer": "1"}) + "\n"
    bucket.pipe("gs://b/data/aime24.jsonl", text.encode())
    for _ in range(2):
      [row] = _all(_make("aime24", "test", "gs://b/data", tmp_path))
      assert row["question"] == "p"
    assert len(Bucket.read) == 1  # copied once
    bucket.pipe("gs://b/data/aime24.jsonl", text.replace("1", "2").encode())
    [row] = _all(_make("aime24", "test", "gs://b/data", tmp_path))
    assert row["answer"] == "2"
    with pytest.raises(
      ValueError, match=r"data_dir='gs://b/data' has no amc23"
    ):
      _make("amc23", "test", "gs://b/data", tmp_path)
  finally:
    fsspec.register_implementation("gs", "gcsfs.GCSFileSystem", clobber=True)


KILLED = """
import os, signal, sys
from drmas_jax.datasets import public
rows = public.PublicSet._rows
def dying(self, *args):
  for i, row in enumerate(rows(self, *args)):
    if i == int(sys.argv[3]):
      os.kill(os.getpid(), signal.SIGKILL)
    yield row
public.PublicSet._rows = dying
public.SETS["gsm8k"].make("train", data_dir=sys.argv[1], cache_dir=sys.argv[2])
"""


def test_a_killed_build_leaves_nothing_half(tmp_path):
  _gsm8k(tmp_path / "in", [str(i) for i in range(50)])
  done = _python(KILLED, tmp_path / "in", tmp_path / "cache", "30")
  assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
  assert list((tmp_path / "cache").rglob("*incomplete*"))  # it had begun
  source = _make("gsm8k", "train", tmp_path / "in", tmp_path)
  assert [int(row["answer"]) for row in _all(source)] == list(range(50))
  assert not list((tmp_path / "cache").rglob("*incomplete*"))


def test_two_processes_build_one(tmp_path):
  _gsm8k(tmp_path / "in", ["1", "2", "3"])
  args = [
    sys.executable,
    "-c",
    READ,
    "train",
    tmp_path / "in",
    tmp_path / "out",
  ]
  both = [
    subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for _ in range(2)
  ]
  outs = [process.communicate(timeout=120) for process in both]
  assert [p.returncode for p in both] == [0, 0], outs
  assert outs[0][0] == outs[1][0]
  assert len(list((tmp_path / "out").glob("gsm8k-train-*/"))) == 1


def test_a_lock_is_waited_for_with_a_limit(tmp_path, monkeypatch):
  monkeypatch.setattr(public, "_LOCK_TIMEOUT_S", 0.2)
  path = tmp_path / "x.lock"
  with (
    public._locked(path),
    pytest.raises(ValueError, match=r"cache_dir: .*x\.lock for 0\.2 s"),
    public._locked(path),
  ):
    pass
  with public._locked(path):  # it was given back
    pass


def test_a_cache_that_cannot_be_written(tmp_path):
  _gsm8k(tmp_path, ["1"])
  with pytest.raises(ValueError, match=r"cache_dir: .*Not a directory"):
    public.SETS["gsm8k"].make(
      "train",
      data_dir=str(tmp_path),
      cache_dir=str(tmp_path / "gsm8k_test.jsonl" / "cache"),
    )


def test_the_table_stands_beside_the_files(root):
  files = {p.stem for p in (root / "drmas_jax" / "datasets").glob("*.py")}
  assert not files & set(public.SETS)
  for name, row in public.SETS.items():
    assert name.isidentifier() and row.name == name
    assert set(row.files) == set(row.hub) <= {"train", "test"}
    assert config.load_module("datasets", name) is row
  with pytest.raises(config.ConfigError, match=r"aime24, .*arithmetic.*own"):
    config.load_module("datasets", "aime2024")


def test_the_real_rows(shared, tmp_path):
  """Numbers of the paper's sets, where the files are whole."""
  folder = shared / "data" / "math"
  whole = {
    ("gsm8k", "train"): 7473,
    ("gsm8k", "test"): 1319,
    ("math", "train"): 7472,
    ("aime24", "test"): 30,
    ("aime25", "test"): 30,
    ("amc23", "test"): 40,
    ("math500", "test"): 500,
    ("minerva", "test"): 272,
    ("olympiadbench", "test"): 675,
  }
  for (name, split), num in whole.items():
    source = _make(name, split, folder, tmp_path)
    assert len(source) == num, name
    assert all(isinstance(source[i]["answer"], str) for i in range(0, num, 9))
  rows = [
    json.loads(line)
    for line in (folder / "gsm8k_test.jsonl").read_bytes().splitlines()
  ]
  source = _make("gsm8k", "test", folder, tmp_path)
  for i in (0, 700, 1318):
    wanted = (rows[i]["problem"], rows[i]["answer"])
    assert (source[i]["question"], source[i]["answer"]) == wanted
  for name in ("nq", "hotpotqa", "triviaqa", "popqa", "two_wiki", "musique"):
    source = _make(name, "test", shared / "data" / "qa", tmp_path)
    assert len(source) >= 1000
    assert all(isinstance(source[i]["answer"], list) for i in range(0, 1000, 9))
  assert (
    len(_make("bamboogle", "test", shared / "data" / "qa", tmp_path)) == 125
  )


# -- rows of one's own ---------------------------------------------------------

ROWS = [
  {"question": "1+1", "answer": 2, "meta": {"level": "easy"}},
  {
    "question": "a\u2028b\u0085c\rd",
    "answer": ["x", " y "],
    "meta": {"level": 1},
  },
  {"question": "half?", "answer": 0.5, "meta": {"level": None}},
]
OURS = [
  {"question": "1+1", "answer": "2", "info": {"how": "easy"}},
  {
    "question": "a\u2028b\u0085c\rd",
    "answer": ["x", "y"],
    "info": {"how": 1},
  },
  {"question": "half?", "answer": "0.5", "info": {"how": None}},
]
INFO = {"how": "meta.level"}


class _Squares:
  """Rows that are made when asked for."""

  fingerprint = "squares"

  def __len__(self):
    return 10**9

  def __getitem__(self, index):
    return {"question": f"{index}^2", "answer": index**2}


@pytest.fixture
def module(monkeypatch):
  found = types.ModuleType("my_rows")
  found.ROWS = ROWS
  found.SQUARES = _Squares()
  found.NUMBER = 3
  found.PAIRS = [("1+1", 2)]
  monkeypatch.setitem(sys.modules, "my_rows", found)
  return found


@pytest.mark.quick
def test_own_rows_are_the_same_from_every_place(tmp_path, module):
  text = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
  (tmp_path / "train.jsonl").write_bytes(text.replace("\n", "\r\n\n").encode())
  as_text = [ROWS[0] | {"answer": "2"}, ROWS[2] | {"answer": "0.5"}]
  _parquet(tmp_path / "train.parquet", [r | {"meta": None} for r in as_text])
  lines = own.make("train", rows=f"{tmp_path}/{{split}}.jsonl", info=INFO)
  objects = own.make("train", rows={"train": "my_rows:ROWS"}, info=INFO)
  assert _all(lines) == _all(objects) == OURS
  assert lines.fingerprint == objects.fingerprint
  table = own.make("train", rows=f"{tmp_path}/{{split}}.parquet")
  assert _all(table) == [row | {"info": {}} for row in (OURS[0], OURS[2])]
  other = own.make("train", rows={"train": "my_rows:ROWS"})
  assert other.fingerprint != objects.fingerprint
  with pytest.raises(IndexError, match=r"index 3 is not in \[0, 3\)"):
    objects[3]


@pytest.mark.quick
def test_own_rows_and_a_public_set_of_them_have_one_fingerprint(tmp_path):
  _lines(tmp_path / "aime24.jsonl", [{"problem": "p", "answer": 7}])
  mine = own.make(
    "test", rows={"test": f"{tmp_path}/aime24.jsonl"}, question="problem"
  )
  made = _make("aime24", "test", tmp_path, tmp_path)
  assert mine.fingerprint == made.fingerprint


@pytest.mark.quick
def test_rows_that_name_their_content_are_not_read(module):
  source = own.make("test", rows={"test": "my_rows:SQUARES"})
  assert len(source) == 10**9
  assert source[12345]["answer"] == str(12345**2)
  other = own.make(
    "test", rows={"test": "my_rows:SQUARES"}, info={"q": "answer"}
  )
  assert source.fingerprint != other.fingerprint


@pytest.mark.quick
def test_a_big_file_is_not_held_in_memory(tmp_path):
  path = tmp_path / "big.jsonl"
  _lines(path, [{"question": str(i), "answer": i} for i in range(5000)])
  rows = own.JsonLines(path)
  held = sum(
    sys.getsizeof(value)
    for name, value in vars(rows).items()
    if name != "_path"
  )
  assert held < path.stat().st_size
  assert rows[4321] == {"question": "4321", "answer": 4321}


@pytest.mark.quick
@pytest.mark.parametrize(
  ("text", "options", "message"),
  [
    (
      '{"question": "q"}',
      {},
      "t.jsonl:1: no field 'answer'; it has question; ",
    ),
    ("\n\n{oops", {}, r"t\.jsonl:3: not JSON \(Expecting"),
    pytest.param(
      "[" * 100_000, {}, r"t\.jsonl:1: not JSON \(.*; mend the line", id="deep"
    ),
    ("[1]", {}, r"t\.jsonl:1: list, not a JSON object"),
    (
      '{"question": "q", "answer": ""}',
      {},
      ":1: the answer is ''; write a text",
    ),
    ('{"question": "q", "answer": []}', {}, r"the answer is \[\]"),
    ('{"question": "q", "answer": ["a", " "]}', {}, "the answer is ' '"),
    ('{"question": "q", "answer": null}', {}, "the answer is None"),
    ('{"question": "q", "answer": true}', {}, "the answer is True"),
    ('{"question": "q", "answer": NaN}', {}, "the answer is nan; write a text"),
    ('{"question": " ", "answer": 1}', {}, "the question is ' '; write a text"),
    (
      '{"question": "q", "answer": 1, "a": [{"b": 2}]}',
      {"info": {"x": "a.1.b"}},
      r"no field 'a\.1\.b'; it has question, answer, a; set info\.x",
    ),
    (
      '{"question": "q", "answer": 1}',
      {"question": "question.text"},
      "no field 'question.text'",
    ),
  ],
)
def test_bad_rows_of_ones_own(text, options, message, tmp_path):
  (tmp_path / "t.jsonl").write_text(text)
  with pytest.raises(ValueError, match=message):
    own.make("t", rows=f"{tmp_path}/{{split}}.jsonl", **options)


@pytest.mark.quick
@pytest.mark.parametrize(
  ("rows", "message"),
  [
    ("a.jsonl", r"rows='a\.jsonl' does not say which split .*\{split\}"),
    (5, "rows=5 does not say"),
    ({"train": "a.jsonl"}, "split='test' is not allowed; rows has train"),
    ({"test": "/none/a.jsonl"}, r"/none/a\.jsonl: no such file"),
    ({"test": "a.csv"}, "rows='a.csv' is not allowed; write the path of"),
    ({"test": "my_rows:NO"}, "rows='my_rows:NO' cannot be used"),
    ({"test": "my_rows:NUMBER"}, "rows='my_rows:NUMBER' cannot be used"),
    ({"test": "no_such_module:ROWS"}, "No module named 'no_such_module'"),
    ({"test": "my_rows:PAIRS"}, "PAIRS: row 0: tuple, not a mapping of fields"),
  ],
)
def test_bad_places_of_ones_own_rows(rows, message, module):
  with pytest.raises(ValueError, match=message):
    own.make("test", rows=rows)


@pytest.mark.quick
def test_dotted_keys():
  row = {"a": {"b": [{"c": 1}, 2]}, "a.b": 3}
  assert own.find(row, "a.b") == 3
  assert own.find(row, "a") == {"b": [{"c": 1}, 2]}
  assert own.find({"a": row["a"]}, "a.b.0.c") == 1
  assert own.find(row["a"], "b.1") == 2
  for key in ("x", "a.x", "a.c.0", "a.b.x"):
    with pytest.raises(LookupError):
      own.find(row if key != "a.b.x" else {"a": row["a"]}, key)


def test_one_file_is_cut_in_two(tmp_path):
  """The last rows are held out, and an error names a row's own line."""
  path = tmp_path / "all.jsonl"
  rows = [{"question": str(i), "answer": i} for i in range(5)]
  path.write_text("\n".join(map(json.dumps, rows)))
  train, test = (
    own.make(split, rows=str(path), held_out=2) for split in ("train", "test")
  )
  assert [r["question"] for r in train] == ["0", "1", "2"]
  assert [r["question"] for r in test] == ["3", "4"]
  assert train.fingerprint != test.fingerprint
  with pytest.raises(IndexError):
    train[3]
  for options, wrong in (
    ({"held_out": 5}, "all.jsonl has 5 rows"),
    ({"held_out": -1}, "held_out=-1 is not allowed"),
    ({"held_out": 1, "rows": {"train": str(path)}}, "splits of its own"),
  ):
    with pytest.raises(ValueError, match=wrong):
      own.make("train", **({"rows": str(path)} | options))
  with pytest.raises(ValueError, match="with held_out there are train, test"):
    own.make("dev", rows=str(path), held_out=1)
  path.write_text(path.read_text().replace('"answer": 4', '"gold": 4'))
  with pytest.raises(ValueError, match=r"all\.jsonl:5: no field 'answer'"):
    own.make("test", rows=str(path), held_out=2)
