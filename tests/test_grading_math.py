r"""The last box against the gold answer: RULES 18, 19 and 21.

cases/math.jsonl holds the public reports by their id, and under "own" (and
"percent") rows for the rest of each report's kind.
"""

import concurrent.futures
import json
import pathlib
import re
import time

import hypothesis
import pytest
from hypothesis import strategies as st

from drmas_jax.grading import algebra, answers, pool, tokens, tree
from drmas_jax.grading import math as grading

CASES = [
  json.loads(line)
  for line in (pathlib.Path(__file__).parent / "cases" / "math.jsonl")
  .read_text(encoding="utf-8")
  .splitlines()
]
PAIRS = [
  (row["pred"], row["gold"], row["correct"])
  for row in CASES
  if "pred" in row and row["id"] != "percent"
]


def boxed(row):
  return row["text"] if "text" in row else rf"so \boxed{{{row['pred']}}}"


@pytest.mark.quick
@pytest.mark.parametrize("name", sorted({row["id"] for row in CASES}))
def test_cases(name):
  wrong = [
    row
    for row in CASES
    if row["id"] == name
    and grading.grade(boxed(row), row["gold"]) is not row["correct"]
  ]
  assert not wrong


@pytest.mark.quick
def test_verdicts_are_symmetric():
  wrong = [
    (a, b)
    for a, b, same in PAIRS
    if not grading.equal(a, b) is grading.equal(b, a) is same
  ]
  assert not wrong


@pytest.mark.quick
def test_threads_give_the_same_verdicts(monkeypatch):
  # Its own pool, or the cache would answer.
  own = pool.Pool(2)
  monkeypatch.setattr(pool, "verdict", own.verdict)
  with concurrent.futures.ThreadPoolExecutor(8) as threads:
    verdicts = threads.map(lambda r: grading.grade(boxed(r), r["gold"]), CASES)
    wrong = [
      row
      for row, verdict in zip(CASES, verdicts, strict=True)
      if verdict is not row["correct"]
    ]
  own.close()
  assert not wrong
  assert own.num_faults == 0


@pytest.mark.quick
def test_what_is_quick_is_right():
  """And what is not takes algebra: `quick` says None only for expressions."""
  unsure = 0
  for a, b, same in PAIRS:
    verdict = grading.quick(a, b)
    unsure += verdict is None
    assert verdict in (None, same), (a, b)
    assert algebra.verdict(a, b, False) is same, (a, b)
  assert 0 < unsure < len(PAIRS) / 3


@pytest.mark.quick
@pytest.mark.parametrize(
  ("completion", "correct"),
  [
    (r"4+5=9, so \boxed{9}", True),
    (r"<think>\boxed{9}</think>", False),
    (r"<think>\boxed{8}</think> \boxed{9}", True),
    (r"<think> \boxed{9}", False),
    (r"<THINK>\boxed{9}</THINK>", False),
    (r"\boxed{8}</think> \boxed{9}", True),
    (r"\boxed{9} no, \boxed{8}", False),
    (r"\boxed{9} \boxed{}", False),
    (r"\boxed{9} \boxed{", False),
    ("9", False),
    ("", False),
    (r"\boxed 9", True),
    (r"\fbox{9}", True),
    (r"$$\boxed{9}$$", True),
    (r"\boxed{\boxed{9}}", True),
  ],
)
def test_which_box(completion, correct):
  assert grading.grade(completion, "9") is correct
  assert grading.grade(completion, 9) is correct
  assert grading.grade(completion, ["7", 9.0]) is correct
  assert grading.grade(completion, "['7', '9\\n']") is correct
  assert not grading.grade(completion, ["6", "7"])


@pytest.mark.quick
def test_a_list_is_no_guess_at_several_golds():
  assert grading.grade(r"\boxed{1}", "['1', '2']")
  assert not grading.grade(r"\boxed{['1', '3']}", "['1', '2']")
  assert not grading.grade(r"\boxed{['1', '2']}", "1")


@pytest.mark.quick
def test_extracted_and_whole_answers_are_graded_alike():
  text = r"Answer: \boxed{\frac{10}{2}}"
  assert grading.grade(text, "5")
  assert grading.answer_of(text) == r"\frac{10}{2}"
  assert grading.equal(grading.answer_of(text), "5")


