"""What transformers computes on tiny random checkpoints, for test_models.py.

    pip install -e '.[parity]'
    python tests/parity/make_numbers.py

writes numbers.npz beside this file: for each case the logits of two prompts, in
float32 and in bfloat16, and their greedy continuations; and the frequencies of
Llama-3.2's rotation. The checkpoints themselves are not kept: they come from a
seed by numpy alone, and the test makes them again with `tensors`.
"""

import pathlib

import numpy as np

PATH = pathlib.Path(__file__).with_name("numbers.npz")
PROMPT_LENGTH, NUM_NEW = 8, 16
LEFT = 3  # tokens of padding before the shorter rows of `compute_padded`

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def _sizes(vocab, embed, layers, heads, kv_heads, head_dim, mlp, theta, tied):
  return {
    "vocab_size": vocab,
    "hidden_size": embed,
    "num_hidden_layers": layers,
    "num_attention_heads": heads,
    "num_key_value_heads": kv_heads,
    "head_dim": head_dim,
    "intermediate_size": mlp,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": theta,
    "tie_word_embeddings": tied,
    "hidden_act": "silu",
  }


def _llama3_rope(factor, original):
  return {
    "rope_scaling": {
      "rope_type": "llama3",
      "factor": factor,
      "low_freq_factor": 1.0,
      "high_freq_factor": 4.0,
      "original_max_position_embeddings": original,
    }
  }


# Each a config.json. Between them: theta, grouping 1 to 7, head_dim other than
# hidden / heads, tied and not, biases, q and k norms, scaled rotation (as in
# Llama-3.2, and one whose bands all lie within a few tokens), odd vocabulary.
CASES = {
  "llama": _LLAMA | _sizes(151, 32, 2, 4, 4, 8, 48, 1e4, False),
  "llama_tied": _LLAMA | _sizes(127, 36, 2, 9, 3, 4, 40, 1e5, True),
  "llama32": _LLAMA
  | _sizes(151, 48, 2, 4, 1, 64, 64, 5e5, True)
  | _llama3_rope(32.0, 8192),
  "llama_short": _LLAMA
  | _sizes(97, 32, 2, 4, 2, 16, 48, 1e3, False)
  | _llama3_rope(8.0, 16),
  "qwen2": _QWEN2 | _sizes(151, 42, 2, 7, 1, 6, 56, 1e6, True),
  "qwen2_untied": _QWEN2 | _sizes(99, 32, 2, 4, 2, 8, 48, 1e4, False),
  "qwen3": _QWEN3 | _sizes(151, 40, 2, 4, 2, 32, 48, 1e6, True),
  "qwen3_untied": _QWEN3 | _sizes(131, 32, 2, 6, 2, 16, 40, 5e6, False),
}


def tensors(name: str) -> dict[str, np.ndarray]:
  """The checkpoint of a case: tensor name -> float32, the same everywhere."""
  raw = CASES[name]
  # RandomState's stream is frozen for good; a Generator's is not.
  rng = np.random.RandomState(list(CASES).index(name))
  embed, mlp, vocab = (
    raw[k] for k in ("hidden_size", "intermediate_size", "vocab_size")
  )
  head_dim = raw["head_dim"]
  sizes = {
    "q": raw["num_attention_heads"] * head_dim,
    "k": raw["num_key_value_heads"] * head_dim,
    "v": raw["num_key_value_heads"] * head_dim,
  }
  out = {}

  def linear(name, num_out, num_in):
    weight = rng.standard_normal((num_out, num_in)) / np.sqrt(num_in)
    out[f"{name}.weight"] = weight.astype(np.float32)

  def near(name, center, size):
    values = center + 0.2 * rng.standard_normal(size)
    out[name] = values.astype(np.float32)

  out["model.embed_tokens.weight"] = rng.standard_normal((vocab, embed)).astype(
    np.float32
  )
  for i in range(raw["num_hidden_layers"]):
    layer = f"model.layers.{i}"
    near(f"{layer}.input_layernorm.weight", 1.0, embed)
    for n, size in sizes.items():
      linear(f"{layer}.self_attn.{n}_proj", size, embed)
      if raw["model_type"] == "qwen2":
        near(f"{layer}.self_attn.{n}_proj.bias", 0.0, size)
    if raw["model_type"] == "qwen3":
      near(f"{layer}.self_attn.q_norm.weight", 1.0, head_dim)
      near(f"{layer}.self_attn.k_norm.weight", 1.0, head_dim)
    linear(f"{layer}.self_attn.o_proj", embed, sizes["q"])
    near(f"{layer}.post_attention_layernorm.weight", 1.0, embed)
    linear(f"{layer}.mlp.gate_proj", mlp, embed)
    linear(f"{layer}.mlp.up_proj", mlp, embed)
    linear(f"{layer}.mlp.down_proj", embed, mlp)
  near("model.norm.weight", 1.0, embed)
  if not raw["tie_word_embeddings"]:
    linear("lm_head", vocab, embed)
  return out


