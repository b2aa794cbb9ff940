"""One side of `updates.py`, in a process of its own.

    PYTHON updates_peer.py {this,tunix,torch} SIZES

SIZES is JSON: the fields of `rollouts_lab.SIZES`. Jobs come on stdin, a line of
JSON each, and are answered on stdout with seconds, the most memory so far, and
what there was in use before:

    {"do": "update", "rows": [[prompt, completion], ..], ..}
    {"wall": .., "cpu": .., "rss_gb": .., "before_gb": ..}

A job is one optimizer step on random rows with so many tokens each, or with
"score" their log-probs under the same weights; with "group": 8, so many of them
have one prompt. All sides take the clipped loss with 0.04 times k3 to given
reference log-probs, AdamW, and float32.
`this` reads "micro_tokens", and packs the rows unless "packed" is false. A peer
pads prompts and completions to the longest that it has room for, google-tunix
at the left and right of [64, 128]; torch reads "micro", rows at a time, and
"threads".
"""

import json
import os
import pathlib
import sys
import time

PAD, OLD, KL_WEIGHT, RATE = 0, -7.6, 0.04, 1e-6


def random_rows(rows, vocab_size, group=1):
  """Ids of each row, and an advantage; `group` rows have one prompt."""
  import numpy as np

  rng = np.random.default_rng(0)
  ids = [
    [rng.integers(1, vocab_size - 1, n).astype(np.int32) for n in pair]
    for pair in rows
  ]
  for i, row in enumerate(ids):
    row[0] = ids[i - i % group][0]
  return ids, rng.normal(size=len(rows)).astype(np.float32)


def rss_gb(kind: str) -> float:
  """What this process holds, "VmRSS", or has held at most, "VmHWM" (ru_maxrss
  begins at that of the process which started it)."""
  status = pathlib.Path("/proc/self/status").read_text().splitlines()
  (kb,) = (line.split()[1] for line in status if line.startswith(kind + ":"))
  return int(kb) / 2**20


# -- this project --------------------------------------------------------------


def this(sizes: dict):
  """See `updates_this`."""
  os.environ["JAX_PLATFORMS"] = "cpu"
  import updates_this

  side = updates_this.Side.make(sizes, KL_WEIGHT, RATE)
  rollouts = updates_this.Rollouts()

  def run(job):
    do, options = job["do"], {k: v for k, v in job.items() if k != "do"}
    if do == "product":
      return updates_this.product(**options)
    if do == "rollout":
      return rollouts.run(**options)
    drawn = options.pop("rows"), side.spec.vocab_size, options.pop("group", 1)
    rows, gains = random_rows(*drawn)
    return getattr(side, do)(side.arguments(rows, gains, OLD, **options))

  return run


# -- google-tunix --------------------------------------------------------------


def tunix(sizes: dict):
  """The jitted step of its GRPO learner, all rows at once."""
  os.environ["JAX_PLATFORMS"] = "cpu"
  import jax
  import jax.numpy as jnp
  import numpy as np
  import optax
  import rollouts_peer
  from flax import nnx
  from tunix.rl import rl_cluster
  from tunix.rl.grpo import grpo_learner
  from tunix.rl.rollout import base_rollout

  made = rollouts_peer.tunix_model(sizes)
  prompt, new = sizes["length"] // 3, 2 * sizes["length"] // 3
  kinds = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Auto
  mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=kinds)
  role = rl_cluster.Role
  cluster = rl_cluster.RLCluster(
    actor=made,
    reference=rollouts_peer.tunix_model(sizes),
    tokenizer=rollouts_peer.Numbers(sizes["vocab_size"]),
    cluster_config=rl_cluster.ClusterConfig(
      role_to_mesh=dict.fromkeys(
        (role.ACTOR, role.REFERENCE, role.ROLLOUT), mesh
      ),
      rollout_engine="vanilla",
      offload_to_cpu=False,
      training_config=rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.adamw(RATE), eval_every_n_steps=10**9
      ),
      rollout_config=base_rollout.RolloutConfig(
        max_tokens_to_generate=new,
        max_prompt_length=prompt,
        kv_cache_size=prompt + new,
      ),
    ),
  )
  learner = grpo_learner.GRPOLearner(
    rl_cluster=cluster,
    reward_fns=lambda prompts, completions, **_: [0.0] * len(prompts),
    algo_config=grpo_learner.GRPOConfig(
      num_generations=8, num_iterations=1, beta=KL_WEIGHT
    ),
  )
  del learner  # it has told the trainer its loss
  with mesh:
    step, _ = cluster.actor_trainer.jit_train_and_eval_step()

  def run(job):
    ids, advantages = random_rows(
      job["rows"], sizes["vocab_size"], job.get("group", 1)
    )
    prompts = np.full([len(ids), prompt], PAD, np.int32)
    completions = np.full([len(ids), new], PAD, np.int32)
    for i, (before, after) in enumerate(ids):
      prompts[i, prompt - len(before) :] = before
      completions[i, : len(after)] = after
    filled = np.full(completions.shape, OLD, np.float32)
    example = grpo_learner.TrainExample(
      prompt_ids=jnp.asarray(prompts),
      prompt_mask=jnp.asarray(prompts != PAD),
      completion_ids=jnp.asarray(completions),
      completion_mask=jnp.asarray(completions != PAD),
      ref_per_token_logps=jnp.asarray(filled),
      old_per_token_logps=jnp.asarray(filled),
      advantages=jnp.asarray(advantages),
    )
    with mesh:
      if job["do"] == "score":
        jax.block_until_ready(
          cluster.get_ref_per_token_logps(
            example.prompt_ids,
            example.completion_ids,
            pad_id=PAD,
            eos_id=sizes["vocab_size"] - 1,
          )
        )
        return
      out = step(example)
      jax.block_until_ready((out, nnx.state(cluster.actor_trainer.model)))

  return run


