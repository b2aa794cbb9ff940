r"""Qwen2.5-7B searches and answers, with Dr. MAS: three agents on one policy.

    python -m drmas_jax.main --config configs/search_qwen25_7b_share_drmas.py
    python -m drmas_jax.main --config configs/search_qwen25_7b_share_drmas.py \
      --mode=eval --config.eval.num_tasks=60000 --config.eval.k=16

Passages come from a server; the command for it is in `common.search`.
Hardware and time: 25 hours on 8 H100 of 80 GB in the paper, and what the server
takes.
Expected, avg@16/pass@16 of Table 2: NQ 47.4/60.7, TriviaQA 63.1/71.2, PopQA
45.9/57.3, HotpotQA 42.5/56.0, 2Wiki 42.0/67.1, MuSiQue 16.7/32.1, Bamboogle
40.1/59.2, macro average 42.5/57.7.
Not run here: planned only (memory by the size tables of the families).
"""

import common


def get_config():
  return common.qwen25_search("7B", team="share", estimator="agent_wise")
