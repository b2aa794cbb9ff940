"""A trainer of `updates.py --parts c`, in a process of its own.

    PYTHON updates_steps.py {this,tunix,trl} SIZES

SIZES is JSON: the fields of `rollouts_lab.SIZES`, and `folder`, an empty one to
write to. Each trains as its users do, with 8 prompts x 8 samples of 64 + 128
tokens a step, the clipped loss, 0.04 times k3 to a frozen copy, AdamW, in
float32: this project by its main run, google-tunix by its GRPO learner, TRL by
its GRPO trainer. Before every step it waits for a job on stdin, a line of JSON,
which the step's end answers:

    {"rows": 64}    what the peers update on at once, by their first job
    {"wall": .., "cpu": .., "rss_gb": ..}
"""

import json
import os
import pathlib
import random
import sys
import time
import zlib

PROMPTS, GROUP, KL_WEIGHT, RATE = 8, 8, 0.04, 1e-6
MANY = 1_000  # steps: more than are asked for


class Gate:
  """Called where a step begins: answers for the one before, waits for a job."""

  def __init__(self):
    # What a library prints must not be read as an answer.
    self._answers, sys.stdout = sys.stdout, sys.stderr
    self._began = None
    self.job = {}

  def __call__(self) -> None:
    from updates_peer import rss_gb

    if self._began is not None:
      wall, cpu = self._began
      cost = {
        "wall": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "rss_gb": rss_gb("VmHWM"),
      }
      print(json.dumps(cost), file=self._answers, flush=True)
    line = sys.stdin.readline()
    if not line:
      os._exit(0)  # from within a trainer that would go on
    self.job = json.loads(line)
    self._began = time.perf_counter(), time.process_time()


def questions(sizes: dict, num: int) -> list[str]:
  """Prompts of a third of a row: numbers, a space between them."""
  draw, most = random.Random(0), sizes["vocab_size"] - 1
  return [
    " ".join(str(draw.randrange(1, most)) for _ in range(sizes["length"] // 3))
    for _ in range(num)
  ]


def reward(text: str) -> float:
  return float(zlib.crc32(text.encode()) % 7)


def tokenizer(sizes: dict, ends: bool = True):
  """Words are numbers. What `ends` a text is a token that the model has not."""
  import tokenizers
  import transformers
  from tokenizers import models, pre_tokenizers

  vocab = {"<pad>": 0} | {str(i): i for i in range(1, sizes["vocab_size"])}
  words = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
  words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=words,
    pad_token="<pad>",
    **({"eos_token": "<end>"} if ends else {}),
    chat_template="{% for m in messages %}{{ m.content }} {% endfor %}",
  )


# -- this project --------------------------------------------------------------


def this(sizes: dict, gate: Gate, folder: str) -> None:
  """See `updates_main`."""
  os.environ["JAX_PLATFORMS"] = "cpu"
  import updates_main

  asked = questions(sizes, PROMPTS * MANY)
  tokenizer(sizes, ends=False).save_pretrained(folder)
  end = json.dumps({"eos_token_id": sizes["vocab_size"]})  # no token's
  (pathlib.Path(folder) / "generation_config.json").write_text(end)
  updates_main.train(sizes, gate, folder, asked)


def wait_for_all() -> None:
  """For all that JAX has been told to compute."""
  import jax

  jax.block_until_ready(jax.live_arrays())


# -- google-tunix --------------------------------------------------------------


def tunix(sizes: dict, gate: Gate, folder: str) -> None:
  """Its GRPO learner over its own sampler."""
  del folder
  gate()  # for the number of rows
  num_prompts = gate.job["rows"] // GROUP
  os.environ["JAX_PLATFORMS"] = "cpu"
  import jax
  import numpy as np
  import optax
  import rollouts_peer
  from tunix.rl import rl_cluster
  from tunix.rl.grpo import grpo_learner
  from tunix.rl.rollout import base_rollout

  prompt, length = sizes["length"] // 3, sizes["length"]
  kinds = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Auto
  mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=kinds)
  role = rl_cluster.Role
  roles = role.ACTOR, role.REFERENCE, role.ROLLOUT
  with mesh:
    cluster = rl_cluster.RLCluster(
      actor=rollouts_peer.tunix_model(sizes),
      reference=rollouts_peer.tunix_model(sizes),
      tokenizer=rollouts_peer.Numbers(sizes["vocab_size"]),
      cluster_config=rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        rollout_engine="vanilla",
        offload_to_cpu=False,
        training_config=rl_cluster.RLTrainingConfig(
          actor_optimizer=optax.adamw(RATE),
          eval_every_n_steps=10**9,
          max_steps=MANY,
          mini_batch_size=PROMPTS,
          train_micro_batch_size=num_prompts,
          rollout_micro_batch_size=PROMPTS,
        ),
        rollout_config=base_rollout.RolloutConfig(
          max_tokens_to_generate=length - prompt,
          max_prompt_length=prompt,
          kv_cache_size=length,
          temperature=1.0,
          top_p=1.0,
          eos_tokens=[sizes["vocab_size"]],  # of no token
        ),
      ),
    )
    learner = grpo_learner.GRPOLearner(
      rl_cluster=cluster,
      reward_fns=lambda prompts, completions, **_: list(
        map(reward, completions)
      ),
      algo_config=grpo_learner.GRPOConfig(
        num_generations=GROUP, num_iterations=1, beta=KL_WEIGHT
      ),
    )
    generate = cluster.generate

    def step(*args, **kwargs):
      wait_for_all()
      gate()
      return generate(*args, **kwargs)

    cluster.generate = step
    asked = questions(sizes, PROMPTS * MANY)
    learner.train(
      {"prompts": np.array(asked[i : i + PROMPTS])}
      for i in range(0, len(asked), PROMPTS)
    )


# -- TRL -----------------------------------------------------------------------


def trl(sizes: dict, gate: Gate, folder: str) -> None:
  """Its GRPO trainer over transformers, on as many threads as torch takes."""
  import rollouts_peer

  rollouts_peer.transformers_model(sizes).save_pretrained(folder)
  import datasets
  import transformers
  from trl import GRPOConfig, GRPOTrainer

  class Steps(transformers.TrainerCallback):
    def on_step_begin(self, *args, **kwargs):
      gate()

  gate()  # for the number of rows
  num_rows, new = gate.job["rows"], sizes["length"] - sizes["length"] // 3
  made = GRPOTrainer(
    model=transformers.Qwen3ForCausalLM.from_pretrained(folder),
    reward_funcs=lambda completions, **_: list(map(reward, completions)),
    args=GRPOConfig(
      output_dir=folder,
      per_device_train_batch_size=num_rows,
      gradient_accumulation_steps=PROMPTS * GROUP // num_rows,
      num_generations=GROUP,
      max_completion_length=new,
      beta=KL_WEIGHT,
      learning_rate=RATE,
      max_steps=MANY,
      use_cpu=True,
      bf16=False,
      gradient_checkpointing=False,
      report_to="none",
      save_strategy="no",
      logging_steps=MANY,
    ),
    train_dataset=datasets.Dataset.from_list(
      [{"prompt": q} for q in questions(sizes, PROMPTS * MANY)]
    ),
    processing_class=tokenizer(sizes),
    callbacks=[Steps()],
  )
  made.train()


def main() -> None:
  trainers = {"this": this, "tunix": tunix, "trl": trl}
  gate, sizes = Gate(), json.loads(sys.argv[2])
  trainers[sys.argv[1]](sizes, gate, sizes.pop("folder"))


if __name__ == "__main__":
  main()
