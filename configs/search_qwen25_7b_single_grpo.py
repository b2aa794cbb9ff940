r"""Qwen2.5-7B searches and answers, with GRPO: one researcher alone.

    python -m drmas_jax.main --config configs/search_qwen25_7b_single_grpo.py
    python -m drmas_jax.main --config configs/search_qwen25_7b_single_grpo.py \
      --mode=eval --config.eval.num_tasks=60000 --config.eval.k=16

Passages come from a server; the command for it is in `common.search`.
Hardware and time: 8 H100 of 80 GB as for the teams (the paper gives no time),
and what the server takes.
Expected, avg@16/pass@16 of Table 2: NQ 46.4/57.6, TriviaQA 63.1/72.4, PopQA
47.2/53.6, HotpotQA 43.0/55.1, 2Wiki 40.6/61.6, MuSiQue 17.8/34.6, Bamboogle
36.7/54.4, macro average 42.1/55.6.
Not run here: planned only (memory by the size tables of the families).
"""

import common


def get_config():
  return common.qwen25_search("7B", team="single", estimator="grpo")
