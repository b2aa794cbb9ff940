"""Qwen2 and Qwen2.5: Llama with biases on q, k and v.

Source of names and keys: transformers, models/qwen2.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from drmas_jax.models import llama3
from drmas_jax.models.transformer import DecoderConfig

ARCHITECTURE = "Qwen2ForCausalLM"
MODEL_TYPE = "qwen2"


def _qwen2(
  embed, layers, heads, kv_heads, mlp, vocab=151_936, **rest
) -> DecoderConfig:
  return DecoderConfig(
    family="qwen2",
    vocab_size=vocab,
    embed_dim=embed,
    num_layers=layers,
    num_heads=heads,
    num_kv_heads=kv_heads,
    head_dim=embed // heads,
    mlp_dim=mlp,
    max_positions=32_768,
    rope_theta=1e6,
    tied=vocab == 151_936,
    qkv_bias=True,
    **rest,
  )


# Public name -> sizes, as in llama3.py.
SIZES = {
  f"Qwen/Qwen2.5-{variant}": sizes
  for name, sizes in {
    "0.5B": _qwen2(896, 24, 14, 2, 4864),
    "1.5B": _qwen2(1536, 28, 12, 2, 8960),
    "3B": _qwen2(2048, 36, 16, 2, 11_008),
    "7B": _qwen2(3584, 28, 28, 4, 18_944, 152_064),
    "14B": _qwen2(5120, 48, 40, 8, 13_824, 152_064),
  }.items()
  for variant in (f"{name}-Instruct", f"Coder-{name}", f"Coder-{name}-Instruct")
}
SIZES |= {
  f"Qwen/Qwen2.5-{name}": dataclasses.replace(
    SIZES[f"Qwen/Qwen2.5-{name}-Instruct"], **changes
  )
  for name, changes in {
    "0.5B": {},
    "1.5B": {"max_positions": 131_072},
    "3B": {},
    "7B": {"max_positions": 131_072},
    "14B": {"max_positions": 131_072, "norm_eps": 1e-5},
  }.items()
}


def names(config: DecoderConfig) -> dict[str, str]:
  """Parameter -> tensor name; {} is the layer's number."""
  attention = "model.layers.{}.self_attn."
  return llama3.names(config) | {
    "layers/attention/q_bias": attention + "q_proj.bias",
    "layers/attention/k_bias": attention + "k_proj.bias",
    "layers/attention/v_bias": attention + "v_proj.bias",
  }


def read(raw: Mapping[str, Any]) -> DecoderConfig:
  """From the keys of a config.json; raises as `llama3.read`."""
  return dataclasses.replace(llama3.read(raw), family="qwen2", qkv_bias=True)


def write(config: DecoderConfig) -> dict[str, Any]:
  """The keys of a config.json."""
  return llama3.write(config) | {
    "architectures": [ARCHITECTURE],
    "model_type": MODEL_TYPE,
    "use_sliding_window": False,
  }
