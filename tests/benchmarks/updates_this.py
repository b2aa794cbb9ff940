"""This project's side of `updates_peer.py`, from turns to the new state.

Beside "update" and "score" it takes

    {"do": "product", "size": n, "num": k}   k products [n, n] x [n, n]
    {"do": "profile", ..}                    an update; adds seconds by kind
"""

import collections
import dataclasses
import gzip
import json
import pathlib
import re
import tempfile
from typing import Any

import jax
import numpy as np

from drmas_jax import backbone, batching, learner, placement, sharding
from drmas_jax import config as config_lib
from drmas_jax.models import transformer
from drmas_jax.types import Turn

# Kinds of work, by an operation's opcode and the name that JAX gave it; the
# first that fits. Attention's own products are its, not the weights'.
KINDS = {
  "attention": "attention.*(checkpoint|bhqk|exp|reduce_max|select_n|/div)",
  "weights' products": "dot_general|transpose$| dot",
  "copies": "dynamic|copy|broadcast|concatenate| transpose",
  "element-wise": "Block",
  "head, loss, optimizer": "",
}


@dataclasses.dataclass
class Side:
  """A learner and its state, which goes on from update to update."""

  spec: learner.Spec
  length: int
  state: Any

  @classmethod
  def make(cls, sizes: dict, kl_weight: float, rate: float) -> "Side":
    mesh = jax.sharding.Mesh(
      np.array(jax.devices()[:1]).reshape(1, 1, 1), sharding.AXES
    )
    model = transformer.DecoderConfig(
      family="qwen3",
      max_positions=32_768,
      rope_theta=1e6,
      tied=True,
      qk_norm=True,
      **{k: v for k, v in sizes.items() if k != "length"},
    )
    spec = learner.Spec(
      model=model,
      mesh=mesh,
      loss=config_lib.Loss(kl_weight=kl_weight),
      optimizer=config_lib.Optimizer(learning_rate=rate),
      num_agents=1,
      vocab_size=model.vocab_size,
      head_chunk=backbone._head_chunk(model.vocab_size, mesh),
    )
    params = jax.jit(transformer.init_params, static_argnums=0)(
      model, jax.random.key(0)
    )
    return cls(spec, sizes["length"], learner.programs(spec).init(params))

  def update(self, args: tuple) -> dict:
    step = learner.programs(self.spec).train_step
    self.state, out = step(self.state, None, *args)
    jax.block_until_ready((self.state, out))
    return {"loss": float(out.loss[0]), "finite": bool(out.finite[0])}

  def score(self, args: tuple) -> dict:
    data, _, _, trips, temperature = args
    score = learner.programs(self.spec).score
    score(self.state.params, data[0], trips, temperature).block_until_ready()
    return {}

  def profile(self, args: tuple) -> dict:
    program = learner.programs(self.spec).train_step.func
    text = program.lower(self.spec, self.state, None, *args).compile().as_text()
    with tempfile.TemporaryDirectory() as folder:
      with jax.profiler.trace(folder):
        self.update(args)
      (path,) = pathlib.Path(folder).rglob("*.trace.json.gz")
      events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return {"seconds": _by_kind(events, text)}

  def arguments(self, rows, gains: np.ndarray, old: float, micro: int) -> tuple:
    """What a program takes beside the state; as `backbone` makes it."""
    turns = [_turn(*pair, old) for pair in rows]
    chats, buckets = [(i,) for i in range(len(turns))], (self.length,)
    shape = batching.shape(
      [batching.size(turns, chats, buckets)],
      buckets,
      micro_tokens=micro,
      shards=1,
    )
    batch = batching.pack(turns, range(len(turns)), [0] * len(turns), shape)
    given, num_tokens = batch.sampler_logprobs, batch.mask.sum()
    data = placement.global_batch(
      (batch, given, given, batching.gather(gains, batch)), self.spec.mesh
    )
    one = np.ones([1], np.float32)
    return data, one * num_tokens, one > 0, shape.trips, one


def _turn(prompt: np.ndarray, completion: np.ndarray, old: float) -> Turn:
  num = len(completion)
  return Turn(
    agent="",
    policy="",
    index=0,
    prompt_ids=prompt,
    completion_ids=completion,
    sampler_logprobs=np.full(num, old, np.float32),
    log_kept_mass=np.zeros(num, np.float32),
    stop_reason="stop",
    policy_version=0,
    valid=True,
  )


def _by_kind(events: list[dict], text: str) -> dict[str, float]:
  """Seconds of the operations of a program's text, added up over threads."""
  names = {}
  for line in text.splitlines():
    found = re.match(r"\s*(?:ROOT )?%?([\w.-]+) = .*?( [\w-]+)\(", line)
    if found and found[2] not in (" while", " call", " conditional"):
      made = re.search('op_name="([^"]*)"', line)
      names[found[1]] = found[2] + " " + (made[1] if made else found[1])
  seconds = collections.Counter()
  for event in events:
    name = names.get(event.get("name"))
    if name is not None and event.get("ph") == "X":
      kind = next(k for k, fits in KINDS.items() if re.search(fits, name))
      seconds[kind] += event["dur"] / 1e6
  return {kind: round(spent, 3) for kind, spent in seconds.most_common()}


def product(size: int, num: int) -> dict:
  x = np.ones([size, size], np.float32)
  for _ in range(num):
    _multiply(x).block_until_ready()
  return {"flop": 2 * num * size**3}


_multiply = jax.jit(lambda x: x @ x)
