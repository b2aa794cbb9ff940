r"""Whether expressions with roots, letters and functions are equal.

`Numeric` is the judge of a worker process, on mpmath. Two expressions are equal
if their values agree to 40 digits at several points drawn for their symbols.
Unlike a simplifier this never gives up on an equality, and that two different
expressions agree so is out of the question. The working precision grows with
the largest number on the way, so that `10^{200} + \pi` is not `10^{200} + 3`.

Points are real, and so is every step where no imaginary unit is written, and a
point counts if both sides exist there: `\sqrt{x^2}` is not `x`, `\ln x^2` is
`2 \ln x`.
"""

import contextlib
import hashlib
import math
import threading
from collections.abc import Iterator
from typing import NamedTuple

import mpmath
from mpmath import mp

from drmas_jax.grading import answers, compare, tree
from drmas_jax.grading.tree import Node

_DIGITS = 60  # of a value, beside those that cancel
_AGREE = mpmath.mpf(10) ** -40
_ROUGH = mpmath.mpf(10) ** -6  # RULES 19
_MAX_DIGITS = 1500
_MAX_MAGNITUDE = 10**8  # digits before or after the point
_MAX_FACTORIAL = 10**6
_MAX_GAMMA_DIGITS = 250
_MAX_ANGLE = 10**50
_POINTS = 5
_FEWEST_POINTS = 2
_TRIES = 24

# A symbol's value is drawn from these in turn: both signs, small and large, so
# that the domain of most functions is met.
_RANGES = ((0.5, 2), (2, 7), (-3, -0.5), (0.1, 0.9), (-0.9, 0.9), (7, 40))

_CIRCULAR = {"sin", "cos", "tan", "cot", "sec", "csc"}
_HYPERBOLIC = {"sinh", "cosh", "tanh", "coth"}
_INVERSE = {"arc" + f: "a" + f for f in _CIRCULAR | _HYPERBOLIC}
_CONSTANTS = {"pi": mp.pi, "e": mp.e, "i": mp.j, "oo": mp.inf}
_PRECISION = threading.Lock()  # mpmath's is one for all threads
_IMAGINARY = Node("const", ("i",))


def verdict(a: str, b: str, percent: bool) -> bool:
  r"""`answers.verdict`, all of algebra included.

  A bare `\log` may be the common or the natural logarithm: books differ.
  """
  return answers.verdict(a, b, Numeric(10), percent=percent) or (
    "log" in a + b and answers.verdict(a, b, Numeric(None), percent=percent)
  )


def approximate(node: Node) -> str | None:
  """Ten digits of a constant; None if it has no value."""
  with _PRECISION:
    try:
      value = Numeric(10).constant(node)
    except Undefined:
      return None
  if mp.isinf(value):
    return str(value)
  parts = [(mp.re(value), ""), (mp.im(value), "i")]
  small = abs(value) * 1e-15  # rounding
  shown = [f"{mp.nstr(p, 10)}{i}" for p, i in parts if abs(p) > small]
  return " + ".join(shown) or "0"


class Undefined(ValueError):
  """An expression has no (real) value at a point, or one beyond all bounds."""


class Point(NamedTuple):
  """Where expressions are evaluated.

  Attributes:
    index: gives each symbol its value.
    real: whether a step that is not real makes the value undefined.
  """

  index: int
  real: bool


class Pair(NamedTuple):
  """The values of two expressions, to `digits` digits."""

  x: mpmath.mpc
  y: mpmath.mpc
  digits: int

  def agree(self, rough: bool) -> bool:
    """Whether they are equal, to 40 digits after the point at least."""
    x, y = self.x, self.y
    if mp.isinf(x) or mp.isinf(y):
      return x == y
    scale = max(abs(x), abs(y))
    return abs(x - y) <= (_ROUGH * scale if rough else _AGREE * min(1, scale))


