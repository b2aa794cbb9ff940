r"""When two answers are the same: RULES 19, apart from algebra.

`same` walks two trees and asks a judge about pairs of expressions. There are
two judges: `Exact` here, which knows rational numbers and equal trees and
raises NeedsAlgebra otherwise, and `algebra.Numeric`, which is for a worker
process.

- A list equals a list or a set in any order, a tuple in its order; a set has no
  order; the brackets of a pair matter, since it may be an interval.
- A name on one side of `=` may be left out (`x = 5` is `5`), two different
  names differ. Two equations are the same up to a constant factor.
- A condition on one variable is the set of its solutions. Those side by side
  hold at once, or, if no number does that, one or the other.
- A unit on one side may be left out; two different ones differ.
"""

import functools
import unicodedata
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, Protocol

from drmas_jax.grading import tree
from drmas_jax.grading.tree import Node, is_expression

_TOLERANCE = Fraction(1, 10**6)
_COORDINATES = {"x", "y", "z", "x'", "y'"}
_REGIONS = {"cup", "cap", "minus", "or", "and", "such"}
_JOINED = {"or", "and", "list"}
_INFINITE = {
  tree.INFINITY: float("inf"),
  tree.negative(tree.INFINITY): -float("inf"),
}


class NeedsAlgebra(Exception):
  """Whether two expressions are equal is no matter of plain arithmetic."""


class Judge(Protocol):
  """What decides about expressions."""

  def equal(self, a: Node, b: Node) -> bool:
    """Whether two expressions have one value."""
    ...

  def proportional(self, a: Node, b: Node, *, positive: bool) -> bool:
    """Whether a is b times a constant that is not zero (or is positive)."""
    ...

  def value(self, a: Node) -> Any:
    """A real constant as something that can be ordered."""
    ...


def is_rough(*expressions: Node) -> bool:
  """Whether a decimal of six or more digits is in one of them."""
  return any(n.kind == "dec" for e in expressions for n in tree.nodes(e))


class Exact:
  """Rational numbers, infinities and equal trees; no process needed."""

  def equal(self, a: Node, b: Node) -> bool:
    if a == b:
      return True
    x, y = tree.rational(a), tree.rational(b)
    if x is not None and y is not None:
      if is_rough(a, b):
        return abs(x - y) <= _TOLERANCE * max(abs(x), abs(y))
      return x == y
    plain = [
      value is not None or node.kind == "sym" or node in _INFINITE
      for value, node in ((x, a), (y, b))
    ]
    if all(plain):  # different symbols, or a symbol and a number
      return False
    raise NeedsAlgebra

  def proportional(self, a: Node, b: Node, *, positive: bool) -> bool:
    if a == b or (not positive and a == tree.negative(b)):
      return True
    raise NeedsAlgebra

  def value(self, a: Node) -> Fraction | float:
    if a in _INFINITE:
      return _INFINITE[a]
    if (value := tree.rational(a)) is None:
      raise NeedsAlgebra
    return value


def same(a: Node, b: Node, judge: Judge, *, percent: bool = False) -> bool:
  """Whether two answers are the same.

  Args:
    a: one answer.
    b: another one; the verdict does not depend on their order, apart from
      `percent`.
    judge: decides about expressions; what it raises comes through.
    percent: whether a number `a` without a unit may be the fraction that a
      percentage `b` means.
  """
  return _Comparison(judge, percent).same(a, b)


