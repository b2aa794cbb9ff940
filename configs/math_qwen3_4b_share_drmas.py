r"""Qwen3-4B on DAPO-Math with Dr. MAS: solver and verifier on one policy.

    python -m drmas_jax.main --config configs/math_qwen3_4b_share_drmas.py
    python -m drmas_jax.main --config configs/math_qwen3_4b_share_drmas.py \
      --mode=eval --config.eval.num_tasks=1000 --config.eval.k=16

Hardware and time: 35 hours on 4 H100 of 80 GB in the paper.
Expected, avg@16/pass@16 of Table 1: AIME24 39.3/63.3, AIME25 38.1/63.3,
AMC23 87.3/95.0, MATH500 90.5/96.0, Minerva 40.9/53.3, OlympiadBench 58.2/68.6,
macro average 59.0/73.2.
Not run here: planned only (memory by the size table of the family).
"""

import common


def get_config():
  return common.qwen3_math("4B", team="share", estimator="agent_wise")
