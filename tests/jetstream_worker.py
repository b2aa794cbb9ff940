"""JetStream's own Driver and gRPC server over our engine (test_jetstream.py).

A process of its own: JetStream kills the process whose driver thread fails.
Prints JSON: {scenario: answer}.
"""

# ruff: noqa: E402 (jetstream's modules load after what mends them)

import asyncio
import functools
import json
import logging
import os
import queue
import socket
import sys
import time
import types

import xla_flags

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = xla_flags.flags(2)

import grpc
import jax
import jax.numpy as jnp
import numpy as np

from drmas_jax import config as config_lib
from drmas_jax import decoding, engine, jetstream_compat
from drmas_jax.models import transformer

orchestrator = jetstream_compat.orchestrator()

from jetstream.core import config_lib as jetstream_config
from jetstream.core import server_lib
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc
from jetstream.engine import token_utils

LIMIT_S = 60
NUM_SLOTS, MAX_LENGTH, BUCKET = 4, 48, 32
STOP, BEGIN = 1, 3
MODEL = transformer.DecoderConfig(
  family="qwen2",
  vocab_size=64,
  embed_dim=32,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  mlp_dim=48,
  max_positions=64,
  qkv_bias=True,
)


class Letters(jetstream_compat.Tokenizer):
  """Token i is the character i + 48."""

  pad_id, eos_id, bos_id = 0, STOP, BEGIN

  def encode(self, s, **kwargs):
    ids = np.array([ord(c) - 48 for c in s], np.int32)
    return token_utils.pad_tokens(ids, self.bos_id, self.pad_id, **kwargs)

  def decode(self, token_ids):
    return "".join(chr(i + 48) for i in token_ids)


@functools.cache
def weights():
  """By numpy, which compiles nothing."""
  rng = np.random.default_rng(1)
  return jax.tree.map(
    lambda p: rng.normal(0, 0.3, p.shape).astype(np.float32),
    transformer.param_shapes(MODEL),
  )


def make_engine(devices=None):
  """On the first device, its weights loaded, greedy."""
  device = np.array((devices or jax.devices())[:1]).reshape(1, 1, 1)
  spec = decoding.Spec(
    model=MODEL,
    mesh=jax.sharding.Mesh(device, ("data", "fsdp", "tensor")),
    num_slots=NUM_SLOTS,
    max_length=MAX_LENGTH,
    prefill_rows=1,
    prefill_buckets=(16, BUCKET),
    steps_per_call=4,
    stop_ids=(STOP,),
    vocab_size=64,
    page_size=8,
    max_pages=1 + NUM_SLOTS * MAX_LENGTH // 8,
  )
  made = engine.PolicyEngine(spec, Letters())
  made.default_sampling = config_lib.Sampling(temperature=0)
  params = transformer.unstack(weights())
  made.resume(jax.device_put(params, device.item()), 0)
  return made


@jax.jit
def _next(params, tokens, length):
  zero = jnp.zeros([1, MAX_LENGTH], jnp.int32)
  inputs = transformer.Inputs(
    tokens[None], jnp.arange(MAX_LENGTH)[None], zero + 1, zero[:, 0]
  )
  hidden, _ = transformer.forward(params, inputs, config=MODEL)
  return jnp.argmax(hidden[0, length - 1] @ transformer.head(params, MODEL))


def greedy(prompt, max_tokens):
  """Each token by a whole forward pass over what is before it."""
  ids = list(prompt)
  limit = min(len(ids) + max_tokens, MAX_LENGTH)
  while len(ids) < limit:
    row = np.zeros([MAX_LENGTH], np.int32)
    row[: len(ids)] = ids
    ids.append(int(_next(weights(), row, len(ids))))
    if ids[-1] in Letters().stop_tokens:  # the padding token is one to it
      ids.pop()  # JetStream keeps it to itself
      break
  return ids[len(prompt) :]


def prompts(num):
  """Of 1 to 16 tokens, the first is JetStream's: that of a beginning."""
  rng = np.random.default_rng(0)
  sizes = [(7 * i) % 16 for i in range(num)]
  return [[BEGIN, *rng.integers(4, 64, n).tolist()] for n in sizes]


def request(prompt, max_tokens, session=""):
  content = jetstream_pb2.DecodeRequest.TokenContent(token_ids=prompt[1:])
  return jetstream_pb2.DecodeRequest(
    token_content=content, max_tokens=max_tokens, session_cache=session
  )


async def read(stream):
  """The tokens of one stream of responses."""
  ids = []
  async with asyncio.timeout(LIMIT_S):
    async for response in stream:
      ids += response.stream_content.samples[0].token_ids
  return ids


