"""Llama 3 and what is built like it (Llama-3.2, SmolLM2).

Source of names and keys: transformers, models/llama.
"""

from collections.abc import Mapping
from typing import Any

from drmas_jax.models.layers import RopeScaling
from drmas_jax.models.transformer import DecoderConfig

ARCHITECTURE = "LlamaForCausalLM"
MODEL_TYPE = "llama"

_UNSUPPORTED = {
  "attention_bias": False,
  "mlp_bias": False,
  "hidden_act": "silu",
  "use_sliding_window": False,
  "partial_rotary_factor": 1.0,
}

_SCALING = {
  factor: RopeScaling(factor, 1.0, 4.0, 8192) for factor in (8.0, 32.0)
}


def _llama(embed, layers, heads, mlp, factor, **rest) -> DecoderConfig:
  return DecoderConfig(
    family="llama3",
    vocab_size=128_256,
    embed_dim=embed,
    num_layers=layers,
    num_heads=heads,
    num_kv_heads=8,
    head_dim=64 if embed == 2048 else 128,
    mlp_dim=mlp,
    max_positions=131_072,
    rope_theta=500_000.0,
    rope_scaling=_SCALING[factor],
    norm_eps=1e-5,
    **rest,
  )


def _smollm2(embed, layers, heads, kv_heads, mlp, theta) -> DecoderConfig:
  return DecoderConfig(
    family="llama3",
    vocab_size=49_152,
    embed_dim=embed,
    num_layers=layers,
    num_heads=heads,
    num_kv_heads=kv_heads,
    head_dim=64,
    mlp_dim=mlp,
    max_positions=8192,
    rope_theta=theta,
    norm_eps=1e-5,
    tied=True,
  )


# Public name -> sizes, to plan before anything is there (`folders.sizes`); a
# checkpoint that is there is read as its config.json says. Source: theirs.
SIZES = {
  f"meta-llama/{name}{variant}": sizes
  for name, sizes in {
    "Llama-3.1-8B": _llama(4096, 32, 32, 14_336, 8.0),
    "Llama-3.2-1B": _llama(2048, 16, 32, 8192, 32.0, tied=True),
    "Llama-3.2-3B": _llama(3072, 28, 24, 8192, 32.0, tied=True),
  }.items()
  for variant in ("", "-Instruct")
} | {
  f"HuggingFaceTB/{name}{variant}": sizes
  for name, sizes in {
    "SmolLM2-135M": _smollm2(576, 30, 9, 3, 1536, 1e5),
    "SmolLM2-360M": _smollm2(960, 32, 15, 5, 2560, 1e5),
    "SmolLM2-1.7B": _smollm2(2048, 24, 32, 32, 8192, 1.3e5),
  }.items()
  for variant in ("", "-Instruct")
}


def names(config: DecoderConfig) -> dict[str, str]:
  """Parameter -> tensor name; {} is the layer's number."""
  del config
  layer, attention = "model.layers.{}.", "model.layers.{}.self_attn."
  return {
    "embedding": "model.embed_tokens.weight",
    "layers/attention_norm": layer + "input_layernorm.weight",
    "layers/attention/q": attention + "q_proj.weight",
    "layers/attention/k": attention + "k_proj.weight",
    "layers/attention/v": attention + "v_proj.weight",
    "layers/attention/o": attention + "o_proj.weight",
    "layers/mlp_norm": layer + "post_attention_layernorm.weight",
    "layers/mlp/gate": layer + "mlp.gate_proj.weight",
    "layers/mlp/up": layer + "mlp.up_proj.weight",
    "layers/mlp/down": layer + "mlp.down_proj.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
  }


def read(raw: Mapping[str, Any]) -> DecoderConfig:
  """From the keys of a config.json.

  Raises:
    KeyError: a size is missing.
    ValueError: a switch asks for what the decoder does not do.
  """
  for key, allowed in _UNSUPPORTED.items():
    if raw.get(key, allowed) != allowed:
      raise ValueError(
        f"{key}: {raw[key]!r} is not supported, only {allowed!r}"
      )
  if others := set(raw.get("layer_types") or ()) - {"full_attention"}:
    raise ValueError(
      f"layer_types: {sorted(others)} are not supported, only 'full_attention'"
    )
  heads, embed_dim = raw["num_attention_heads"], raw["hidden_size"]
  theta, scaling = _read_rope(raw)
  return DecoderConfig(
    family="llama3",
    vocab_size=raw["vocab_size"],
    embed_dim=embed_dim,
    num_layers=raw["num_hidden_layers"],
    num_heads=heads,
    num_kv_heads=raw.get("num_key_value_heads") or heads,
    head_dim=raw.get("head_dim") or embed_dim // heads,
    mlp_dim=raw["intermediate_size"],
    max_positions=raw["max_position_embeddings"],
    rope_theta=theta,
    rope_scaling=scaling,
    norm_eps=raw["rms_norm_eps"],
    tied=raw.get("tie_word_embeddings", False),
  )


def _read_rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
  """transformers 5 keeps all of it in `rope_parameters`, 4 in two keys."""
  rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
  older = raw.get("rope_scaling") or {}
  if any(rope.get(key) != value for key, value in older.items()):
    raise ValueError(
      f"rope_scaling: {older} is not what rope_parameters says, {rope}; write "
      "what is meant into the latter, and remove the former"
    )
  if per_layer := [k for k, v in rope.items() if isinstance(v, Mapping)]:
    raise ValueError(
      f"rope_parameters: of {per_layer} apart; supported is one rotation for "
      "all layers"
    )
  theta = rope.get("rope_theta", raw.get("rope_theta", 10_000.0))
  if theta is None:
    raise ValueError("rope_theta: null; write the one that it was trained with")
  theta = float(theta)
  kind = rope.get("rope_type") or rope.get("type") or "default"
  if kind == "default":
    return theta, None
  if kind != "llama3":
    raise ValueError(
      f"rope_type: {kind!r} is not supported, only 'default' and 'llama3'"
    )
  return theta, RopeScaling(
    factor=rope["factor"],
    low_freq_factor=rope["low_freq_factor"],
    high_freq_factor=rope["high_freq_factor"],
    original_max_positions=rope["original_max_position_embeddings"],
  )


def write(config: DecoderConfig) -> dict[str, Any]:
  """The keys of a config.json, as transformers 4 and 5 read them."""
  scaling = config.rope_scaling
  return {
    "architectures": [ARCHITECTURE],
    "model_type": MODEL_TYPE,
    "vocab_size": config.vocab_size,
    "hidden_size": config.embed_dim,
    "num_hidden_layers": config.num_layers,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "intermediate_size": config.mlp_dim,
    "max_position_embeddings": config.max_positions,
    "rope_theta": config.rope_theta,
    "rope_scaling": scaling
    and {
      "rope_type": "llama3",
      "factor": scaling.factor,
      "low_freq_factor": scaling.low_freq_factor,
      "high_freq_factor": scaling.high_freq_factor,
      "original_max_position_embeddings": scaling.original_max_positions,
    },
    "rms_norm_eps": config.norm_eps,
    "tie_word_embeddings": config.tied,
    "hidden_act": "silu",
  }
