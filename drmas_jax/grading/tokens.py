# ruff: noqa: RUF001  spellings of one character are what this file is about
r"""The text of an answer as tokens: spelling goes, meaning stays.

`tokenize` takes linear time and loses nothing that changes a value: it drops
spacing, fonts, `\left` and `\right`, dollar signs and the full stop, and gives
each of a symbol's spellings (`\leq`, `\le`, `<=`) one token. Two answers of
equal tokens are equal whatever they mean.
"""

import functools
import re
import unicodedata
from typing import NamedTuple

from drmas_jax.grading import units


class Token(NamedTuple):
  """One token.

  Attributes:
    kind: "num", "sym" (one letter), "word" (letters that are no product),
      "text" (a phrase), "begin", "end" (of an environment), "cmd" or "op".
    value: its characters, in the one spelling of `_ALIASES`.
    spaced: whether white space or a font command stands before it.
  """

  kind: str
  value: str
  spaced: bool = False


GREEK = (
  *("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"),
  *("iota", "kappa", "lambda", "mu", "nu", "xi", "pi", "rho", "sigma", "tau"),
  *("upsilon", "phi", "chi", "psi", "omega", "Gamma", "Delta", "Theta"),
  *("Lambda", "Xi", "Pi", "Sigma", "Phi", "Psi", "Omega"),
)
_GREEK_LETTERS = "αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩ"

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₋₊ₙ", "0123456789-+n", strict=True))
_CHARACTERS = str.maketrans(
  {
    **dict.fromkeys("−‐‑‒–—﹣－", "-"),
    **{"×": r"\times ", "÷": "/", "·": r"\cdot ", "⋅": r"\cdot "},
    **{"∙": r"\cdot ", "∗": r"\cdot ", "⁄": "/", "∕": "/", "：": ":"},
    **{"≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne "},
    **{"≈": r"\approx ", "∞": r"\infty ", "√": r"\sqrt ", "±": r"\pm "},
    **{"∓": r"\mp ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in "},
    **{"∅": r"\emptyset ", "∖": r"\setminus ", "≡": r"\equiv "},
    **{"°": r"\degree ", "º": r"\degree ", "˚": r"\degree "},
    **{"€": r"\euro ", "£": r"\pounds ", "¥": r"\yen ", "¢": r"\cent "},
    **{"₹": r"\rupee ", "₩": r"\won ", "₽": r"\ruble "},
    **{"′": "'", "’": "'", "″": "''", "…": r"\ldots ", "⟨": r"\langle "},
    **{"⟩": r"\rangle ", "⌊": r"\lfloor ", "⌋": r"\rfloor "},
    **{"⌈": r"\lceil ", "⌉": r"\rceil ", "ℝ": r"\mathbb{R} "},
    **{"、": ",", "，": ",", "。": ".", "；": ";", "％": "%"},
    **{
      character: rf"\frac{{{top}}}{{{bottom}}}"
      for character in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
      for top, bottom in [unicodedata.normalize("NFKC", character).split("⁄")]
    },
    **{
      letter: rf"\{name} "
      for letter, name in zip(_GREEK_LETTERS, GREEK, strict=True)
    },
  }
)

