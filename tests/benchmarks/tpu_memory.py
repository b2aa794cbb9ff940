"""What an engine's programs take of a TPU's memory, paged and dense.

    python tests/benchmarks/tpu_memory.py [--model Qwen/Qwen3-4B]
      [--topology v5e:2x2] [--slots 32] [--length 12288] [--tokens 48000]

Needs no TPU: the package libtpu compiles for one, in minutes. One episode of
the full length among short ones is what the pool of `--tokens` is for.

    kernel   decoding on the pool, by the fused kernel
    prefill  chunks of 512 tokens, one after the other, into that pool
    xla      decoding by XLA's own code; it works on a copy of the pages in use,
             and the pool, which is not counted here, is as large again
    dense    the same where every slot has room for the full length

A line for each with GiB per device and, of the compiled program, how often it
copies a layer's whole pool; the last line is JSON, in bytes.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
import time
import types

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import tpu_worker  # first: it sets the environment that jax is loaded in

# isort: split
import jax
import jax.numpy as jnp

from drmas_jax import decoding, sharding
from drmas_jax.models import llama3, paged, qwen2, qwen3, transformer

SIZES = llama3.SIZES | qwen2.SIZES | qwen3.SIZES


def _without_kernel() -> types.ModuleType:
  """The decoder as it is where no kernel serves its cache."""
  module = types.ModuleType("without_kernel")
  vars(module).update(vars(transformer) | {"fused": lambda *_: False})
  return module


def _spec(args, mesh) -> decoding.Spec:
  model = dataclasses.replace(SIZES[args.model], compute_dtype="bfloat16")
  if args.layers:
    model = dataclasses.replace(model, num_layers=args.layers)
  return decoding.Spec(
    model=model,
    mesh=mesh,
    num_slots=args.slots,
    max_length=args.length,
    prefill_rows=8,
    prefill_buckets=(512,),
    steps_per_call=8,
    stop_ids=(0,),
    vocab_size=model.vocab_size,
    page_size=tpu_worker.PAGE,
    max_pages=-(-args.tokens // tpu_worker.PAGE) + 1,
    dtype="bfloat16",
    cache_dtype=args.cache_dtype,
  )


def _state(spec: decoding.Spec):
  """Weights and decode state as shapes, laid out as the engine does."""
  params = jax.eval_shape(
    transformer.unstack, transformer.param_shapes(spec.model)
  )
  params = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, spec.dtype), params
  )
  init = decoding.programs(spec).init
  state = init.func.lower(*init.args, spec.max_pages)
  return (
    tpu_worker.laid(params, decoding.param_shardings(spec)),
    tpu_worker.laid(state.out_info, state.compile().output_shardings),
  )


def _compile(program: functools.partial, pages: int, *args) -> dict:
  start = time.monotonic()
  try:
    compiled = program.func.lower(*program.args, *args).compile()
    found = tpu_worker.report(compiled, pages)
  except jax.errors.JaxRuntimeError as e:  # it does not fit
    found = {"fault": str(e)}
  found["compile_seconds"] = round(time.monotonic() - start, 1)
  return found


def generate(spec: decoding.Spec) -> dict:
  params, state = _state(spec)
  ints = functools.partial(
    jax.ShapeDtypeStruct,
    dtype=jnp.int32,
    sharding=sharding.replicated(spec.mesh),
  )
  programs, tail = decoding.programs(spec), (spec.steps_per_call, True)
  table = ints([spec.num_slots, spec.pages_per_row])
  if spec.fused:
    program, tail = programs.generate_on_pool, (ints([spec.num_slots]), *tail)
    pages = paged.Pages(table)
  else:  # as if the pool were what was taken of one
    program, owner = programs.generate, ints([spec.max_pages])
    pages = paged.Pages(table, None, owner, owner)
  return _compile(program, spec.max_pages, params, state, pages, *tail)


def prefill(spec: decoding.Spec) -> dict:
  params, state = _state(spec)
  rows = spec.num_slots
  ints = functools.partial(
    jax.ShapeDtypeStruct,
    dtype=jnp.int32,
    sharding=sharding.replicated(spec.mesh),
  )
  return _compile(
    decoding.programs(spec).prefill,
    spec.max_pages,
    params,
    state.cache,
    ints([]),
    (
      ints([rows, spec.prefill_buckets[0]]),
      *[ints([rows])] * 4,
      ints([rows, spec.pages_per_row]),
    ),
  )


def _line(case: dict) -> str:
  if "fault" in case:
    return case["fault"]
  sizes = ", ".join(
    f"{key} {case[key] / 2**30:.2f}"
    for key in ("arguments", "temporaries", "results")
  )
  return (
    f"{sizes} GiB; {case['kernels']} kernels, {case['pool_copies']} pool copies"
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--model", default="Qwen/Qwen3-4B", choices=SIZES)
  parser.add_argument("--topology", default="v5e:2x2")
  parser.add_argument("--slots", type=int, default=32)
  parser.add_argument("--length", type=int, default=12_288)
  parser.add_argument("--tokens", type=int, default=48_000)
  parser.add_argument("--cache_dtype", default="bfloat16")
  parser.add_argument("--layers", type=int, default=0, help="0: the model's")
  parser.add_argument("--only", default="kernel,prefill,xla,dense")
  args = parser.parse_args()

  spec = _spec(args, tpu_worker.mesh(args.topology))
  plain = dataclasses.replace(spec, decoder=_without_kernel())
  dense = dataclasses.replace(
    plain, max_pages=args.slots * spec.pages_per_row + 1
  )
  cases = {
    "kernel": functools.partial(generate, spec),
    "prefill": functools.partial(prefill, spec),
    "xla": functools.partial(generate, plain),
    "dense": functools.partial(generate, dense),
  }
  found = {}
  for name in args.only.split(","):
    found[name] = case = cases[name]()
    print(f"{name:8} {_line(case)}; {case['compile_seconds']} s", flush=True)
  print(json.dumps(vars(args) | found))


if __name__ == "__main__":
  main()
