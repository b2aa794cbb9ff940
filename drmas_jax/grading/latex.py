r"""Answers, in LaTeX or plain mathematics, read as trees.

`parse` is recursive descent over tokens: linear time, bounded depth, no model
text ever run as code. It raises Unreadable unless every token was used, so that
a known beginning (the `4` of `4\sqrt(2)`) is never the answer.

    answer    = relation {("," | ";" | "or" | "and") relation}
    relation  = sets {("=" | "<" | "\in" ..) sets}
    sets      = ratio {("\cup" | "\cap" | "\setminus") ratio}
    ratio     = quantity {":" quantity}
    quantity  = sum [unit]
    sum       = term {("+" | "-" | "\pm") term}
    term      = factor {["*" | "/"] factor}
    factor    = {sign} atom {"^" .. | "!" | "_" .. | "'"}

What stands before an `=` may go beyond this: `\lim_{x \to 0} f(x) = 5` names
its value as a letter would.
"""

import functools
import re
from fractions import Fraction

from drmas_jax.grading import tree, units
from drmas_jax.grading.tokens import (
  FUNCTIONS,
  FUNCTIONS_OF_LISTS,
  GREEK,
  SHORT_WORDS,
  Token,
  clean,
  join_thousands,
  tokenize,
)
from drmas_jax.grading.tree import Node, Unreadable, num, sym

MAX_DEPTH = 40
_MAX_POSTFIXES = 8
_MAX_EXPONENT = 3000  # of a number like 1e9
_LONG_DECIMAL = 6  # digits, RULES 19

_RELATIONS = {
  **{"=": "=", "<": "<", ">": ">", r"\le": "<=", r"\ge": ">=", r"\ne": "!="},
  **{r"\in": "in", r"\approx": "~", r"\equiv": "equiv"},
}
_SETS = {r"\cup": "cup", r"\cap": "cap", r"\setminus": "minus"}
_CURRENCIES = {
  **{r"\$": "dollar", r"\euro": "euro", r"\pounds": "gbp", r"\yen": "yen"},
  **{r"\rupee": "rupee", r"\won": "won", r"\ruble": "ruble"},
}
_OPENINGS = {"(": "(", "[": "[", r"\{": "{", r"\langle": "("}
_CLOSES = {"(": ")", r"\{": r"\}"}
_CLOSINGS = {")": ")", "]": "]", r"\}": "}", r"\rangle": ")"}
_CONSTANTS = {r"\pi": "pi", "e": "e", "i": "i", r"\infty": "oo"}
_SEPARATORS = (",", ";", "or", "and")
_ACCENTS = {
  *(r"\overline", r"\underline", r"\vec", r"\hat", r"\bar", r"\dot", r"\ddot"),
  *(r"\tilde", r"\widehat", r"\widetilde", r"\overrightarrow", r"\mathbb"),
  *(r"\overleftrightarrow", r"\wideparen", r"\overarc"),
}
_FLOORS = {r"\lfloor": (r"\rfloor", "floor"), r"\lceil": (r"\rceil", "ceil")}
# Letters that, before parentheses, are the name of a function.
_FUNCTION_LETTERS = set("fghFGH")
# What begins a name that is read as a whole: `\lim_{x \to 0} f = 1`.
_OPERATORS = {
  *(r"\lim", r"\sum", r"\prod", r"\int", r"\iint", r"\oint"),
  *(r"\max", r"\min"),
}
_UNREADABLE = {
  *(r"\int", r"\iint", r"\oint", r"\sum", r"\prod", r"\lim", r"\exists"),
  *(r"\forall", r"\to", r"\rightarrow", r"\Rightarrow", r"\implies", r"\iff"),
}
_MATRICES = {"matrix", "pmatrix", "bmatrix", "Bmatrix", "smallmatrix", "array"}
_ROWS = {"cases", "aligned", "align", "gathered", "split"}
_DECIMAL = re.compile(r"([0-9]*)\.?([0-9]*)(?:[eE]([+-]?[0-9]+))?")
_REALS = {"all real numbers", "all reals", "real numbers", "all real number"}
_END = Token("end of text", "")


@functools.lru_cache(maxsize=4096)
def parse(text: str, *, thousands: bool = True) -> Node | None:
  """The tree of an answer, or None if it is not one as a whole.

  Args:
    text: of bounded length; the caller sees to that.
    thousands: whether `1,234` is one number where it could be two.
  """
  text = clean(text)
  if thousands:
    text, _ = join_thousands(text)
  parser = _Parser(tokenize(text))
  try:
    answer = parser.answer()
    parser.expect_end()
  except (Unreadable, ZeroDivisionError):
    return None
  return answer


