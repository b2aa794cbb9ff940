r"""Qwen2.5-7B searches and answers, with half of Dr. MAS: its means.

    python -m drmas_jax.main --config configs/search_qwen25_7b_mean_only.py
    python -m drmas_jax.main --config configs/search_qwen25_7b_mean_only.py \
      --mode=eval --config.eval.num_tasks=60000 --config.eval.k=16

Passages come from a server; the command for it is in `common.search`.
Hardware and time: 26 hours on 8 H100 of 80 GB in the paper, and what the server
takes.
Expected, avg@16/pass@16 of Table 3, over all seven sets: 39.1/53.5.
Not run here: planned only (memory by the size tables of the families).
"""

import common


def get_config():
  return common.qwen25_search("7B", team="apart", estimator="mean_only")
