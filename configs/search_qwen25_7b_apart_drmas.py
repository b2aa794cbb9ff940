r"""Qwen2.5-7B searches and answers, with Dr. MAS: three agents, a policy each.

    python -m drmas_jax.main --config configs/search_qwen25_7b_apart_drmas.py
    python -m drmas_jax.main --config configs/search_qwen25_7b_apart_drmas.py \
      --mode=eval --config.eval.num_tasks=60000 --config.eval.k=16

Passages come from a server; the command for it is in `common.search`.
Hardware and time: 26 hours on 8 H100 of 80 GB in the paper, and what the server
takes.
Expected, avg@16/pass@16 of Table 2: NQ 47.7/59.5, TriviaQA 63.4/72.7, PopQA
46.7/57.8, HotpotQA 44.0/57.5, 2Wiki 45.4/68.1, MuSiQue 19.4/34.9, Bamboogle
39.8/57.6, macro average 43.8/58.3.
Not run here: planned only (memory by the size tables of the families).
"""

import common


def get_config():
  return common.qwen25_search("7B", team="apart", estimator="agent_wise")