class _Parser:
  """A place in a list of tokens, and what surrounds it."""

  def __init__(self, tokens: list[Token]):
    self.tokens = [*tokens, _END]
    self.place = 0
    self.depth = 0
    self.bars = 0  # absolute values that are open within this group
    self.in_function = False
    self.currency: str | None = None

  # -- tokens ------------------------------------------------------------------

  @property
  def token(self) -> Token:
    return self.tokens[self.place]

  @property
  def value(self) -> str:
    """The next token if it is an operator or a command, else ""."""
    token = self.tokens[self.place]
    return token.value if token.kind in ("op", "cmd") else ""

  def take(self) -> Token:
    token = self.tokens[self.place]
    if token is _END:
      raise Unreadable("it ends too early")
    self.place += 1
    return token

  def accept(self, *values: str) -> str:
    """Takes the next token if it is one of these operators."""
    if self.value in values and self.value:
      return self.take().value
    return ""

  def expect(self, value: str) -> None:
    if not self.accept(value):
      raise Unreadable(f"{self.token.value!r} where {value!r} is due")

  def expect_end(self) -> None:
    if self.token is not _END:
      raise Unreadable(f"{self.token.value!r} is left over")

  def deeper(self, rule, *args, bars: int = 0, function: bool = False) -> Node:
    """Applies a rule within a group, where outer bars do not close."""
    if self.depth >= MAX_DEPTH:
      raise Unreadable("nested too deeply")
    outer = self.bars, self.in_function, self.currency
    self.depth += 1
    self.bars, self.in_function, self.currency = bars, function, None
    node = rule(*args)
    self.depth -= 1
    self.bars, self.in_function, self.currency = outer
    return node

  # -- answers -----------------------------------------------------------------

  def answer(self) -> Node:
    """Items between separators; `;` binds less than `,`."""
    groups: list[list[Node]] = [[self.relation()]]
    seen = set()
    while self.value in _SEPARATORS:
      found = set()
      while value := self.accept(*_SEPARATORS):
        found.add(value)
      if self._at_close():
        break  # a comma that closes a list
      seen |= found - {","} if len(found) > 1 else found
      if ";" in found:
        groups.append([])
      groups[-1].append(self.relation())
    if len(groups) > 1 and all(len(g) == 1 for g in groups):
      groups = [[g[0] for g in groups]]
    parts = [self._items(g, seen) for g in groups]
    return parts[0] if len(parts) == 1 else Node("list", tuple(parts))

  def _at_close(self) -> bool:
    return self.token is _END or self.value in (*_CLOSINGS, "}", "|")

  @staticmethod
  def _items(items: list[Node], seen: set[str]) -> Node:
    items = [i for i in items if not _is_real(i, items)]
    if len(items) == 1:
      return items[0]
    joined = seen in ({"or"}, {"and"}) and any(map(_is_region, items))
    if joined and all(i.kind == "rel" or _is_region(i) for i in items):
      return Node(seen.pop(), tuple(items))
    return Node("list", tuple(items))

  def relation(self) -> Node:
    self.accept(r"\approx")  # about so much
    sides, operators = [self._left_side()], []
    while self.value in _RELATIONS or self.value == r"\notin":
      if self.value == r"\notin":
        raise Unreadable("not in")
      operators.append(_RELATIONS[self.take().value])
      sides.append(self.sets())
    if not operators:
      return sides[0]
    return Node("rel", (tuple(operators), tuple(sides)))

  def _left_side(self) -> Node:
    """What stands before a sign, as one name where this grammar ends."""
    start, state = self.place, (self.depth, self.bars, self.in_function)
    try:
      return self._defined() or self.sets()
    except Unreadable:
      if self.tokens[start].value not in _OPERATORS and not (
        self.tokens[start].value in ("P", "E")
        and self.tokens[start + 1].value in ("(", "[")
      ):
        raise
      self.depth, self.bars, self.in_function = state
      self.currency = None
      return self._name(start)

  def _defined(self) -> Node | None:
    """The function that an equation defines, whatever it is called: P_n(x)."""
    start, name, arguments = self.place, "", []
    while self.value in ("_", "'") if name else self.token.kind == "sym":
      name += self.take().value
      name += self.argument_tokens() if name.endswith("_") else ""
    if self.accept("("):
      while self.token.kind == "sym":
        arguments.append(sym(self.take().value))
        self.accept(",")
      if arguments and self.accept(")") and self.value == "=":
        return tree.function("@" + name, *arguments)
    self.place = start
    return None

  def _name(self, start: int) -> Node:
    """All tokens up to an equals sign that stands in no group."""
    depth = 0
    for place in range(start, len(self.tokens)):
      value = self.tokens[place].value
      if value == "=" and not depth:
        self.place = place
        return sym("".join(t.value for t in self.tokens[start:place]))
      depth += (value in ("(", "[", "{")) - (value in (")", "]", "}"))
    raise Unreadable("an operator that has no value")

  def sets(self) -> Node:
    node = self.ratio()
    while operator := self.accept(*_SETS):
      kind, right = _SETS[operator], self.ratio()
      if node.kind == kind != "minus":
        node = Node(kind, (*node.args, right))
      elif node.kind == "minus":
        raise Unreadable("several differences of sets")
      else:
        node = Node(kind, (node, right))
    return node

  def ratio(self) -> Node:
    parts = [self.quantity()]
    while not self.bars and self.accept(":"):
      parts.append(self.quantity())
    if len(parts) == 1:
      return parts[0]
    last, unit = parts[-1], None
    if last.kind == "unit":  # 4:51 p.m.
      parts[-1], unit = last.args
    node = Node("colon", tuple(parts))
    return Node("unit", (node, unit)) if unit else node

  def quantity(self) -> Node:
    if self.token.kind in ("text", "word"):
      return self.phrase()
    value = self.sum()
    unit, self.currency = self.currency, None
    if self._at_unit():
      value, named = self.unit(value)  # \$5 million dollars
      if unit and named not in (unit, None):
        raise Unreadable("two units")
      unit = unit or named
    return Node("unit", (value, unit)) if unit else value

  def phrase(self) -> Node:
    """Words, or the letter or name that a text holds."""
    start, words = self.place, []
    while self.token.kind in ("text", "word", "num"):  # October 30
      words.append(self.take().value)
    text = " ".join(words)
    short = len(text) <= 3 and text.isascii() and text.isalpha()
    # Points are put together inside of a group: \frac{NO}{AM}.
    points = self.depth and self.tokens[start].kind == "word" and text.isupper()
    if short and (points or text.lower() not in SHORT_WORDS):  # \text{B}
      letters = [Token("sym", c, True) for c in text]
      self.tokens[start : self.place] = letters
      self.place = start
      return self.quantity()
    if text.casefold().strip(". ") in _REALS:
      return tree.REALS
    if self.value == "_":  # a name such as \text{max}_1
      return self.subscripts(sym(text))
    return Node("text", (text,))

  # -- units -------------------------------------------------------------------

  def _at_unit(self) -> bool:
    return self.token.kind in ("text", "word") or self.value in (
      *("deg", r"\%", "'", r"\cent"),
      *_CURRENCIES,
    )

  def unit(self, value: Node) -> tuple[Node, str | None]:
    """Everything up to the next separator, as one unit."""
    pieces: list[str] = []
    while not self._at_close() and self.value not in (
      *_SEPARATORS,
      *_RELATIONS,
      *("&", r"\\", ":"),
    ):
      pieces.append(self._piece_of_unit())
    words = pieces[0].split() if pieces else []
    while words and words[0].casefold() in units.SCALES:
      value = tree.mul(value, num(units.SCALES[words.pop(0).casefold()]))
    if not (pieces := [" ".join(words), *pieces[1:]] if words else pieces[1:]):
      return value, None
    unit = units.unit(pieces)
    if unit is None:
      raise Unreadable("words that are no unit")
    return value, unit

  def _piece_of_unit(self) -> str:
    token = self.take()
    if token.kind in ("text", "word"):
      return token.value
    if token.value == "deg":
      return "deg"
    if token.value == "^":
      exponent = tree.rational(self.argument())
      if exponent is None:
        raise Unreadable("a unit's exponent")
      return f"^{exponent}"
    if token.kind == "sym" and token.value in units.LETTERS:
      return token.value
    names = {r"\%": "%", "'": "'", r"\cent": "cent", "/": "/", "*": "*"}
    if name := names.get(token.value) or _CURRENCIES.get(token.value):
      return name
    raise Unreadable(f"{token.value!r} in a unit")

  # -- expressions -------------------------------------------------------------

  def sum(self) -> Node:
    terms = [self.term()]
    while operator := self.accept("+", "-", r"\pm", r"\mp"):
      if self._at_close() and operator in "+-":
        raise Unreadable("a sign without a term")  # 0^+ and its like
      term = self.term()
      if operator == "-" and term.kind == "set" and len(terms) == 1:
        terms[0] = Node("minus", (terms[0], term))
      else:
        terms.append(_signed(operator, term))
    return terms[0] if len(terms) == 1 else tree.add(*terms)

  def term(self) -> Node:
    first = self.factor()
    if first.kind == "sym" and self._starts_factor():
      factor = self.factor(signs=False)
      if factor.kind == "tuple":
        return Node("named", (first, factor))  # D(0, 2)
      factors = [first, factor]
    else:
      factors = [first]
    while True:
      if self.accept("*"):
        factors.append(self.factor())
      elif self.accept("/"):
        factors.append(tree.power(self.factor(), tree.MINUS_ONE))
      elif self.value in (r"\mod", r"\pmod"):
        raise Unreadable("a residue class")
      elif self.value in ("deg", r"\%") and not self._unit_ends():
        factors.append(self._inner_unit())
      elif self._starts_factor():
        if (
          self.token.kind == "num" and self.tokens[self.place - 1].kind == "num"
        ):
          raise Unreadable("two numbers side by side")
        factors.append(self.factor(signs=False))
      else:
        return tree.mul(*factors) if len(factors) > 1 else factors[0]

  def _unit_ends(self) -> bool:
    r"""Whether this degree or percent sign is the quantity's own unit."""
    if self.in_function:
      return False
    after = self.tokens[self.place + 1]
    starts = after.kind in ("num", "cmd") and after.value not in _RELATIONS
    inner = starts or after.value in ("+", "-", "*", "/", "^", "(")
    return not inner or after.value in _SETS

  def _inner_unit(self) -> Node:
    """A degree counts within a function; a percent sign is a hundredth."""
    if self.take().value == r"\%":
      return num(Fraction(1, 100))
    if not self.in_function:
      return tree.ONE
    return tree.mul(num(Fraction(1, 180)), Node("const", ("pi",)))

  def _starts_factor(self) -> bool:
    token = self.token
    if token.kind in ("num", "sym", "begin"):
      return True
    if token.kind == "op":
      opens = token.value in ("(", "[", r"\{", "{")
      return opens or (token.value == "|" and not self.bars)
    return (
      token.kind == "cmd"
      and token.value not in _RELATIONS
      and token.value not in _SETS
      and token.value not in _CURRENCIES
      and token.value not in (r"\%", r"\cent", r"\pm", r"\mp", r"\choose")
      and token.value not in (r"\rfloor", r"\rceil", r"\rangle", r"\over")
      and token.value not in (r"\mod", r"\pmod", r"\notin")
    )

  def factor(self, signs: bool = True) -> Node:
    sign: list[str] = []
    while signs and self.value in ("+", "-", r"\pm", r"\mp"):
      sign.append(self.take().value)
    start = self.place
    node = self.atom()
    if self.tokens[start].kind == "num" and self.place == start + 1:
      node = self.mixed(node)
    node = self.postfix(node)
    for operator in reversed(sign):
      node = _signed(operator, node)
    return node

  def mixed(self, whole: Node) -> Node:
    r"""An integer with the fraction after it: `1\frac{1}{2}`, `1 1/2`.

    It is a product where the fraction is not between 0 and 1.
    """
    if not tree.is_integer(whole):
      return whole
    if self.value == r"\frac":
      part = self.atom()
      proper = part.kind == "num" and 0 < part.args[0] < 1
      return (tree.add if proper else tree.mul)(whole, part)
    following = self.tokens[self.place : self.place + 3]
    if [t.kind for t in following] != ["num", "op", "num"]:
      return whole
    top, slash, bottom = following
    if slash.value != "/":
      return whole
    self.place += 3
    part = tree.divide(_number(top.value), _number(bottom.value))
    if part.kind != "num" or not 0 < part.args[0] < 1:
      raise Unreadable("two numbers side by side")
    return tree.add(whole, part)

  def postfix(self, node: Node) -> Node:
    for _ in range(_MAX_POSTFIXES):
      if self.accept("^"):
        node = tree.power(node, self.argument())
      elif self.value == "!":
        self.take()
        node = tree.function("factorial", node)
      elif self.value == "_":
        node = self.subscripts(node)
      elif self.value == "'" and node.kind == "sym":
        self.take()
        node = sym(node.args[0] + "'")
      else:
        return node
    raise Unreadable("too many exponents")

  def subscripts(self, node: Node) -> Node:
    """A name with a subscript, or the digits of a number in another base."""
    self.expect("_")
    start = self.place
    argument = self.deeper(self.argument_tokens)
    before = self.tokens[max(0, start - 4) : start - 1]
    if [t.value for t in before[::2]] == ["(", ")"]:  # (52)_8
      before = before[1:2]
    if node.kind == "num" and before[-1].kind == "num":
      return _in_base(before[-1].value, argument)
    if node.kind not in ("sym", "const"):
      raise Unreadable("a subscript of what is no name")
    return sym(f"{node.args[0]}_{argument}")

  def argument_tokens(self) -> str:
    """A group or one token as it is written."""
    if not self.accept("{"):
      return self.take().value
    start, depth = self.place, 1
    while depth:
      depth += {"{": 1, "}": -1}.get(self.take().value, 0)
    return "".join(t.value for t in self.tokens[start : self.place - 1])

  def argument(self, digit: bool = False) -> Node:
    r"""What `^`, `\frac` and their like apply to.

    Args:
      digit: take one digit of a number, as in `\frac12`.
    """
    if self.accept("{"):
      return self.deeper(self.group, function=self.in_function)
    sign = self.accept("+", "-")
    token = self.token
    if digit and token.kind == "num" and token.value.isdigit():
      self.tokens[self.place] = token._replace(value=token.value[1:])
      if len(token.value) == 1:
        self.place += 1
      return num(int(token.value[0]))
    node = self.deeper(self._tight, function=self.in_function)
    return _signed(sign, node) if sign else node

  def _tight(self) -> Node:
    node = self.atom()
    while self.value in ("_", "'", "^"):
      if self.accept("^"):
        node = tree.power(node, self.argument())  # towers bind to the right
      elif self.value == "'" and node.kind == "sym":
        self.take()
        node = sym(node.args[0] + "'")
      else:
        node = self.subscripts(node)
    return node

  def group(self) -> Node:
    """After a "{": an expression, or a set that is written without slashes."""
    if self.accept("}"):
      raise Unreadable("an empty group")
    node = self.answer()
    if self.accept(r"\choose"):
      node = tree.function("binom", node, self.answer())
    elif self.accept(r"\over"):
      node = tree.divide(node, self.answer())
    self.expect("}")
    return Node("set", node.args) if node.kind == "list" else node

  # -- atoms -------------------------------------------------------------------

  def atom(self) -> Node:
    token = self.take()
    value = token.value
    if token.kind == "num":
      return self._after_number(value)
    if token.kind == "sym":
      return self._after_letter(value)
    if token.kind == "begin":
      return self.deeper(self.environment, value)
    if token.kind == "text" and len(value) == 1:
      return self._after_letter(value)
    if token.kind not in ("op", "cmd"):
      raise Unreadable(f"words in mathematics: {value!r}")
    if value in _OPENINGS:
      return self.deeper(self.brackets, value, bars=int(value == r"\{"))
    if value == "{":
      return self.deeper(self.group, function=self.in_function)
    if value == "|":
      node = self.deeper(self.answer, bars=1)
      self.expect("|")
      return tree.function("abs", node)
    if value in _CURRENCIES and self.currency is None:
      self.currency = _CURRENCIES[value]
      return self.postfix(self.atom())
    if token.kind == "cmd":
      return self.command(value)
    raise Unreadable(f"{value!r} where a value is due")

  def _after_number(self, value: str) -> Node:
    r"""A number, with the period of a repeating decimal if it has one."""
    if "." in value and self.value in (r"\overline", r"\dot", r"\bar"):
      self.take()
      return _repeating(value, self.argument_tokens())
    return _number(value)

  def _after_letter(self, letter: str) -> Node:
    """A constant, a symbol, or an unknown function of what follows."""
    if letter in _CONSTANTS:
      return Node("const", (_CONSTANTS[letter],))
    marks = self._marks() if letter in _FUNCTION_LETTERS else ""
    opened = self.tokens[self.place : self.place + 3]
    values = [t.value for t in opened]
    applied = values[:1] == ["("] and (
      letter in _FUNCTION_LETTERS
      or (values[2:] == [")"] and opened[1].kind == "num")
    )
    if not applied:
      return sym(letter)
    self.take()
    inside = self.deeper(self.answer)
    self.expect(")")
    args = inside.args if inside.kind == "list" else (inside,)
    return tree.function("@" + letter + marks, *args)

  def _marks(self) -> str:
    """Of a derivative or an inverse that is applied: f'(x), f^{-1}(x)."""
    start, marks = self.place, ""
    while self.accept("'"):
      marks += "'"
    if not marks and self.accept("^") and self.value == "{":
      marks = "^" + self.argument_tokens()
    if self.value == "(" and marks.strip("'") in ("", "^-1"):
      return marks
    self.place = start
    return ""

  def command(self, name: str) -> Node:
    if name in _CONSTANTS:
      return Node("const", (_CONSTANTS[name],))
    if name[1:] in FUNCTIONS:
      return self.applied(name[1:])
    if name[1:] in FUNCTIONS_OF_LISTS:
      return self.applied_to_list(name[1:])
    if name == r"\frac":
      top = self.argument(digit=True)
      return tree.divide(top, self.argument(digit=True))
    if name == r"\binom":
      top = self.argument(digit=True)
      return tree.function("binom", top, self.argument(digit=True))
    if name == r"\sqrt":
      return self.root()
    if name in _FLOORS:
      close, function = _FLOORS[name]
      node = self.deeper(self.answer)
      self.expect(close)
      return tree.function(function, node)
    if name == r"\emptyset":
      return Node("set", ())
    if name in _ACCENTS:
      inside = self.deeper(self.argument_tokens)
      if (name, inside) == (r"\mathbb", "R"):
        return tree.REALS
      return sym(f"{name}{{{inside}}}")
    if name in (r"\R", r"\reals", r"\Reals"):
      return tree.REALS
    if name in _UNREADABLE or not (name[1:].isalpha() or name == r"\mho"):
      raise Unreadable(f"{name} is beyond this grammar")
    return sym(name[1:] if name[1:] in GREEK else name)

  def root(self) -> Node:
    degree = None
    if self.accept("["):
      degree = self.deeper(self.sum)
      self.expect("]")
    inside = self.argument()
    if degree is None or degree == num(2):
      return tree.function("sqrt", inside)
    return tree.function("root", inside, degree)

  def applied(self, name: str) -> Node:
    r"""A function: `\sin x`, `\sin^2(x)`, `\log_2 8`, `\cos^{-1} x`."""
    base = exponent = None
    while self.value in ("_", "^"):
      if self.take().value == "_":
        base = self.argument()
      else:
        exponent = self.argument()
    argument = self.deeper(self.function_argument, function=True)
    if exponent == tree.MINUS_ONE and name not in ("log", "ln", "lg", "exp"):
      name, exponent = f"arc{name}", None
    node = _apply(name, base, argument)
    return node if exponent is None else tree.power(node, exponent)

  def function_argument(self) -> Node:
    """One group, or the factors up to the next function, sign or group."""
    if self.accept("("):
      inside = self.answer()
      self.expect(")")
      return inside
    if self.accept("{"):
      return self.group()
    sign = self.accept("+", "-")
    factors = [self.postfix(self.atom())]
    while self._continues_argument():
      if self.value == "deg":
        factors.append(self._inner_unit())
      else:
        factors.append(self.postfix(self.atom()))
    return _signed(sign, tree.mul(*factors))

  def _continues_argument(self) -> bool:
    token = self.token
    if token.kind == "cmd" and token.value[1:] in FUNCTIONS:
      return False
    if token.value == "deg" or token.kind == "sym":
      return True
    return token.value in (r"\pi", r"\frac", r"\sqrt") or (
      token.kind == "cmd" and token.value[1:] in GREEK
    )

  def applied_to_list(self, name: str) -> Node:
    close = _CLOSES.get(self.accept("(", r"\{"))
    if close is None:
      raise Unreadable(f"{name} of nothing")
    inside = self.deeper(self.answer)
    self.expect(close)
    args = inside.args if inside.kind == "list" else (inside,)
    if len(args) > 1 and name in ("abs", "floor", "ceil"):
      raise Unreadable(f"{name} of a list")
    return tree.function(name, *args)

  # -- brackets and environments -----------------------------------------------

  def brackets(self, opening: str) -> Node:
    kind = _OPENINGS[opening]
    if kind == "{" and self.accept(r"\}"):
      return Node("set", ())
    inside = self.answer()
    if kind == "{" and self.accept("|", ":"):
      self.bars = 0
      inside = Node("such", (inside, self.answer()))
    closing = _CLOSINGS.get(self.take().value)
    if closing is None or (kind == "{") != (closing == "}"):
      raise Unreadable("brackets that do not match")
    if kind == "{":
      if inside.kind == "such":
        return inside
      return Node("set", inside.args if inside.kind == "list" else (inside,))
    if inside.kind == "list":
      return Node("tuple", (kind, closing, inside.args))
    if (kind, closing) not in (("(", ")"), ("[", "]")):
      raise Unreadable("brackets that do not match")
    return inside

  def environment(self, name: str) -> Node:
    """A matrix, or rows of statements."""
    rows: list[list[Node]] = [[]]
    while self.token.kind != "end":
      if self.accept(r"\\"):
        rows.append([])
      elif not self.accept("&", ","):
        rows[-1].append(self.relation())
    if self.take().value != name:
      raise Unreadable("environments that do not match")
    rows = [row for row in rows if row]
    cells = [cell for row in rows for cell in row]
    if name in _ROWS and cells:
      return cells[0] if len(cells) == 1 else Node("list", tuple(cells))
    if name not in _MATRICES or len({len(row) for row in rows}) != 1:
      raise Unreadable(f"the environment {name}")
    if not all(map(tree.is_expression, cells)):
      raise Unreadable("a matrix of what are no expressions")
    return Node("matrix", tuple(map(tuple, rows)))


