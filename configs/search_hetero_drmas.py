r"""Qwen2.5-7B verifies, two Llama-3.2-3B search and answer, with Dr. MAS.

    python -m drmas_jax.main --config configs/search_hetero_drmas.py
    python -m drmas_jax.main --config configs/search_hetero_drmas.py \
      --mode=eval --config.eval.num_tasks=60000 --config.eval.k=16

Passages come from a server; the command for it is in `common.search`.
Hardware and time: 16 hours on 8 H100 of 80 GB in the paper, and what the server
takes.
Expected: the accuracy of three Qwen2.5-7B, with 32 % less latency and 42 % less
cost at public prices (Figure 5 and its text, which give no more).
Not run here: planned only (memory by the size tables of the families).
"""

import common


def get_config():
  small = "meta-llama/Llama-3.2-3B-Instruct"
  return common.search(
    dict(verifier="Qwen/Qwen2.5-7B", searcher=small, answerer=small),
    estimator="agent_wise",
    rollout_mesh=dict(data=0, fsdp=1, tensor=4),
  )
