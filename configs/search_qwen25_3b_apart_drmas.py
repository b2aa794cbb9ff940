r"""Qwen2.5-3B searches and answers, with Dr. MAS: three agents, a policy each.

    python -m drmas_jax.main --config configs/search_qwen25_3b_apart_drmas.py
    python -m drmas_jax.main --config configs/search_qwen25_3b_apart_drmas.py \
      --mode=eval --config.eval.num_tasks=60000 --config.eval.k=16

Passages come from a server; the command for it is in `common.search`.
Hardware and time: 13 hours on 4 H100 of 80 GB in the paper, and what the server
takes.
Expected, avg@16/pass@16 of Table 2: NQ 44.6/58.1, TriviaQA 61.1/71.7, PopQA
46.5/57.4, HotpotQA 35.3/51.1, 2Wiki 34.9/60.2, MuSiQue 10.4/26.1, Bamboogle
25.4/46.4, macro average 36.9/53.0.
Not run here: planned only (memory by the size tables of the families).
"""

import common


def get_config():
  return common.qwen25_search("3B", team="apart", estimator="agent_wise")
