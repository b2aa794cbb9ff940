"""From a config file to frozen dataclasses; every check, once.

A config file is plain data: `get_config()` returns an `ml_collections`
ConfigDict (or a dict). `load` reads it, applies dotted overrides, and `build`
turns it into a `Config`. Defaults live in the dataclasses below and nowhere
else. What is wrong is collected and raised as one `ConfigError`, whose lines
each name the key, the value, what is allowed, and the fix.
"""

import ast
import contextlib
import dataclasses
import difflib
import functools
import importlib
import importlib.util
import inspect
import json
import math
import os
import pathlib
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from drmas_jax import usercode

Mode = Literal["train", "eval", "sft", "serve", "check"]


class ConfigError(ValueError):
  """A config that cannot run. `main` exits with code 2 on it."""


@contextlib.contextmanager
def blaming(key: str) -> Iterator[None]:
  """Around what reads a value of the config: a ValueError is the key's fault.

  Args:
    key: of the config, or the flag.

  Raises:
    ConfigError: in place of any other ValueError.
  """
  try:
    yield
  except ConfigError:
    raise
  except ValueError as e:
    raise ConfigError(f"{key}: {e}") from e


def _bounded(
  default: Any = dataclasses.MISSING,
  *,
  low: float | None = None,
  high: float | None = None,
  above: float | None = None,
  below: float | None = None,
) -> Any:
  """A finite number: `low` <= value <= `high`, `above` < value < `below`."""
  bounds = {">=": low, ">": above, "<=": high, "<": below}
  return dataclasses.field(default=default, metadata=bounds)


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How completions are drawn. Temperature 0 is greedy; top_k 0 keeps all."""

  temperature: float = _bounded(1.0, low=0.0, high=100.0)
  top_k: int = _bounded(0, low=0, below=1 << 31)
  top_p: float = _bounded(1.0, above=0.0, high=1.0)


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """A rule of optax by name in `optimizers.OPTIMIZERS`, with a schedule, behind
  clipping by the policy's global norm.

  Attributes:
    learning_rate: of "adafactor" relative to the size of each matrix.
    schedule: after `warmup_steps` of linear rise, "constant", or "cosine" and
      "linear" down to `final_fraction` of the rate at step `decay_steps`
      (a length of its own, so that a longer run changes nothing before it).
    b1, b2, eps: of "adamw"; "muon" has them for what is no matrix of a layer.
    weight_decay: times the rate, of all parameters.
    momentum: of "muon", for matrices.
    offload: the state lies in the host's memory, and visits the device in an
      update, a layer at a time.
  """

  name: str = "adamw"
  learning_rate: float = _bounded(1e-6, low=0.0)
  schedule: Literal["constant", "cosine", "linear"] = "constant"
  warmup_steps: int = _bounded(0, low=0)
  decay_steps: int = _bounded(1000, low=1)
  final_fraction: float = _bounded(0.0, low=0.0, high=1.0)
  b1: float = _bounded(0.9, low=0.0, below=1.0)
  b2: float = _bounded(0.999, low=0.0, below=1.0)
  eps: float = _bounded(1e-8, above=0.0)
  weight_decay: float = _bounded(0.01, low=0.0)
  momentum: float = _bounded(0.95, low=0.0, below=1.0)
  clip_norm: float = _bounded(1.0, above=0.0)
  offload: bool = False


@dataclasses.dataclass(frozen=True)
class Loss:
  """The policy loss, by name in `losses.LOSSES`.

  Attributes:
    clip_low, clip_high: of the ratio; what they do is the loss's.
    dual_clip: of "clipped" alone.
    aggregation: mean over tokens, mean over completions of their token means,
      or mean over completions of their token sums over `divisor`; see
      `losses.aggregate`. A completion is that of one turn.
    divisor: of "sequence_sum"; Dr. GRPO's is the limit of a completion.
    entropy_weight: that times the mean entropy of the tempered full softmax is
      subtracted from the loss, by the same aggregation.
    mask_truncated: completions cut by their length leave the loss and its
      denominator; statistics count them.
    importance: factors for tokens drawn from another distribution than the
      loss has, cut at `importance_bound`; see `losses.importance_weights`. Of
      top_k and top_p, and where old_logprobs="learner" of the engine's
      numerics.
    kl: estimator of the distance to `reference`, by name in `losses.KL`.
    kl_weight: that times the estimate is added to the loss of each token, with
      an advantage or without.
    reference: a frozen policy with the same tokenizer; "": none.
    reward_weight: factor of the part of the loss that rewards drive; 0 leaves
      the distance alone, which is on-policy distillation.
  """

  name: str = "clipped"
  clip_low: float = _bounded(0.2, low=0.0, high=1.0)
  clip_high: float = _bounded(0.2, low=0.0)
  dual_clip: float = _bounded(3.0, above=1.0)
  aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] = (
    "token_mean"
  )
  divisor: float = _bounded(1.0, above=0.0)
  entropy_weight: float = _bounded(0.0, low=0.0)
  mask_truncated: bool = False
  importance: Literal["none", "token", "sequence", "rejection"] = "none"
  importance_bound: float = _bounded(2.0, low=1.0)
  kl: str = "k3"
  kl_weight: float = _bounded(0.0, low=0.0)
  reference: str = ""
  reward_weight: float = _bounded(1.0, low=0.0)

  @property
  def beyond_rewards(self) -> bool:
    """Whether tokens have a gradient also where the advantage is 0."""
    return self.entropy_weight > 0 or self.kl_weight > 0


@dataclasses.dataclass(frozen=True)
class Engine:
  """Sizes of one engine, the device side of sampling.

  A policy has `placement.rollout_mesh.data` engines on each host, all of these
  sizes.

  Attributes:
    num_slots: completions decoded at once, by one engine. On CPU they run in
      equal parts of at most 32, as many as hold those that there are: the last
      ones of many do not cost what all cost.
    max_length: longest prompt plus completion, in tokens.
    prefill_rows: most prompts that are prefilled together; of a long bucket
      fewer, as many as come to 512 tokens. Of fewer prompts the rest is padding
      (fixed shapes, rule 26): few suit prompts that come alone, more those that
      come together. 0: 1 on CPU, 16 elsewhere.
    prefill_buckets: padded prompt lengths; a prompt takes the smallest that
      holds it. Empty: powers of two from 32 up to max_length.
    steps_per_call: decode steps fused into one dispatch.
    page_size: tokens in a page of the cache; 0: 128 on TPU, 64 elsewhere.
    cache_dtype: of keys and values; "": the policy's rollout_dtype. "int8" has
      a scale for each token and head.
    cache_tokens: most that the cache of one engine grows to; 0: num_slots times
      max_length. With less, long sequences may wait for room.
  """

  num_slots: int = _bounded(32, low=1)
  max_length: int = _bounded(1024, low=2)
  prefill_rows: int = _bounded(0, low=0)
  prefill_buckets: tuple[int, ...] = ()
  steps_per_call: int = _bounded(16, low=1)
  page_size: int = _bounded(0, low=0)
  cache_dtype: Literal["", "float32", "bfloat16", "int8"] = ""
  cache_tokens: int = _bounded(0, low=0)


Projection = Literal["q", "k", "v", "o", "gate", "up", "down"]


@dataclasses.dataclass(frozen=True)
class Adapter:
  """Low-rank adapters (LoRA) on a frozen checkpoint.

      y = x W + alpha / rank * (x A) B        A [in, rank], B [rank, out]

  Attributes:
    targets: the projections of every layer that have one.
  """

  rank: int = _bounded(16, low=1)
  alpha: float = _bounded(32.0, above=0.0)
  targets: tuple[Projection, ...] = (
    *("q", "k", "v", "o"),
    *("gate", "up", "down"),
  )


@dataclasses.dataclass(frozen=True)
class Remote:
  """An OpenAI-style endpoint: chat completions over HTTP.

  Attributes:
    base_url: such as "https://api.openai.com/v1"; what is asked is
      base_url/chat/completions.
    model: its name there.
    key_env: the name of the environment variable that holds the key; "": none
      is sent. The key itself is written nowhere.
    concurrency: requests at once, from each host; others wait for their turn.
    timeout_s: of a call, with all its tries and the pauses between them. It
      runs from when it is the call's turn.
    prompt_price, completion_price: of a million tokens, in any currency.
    cache: a folder where replies are kept by what was asked, so that the same
      is not asked (and paid) twice; "auto": drmas_jax/replies in the user's
      cache folder; "": none is kept.
    options: further fields of each request, such as reasoning_effort="low";
      None leaves out one that would be there (max_tokens=None).
  """

  base_url: str
  model: str
  key_env: str = ""
  concurrency: int = _bounded(8, low=1)
  timeout_s: float = _bounded(120.0, above=0.0)
  prompt_price: float = _bounded(0.0, low=0.0)
  completion_price: float = _bounded(0.0, low=0.0)
  cache: str = "auto"
  options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Policy:
  """One LLM of the team.

  Policies with an adapter, and frozen ones, that name one checkpoint lie on one
  copy of its weights, where at least one has an adapter. Those with adapters
  are one program, and have all keys in common but `update_every`,
  `update_phase` and `optimizer.learning_rate`; a frozen one has the others'
  `engine`, `rollout_dtype` and `chat_template_kwargs`.

  Attributes:
    checkpoint: a Hugging Face folder, here, at gs://BUCKET/FOLDER or on the hub
      ("Qwen/Qwen3-4B"), "tiny:NAME" for a shipped one, or
      "run:WORKDIR/POLICY" for another run's, at its newest checkpoint, that
      of a step ("..@200") or the best ("..@best").
    remote: in place of a checkpoint; it is asked over HTTP, never trained, and
      in no statistics, and no other key of the policy is for it.
    frozen: sampled from, never trained.
    adapter: trains low-rank adapters and not the weights; none: the weights.
    compute_dtype: of activations; parameters and optimizer are float32.
    rollout_dtype: of the engine's weights and activations.
    remat: what of a layer the backward pass computes again: "dots" (all but
      the products), "none" or "full", which takes the least memory.
    attention: of the update: "splash" (TPU), "cudnn" (GPU, bfloat16), "xla", or
      "auto", the first of these that runs.
    chat_template_kwargs: given to the checkpoint's chat template, such as
      enable_thinking=False or date_string="1 Jan 2026".
    old_logprobs: "sampler" takes the engine's log-probs as the old ones,
      "learner" scores the batch again. Either way they are those of the weights
      before the first of a batch's updates.
    micro_tokens: tokens, padding included, whose gradient is computed at a
      time, but a row on each device at the least; changes memory, not the
      result. The last micro-batch is computed whole, however few its rows.
    row_buckets: padded row lengths; an update takes the smallest that holds
      its longest chat, and packs shorter ones together. Empty: powers of two
      up to the engine's max_length.
    num_updates: parts of a batch, of about equally many rows in their order,
      with one update each by a mean over its own part.
    num_epochs: times that the batch is gone through.
    update_every, update_phase: it is updated in the steps whose number, from
      0, leaves `update_phase` divided by `update_every`: alternating updates.
    update_on_zero_signal: rule 12's reference behaviour.
  """

  checkpoint: str = ""
  remote: Remote | None = None
  frozen: bool = False
  adapter: Adapter | None = None
  compute_dtype: Literal["float32", "bfloat16"] = "float32"
  rollout_dtype: Literal["float32", "bfloat16"] = "float32"
  remat: Literal["none", "dots", "full"] = "dots"
  attention: Literal["auto", "splash", "cudnn", "xla"] = "auto"
  chat_template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
  old_logprobs: Literal["sampler", "learner"] = "sampler"
  micro_tokens: int = _bounded(8192, low=1)
  row_buckets: tuple[int, ...] = ()
  num_updates: int = _bounded(1, low=1)
  num_epochs: int = _bounded(1, low=1)
  update_every: int = _bounded(1, low=1)
  update_phase: int = _bounded(0, low=0)
  update_on_zero_signal: bool = False
  optimizer: Optimizer = Optimizer()
  loss: Loss = Loss()
  engine: Engine = Engine()

  @property
  def trained(self) -> bool:
    return not self.frozen and self.remote is None

  @property
  def origin(self) -> str:
    """Where it comes from, for people."""
    if self.remote is None:
      return self.checkpoint
    return f"{self.remote.model} at {self.remote.base_url}"


@dataclasses.dataclass(frozen=True)
class Agent:
  """A role and who plays it.

  Attributes:
    role: an `Agent` value by module and name, such as "math.solver".
    template: a prompt template of that role other than its default.
    max_tokens: limit of one completion.
    max_prompt_tokens: limit of a prompt; 0: the room that the engine's
      max_length leaves beside max_tokens.
    cut: what becomes of a longer prompt. "foreign" shortens what others said,
      oldest first, and never drops the question or the newest solution; "left",
      "middle" and "right" drop tokens there, as the reference does; "error"
      loses the episode.
    invalid_penalty: subtracted from a turn's score if it is invalid.
    overlong_tokens, overlong_penalty: a completion that comes within
      `overlong_tokens` of max_tokens (0: none does) loses up to
      `overlong_penalty` of its score, in proportion to how far it comes (DAPO's
      soft punishment).
    train: False leaves its turns out of the loss and its denominator, and in
      the statistics.
    loss_weight: factor of the loss of its tokens, not of the denominator.
    options: keyword options of the role (such as `missing_verdict`).
  """

  role: str
  policy: str
  template: str = "default"
  max_tokens: int = _bounded(512, low=1)
  max_prompt_tokens: int = _bounded(0, low=0)
  cut: Literal["foreign", "left", "middle", "right", "error"] = "foreign"
  invalid_penalty: float = _bounded(0.1, low=0.0)
  overlong_tokens: int = _bounded(0, low=0)
  overlong_penalty: float = _bounded(1.0, low=0.0)
  train: bool = True
  loss_weight: float = _bounded(1.0, above=0.0)
  sampling: Sampling = Sampling()
  options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Orchestra:
  """Who speaks when: a file of `orchestras/` or a module of the user's own."""

  name: str
  options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Environment:
  """What is rewarded: a file of `environments/` or the user's own module.

  Attributes:
    reward_timeout_s: of a reward that is a coroutine.
    act_timeout_s: of what it answers within an episode, such as passages.
  """

  name: str
  options: dict[str, Any] = dataclasses.field(default_factory=dict)
  reward_timeout_s: float = _bounded(30.0, above=0.0)
  act_timeout_s: float = _bounded(60.0, above=0.0)


