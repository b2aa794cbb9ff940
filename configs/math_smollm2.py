"""SmolLM2-135M-Instruct as solver and verifier on GSM8K.

    python -m drmas_jax.main --config configs/math_smollm2.py
        --config.policies.solver.checkpoint=SMOLLM2
        --config.policies.verifier.checkpoint=SMOLLM2
        --config.data.source.options.data_dir=DATA

SMOLLM2 is the Hugging Face folder of the model, DATA one with gsm8k_train.jsonl
and gsm8k_test.jsonl.
"""

from ml_collections import ConfigDict

_CHECKPOINT = "checkpoints/SmolLM2-135M-Instruct"


def _policy() -> dict:
  return dict(
    checkpoint=_CHECKPOINT,
    remat=True,
    micro_batch=2,
    row_buckets=(384, 512, 704),
    optimizer=dict(learning_rate=1e-6),
    engine=dict(
      num_slots=8,
      max_length=704,
      prefill_rows=2,
      prefill_buckets=(256, 384, 576),
      steps_per_call=16,
    ),
  )


def _agent(name: str) -> dict:
  # At temperature 1 so small a policy writes no verdict in the form asked for.
  return dict(
    role=f"math.{name}",
    policy=name,
    max_tokens=128,
    sampling=dict(temperature=0.4),
  )


def get_config() -> ConfigDict:
  return ConfigDict(
    dict(
      steps=2,
      policies=dict(solver=_policy(), verifier=_policy()),
      agents=dict(solver=_agent("solver"), verifier=_agent("verifier")),
      orchestra=dict(name="math", options=dict(max_loops=2)),
      environment=dict(name="math"),
      data=dict(
        source=dict(name="gsm8k", options=dict(data_dir="data/math")),
        num_tasks=2,
        group_size=4,
      ),
      eval=dict(every=0, num_tasks=2, k=4),
      checkpoint=dict(every=1),
    )
  )
