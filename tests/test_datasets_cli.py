"""`python -m drmas_jax.datasets`: prepare and show, in and out of process."""

import json
import os
import subprocess
import sys

import pytest

from drmas_jax.datasets import __main__ as cli
from drmas_jax.datasets import public


@pytest.fixture
def run(capsys, tmp_path):
  """What a command prints and its exit code; {} is the scratch folder."""

  def run(command):
    code = cli.main(command.replace("{}", str(tmp_path)).split())
    out, err = capsys.readouterr()
    return code, out, err

  return run


def _lines(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _gsm8k(folder):
  questions = {
    "train": ["Two apples.", "How many?", "how  many", "3.5 km"],
    "test": ["HOW MANY!", "two \\$ apples", "35 km"],
  }
  for split, asked in questions.items():
    _lines(
      folder / f"gsm8k_{split}.jsonl",
      [{"problem": q, "answer": f"so\n#### {i}"} for i, q in enumerate(asked)],
    )


def test_prepare_and_show(run, tmp_path):
  _gsm8k(tmp_path)
  where = "--data_dir {} --cache_dir {}/cache"
  code, out, err = run(f"prepare gsm8k {where}")
  assert (code, err) == (0, "")
  first, second = out.splitlines()
  assert first.startswith("gsm8k train: 4 rows in ")
  assert second.startswith("gsm8k test: 3 rows in ")
  folder = first.split(" rows in ")[1].rpartition(" (")[0]
  assert os.path.isfile(os.path.join(folder, "fingerprint"))

  code, out, err = run(f"show gsm8k {where} --rows 1")
  assert (code, err) == (0, "")
  train, test = (
    public.SETS["gsm8k"].make(
      split, data_dir=str(tmp_path), cache_dir=f"{tmp_path}/cache"
    )
    for split in ("train", "test")
  )
  assert (
    out
    == f"""\
gsm8k train
  rows          4
  fingerprint   {train.fingerprint}
  question      characters: least 6, quarter 8, half 9, 95 % 11, most 11
  answer        4 integers
  duplicates    0 exact, 1 normalised: rows 1 = 2
  golds         each is right against itself
  row 0
    question    'Two apples.'
    answer      '0'
    info        {{}}
gsm8k test
  rows          3
  fingerprint   {test.fingerprint}
  question      characters: least 5, quarter 7, half 9, 95 % 13, most 13
  answer        3 integers
  duplicates    0 exact, 0 normalised
  golds         each is right against itself
  row 0
    question    'HOW MANY!'
    answer      '0'
    info        {{}}
gsm8k train and gsm8k test share 0 exact, 1 normalised: rows 1 = 0
"""
  )


def test_a_split_that_is_not_there(run, tmp_path):
  _gsm8k(tmp_path)
  (tmp_path / "gsm8k_train.jsonl").unlink()
  where = "--data_dir {} --cache_dir {}/cache"
  # The others are prepared all the same, unless it was asked for.
  code, out, err = run(f"prepare gsm8k {where}")
  assert code == 0
  assert out.startswith("gsm8k test: 3 rows in ") and out.count("\n") == 1
  assert err.startswith("gsm8k train: data_dir=") and err.count("\n") == 1
  code, out, err = run(f"prepare gsm8k --split test --split train {where}")
  assert code == 2 and out.startswith("gsm8k test: 3 rows in ")
  assert "drmas_jax.datasets: gsm8k train: data_dir=" in err


@pytest.mark.quick
def test_show_rows_of_ones_own(run, tmp_path, monkeypatch):
  def grade(completion, gold):
    assert completion == rf"\boxed{{{gold}}}"
    return "}}" not in gold

  monkeypatch.setattr(cli.grading, "grade", grade)
  rows = [
    {"problem": "1 + 1", "gold": {"text": 2}},
    {"problem": "1+1.", "gold": {"text": "2"}},
    {"problem": "$\\left( 1 , 2\\right)\\,$", "gold": {"text": "(1,2)"}},
    {"problem": "(1,2)", "gold": {"text": ["a", "b"]}},
    {"problem": "(1, 2)", "gold": {"text": ["c"]}},
    {"problem": "half", "gold": {"text": "\\frac{1}{2}}"}},
    {"problem": "half", "gold": {"text": "0.5"}},
  ]
  _lines(tmp_path / "my.jsonl", rows)
  fields = "--question problem --answer gold.text --rows 0"
  code, out, err = run(f"show {{}}/my.jsonl {fields}")
  assert (code, err) == (0, "")
  told = out.splitlines()
  assert told[0] == f"{tmp_path}/my.jsonl"
  assert told[4:] == [
    "  answer        2 integers, 3 other texts, 1 lists of 2 or more, "
    "1 lists of 1",
    "  duplicates    1 exact, 4 normalised: rows 0 = 1, 2 = 3, 2 = 4, 5 = 6",
    "  golds         1 wrong against themselves:",
    "    row 5: '\\\\frac{1}{2}}'",
  ]
  # Two files, compared.
  _lines(tmp_path / "train.jsonl", rows[:2])
  _lines(tmp_path / "test.jsonl", rows[1:4])
  code, out, err = run(f"show {{}}/{{split}}.jsonl {fields}")
  assert (code, err) == (0, "")
  last = out.splitlines()[-1]
  assert last.endswith("test share 1 exact, 1 normalised: rows 0 = 0")


@pytest.mark.quick
def test_show_what_is_generated(run):
  code, out, err = run(
    "show sums --option low=1 --option high=9 --option operators=+ --rows 0"
  )
  assert (code, err) == (0, "")
  assert "sums train\n  rows          73\n" in out
  assert "sums test\n  rows          8\n" in out
  assert out.endswith("no two of them share a question\n")
  code, out, err = run("show arithmetic --split test --rows 1")
  assert (code, err) == (0, "")
  assert "from left to right, modulo 10'\n" in out
  assert "train" not in out


def test_show_counts_tokens(run, root):
  folder = root / "drmas_jax" / "models" / "tiny" / "solver"
  code, out, _ = run(
    f"show arithmetic --split test --rows 0 --tokenizer {folder}"
  )
  assert code == 0
  [line] = [line for line in out.splitlines() if "tokens:" in line]
  # Five digits, four operators, and what follows them in three tokens.
  assert line.endswith(
    "tokens: least 12, quarter 12, half 12, 95 % 12, most 12"
  )


@pytest.mark.quick
@pytest.mark.parametrize(
  ("command", "message"),
  [
    ("show nope", "'nope' not found; allowed are aime24, "),
    ("show public", "'public' has no make"),
    ("show sums --split val", "sums val: split='val' is not allowed"),
    ("show sums --data_dir x", "sums: got an unexpected keyword argument 'dat"),
    ("show sums --option high=9", "high=9 is not allowed; write one above low"),
    ("show sums --option high", "--option high: write KEY=VALUE"),
    ("show own", "own: missing a required argument: 'rows'; its options are"),
    ("show {}/none.jsonl", "none.jsonl: no such file"),
    ("show json:NONE", "rows='json:NONE' cannot be used"),
    ("show a.jsonl --split test", "--split: a.jsonl is one file or object"),
    ("show aime24 --data_dir {}", "aime24 test: data_dir="),
    ("prepare sums", "'sums' needs no preparing; allowed are dapo_math, math"),
    (
      "show sums --split test --rows 0 --tokenizer {}/none",
      "none: no tokenizer.json there that can be read (",
    ),
  ],
)
def test_bad_arguments(run, command, message):
  code, _, err = run(command)
  assert code == 2
  assert err.startswith("drmas_jax.datasets: ") and message in err
  assert "Traceback" not in err


@pytest.mark.quick
def test_an_unknown_flag(run):
  with pytest.raises(SystemExit) as caught:
    run("show sums --nope")
  assert caught.value.code == 2


@pytest.mark.quick
def test_the_door_is_light_and_lists_the_sets(root):
  code = (
    "import sys; from drmas_jax.datasets import __main__ as cli; cli.main([]); "
    "print(sorted({'jax', 'transformers', 'tensorflow', 'pyarrow', "
    "'tensorflow_datasets', 'huggingface_hub'} & set(sys.modules)))"
  )
  done = subprocess.run(
    [sys.executable, "-c", code],
    cwd=root,
    capture_output=True,
    text=True,
    timeout=60,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  *listed, loaded = done.stdout.splitlines()
  assert loaded == "[]"
  for name, row in public.SETS.items():
    assert any(name in line and row.repo in line for line in listed)