@dataclasses.dataclass(frozen=True)
class Source:
  """A data set: a name of `datasets/` (or the user's own module), its split
  and its options.

  Attributes:
    name: of the module; none: the key of the entry in `sources`.
  """

  name: str | None = None
  split: str = "test"
  options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class TrainSource(Source):
  """A part of the training mixture.

  Attributes:
    weight: share of the stream, relative to the other sources' weights.
  """

  split: str = "train"
  weight: float = _bounded(1.0, above=0.0)


@dataclasses.dataclass(frozen=True)
class Data:
  """The task stream of training: P tasks of G episodes a step, from one
  source or a mixture of several.

  Attributes:
    resample: rounds of a step in which groups whose episodes all have one
      reward are replaced by those of fresh tasks (DAPO's dynamic sampling).
      What is still missing then stays as it is; 0: all of them do.
  """

  sources: dict[str, TrainSource]
  num_tasks: int = _bounded(16, low=1)
  group_size: int = _bounded(8, low=1)
  resample: int = _bounded(0, low=0)


@dataclasses.dataclass(frozen=True)
class Advantage:
  """The estimator, by name in `advantages.ESTIMATORS`.

  An option that the estimator does not read (`advantages.READS`) is an error.

  Attributes:
    over: who is compared: the agent with itself, or with the "team".
    count: what counts once in a baseline: a turn, or an episode.
    by_turn: baselines of turns of the same index only.
    pool_agents: with rewards per agent, one baseline for all agents' episodes.
    decay: of the moving average of `rae`.
    gamma: of `gigpo`: a reward one turn later counts for so much.
    step_weight: of `gigpo`: factor of the part that compares turns.
    singleton: a group of one gets 0, or "raw": its score, as the reference.
    zero_tolerance: a standard deviation at or below this times
      max(1, max|score|) counts as zero (rule 5); 0 is the reference.
  """

  name: str = "agent_wise"
  over: Literal["agent", "team"] = "agent"
  count: Literal["turn", "episode"] = "turn"
  by_turn: bool = False
  pool_agents: bool = False
  decay: float = _bounded(0.95, low=0.0, below=1.0)
  gamma: float = _bounded(0.95, low=0.0, high=1.0)
  step_weight: float = _bounded(1.0, above=0.0)
  singleton: Literal["zero", "raw"] = "zero"
  zero_tolerance: float = _bounded(1e-5, low=0.0)


@dataclasses.dataclass(frozen=True)
class Rollout:
  """Limits of a rollout.

  Attributes:
    turn_timeout_s: from the moment a turn is asked for to its last token.
    max_failed: a step with more than this share of failed episodes stops the
      run.
  """

  turn_timeout_s: float = _bounded(600.0, above=0.0)
  max_failed: float = _bounded(0.5, low=0.0, high=1.0)


@dataclasses.dataclass(frozen=True)
class Eval:
  """Held-out evaluation: k episodes of each of a set's first `num_tasks` tasks.

  "Final" are the evaluations before the first and after the last step, and
  that of `--mode=eval`.

  Attributes:
    sources: the sets; empty: the "test" splits of the training sources.
    every: steps between evaluations during training; 0 for none. Before the
      first and after the last step there is always one, unless num_tasks is 0.
    num_tasks: of each set, or all of a set that has fewer.
    final_num_tasks: the same for the final evaluations; 0: as `num_tasks`.
    k: episodes of a task.
    final_k: the same for the final evaluations; 0: as `k`.
    sampling: one for all agents; none: each agent's own.
  """

  sources: dict[str, Source] = dataclasses.field(default_factory=dict)
  every: int = _bounded(10, low=0)
  num_tasks: int = _bounded(64, low=0)
  final_num_tasks: int = _bounded(0, low=0)
  k: int = _bounded(8, low=1)
  final_k: int = _bounded(0, low=0)
  sampling: Sampling | None = None


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """Saved every `every` steps and at the end; the last `keep` and the best."""

  every: int = _bounded(20, low=1)
  keep: int = _bounded(2, low=1)


