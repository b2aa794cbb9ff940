"""Qwen3: Llama with q and k normed per head before the rotation.

Source of names and keys: transformers, models/qwen3.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from drmas_jax.models import llama3
from drmas_jax.models.transformer import DecoderConfig

ARCHITECTURE = "Qwen3ForCausalLM"
MODEL_TYPE = "qwen3"


def _qwen3(embed, layers, heads, mlp, tied) -> DecoderConfig:
  return DecoderConfig(
    family="qwen3",
    vocab_size=151_936,
    embed_dim=embed,
    num_layers=layers,
    num_heads=heads,
    num_kv_heads=8,
    head_dim=128,
    mlp_dim=mlp,
    max_positions=40_960,
    rope_theta=1e6,
    tied=tied,
    qk_norm=True,
  )


# Public name -> sizes, as in llama3.py.
SIZES = {
  "Qwen/Qwen3-0.6B": _qwen3(1024, 28, 16, 3072, tied=True),
  "Qwen/Qwen3-1.7B": _qwen3(2048, 28, 16, 6144, tied=True),
  "Qwen/Qwen3-4B": _qwen3(2560, 36, 32, 9728, tied=True),
  "Qwen/Qwen3-8B": _qwen3(4096, 36, 32, 12_288, tied=False),
  "Qwen/Qwen3-14B": _qwen3(5120, 40, 40, 17_408, tied=False),
}
SIZES |= {
  f"{name}-Base": dataclasses.replace(sizes, max_positions=32_768)
  for name, sizes in SIZES.items()
}
# The releases of July 2025 are longer, and turn more slowly.
SIZES |= {
  f"Qwen/Qwen3-4B-{variant}-2507": dataclasses.replace(
    SIZES["Qwen/Qwen3-4B"], max_positions=262_144, rope_theta=5e6
  )
  for variant in ("Instruct", "Thinking")
}


def names(config: DecoderConfig) -> dict[str, str]:
  """Parameter -> tensor name; {} is the layer's number."""
  attention = "model.layers.{}.self_attn."
  return llama3.names(config) | {
    "layers/attention/q_norm": attention + "q_norm.weight",
    "layers/attention/k_norm": attention + "k_norm.weight",
  }


def read(raw: Mapping[str, Any]) -> DecoderConfig:
  """From the keys of a config.json; raises as `llama3.read`."""
  raw = {"head_dim": 128} | dict(raw)  # the family's default
  return dataclasses.replace(llama3.read(raw), family="qwen3", qk_norm=True)


def write(config: DecoderConfig) -> dict[str, Any]:
  """The keys of a config.json."""
  return llama3.write(config) | {
    "architectures": [ARCHITECTURE],
    "model_type": MODEL_TYPE,
    "use_sliding_window": False,
  }
