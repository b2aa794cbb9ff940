r"""Is the boxed answer of a completion equal to the gold one?

RULES 18-21. Only what follows the reasoning is read, and its last box decides.
Plain arithmetic and equal texts are settled here in microseconds; the rest goes
to a worker process with hard limits (`pool`).
"""

import re
from collections.abc import Sequence

from drmas_jax.agents.agent import after_reasoning, last_box
from drmas_jax.grading import answers, compare, latex, pool, tokens, tree
from drmas_jax.grading.tree import Node

# Changed by hand whenever a verdict may change; manifests record it.
VERSION = "3"

Gold = str | int | float | Sequence[str | int | float]

_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)


def grade(completion: str, answer: Gold) -> bool:
  """Whether the completion's last box holds the gold answer.

  Args:
    completion: text of the model, with or without its reasoning block.
    answer: the gold, without a box; of several, any one is right.

  Raises:
    GraderFault: no verdict within the limits of a worker process.
  """
  verdict = quick_grade(completion, answer)
  if verdict is not None:
    return verdict
  found = answer_of(completion)
  return any(
    pool.verdict(found, gold, percent=_is_percentage(gold))
    for gold in _golds(answer)
    if quick(found, gold, percent=_is_percentage(gold)) is None
  )


def quick_grade(completion: str, answer: Gold) -> bool | None:
  """`grade`, or None where that takes a worker process."""
  text = after_reasoning(completion)
  found = last_box(text) if text is not None else None
  if found is None:
    return False
  golds = _golds(answer)
  verdicts = [quick(found, g, percent=_is_percentage(g)) for g in golds]
  if True in verdicts or any(_is_broken(text, g) for g in golds):
    return True
  return None if None in verdicts else False


def equal(a: str, b: str) -> bool:
  """Equality of two answers without boxes; symmetric.

  A percentage equals its number, as with any unit, and not its fraction: that
  takes a gold (see `grade`).

  Raises:
    GraderFault: no verdict within the limits of a worker process.
  """
  verdict = quick(a, b)
  return pool.verdict(a, b) if verdict is None else verdict


def quick(a: str, b: str, *, percent: bool = False) -> bool | None:
  """`equal` without a process: linear time, None where it takes algebra."""
  try:
    return answers.verdict(a, b, compare.Exact(), percent=percent)
  except compare.NeedsAlgebra:
    return None


def answer_of(completion: str) -> str | None:
  """The last box after the reasoning; None if there is none, or it is open."""
  text = after_reasoning(completion)
  return None if text is None else last_box(text)


def canonical(answer: str) -> str:
  r"""A normal form, by which a majority vote groups equal answers.

  Numbers are exact or of ten digits (`\sqrt{8}` and `2\sqrt{2}` are one
  answer), names and units are left out. Expressions with letters are grouped
  where they have the same terms.
  """
  if len(answer) > answers.MAX_LENGTH:
    return answer[: answers.MAX_LENGTH]
  node = latex.parse(answer)
  return " ".join(tokens.key(answer)) if node is None else _text(node)


def _golds(answer: Gold) -> list[str]:
  if isinstance(answer, str):
    several = tokens.alternatives(answer)
    return several if several == [answer] else [*several, answer]
  if isinstance(answer, Sequence):
    return [gold for part in answer for gold in _golds(part)]
  return [str(answer)]


def _is_percentage(gold: str) -> bool:
  return "%" in tokens.clean(gold) or "percent" in gold.lower()


def _is_broken(text: str, gold: str) -> bool:
  """Whether a gold whose braces do not match stands in the text's last box.

  Such golds are in public sets (RULES 21), and no box can be read with them.
  """
  depth = 0
  for brace in _BRACES.finditer(gold):
    depth += {"{": 1, "}": -1}.get(brace.group(), 0)
    if depth < 0:
      break
  if not depth:
    return False
  start = max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))
  inside = text[text.find("{", start) + 1 :].rstrip(" .$")
  short = len(inside) <= answers.MAX_LENGTH and inside.endswith("}")
  return short and tokens.key(inside[:-1]) == tokens.key(gold)


def _text(node: Node) -> str:
  """A tree as text; equal numbers look alike."""
  value = compare.value_of(node)
  if tree.is_expression(value):
    return _expression(value)
  parts = [_text(part) for part in tree.children(value)]
  if value.kind in ("list", "set"):
    return "{" + ", ".join(sorted(parts)) + "}"
  if value.kind == "tuple":
    opening, closing, _ = value.args
    return opening + ", ".join(parts) + closing
  if value.kind == "text":
    return compare.fold(value.args[0])
  if value.kind == "rel":
    operators, sides = value.args
    return " ".join(
      [_text(sides[0])]
      + [f"{o} {_text(s)}" for o, s in zip(operators, sides[1:], strict=True)]
    )
  return f"{value.kind}({', '.join(parts)})"


def _expression(node: Node) -> str:
  """A number's value; otherwise its terms."""
  if (exact := tree.rational(node)) is not None:
    return str(exact)
  if not tree.symbols(node):
    from drmas_jax.grading import algebra

    value = algebra.approximate(node)
    if value is not None:
      return value
  if node.kind in ("sym", "const"):
    return node.args[0]
  inner = [_expression(a) for a in node.args if isinstance(a, Node)]
  if node.kind in ("add", "mul", "pow"):
    sign = {"add": " + ", "mul": "*", "pow": "^"}[node.kind]
    return "(" + sign.join(inner) + ")"
  return f"{node.args[0] if node.args else 'sign'}({', '.join(inner)})"