def drive(driver, num=10, rounds=1):
  """More requests than slots, round after round; then the Driver ends."""
  servicer = orchestrator.LLMOrchestrator(driver)
  asked = [(p, 3 + i) for i, p in enumerate(prompts(num))]
  got = []

  async def ask():
    for _ in range(rounds):
      streams = [servicer.Decode(request(*a)) for a in asked]
      got.extend(await asyncio.gather(*map(read, streams)))
      await asyncio.sleep(0.2)
    await asyncio.to_thread(driver.stop)  # its threads use this very loop

  asyncio.run(ask())
  assert not any(t.is_alive() for t in driver._all_threads)
  return {"got": got, "wanted": [greedy(*a) for a in asked] * rounds}


def interleaved(**kwargs):
  """One engine prefills and generates."""
  made = make_engine()
  driver = orchestrator.Driver(
    prefill_engines=[made],
    generate_engines=[made],
    prefill_params=[made.params],
    generate_params=[made.params],
    interleaved_mode=True,
  )
  return drive(driver, **kwargs)


def apart():
  """One engine prefills, another takes its prefixes and generates."""
  first, second = make_engine(), make_engine(jax.devices()[-1:])
  driver = orchestrator.Driver(
    prefill_engines=[first],
    generate_engines=[second],
    prefill_params=[first.params],
    generate_params=[second.params],
  )
  return drive(driver)


class _Slow(queue.Queue):
  """Whoever takes one of the slots is held up with it."""

  def get(self, block=True, timeout=None):
    item = super().get(block, timeout)
    if self.maxsize == NUM_SLOTS:
      time.sleep(0.05)
    return item


def last_slot_comes_free():
  """While the generate thread looks for another one to fill."""
  orchestrator.queue = types.SimpleNamespace(
    Queue=_Slow, Empty=queue.Empty, Full=queue.Full
  )
  return interleaved(num=3, rounds=2)


def _port():
  with socket.socket() as free:
    free.bind(("localhost", 0))
    return free.getsockname()[1]


def server():
  """JetStream's gRPC server, its client's stub, 20 requests on 4 slots."""
  port = _port()
  config = jetstream_config.ServerConfig(
    interleaved_slices=(f"cpu={jax.device_count()}",),
    interleaved_engine_create_fns=(make_engine,),
  )
  served = server_lib.run(port=port, config=config, devices=jax.devices())
  try:
    return asyncio.run(_client(port))
  finally:
    served.stop()


async def _client(port):
  asked = [(p, 2 + i % 9) for i, p in enumerate(prompts(20))]
  asked.append((prompts(2)[1], 100))  # beyond the end of the cache
  long = [BEGIN, *range(4, 44)]  # JetStream keeps its end
  session = asked[4][0][1:]  # of a session, so JetStream puts no begin there
  async with grpc.aio.insecure_channel(f"localhost:{port}") as channel:
    stub = jetstream_pb2_grpc.OrchestratorStub(channel)
    health = await stub.HealthCheck(
      jetstream_pb2.HealthCheckRequest(), timeout=LIMIT_S
    )
    leaver = stub.Decode(request(asked[0][0], 40), timeout=LIMIT_S)
    await leaver.read()
    leaver.cancel()
    streams = [stub.Decode(request(*a), timeout=LIMIT_S) for a in asked]
    streams.append(stub.Decode(request(long, 5), timeout=LIMIT_S))
    streams += [
      stub.Decode(request([BEGIN, *ids], 5, "some"), timeout=LIMIT_S)
      for ids in (session, [])
    ]
    got = await asyncio.gather(*map(read, streams))
    text = stub.Decode(
      jetstream_pb2.DecodeRequest(
        text_content=jetstream_pb2.DecodeRequest.TextContent(
          text=Letters().decode(asked[5][0][1:])
        ),
        max_tokens=6,
      ),
      timeout=LIMIT_S,
    )
    said = "".join([r.stream_content.samples[0].text async for r in text])
  asked += [(ids, 5) for ids in (long[-BUCKET:], session, [BEGIN])]
  wanted = [greedy(*a) for a in asked]
  return {
    "live": health.is_live,
    "got": [*got, said],
    "wanted": [*wanted, Letters().decode(greedy(asked[5][0], 6))],
  }


if __name__ == "__main__":
  answers = {
    scenario.__name__: scenario()
    for scenario in (interleaved, apart, server, last_slot_comes_free)
  }
  answers["foreign"] = sorted({"tensorflow", "seqio"} & sys.modules.keys())
  answers["log_level"] = logging.getLogger().level
  print(json.dumps(answers))
