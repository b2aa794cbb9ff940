r"""Qwen2.5-7B searches and answers, with half of Dr. MAS: its deviations.

    python -m drmas_jax.main --config configs/search_qwen25_7b_std_only.py
    python -m drmas_jax.main --config configs/search_qwen25_7b_std_only.py \
      --mode=eval --config.eval.num_tasks=60000 --config.eval.k=16

Passages come from a server; the command for it is in `common.search`.
Hardware and time: 26 hours on 8 H100 of 80 GB in the paper, and what the server
takes.
Expected, avg@16/pass@16 of Table 3, over all seven sets: 42.9/57.6. What the
paper does where the agent's deviation is 0 is not known; here the team's is
taken.
Not run here: planned only (memory by the size tables of the families).
"""

import common


def get_config():
  return common.qwen25_search("7B", team="apart", estimator="std_only")