class _Comparison:
  def __init__(self, judge: Judge, percent: bool):
    self.judge = judge
    self.percent = percent

  def same(self, a: Node, b: Node) -> bool:
    if a == b:
      return True
    named_a, named_b = _read(a), _read(b)
    named_b = _renamed(named_b, named_a.label)
    if named_a.label and named_b.label and named_a.label != named_b.label:
      return self._equations(named_a, named_b)
    if not (named_a.label and named_b.label) and self._equations(
      named_a, named_b
    ):
      return True
    return self._quantities(named_a.value, named_b.value)

  def _equations(self, a: "_Named", b: "_Named") -> bool:
    if a.equation is None or b.equation is None:
      return False
    proportional = functools.partial(self.judge.proportional, positive=False)
    xs, ys = _both_signs(a.equation), _both_signs(b.equation)
    return _in_any_order(proportional, xs, ys)

  def _quantities(self, a: Node, b: Node) -> bool:
    a, unit_a = _unit(a)
    b, unit_b = _unit(b)
    if unit_a and unit_b and unit_a != unit_b:
      return False
    if self.percent and unit_b == "%" and not unit_a and is_expression(a):
      hundredth = tree.divide(b, tree.num(100)) if is_expression(b) else b
      return self._values(a, b) or self._values(a, hundredth)
    return self._values(a, b)

  def _values(self, a: Node, b: Node) -> bool:
    if a == b:
      return True
    if "chain" in (a.kind, b.kind):
      return self._chains(a, b)
    signs = [any(n.kind == "sign" for n in tree.nodes(x)) for x in (a, b)]
    if any(signs):
      a, b = (
        _list(_both_signs(x)) if s else x
        for x, s in zip((a, b), signs, strict=True)
      )
    if is_expression(a) and is_expression(b) and tree.REALS not in (a, b):
      return self.judge.equal(a, b)
    if _is_region(a) or _is_region(b):
      return self._regions(a, b)
    if a.kind == b.kind:
      alike = {
        **{"text": self._texts, "matrix": self._matrices},
        **{"colon": self._colons, "tuple": self._tuples, "rel": self._rels},
        **{"list": self._collections, "set": self._collections},
      }
      return alike[a.kind](a, b) if a.kind in alike else False
    return self._unlike(a, b) or self._unlike(b, a)

  def _unlike(self, a: Node, b: Node) -> bool:
    """Answers of different kinds, in one of their two orders."""
    if a.kind == "set" and b.kind == "list":
      return self._collections(a, b)
    if a.kind == "tuple" and b.kind == "list":
      opening, closing, items = a.args
      plain = (opening, closing) == ("(", ")") or len(items) > 2
      return plain and self._in_order(items, b.args)
    if a.kind == "set" and len(a.args) == 1 and b.kind != "list":
      return self.same(a.args[0], b)
    if a.kind == "tuple" and b.kind == "matrix":
      return self._arrays(a, b)
    if a.kind == "colon" and is_expression(b) and len(a.args) == 2:
      ratio = _ratio(a)
      return ratio is not None and self.judge.equal(ratio, b)
    return False

  def _arrays(self, a: Node, b: Node) -> bool:
    """A tuple and a matrix: a vector, or rows in square brackets."""
    opening, closing, items = a.args
    if (opening, closing) == ("(", ")"):
      vector = 1 in (len(b.args), len(b.args[0]))
      return vector and self._in_order(items, sum(b.args, ()))
    rows = [i.args[2] for i in items if i.kind == "tuple"]
    return len(rows) == len(items) and self._matrices(
      Node("matrix", tuple(rows)), b
    )

  # -- alike -------------------------------------------------------------------

  def _chains(self, a: Node, b: Node) -> bool:
    """`a = b = c` is the value that its sides share."""
    if a.kind == b.kind and self._in_order(a.args, b.args):
      return True
    values = [x.args if x.kind == "chain" else (x,) for x in (a, b)]
    for sides in values:
      if not all(self._agree(s, sides[-1]) for s in sides[:-1]):
        return False  # it contradicts itself
    return any(self._quantities(x, y) for x in values[0] for y in values[1])

  def _agree(self, a: Node, b: Node) -> bool:
    """Whether `a = b` is true, where one of them may be a percentage."""
    lenient = _Comparison(self.judge, percent=True)
    return lenient._quantities(a, b) or lenient._quantities(b, a)

  def _texts(self, a: Node, b: Node) -> bool:
    return fold(a.args[0]) == fold(b.args[0])

  def _matrices(self, a: Node, b: Node) -> bool:
    if [len(row) for row in a.args] != [len(row) for row in b.args]:
      return False
    return all(map(self._in_order, a.args, b.args))

  def _colons(self, a: Node, b: Node) -> bool:
    """Times of day are equal part by part, ratios also after cancelling."""
    if self._in_order(a.args, b.args):
      return True
    if len(a.args) != len(b.args) or None in (_ratio(a), _ratio(b)):
      return False
    steps = zip(a.args, a.args[1:], b.args, b.args[1:], strict=False)
    return all(
      self.judge.equal(tree.divide(w, x), tree.divide(y, z))
      for w, x, y, z in steps
    )

  def _tuples(self, a: Node, b: Node) -> bool:
    """Brackets matter where there are two items: it may be an interval."""
    if len(a.args[2]) == 2 and a.args[:2] != b.args[:2]:
      return False
    return self._in_order(a.args[2], b.args[2])

  def _rels(self, a: Node, b: Node) -> bool:
    """Inequalities in several variables."""
    (up_a, sides_a), (up_b, sides_b) = _ascending(a), _ascending(b)
    if up_a == up_b and self._in_order(sides_a, sides_b):
      return True
    forms = [_difference(x) for x in (a, b)]
    if None in forms or forms[0][0] != forms[1][0]:
      return False
    (operator, x), (_, y) = forms
    signed = operator in ("<", "<=")
    return self.judge.proportional(x, y, positive=signed)

  def _collections(self, a: Node, b: Node) -> bool:
    grouped = any(i.kind == "list" for i in (*a.args, *b.args))
    if grouped and _in_any_order(self.same, a.args, b.args):
      return True  # x = 1, y = 2; x = 3, y = 4
    xs, ys = _items(a), _items(b)
    if "set" in (a.kind, b.kind):
      xs, ys = self._distinct(xs), self._distinct(ys)
    if len(xs) != len(ys):
      return False
    labels = [[_read(i).label is not None for i in items] for items in (xs, ys)]
    if all(labels[0]) != all(labels[1]) and a.kind == b.kind == "list":
      return self._in_order(xs, ys)  # `x = 1, y = 2` and `1, 2`
    return _in_any_order(self.same, xs, ys)

  def _in_order(self, xs: Sequence[Node], ys: Sequence[Node]) -> bool:
    return len(xs) == len(ys) and all(map(self.same, xs, ys))

  def _distinct(self, xs: Sequence[Node]) -> list[Node]:
    out: list[Node] = []
    for x in xs:
      if not any(self.same(x, y) for y in out):
        out.append(x)
    return out

  # -- sets of real numbers ----------------------------------------------------

  def _regions(self, a: Node, b: Node) -> bool:
    regions = [_region(x, self.judge.value) for x in (a, b)]
    if None in regions and {a.kind, b.kind} <= _JOINED:
      return self._collections(a, b)
    if None in regions:
      return a.kind == b.kind == "rel" and self._rels(a, b)
    xs, ys = (intervals for _, intervals in regions)
    return len(xs) == len(ys) and all(
      x.opens == y.opens
      and self._ends(x.low, y.low)
      and self._ends(x.high, y.high)
      for x, y in zip(xs, ys, strict=True)
    )

  def _ends(self, a: "_End", b: "_End") -> bool:
    return a.value == b.value or self.judge.equal(a.node, b.node)