class Numeric:
  """A `compare.Judge` by values of many digits.

  Attributes:
    log_base: the base of a bare logarithm; None: e.
  """

  def __init__(self, log_base: int | None = None):
    self.log_base = log_base

  def equal(self, a: Node, b: Node) -> bool:
    with contextlib.suppress(compare.NeedsAlgebra):
      return compare.Exact().equal(a, b)
    rough = compare.is_rough(a, b)
    points = 0
    for point in self._points(a, b):
      if not self._agree(a, b, point, rough):
        return False
      points += 1
    return points > 0

  def proportional(self, a: Node, b: Node, *, positive: bool) -> bool:
    rough = compare.is_rough(a, b)
    first = None
    for point in self._points(a, b):
      pair = self._pair(a, b, point)
      if min(abs(pair.x), abs(pair.y)) < _AGREE:
        return False  # zero, all but surely everywhere
      first = first or pair
      with mp.workdps(pair.digits):
        if positive and not mp.re(pair.x / pair.y) > 0:
          return False
        x, y = pair.x * first.y, first.x * pair.y
        close = _ROUGH if rough else _AGREE
        if abs(x - y) > close * max(abs(x), abs(y)):
          return False
    return first is not None

  def value(self, a: Node) -> mpmath.mpf:
    """A real constant, rounded so that equal ones become the same."""
    try:
      value = self._evaluate(a, Point(0, True), _DIGITS)[0]
    except Undefined:
      raise tree.Unreadable("an end that is no real number") from None
    return mpmath.mpf(mpmath.nstr(value, 40))

  def constant(self, a: Node):
    """A constant to twenty digits, which may be complex."""
    return self._evaluate(a, Point(0, False), 20)[0]

  # -- points ------------------------------------------------------------------

  def _points(self, a: Node, b: Node) -> Iterator[Point]:
    """Points where both exist: real ones, or else any."""
    if not tree.symbols(a) | tree.symbols(b):
      points = [[Point(0, False)]]
    else:
      points = [[Point(i, r) for i in range(_TRIES)] for r in (True, False)]
      if any(n == _IMAGINARY for e in (a, b) for n in tree.nodes(e)):
        points = points[1:]
    found = 0
    for candidates in points:
      for point in candidates:
        if found < _POINTS and self._exist(a, b, point):
          yield point
          found += 1
      if found >= _FEWEST_POINTS:
        return

  def _exist(self, a: Node, b: Node, point: Point) -> bool:
    try:
      self._pair(a, b, point)
    except Undefined:
      return False
    return True

  def _agree(self, a: Node, b: Node, point: Point, rough: bool) -> bool:
    pair = self._pair(a, b, point)
    if pair.agree(rough):
      return True
    gap = abs(pair.x - pair.y)
    if gap > mpmath.mpf(10) ** (10 - _DIGITS):
      return False
    # Both are tiny, or zero but for rounding: more digits tell which.
    finer = self._pair(a, b, point, digits=3 * pair.digits)
    return abs(finer.x - finer.y) < gap * _AGREE

  def _pair(self, a: Node, b: Node, point: Point, digits: int = 0) -> Pair:
    """Values to _DIGITS digits after the point of the largest term."""
    if not digits:
      seen = [self._evaluate(e, point, 20)[1] for e in (a, b)]
      digits = _DIGITS + max(0, *seen)
    if digits > _MAX_DIGITS:
      raise Undefined("too many digits")
    (x, _), (y, _) = (self._evaluate(e, point, digits) for e in (a, b))
    return Pair(x, y, digits)

  def _evaluate(self, node: Node, point: Point, digits: int) -> tuple:
    """(value, digits before the point of the largest number on the way)."""
    evaluation = _Evaluation(self.log_base, point)
    with mp.workdps(digits):
      try:
        value = evaluation.of(node)
      except (ArithmeticError, ValueError, mpmath.libmp.NoConvergence) as e:
        raise Undefined(str(e)) from None
    return value, evaluation.largest


