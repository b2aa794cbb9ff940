"""Generated sums, for small pretrained policies: no words, ordinary precedence.

    48 + 27 - 9           answer 66
    6 * 7 - 3 * 3         answer 33

All questions of one difficulty are numbered and split as `Numbered` says. A
question's terms in another order are another question, so that `27 + 48` may be
in the train split where `48 + 27` is in the test split.
"""

import functools

from drmas_jax.datasets import dataset

_OPERATORS = "+-*"


def make(
  split: str,
  *,
  num_terms: int = 2,
  low: int = 10,
  high: int = 99,
  operators: str = "+-",
  num_tasks: int = 100_000,
  test_share: float = 0.1,
) -> dataset.Numbered:
  """A split of the questions of one difficulty; answers are integers in text.

  Args:
    split: "train" or "test".
    num_terms: numbers in a question.
    low: smallest number, at least 0.
    high: largest number, at most 9999.
    operators: those that stand between numbers, of "+-*", all as likely.
    num_tasks: most rows of the train split.
    test_share: of all questions, those that are the test split.

  Raises:
    ValueError: an option out of range.
  """
  dataset.at_least(
    dict(num_terms=(num_terms, 2), low=(low, 0), num_tasks=(num_tasks, 1))
  )
  if not low < high <= 9999:
    raise ValueError(
      f"high={high} is not allowed; write one above low={low} and <= 9999"
    )
  if not operators or len(set(operators) & set(_OPERATORS)) != len(operators):
    raise ValueError(
      f"operators={operators!r} is not allowed; write some of "
      f"{_OPERATORS!r}, each once"
    )
  # The same operators in another order are the same questions.
  operators = "".join(o for o in _OPERATORS if o in operators)
  size = high - low + 1
  return dataset.Numbered(
    functools.partial(_row, num_terms, low, size, operators),
    size**num_terms * len(operators) ** (num_terms - 1),
    split,
    num_tasks,
    f"sums {num_terms} {low} {high} {operators}",
    test_share,
  )


def _row(
  num_terms: int, low: int, size: int, operators: str, number: int
) -> dict[str, str]:
  """Question `number` of all, as digits in mixed radix."""
  number, term = divmod(number, size)
  terms, signs = [low + term], []
  for _ in range(num_terms - 1):
    number, sign = divmod(number, len(operators))
    number, term = divmod(number, size)
    signs.append(operators[sign])
    terms.append(low + term)
  text = str(terms[0])
  for sign, term in zip(signs, terms[1:], strict=True):
    text += f" {sign} {term}"
  return {"question": text, "answer": str(_value(terms, signs))}


def _value(terms: list[int], signs: list[str]) -> int:
  """Products first, then sums and differences from left to right."""
  total, product = 0, terms[0]
  for sign, term in zip(signs, terms[1:], strict=True):
    if sign == "*":
      product *= term
    else:
      total, product = total + product, term if sign == "+" else -term
  return total + product