def _is_region(node: Node) -> bool:
  """A condition or an interval, which "or" joins to others of its kind."""
  if node.kind == "rel":
    return not set(node.args[0]) <= {"=", "~"}
  return node.kind == "cup" or tree.is_interval(node)


def _is_real(node: Node, items: list[Node]) -> bool:
  """Whether it says no more than that a number of other items is real."""
  if node.kind != "rel" or node.args[0] != ("in",):
    return False
  name, values = node.args[1]
  others = (tree.symbols(i) for i in items if i is not node)
  return values == tree.REALS and any(name == sym(n) for o in others for n in o)


def _signed(operator: str, node: Node) -> Node:
  if operator in ("+", ""):
    return node
  if operator == "-":
    return tree.negative(node)
  sign = tree.SIGN if operator == r"\pm" else tree.negative(tree.SIGN)
  return tree.mul(sign, node)


def _number(text: str) -> Node:
  """An exact number; a decimal that is long and no integer is "dec"."""
  match = _DECIMAL.fullmatch(text)
  if match is None:
    raise Unreadable("no number")
  whole, places, exponent = match.groups()
  if abs(int(exponent or 0)) > _MAX_EXPONENT:
    raise Unreadable("a number beyond all bounds")
  value = Fraction(f"{whole or '0'}.{places or '0'}e{exponent or 0}")
  long = len((whole + places).lstrip("0")) >= _LONG_DECIMAL
  if places and long and value.denominator != 1:
    return Node("dec", (value,))
  return num(value)


def _repeating(start: str, period: str) -> Node:
  if not period.isdigit() or "e" in start.lower():
    raise Unreadable("a repeating decimal")
  places = len(start.partition(".")[2])
  tail = Fraction(int(period), 10**places * (10 ** len(period) - 1))
  return num(Fraction(start + "0") + tail)


def _in_base(digits: str, base: str) -> Node:
  """The value of digits in another base, as in `52_8`."""
  if not (digits.isdigit() and base.isdigit() and 2 <= int(base[:3]) <= 36):
    raise Unreadable("a number in no base")
  try:
    return num(int(digits, int(base)))
  except ValueError:
    raise Unreadable(f"digits that are not of base {base}") from None


def _apply(name: str, base: Node | None, argument: Node) -> Node:
  if name == "exp":
    return tree.power(Node("const", ("e",)), argument)
  if name == "lg":
    name, base = "log", num(10)
  if name == "log" and base is not None:
    bottom = tree.function("ln", base)
    return tree.divide(tree.function("ln", argument), bottom)
  if base is not None:
    raise Unreadable(f"a base of {name}")
  return tree.function(name, argument)
