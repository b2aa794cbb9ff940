r"""Qwen3-8B on DAPO-Math with GRPO: a solver alone.

    python -m drmas_jax.main --config configs/math_qwen3_8b_single_grpo.py
    python -m drmas_jax.main --config configs/math_qwen3_8b_single_grpo.py \
      --mode=eval --config.eval.num_tasks=1000 --config.eval.k=16

Hardware and time: 8 H100 of 80 GB as for the teams (the paper gives no time).
Expected, avg@16/pass@16 of Table 1: AIME24 36.0/67.3, AIME25 32.7/50.0,
AMC23 87.0/95.0, MATH500 89.9/94.8, Minerva 36.0/46.7, OlympiadBench 57.9/67.5,
macro average 56.6/70.2.
Not run here: planned only (memory by the size table of the family).
"""

import common


def get_config():
  return common.qwen3_math("8B", team="single", estimator="grpo")
