r"""Qwen3-4B on DAPO-Math with Dr. MAS: solver and verifier, a policy each.

    python -m drmas_jax.main --config configs/math_qwen3_4b_apart_drmas.py
    python -m drmas_jax.main --config configs/math_qwen3_4b_apart_drmas.py \
      --mode=eval --config.eval.num_tasks=1000 --config.eval.k=16

Hardware and time: 38 hours on 4 H100 of 80 GB in the paper.
Expected, avg@16/pass@16 of Table 1: AIME24 46.9/80.0, AIME25 38.1/66.7,
AMC23 89.5/97.5, MATH500 92.4/97.0, Minerva 39.0/51.5, OlympiadBench 60.9/73.6,
macro average 61.1/77.7.
Not run here: planned only (memory by the size table of the family).
"""

import common


def get_config():
  return common.qwen3_math("4B", team="apart", estimator="agent_wise")