@dataclasses.dataclass(frozen=True)
class Mesh:
  """Sizes of the mesh axes of one slice; 0 takes what is left (one axis)."""

  data: int = _bounded(1, low=0)
  fsdp: int = _bounded(0, low=0)
  tensor: int = _bounded(1, low=0)


@dataclasses.dataclass(frozen=True)
class Placement:
  """Which devices a backbone uses for what.

  Attributes:
    strategy: "shared" (all backbones on all devices, in turn), "split"
      (disjoint slices of one host), "columns" (many hosts: the same local
      devices of every host for one backbone).
    shares: relative number of devices by policy; left out: equal.
    rollout_devices: devices of a slice set aside for its engine; 0: the engine
      uses the slice's training devices, in turn with the learner.
    train_mesh: axes of the mesh of a learner, over all hosts.
    rollout_mesh: `data` engines for each policy on each host, every one on its
      own fsdp x tensor devices, which split its weights and kv heads.
    device_memory_gb: per device; 0: ask the device (or the host, on CPU).
    timeout_s: limit of every wait for another host; after an evaluation, on
      top of the time that the own share of it took.
  """

  strategy: Literal["shared", "split", "columns"] = "shared"
  shares: dict[str, int] = dataclasses.field(default_factory=dict)
  rollout_devices: int = _bounded(0, low=0)
  train_mesh: Mesh = Mesh()
  rollout_mesh: Mesh = Mesh(data=0, fsdp=1, tensor=1)
  device_memory_gb: float = _bounded(0.0, low=0.0)
  timeout_s: float = _bounded(1800.0, above=0.0)


@dataclasses.dataclass(frozen=True)
class Logging:
  """What is written in the workdir, and how much of it.

  Attributes:
    agent_norm_every: steps between gradient norms by agent (a second pass);
      0 for none.
    score_norm_every: steps between estimates of Delta_k, the covariance term of
      Dr. MAS's lemma 4.2 (a gradient for each turn); 0 for none.
    transcripts_mb: limit of the transcripts on disk.
    transcript_groups: groups of a step, and questions of a held-out set in
      `--mode=eval`, that are written whole; for rejection sampling (`show
      --export`) as many as there are, `data.num_tasks`.
    writers: who gets the numbers of a step: "jsonl" (always: other parts read
      it), "tensorboard", "wandb", and modules of your own ("my_pkg.my_writer"),
      which get all episodes of the step too; see `writers`.
    spikes_kept: batches of norm spikes and of non-finite updates that stay, the
      newest, each with the checkpoint before it, for `--mode=replay --spike`;
      0 for none.
    spikes_mb: a batch that is larger, of all hosts, is not kept.
  """

  agent_norm_every: int = _bounded(10, low=0)
  score_norm_every: int = _bounded(0, low=0)
  transcripts_mb: float = _bounded(64.0, low=0.0)
  transcript_groups: int = _bounded(2, low=0)
  writers: tuple[str, ...] = ("jsonl", "tensorboard")
  spikes_kept: int = _bounded(2, low=0)
  spikes_mb: float = _bounded(256.0, above=0.0)


@dataclasses.dataclass(frozen=True)
class Health:
  """When a step raises an alarm, by the names of `health.CHECKS`.

  Shares and means are over a few steps; `health` says which, and why. An alarm
  is shown when it begins, and is in <workdir>/alarms.jsonl. In `--mode=sft`
  there is only `norm_spike` to raise one.

  Attributes:
    stop_on: alarms that end the run, after it is saved, with exit code 3.
    truncated: more of an agent's completions than this share are cut.
    invalid: more of an agent's turns than this share are invalid.
    zero_variance: in more of an agent's groups than this share all scores are
      equal, and the team is not nearly always right.
    one_verdict: an agent that has a choice decides one way in at least this
      share of its turns, and the team is not nearly always right.
    entropy: an agent's entropy falls or rises by this factor, and its reward
      does not rise.
    ratio: a token's ratio is off 1 by more than this in the first update.
    logprob_gap: mean difference between the log-probs of learner and sampler.
    norm_spike: a policy's gradient norm is more than so many times its running
      median, and far outside of its usual scatter (`health.is_spike`), for the
      second time within a window.
    held_out: fall of the held-out score below its best while training rewards
      are higher than then.
    window: steps that a running median is over.
    slow_factor, slow_floor_s: a step, an evaluation or a save that takes so
      many times the median of those before it, and at least so long, is told
      of, with what it waits for; stacks of all threads go to <workdir>/stacks.
  """

  stop_on: tuple[str, ...] = ()
  truncated: float = _bounded(0.5, above=0.0, high=1.0)
  invalid: float = _bounded(0.5, above=0.0, high=1.0)
  zero_variance: float = _bounded(0.8, above=0.0, high=1.0)
  one_verdict: float = _bounded(0.98, above=0.5, high=1.0)
  entropy: float = _bounded(3.0, above=1.0)
  ratio: float = _bounded(0.5, above=0.0)
  logprob_gap: float = _bounded(0.02, above=0.0)
  norm_spike: float = _bounded(3.0, above=1.0)
  held_out: float = _bounded(0.05, low=0.0)
  window: int = _bounded(20, low=10)
  slow_factor: float = _bounded(2.0, above=1.0)
  slow_floor_s: float = _bounded(60.0, above=0.0)


@dataclasses.dataclass(frozen=True)
class Sft:
  """`--mode=sft`: cross-entropy on the demonstrations of `data.sources`.

  Attributes:
    steps: of every trained policy.
    batch_rows: demonstrations in a step.
    learning_rate: peak of the rate, which falls to a tenth by a cosine.
    warmup_steps: linear rise before.
    from_scratch: start from random weights in the checkpoint's shape.
    options: keyword options of the data sets' `demonstrations`.
  """

  steps: int = _bounded(500, low=1)
  batch_rows: int = _bounded(64, low=1)
  learning_rate: float = _bounded(3e-3, above=0.0)
  warmup_steps: int = _bounded(50, low=0)
  from_scratch: bool = False
  options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Config:
  """A whole run."""

  policies: dict[str, Policy]
  agents: dict[str, Agent]
  orchestra: Orchestra
  environment: Environment
  data: Data
  seed: int = _bounded(0, low=0, below=1 << 32)  # or two of them are one
  steps: int = _bounded(100, low=1)
  advantage: Advantage = Advantage()
  rollout: Rollout = Rollout()
  eval: Eval = Eval()
  checkpoint: Checkpoint = Checkpoint()
  placement: Placement = Placement()
  logging: Logging = Logging()
  health: Health = Health()
  sft: Sft = Sft()

  @property
  def agent_names(self) -> tuple[str, ...]:
    """Sorted; an agent's index everywhere on the device side."""
    return tuple(sorted(self.agents))

  @property
  def trained(self) -> tuple[str, ...]:
    return tuple(n for n, p in sorted(self.policies.items()) if p.trained)

  @property
  def remotes(self) -> dict[str, Remote]:
    """The policies that are elsewhere."""
    policies = sorted(self.policies.items())
    return {n: p.remote for n, p in policies if p.remote is not None}

  @property
  def backbones(self) -> dict[str, tuple[str, ...]]:
    """The policies of each set of weights, by their names joined by "+".

    Adapters on one checkpoint share it, and come first; then the frozen
    policies that are that checkpoint. Those that are remote have none.
    """
    shared = {p.checkpoint for p in self.policies.values() if p.adapter}
    homes: dict[str, list[str]] = {}
    for name, policy in sorted(self.policies.items()):
      if policy.remote is not None:
        continue
      joins = policy.adapter or policy.frozen
      on = joins and policy.checkpoint in shared
      homes.setdefault(policy.checkpoint if on else f"={name}", []).append(name)
    found = [
      sorted(names, key=lambda n: self.policies[n].adapter is None)
      for names in homes.values()
    ]
    return {"+".join(names): tuple(names) for names in found}

  @property
  def references(self) -> frozenset[str]:
    """The policies that losses keep others near to."""
    named = {self.policies[n].loss.reference for n in self.trained}
    return frozenset(named & self.policies.keys())

  def is_sampled(self, policy: str) -> bool:
    """Not so a policy that losses alone refer to."""
    return policy not in self.references or bool(self.agents_of(policy))

  @property
  def held_out(self) -> dict[str, Source]:
    """`eval.sources`, or the test splits of the training sources."""
    return self.eval.sources or {
      key: Source(source.name, "test", source.options)
      for key, source in self.data.sources.items()
    }

  def agents_of(self, policy: str) -> tuple[str, ...]:
    return tuple(n for n in self.agent_names if self.agents[n].policy == policy)


