r"""Qwen2.5-3B searches and answers, with Dr. MAS: three agents on one policy.

    python -m drmas_jax.main --config configs/search_qwen25_3b_share_drmas.py
    python -m drmas_jax.main --config configs/search_qwen25_3b_share_drmas.py \
      --mode=eval --config.eval.num_tasks=60000 --config.eval.k=16

Passages come from a server; the command for it is in `common.search`.
Hardware and time: 12 hours on 4 H100 of 80 GB in the paper, and what the server
takes.
Expected, avg@16/pass@16 of Table 2: NQ 43.8/58.5, TriviaQA 61.7/70.1, PopQA
45.0/57.6, HotpotQA 33.3/51.2, 2Wiki 34.1/64.0, MuSiQue 10.2/25.8, Bamboogle
28.6/49.6, macro average 36.7/53.8.
Not run here: planned only (memory by the size tables of the families).
"""

import common


def get_config():
  return common.qwen25_search("3B", team="share", estimator="agent_wise")