# -- torch ---------------------------------------------------------------------


def torch(sizes: dict):
  """transformers' Qwen3 with the loss and step written out."""
  import rollouts_peer
  import torch
  from torch.nn.utils import rnn

  model = rollouts_peer.transformers_model(sizes).train()
  optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

  def logprobs(ids, new):
    """[rows, new] of the last `new` tokens."""
    logits = model(
      input_ids=ids,
      attention_mask=(ids != PAD).long(),
      logits_to_keep=new + 1,
      use_cache=False,
    ).logits[:, :-1]
    chosen = logits.gather(-1, ids[:, -new:, None]).squeeze(-1)
    return chosen - logits.logsumexp(-1)

  def pad(rows, side):
    rows = [torch.from_numpy(r).long() for r in rows]
    return rnn.pad_sequence(rows, True, PAD, side)

  def losses(ids, advantages):
    prompts, completions = zip(*ids, strict=True)
    prompts, completions = pad(prompts, "left"), pad(completions, "right")
    mask = (completions != PAD).float()
    new = completions.shape[1]
    logp = logprobs(torch.cat([prompts, completions], 1), new)
    ratio = torch.exp(logp - OLD)
    gain = torch.from_numpy(advantages)[:, None]
    out = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
    gap = OLD - logp
    return ((out + KL_WEIGHT * (gap.exp() - gap - 1)) * mask).sum()

  def run(job):
    torch.set_num_threads(job["threads"])
    ids, advantages = random_rows(
      job["rows"], sizes["vocab_size"], job.get("group", 1)
    )
    num_tokens = sum(len(after) for _, after in ids)
    micro, score = job["micro"], job["do"] == "score"
    for i in range(0, len(ids), micro):
      part = ids[i : i + micro], advantages[i : i + micro]
      with torch.set_grad_enabled(not score):
        loss = losses(*part) / num_tokens
      if not score:
        loss.backward()
    if not score:
      torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
      optimizer.step()
      optimizer.zero_grad(set_to_none=True)

  return run


def main() -> None:
  # What a library prints must not be read as an answer.
  answers, sys.stdout = sys.stdout, sys.stderr
  sides = {"this": this, "tunix": tunix, "torch": torch}
  run = sides[sys.argv[1]](json.loads(sys.argv[2]))
  for line in sys.stdin:
    job = json.loads(line)
    before = rss_gb("VmRSS")
    wall, cpu = time.perf_counter(), time.process_time()
    said = run(job) or {}
    cost = {
      "wall": time.perf_counter() - wall,
      "cpu": time.process_time() - cpu,
      "rss_gb": rss_gb("VmHWM"),
      "before_gb": before,
    }
    print(json.dumps(cost | said), file=answers, flush=True)


if __name__ == "__main__":
  main()