# -- the door ------------------------------------------------------------------


def read(
  path: str | pathlib.Path, overrides: Sequence[str] = (), mode: Mode = "train"
) -> Config:
  """Reads a config file, applies `a.b=value` overrides, and checks it all.

  The `config.json` that a run leaves in its workdir is such a file, too.

  Raises:
    ConfigError: with every fault found, one line each.
  """
  raw = load_file(path)
  for override in overrides:
    _override(raw, override)
  return check(build(raw), mode)


def resolve(
  source: "str | pathlib.Path | Mapping[str, Any] | Config",
  changes: Mapping[str, Any],
) -> Config:
  """The same from Python: a path, plain data, a ConfigDict or a Config.

  Args:
    source: of the config; it stays as it is.
    changes: values by dotted key; groups of keys may be dicts.

  Raises:
    ConfigError: as `read`.
  """
  if isinstance(source, Config):
    raw = to_dict(source)
  elif isinstance(source, (str, pathlib.Path)):
    raw = load_file(source)
  else:
    raw = _plain(source)
  for key, value in flatten(changes).items():
    _set(raw, key.split("."), value)
  return check(build(raw))


def policies_alone(
  checkpoints: Mapping[str, str], overrides: Sequence[str] = ()
) -> Config:
  """A config of policies without a team, to be sampled from.

  Args:
    checkpoints: by the policy's name.
    overrides: as in `read`.

  Raises:
    ConfigError: as `read`.
  """
  raw: dict[str, Any] = {
    "policies": {n: {"checkpoint": c} for n, c in checkpoints.items()},
    "agents": {},
    "orchestra": {"name": "single"},
    "environment": {"name": "math"},
    "data": {"sources": {}},
  }
  for override in overrides:
    _override(raw, override)
  config = build(raw)
  faults = _check_placement(config)
  for name, policy in config.policies.items():
    faults += _check_policy(f"policies.{name}", policy)
  _raise(faults)
  return config


def build(raw: Mapping[str, Any]) -> Config:
  """Typed and bounded, key by key; no check across keys."""
  faults: list[str] = []
  config = _build(Config, _plain(raw), "", faults)
  _raise(faults)
  return config


def to_dict(config: Any) -> Any:
  """Plain data (dicts, lists, numbers, strings), as JSON holds it."""
  if dataclasses.is_dataclass(config):
    return {
      f.name: to_dict(getattr(config, f.name))
      for f in dataclasses.fields(config)
    }
  if isinstance(config, Mapping):
    return {k: to_dict(v) for k, v in sorted(config.items())}
  if isinstance(config, (tuple, list)):
    return [to_dict(v) for v in config]
  return config


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """{"a": {"b": 1}} -> {"a.b": 1}."""
  flat = {}
  for key, value in tree.items():
    if isinstance(value, Mapping) and value:
      flat.update(flatten(value, f"{prefix}{key}."))
    else:
      flat[f"{prefix}{key}"] = value
  return flat


def _raise(faults: Sequence[str]) -> None:
  if faults:
    raise ConfigError("\n".join(faults))


def _plain(raw: Any) -> Any:
  if hasattr(raw, "to_dict"):  # ml_collections.ConfigDict
    raw = raw.to_dict()
  if isinstance(raw, Mapping):
    return {k: _plain(v) for k, v in raw.items()}
  return raw


def load_file(
  path: str | pathlib.Path, function: str = "get_config"
) -> dict[str, Any]:
  """What a function of a config file returns, as plain data; of a config.json
  itself.

  Raises:
    ConfigError: there is no such file or function, or it fails.
  """
  path = pathlib.Path(path)
  if path.name == "config.json" and path.is_file():
    try:
      raw = json.loads(path.read_bytes())
    except ValueError as e:
      raise ConfigError(f"--config={path}: is no JSON: {e}") from e
  elif path.suffix == ".py" and path.is_file():
    raw = _call(path, function)
  else:
    raise ConfigError(
      f"--config={path}: no such file; name a Python file with {function}()"
    )
  if not isinstance(raw, dict):
    raise ConfigError(
      f"--config={path}: gives a {type(raw).__name__}; write keys and values, "
      "in Python as a ConfigDict or a dict"
    )
  return raw


def _call(path: pathlib.Path, function: str) -> Any:
  """What a function of a Python file returns, as plain data."""
  spec = importlib.util.spec_from_file_location("drmas_jax_config", path)
  module = importlib.util.module_from_spec(spec)
  try:
    _check_twice(path)
    # As for a script: it may import what lies beside it.
    if (folder := str(path.resolve().parent)) not in sys.path:
      sys.path.insert(0, folder)
    spec.loader.exec_module(module)
    return _plain(getattr(module, function)())
  except ConfigError:
    raise
  except Exception as e:
    # A fault of the file, so of the config: its own line, not our traceback.
    frames = traceback.extract_tb(e.__traceback__)
    lines = [f.lineno for f in frames if f.filename == str(path)]
    line = getattr(e, "lineno", None) or (lines[-1] if lines else 1)
    raise ConfigError(f"{path}:{line}: {type(e).__name__}: {e}") from e


def _check_twice(path: pathlib.Path) -> None:
  """A key written twice in one dict: Python would keep only the last."""
  for node in ast.walk(ast.parse(path.read_text(), str(path))):
    if not isinstance(node, ast.Dict):
      continue
    keys = [k.value for k in node.keys if isinstance(k, ast.Constant)]
    for key in keys:
      if keys.count(key) > 1:
        raise ConfigError(
          f"{path}:{node.lineno}: {key!r} is written twice in one dict; "
          "rename or remove one"
        )


def _override(raw: dict[str, Any], text: str) -> None:
  key, sep, value = text.partition("=")
  parts = key.split(".")
  if not sep or not all(parts):
    raise ConfigError(f"override {text!r}: write --config.a.b=value")
  try:
    found = ast.literal_eval(value)
  except (ValueError, SyntaxError, TypeError):
    found = {"true": True, "false": False}.get(value, value)
  _set(raw, parts, found)


def _set(raw: dict[str, Any], parts: Sequence[str], value: Any) -> None:
  node = raw
  for part in parts[:-1]:
    if node.get(part) is None:
      node[part] = {}
    node = node[part]
    if not isinstance(node, dict):
      key = ".".join(parts)
      raise ConfigError(f"{key}: {part!r} is a value, not a group of keys")
  node[parts[-1]] = value


def _build(cls: type, raw: Any, path: str, faults: list[str]) -> Any:
  """A dataclass from a dict; faults are added to the list, not raised."""
  hints, names = _hints(cls), _names(cls)
  if not isinstance(raw, Mapping):
    faults.append(
      f"{path or 'config'}: {raw!r} is not a group of keys; write a dict with "
      + ", ".join(names)
    )
    return None
  prefix = f"{path}." if path else ""
  values = {}
  defaults = {f.name: f.default for f in dataclasses.fields(cls)}
  for key, value in raw.items():
    if key in hints:
      value = _filled(value, defaults[key])
      values[key] = _typed(hints[key], value, f"{prefix}{key}", faults)
    else:
      faults.append(_unknown(f"{prefix}{key}", str(key), names))
  for field in dataclasses.fields(cls):
    here = f"{prefix}{field.name}"
    if field.name in values:
      _check_bounds(field, values[field.name], here, faults)
    elif _required(field):
      faults.append(f"{here}: missing; add {_describe(hints[field.name])}")
      values[field.name] = None
  return cls(**values)


def _filled(value: Any, default: Any) -> Any:
  """A group of keys with what else its default here has: one that is written
  changes no other."""
  if not isinstance(value, Mapping) or not dataclasses.is_dataclass(default):
    return value
  own = {
    field.name: getattr(default, field.name)
    for field in dataclasses.fields(default)
    if field.default is not dataclasses.MISSING
    and getattr(default, field.name) != field.default
  }
  return own | dict(value)


def named(key: str, source: Source) -> Source:
  """The source with the name of its module filled in."""
  return dataclasses.replace(source, name=source.name or key)


def _required(field: dataclasses.Field) -> bool:
  missing = dataclasses.MISSING
  return field.default is missing and field.default_factory is missing


def _unknown(path: str, key: str, allowed: Sequence[str]) -> str:
  """The message; it names the nearest key here, or the place of this one."""
  close = difflib.get_close_matches(key.replace("-", "_"), allowed, n=1)
  places = [] if close else _places(key)
  if close:
    fix = f"did you mean {close[0]!r}?"
  elif places:
    fix = f"did you mean {' or '.join(places)}?"
  else:
    fix = "remove it"
  return f"{path}: unknown key; allowed are {', '.join(allowed)}; {fix}"


def _places(key: str) -> list[str]:
  """Where in the tree a key of that name, or of those initials, lives."""
  found = []
  for path in _paths(Config, ""):
    name = path.rpartition(".")[2]
    initials = "".join(word[:1] for word in name.split("_"))
    if key == name or (len(key) > 1 and key == initials):
      found.append(path)
  return found


