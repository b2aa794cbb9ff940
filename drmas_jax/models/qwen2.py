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
