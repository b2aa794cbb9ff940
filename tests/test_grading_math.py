"""The last box against the gold answer."""

import time

import hypothesis
import pytest
from hypothesis import strategies as st

from drmas_jax.grading import math

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
  ("a", "b", "same"),
  [
    ("9", "9", True),
    ("9", "09", True),
    ("+9", "9", True),
    ("-0", "0", True),
    ("9", "-9", False),
    ("0.5", "1/2", True),
    (".5", "0.50", True),
    ("1.", "1", True),
    (r"\frac{1}{2}", "0.5", True),
    (r"-\dfrac{2}{4}", "-1/2", True),
    (r"\frac{-1}{2}", "-0.5", True),
    ("1/0", "1/0", True),
    ("1/0", "2/0", False),
    ("0.3333333", "1/3", False),
    ("1,234", "1234", True),
    ("1,234,567.5", "1234567.5", True),
    ("12,34", "1234", False),
    ("1,2345", "12345", False),
    ("0,1", "1", False),
    ("1.5", "15", False),
    ("$ 7 $", "7", True),
    (r"\left( 1, 2 \right)", "(1,2)", True),
    ("x+1", "x + 1", True),
    ("x+1", "x+2", False),
    (r"\sqrt{2}", r"\sqrt{2}.", True),
    ("9" * 5000, "9" * 5000, True),
    ("9" * 5000, "9" * 4999 + "8", False),
  ],
)
def test_equal(a, b, same):
  assert math.equal(a, b) is same
  assert math.equal(b, a) is same


@pytest.mark.parametrize(
  ("completion", "correct"),
  [
    (r"4+5=9, so \boxed{9}", True),
    (r"<think>\boxed{9}</think>", False),
    (r"<think>\boxed{8}</think> \boxed{9}", True),
    (r"<think> \boxed{9}", False),
    (r"\boxed{9} no, \boxed{8}", False),
    (r"\boxed{9} \boxed{}", False),
    (r"\boxed{9} \boxed{", False),
    ("9", False),
    ("", False),
    (r"\boxed 9", True),
    (r"\fbox{9}", True),
  ],
)
def test_grade(completion, correct):
  assert math.grade(completion, "9") is correct
  assert math.grade(completion, 9) is correct


@hypothesis.given(st.fractions())
def test_numbers_equal_themselves_in_every_form(value):
  text = f"{value.numerator}/{value.denominator}"
  latex = rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
  assert math.equal(text, latex)
  assert not math.equal(text, f"{value.numerator}/{value.denominator + 1}") or (
    value == 0
  )


@hypothesis.given(st.integers())
def test_thousands(value):
  assert math.equal(f"{value:,}", str(value))


@hypothesis.given(st.text(), st.text())
def test_symmetric_and_never_raises(a, b):
  assert math.equal(a, b) == math.equal(b, a)
  assert math.equal(a, a)
  math.grade(a, b)


@pytest.mark.parametrize(
  "unit", ["9", "9,", "9/", "{", "\\frac{", "\\left", "-", ".", " ", "1,234"]
)
def test_long_hostile_text_takes_linear_time(unit):
  text = unit * (200_000 // len(unit))
  start = time.process_time()
  math.grade("\\boxed{" + text + "}", "9")
  math.equal(text, text + "1")
  assert time.process_time() - start < 2