def _paths(cls: type, prefix: str) -> list[str]:
  paths = []
  for name, hint in _hints(cls).items():
    paths.append(f"{prefix}{name}")
    args = [hint, *typing.get_args(hint)]
    named = typing.get_origin(hint) is dict
    for kind in filter(dataclasses.is_dataclass, args):
      paths += _paths(kind, f"{prefix}{name}.{'NAME.' if named else ''}")
  return paths


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
  return typing.get_type_hints(cls)


def _names(cls: type) -> list[str]:
  return [f.name for f in dataclasses.fields(cls)]


def _describe(hint: Any) -> str:
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if origin is Literal:
    return "one of " + ", ".join(repr(a) for a in args)
  if origin is types.UnionType:
    return " or ".join(_describe(a) for a in args)
  if origin is dict:
    return f"a dict of NAME: {_describe(args[1])}"
  if origin is tuple:
    return f"a list, each {_describe(args[0])}"
  if dataclasses.is_dataclass(hint):
    return "a dict with " + ", ".join(_names(hint))
  words = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "True or False",
    types.NoneType: "None",
  }
  return words.get(hint, "plain data (numbers, strings, lists, dicts)")


def _typed(hint: Any, value: Any, path: str, faults: list[str]) -> Any:
  """The value as the hint has it; what does not fit becomes a fault."""
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if dataclasses.is_dataclass(hint):
    return _build(hint, value, path, faults)
  if origin is types.UnionType:
    return _typed_as_one_of(args, value, path, faults)
  if origin is dict and isinstance(value, Mapping):
    return {
      str(k): _typed(args[1], v, f"{path}.{k}", faults)
      for k, v in value.items()
    }
  if origin is tuple and isinstance(value, (tuple, list)):
    return tuple(_typed(args[0], v, path, faults) for v in value)
  if not _fits(hint, value):
    faults.append(f"{path}: {value!r} is not allowed; write {_describe(hint)}")
  elif hint is float and abs(value) <= sys.float_info.max:
    return float(value)
  return value


def _typed_as_one_of(
  hints: Sequence[Any], value: Any, path: str, faults: list[str]
) -> Any:
  """The same for a union: as the first of its kinds that fits."""
  found: list[list[str]] = []
  for hint in hints:
    found.append([])
    made = _typed(hint, value, path, found[-1])
    if not found[-1]:
      return made
  if dataclasses.is_dataclass(hints[0]):
    faults += found[0]
  else:
    allowed = " or ".join(map(_describe, hints))
    faults.append(f"{path}: {value!r} is not allowed; write {allowed}")
  return value


def _fits(hint: Any, value: Any) -> bool:
  if typing.get_origin(hint) is Literal:
    return value in typing.get_args(hint)
  if hint is Any:
    return _is_plain(value)
  if isinstance(value, bool):
    return hint is bool
  if hint is float:
    return isinstance(value, (int, float))
  return isinstance(hint, type) and isinstance(value, hint)


def _is_plain(value: Any) -> bool:
  """Whether JSON holds it: a set or a function could not be compared."""
  if isinstance(value, Mapping):
    return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
  if isinstance(value, (tuple, list)):
    return all(_is_plain(v) for v in value)
  if isinstance(value, float):
    return math.isfinite(value)
  return value is None or isinstance(value, (bool, int, str))


def _check_bounds(
  field: dataclasses.Field, value: Any, path: str, faults: list[str]
) -> None:
  if not field.metadata or not isinstance(value, (int, float)):
    return
  compare = {
    ">=": lambda bound: value >= bound,
    ">": lambda bound: value > bound,
    "<=": lambda bound: value <= bound,
    "<": lambda bound: value < bound,
  }
  bounds = {k: v for k, v in field.metadata.items() if v is not None}
  if abs(value) <= sys.float_info.max and all(
    compare[k](v) for k, v in bounds.items()
  ):
    return
  allowed = " and ".join(
    f"{k} {v if isinstance(v, int) else f'{v:g}'}" for k, v in bounds.items()
  )
  faults.append(
    f"{path}: {value!r:.80} is out of range; write a finite value {allowed}"
  )


# -- checks across keys --------------------------------------------------------


def check(config: Config, mode: Mode = "train") -> Config:
  """Every check that needs two keys, or a name to be looked up.

  Imports the named roles, orchestra and environment (none of which may import
  anything heavy), so that a name or option that does not exist fails here.

  Raises:
    ConfigError: with every fault found, one line each.
  """
  asks = mode not in ("sft", "check")  # whoever is remote
  if mode == "check":
    mode = "train" if config.trained else "eval"
  faults: list[str] = []
  for name in (*config.policies, *config.agents):
    if not name.isidentifier():
      faults.append(
        f"{name!r}: not allowed as the name of a policy or agent; it becomes "
        "part of metric and file names: write letters, digits and _"
      )
  for name, agent in config.agents.items():
    faults += _check_agent(f"agents.{name}", agent, config, mode)
  for name, policy in config.policies.items():
    faults += _check_use(name, config)
    faults += _check_policy(
      f"policies.{name}", policy, name in config.references
    )
  if asks:
    faults += _check_keys(config)
  faults += check_backbones(config, mode)
  faults += _check_mode(config, mode)
  if mode in ("train", "sft"):
    faults += _check_writers(config.logging.writers)
  if mode == "train" and not faults:
    faults += _check_importance(config)
  faults += _check_tables(config)
  faults += _check_health(config.health)
  faults += _check_parts(config, mode)
  faults += _check_placement(config)
  _raise(faults)
  return config


def _check_use(name: str, config: Config) -> list[str]:
  """A policy is an agent's, who trains it unless it is frozen, or a
  reference."""
  agents = config.agents_of(name)
  if not agents and name not in config.references:
    return [
      f"policies.{name}: no agent uses it; remove it, or set "
      f"agents.NAME.policy={name!r}"
    ]
  faults, policy = [], config.policies[name]
  if agents and policy.trained:
    if not any(config.agents[a].train for a in agents):
      faults.append(
        f"policies.{name}: train=False for all its agents "
        f"({', '.join(agents)}), so nothing would train it; set frozen=True, "
        "or train=True for one"
      )
    faults += _check_reference(name, config)
  return faults


def _check_reference(name: str, config: Config) -> list[str]:
  """What a trained policy is kept near to."""
  loss, path = config.policies[name].loss, f"policies.{name}.loss"
  frozen = sorted(n for n, p in config.policies.items() if p.frozen)
  add = f"{', '.join(frozen) or 'none'}; add one with frozen=True"
  if loss.kl_weight and not loss.reference:
    return [
      f"{path}.kl_weight: {loss.kl_weight:g} needs a reference; write "
      f"{path}.reference=NAME of a frozen policy; there are {add}"
    ]
  if loss.reference and loss.reference not in frozen:
    what = "trained" if loss.reference in config.policies else "no policy"
    return [
      f"{path}.reference: {loss.reference!r} is {what}; allowed are frozen "
      f"policies: {add}"
    ]
  if not loss.reward_weight and not loss.kl_weight:
    return [
      f"{path}.reward_weight: 0 without kl_weight, so nothing would be "
      "trained; write a value > 0, or kl_weight > 0 and a reference"
    ]
  if not loss.reward_weight and loss.kl == "k1":
    return [
      f"{path}.kl: 'k1' has no gradient on average, so with reward_weight=0 "
      "nothing would be trained; write 'k2'"
    ]
  return []


def _check_mode(config: Config, mode: Mode) -> list[str]:
  faults = []
  if mode in ("train", "sft") and not config.trained:
    faults.append(
      "policies: all are frozen or remote, so nothing would be trained; set "
      "frozen=False for one, or use --mode=eval"
    )
  if mode == "eval" and not config.eval.num_tasks:
    faults.append("eval.num_tasks: 0 evaluates nothing; write a value >= 1")
  if config.eval.final_num_tasks and not config.eval.num_tasks:
    faults.append(
      "eval.final_num_tasks: has no effect with eval.num_tasks=0; remove it"
    )
  for key in ("num_tasks", "k"):
    always, final = (getattr(config.eval, n) for n in (key, f"final_{key}"))
    if mode == "train" and 0 < final < always:
      faults.append(
        f"eval.final_{key}: {final} is less than eval.{key}={always}, so that "
        "the last step could not be compared with the others; raise it, or "
        "write 0 for the same"
      )
  return faults


def _check_writers(names: Sequence[str]) -> list[str]:
  path, faults = "logging.writers", []
  for name in sorted(set(names)):
    if names.count(name) > 1:
      faults.append(f"{path}: {name!r} is there twice; remove one")
    try:
      _function("writers", name, "make")
    except ConfigError as e:
      faults.append(f"{path}: {e}")
    if name == "wandb" and importlib.util.find_spec("wandb") is None:
      faults.append(
        f"{path}: 'wandb' needs a package that is not installed; pip install "
        "'drmas-jax[wandb]', or remove it"
      )
  if "jsonl" not in names:
    faults.append(
      f"{path}: {list(names)} lacks 'jsonl', which the report, compare and "
      "resume read; add it"
    )
  return faults