# -- names, units, signs ------------------------------------------------------


class _Named(NamedTuple):
  """What an answer says of what.

  Attributes:
    label: what is said to be equal, or to be in a set; None: not said.
    value: the rest.
    equation: left side minus right side, for an equation of expressions.
  """

  label: Node | None
  value: Node
  equation: Node | None = None


@functools.lru_cache(maxsize=4096)
def _read(node: Node) -> _Named:
  if node.kind == "named":
    return _Named(*node.args)
  if node.kind == "list":
    return _read_list(node)
  if node.kind != "rel":
    return _Named(_variable(node), node)
  operators, sides = node.args
  if operators == ("in",):
    return _Named(sides[0], sides[1])
  if not set(operators) <= {"=", "~"}:
    return _Named(_variable(node), node)
  if "~" in operators:
    exact = operators.index("~") + 1
    if exact == 1 and _is_name(sides[0], sides[1]):
      exact = 2  # x is about 1.7
    sides = sides[:exact]
  return _read_equalities(sides)


def _renamed(b: _Named, label: Node | None) -> _Named:
  """The function that `f(t) = ..` defines, in the variable of `label`."""
  labels = (b.label, label)
  if {n.kind for n in labels if n} == {"fn", "sym"}:  # y(x) = .., y = ..
    same = len({n.args[0].removeprefix("@") for n in labels}) == 1
    return b._replace(label=label) if same else b
  if b.label == label or not all(n and n.kind == "fn" for n in labels):
    return b
  (name, *mine), (other, *theirs) = b.label.args, label.args
  if name != other or [n.kind for n in mine + theirs] != ["sym", "sym"]:
    return b
  return _Named(label, tree.replace(b.value, mine[0], theirs[0]))


