"""Turns that a run has sampled, as demonstrations (rejection sampling).

    python -m drmas_jax.show runs/a --success --export best.jsonl

    data=dict(sources=dict(best=dict(
      name="sampled", options=dict(path="best.jsonl"))))

and `--mode=sft`. A line of the file is a turn, of format 1:

    format                     1
    agent                      who said it
    prompt                     as the template rendered it, control tokens kept
    prompt_ids, completion_ids [int]: as they were given and sampled
    question, answer           of the task

and more about where it is from, for people. It holds ids and not messages: what
was sampled is trained on as it was, token by token (decoded text, encoded
again, need not be the same tokens, and what stands behind a closed action block
is in no text). So the tokenizer must be the run's, which `prompt` tells.
"""

import json
import pathlib
from typing import Any

import numpy as np

from drmas_jax.datasets import own
from drmas_jax.datasets.dataset import Sampled
from drmas_jax.types import Task

FORMAT = 1


def make(split: str, *, path: str) -> "Turns":
  """The turns of a file; the only split is "train".

  Args:
    split: "train".
    path: of the file.

  Raises:
    ValueError: another split; no such file; a line that is no turn.
  """
  if split != "train":
    raise ValueError(
      f"split={split!r} is not allowed; it has train; name a held-out set in "
      "eval.sources"
    )
  return Turns(pathlib.Path(path).expanduser())


def demonstrations(
  task: Task, rng: np.random.Generator
) -> dict[str, list[Sampled]]:
  """The turn that is the task's row, by its agent."""
  del rng
  info = task.info
  return {
    info["agent"]: [
      Sampled(info["prompt"], info["prompt_ids"], info["completion_ids"])
    ]
  }


class Turns:
  """`data.Source` of a file, all of which is checked at the start."""

  def __init__(self, path: pathlib.Path):
    if not path.is_file():
      raise ValueError(
        f"path={str(path)!r}: no such file; write one with python -m "
        "drmas_jax.show WORKDIR --success --export FILE"
      )
    self._rows = own.JsonLines(path)
    digest = own.Digest()
    for i in range(len(self._rows)):
      row = self._rows[i]
      if fault := _fault(row):
        raise ValueError(f"{path}:{self._rows.line(i)}: {fault}")
      digest.add(row)
    self.fingerprint = digest.hex()

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, index: int) -> dict[str, Any]:
    row = self._rows[index]
    return {
      "question": row["question"],
      "answer": row["answer"],
      "info": {k: row[k] for k in ("agent", *Sampled._fields)},
    }


def _fault(row: dict[str, Any]) -> str | None:
  """What is wrong with a row, if anything is."""
  if row.get("format") != FORMAT:
    return (
      f"has format {json.dumps(row.get('format'))}; allowed is {FORMAT}, as "
      "python -m drmas_jax.show --export writes it"
    )
  if missing := [k for k in _KINDS if k not in row]:
    return f"has no {', '.join(missing)}"
  for key, kind in _KINDS.items():
    if not isinstance(row[key], kind):
      return f"{key} is a {type(row[key]).__name__}; write a {kind.__name__}"
  for key in ("prompt_ids", "completion_ids"):
    if not row[key] or not all(type(i) is int and i >= 0 for i in row[key]):
      return f"{key} is no list of token ids, at least one"
  return None


_KINDS = {
  **dict.fromkeys(("agent", "prompt", "question"), str),
  **dict.fromkeys(("prompt_ids", "completion_ids"), list),
  "answer": object,
}
