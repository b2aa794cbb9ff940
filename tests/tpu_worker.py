"""Programs of a TPU that is not there: libtpu compiles for a topology.

    python tests/tpu_worker.py v5e:2x2

A process of its own, with a time limit: an unfortunate topology aborts it. The
last line it prints is a JSON object: for each case of `CASES`, what decoding
one token a row with one layer's cache compiles to.
"""

import json
import os
import re
import sys

os.environ |= {
  "JAX_PLATFORMS": "cpu",
  "XLA_FLAGS": "",
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # there is no device to share
}

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding

from drmas_jax import sharding
from drmas_jax.models import paged

_TYPES = {"v5e": "v5litepod-4", "v5p": "v5p-8", "v6e": "v6e-4"}

ROWS, LENGTH, PAGE = 32, 12_288, 128
PAGES = ROWS * LENGTH // PAGE + 1

# Query heads, kv heads, head dim, dtype of activations and of the cache.
CASES = {
  "qwen3-4b": (32, 8, 128, "bfloat16", "bfloat16"),
  "qwen3-4b int8": (32, 8, 128, "bfloat16", "int8"),
  "llama3-1b": (32, 8, 64, "bfloat16", "bfloat16"),
  "float32": (14, 2, 64, "float32", "float32"),
}


def mesh(topology: str) -> Mesh:
  """All devices of one host as the tensor axis."""
  os.environ["TPU_ACCELERATOR_TYPE"] = _TYPES[topology.partition(":")[0]]
  devices = topologies.get_topology_desc(
    platform="tpu", topology_name=topology
  ).devices
  return Mesh(np.asarray(devices).reshape(1, 1, -1), sharding.AXES)


def laid(shapes, shardings):
  """Shapes with the shardings of a tree of the same structure."""
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    shardings,
  )


def report(compiled, num_pages: int) -> dict:
  """Bytes per device, kernels, and what moves a whole pool of `num_pages`."""
  memory, text = compiled.memory_analysis(), compiled.as_text()
  moved = rf"= \w+\[{num_pages},[^=]* (?:copy|transpose|all-gather)\("
  return {
    "arguments": memory.argument_size_in_bytes,
    "temporaries": memory.temp_size_in_bytes,
    "results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
    "kernels": text.count('custom_call_target="tpu_custom_call"'),
    "pool_copies": len(re.findall(moved, text)),
  }


def decode(on: Mesh, num_heads, kv_heads, head_dim, dtype, cache_dtype):
  """Steps in a loop, as the engine's: append a token, attend, go on."""

  def steps(q, k, cache, table, positions):
    pages = paged.Pages(table)

    def body(_, carry):
      q, cache, positions = carry
      new = k + q[:, :, :kv_heads]
      cache = paged.append(cache, new, new, positions, pages)
      q = paged.attend(q, cache, positions, pages, on)
      return q, cache, positions + 1

    return jax.lax.fori_loop(0, 8, body, (q, cache, positions))

  def array(dtype, *shape, axes=None):
    axes = axes or (None,) * len(shape)
    where = NamedSharding(on, sharding.spec(axes, shape, on))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

  held = (None, None, "cache_heads", None)
  pool = jax.eval_shape(
    lambda: paged.init(PAGES, PAGE, kv_heads, head_dim, jnp.dtype(cache_dtype))
  )
  where = sharding.shardings(paged.axes(jnp.dtype(cache_dtype)), pool, on)
  return (
    jax.jit(steps, donate_argnums=2)
    .lower(
      array(dtype, ROWS, 1, num_heads, head_dim, axes=held),
      array(dtype, ROWS, 1, kv_heads, head_dim, axes=held),
      laid(pool, where),
      array("int32", ROWS, LENGTH // PAGE),
      array("int32", ROWS, 1),
    )
    .compile()
  )


def main() -> None:
  on = mesh(sys.argv[1])
  print(
    json.dumps(
      {name: report(decode(on, *case), PAGES) for name, case in CASES.items()}
    )
  )


if __name__ == "__main__":
  main()
