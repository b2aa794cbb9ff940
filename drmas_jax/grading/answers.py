r"""Two answers as strings: what may be read in two ways, and what is no answer.

`verdict` is RULES 19 from strings to a boolean, for a judge of expressions.
It is symmetric, and linear in the length of what it refuses to look into.
"""

import re

from drmas_jax.grading import compare, latex, tokens
from drmas_jax.grading.compare import Judge
from drmas_jax.grading.tree import Node

# Characters. No answer of the supported sets has more than 250.
MAX_LENGTH = 2000

# A letter of a multiple choice with what it stands for, if it is there:
# `C. 550`, `(A) 5`, `A)`, `Option B`.
_CHOICE = re.compile(
  r"(?:\\(?:text|mathrm|mathbf)[a-z]*\s*\{)?"
  r"(?P<word>(?:option|choice)\s+)?\(?(?P<letter>(?-i:[A-J]))"
  r"(?P<mark>\.|:(?![A-Za-z])|\\?\)(?=[\s}]|\\[ ,;q]|\Z))?[\s}]*"
  r"(?P<rest>[^\s}].*)?",
  re.DOTALL | re.IGNORECASE,
)
# Another letter, or a word that leads to one: more than one guess.
_MORE_CHOICES = re.compile(
  r"(?:\\text\s*\{\s*)?(?:or\b|and\b|[,/&])"
  r"|.*(?<![A-Za-z(\\])\(?[A-J](?:\)|[.:]\s)",
  re.DOTALL,
)


def verdict(a: str, b: str, judge: Judge, *, percent: bool = False) -> bool:
  """Whether two answers are the same.

  Args:
    a: an answer, without its box.
    b: another one.
    judge: decides about expressions; what it raises comes through.
    percent: b is a gold: where it is a percentage, a fraction may stand for
      it. Without this the verdict does not depend on the order.

  Returns:
    True if they are the same as text, or mean the same.
  """
  if a.strip() == b.strip():
    return True
  if max(len(a), len(b)) > MAX_LENGTH:
    return False
  if not percent and b < a:
    a, b = b, a
  key = tokens.key(a)
  if key and key == tokens.key(b):
    return True
  prose = tokens.prose(a)
  if prose and prose == tokens.prose(b):
    return True
  letters_a, letters_b = _choice(a), _choice(b)
  if letters_a and letters_b:
    if letters_a[0] != letters_b[0] or len(letters_a) + len(letters_b) < 4:
      return letters_a[0] == letters_b[0]
    return verdict(letters_a[1], letters_b[1], judge, percent=percent)
  return any(
    _same(x, y, judge, percent)
    for x in letters_a or (a,)
    for y in letters_b or (b,)
  )


def _choice(text: str) -> tuple[str, ...] | None:
  """The letter of a choice, and what it stands for if that is there."""
  match = _CHOICE.fullmatch(text.strip().strip("$"))
  if not match:
    return None
  if not (match["mark"] or (match["word"] and not match["rest"])):
    return None
  if not match["rest"]:
    return (match["letter"],)
  more = _MORE_CHOICES.match(match["rest"])
  return None if more else (match["letter"], match["rest"])


def _same(a: str, b: str, judge: Judge, percent: bool) -> bool:
  """Equal in their first reading, or in that of `1,234` as a list."""
  x, y = latex.parse(a), latex.parse(b)
  pairs = [(x, y), (_as_list(a), y), (x, _as_list(b))]
  return any(
    compare.same(p, q, judge, percent=percent)
    for i, (p, q) in enumerate(pairs)
    if p is not None and q is not None
    if i == 0 or p.kind == q.kind == "list"
  )


def _as_list(text: str) -> Node | None:
  """The other reading of `100,200`, which the first takes for a number."""
  if "," not in text or not tokens.join_thousands(tokens.clean(text))[1]:
    return None
  return latex.parse(text, thousands=False)
