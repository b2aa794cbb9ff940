# ruff: noqa: RUF001  quotation marks and dashes of all kinds
"""Does a short answer say the same as one of the gold ones?

RULES 22. `em` is what training uses; `em_search_r1` is the rule that published
numbers were made with, kept for comparisons. `answer_of` reads the answer from
a completion (RULES 13-15).
"""

import re
import string
import unicodedata
from collections.abc import Sequence

from drmas_jax.agents.agent import find_block

# Changed by hand whenever a verdict may change; manifests record it.
VERSION = "2"

_ARTICLES = {"a", "an", "the"}
_DROPPED = "\0\ufe0e\ufe0f"  # beside what only formats: category Cf
_DASHES = "-‐‑‒–—―−﹣－"
_QUOTES = str.maketrans(
  {
    **dict.fromkeys("‘’‚‛′`´ʹʻʼ", "'"),
    **dict.fromkeys("“”„‟″«»", '"'),
    "⁄": "/",
  }
)
# A minus, not a dash: a number follows, and nothing that it could join to it.
_MINUS = re.compile(
  rf"(?<![^\s(\[{{\"'])(?<![0-9] )[{_DASHES}](?=[$€£¥₹]?\.?[0-9])"
)
_VULGAR = re.compile("(?<=[0-9])(?=[¼-¾⅐-⅞])")
_DASH = re.compile(f"[{_DASHES}]")
_NUMBER = re.compile(
  r"(?P<sign>[+\0]?)(?P<currency>[^\w\s.+]?)"
  r"(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?:\.(?P<places>[0-9]*))?"
  r"(?P<unit>[^\W\d_]*|[^\w\s.,])"
)
_NO_MINUS = "\0"  # stands for a minus while dashes become spaces

_ASCII_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE_WORDS = re.compile(r"\b(a|an|the)\b")


def em(prediction: str, golds: Sequence[str]) -> bool:
  """Exact match after folding, with any of the golds.

  Folded are: compatible and composed characters (NFKC), case, quotation marks,
  punctuation at the edges of words, dashes (a space), articles unless nothing
  else is left, and the spelling of numbers (`1,000` is `1000.0`). Diacritics
  are kept, and so is a minus before a number.

  Args:
    prediction: the answer alone. An empty one is never right.
    golds: all that are right; order and repetition do not matter.

  Raises:
    ValueError: there is no gold, so that nothing could be right.
  """
  said = normalize(prediction)
  return any(said == normalize(gold) for gold in _checked(golds)) and bool(said)


def em_search_r1(prediction: str, golds: Sequence[str]) -> bool:
  """Exact match as in Search-R1: ASCII punctuation and articles dropped.

  Args:
    prediction: the answer alone.
    golds: all that are right.

  Raises:
    ValueError: there is no gold, so that nothing could be right.
  """
  said = _search_r1(prediction)
  return any(said == _search_r1(gold) for gold in _checked(golds))


def answer_of(completion: str) -> str | None:
  """Content of the first `<answer>` outside of the reasoning.

  None if there is no complete one, or if it is empty.
  """
  block = find_block(completion, "answer")
  return (block.content.strip() or None) if block else None


def normalize(text: str) -> str:
  """The form in which `em` compares answers; linear time."""
  text = _fold(_shown(text)).translate(_QUOTES)
  folded = " ".join(text.split())
  text = _DASH.sub(" ", _MINUS.sub(_NO_MINUS, folded))
  words = [w for w in map(_word, text.split()) if w]
  rest = [w for w in words if w not in _ARTICLES]
  return " ".join(rest or words) or folded


def _shown(text: str) -> str:
  """Without what cannot be seen; digits of all scripts as ASCII ones."""
  if text.isascii():
    return text.replace("\0", "")
  text = "".join(
    c for c in text if c not in _DROPPED and unicodedata.category(c) != "Cf"
  )
  text = re.sub(r"\d", lambda m: str(int(m[0])), text)
  return _VULGAR.sub(" ", text)


def _checked(golds: Sequence[str]) -> list[str]:
  given = [golds] if isinstance(golds, str) else list(golds)
  if not any(gold.strip() for gold in given):
    raise ValueError(
      f"golds={given!r} holds no answer, so no prediction can be right; give "
      "the row at least one gold, or leave it out of the data set"
    )
  return given


def _fold(text: str) -> str:
  """Equal for texts that differ in case or in how characters are composed."""
  text = unicodedata.normalize("NFKC", text).casefold()
  return unicodedata.normalize("NFKC", text)


def _word(word: str) -> str:
  """A word without punctuation at its edges; a number in one spelling."""
  start, end = 0, len(word)
  while end > start and _is_punctuation(word[end - 1]):
    end -= 1
  while start < end and _is_punctuation(word[start]):
    if word[start] == "." and word[start + 1 : start + 2].isdigit():
      break  # .5
    start += 1
  return _number(word[start:end])


def _is_punctuation(char: str) -> bool:
  return unicodedata.category(char)[0] == "P"


def _number(word: str) -> str:
  match = _NUMBER.fullmatch(word)
  if match is None or not (match["whole"] or match["places"]):
    return word.replace(_NO_MINUS, "-")
  whole = match["whole"].replace(",", "").lstrip("0") or "0"
  places = (match["places"] or "").rstrip("0")
  value = f"{whole}.{places}" if places else whole
  negative = match["sign"] == _NO_MINUS and value != "0"
  return f"{'-' if negative else ''}{match['currency']}{value}{match['unit']}"


def _search_r1(text: str) -> str:
  text = text.lower().translate(_ASCII_PUNCTUATION)
  return " ".join(_ARTICLE_WORDS.sub(" ", text).split())