_DROPPED = {
  *(r"\left", r"\right", r"\middle", r"\big", r"\Big", r"\bigg", r"\Bigg"),
  *(r"\bigl", r"\bigr", r"\Bigl", r"\Bigr", r"\biggl", r"\biggr", r"\Biggl"),
  *(r"\Biggr", r"\!", r"\,", r"\:", r"\;", r"\>", "\\ "),
  *(r"\displaystyle", r"\textstyle", r"\limits", r"\(", r"\)", r"\[", r"\]"),
  *(r"\mathbf", r"\mathit", r"\mathsf", r"\mathcal", r"\boldsymbol", r"\bm"),
  *(r"\mathtt", r"\bf", r"\rm", r"\it", r"\underline", r"\ensuremath"),
  *(r"\tiny", r"\small", r"\normalsize", r"\large", r"\Large", r"\LARGE"),
  *(r"\huge", r"\Huge", r"\hline", r"\noindent", r"\mathop", r"\hfill"),
  *(r"\boxed", r"\fbox", r"\thinspace", r"\n", "$", "~", "`"),
}
_TEXTS = {
  *(r"\text", r"\mbox", r"\textnormal", r"\textrm", r"\textbf", r"\textit"),
  *(r"\hbox", r"\textsc", r"\texttt", r"\emph"),
}
_FONTS = {r"\mathrm", r"\operatorname", r"\textup", r"\textsf"}
_ALIASES = {
  **dict.fromkeys((r"\dfrac", r"\tfrac", r"\cfrac"), r"\frac"),
  **dict.fromkeys((r"\dbinom", r"\tbinom"), r"\binom"),
  **dict.fromkeys((r"\leq", r"\leqslant", r"\leqq", "<="), r"\le"),
  **dict.fromkeys((r"\geq", r"\geqslant", r"\geqq", ">="), r"\ge"),
  **{r"\neq": r"\ne", "!=": r"\ne", r"\lt": "<", r"\gt": ">", "==": "="},
  **{r"\lbrace": r"\{", r"\rbrace": r"\}", r"\lbrack": "[", r"\rbrack": "]"},
  **dict.fromkeys((r"\vert", r"\lvert", r"\rvert", r"\mid"), "|"),
  **dict.fromkeys((r"\ast", r"\times", r"\cdot"), "*"),
  **{r"\div": "/", r"\slash": "/", r"\colon": ":", "**": "^"},
  **dict.fromkeys((r"\simeq", r"\thickapprox", r"\sim"), r"\approx"),
  **dict.fromkeys((r"\vee", r"\lor"), "or"),
  **dict.fromkeys((r"\wedge", r"\land"), "and"),
  **{r"\varnothing": r"\emptyset", r"\prime": "'", r"\degree": "deg"},
  **dict.fromkeys((r"\cdots", r"\dots", r"\dotsc"), r"\ldots"),
  **{r"\varepsilon": r"\epsilon", r"\varphi": r"\phi", r"\bmod": r"\mod"},
  **{r"\pmod": r"\mod", r"\bigcup": r"\cup", r"\bigcap": r"\cap"},
  **dict.fromkeys((r"\backslash", r"\smallsetminus"), r"\setminus"),
  r"\cr": r"\\",
  **{r"\textdollar": r"\$", "%": r"\%", r"\percent": r"\%", r"\imath": "i"},
  **{r"\tg": r"\tan", r"\ctg": r"\cot", r"\cosec": r"\csc"},
}

FUNCTIONS = {
  *("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth"),
  *("arcsin", "arccos", "arctan", "arccot", "arcsec", "arccsc"),
  *("log", "ln", "lg", "exp"),
}
FUNCTIONS_OF_LISTS = {"max", "min", "gcd", "lcm", "abs", "floor", "ceil"}
_BARE = {
  **{name: rf"\{name}" for name in (*GREEK, *FUNCTIONS, *FUNCTIONS_OF_LISTS)},
  **{"asin": r"\arcsin", "acos": r"\arccos", "atan": r"\arctan"},
  **{"sqrt": r"\sqrt", "frac": r"\frac", "dfrac": r"\frac", "tfrac": r"\frac"},
  **{"infinity": r"\infty", "infty": r"\infty", "inf": r"\infty"},
  **{"Infinity": r"\infty", "Inf": r"\infty", "oo": r"\infty"},
  **{"binom": r"\binom", "mod": r"\mod"},
  **{"left": r"\left", "right": r"\right"},
}
# Of those, the ones that are no word or unit in a text.
_SPELLED = {*FUNCTIONS, "gcd", "lcm"} - {"exp", "sec"}
# Words too short to be told from a product of letters by their length.
SHORT_WORDS = {
  *("yes", "no", "odd", "one", "two", "six", "ten", "red", "all", "any", "may"),
  *("jan", "feb", "mar", "apr", "jun", "jul", "aug", "sep", "oct", "nov"),
  *("dec", "mon", "tue", "wed", "thu", "fri", "sat", "sun", "boy", "dog"),
  *("cat", "car", "bus", "day", "man", "not", "dne"),
}