_LEAST_TEMPERATURE = 0.01  # to learn at: below, all mass is on one token


def _check_agent(
  path: str, agent: Agent, config: Config, mode: Mode
) -> list[str]:
  if agent.policy not in config.policies:
    return [
      f"{path}.policy: {agent.policy!r} is no policy; allowed are "
      f"{', '.join(sorted(config.policies))}; add it to policies or rename"
    ]
  faults, policy = [], config.policies[agent.policy]
  if policy.remote is None and agent.max_tokens >= policy.engine.max_length:
    faults.append(
      f"{path}.max_tokens: {agent.max_tokens} leaves no room for a prompt; "
      f"write less than policies.{agent.policy}.engine.max_length="
      f"{policy.engine.max_length}"
    )
  temperature = agent.sampling.temperature
  if mode == "train" and policy.trained and temperature < _LEAST_TEMPERATURE:
    faults.append(
      f"{path}.sampling.temperature: {temperature:g} is greedy and teaches "
      f"nothing; write a value >= {_LEAST_TEMPERATURE} (eval.sampling may be "
      "greedy)"
    )
  faults += _check_agent_effect(path, agent, policy)
  if agent.overlong_tokens > agent.max_tokens:
    faults.append(
      f"{path}.overlong_tokens: {agent.overlong_tokens} is more than "
      f"max_tokens={agent.max_tokens}, so that completions without a token "
      "would be overlong; lower it"
    )
  uncorrected = policy.trained and policy.loss.importance == "none"
  if mode == "train" and uncorrected and _narrow(agent.sampling):
    faults.append(
      f"{path}.sampling: top_k={agent.sampling.top_k}, top_p="
      f"{agent.sampling.top_p:g} would train on tokens drawn from another "
      "distribution than the loss has; write 0 and 1 (eval.sampling is free), "
      f"or policies.{agent.policy}.loss.importance='token'"
    )
  if policy.remote is None:
    faults += _check_prompt(path, agent, policy.engine)
  try:
    role = load_role(agent.role)
  except ConfigError as e:
    return [*faults, f"{path}.role: {e}"]
  if agent.template not in role.templates:
    faults.append(
      f"{path}.template: {agent.template!r} is no template of {agent.role}; "
      f"allowed are {', '.join(role.templates)}; rename it"
    )
  return faults + _check_options(f"{path}.options", role.parse, agent.options)


# Keys of an agent that are about scores, and about scores, losses and ids.
_OF_SCORES = ("invalid_penalty", "overlong_tokens", "overlong_penalty")
_OF_ROWS = (*_OF_SCORES, "train", "loss_weight", "max_prompt_tokens", "cut")


def _check_agent_effect(path: str, agent: Agent, policy: Policy) -> list[str]:
  """Keys of an agent that were set and would change nothing."""
  idle = {}
  if policy.remote is not None:
    why = f"policies.{agent.policy}.remote"
    idle = dict.fromkeys(_OF_ROWS, why)
  elif policy.frozen:
    why = f"policies.{agent.policy}.frozen=True"
    idle = dict.fromkeys(("train", "loss_weight"), why)
  elif not agent.train:
    idle["loss_weight"] = "train=False"
  if not agent.overlong_tokens:
    idle["overlong_penalty"] = "overlong_tokens=0"
  elif not agent.overlong_penalty:
    idle["overlong_tokens"] = "overlong_penalty=0"
  return [
    f"{path}.{key}: has no effect with {why}; remove it"
    for key, why in idle.items()
    if getattr(agent, key) != _default(Agent, key)
  ]


def _narrow(sampling: Sampling) -> bool:
  """Whether some tokens are never drawn."""
  return sampling.top_k > 0 or sampling.top_p < 1


def _check_importance(config: Config) -> list[str]:
  """Weights that would be 1 everywhere, and bounds that nothing reaches."""
  faults = []
  for name, policy in config.policies.items():
    path, loss = f"policies.{name}.loss", policy.loss
    # The old log-probs are then the behaviour's but for what top_k and top_p
    # keep, and no factor is over 1.
    sampler = policy.trained and policy.old_logprobs == "sampler"
    if not sampler or loss.importance == "none":
      continue
    if not any(
      _narrow(config.agents[a].sampling) for a in config.agents_of(name)
    ):
      faults.append(
        f"{path}.importance: has no effect with old_logprobs='sampler' and "
        "top_k=0, top_p=1 for all its agents; remove it, or write "
        "old_logprobs='learner'"
      )
      continue
    if loss.importance == "rejection":
      faults.append(
        f"{path}.importance: 'rejection' rejects nothing with "
        "old_logprobs='sampler', where no factor is over 1; write 'sequence' "
        "or 'token', or old_logprobs='learner'"
      )
    if loss.importance_bound != _default(Loss, "importance_bound"):
      faults.append(
        f"{path}.importance_bound: has no effect with old_logprobs='sampler', "
        "where no factor is over 1; remove it, or write "
        "old_logprobs='learner'"
      )
  return faults


def prompt_room(agent: Agent, engine: Engine) -> int:
  """The most tokens that an engine takes as a prompt of an agent."""
  room = engine.max_length - agent.max_tokens
  return min([room, *engine.prefill_buckets[-1:]])


def _check_prompt(path: str, agent: Agent, engine: Engine) -> list[str]:
  """A limit that could never be reached."""
  room = prompt_room(agent, engine)
  if not agent.max_prompt_tokens > room > 0:
    return []
  return [
    f"{path}.max_prompt_tokens: {agent.max_prompt_tokens} is more than the "
    f"{room} that max_tokens={agent.max_tokens}, engine.max_length="
    f"{engine.max_length} and engine.prefill_buckets leave; write at most "
    "that, or raise engine.max_length"
  ]


def _check_policy(
  path: str, policy: Policy, is_reference: bool = False
) -> list[str]:
  if policy.remote is not None:
    return _check_remote(path, policy)
  faults, room = [], policy.engine.max_length
  if not policy.checkpoint:
    faults.append(
      f"{path}.checkpoint: missing; write a folder or a name of the hub, or "
      f"{path}.remote=dict(base_url=.., model=..) for an endpoint"
    )
  if policy.update_phase >= policy.update_every:
    faults.append(
      f"{path}.update_phase: {policy.update_phase} would never come; write "
      f"less than update_every={policy.update_every}"
    )
  buckets = {
    "engine.prefill_buckets": policy.engine.prefill_buckets,
    "row_buckets": policy.row_buckets,
  }
  for key, lengths in buckets.items():
    if list(lengths) != sorted(set(lengths)) or any(n < 1 for n in lengths):
      faults.append(f"{path}.{key}: {lengths} must be rising lengths >= 1")
    elif lengths and lengths[-1] > room:
      faults.append(
        f"{path}.{key}: {lengths[-1]} is more than engine.max_length={room}; "
        "lower it"
      )
    elif lengths and key == "row_buckets" and lengths[-1] < room:
      faults.append(
        f"{path}.{key}: the last, {lengths[-1]}, cannot hold a row of "
        f"engine.max_length={room}; add {room}"
      )
  if 0 < policy.engine.cache_tokens < room:
    faults.append(
      f"{path}.engine.cache_tokens: {policy.engine.cache_tokens} cannot hold "
      f"one sequence of engine.max_length={room}; write at least that, or 0 "
      "for room in every slot"
    )
  return faults + _check_effect(path, policy, is_reference)


# What a request consists of, and what its reader relies on.
_FIXED = ("messages", "model", "n", "stream")


def _check_remote(path: str, policy: Policy) -> list[str]:
  """A policy that is elsewhere, and the other keys, which it has no use for."""
  url_fault = importlib.import_module(f"{__package__}.http").url_fault
  remote, faults = policy.remote, []
  if fault := url_fault(remote.base_url):
    faults.append(f"{path}.remote.base_url{fault}")
  elif "?" in remote.base_url or "#" in remote.base_url:
    faults.append(
      f"{path}.remote.base_url={remote.base_url!r}: is followed by "
      "/chat/completions, so it can have no ? and no #; leave them out"
    )
  faults += [
    f"{path}.remote.options.{key}: is not an option of a request here; remove "
    "it"
    for key in _FIXED
    if key in remote.options
  ]
  others = (f.name for f in dataclasses.fields(Policy) if f.name != "remote")
  faults += [
    f"{path}.{key}: has no effect with remote; remove it, or remote"
    for key in others
    if getattr(policy, key) != _default(Policy, key)
  ]
  return faults


def _check_keys(config: Config) -> list[str]:
  """Of endpoints. What is written in the place of a name may be the key itself,
  so it is not shown."""
  return [
    f"policies.{name}.remote.key_env: names no environment variable that is "
    "set to a key (printable ASCII without spaces); export one, and write its "
    "name here, not the key"
    for name, remote in config.remotes.items()
    if remote.key_env and not _is_key(os.environ.get(remote.key_env, ""))
  ]