class _Evaluation:
  """One value, at mpmath's working precision.

  Attributes:
    largest: log10 of the largest number on the way, rounded up.
  """

  def __init__(self, log_base: int | None, point: Point):
    self.log_base = log_base
    self.point = point
    self.largest = 0

  def of(self, node: Node):
    value = getattr(self, "_" + node.kind)(*node.args)
    if isinstance(value, mpmath.mpc) and self.point.real:
      if value.imag:
        raise Undefined("not real")
      value = value.real
    if mp.isnan(value):
      raise Undefined("no number")
    if value and not mp.isinf(value):
      magnitude = mp.mag(value) * 0.30103
      if abs(magnitude) > _MAX_MAGNITUDE:
        raise Undefined("beyond all bounds")
      self.largest = max(self.largest, int(magnitude) + 1)
    return value

  def _num(self, value):
    return mp.mpf(value.numerator) / value.denominator

  _dec = _num

  def _const(self, name):
    return +_CONSTANTS[name]

  def _sign(self):
    raise Undefined("either sign")

  def _sym(self, name):
    u, h = _hashed(name, self.point.index)
    turn = self.point.index
    # The first turn through the ranges is common to all symbols.
    low, high = _RANGES[(turn + (turn // len(_RANGES)) * h) % len(_RANGES)]
    return low + (high - low) * u

  def _add(self, *terms):
    return mp.fsum(map(self.of, terms))

  def _mul(self, *factors):
    product = mp.mpf(1)
    for factor in factors:
      product = product * self.of(factor)
    return product

  def _pow(self, base, exponent):
    base, exponent = self.of(base), self.of(exponent)
    if base == 0:
      if mp.re(exponent) > 0:
        return mp.mpf(0)
      raise Undefined("zero to no positive power")
    if mp.isinf(exponent):  # what 1^oo is depends on the version of mpmath
      raise Undefined("an infinite power")
    if not mp.isinf(base):
      _within(abs(exponent) * (abs(mp.mag(base)) + 1), 3 * _MAX_MAGNITUDE)
    return mp.power(base, exponent)

  def _fn(self, name, *args):
    values = [self.of(a) for a in args]
    if name.startswith("@"):
      return self._unknown(name, values)
    if name in _CIRCULAR or name in _INVERSE:
      _within(values[0], _MAX_ANGLE)
      return getattr(mp, _INVERSE.get(name, name))(values[0])
    if name in _HYPERBOLIC:
      _within(values[0], _MAX_MAGNITUDE)
      return getattr(mp, name)(values[0])
    return getattr(self, "_" + name)(*values)

  def _unknown(self, name, values):
    """Some function of this name: any equality must hold for it."""
    total = _hashed(name, -1)[0]
    for i, value in enumerate(values):
      total += value * (_hashed(name, i)[0] + 1)
    _within(total, _MAX_ANGLE)
    return mp.sin(total) + total**2 / 7

  def _ln(self, x):
    if x == 0:
      raise Undefined("the logarithm of zero")
    return mp.ln(x)

  def _log(self, x):
    return self._ln(x) / (mp.ln(self.log_base) if self.log_base else 1)

  def _root(self, x, degree):
    odd = mp.isint(degree) and int(degree) % 2
    if odd and mp.im(x) == 0 and mp.re(x) < 0:
      return -mp.power(-x, 1 / degree)
    return mp.power(x, 1 / degree)

  def _factorial(self, x):
    _fit_for_gamma(x)
    return mp.factorial(x)

  def _binom(self, n, k):
    _fit_for_gamma(n, k)
    return mp.binomial(n, k)

  def _abs(self, x):
    return abs(x)

  def _floor(self, x):
    return mp.floor(_settled(_real(x)))

  def _ceil(self, x):
    return mp.ceil(_settled(_real(x)))

  def _max(self, *values):
    return max(map(_real, values))

  def _min(self, *values):
    return min(map(_real, values))

  def _gcd(self, *values):
    return mp.mpf(_join_integers("gcd", values))

  def _lcm(self, *values):
    return mp.mpf(_join_integers("lcm", values))


def _hashed(name: str, index: int) -> tuple[mpmath.mpf, int]:
  """A number in (0, 1) and an integer, by a symbol's name."""
  digest = hashlib.blake2b(f"{index} {name}".encode(), digest_size=16).digest()
  whole = int.from_bytes(digest[:8], "big") | 1
  return mp.mpf(whole) / 2**64, digest[8]


def _within(x, bound: int) -> None:
  if not abs(x) <= bound:
    raise Undefined("beyond all bounds")


def _fit_for_gamma(*values) -> None:
  """Keeps the gamma function off what would take it seconds."""
  for x in values:
    _within(x, _MAX_FACTORIAL)
    if mp.dps > _MAX_GAMMA_DIGITS and not mp.isint(x):
      raise Undefined("too many digits")


def _real(x):
  if mp.im(x):
    raise Undefined("not real")
  return mp.re(x)


def _settled(x):
  """An integer in place of what is one but for rounding."""
  nearest = mp.nint(x)
  return nearest if abs(x - nearest) < mpmath.mpf(10) ** -15 else x


def _join_integers(name: str, values) -> int:
  if not all(mp.isint(_real(v)) and abs(v) < 10**50 for v in values):
    raise Undefined("not integers")
  return getattr(math, name)(*(int(v) for v in values))