_TOKEN = re.compile(
  r"(?P<space>\s+)"
  r"|(?P<begin>\\begin\s*\{\s*[a-zA-Z]+\*?\s*\}(?:\s*\{[lcr|\s]*\})?)"
  r"|(?P<end>\\end\s*\{\s*[a-zA-Z]+\*?\s*\})"
  r"|(?P<cmd>\\[a-zA-Z]+|\\.)"
  r"|(?P<num>(?:[0-9]+\.[0-9]+|[0-9]+\.(?![0-9.])|\.[0-9]+|[0-9]+)"
  r"(?:[eE][+-]?[0-9]+(?![0-9.]))?)"
  r"|(?P<word>[^\W\d_]+)"
  r"|(?P<op><=|>=|!=|==|\*\*|.)",
  re.DOTALL,
)
_PHRASE = re.compile(r"\s*[^\W\d_]+(?:[\s.\-'/]+[^\W\d_]+)*[\s.]*")
_TEXT = re.compile(r"\\(?:text[a-z]*|mathrm|[mh]box)\s*\{([^{}]*)\}")
_PROSE_WORD = re.compile(r"[^\W_]+")
_PROSE = re.compile(r"[^\W_]+(?:[\s.,;:'\-]+[^\W_]+)+[\s.!]*")
_CONNECTOR = re.compile(r"[\s,]*(or|and|;)?[\s,]*", re.IGNORECASE)
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_RAISED = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_LOWERED = re.compile(f"[{''.join(_SUBSCRIPTS)}]+")
_QUOTES = {'"': '"', "'": "'", "“": "”", "‘": "’", "«": "»", "`": "'"}
_DEGREE = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))")
_PRIMES = re.compile(r"\^\s*(?:\{\s*((?:\\prime\s*)+)\}|\\prime(?![a-zA-Z]))")
_PERIOD = re.compile(r"\\(?:overline|bar|dot)")  # of `0.\overline{3}`
# What shows nothing that counts; a `\quad` also where it is written `\quadx`.
_UNSEEN = re.compile(
  r"\\[hv]?phantom\s*(?:\{[^{}]*\}|[^\s\\])"
  r"|\\(?:(?:text)?color|[hv]space\*?)\s*\{[^{}]*\}|\\q?quad"
)
_OLD_FONT = re.compile(
  r"\{\s*\\(?:rm|bf|it)(?![a-zA-Z])\s*([^{}]*)\}|\\rm\s*\{([^{}]*)\}"
)
# Names of the sides of a bracket that opens to the outside: ]0, 1[.
_SIDES = re.compile(r"\\(?:left|right)\s*(?=[\[\]])")
_LINE_SPACE = re.compile(r"(?<=\\\\)\s*\[[0-9.]+\s*[a-z]{2}\]")
_ESCAPED = re.compile(r"\\\\(?=[a-zA-Z])")
_UNION = re.compile(
  r"(,[^()\[\]]*[)\]]|\\\})\s*U\s*(?=(?:\\left\s*)?[(\[]|\\\{)"
)
_NOT = re.compile(r"\\not\s*(=|\\in(?![a-z]))")
_MODULO = re.compile(
  r"\(\s*(?:\\[bp]?mod|\\text\s*\{\s*mod\s*\}|mod)\b([^()]*)\)"
)
# Repeating decimals: `0.(3)`, and the `0.1666...` whose period is written
# twice, or three times if it is one digit.
_IN_BRACKETS = re.compile(r"(?<![\d.])(\d*\.\d*)\((\d+)\)", re.ASCII)
_BARE_POINT = re.compile(r"(?<![0-9])\.(?=\\(?:overline|bar|dot)\b)")
_AND_SO_ON = re.compile(
  r"(?<![\d.])(\d*\.)(\d+)(?:\.\.\.|\\[lc]?dots(?![a-zA-Z]))", re.ASCII
)
_MAX_PERIOD = 12
_LETTER_TIMES = re.compile(r"(?<=[0-9])\s*[xX]\s*(?=10\s*\^)")
_OUTWARD = re.compile(r"(^\])|\[$")
# Commas that are meant as thousands: `10{,}000` and `10,\!000`.
_THIN_COMMA = re.compile(
  r"(?<=\d)\s*(?:\{\s*,\s*\}|,\s*\\!|\\[, ]|~)\s*(?=\d{3}(?!\d))", re.ASCII
)
_SPACED_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?: \d{3})+(?:\.\d+)?", re.ASCII)
_BRACKETS_AND_RUNS = re.compile(
  r"\\[{}]|[(\[\])]|(?<![\d.])\d+(?:,\d+)+(?:\.\d+)?", re.ASCII
)
_THOUSANDS = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?", re.ASCII)
_QUOTED = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)\"""")
_QUOTED_LIST = re.compile(r"""[^'"]{0,40}\[\s*['"]""")