@pytest.mark.quick
@pytest.mark.parametrize(
  "same",
  [
    (r"\sqrt{8}", r"2\sqrt2", r"\frac{4}{\sqrt{2}}"),
    ("0.5", r"\frac12", "1/2", "x = 0.5", r"0.5 \text{ cm}"),
    ("1,2", "2, 1", r"\{1,2\}"),
    ("x+1", "1 + x"),
    ("1,234", "1234"),
    (r"\text{Tuesday}", "tuesday"),
    (r"1+i\sqrt3", r"1+\sqrt3 i"),
    (r"(1,\pi]", r"\left(1, \pi\right]"),
    (r"\pm 2", "2,-2"),
  ],
)
def test_votes_are_grouped(same):
  assert len({grading.canonical(answer) for answer in same}) == 1


@pytest.mark.quick
def test_votes_are_told_apart():
  answers_ = [
    "1",
    "-1",
    "1.5",
    "x",
    "2x",
    "(1,2)",
    "[1,2]",
    "(2,1)",
    "1,2",
    "?",
  ]
  assert len({grading.canonical(a) for a in answers_}) == len(answers_)


@pytest.mark.quick
@hypothesis.given(st.fractions())
def test_numbers_equal_themselves_in_every_form(value):
  top, bottom = value.numerator, value.denominator
  text = f"{top}/{bottom}"
  assert grading.quick(text, rf"\frac{{{top}}}{{{bottom}}}") is True
  assert grading.quick(text, f"{2 * top}/{2 * bottom}") is True
  assert grading.quick(text, f"{top + 1}/{bottom}") is False


@pytest.mark.quick
@hypothesis.given(st.integers(), st.integers(0, 10**6))
def test_thousands(value, other):
  assert grading.quick(f"{value:,}", str(value)) is True
  assert grading.quick(f"{value:,}", str(value + other + 1)) is False


TERMS = st.recursive(
  st.sampled_from(["2", "x", "y", "-3", r"\pi", r"\frac{1}{2}", "0.5"]),
  lambda inner: (
    st.builds(
      "{}{}{}".format,
      inner,
      st.sampled_from([" + ", " - ", r" \cdot "]),
      inner,
    )
    | st.builds(r"\left({}\right)^{{2}}".format, inner)
    | st.builds(r"\sqrt{{{}}}".format, inner)
  ),
  max_leaves=6,
)


@pytest.mark.quick
@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(TERMS)
def test_algebra_knows_equal_and_different_expressions(term):
  value = algebra.Numeric(10)
  node = algebra.answers.latex.parse(term)
  try:
    number = None if tree.symbols(node) else value.constant(node)
  except algebra.Undefined:
    hypothesis.assume(False)
  again = rf"\frac{{\sqrt{{7}} \left({term}\right)}}{{\sqrt{{7}}}}"
  assert algebra.verdict(term, again, False)
  assert not algebra.verdict(
    term, rf"\left({term}\right) + \frac{{1}}{{9}}", False
  )
  if number:
    assert not algebra.verdict(term, rf"-\left({term}\right)", False)


# -- hostile text --------------------------------------------------------------

PIECES = st.sampled_from(
  [
    *("\\frac", "{", "}", "(", ")", "[", "]", "\\{", "\\}", "|", "^", "_", "!"),
    *("\\sqrt", "\\left", "\\right", "\\pm", "\\text{", "\\begin{pmatrix}"),
    *("\\end{pmatrix}", "&", "\\\\", "\\cup", "\\in", "<", "=", "or", ",", ";"),
    *("1", "23", "0", ".5", "1e9", "x", "e", "i", "\\pi", "\\infty", "\\log"),
    *("\\sin", "%", "\\%", "$", "\\$", "'", "\\circ", "feet", " ", "-", "/"),
    *("\u0000", "√", "²", "½", "你", "__import__", "**", "\\binom", "9,999"),
  ]
)
HOSTILE = st.lists(PIECES, max_size=30).map("".join) | st.text(max_size=40)


@pytest.mark.quick
@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(HOSTILE, HOSTILE)
def test_any_text_gets_a_verdict(a, b):
  start = time.process_time()
  verdict = grading.quick(a, b)
  assert grading.quick(b, a) is verdict
  assert algebra.verdict(a, b, False) in (
    (True, False) if verdict is None else (verdict,)
  )
  assert grading.quick(a, a) is True
  grading.canonical(a)
  grading.grade(rf"\boxed{{{a}}}", b)
  assert time.process_time() - start < 2


