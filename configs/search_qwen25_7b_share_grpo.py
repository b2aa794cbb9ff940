r"""Qwen2.5-7B searches and answers, with GRPO: three agents on one policy.

    python -m drmas_jax.main --config configs/search_qwen25_7b_share_grpo.py
    python -m drmas_jax.main --config configs/search_qwen25_7b_share_grpo.py \
      --mode=eval --config.eval.num_tasks=60000 --config.eval.k=16

Passages come from a server; the command for it is in `common.search`.
Hardware and time: 25 hours on 8 H100 of 80 GB in the paper, and what the server
takes.
Expected, avg@16/pass@16 of Table 2: NQ 45.2/60.0, TriviaQA 63.9/70.9, PopQA
43.9/55.0, HotpotQA 40.3/55.0, 2Wiki 41.6/67.8, MuSiQue 15.2/31.7, Bamboogle
40.1/58.4, macro average 41.5/57.0.
Not run here: planned only (memory by the size tables of the families).
"""

import common


def get_config():
  return common.qwen25_search("7B", team="share", estimator="grpo")