@functools.lru_cache(maxsize=4096)
def clean(text: str) -> str:
  """The text without wrappers, its special characters written as LaTeX."""
  text = _unquoted(text if text.isascii() else _as_latex(text))
  if _QUOTED_LIST.match(text):
    text = _unescape(text)
  if r"\begin" not in text:  # no rows: a command whose slash was escaped
    text = _ESCAPED.sub(r"\\", text)
  if _SPACED_THOUSANDS.fullmatch(text):
    text = text.replace(" ", "")
  text = _PRIMES.sub(lambda m: "'" * ((m[1] or "\\").count("\\")), text)
  text = _UNSEEN.sub(" ", _DEGREE.sub(r"\\degree ", text))
  text = _OLD_FONT.sub(lambda m: rf"\mathrm{{{m[1] or m[2]}}}", text)
  text = _SIDES.sub("", _LINE_SPACE.sub("", text)).strip()
  if text.startswith("]") or text.endswith("["):  # ]0, 1[
    text = _OUTWARD.sub(lambda m: "(" if m[1] else ")", text)
  text = _NOT.sub(lambda m: r"\ne " if m[1] == "=" else r"\notin ", text)
  text = _UNION.sub(r"\1 \\cup ", _MODULO.sub(r"\\mod{\1}", text))
  text = _BARE_POINT.sub("0.", text)
  text = _IN_BRACKETS.sub(r"\1\\overline{\2}", text)
  text = _AND_SO_ON.sub(_repeating, text)
  text = _LETTER_TIMES.sub(r"\\times ", units.marked(text))
  return _THIN_COMMA.sub("", text)


def _as_latex(text: str) -> str:
  """ASCII spellings of digits, signs and letters that have one."""
  text = "".join(c for c in text if unicodedata.category(c) != "Cf")
  text = _RAISED.sub(lambda m: _shifted("^", _SUPERSCRIPTS, m[0]), text)
  text = _LOWERED.sub(lambda m: _shifted("_", _SUBSCRIPTS, m[0]), text)
  # Twice: the first saves what NFKC would lose, the second is for what it adds.
  text = unicodedata.normalize("NFKC", text.translate(_CHARACTERS))
  text = re.sub(r"\d", lambda m: str(int(m[0])), text)  # of any script
  return text.translate(_CHARACTERS)


def _shifted(mark: str, characters: dict[str, str], run: str) -> str:
  return f"{mark}{{{''.join(characters[c] for c in run)}}}"


def _unquoted(text: str) -> str:
  """Without Markdown's bold or italic, and quotation marks, around it all."""
  text = text.strip()
  for mark in ("**", "__", "*"):
    inner = text[len(mark) : -len(mark)].strip()
    if inner and text.startswith(mark) and text.endswith(mark):
      text = inner
  inner = text[1:-1].strip()
  if inner and _QUOTES.get(text[0]) == text[-1] and text[-1] not in inner:
    text = inner
  return text


