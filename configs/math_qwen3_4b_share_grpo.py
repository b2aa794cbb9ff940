r"""Qwen3-4B on DAPO-Math with GRPO: solver and verifier on one policy.

    python -m drmas_jax.main --config configs/math_qwen3_4b_share_grpo.py
    python -m drmas_jax.main --config configs/math_qwen3_4b_share_grpo.py \
      --mode=eval --config.eval.num_tasks=1000 --config.eval.k=16

Hardware and time: 35 hours on 4 H100 of 80 GB in the paper.
Expected, avg@16/pass@16 of Table 1: AIME24 39.3/64.0, AIME25 31.4/53.3,
AMC23 85.6/95.0, MATH500 89.5/96.2, Minerva 37.5/50.0, OlympiadBench 57.6/65.6,
macro average 56.8/70.7.
Not run here: planned only (memory by the size table of the family).
"""

import common


def get_config():
  return common.qwen3_math("4B", team="share", estimator="grpo")