def _variable(node: Node) -> Node | None:
  """The only symbol of a condition."""
  names = tree.symbols(node) if node.kind in ("rel", "or", "and") else ()
  return tree.sym(*names) if len(names) == 1 else None


def _read_equalities(sides: tuple[Node, ...]) -> _Named:
  equation = None
  if len(sides) == 2 and all(map(is_expression, sides)):
    equation = tree.add(sides[0], tree.negative(sides[1]))
    equation = equation if tree.symbols(equation) else None
  label = None
  if len(sides) > 1 and _is_name(sides[0], sides[1]):
    label, sides = sides[0], sides[1:]
  elif len(sides) == 2 and _is_name(sides[1], sides[0]):
    label, sides = sides[1], sides[:1]
  if len(sides) == 1:
    return _Named(label, sides[0], equation)
  if equation is not None:
    return _Named(None, Node("rel", (("=",), sides)), equation)
  return _Named(label, Node("chain", sides))


def _read_list(node: Node) -> _Named:
  """`n = 1, 2, 3` and `x = 1 or x = 2` have one name for all items."""
  read = [_read(item) for item in node.args]
  first = read[0].label
  if first is None or any(r.label not in (None, first) for r in read[1:]):
    return _Named(None, node)
  return _Named(first, Node("list", tuple(r.value for r in read)))


def _is_name(node: Node, value: Node) -> bool:
  """Whether a side of an equation names what the other side is the value of.

  A symbol, an unknown function, words; also letters put together (`AB`,
  `a + b`) where the other side has a number in it; also a tuple of such.
  Coordinates put together (`x + y = 5`) make an equation.
  """
  if node.kind == "tuple":
    pairs = node.args[2], value.args[-1]
    return value.kind == "tuple" and all(map(_is_name, *pairs))
  if node.kind == value.kind == "colon":
    return all(map(_is_lettered, node.args))
  if node.kind == "text":
    return value.kind != "text"
  if node.kind in ("cup", "cap", "minus"):
    return all(a.kind == "sym" for a in node.args)
  names, others = tree.symbols(node), tree.symbols(value)
  if not is_expression(node) or not names:
    return False
  if node.kind == "sym" or (node.kind == "fn" and node.args[0][0] == "@"):
    return node.args[0] not in others
  if names & others or value == tree.ZERO:
    return False
  if node.kind != "fn" and names & _COORDINATES:
    return False
  return _is_lettered(node) and not _is_lettered(value)


def _is_lettered(node: Node) -> bool:
  """Sums, products, ratios and absolute values of letters only."""
  if node.kind in ("add", "mul"):
    first = node.kind == "mul" and node.args[0] == tree.MINUS_ONE
    return all(map(_is_lettered, node.args[1:] if first else node.args))
  if node.kind == "pow":
    return node.args[1] == tree.MINUS_ONE and _is_lettered(node.args[0])
  if node.kind == "fn":
    return node.args[0] == "abs" and _is_lettered(node.args[1])
  return node.kind == "sym"


def value_of(node: Node) -> Node:
  r"""An answer without its name and its unit, both signs of a \pm as a list."""
  value = _unit(_read(node).value)[0]
  if any(n.kind == "sign" for n in tree.nodes(value)):
    return Node("list", tuple(_both_signs(value)))
  return value


def _in_any_order(
  same: Callable[[Node, Node], bool], xs: Sequence[Node], ys: Sequence[Node]
) -> bool:
  left = list(ys)
  for x in xs:
    place = next((i for i, y in enumerate(left) if same(x, y)), None)
    if place is None:
      return False
    left.pop(place)
  return not left


def _unit(node: Node) -> tuple[Node, str | None]:
  return node.args if node.kind == "unit" else (node, None)


def _both_signs(node: Node) -> list[Node]:
  parts = [node] if node.kind not in ("list", "set") else node.args
  out = []
  for part in parts:
    variants = [
      tree.replace(part, tree.SIGN, s) for s in (tree.ONE, tree.MINUS_ONE)
    ]
    out += variants if variants[0] != variants[1] else variants[:1]
  return out


def _list(items: Sequence[Node]) -> Node:
  return Node("list", tuple(items))


