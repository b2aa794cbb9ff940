"""What the configs of the paper's experiments share.

Hyper-parameters are those of Dr. MAS (arXiv 2602.08847, appendix B) and of its
authors' scripts. Where the reference differs from this project's defaults, the
option that reproduces it is on: `singleton`, `zero_tolerance`,
`update_on_zero_signal`, `old_logprobs`, `cut`, and of search `validity`,
`at_limit`, `passages`, `metric`, `scored`.
"""

from collections.abc import Mapping

from ml_collections import ConfigDict

MATH_TESTS = (
  "aime24",
  "aime25",
  "amc23",
  "math500",
  "minerva",
  "olympiadbench",
)

SEARCH_TESTS = (
  "nq",
  "triviaqa",
  "popqa",
  "hotpotqa",
  "two_wiki",
  "musique",
  "bamboogle",
)

SEARCH_AGENTS = ("verifier", "searcher", "answerer")

_LONGEST = 8192 + 4096
_LONGEST_SEARCH = 4096 + 800

# The setting of Tables 1 and 2: 16 episodes of every question.
_EVAL_SAMPLING = dict(temperature=0.6, top_p=0.95)


def qwen3_math(size: str, *, team: str, estimator: str) -> ConfigDict:
  """A row of Table 1: Qwen3 without thinking on DAPO-Math.

  Args:
    size: "4B" or "8B".
    team: "single" (a solver alone), "share" (solver and verifier on one policy)
      or "apart" (a policy each).
    estimator: "agent_wise" (Dr. MAS) or "grpo".
  """
  agents = ("solver",) if team == "single" else ("solver", "verifier")
  names = agents if team == "apart" else ("team",)
  policies = {name: _qwen3_policy(size) for name in names}
  return ConfigDict(
    dict(
      steps=1000,  # two epochs of 16,000 problems; the paper gives no number
      policies=policies,
      agents={
        agent: _math_agent(agent, agent if team == "apart" else "team")
        for agent in agents
      },
      orchestra=dict(name="single")
      if team == "single"
      else dict(name="math", options=dict(max_loops=2)),
      environment=dict(name="math"),
      advantage=dict(name=estimator, singleton="raw", zero_tolerance=0.0),
      data=dict(
        sources=dict(dapo_math=dict(options=_files())),
        num_tasks=32,
        group_size=8,
      ),
      eval=dict(
        sources={name: dict(options=_files()) for name in MATH_TESTS},
        every=10,
        num_tasks=50,
        k=1,
        sampling=_EVAL_SAMPLING,
      ),
      checkpoint=dict(every=100),
      # All of a host's devices share the heads of one long row: in an update
      # its attention is not fused, and would fill a device that held it alone.
      # One engine on all of them holds its weights once.
      placement=dict(
        train_mesh=dict(fsdp=1, tensor=0),
        rollout_mesh=dict(data=1, fsdp=1, tensor=0),
      ),
    )
  )


def _qwen3_policy(size: str) -> dict:
  return dict(
    checkpoint=f"Qwen/Qwen3-{size}",
    chat_template_kwargs=dict(enable_thinking=False),
    compute_dtype="bfloat16",
    rollout_dtype="bfloat16",
    remat="full",
    old_logprobs="learner",
    update_on_zero_signal=True,
    micro_tokens=_LONGEST,  # one row, however long
    optimizer=dict(learning_rate=1e-6),
    # The cache is for live tokens: a few long sequences, or many short ones.
    engine=dict(
      num_slots=96,
      max_length=_LONGEST,
      prefill_rows=2,
      cache_tokens=24 * _LONGEST,
    ),
  )


def _math_agent(role: str, policy: str) -> dict:
  return dict(
    role=f"math.{role}",
    policy=policy,
    max_prompt_tokens=8192,
    max_tokens=4096,
    cut="middle",
  )


