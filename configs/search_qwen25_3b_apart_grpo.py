r"""Qwen2.5-3B searches and answers, with GRPO: three agents, a policy each.

    python -m drmas_jax.main --config configs/search_qwen25_3b_apart_grpo.py
    python -m drmas_jax.main --config configs/search_qwen25_3b_apart_grpo.py \
      --mode=eval --config.eval.num_tasks=60000 --config.eval.k=16

Passages come from a server; the command for it is in `common.search`.
Hardware and time: 13 hours on 4 H100 of 80 GB in the paper, and what the server
takes.
Expected, avg@16/pass@16 of Table 2: NQ 43.8/54.5, TriviaQA 60.6/70.8, PopQA
45.6/54.5, HotpotQA 32.5/45.2, 2Wiki 29.2/48.9, MuSiQue 8.6/19.2, Bamboogle
21.0/33.6, macro average 34.5/46.7.
Not run here: planned only (memory by the size tables of the families).
"""

import common


def get_config():
  return common.qwen25_search("3B", team="apart", estimator="grpo")