def _items(node: Node) -> list[Node]:
  """Items of a list or set; a list within a set is its items."""
  out: list[Node] = []
  for item in node.args:
    out += _items(item) if item.kind == "list" else [item]
  return out


def fold(words: str) -> str:
  """Words by which texts are compared: no case, spaces or punctuation."""
  words = unicodedata.normalize("NFKC", words.casefold())
  return "".join(filter(str.isalnum, words)) or words


def _ratio(node: Node) -> Node | None:
  """The first part by the second, of what is no time of day."""
  numbers = all(map(is_expression, node.args))
  return None if _is_time(node) or not numbers else tree.divide(*node.args[:2])


def _is_time(node: Node) -> bool:
  """Whether the parts may be hours, minutes and seconds."""
  values = [tree.rational(a) for a in node.args]
  if None in values or any(v.denominator != 1 for v in values):
    return False
  minutes = all(v == 0 or 10 <= v < 60 for v in values[1:])
  return values[0] <= 24 and minutes


def _ascending(node: Node) -> tuple[tuple[str, ...], tuple[Node, ...]]:
  """Operators and sides of a chain, turned round if it goes down."""
  operators, sides = node.args
  if not all(o[0] == ">" for o in operators):
    return operators, sides
  return tuple(o.replace(">", "<") for o in operators[::-1]), sides[::-1]


def _difference(node: Node) -> tuple[str, Node] | None:
  """(operator, greater side minus lesser one) of one comparison."""
  operators, sides = node.args
  if len(operators) != 1 or not all(map(is_expression, sides)):
    return None
  operator, (left, right) = operators[0], sides
  if operator in (">", ">="):
    operator, left, right = operator.replace(">", "<"), right, left
  return operator, tree.add(right, tree.negative(left))


# -- sets of real numbers ------------------------------------------------------


class _End(NamedTuple):
  value: Any  # orders it
  node: Node


class _Interval(NamedTuple):
  low: _End
  high: _End
  opens: tuple[bool, bool]  # whether each end stays outside


def _is_region(node: Node) -> bool:
  if node.kind == "list":
    return any(i.kind == "rel" and _is_region(i) for i in node.args)
  if node.kind == "rel":
    return bool(set(node.args[0]) & {"<", "<=", ">", ">=", "!="})
  return node.kind in _REGIONS or node == tree.REALS


Region = tuple[Node | None, list[_Interval]]


def _region(node: Node, value: Callable[[Node], Any]) -> Region | None:
  """(variable, disjoint intervals in order), or None for what is no such set.

  Args:
    node: an interval, a finite set, a condition on one variable, and what
      unions, intersections and differences make of these.
    value: orders real constants.
  """
  try:
    variable, intervals = _Regions(value).of(node)
  except tree.Unreadable:
    return None
  return variable, intervals