def _is_key(text: str) -> bool:
  return text.isascii() and text.isprintable() and text.split() == [text]


def _check_effect(
  path: str, policy: Policy, is_reference: bool = False
) -> list[str]:
  """Keys that were set and would change nothing."""
  idle = _idle_of_policy(policy)
  if is_reference:  # it scores the others' rows
    for key in ("compute_dtype", "attention"):
      idle.pop(key, None)
  if policy.trained:
    if policy.update_on_zero_signal and policy.loss.beyond_rewards:
      idle["update_on_zero_signal"] = "loss.entropy_weight or loss.kl_weight"
    idle |= _idle_of_optimizer(policy.optimizer)
    idle |= _idle_of_loss(policy.loss)
  return [
    f"{path}.{key}: has no effect with {why}; remove it"
    for key, why in idle.items()
  ]


def _idle_of_policy(policy: Policy) -> dict[str, str]:
  """Key: with what it has no effect."""
  if not policy.frozen:
    return {}
  trained = (
    *("optimizer", "loss", "old_logprobs", "row_buckets"),
    *("remat", "attention", "micro_tokens", "compute_dtype"),
    "update_on_zero_signal",
    *("num_updates", "num_epochs", "update_every", "update_phase"),
  )
  idle = [k for k in trained if getattr(policy, k) != _default(Policy, k)]
  return dict.fromkeys(idle, "frozen=True")


def _idle_of_optimizer(optimizer: Optimizer) -> dict[str, str]:
  unread = {}
  if optimizer.schedule == "constant":
    unread = dict.fromkeys(
      ("decay_steps", "final_fraction"), "optimizer.schedule='constant'"
    )
  reads = ast.literal_eval(_table("optimizers", "READS"))
  optional = {option for names in reads.values() for option in names}
  # An unknown name is its own fault.
  for option in sorted(optional - set(reads.get(optimizer.name, optional))):
    unread[option] = f"optimizer.name={optimizer.name!r}"
  return {
    f"optimizer.{key}": why
    for key, why in unread.items()
    if getattr(optimizer, key) != _default(Optimizer, key)
  }


def _idle_of_loss(loss: Loss) -> dict[str, str]:
  unread = {}
  if loss.name != "clipped":
    unread["dual_clip"] = f"loss.name={loss.name!r}"
  if loss.aggregation != "sequence_sum":
    unread["divisor"] = f"loss.aggregation={loss.aggregation!r}"
  if loss.importance == "none":
    unread["importance_bound"] = "loss.importance='none'"
  if not loss.kl_weight:
    unread |= dict.fromkeys(("kl", "reference"), "loss.kl_weight=0")
  if not loss.reward_weight:
    rest = ("name", "clip_low", "clip_high", "dual_clip")
    unread |= dict.fromkeys(rest, "loss.reward_weight=0")
  return {
    f"loss.{key}": why
    for key, why in unread.items()
    if getattr(loss, key) != _default(Loss, key)
  }


def _default(cls: type, name: str) -> Any:
  field = next(f for f in dataclasses.fields(cls) if f.name == name)
  if field.default is dataclasses.MISSING:
    return field.default_factory()
  return field.default


def check_backbones(config: Config, mode: Mode = "train") -> list[str]:
  """Policies with adapters, and the weights that they share."""
  faults = []
  for name, policy in config.policies.items():
    path, adapter = f"policies.{name}.adapter", policy.adapter
    if adapter is None:
      continue
    if policy.frozen:
      faults.append(
        f"{path}: has no effect with frozen=True; remove one of the two"
      )
    if mode == "sft":
      faults.append(
        f"{path}: --mode=sft trains all weights; remove it, or train with "
        "--mode=train"
      )
    if len(set(adapter.targets)) != max(1, len(adapter.targets)):
      faults.append(
        f"{path}.targets: {adapter.targets}: allowed is each projection once, "
        "and at least one; change it"
      )
  for first, *others in config.backbones.values():
    for name in others:
      faults += _check_alike(config, first, name)
  return faults


def _check_alike(config: Config, first: str, name: str) -> list[str]:
  """Two policies on one backbone."""
  policy = config.policies[name]
  own = {"checkpoint", "frozen", "update_every", "update_phase"}
  own.add("optimizer.learning_rate")
  if policy.frozen:
    shared = {"engine", "rollout_dtype", "chat_template_kwargs"}
    # A reference scores as the others do, but need not say it.
    numerics = ("compute_dtype", "attention")
    shared |= {k for k in numerics if getattr(policy, k) != _default(Policy, k)}
  else:
    shared = {f.name for f in dataclasses.fields(Policy)}
  want, found = (flatten(to_dict(config.policies[n])) for n in (first, name))
  return [
    f"policies.{name}.{key}: {found.get(key)!r} is not the {want.get(key)!r} "
    f"of {first!r}, with which it shares the weights of "
    f"{policy.checkpoint!r}; write that, or give one of the two a copy of the "
    "checkpoint"
    for key in sorted(want.keys() | found.keys())
    if key.partition(".")[0] in shared
    and key not in own
    and found.get(key) != want.get(key)
  ]


def _check_tables(config: Config) -> list[str]:
  """The names of estimator, losses and optimizers."""
  rows = [("advantage.name", config.advantage.name, "advantages", "ESTIMATORS")]
  for name, policy in config.policies.items():
    path = f"policies.{name}.loss"
    rows.append((f"{path}.name", policy.loss.name, "losses", "LOSSES"))
    rows.append((f"{path}.kl", policy.loss.kl, "losses", "KL"))
    path, rule = f"policies.{name}.optimizer.name", policy.optimizer.name
    rows.append((path, rule, "optimizers", "OPTIMIZERS"))
  faults = _check_advantage(config.advantage)
  for path, name, module, table in rows:
    known = table_names(module, table)
    if name not in known:
      faults.append(
        f"{path}: {name!r} not found; allowed are {', '.join(known)}; "
        f"rename it, or add a row to {table} in {module}.py"
      )
  return faults


def _check_health(health: Health) -> list[str]:
  known = table_names("health", "CHECKS")
  return [
    f"health.stop_on: {name!r} is no alarm; allowed are {', '.join(known)}; "
    "rename or remove it"
    for name in health.stop_on
    if name not in known
  ]


def _check_advantage(advantage: Advantage) -> list[str]:
  """Options without an effect."""
  reads = ast.literal_eval(_table("advantages", "READS"))
  if advantage.name not in reads:
    return []  # the name is the fault
  faults = []
  optional = {option for names in reads.values() for option in names}
  for option in sorted(optional - set(reads[advantage.name])):
    if getattr(advantage, option) != _default(Advantage, option):
      reader = next(name for name, names in reads.items() if option in names)
      faults.append(
        f"advantage.{option}: has no effect with advantage.name="
        f"{advantage.name!r}; remove it, or write name={reader!r}"
      )
  if faults:
    return faults
  if advantage.by_turn and advantage.count == "episode":
    faults.append(
      "advantage.by_turn: has no effect with advantage.count='episode', whose "
      "samples are of no one turn; remove one of the two"
    )
  kind = advantage.over, advantage.count
  free = "over" in reads[advantage.name]
  if advantage.pool_agents and free and kind != ("team", "episode"):
    faults.append(
      f"advantage.pool_agents: has no effect with advantage.over={kind[0]!r} "
      f"and count={kind[1]!r}; remove it, or write 'team' and 'episode'"
    )
  return faults


def _check_parts(config: Config, mode: Mode) -> list[str]:
  """Orchestra, environment and data sets: names and options."""
  faults = []
  parts = [
    ("orchestra", "orchestras", "run", config.orchestra),
    ("environment", "environments", "make", config.environment),
  ]
  for group in ("data", "eval"):
    sources = getattr(config, group).sources
    parts += [
      (f"{group}.sources.{key}", "datasets", "make", named(key, source))
      for key, source in sources.items()
    ]
    faults += [
      f"{group}.sources: {key!r} is not allowed as a key; it becomes part of "
      "metric and file names: write letters, digits and _, and not 'macro'"
      for key in sources
      if not key.isidentifier() or key == "macro"  # the mean over sets
    ]
  faults += _check_groups(config, mode)
  if not config.data.sources:
    faults.append("data.sources: empty; add an entry, such as gsm8k=dict(..)")
  if len(config.data.sources) == 1:
    faults += [
      f"data.sources.{key}.weight: has no effect with one source; remove it"
      for key, source in config.data.sources.items()
      if source.weight != _default(TrainSource, "weight")
    ]
  for path, kind, name, part in parts:
    try:
      function = _function(kind, part.name, name)
      found = _check_options(f"{path}.options", function, part.options)
      faults += found or _own_check(f"{path}.options", kind, part)
    except ConfigError as e:
      faults.append(f"{path}.name: {e}")
  if mode == "sft" and not faults:
    faults += _check_demonstrations(config)
  if not faults:
    try:
      roles = _function("orchestras", config.orchestra.name, "ROLES")
      module = load_module("environments", config.environment.name)
      faults += _check_roles(roles, vars(module).get("JUDGES", ()), config)
    except ConfigError as e:
      faults.append(f"orchestra.name: {e}")
  return faults


