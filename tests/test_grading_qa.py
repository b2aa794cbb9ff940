"""Exact match and the tags it is read from: RULES 13-15 and 22.

cases/qa.jsonl holds the public reports by their id, and under "own" rows for
the rest of their kind. "search_r1" is what the reference's rule says.
"""

import json
import pathlib
import random
import string
import time

import hypothesis
import pytest
from hypothesis import strategies as st

from drmas_jax.agents.agent import find_block, one_block
from drmas_jax.grading import qa

pytestmark = pytest.mark.quick

CASES = [
  json.loads(line)
  for line in (pathlib.Path(__file__).parent / "cases" / "qa.jsonl")
  .read_text(encoding="utf-8")
  .splitlines()
]


@pytest.mark.parametrize("row", CASES, ids=lambda r: f"{r['id']}-{r['pred']}")
def test_cases(row):
  assert qa.em(row["pred"], row["golds"]) is bool(row["em"])
  if "search_r1" in row:
    assert qa.em_search_r1(row["pred"], row["golds"]) is bool(row["search_r1"])


def test_order_and_repetition_of_golds_do_not_matter():
  golds = ["Montreal", "Montreal, Quebec", "Ville de Montréal", "Montreal"]
  for seed in range(20):
    random.Random(seed).shuffle(golds)
    assert qa.em("Montreal", golds)
    assert not qa.em("Quebec", golds)


@pytest.mark.parametrize("rule", [qa.em, qa.em_search_r1])
@pytest.mark.parametrize("golds", [[], [""], [" ", "\n"]])
def test_a_row_without_golds_is_an_error(rule, golds):
  with pytest.raises(ValueError, match="at least one gold"):
    rule("x", golds)


@pytest.mark.parametrize("nothing", ["", " ", "\n", "\u200b"])
def test_no_answer_is_never_right(nothing):
  assert not qa.em(nothing, ["...", "the", nothing, "x"])


def test_search_r1_does_as_published():
  assert qa.em_search_r1("The U.S.", ["us"])
  assert qa.em_search_r1("1.0", ["10"])  # the reason for `em`
  assert not qa.em_search_r1("“Hello”", ["Hello"])
  assert not qa.em("1.0", ["10"])


@hypothesis.given(st.text(min_size=1), st.text())
def test_em_is_a_relation_of_equality(a, b):
  hypothesis.assume(a.strip() and b.strip() and qa.normalize(a))
  assert qa.em(a, [b, a])
  if qa.normalize(b):
    assert qa.em(a, [b]) is qa.em(b, [a])
  assert qa.em(f"  {a}\n", [a])


@hypothesis.given(st.integers(0, 10**12), st.integers(0, 10**6))
def test_numbers(value, other):
  assert qa.em(f"{value:,}", [f"{value}.0"])
  assert not qa.em(str(value), [str(value + other + 1)])
  assert not qa.em(f"-{value + 1}", [str(value + 1)])


@pytest.mark.parametrize(
  "unit", ["a ", "-", "“", "1,", ".", "é", "\u200b", "-1 "]
)
def test_long_text_takes_linear_time(unit):
  text = unit * (200_000 // len(unit))
  start = time.process_time()
  qa.em(text, [text + "x"])
  qa.em_search_r1(text, [text + "x"])
  assert time.process_time() - start < 3


# -- tags ---------------------------------------------------------------------

REPEATED = "<answer>1</answer>"


@pytest.mark.parametrize(
  ("text", "valid"),
  [
    # Q12
    ("<search>a", False),
    ("<SEARCH>a</SEARCH>", True),
    ("<Search>a</sEARCH>", True),
    ("<search></search>", False),
    ("<search>  </search>", False),
    ("<answer>\n</answer>", False),
    ("<answer>a</search>", False),
    ("<search>a<search>b</search></search>", False),
    ("<search>a<search>b</search>", False),
    ("", False),
    # Q10
    ("<think>a</think><think>b</think>" + REPEATED, False),
    (REPEATED * 12, False),
    (REPEATED * 2, False),
    (REPEATED + "<search>a</search>", False),
    ("<search>a<answer>b</answer></search>", False),
    ("<think>a<think>b</think></think>" + REPEATED, False),
    ("<think>a</think>" + REPEATED, True),
    ("<THINK>a</Think> so " + REPEATED + " done", True),
    (REPEATED + "<think>a</think>", True),
    (REPEATED, True),
    # RULES 13: reasoning does not count, unclosed reasoning is invalid.
    (f"<think>{REPEATED}</think>", False),
    (f"<think>{REPEATED * 3}</search></think>{REPEATED}", True),
    ("<think>" + REPEATED, False),
    (REPEATED + "<think>", False),
    ("<answer><think>a</think>b</answer>", False),
    ("a</think>" + REPEATED, False),
    ("</answer>" + REPEATED, False),
    ("<answer>a</answer></answer>", False),
    ("<\u017fearch>a</\u017fearch>", False),
  ],
)
def test_format(text, valid):
  block = one_block(text, "search", "answer")
  assert (block is not None) is valid
  if block:  # what is valid is what acts
    assert block == find_block(text, "search", "answer")


def test_a_prompt_that_opened_the_reasoning():
  """Q13: the template may end a prompt with <think>."""
  response = "<think>" + "reason</think><answer>4</answer>"
  opened = one_block(response, "answer")
  assert opened == find_block(response, "answer")
  assert opened.content == "4"
  assert one_block("<think>no end <answer>4</answer>", "answer") is None
  again = "<think>a</think><think>b</think><answer>4</answer>"
  assert one_block(again, "answer") is None


@pytest.mark.parametrize(
  ("text", "answer"),
  [
    ("<answer> 42 </answer>", "42"),
    ("<ANSWER>42</Answer>", "42"),
    ("<answer>1</answer><answer>2</answer>", "1"),
    ("<think><answer>1</answer></think><answer>2</answer>", "2"),
    ("<think><answer>1</answer>", None),
    ("<answer>1", None),
    ("<answer></answer>", None),
    ("42", None),
  ],
)
def test_answer_of(text, answer):
  assert qa.answer_of(text) == answer


PIECES = st.sampled_from(
  [
    *("<think>", "</think>", "<answer>", "</answer>", "<search>", "</search>"),
    *("<ANSWER>", "</Think>", "x", " ", "<", "/answer>"),
  ]
)


@hypothesis.given(st.lists(PIECES, max_size=12).map("".join))
def test_one_block_is_a_part_of_what_find_block_finds(text):
  block = one_block(text, "answer", "search")
  if block is not None:
    assert block == find_block(text, "answer", "search")
    assert text[block.start : block.end].lower().count(block.name) == 2
    assert block.content.strip()


def test_golds_of_public_sets_are_right(shared):
  num_golds = 0
  for path in sorted((shared / "data" / "qa").glob("*.jsonl")):
    with path.open(encoding="utf-8") as lines:
      rows = [json.loads(line) for line in lines]
    for row in rows:
      golds = row["golden_answers"]
      num_golds += len(golds)
      shown = golds[0].strip(string.whitespace)
      assert qa.em(shown, golds) and qa.em(f"{shown} ", golds)
  assert num_golds > 10_000