def _repeating(decimal: re.Match) -> str:
  r"""`0.1666...` as `0.1\overline{6}`, if its digits do repeat."""
  start, digits = decimal[1], decimal[2]
  for size in range(1, _MAX_PERIOD + 1):
    period = digits[-size:]
    if digits.endswith(period * (3 if size == 1 else 2)):
      while digits.endswith(period):
        digits = digits.removesuffix(period)
      return rf"{start}{digits}\overline{{{period}}}"
  return decimal[0]


def _unescape(text: str) -> str:
  r"""A Python literal's `\\` as one; the `\n` at a string's end goes."""
  return re.sub(r"\\n(?=\s*['\"])", "", text).replace("\\\\", "\\")


def alternatives(gold: str) -> list[str]:
  """The strings of a gold that is a list of strings in Python's notation.

  Minerva's golds are such; any of them is right. Nothing is evaluated.
  """
  if not _QUOTED_LIST.match(gold):
    return [gold]
  found = (one or two for one, two in _QUOTED.findall(_unescape(gold)))
  return [text.strip() for text in found if text.strip()] or [gold]


def join_thousands(text: str) -> tuple[str, bool]:
  """Thousands commas removed; True if one of them may be a list's.

  Inside of brackets a comma separates, unless the next group begins with a
  zero, as no item of a list does.
  """
  depth, unsure = 0, False

  def join(match: re.Match) -> str:
    nonlocal depth, unsure
    found = match.group()
    if not found[0].isdigit():
      depth += 1 if found[-1] in "([{" else -1
    elif _THOUSANDS.fullmatch(found) and (not depth or ",0" in found):
      unsure = unsure or not depth
      return found.replace(",", "")
    return found

  return _BRACKETS_AND_RUNS.sub(join, text), unsure


def tokenize(text: str) -> list[Token]:
  """Tokens of a cleaned text; linear time."""
  tokens = _append_tokens(text, [])
  start, stop = 0, len(tokens)
  while stop and tokens[stop - 1].value in (*".,;:?", r"\\"):
    stop -= 1
  while start < stop and tokens[start].value in (",", ";", ":"):
    start += 1
  return tokens[start:stop]


def _append_tokens(text: str, tokens: list[Token], nested: bool = False):
  """Appends to `tokens`, which say what a word after them may mean."""
  spaced, place = False, 0
  while place < len(text):
    match = _TOKEN.match(text, place)
    kind, value, place = match.lastgroup, match.group(), match.end()
    value = _ALIASES.get(value, value)
    if kind == "space" or value in _DROPPED:
      if value in (r"\left", r"\right") and text.startswith(".", place):
        place += 1  # a delimiter that is not there
      spaced = True
      continue
    if value in _TEXTS or value in _FONTS:
      content, place = _group(text, place)
      _append_text(content, value in _FONTS, tokens, nested)
    elif kind == "word":
      _append_word(value, tokens, spaced)
    elif kind in ("begin", "end"):
      name = value[value.index("{") + 1 : value.index("}")].strip(" *\n")
      tokens.append(Token(kind, name, spaced))
    else:
      if kind == "num" and not _PERIOD.match(text, place):
        value = value.rstrip(".")
      elif kind == "cmd" and not (value[0] == "\\" and value[1].isalpha()):
        kind = "op"
      tokens.append(Token(kind, value, spaced))
    spaced = False
  return tokens


def _group(text: str, place: int) -> tuple[str, int]:
  """What a text command applies to, and the place after it."""
  while place < len(text) and text[place].isspace():
    place += 1
  if not text.startswith("{", place):
    return text[place : place + 1], place + 1
  depth = 0
  for brace in _BRACES.finditer(text, place):
    depth += {"{": 1, "}": -1}.get(brace.group(), 0)
    if depth == 0:
      return text[place + 1 : brace.start()], brace.end()
  return text[place + 1 :], len(text)


