r"""SmolLM2-135M-Instruct as verifier, searcher and answerer, on HotpotQA.

    python -m drmas_jax.main --config configs/search_smollm2.py \
      --config.policies.verifier.checkpoint=SMOLLM2 \
      --config.policies.searcher.checkpoint=SMOLLM2 \
      --config.policies.answerer.checkpoint=SMOLLM2 \
      --config.environment.options.retriever.corpus=CORPUS \
      --config.data.sources.hotpotqa_mini.options.rows.train=QUESTIONS \
      --config.data.sources.hotpotqa_mini.options.rows.test=QUESTIONS

SMOLLM2 is a Hugging Face folder of the model; CORPUS is a .jsonl file of
passages and QUESTIONS one of questions with "golden_answers", of which 100
training questions of HotpotQA and their 994 passages are an example. The index
is made beside CORPUS, or where `retriever.index` says. Three copies of the
checkpoint are trained apart, in fp32.

It is there to show that real policies and a real corpus go through all of it;
in two steps it learns nothing, and train and test are the same questions. A
policy of this size seldom gives a verdict in the form asked for. Without one
the episode searches here, not answers, so that there is something to be found.

Hardware: 2 CPU cores, 14 GB of memory.
Expected: held-out avg@2 of 0. Its two steps were run once, in 8 CPU minutes:
16 episodes without a fault, 3 of 8 answers and then 1 of 8 in the form asked
for, a gradient norm of the answerer of 3.0 and 2.3; none of the verifier's 32
verdicts and none of the searcher's 32 queries could be read, so no passage was
asked for. A search begins with a better policy, or with one from --mode=sft.
"""

from ml_collections import ConfigDict

_CHECKPOINT = "checkpoints/SmolLM2-135M-Instruct"
_QUESTIONS = "data/qa/hotpotqa_mini.jsonl"
_CORPUS = "data/corpus/hotpotqa_mini.jsonl"


def _policy() -> dict:
  return dict(
    checkpoint=_CHECKPOINT,
    remat="full",
    micro_tokens=1024,
    row_buckets=(512, 768, 1024),
    optimizer=dict(learning_rate=1e-6),
    engine=dict(
      num_slots=8,
      max_length=1024,
      prefill_rows=2,
      prefill_buckets=(384, 640, 896),
      steps_per_call=16,
    ),
  )


def _agent(role: str, **options: str) -> dict:
  # At temperature 1 so small a policy hardly ever writes in the form asked for.
  return dict(
    role=f"search.{role}",
    policy=role,
    max_tokens=96,
    sampling=dict(temperature=0.4),
    options=options,
  )


def get_config() -> ConfigDict:
  return ConfigDict(
    dict(
      steps=2,
      policies=dict(verifier=_policy(), searcher=_policy(), answerer=_policy()),
      agents=dict(
        verifier=_agent("verifier", missing_verdict="no"),
        searcher=_agent("searcher"),
        answerer=_agent("answerer"),
      ),
      orchestra=dict(name="search", options=dict(max_steps=3)),
      environment=dict(
        name="search",
        options=dict(
          retriever=dict(kind="bm25", corpus=_CORPUS),
          topk=2,
          passage_chars=500,
        ),
      ),
      data=dict(
        sources=dict(
          hotpotqa_mini=dict(
            name="own",
            options=dict(
              rows=dict(train=_QUESTIONS, test=_QUESTIONS),
              answer="golden_answers",
            ),
          )
        ),
        num_tasks=2,
        group_size=4,
      ),
      eval=dict(every=0, num_tasks=2, k=2),
      checkpoint=dict(every=1),
    )
  )