class _Regions:
  def __init__(self, value: Callable[[Node], Any]):
    self._value = value

  def of(self, node: Node) -> Region:
    if node == tree.REALS:
      return None, [self._interval(*_LINE, (True, True))]
    if is_expression(node):
      return self._points(Node("set", (node,)))
    rule = {
      **{"tuple": self._pair, "set": self._points, "rel": self._condition},
      **{"cup": self._union, "or": self._union, "cap": self._intersection},
      **{"and": self._all, "list": self._all},
      **{"minus": self._minus, "such": self._such},
    }.get(node.kind)
    if rule is None:
      raise tree.Unreadable("no set of real numbers")
    return rule(node)

  def _end(self, node: Node) -> _End:
    if not is_expression(node) or tree.symbols(node):
      raise tree.Unreadable("an end that is no number")
    return _End(self._value(node), node)

  def _interval(self, low: Node, high: Node, opens: tuple[bool, bool]):
    return _Interval(self._end(low), self._end(high), opens)

  def _pair(self, node: Node) -> Region:
    opening, closing, items = node.args
    if len(items) != 2:
      raise tree.Unreadable("no interval")
    opens = (opening == "(", closing == ")")
    return None, _joined([self._interval(*items, opens)])

  def _points(self, node: Node) -> Region:
    ends = [self._end(item) for item in node.args]
    return None, _joined([_Interval(e, e, (False, False)) for e in ends])

  def _condition(self, node: Node) -> Region:
    operators, sides = node.args
    if operators == ("in",):
      return sides[0], self.of(sides[1])[1]
    names = [i for i, s in enumerate(sides) if tree.symbols(s)]
    if len(names) != 1 or len(sides) > 3 or not _is_simple(sides[names[0]]):
      raise tree.Unreadable("no condition on one variable")
    place, variable = names[0], sides[names[0]]
    if operators in (("!=",), ("=",)):
      point = self._points(Node("set", (sides[1 - place],)))[1]
      return variable, self._complement(point) if operators[0] != "=" else point
    low, high = _LINE
    opens = [True, True]
    for at, operator in enumerate(operators):
      if operator[0] not in "<>" or place not in (at, at + 1):
        raise tree.Unreadable("no chain of bounds")
      bound = sides[at + 1] if place == at else sides[at]
      if (operator[0] == "<") == (place == at):
        high, opens[1] = bound, len(operator) == 1
      else:
        low, opens[0] = bound, len(operator) == 1
    if len(operators) == 2 and operators[0][0] != operators[1][0]:
      raise tree.Unreadable("bounds of two directions")
    return variable, _joined([self._interval(low, high, tuple(opens))])

  def _parts(self, node: Node) -> tuple[Node | None, list[list[_Interval]]]:
    regions = [self.of(part) for part in node.args]
    variables = {v for v, _ in regions if v is not None}
    if len(variables) > 1:
      raise tree.Unreadable("conditions on several variables")
    return next(iter(variables), None), [r for _, r in regions]

  def _union(self, node: Node) -> Region:
    variable, parts = self._parts(node)
    return variable, _joined([i for part in parts for i in part])

  def _all(self, node: Node) -> Region:
    """`x > 0, x < 1` is what both say; what cannot be both is either."""
    if all(i.kind == "tuple" for i in node.args) and not any(
      map(tree.is_interval, node.args)
    ):
      raise tree.Unreadable("pairs")
    variable, common = self._intersection(node)
    return (variable, common) if common else self._union(node)

  def _intersection(self, node: Node) -> Region:
    variable, parts = self._parts(node)
    outside = [i for part in parts for i in self._complement(part)]
    return variable, self._complement(_joined(outside))

  def _minus(self, node: Node) -> Region:
    variable, (first, second) = self._parts(node)
    outside = _joined(self._complement(first) + second)
    return variable, self._complement(outside)

  def _such(self, node: Node) -> Region:
    head, condition = node.args
    within = None
    if head.kind == "rel" and head.args[0] == ("in",):
      head, within = head.args[1]
    variable, intervals = self.of(condition)
    if variable != head or within not in (None, tree.REALS):
      raise tree.Unreadable("a set of other things")
    return None, intervals

  def _complement(self, intervals: list[_Interval]) -> list[_Interval]:
    """Of disjoint intervals in order."""
    ends = [self._end(end) for end in _LINE]
    low, open_low, out = ends[0], True, []
    for interval in intervals:
      opens = (open_low, not interval.opens[0])
      out.append(_Interval(low, interval.low, opens))
      low, open_low = interval.high, not interval.opens[1]
    out.append(_Interval(low, ends[1], (open_low, True)))
    return [i for i in out if not _is_empty(i)]


_LINE = (tree.negative(tree.INFINITY), tree.INFINITY)


def _is_simple(node: Node) -> bool:
  unknown = node.kind == "fn" and node.args[0].startswith("@")
  return node.kind == "sym" or unknown


def _is_empty(interval: _Interval) -> bool:
  low, high = interval.low.value, interval.high.value
  if low == high:
    return any(interval.opens) or abs(low) == float("inf")
  return low > high


def _joined(intervals: list[_Interval]) -> list[_Interval]:
  """The same points as disjoint intervals in order."""
  out: list[_Interval] = []
  rest = [i for i in intervals if not _is_empty(i)]
  for new in sorted(rest, key=lambda i: (i.low.value, i.opens[0])):
    if not out or not _touch(out[-1], new):
      out.append(new)
      continue
    last = out[-1]
    ends = (
      (last.high.value, not last.opens[1]),
      (new.high.value, not new.opens[1]),
    )
    if ends[1] > ends[0]:
      out[-1] = _Interval(last.low, new.high, (last.opens[0], new.opens[1]))
  return out


def _touch(left: _Interval, right: _Interval) -> bool:
  if left.high.value == right.low.value:
    return not (left.opens[1] and right.opens[0])
  return left.high.value > right.low.value
