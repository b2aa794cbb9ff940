r"""Qwen2.5-7B searches and answers, with GRPO: three agents, a policy each.

    python -m drmas_jax.main --config configs/search_qwen25_7b_apart_grpo.py
    python -m drmas_jax.main --config configs/search_qwen25_7b_apart_grpo.py \
      --mode=eval --config.eval.num_tasks=60000 --config.eval.k=16

Passages come from a server; the command for it is in `common.search`.
Hardware and time: 26 hours on 8 H100 of 80 GB in the paper, and what the server
takes.
Expected, avg@16/pass@16 of Table 2: NQ 27.1/39.0, TriviaQA 53.1/64.4, PopQA
20.7/27.9, HotpotQA 24.4/36.2, 2Wiki 30.3/51.2, MuSiQue 8.3/18.1, Bamboogle
31.9/46.4, macro average 28.0/40.5. This is the run that collapses: the
searcher's gradient norm passes 80, and the team stops searching.
Not run here: planned only (memory by the size tables of the families).
"""

import common


def get_config():
  return common.qwen25_search("7B", team="apart", estimator="grpo")
