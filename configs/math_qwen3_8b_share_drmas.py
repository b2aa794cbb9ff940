r"""Qwen3-8B on DAPO-Math with Dr. MAS: solver and verifier on one policy.

    python -m drmas_jax.main --config configs/math_qwen3_8b_share_drmas.py
    python -m drmas_jax.main --config configs/math_qwen3_8b_share_drmas.py \
      --mode=eval --config.eval.num_tasks=1000 --config.eval.k=16

Hardware and time: 37 hours on 8 H100 of 80 GB in the paper.
Expected, avg@16/pass@16 of Table 1: AIME24 54.8/80.0, AIME25 39.4/70.0,
AMC23 88.9/97.5, MATH500 91.3/96.0, Minerva 39.9/49.6, OlympiadBench 59.3/72.4,
macro average 62.3/77.6.
Not run here: planned only (memory by the size table of the family).
"""

import common


def get_config():
  return common.qwen3_math("8B", team="share", estimator="agent_wise")
