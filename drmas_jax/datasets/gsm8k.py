"""GSM8K: word problems of primary school with integer answers.

Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems".
"""

from drmas_jax.datasets import builder


def make(
  split: str, *, data_dir: str, cache_dir: str | None = None
) -> builder.Rows:
  """7473 rows of "train" or 1319 of "test".

  Args:
    split: "train" or "test".
    data_dir: folder with gsm8k_train.jsonl and gsm8k_test.jsonl, whose rows
      have "problem" and "answer" (the number alone).
    cache_dir: where the prepared set is kept; None: the user's cache folder.
  """
  return builder.source("gsm8k", split, data_dir, cache_dir)
