r"""Qwen3-4B on DAPO-Math with GRPO: solver and verifier, a policy each.

    python -m drmas_jax.main --config configs/math_qwen3_4b_apart_grpo.py
    python -m drmas_jax.main --config configs/math_qwen3_4b_apart_grpo.py \
      --mode=eval --config.eval.num_tasks=1000 --config.eval.k=16

Hardware and time: 38 hours on 4 H100 of 80 GB in the paper.
Expected, avg@16/pass@16 of Table 1: AIME24 42.7/73.3, AIME25 35.6/63.3,
AMC23 83.5/95.0, MATH500 89.6/95.0, Minerva 37.5/50.7, OlympiadBench 56.3/68.9,
macro average 57.5/74.4.
Not run here: planned only (memory by the size table of the family).
"""

import common


def get_config():
  return common.qwen3_math("4B", team="apart", estimator="grpo")
