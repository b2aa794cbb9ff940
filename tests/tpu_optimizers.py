"""Updates of a TPU that is not there, with states here and in host memory.

    python tests/tpu_optimizers.py v5e:2x2 adamw [adapters]

As tpu_worker.py; the last line is a JSON object: bytes per device, without and
with `offload`, of all weights or of two policies' adapters.
"""

import dataclasses
import functools
import json
import sys

import tpu_worker  # first: it sets the environment that jax is loaded in

# isort: split

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from drmas_jax import config, learner, sharding
from drmas_jax.models import transformer

MODEL = transformer.DecoderConfig(
  family="qwen3",
  vocab_size=4096,
  embed_dim=1024,
  num_layers=12,
  num_heads=8,
  num_kv_heads=4,
  head_dim=128,
  mlp_dim=3072,
  max_positions=64,
  qk_norm=True,
)


def spec_of(
  on: Mesh, optimizer: config.Optimizer, adapters: bool
) -> learner.Spec:
  spec = learner.Spec(MODEL, on, None, optimizer, 1, MODEL.vocab_size)
  if not adapters:
    return spec
  return dataclasses.replace(spec, adapter=config.Adapter(256), num_policies=2)


def update(spec: learner.Spec) -> dict[str, int]:
  """What the learner does with a gradient that it has added up in a loop."""
  where = learner.state_shardings(spec)
  state = tpu_worker.laid(learner.state_shapes(spec), where)
  apply, live = functools.partial(learner._apply, spec), jnp.array(True)
  if spec.adapter is not None:
    apply, live = jax.vmap(apply), jnp.ones([spec.num_policies], bool)

  def step(state, num):
    grads = jax.lax.fori_loop(
      0,
      num,
      lambda i, grads: jax.tree.map(
        lambda g, p: g + i * p, grads, state.params
      ),
      jax.tree.map(jnp.zeros_like, state.params),
    )
    return apply(state, grads, live)

  whole = sharding.replicated(spec.mesh)
  memory = (
    jax.jit(step, donate_argnums=0, out_shardings=(where, whole, whole))
    .lower(state, jax.ShapeDtypeStruct((), "int32"))
    .compile()
    .memory_analysis()
  )
  return {
    "host": memory.host_argument_size_in_bytes,
    "device": memory.argument_size_in_bytes,
    "temporary": memory.temp_size_in_bytes,
  }


def main() -> None:
  _, topology, rule, *adapters = sys.argv
  devices = tpu_worker.mesh(topology).devices.reshape(1, 2, 2)
  on = Mesh(devices, sharding.AXES)
  found = {
    where: update(
      spec_of(
        on,
        config.Optimizer(name=rule, offload=where == "host"),
        bool(adapters),
      )
    )
    for where in ("device", "host")
  }
  print(json.dumps(found))


if __name__ == "__main__":
  main()
