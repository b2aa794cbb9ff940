r"""Qwen3-8B on DAPO-Math with GRPO: solver and verifier on one policy.

    python -m drmas_jax.main --config configs/math_qwen3_8b_share_grpo.py
    python -m drmas_jax.main --config configs/math_qwen3_8b_share_grpo.py \
      --mode=eval --config.eval.num_tasks=1000 --config.eval.k=16

Hardware and time: 37 hours on 8 H100 of 80 GB in the paper.
Expected, avg@16/pass@16 of Table 1: AIME24 42.7/66.7, AIME25 31.4/53.3,
AMC23 87.3/95.0, MATH500 89.6/96.2, Minerva 37.5/50.0, OlympiadBench 58.2/71.4,
macro average 57.8/72.1.
Not run here: planned only (memory by the size table of the family).
"""

import common


def get_config():
  return common.qwen3_math("8B", team="share", estimator="grpo")
