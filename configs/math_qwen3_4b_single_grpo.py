r"""Qwen3-4B on DAPO-Math with GRPO: a solver alone.

    python -m drmas_jax.main --config configs/math_qwen3_4b_single_grpo.py
    python -m drmas_jax.main --config configs/math_qwen3_4b_single_grpo.py \
      --mode=eval --config.eval.num_tasks=1000 --config.eval.k=16

Hardware and time: 4 H100 of 80 GB as for the teams (the paper gives no time).
Expected, avg@16/pass@16 of Table 1: AIME24 38.8/63.3, AIME25 33.1/56.7,
AMC23 83.5/95.0, MATH500 89.0/94.2, Minerva 37.9/49.6, OlympiadBench 53.3/66.5,
macro average 55.9/70.9.
Not run here: planned only (memory by the size table of the family).
"""

import common


def get_config():
  return common.qwen3_math("4B", team="single", estimator="grpo")
