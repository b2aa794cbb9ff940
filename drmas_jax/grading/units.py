r"""Units of measurement as they are written after a number.

A unit may be left out, a different one is wrong (RULES 19). So units are
compared by name, never converted: `100 cm` is not `1 m`.
"""

import re

# name: its spellings. A plural's s goes before the look-up.
_SPELLINGS = {
  "mm": ("millimeter", "millimetre"),
  "cm": ("centimeter", "centimetre"),
  "m": ("meter", "metre"),
  "km": ("kilometer", "kilometre"),
  "nm": ("nanometer", "nanometre"),
  "in": ("inch", "inche"),
  "ft": ("foot", "feet"),
  "yd": ("yard",),
  "mi": ("mile",),
  "mg": ("milligram",),
  "g": ("gram", "gm"),
  "kg": ("kilogram",),
  "lb": ("pound",),
  "oz": ("ounce",),
  "ml": ("milliliter", "millilitre", "mL"),
  "l": ("liter", "litre", "L"),
  "s": ("second", "sec"),
  "min": ("minute",),
  "h": ("hour", "hr"),
  "day": (),
  "week": ("wk",),
  "month": (),
  "yr": ("year",),
  "deg": ("degree",),
  "rad": ("radian",),
  "%": ("percent", "percentage", "pct"),
  "dollar": ("USD", "usd", "$"),
  "cent": ("¢",),
  "euro": ("EUR", "eur"),
  "rupee": ("INR",),
  "ruble": ("rouble",),
  "mph": (),
  "Hz": ("hertz", "hz"),
  "J": ("joule",),
  "W": ("watt",),
  "N": ("newton",),
  "V": ("volt",),
  "A": ("ampere", "amp"),
  "Pa": ("pascal",),
  "K": ("kelvin",),
  "unit": (),
  "pm": (),
  "am": (),
}
_NAMES = {s: name for name, all_ in _SPELLINGS.items() for s in (name, *all_)}
_FOLDED = {s.casefold(): name for s, name in _NAMES.items() if len(s) > 2}

# Read as units without a \text, after a number and a space; those of the
# second row without a space too. All others could be products of letters.
_BARE_SPACED = {
  *("mm", "km", "nm", "in", "mi", "yd", "mg", "oz", "ml", "mL", "hr", "min"),
  *("sec", "eV", "keV", "MeV", "GeV", "kJ", "kW", "kV", "kHz", "MHz", "GHz"),
  *("kPa", "Pa", "rad", "cal", "kcal", "mol", "mph", "kph", "wk", "yr", "yrs"),
  *("hrs", "mins", "secs", "pct", "USD", "EUR", "sq", "cu", "pm", "am", "PM"),
  *("AM", "cup", "gal", "ton"),
}
_BARE_TIGHT = {
  *("cm", "ft", "kg", "lb", "lbs", "mph", "Hz", "mL", "kcal", "sec", "hrs"),
  *("pm", "am"),
}
# Units of one letter, if a \text marks them.
LETTERS = set("mgslhLNJWVAKCF")
_FRACTION = re.compile(
  r"(?<=[0-9}]) *(\b(?:[kcm]?m|ft|mi|[km]?g|m?L|k?J|N|k?W|k?cal|mol))"
  r" *(/) *(s|sec|h|hr|min|k?g|[cm]?m|m?L|mol|day)\b(?=[\^ $.]|\Z)"
)
# \frac{\text{miles}}{\text{hour}} after a number.
_WORDS = r"(\\(?:text[a-z]*|mathrm|mbox)\s*\{[^{}]*\})"
_FRACTION_OF_WORDS = re.compile(
  r"(?<=[0-9}])((?:\s|\\[,; ]|~)*)\\[dt]?frac\s*"
  rf"\{{\s*{_WORDS}\s*\}}\s*\{{\s*{_WORDS}\s*\}}"
)
_NOON = re.compile(r"(?<=[0-9])\s*([ap])\.\s?m\.?", re.IGNORECASE)
# A currency in letters before the number.
_CODE = re.compile(r"\bUS ?(?=\\?\$)|\b(USD|EUR|GBP|INR|Rs\.?) ?(?=[0-9])")
_SIGNS = {"USD": r"\$", "EUR": r"\euro ", "GBP": r"\pounds "}

SCALES = {
  **{"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6},
  **{"billion": 10**9, "trillion": 10**12},
}

# What makes a phrase after a number say more than its unit.
_NOT_UNITS = {
  *("or", "and", "not", "if", "more", "less", "than", "but", "when", "where"),
  *("is", "are", "was", "otherwise", "to", "least", "most", "over", "under"),
  *("except", "only", "no", "nor", "either", "neither", "for", "unless"),
  *("until", "maybe", "respectively", "with", "without", "times", "plus"),
  *("minus", "above", "below", "greater", "fewer"),
}
_MAX_WORDS = 6
_WORD = re.compile(r"[^\W\d_]+|/")


def is_bare(run: str, spaced: bool) -> bool:
  """Whether letters right after a number are its unit, not a product."""
  return run in _BARE_TIGHT or (spaced and run in _BARE_SPACED)


def marked(text: str) -> str:
  """Text with a unit like the `m/s` of `5 m/s^2` marked as such."""
  text = _FRACTION_OF_WORDS.sub(r"\1\2/\3", _NOON.sub(r" \1m", text))
  text = _CODE.sub(_sign, text)
  return _FRACTION.sub(r"\\text{ \1}\2\\text{\3}", text)


def _sign(code: re.Match) -> str:
  return _SIGNS.get(code[1], r"\rupee ") if code[1] else ""


def unit(pieces: list[str]) -> str | None:
  r"""The normal form of a unit, or None where the pieces say more than one.

  Args:
    pieces: phrases, `^2`-like exponents, and "/", in their order.
  """
  out: list[str] = []
  power = ""
  for piece in pieces:
    if piece.startswith("^"):
      out.append(piece)
      continue
    words = _WORD.findall(piece.replace(".", ""))
    for word in words or [piece]:
      low = word.casefold()
      if low in _NOT_UNITS or len(out) > 2 * _MAX_WORDS:
        return None
      if low in ("square", "sq", "cubic", "cu"):
        power = "^2" if low in ("square", "sq") else "^3"
      elif low in ("squared", "cubed"):
        out.append("^2" if low == "squared" else "^3")
      elif low == "per" or word == "/":
        out.append("/")
      else:
        out += [_name(word), power] if power else [_name(word)]
        power = ""
  if power:  # "square" alone
    out += ["unit", power]
  return _spelled(" ".join(out))


def _name(word: str) -> str:
  for form in (word, word.removesuffix("s")):
    if form in _NAMES or form.casefold() in _FOLDED:
      return _NAMES.get(form) or _FOLDED[form.casefold()]
  low = word.casefold()
  return low.removesuffix("s") or low


def _spelled(unit: str) -> str:
  return {"mi / h": "mph", "deg C": "°C", "deg F": "°F"}.get(unit, unit)