def _check_groups(config: Config, mode: Mode) -> list[str]:
  """Groups that are played again, and those of one episode, which is compared
  with nothing (rule 4)."""
  data, advantage = config.data, config.advantage
  alone = data.group_size == 1
  if data.resample and advantage.name == "rae":
    return [
      "data.resample: with advantage.name='rae' groups whose rewards are equal "
      "teach, too, and its averages are of all; remove it"
    ]
  if data.resample and alone:
    return [
      "data.resample: the one reward of a group of data.group_size=1 tells "
      "nothing apart, so every group would be played again; remove it, or "
      "raise group_size"
    ]
  compared = advantage.name != "rae" and advantage.singleton == "zero"
  if mode != "train" or not (alone and compared):
    return []
  for name in config.trained:
    if not config.policies[name].loss.beyond_rewards:
      return [
        f"data.group_size: 1 leaves {name!r} nothing to learn from, since an "
        "episode is compared with the others of its group; raise it, or write "
        "advantage.name='rae', which compares with a moving average"
      ]
  return []


def _check_demonstrations(config: Config) -> list[str]:
  faults = []
  for key, source in config.data.sources.items():
    try:
      function = _function(
        "datasets", named(key, source).name, "demonstrations"
      )
      faults += _check_options("sft.options", function, config.sft.options)
    except ConfigError as e:
      faults.append(f"data.sources.{key}.name: {e}, as --mode=sft needs it")
  return faults


def _own_check(path: str, kind: str, part: Any) -> list[str]:
  """What a module's own `check(*, option=..)` finds in values, if it has one.

  It raises a ValueError that names the option.
  """
  check = getattr(load_module(kind, part.name), "check", None)
  try:
    if check is not None:
      check(**part.options)
  except ValueError as e:
    return [f"{path}.{e}"]
  except Exception as e:
    return [f"{path}: {_broken(f'{part.name}.check', e)}"]
  return []


def _function(kind: str, module: str, name: str) -> Any:
  """What a module of that kind must define."""
  found = getattr(load_module(kind, module), name, None)
  if found is None:
    raise ConfigError(f"{module!r} has no {name}; define it")
  return found


def _check_roles(
  roles: Sequence[str], judges: Sequence[str], config: Config
) -> list[str]:
  """Agents that the orchestra calls, and those that the environment asks."""
  orchestra = f"the orchestra {config.orchestra.name!r}"
  asks = f"the environment {config.environment.name!r} asks"
  callers = dict.fromkeys(judges, asks)
  callers |= dict.fromkeys(roles, f"{orchestra} calls")
  faults = [
    f"agents.{role}: missing; {caller} it: add an entry"
    for role, caller in callers.items()
    if role not in config.agents
  ]
  for name, agent in config.agents.items():
    if name not in callers:
      faults.append(
        f"agents.{name}: {orchestra} never calls it; allowed are "
        f"{', '.join(callers)}; remove it"
      )
    if name in judges and config.policies[agent.policy].trained:
      faults.append(
        f"agents.{name}.policy: {agent.policy!r} is trained, and {asks} the "
        "agent about rewards; allowed are frozen and remote policies; name one"
      )
    elif callers.get(name) == asks and agent.policy not in config.remotes:
      faults += [
        f"agents.{name}.{key}: has no effect on an agent that {asks}; remove it"
        for key in _OF_SCORES
        if getattr(agent, key) != _default(Agent, key)
      ]
  return faults


def _check_placement(config: Config) -> list[str]:
  faults, placement = [], config.placement
  if placement.timeout_s <= config.rollout.turn_timeout_s:
    faults.append(
      f"placement.timeout_s: {placement.timeout_s:g} is not more than "
      f"rollout.turn_timeout_s={config.rollout.turn_timeout_s:g}, so a host "
      "whose turn takes long would be given up by the others; raise it"
    )
  for name, share in placement.shares.items():
    path = f"placement.shares.{name}"
    if name not in config.policies:
      faults.append(_unknown(path, name, sorted(config.policies)))
    elif name in config.remotes:
      faults.append(f"{path}: has no effect on a remote policy; remove it")
    if share < 1:
      faults.append(f"{path}: {share} is out of range; write a value >= 1")
  if placement.shares and placement.strategy == "shared":
    faults.append(
      "placement.shares: has no effect where strategy='shared'; remove it, or "
      "write strategy='split' or 'columns'"
    )
  for key in ("train_mesh", "rollout_mesh"):
    sizes = to_dict(getattr(placement, key))
    if list(sizes.values()).count(0) > 1:
      faults.append(
        f"placement.{key}: {sizes} leaves more than one axis open; write 0 "
        "for one of them"
      )
  return faults


def _check_options(
  path: str, function: Callable, options: Mapping[str, Any]
) -> list[str]:
  """Options are the keyword-only parameters of the function they reach.

  Their types are checked where the annotation is of plain ones.
  """
  faults: list[str] = []
  parameters = {
    p.name: p
    for p in inspect.signature(function).parameters.values()
    if p.kind is p.KEYWORD_ONLY
  }
  hints = typing.get_type_hints(function)
  for key, value in options.items():
    if key not in parameters:
      faults.append(
        _unknown(f"{path}.{key}", key, list(parameters) or ["none"])
      )
    elif _is_plain_hint(hints.get(key)):
      _typed(hints[key], value, f"{path}.{key}", faults)
  for key, parameter in parameters.items():
    if parameter.default is parameter.empty and key not in options:
      faults.append(f"{path}.{key}: missing; add it")
  return faults


def _is_plain_hint(hint: Any) -> bool:
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if origin in (dict, types.UnionType):
    return all(map(_is_plain_hint, args))
  return origin is Literal or hint in (int, float, str, bool, types.NoneType)


# -- names to modules ----------------------------------------------------------


def table_names(module: str, table: str) -> tuple[str, ...]:
  """The keys of a table of functions, such as `losses.LOSSES`.

  Read from the source: the config check must not import jax.
  """
  return tuple(ast.literal_eval(key) for key in _table(module, table).keys)


def _table(module: str, table: str) -> ast.Dict:
  path = pathlib.Path(__file__).with_name(f"{module}.py")
  for node in ast.parse(path.read_text()).body:
    target = node.targets[0] if isinstance(node, ast.Assign) else None
    target = node.target if isinstance(node, ast.AnnAssign) else target
    if isinstance(target, ast.Name) and target.id == table:
      return node.value
  raise AssertionError(f"{module}.py has no table {table}")


def load_module(kind: str, name: str) -> Any:
  """`drmas_jax.<kind>.<name>`, or a module of the user's own by dotted name.

  A row of `datasets.public.SETS` stands for a module: it has the same `make`.

  Raises:
    ConfigError: where there is neither; it lists those there are.
  """
  if name in (rows := _rows(kind)):
    return rows[name]
  target = name if "." in name else f"{__package__}.{kind}.{name}"
  if not all(part.isidentifier() for part in target.split(".")):
    raise ConfigError(_not_found(kind, name))
  try:
    return importlib.import_module(target)
  except ModuleNotFoundError as e:
    if f"{target}.".startswith(f"{e.name}."):
      raise ConfigError(_not_found(kind, name)) from e
    raise ConfigError(_broken(name, e)) from e
  except Exception as e:
    raise ConfigError(_broken(name, e)) from e


def _broken(name: str, e: Exception) -> str:
  """The module is there, and fails."""
  where = usercode.line(e)
  return f"{name!r} fails{where and f' at {where}'}: {type(e).__name__}: {e}"


def _rows(kind: str) -> Mapping[str, Any]:
  """What a table of the folder holds, where files would all be alike."""
  if kind == "writers":
    return importlib.import_module(f"{__package__}.writers").WRITERS
  if kind != "datasets":
    return {}
  return importlib.import_module(f"{__package__}.datasets.public").SETS


def _not_found(kind: str, name: str) -> str:
  folder = pathlib.Path(__file__).parent / kind
  files = {p.stem for p in folder.glob("*.py") if not p.stem.startswith("_")}
  files -= {kind.removesuffix("s"), "public"}  # what the others share
  known = sorted(files | set(_rows(kind)))
  return (
    f"{name!r} not found; allowed are {', '.join(known)}, or a module of your "
    "own that Python can import, such as 'my_pkg.my_module'"
  )


def load_role(name: str) -> Any:
  """The `types.Agent` value that "module.role" names."""
  module_name, _, role = name.rpartition(".")
  if not module_name:
    raise ConfigError(f"{name!r} must be 'module.role', such as 'math.solver'")
  module = load_module("agents", module_name)
  kind = importlib.import_module(f"{__package__}.types").Agent
  known = {n: v for n, v in vars(module).items() if isinstance(v, kind)}
  if role not in known:
    raise ConfigError(
      f"{module_name!r} has no role {role!r}; allowed are {', '.join(known)}"
    )
  return known[role]