LONG = [
  *("x" * 200_000, "9" * 100_000, "{" * 100_000, "\u0000", "9," * 50_000),
  "(" * 5000 + "1" + ")" * 5000,
  "\\frac{" * 2000 + "1" + "}{1}" * 2000,
  *("(" * 900 + "1" + ")" * 900, "{" * 900 + "2" + "}" * 900, "!" * 1000),
  *("\\sqrt" * 400 + "2", "2^" * 900 + "2", "x_" * 900 + "2", "|" * 1000),
  *(
    "-" * 1500 + "2",
    "\\pm" * 500 + "2",
    "3" + "!" * 1000,
    "\\sin" * 400 + "x",
  ),
  *("9**9**9**9", "9^{9^{9^9}}", "((((3!)!)!)!)!", "10000000!", "1e999999999"),
  *("10^{10^{10}}", r"\sin(10^{100000})", r"\binom{10^9}{5\cdot10^8}"),
  *("(1+x)^{100000000}", "e^{e^{e^{e^{e}}}}", "10^{99999999}" * 100, "0/0"),
  *("__import__('os').system('false')", r"\gcd(10^{99}!,3)", "1^{\\infty}"),
  "+".join([r"\sin(x)10^{3800}"] * 100),
]


@pytest.mark.quick
@pytest.mark.parametrize("answer", LONG, ids=lambda a: a[:12].encode().hex())
@pytest.mark.parametrize("gold", ["1", r"\sqrt{2}", "x+1", "(1,2)"])
def test_hostile_answers_are_wrong_in_time(answer, gold):
  grading.equal(r"\sqrt{2}", r"\sqrt{3}")  # a worker is up
  start = time.monotonic()
  assert grading.grade(rf"\boxed{{{answer}}}", gold) is False
  grading.canonical(answer)
  assert time.monotonic() - start < 2


@pytest.mark.parametrize(
  "unit", ["9", "9,", "9/", "{", "\\frac{", "\\left", "-", ".", " ", "1,234"]
)
@pytest.mark.quick
def test_long_completions_take_linear_time(unit):
  text = unit * (200_000 // len(unit))
  start = time.process_time()
  grading.grade(rf"\boxed{{{text}}}", "9")
  grading.equal(text, text + "1")
  assert time.process_time() - start < 2


@pytest.mark.quick
def test_an_answer_is_looked_into_up_to_a_limit():
  most = "1" + " " * (answers.MAX_LENGTH - 2)
  assert grading.equal(most, "01")
  assert not grading.equal(most + "  ." + " .", "01")


# -- golds of public sets ------------------------------------------------------


def _variants(gold):
  yield gold
  yield f" {gold} "
  yield f"${gold}$"
  yield gold.replace(r"\frac", r"\dfrac")
  for opening, closing in (("(", ")"), ("[", "]"), (r"\{", r"\}")):
    if r"\left" not in gold and r"\(" not in gold:
      gold = gold.replace(opening, rf"\left{opening}")
      gold = gold.replace(closing, rf"\right{closing}")
  yield gold
  yield re.sub(r"(?<!\\)([=+,])", r" \1 ", gold)


def test_every_gold_of_public_sets_is_right(shared):
  """RULES 21. Two rows of MATH's training set have no answer at all."""
  num_golds, empty, wrong = 0, 0, []
  for path in sorted((shared / "data" / "math").glob("*.jsonl")):
    with path.open(encoding="utf-8") as lines:
      golds = [json.loads(line)["answer"] for line in lines]
    for gold in golds:
      num_golds += 1
      if not str(gold).strip():
        empty += 1
        continue
      for variant in (*_variants(str(gold)), *tokens.alternatives(str(gold))):
        if not grading.grade(rf"So it is \boxed{{{variant}}}.", gold):
          wrong.append((path.name, gold, variant))
  assert num_golds > 19_000 and empty == 2
  # The last variant of these breaks a command of theirs.
  assert [w for w in wrong if not w[2].startswith(("4\\ ,", "B\\ ,"))] == []
