r"""SmolLM2-135M-Instruct as solver and as verifier, on GSM8K.

    python -m drmas_jax.main --config configs/math_smollm2.py \
      --config.policies.solver.checkpoint=SMOLLM2 \
      --config.policies.verifier.checkpoint=SMOLLM2 \
      --config.data.sources.gsm8k.options.data_dir=DATA

SMOLLM2 is a Hugging Face folder of the model, DATA one with gsm8k_train.jsonl
and gsm8k_test.jsonl. Two copies of the checkpoint are trained apart, in fp32.

It is there to show that a real policy loads, samples, is updated, is saved and
resumed; it learns nothing in two steps. Within 128 tokens a policy of this size
writes next to no box, so the reward is 0 and the solver is not updated
(`skipped/no_signal/solver`); what the verifier's groups differ in is whether
there is a verdict at all.

Hardware: 2 CPU cores, 7 GB of memory (10 GB where both policies are updated).
Time: run as it stands, 5.5 minutes on a busy machine, 314 CPU-seconds with a
compile cache that was mostly warm (20 more where it is cold). A step takes 55
to 60 s for the rollout (37 tokens/s) and 8 CPU-seconds for each row of the
update, padded to 512 tokens; an evaluation takes 60 s.
Expected: held-out avg@4 0 before and after; at the first update
`grad_norm/verifier` 1.4 and `ratio_error/verifier` below 1e-4.
"""

from ml_collections import ConfigDict

_CHECKPOINT = "checkpoints/SmolLM2-135M-Instruct"


def _policy() -> dict:
  return dict(
    checkpoint=_CHECKPOINT,
    remat="full",
    micro_tokens=1408,
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
        sources=dict(gsm8k=dict(options=dict(data_dir="data/math"))),
        num_tasks=2,
        group_size=4,
      ),
      eval=dict(every=0, num_tasks=2, k=4),
      checkpoint=dict(every=1),
    )
  )
