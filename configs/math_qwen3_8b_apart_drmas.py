r"""Qwen3-8B on DAPO-Math with Dr. MAS: solver and verifier, a policy each.

    python -m drmas_jax.main --config configs/math_qwen3_8b_apart_drmas.py
    python -m drmas_jax.main --config configs/math_qwen3_8b_apart_drmas.py \
      --mode=eval --config.eval.num_tasks=1000 --config.eval.k=16

Hardware and time: 42 hours on 8 H100 of 80 GB in the paper.
Expected, avg@16/pass@16 of Table 1: AIME24 44.6/73.3, AIME25 41.5/56.7,
AMC23 87.5/95.0, MATH500 90.7/96.2, Minerva 40.9/54.0, OlympiadBench 59.0/70.2,
macro average 60.7/74.2.
Not run here: planned only (memory by the size table of the family).
"""

import common


def get_config():
  return common.qwen3_math("8B", team="apart", estimator="agent_wise")
