r"""Qwen2.5-3B searches and answers, with GRPO: one researcher alone.

    python -m drmas_jax.main --config configs/search_qwen25_3b_single_grpo.py
    python -m drmas_jax.main --config configs/search_qwen25_3b_single_grpo.py \
      --mode=eval --config.eval.num_tasks=60000 --config.eval.k=16

Passages come from a server; the command for it is in `common.search`.
Hardware and time: 4 H100 of 80 GB as for the teams (the paper gives no time),
and what the server takes.
Expected, avg@16/pass@16 of Table 2: NQ 40.6/54.7, TriviaQA 58.1/68.8, PopQA
44.2/49.6, HotpotQA 31.8/40.9, 2Wiki 29.9/43.7, MuSiQue 7.9/14.6, Bamboogle
15.3/27.2, macro average 32.5/42.8.
Not run here: planned only (memory by the size tables of the families).
"""

import common


def get_config():
  return common.qwen25_search("3B", team="single", estimator="grpo")
