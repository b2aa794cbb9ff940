"""One policy's adapters as a PEFT folder: adapter_config.json and the pairs

    base_model.model.<module>.lora_A.weight  [rank, in]
    base_model.model.<module>.lora_B.weight  [out, rank]

of each target of each layer, by the names that the checkpoint has for them.
"""

import json
import pathlib
from typing import Any

import numpy as np

from drmas_jax.config import Adapter
from drmas_jax.models import weights
from drmas_jax.models.transformer import DecoderConfig

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def save(
  folder: str | pathlib.Path,
  tree: Any,
  model: DecoderConfig,
  adapter: Adapter,
  base: str,
) -> None:
  """Writes the folder.

  Args:
    folder: made if it is not there.
    tree: leaves a [L, *in, rank] and b [L, rank, *out].
    model: of the decoder below.
    adapter: of the policy.
    base: the checkpoint below, by which PEFT finds it.
  """
  from safetensors.numpy import save_file

  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  names, tensors, modules = weights.tensor_names(model), {}, set()
  for kind, targets in tree.items():
    for target, pair in targets.items():
      module = names[f"layers/{kind}/{target}"].removesuffix(".weight")
      modules.add(module.rpartition(".")[2])
      a, b = (np.asarray(pair[side], np.float32) for side in "ab")
      for layer in range(model.num_layers):
        full = f"base_model.model.{module.format(layer)}"
        a_file = a[layer].reshape(-1, adapter.rank).T
        b_file = b[layer].reshape(adapter.rank, -1).T
        tensors[f"{full}.lora_A.weight"] = np.ascontiguousarray(a_file)
        tensors[f"{full}.lora_B.weight"] = np.ascontiguousarray(b_file)
  save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
  about = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": base,
    "r": adapter.rank,
    "lora_alpha": adapter.alpha,
    "target_modules": sorted(modules),
    "lora_dropout": 0.0,
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "use_rslora": False,
  }
  (folder / CONFIG).write_text(json.dumps(about, indent=2) + "\n")
