"""A peer of `rollouts.py`, in an environment of its own.

    PYTHON rollouts_peer.py {tunix,transformers} SIZES

SIZES is JSON: the fields of `rollouts_lab.SIZES`. Jobs come on stdin, a line of
JSON each, and are answered on stdout with their seconds:

    {"prompts": [[id, ..], ..], "steps": n, "batch": b, "threads": t}
    {"wall": .., "cpu": ..}

A job decodes n tokens for every prompt, b prompts at a time. Both peers decode
a batch in lock step; neither takes a limit per sequence.
"""

import json
import os
import sys
import time


class Numbers:
  """Text is numbers; the tokenizer that google-tunix asks for."""

  def __init__(self, vocab_size: int):
    self._vocab_size = vocab_size

  def encode(self, text, **_):
    return list(map(int, text.split()))

  def decode(self, ids, **_):
    return " ".join(map(str, ids))

  def bos_id(self):
    return 0

  def pad_id(self):
    return 0

  def eos_id(self):
    return self._vocab_size - 1


def tunix_model(sizes: dict):
  """Its Qwen3 with random weights."""
  import jax
  from flax import nnx
  from tunix.models.qwen3 import model as qwen3

  model = qwen3.Qwen3(
    qwen3.ModelConfig(
      num_layers=sizes["num_layers"],
      vocab_size=sizes["vocab_size"],
      embed_dim=sizes["embed_dim"],
      hidden_dim=sizes["mlp_dim"],
      num_heads=sizes["num_heads"],
      head_dim=sizes["head_dim"],
      num_kv_heads=sizes["num_kv_heads"],
      rope_theta=1_000_000,
      norm_eps=1e-6,
      use_tied_embedding=True,
    ),
    rngs=nnx.Rngs(0),
  )
  # Its mlp begins as zeros; nothing shall be cheaper for that.
  key = jax.random.key(1)
  weights = jax.tree.map(
    lambda x: (
      0.02 * jax.random.normal(key, x.shape, x.dtype) if x.ndim > 1 else x
    ),
    nnx.state(model),
  )
  nnx.update(model, weights)
  return model


def tunix(sizes: dict):
  """google-tunix's Sampler over its own Qwen3, with log-probs."""
  os.environ["JAX_PLATFORMS"] = "cpu"
  from tunix.generate import sampler

  model = tunix_model(sizes)
  made = sampler.Sampler(
    model,
    Numbers(sizes["vocab_size"]),
    sampler.CacheConfig(
      cache_size=sizes["length"],
      num_layers=sizes["num_layers"],
      num_kv_heads=sizes["num_kv_heads"],
      head_dim=sizes["head_dim"],
    ),
  )

  def decode(prompts, steps, threads):
    del threads  # XLA takes what there is
    out = made(
      [" ".join(map(str, p)) for p in prompts],
      max_generation_steps=steps,
      max_prompt_length=len(prompts[0]),
      temperature=1.0,
      top_p=1.0,
      eos_tokens=[sizes["vocab_size"]],  # of no token
      return_logprobs=True,
      seed=3,
    )
    return sum(map(len, out.tokens))

  return decode


def transformers_model(sizes: dict):
  """Its Qwen3 with random weights, in float32."""
  os.environ["HF_HUB_OFFLINE"] = "1"
  import torch
  from transformers import Qwen3Config, Qwen3ForCausalLM

  torch.manual_seed(0)
  return Qwen3ForCausalLM(
    Qwen3Config(
      vocab_size=sizes["vocab_size"],
      hidden_size=sizes["embed_dim"],
      intermediate_size=sizes["mlp_dim"],
      num_hidden_layers=sizes["num_layers"],
      num_attention_heads=sizes["num_heads"],
      num_key_value_heads=sizes["num_kv_heads"],
      head_dim=sizes["head_dim"],
      rope_theta=1e6,
      tie_word_embeddings=True,
      max_position_embeddings=4096,
      pad_token_id=0,
      eos_token_id=sizes["vocab_size"] - 1,
      bos_token_id=None,
    )
  ).float()


def transformers(sizes: dict):
  """generate() of transformers, without log-probs, which favours it."""
  import torch

  model = transformers_model(sizes).eval()

  def decode(prompts, steps, threads):
    torch.set_num_threads(threads)
    ids = torch.tensor(prompts)
    with torch.no_grad():
      out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_new_tokens=steps,
        max_new_tokens=steps,
      )
    return out[:, ids.shape[1] :].numel()

  return decode


def main() -> None:
  # What a library prints must not be read as an answer.
  answers, sys.stdout = sys.stdout, sys.stderr
  decode = {"tunix": tunix, "transformers": transformers}[sys.argv[1]](
    json.loads(sys.argv[2])
  )
  for line in sys.stdin:
    job = json.loads(line)
    prompts, batch = job["prompts"], job["batch"]
    wall, cpu = time.perf_counter(), time.process_time()
    num_tokens = sum(
      decode(prompts[i : i + batch], job["steps"], job["threads"])
      for i in range(0, len(prompts), batch)
    )
    cost = {
      "wall": time.perf_counter() - wall,
      "cpu": time.process_time() - cpu,
    }
    if num_tokens != len(prompts) * job["steps"]:
      sys.exit(f"{num_tokens} tokens of {len(prompts)} x {job['steps']}")
    print(json.dumps(cost), file=answers, flush=True)


if __name__ == "__main__":
  main()
