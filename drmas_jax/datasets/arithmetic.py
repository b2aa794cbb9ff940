r"""Generated arithmetic in several steps, for teams of tiny policies.

    4+3*2-5 from left to right, modulo 10
    4+3=7, 7*2=14 -> 4, 4-5=-1 -> 9                  answer 9

All questions of one difficulty are numbered and split as `Numbered` says.

`demonstrations` plays a deliberately imperfect team on a task, for
`--mode=sft`. A solver shows its steps, a verifier redoes them and then gives
its verdict:

    solver    7,4\boxed{9}
    verifier  7,4,9<verify>approve</verify>
"""

import functools
from typing import Any

import numpy as np

from drmas_jax.datasets import dataset
from drmas_jax.types import Task

OPERATORS = "+-*"


def make(
  split: str,
  *,
  num_operands: int = 5,
  modulus: int = 10,
  num_tasks: int = 100_000,
) -> dataset.Numbered:
  """A split of the questions of one difficulty.

  Args:
    split: "train" or "test".
    num_operands: numbers in a question; one less is the number of steps.
    modulus: operands and every step's result are in [0, modulus).
    num_tasks: most rows of the train split.

  Raises:
    ValueError: an option out of range.
  """
  dataset.at_least(
    dict(
      num_operands=(num_operands, 2),
      modulus=(modulus, 2),
      num_tasks=(num_tasks, 1),
    )
  )
  return dataset.Numbered(
    functools.partial(_row, num_operands, modulus),
    modulus**num_operands * len(OPERATORS) ** (num_operands - 1),
    split,
    num_tasks,
    f"arithmetic {num_operands} {modulus}",
  )


def _row(num_operands: int, modulus: int, number: int) -> dict[str, Any]:
  """Question `number` of all, as digits in mixed radix."""
  operands, operators = [], ""
  for _ in range(num_operands):
    number, operand = divmod(number, modulus)
    operands.append(operand)
  for _ in range(num_operands - 1):
    number, operator = divmod(number, len(OPERATORS))
    operators += OPERATORS[operator]
  text = str(operands[0])
  for operator, operand in zip(operators, operands[1:], strict=True):
    text += f"{operator}{operand}"
  info = {
    "operands": tuple(operands),
    "operators": operators,
    "modulus": modulus,
  }
  return {
    "question": f"{text} from left to right, modulo {modulus}",
    "answer": str(_work(info)[-1]),
    "info": info,
  }


# -- demonstrations ------------------------------------------------------------


def demonstrations(
  task: Task,
  rng: np.random.Generator,
  *,
  solver_noise: float = 0.15,
  solver_slip: float = 0.75,
  retry_copy: float = 0.2,
  verifier_noise: float = 0.05,
  verifier_flip: float = 0.02,
) -> dict[str, list[dataset.Demonstration]]:
  """One episode of an imperfect team, as `orchestras.math` plays two loops.

  Args:
    task: of this data set.
    rng: the source of all chance.
    solver_noise: chance that a step's result is a random number.
    solver_slip: chance that a product comes out one too high. A systematic
      error, so that even the likeliest completion has something to learn.
    retry_copy: chance that the solution after a rejection takes over what the
      verifier found; otherwise it is worked anew, as the first one was.
    verifier_noise: chance that a step the verifier redoes is a random number.
    verifier_flip: chance of the verdict that its own result speaks against.

  Returns:
    Demonstrations by agent, in the order of the calls.
  """
  steps = _work(task.info, rng, solver_noise, solver_slip)
  solution = _solution(steps)
  calls = {
    "solver": [dataset.Demonstration((task, ()), solution)],
    "verifier": [],
  }
  said = (("solver", solution),)
  redone = _work(task.info, rng, verifier_noise)
  approved = (redone[-1] == steps[-1]) != (rng.random() < verifier_flip)
  verdict = _judgement(redone, approved)
  calls["verifier"].append(dataset.Demonstration((task, said), verdict))
  if not approved:
    said += (("verifier", verdict),)
    anew = _work(task.info, rng, solver_noise, solver_slip)
    again = redone if rng.random() < retry_copy else anew
    calls["solver"].append(
      dataset.Demonstration((task, said), _solution(again))
    )
  return calls


def _work(
  info: dict[str, Any],
  rng: np.random.Generator | None = None,
  noise: float = 0.0,
  slip: float = 0.0,
) -> list[int]:
  """Each step's result; an error is carried on. Without `rng`: no errors."""
  modulus, value = info["modulus"], info["operands"][0]
  results = []
  for operator, operand in zip(
    info["operators"], info["operands"][1:], strict=True
  ):
    value = {
      "+": value + operand,
      "-": value - operand,
      "*": value * operand,
    }[operator] % modulus
    if rng is not None and rng.random() < noise:
      value = int(rng.integers(modulus))
    elif rng is not None and operator == "*" and rng.random() < slip:
      value = (value + 1) % modulus
    results.append(value)
  return results


def _solution(steps: list[int]) -> str:
  # No comma before the box: every result then stands two tokens after the one
  # before it, as the operands do, so that one offset finds what to add.
  shown = ",".join(map(str, steps[:-1]))
  return f"{shown}\\boxed{{{steps[-1]}}}"


def _judgement(steps: list[int], approved: bool) -> str:
  verdict = "approve" if approved else "reject"
  return f"{','.join(map(str, steps))}<verify>{verdict}</verify>"
