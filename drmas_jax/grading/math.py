r"""Is the boxed answer of a completion equal to the gold one?

A plain grader: the last box decides; integers, fractions and finite decimals
are compared exactly, everything else as a string in a normal form. It runs
nothing and takes time linear in its input.
"""

import re
from fractions import Fraction

from drmas_jax.agents.agent import after_reasoning, last_box

# Above this many characters a string is not read as a number: the time of an
# exact conversion grows with the square of the digits.
_MAX_NUMBER = 400

_INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = re.compile(rf"([+-]?)({_INTEGER}?)(?:\.(\d*))?")
_RATIO = re.compile(rf"([+-]?)({_INTEGER})/([+-]?)({_INTEGER})")
_LATEX_RATIO = re.compile(
  rf"([+-]?)\\frac\{{([+-]?{_INTEGER})\}}\{{([+-]?{_INTEGER})\}}"
)
_DROPPED = re.compile(r"\\left(?![a-zA-Z])|\\right(?![a-zA-Z])|\\[!,;: ]|[\s$]")


def grade(completion: str, answer: str | int | float) -> bool:
  """True if the completion's last box holds `answer`.

  Args:
    completion: text of the model, with or without its reasoning block.
    answer: the gold answer, without a box.
  """
  text = after_reasoning(completion)
  found = last_box(text) if text is not None else None
  return found is not None and equal(found, str(answer))


def equal(a: str, b: str) -> bool:
  """Equality of two answers; symmetric."""
  a, b = _normal_form(a), _normal_form(b)
  x, y = _number(a), _number(b)
  if x is not None and y is not None:
    return x == y
  return a == b


def _normal_form(text: str) -> str:
  text = _DROPPED.sub("", text)
  text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
  return text.rstrip(".")


def _number(text: str) -> Fraction | None:
  """An integer, fraction or finite decimal, or None for anything else."""
  if len(text) > _MAX_NUMBER:
    return None
  if match := _DECIMAL.fullmatch(text):
    sign, whole, places = match.groups()
    if not whole and not places:
      return None
    digits = f"{sign}{whole.replace(',', '') or '0'}.{places or '0'}"
    return Fraction(digits)
  match = _RATIO.fullmatch(text) or _LATEX_RATIO.fullmatch(text)
  if match is None:
    return None
  top, bottom = _ratio(match.groups())
  return Fraction(top, bottom) if bottom else None


def _ratio(parts: tuple[str, ...]) -> tuple[int, int]:
  plain = [part.replace(",", "") for part in parts]
  if len(plain) == 4:  # sign, top, sign, bottom
    return int(plain[0] + plain[1]), int(plain[2] + plain[3])
  sign, top, bottom = plain
  return int(f"{sign}1") * int(top), int(bottom)
