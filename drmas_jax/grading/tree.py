r"""The tree of an answer, with what is plain arithmetic in it done.

A tree is made of `Node(kind, args)`. Sums and products are flat and sorted and
have one rational number, so that equal trees are equal answers:

    num (Fraction)         an integer, a fraction, a short decimal
    dec (Fraction)         a decimal of six or more digits (RULES 19)
    sym (name)             a letter, with its subscript and primes
    const (name)           pi, e, i, oo
    sign ()                the sign of a \pm
    add, mul (terms..)     pow (base, exponent)     fn (name, arguments..)

are expressions; what holds them:

    text (words)                     unit (value, unit)
    named (label, value)             list, set (items..)
    tuple (opening, closing, items)  matrix (rows of cells)
    rel (operators, sides)           or, and (relations..)
    cup, cap, minus (sets..)         such (variable, condition)
    chain (equal expressions..)      colon (parts..)
"""

import functools
import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any, NamedTuple

# Bits of a number that is worked out exactly; under Python's limit of 4300
# digits for its text.
MAX_BITS = 12_000
_MAX_FACTORIAL = 1000

EXPRESSIONS = {"num", "dec", "sym", "const", "sign", "add", "mul", "pow", "fn"}


class Unreadable(ValueError):
  """The text is not an answer this grammar knows."""


class Node(NamedTuple):
  """One node of an answer's tree; see the module's docstring."""

  kind: str
  args: tuple[Any, ...]


def num(value: int | Fraction) -> Node:
  return Node("num", (Fraction(value),))


ONE, ZERO, MINUS_ONE, HALF = num(1), num(0), num(-1), num(Fraction(1, 2))
SIGN = Node("sign", ())
REALS = Node("sym", ("reals",))
INFINITY = Node("const", ("oo",))


def sym(name: str) -> Node:
  return Node("sym", (name,))


def is_expression(node: Node) -> bool:
  return node.kind in EXPRESSIONS


def _fits(value: Fraction) -> bool:
  size = value.numerator.bit_length() + value.denominator.bit_length()
  return size <= MAX_BITS


def _fold(kind: str, nodes: Iterable[Node], unit: int, join) -> Node:
  """A flat sorted sum or product; its rational number comes first."""
  total, rest = Fraction(unit), []
  for node in nodes:
    if not is_expression(node):
      raise Unreadable(f"a {node.kind} in a sum or product")
    for part in node.args if node.kind == kind else (node,):
      if part.kind == "num" and _fits(joined := join(total, part.args[0])):
        total = joined
      else:
        rest.append(part)
  if kind == "mul" and total == 0 and not any(map(_may_be_infinite, rest)):
    return ZERO
  if not rest:
    return num(total)
  rest.sort(key=repr)
  if total != unit:
    rest.insert(0, num(total))
  return rest[0] if len(rest) == 1 else Node(kind, tuple(rest))


def _may_be_infinite(node: Node) -> bool:
  """Whether zero times it need not be zero: an infinity, a division by 0."""
  return node.kind in ("pow", "fn") or node == INFINITY


def add(*nodes: Node) -> Node:
  """A sum; matrices are added cell by cell."""
  if len({_shape(node) for node in nodes}) == 1 and nodes[0].kind == "matrix":
    rows = zip(*(node.args for node in nodes), strict=True)
    return Node("matrix", tuple(tuple(map(add, *row)) for row in rows))
  return _fold("add", nodes, 0, lambda x, y: x + y)


def _shape(node: Node) -> tuple[int, ...]:
  return tuple(map(len, node.args)) if node.kind == "matrix" else ()


def mul(*nodes: Node) -> Node:
  """A product; a matrix is multiplied by its cells."""
  for place, node in enumerate(nodes):
    if node.kind == "matrix":
      rest = nodes[:place] + nodes[place + 1 :]
      return Node(
        "matrix", tuple(tuple(mul(*rest, c) for c in row) for row in node.args)
      )
  return _fold("mul", nodes, 1, lambda x, y: x * y)


def negative(node: Node) -> Node:
  if node.kind == "add":
    return add(*(mul(MINUS_ONE, term) for term in node.args))
  return mul(MINUS_ONE, node)