def prompts(name: str) -> np.ndarray:
  """[2, PROMPT_LENGTH] ids."""
  rng = np.random.RandomState(1000 + list(CASES).index(name))
  return rng.randint(0, CASES[name]["vocab_size"], (2, PROMPT_LENGTH))


def half(x: np.ndarray) -> np.ndarray:
  """float32 values of bfloat16 precision as the 16 bits they are, or back."""
  if x.dtype == np.uint16:
    return (x.astype(np.uint32) << 16).view(np.float32)
  return (x.view(np.uint32) >> 16).astype(np.uint16)


def _model(name: str):
  """The case in transformers, in float32."""
  import torch
  import transformers

  raw = CASES[name]
  config = transformers.AutoConfig.for_model(**raw)
  model = transformers.AutoModelForCausalLM.from_config(
    config, attn_implementation="eager", dtype=torch.float32
  ).eval()
  weights = {k: torch.from_numpy(v) for k, v in tensors(name).items()}
  if raw["tie_word_embeddings"]:
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
  model.load_state_dict(weights, strict=True)
  return model


def compute(name: str) -> dict[str, np.ndarray]:
  """The numbers of transformers for a case: logits and bfloat16 [2, T, V], ids
  [2, new]."""
  import torch

  model = _model(name)
  ids = torch.from_numpy(prompts(name))
  with torch.no_grad():
    logits, gap = model(ids).logits, float("inf")
    row = ids
    for _ in range(NUM_NEW):
      last = model(row).logits[:, -1]
      best = last.topk(2).values
      gap = min(gap, float((best[:, 0] - best[:, 1]).min()))
      row = torch.cat([row, last.argmax(-1, keepdim=True)], dim=1)
    rounded = model.to(torch.bfloat16)(ids).logits.float().numpy()
  # A tie would make the continuation a matter of rounding.
  assert gap > 1e-3, (name, gap)
  return {
    "logits": logits.numpy(),
    "bfloat16": half(rounded),
    "ids": row[:, PROMPT_LENGTH:].numpy().astype(np.int32),
  }


def compute_padded(name: str) -> np.ndarray:
  """[2, T - LEFT, V]: the prompts without their end, padded on the left."""
  import torch

  ids = torch.from_numpy(prompts(name))[:, : PROMPT_LENGTH - LEFT]
  ids = torch.nn.functional.pad(ids, (LEFT, 0))
  seen = torch.arange(PROMPT_LENGTH) >= LEFT
  positions = (torch.arange(PROMPT_LENGTH) - LEFT).clamp(min=0)
  with torch.no_grad():
    logits = _model(name)(
      ids,
      attention_mask=seen.long().expand(2, -1),
      position_ids=positions.expand(2, -1),
    ).logits
  return logits[:, LEFT:].numpy()


def compute_frequencies() -> np.ndarray:
  """[32], of Llama-3.2-1B's rotation."""
  import transformers
  from transformers.models.llama import modeling_llama

  raw = _LLAMA | _sizes(8, 2048, 1, 32, 8, 64, 8, 5e5, True)
  config = transformers.AutoConfig.for_model(**raw, **_llama3_rope(32.0, 8192))
  return modeling_llama.LlamaRotaryEmbedding(config).inv_freq.numpy()


def main() -> None:
  import torch
  import transformers

  numbers = {
    "versions": f"torch {torch.__version__} "
    f"transformers {transformers.__version__}"
  }
  numbers["frequencies"] = compute_frequencies()
  for name in CASES:
    for key, value in compute(name).items():
      numbers[f"{name}/{key}"] = value
  np.savez_compressed(PATH, **numbers)
  print(f"{PATH}: {PATH.stat().st_size} bytes, {numbers['versions']}")


if __name__ == "__main__":
  main()
