"""Whole train steps compiled for a TPU that is not there; see `tpu_worker`.

    python tests/tpu_update_worker.py v5e:2x2 qwen3-0.6b [shared]

The last line it prints is a JSON object: what the update of that model, of one
micro-batch of 8 rows of 4096 tokens, with splash, remat "full" and the head
in blocks, compiles to: bytes on each chip, kernels, the largest array. With
"shared" it is of as many tokens in rows that hold what chats share once, with
1.5 times as many for attention, and of log-probs of half of them.
"""

import json
import math
import re
import sys
import time

import tpu_worker  # first: it sets the environment

# isort: split

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from drmas_jax import config, learner, sharding
from drmas_jax.models import transformer
from drmas_jax.types import Batch, Spread

ROWS, LENGTH, PAGE = 8, 4096, 128
VOCAB = 151_936

# embed_dim, num_layers, num_heads, mlp_dim
MODELS = {
  "qwen3-0.6b": (1024, 28, 16, 3072),
  "qwen3-4b": (2560, 36, 32, 9728),
}


def spec(on: Mesh, model: str) -> learner.Spec:
  embed_dim, num_layers, num_heads, mlp_dim = MODELS[model]
  decoder = transformer.DecoderConfig(
    family="qwen3",
    vocab_size=VOCAB,
    embed_dim=embed_dim,
    num_layers=num_layers,
    num_heads=num_heads,
    num_kv_heads=8,
    head_dim=128,
    mlp_dim=mlp_dim,
    max_positions=40_960,
    tied=True,
    qk_norm=True,
    compute_dtype="bfloat16",
    remat="full",
  )
  return learner.Spec(
    model=decoder,
    mesh=on,
    loss=config.Loss(),
    optimizer=config.Optimizer(),
    num_agents=2,
    vocab_size=VOCAB,
    head_chunk=256 * on.size,
  )


def compile_step(of: learner.Spec, shared: bool):
  """The train step, on as many shapes as it takes."""
  rows, length, views = ROWS, LENGTH, ROWS * 3 // 2
  if shared:
    rows, length = of.mesh.size, ROWS * LENGTH // of.mesh.size

  def array(dtype, *shape):
    where = sharding.replicated(of.mesh)
    if len(shape) > 1:
      where = sharding.rows(of.mesh, len(shape), leading=1)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

  ids = array(jnp.int32, 1, rows, length)
  numbers = array(jnp.float32, 1, rows, length)
  batch = Batch(
    *(ids, numbers, ids, ids, array(jnp.int32, 1, rows), ids, ids),
    *(numbers, numbers, numbers),
  )
  if shared:
    of_a_row = views // rows
    batch = batch._replace(
      sampled=array(jnp.int32, 1, rows, length // 2),
      spread=Spread(
        source=array(jnp.int32, 1, rows, of_a_row, LENGTH // PAGE),
        segment_ids=array(jnp.int32, 1, rows, of_a_row, LENGTH),
        home=array(jnp.int32, 1, rows, length // PAGE),
      ),
    )
  state = tpu_worker.laid(learner.state_shapes(of), learner.state_shardings(of))
  step = learner.programs(of).train_step  # a partial of a jitted function
  return step.func.lower(
    *step.args,
    *(state, None, (batch, numbers, None, numbers)),
    *(array(jnp.float32, 1), array(jnp.bool_, 1)),
    *(array(jnp.int32), array(jnp.float32, 2)),
  ).compile()


_ARRAY = re.compile(r"\b(f32|bf16|s32)\[([\d,]+)\]")


def _bytes(dtype: str, dims: str) -> int:
  return math.prod(map(int, dims.split(","))) * (2 if dtype == "bf16" else 4)


def main() -> None:
  topology, model, *shared = sys.argv[1:]
  devices = tpu_worker.mesh(topology).devices
  on = Mesh(devices.reshape(1, -1, 1), sharding.AXES)  # all fsdp
  begin = time.monotonic()
  compiled = compile_step(spec(on, model), bool(shared))
  seconds = time.monotonic() - begin
  memory, text = compiled.memory_analysis(), compiled.as_text()
  found = {
    "seconds": round(seconds),
    "arguments": memory.argument_size_in_bytes,
    "temporaries": memory.temp_size_in_bytes,
    "results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
    "kernels": text.count('custom_call_target="tpu_custom_call"'),
    "largest": max(_bytes(*array) for array in _ARRAY.findall(text)),
  }
  print(json.dumps(found))


if __name__ == "__main__":
  main()
