r"""Qwen2.5-3B searches and answers, with GRPO: three agents on one policy.

    python -m drmas_jax.main --config configs/search_qwen25_3b_share_grpo.py
    python -m drmas_jax.main --config configs/search_qwen25_3b_share_grpo.py \
      --mode=eval --config.eval.num_tasks=60000 --config.eval.k=16

Passages come from a server; the command for it is in `common.search`.
Hardware and time: 12 hours on 4 H100 of 80 GB in the paper, and what the server
takes.
Expected, avg@16/pass@16 of Table 2: NQ 41.0/59.0, TriviaQA 57.9/68.4, PopQA
43.2/58.0, HotpotQA 32.5/48.0, 2Wiki 33.7/64.0, MuSiQue 9.1/26.5, Bamboogle
26.4/46.4, macro average 34.8/52.9.
Not run here: planned only (memory by the size tables of the families).
"""

import common


def get_config():
  return common.qwen25_search("3B", team="share", estimator="grpo")
