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