def power(base: Node, exponent: Node) -> Node:
  """A power, worked out where it is rational and not large."""
  if not (is_expression(base) and is_expression(exponent)):
    raise Unreadable(f"a {base.kind} to a power")
  if exponent == ONE:
    return base
  if base.kind == exponent.kind == "num":
    value = _rational_power(base.args[0], exponent.args[0])
    if value is not None:
      return num(value)
  if base.kind == "pow" and exponent.kind == "num":
    inner = base.args[1]
    if inner.kind == "num" and exponent.args[0].denominator == 1:
      return power(base.args[0], num(inner.args[0] * exponent.args[0]))
  if base.kind == "mul" and exponent == MINUS_ONE:
    return mul(*(power(factor, exponent) for factor in base.args))
  return Node("pow", (base, exponent))


def divide(top: Node, bottom: Node) -> Node:
  return mul(top, power(bottom, MINUS_ONE))


def _rational_power(base: Fraction, exponent: Fraction) -> Fraction | None:
  """base ** exponent if that is rational and of at most MAX_BITS bits."""
  if base == 0:
    return Fraction(0) if exponent > 0 else None
  top, bottom = exponent.numerator, exponent.denominator
  bits = base.numerator.bit_length() + base.denominator.bit_length()
  if abs(top) > MAX_BITS or bits * abs(top) > MAX_BITS:
    return None
  if bottom == 1:
    return base**top
  if bottom != 2 or base < 0:
    return None
  roots = math.isqrt(base.numerator), math.isqrt(base.denominator)
  root = Fraction(*roots)
  return root**top if root * root == base else None


def function(name: str, *args: Node) -> Node:
  """An applied function; factorials and binomials of numbers are worked out.

  A name that begins with "@" is unknown: a letter before parentheses.
  """
  if not all(map(is_expression, args)):
    raise Unreadable(f"{name} of what is no expression")
  whole = [int(a.args[0]) for a in args if is_integer(a)]
  if len(whole) == len(args):
    if name == "factorial" and 0 <= whole[0] <= _MAX_FACTORIAL:
      return num(math.factorial(whole[0]))
    if name == "binom" and 0 <= whole[1] <= whole[0] <= _MAX_FACTORIAL:
      return num(math.comb(*whole))
  if name == "abs" and args[0].kind == "num":
    return num(abs(args[0].args[0]))
  if name == "sqrt":
    return power(args[0], HALF)
  if name in ("max", "min", "gcd", "lcm"):
    args = tuple(sorted(args, key=repr))
  return Node("fn", (name, *args))


def is_integer(node: Node) -> bool:
  return node.kind == "num" and node.args[0].denominator == 1


def is_interval(node: Node) -> bool:
  """Whether a pair can be nothing else: `[0, 1)`, `(0, oo)`."""
  if node.kind != "tuple" or len(node.args[2]) != 2:
    return False
  infinite = any(n == INFINITY for n in nodes(node))
  return infinite or node.args[:2] != ("(", ")")


def rational(node: Node) -> Fraction | None:
  """The value of a rational number; a long decimal is one too."""
  if node.kind in ("num", "dec"):
    return node.args[0]
  if node.kind in ("add", "mul"):
    values = [rational(a) for a in node.args]
    if None in values:
      return None
    total = functools.reduce(
      (lambda x, y: x + y) if node.kind == "add" else (lambda x, y: x * y),
      values,
    )
    return total if _fits(total) else None
  if node.kind == "pow":
    base, exponent = map(rational, node.args)
    if base is not None and exponent is not None:
      return _rational_power(base, exponent)
  return None


def children(node: Node) -> Iterable[Node]:
  """Nodes right below a node, whatever its kind."""
  for arg in node.args:
    if isinstance(arg, Node):
      yield arg
    elif isinstance(arg, tuple):
      yield from (a for a in arg if isinstance(a, Node))


def nodes(node: Node) -> Iterable[Node]:
  """A node and all below it."""
  yield node
  for child in children(node):
    yield from nodes(child)


def symbols(node: Node) -> set[str]:
  """Names that may vary in an expression, unknown functions among them."""
  return {n.args[0] for n in nodes(node) if n.kind == "sym"} | {
    n.args[0]
    for n in nodes(node)
    if n.kind == "fn" and n.args[0].startswith("@")
  }


def replace(node: Node, old: Node, new: Node) -> Node:
  """A tree with `new` in place of every `old`, worked out."""
  if node == old:
    return new
  args = tuple(_replaced(a, old, new) for a in node.args)
  make = {"add": add, "mul": mul, "pow": power, "fn": function}.get(node.kind)
  return make(*args) if make else Node(node.kind, args)


def _replaced(arg: Any, old: Node, new: Node) -> Any:
  if isinstance(arg, Node):
    return replace(arg, old, new)
  if isinstance(arg, tuple):
    return tuple(_replaced(a, old, new) for a in arg)
  return arg
