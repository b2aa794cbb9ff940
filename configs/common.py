"""What the configs of the paper's experiments share.

Hyper-parameters are those of Dr. MAS (arXiv 2602.08847, appendix B) and of its
authors' scripts. Where the reference differs from this project's defaults, the
option that reproduces it is on: `singleton`, `zero_tolerance`,
`update_on_zero_signal`, `old_logprobs`, `cut`.
"""

from ml_collections import ConfigDict

MATH_TESTS = (
  "aime24",
  "aime25",
  "amc23",
  "math500",
  "minerva",
  "olympiadbench",
)

_LONGEST = 8192 + 4096

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
        rollout_mesh=dict(fsdp=1, tensor=0),
      ),
    )
  )


def _qwen3_policy(size: str) -> dict:
  return dict(
    checkpoint=f"Qwen/Qwen3-{size}",
    chat_template_kwargs=dict(enable_thinking=False),
    compute_dtype="bfloat16",
    rollout_dtype="bfloat16",
    remat=True,
    old_logprobs="learner",
    update_on_zero_signal=True,
    micro_batch=1,
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


def _files() -> dict:
  """Where the data sets are: the hub, or a folder of yours in its place."""
  return dict(data_dir="hub")