def _append_text(
  content: str, font: bool, tokens: list[Token], nested: bool
) -> None:
  r"""A phrase is one token, `\text{ or }` connects, the rest is mathematics."""
  content = content.replace("~", " ")
  word = content.strip()
  connector = _CONNECTOR.fullmatch(content)
  if connector and word:
    tokens.append(Token("op", (connector[1] or ",").lower(), True))
  elif word in (_BARE if font else _SPELLED) and not (
    ends_value(tokens) and units.is_bare(word, True)  # 5 \mathrm{min}
  ):
    tokens.append(Token("cmd", _BARE[word], True))
  elif (
    len(word) == 1
    and word.isalpha()
    and not (word in units.LETTERS and ends_value(tokens))
  ):
    tokens.append(Token("sym", word, True))
  elif _PHRASE.fullmatch(content) or nested:
    tokens.append(Token("text", word, True))
  else:  # once: a text within a text is a phrase, so time stays linear
    start, follows = len(tokens), font and ends_value(tokens)
    _append_tokens(content, tokens, nested=True)
    if follows and all(map(_may_be_unit, tokens[start:])):  # \mathrm{m\,s^{-1}}
      tokens[start:] = [
        t._replace(kind="text") if t.value.isalpha() else t
        for t in tokens[start:]
      ]


def _may_be_unit(token: Token) -> bool:
  if token.value.isalpha():
    return token.value in units.LETTERS or units.is_bare(token.value, True)
  return token.kind == "num" or token.value in ("^", "{", "}", "-", "*", "/")


def ends_value(tokens: list[Token]) -> bool:
  """Whether what comes next may be the unit of what these tokens say."""
  if not tokens:
    return False
  last = tokens[-1]
  return last.kind in ("num", "text") or last.value in (")", "}", "deg", r"\pi")


def _append_word(run: str, tokens: list[Token], spaced: bool) -> None:
  """A run of letters: a function, a unit, a word, or a product of letters."""
  last = tokens[-1] if tokens else None
  if run.lower() in ("or", "and"):
    tokens.append(Token("op", run.lower(), True))
  elif run in _BARE:
    command = _BARE[run]
    if command in _DROPPED:  # `\\left`, as Python writes it
      if last and last.value == "\\\\":
        tokens.pop()
    else:
      tokens.append(Token("cmd", command, spaced))
  elif _goes_on(last, spaced) or (
    ends_value(tokens) and units.is_bare(run, spaced)
  ):
    tokens.append(Token("text", run, True))
  elif run[:-1] in FUNCTIONS:
    tokens += [Token("cmd", "\\" + run[:-1], spaced), Token("sym", run[-1])]
  elif len(run) >= 4 or run.lower() in SHORT_WORDS or not run.isascii():
    kind = "word" if len(run) > 1 else "sym"
    tokens.append(Token(kind, run, spaced))
  else:
    tokens += [Token("sym", c, spaced and not i) for i, c in enumerate(run)]


def _goes_on(last: Token | None, spaced: bool) -> bool:
  """Whether words came before, so that this run is one more."""
  return spaced and last is not None and last.kind in ("text", "word")


@functools.lru_cache(maxsize=4096)
def prose(text: str) -> tuple[str, ...] | None:
  r"""Words without case, of two or more; None where it is not all words.

  A `\text` around all or a part of them is no difference.
  """
  text = _TEXT.sub(r" \1 ", clean(text))
  if not _PROSE.fullmatch(text.strip()):
    return None
  words = _PROSE_WORD.findall(text.casefold())
  return (
    tuple(words) if any(w.isalpha() and len(w) > 3 for w in words) else None
  )


@functools.lru_cache(maxsize=4096)
def key(text: str) -> tuple[str, ...]:
  """A hashable of which equal values mean equal answers."""
  out: list[str] = []
  for token in tokenize(join_thousands(clean(text))[0]):
    out.append(token.value)
    if token.value == "}" and out[-3:-2] == ["{"]:
      out[-3:] = out[-2:-1]  # one token needs no braces
  return tuple(out)
