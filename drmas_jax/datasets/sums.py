"""Generated sums, for small pretrained policies: no words, ordinary precedence.

    48 + 27 - 9           answer 66
    6 * 7 - 3 * 3         answer 33

All questions of one difficulty are numbered and split as `Numbered` says. A
question's terms in another order are another question, so that `27 + 48` may be
in the train split where `48 + 27` is in the test split.
"""

from drmas_jax.datasets import dataset

_OPERATORS = "+-*"


def make(
  split: str,
  *,
  num_terms: int = 2,
  digits: int = 2,
  operators: str = "+-",
  num_tasks: int = 100_000,
) -> dataset.Numbered:
  """A split of the questions of one difficulty; answers are integers in text.

  Args:
    split: "train" or "test".
    num_terms: numbers in a question.
    digits: of every number, 1 to 4; none is 0 or begins with one.
    operators: those that stand between numbers, of "+-*", all as likely.
    num_tasks: most rows of the train split.

  Raises:
    ValueError: an option out of range.
  """
  dataset.at_least(
    dict(num_terms=(num_terms, 2), digits=(digits, 1), num_tasks=(num_tasks, 1))
  )
  if digits > 4:
    raise ValueError(f"digits={digits} is not allowed; write one <= 4")
  if not operators or len(set(operators) & set(_OPERATORS)) != len(operators):
    raise ValueError(
      f"operators={operators!r} is not allowed; write some of "
      f"{_OPERATORS!r}, each once"
    )
  # The same operators in another order are the same questions.
  operators = "".join(o for o in _OPERATORS if o in operators)
  low, high = 10 ** (digits - 1), 10**digits

  def row(number: int) -> dict[str, str]:
    number, term = divmod(number, high - low)
    terms = [low + term]
    signs = []
    for _ in range(num_terms - 1):
      number, sign = divmod(number, len(operators))
      number, term = divmod(number, high - low)
      signs.append(operators[sign])
      terms.append(low + term)
    text = str(terms[0])
    for sign, term in zip(signs, terms[1:], strict=True):
      text += f" {sign} {term}"
    return {"question": text, "answer": str(_value(terms, signs))}

  return dataset.Numbered(
    row,
    (high - low) ** num_terms * len(operators) ** (num_terms - 1),
    split,
    num_tasks,
    f"sums {num_terms} {digits} {operators}",
  )


def _value(terms: list[int], signs: list[str]) -> int:
  """Products first, then sums and differences from left to right."""
  total, product = 0, terms[0]
  for sign, term in zip(signs, terms[1:], strict=True):
    if sign == "*":
      product *= term
    else:
      total, product = total + product, term if sign == "+" else -term
  return total + product