def search(
  checkpoints: Mapping[str, str],
  *,
  estimator: str,
  rollout_mesh: Mapping[str, int],
  policies: Mapping[str, str] | None = None,
) -> ConfigDict:
  """A row of Table 2 or 3 or of Figure 5: NQ and HotpotQA over wiki-18.

  Passages come from a server, such as

    python -m drmas_jax.retrieval.serve --kind dense --corpus wiki-18.jsonl
      --encoder e5-base-v2 --prefixes 'query: ' 'passage: '

  Args:
    checkpoints: by policy.
    estimator: "agent_wise" (Dr. MAS), "grpo", "mean_only" or "std_only".
    rollout_mesh: of the engines, which must split the heads evenly.
    policies: by agent; none: the policy of its name, or the only one.
  """
  agents = tuple(policies or checkpoints)
  team = agents != ("researcher",)
  options = dict(max_steps=4) | (dict(at_limit="fail") if team else {})
  return ConfigDict(
    dict(
      steps=1325,  # one epoch of 169,615 questions
      policies={n: _search_policy(c) for n, c in checkpoints.items()},
      agents={
        agent: _search_agent(agent, (policies or {}).get(agent, agent))
        for agent in agents
      },
      orchestra=dict(
        name="search" if team else "search_single", options=options
      ),
      environment=dict(
        name="search",
        options=dict(
          retriever=dict(kind="client", url="http://127.0.0.1:8000/retrieve"),
          topk=3,
          passages="json",
          metric="em_search_r1",
          scored="history",
        ),
      ),
      advantage=dict(name=estimator, singleton="raw", zero_tolerance=0.0),
      data=dict(
        sources=dict(nq_hotpotqa=dict(options=_files())),
        num_tasks=128,
        group_size=5,
      ),
      eval=dict(
        sources={name: dict(options=_files()) for name in SEARCH_TESTS},
        every=5,
        num_tasks=30,
        k=1,
        sampling=_EVAL_SAMPLING,
      ),
      checkpoint=dict(every=100),
      placement=dict(rollout_mesh=dict(rollout_mesh)),
    )
  )


def qwen25_search(size: str, *, team: str, estimator: str) -> ConfigDict:
  """A row of Table 2 or 3: Qwen2.5 throughout.

  Args:
    size: "3B" or "7B".
    team: "single" (a researcher alone), "share" (all three agents on one
      policy) or "apart" (a policy each).
    estimator: as for `search`.
  """
  names = {
    "single": ("researcher",),
    "share": ("team",),
    "apart": SEARCH_AGENTS,
  }[team]
  return search(
    dict.fromkeys(names, f"Qwen/Qwen2.5-{size}"),
    estimator=estimator,
    policies=dict.fromkeys(SEARCH_AGENTS, "team") if team == "share" else None,
    # Engines of as many devices as kv heads: three models leave no room for a
    # copy on each.
    rollout_mesh=dict(data=0, fsdp=1, tensor={"3B": 2, "7B": 4}[size]),
  )


def _search_policy(checkpoint: str) -> dict:
  return dict(
    checkpoint=checkpoint,
    compute_dtype="bfloat16",
    rollout_dtype="bfloat16",
    remat="full",
    old_logprobs="learner",
    num_updates=5,
    micro_tokens=_LONGEST_SEARCH,  # a row on each device, however long
    optimizer=dict(learning_rate=1e-6),
    loss=dict(entropy_weight=0.001),  # of the authors' defaults, not the paper
    engine=dict(
      num_slots=96,
      max_length=_LONGEST_SEARCH,
      prefill_rows=2,
      cache_tokens=32 * _LONGEST_SEARCH,
    ),
  )


def _search_agent(role: str, policy: str) -> dict:
  return dict(
    role=f"search.{role}",
    policy=policy,
    max_prompt_tokens=4096,
    max_tokens=800,
    cut="left",
    invalid_penalty=0.01,
    options=dict(validity="reference"),
  )


def _files() -> dict:
  """Where the data sets are: the hub, or a folder of yours in its place."""
  return dict(data_dir="hub")
