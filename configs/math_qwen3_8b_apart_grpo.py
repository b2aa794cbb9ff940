r"""Qwen3-8B on DAPO-Math with GRPO: solver and verifier, a policy each.

    python -m drmas_jax.main --config configs/math_qwen3_8b_apart_grpo.py
    python -m drmas_jax.main --config configs/math_qwen3_8b_apart_grpo.py \
      --mode=eval --config.eval.num_tasks=1000 --config.eval.k=16

Hardware and time: 42 hours on 8 H100 of 80 GB in the paper.
Expected, avg@16/pass@16 of Table 1: AIME24 42.9/70.0, AIME25 31.8/53.3,
AMC23 86.1/95.0, MATH500 90.5/96.6, Minerva 39.2/50.7, OlympiadBench 58.2/67.6,
macro average 58.1/72.2.
Not run here: planned only (memory by the size table of the family).
"""

import common


def get_config():
  return common.qwen3_math("8B", team="apart", estimator="grpo")
