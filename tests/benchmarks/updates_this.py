"""This project's side of `updates_peer.py`, from turns to the new state.

SIZES may have `OPTIONS`, too. Beside "update" and "score" it takes

    {"do": "profile", ..}    an update; adds what each of its operations took
    {"do": "product", "shape": [b, m, k, n], "num": i}    i of them, b at a time
    {"do": "rollout", "num": i}    i prompts and their completions
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rollouts_lab as lab
import updates_profile

from drmas_jax import (
  backbone,
  batching,
  learner,
  placement,
  scores,
  sharding,
)
from drmas_jax import config as config_lib
from drmas_jax.models import transformer, weights
from drmas_jax.types import Batch, Turn

# What SIZES may have beside fields of the decoder:
#   length      of a row
#   chunks      the head's log-probs a chunk at a time, as `backbone` asks for
#   adapters    policies with one each on weights that stay; 0: all are trained
#   checkpoint  a folder, in the place of random weights and of its sizes
OPTIONS = {
  "length": lab.PROMPT + lab.NEW,
  "chunks": True,
  "adapters": 0,
  "checkpoint": "",
}


@dataclasses.dataclass
class Side:
  """A learner and its state, which goes on from update to update.

  Attributes:
    spec: of the learner.
    length: of a row.
    base: what is not trained, or None.
    state: of what is.
  """

  spec: learner.Spec
  length: int
  base: Any
  state: Any

  @classmethod
  def make(cls, sizes: dict, kl_weight: float, rate: float) -> "Side":
    options = {k: sizes.get(k, usual) for k, usual in OPTIONS.items()}
    folder, num = options["checkpoint"], options["adapters"]
    model = model_of(sizes, folder)
    mesh, adapter = lab.one_device(), config_lib.Adapter()
    if num:
      model = dataclasses.replace(
        model, adapter_scale=adapter.alpha / adapter.rank
      )
    spec = learner.Spec(
      model=model,
      mesh=mesh,
      loss=config_lib.Loss(kl_weight=kl_weight),
      optimizer=config_lib.Optimizer(learning_rate=rate),
      num_agents=1,
      vocab_size=model.vocab_size,
      head_chunk=backbone._head_chunk(model.vocab_size, mesh)
      if options["chunks"]
      else 0,
      adapter=adapter if num else None,
      num_policies=max(1, num),
    )
    trained, base = weights_of(model, mesh, folder), None
    if num:
      base = placement.cast(trained, model.compute_dtype, transformer.unstack)
      trained = learner.new_adapters(
        spec, jax.random.split(jax.random.key(1), num)
      )
    state = learner.programs(spec).init(trained)
    return cls(spec, options["length"], base, state)

  def update(self, args: tuple) -> dict:
    step = learner.programs(self.spec).train_step
    self.state, out = step(self.state, self.base, *args)
    jax.block_until_ready((self.state, out))
    return {"loss": float(out.loss[0]), "finite": bool(out.finite.all())}

  def score(self, args: tuple) -> dict:
    data, _, _, trips, temperature = args
    score = learner.programs(self.spec).score
    params = learner.whole(self.base, self.state.params)
    score(params, data[0], trips, temperature).block_until_ready()
    return {}

  def profile(self, args: tuple) -> dict:
    program = learner.programs(self.spec).train_step.func
    text = program.lower(self.spec, self.state, self.base, *args).compile()
    return updates_profile.operations(
      lambda: self.update(args), text.as_text(), self.spec.model.vocab_size
    )

  def arguments(
    self,
    rows,
    gains: np.ndarray,
    old: float,
    micro_tokens: int,
    packed: bool = True,
  ) -> tuple:
    """What a program takes beside the state; as `backbone` makes it.

    Args:
      rows: (ids of the prompt, of the completion) of each turn.
      gains: advantage of each.
      old: log-prob of each token when it was sampled.
      micro_tokens: of a micro-batch.
      packed: False: a row for each turn.
    """
    turns = [_turn(*pair, old) for pair in rows]
    owner = [i % self.spec.num_policies for i in range(len(turns))]
    batch, trips = self._batch(turns, owner, micro_tokens, packed)
    given = batch.sampler_logprobs
    data = placement.global_batch(
      (batch, given, given, batching.gather(gains, batch)), self.spec.mesh
    )
    lengths = [len(t.completion_ids) for t in turns]
    totals = np.bincount(owner, lengths).astype(np.float32)
    one = np.ones([1], np.float32)
    return data, totals, totals > 0, trips, one

  def _batch(self, turns, owner, micro_tokens, packed) -> tuple[Batch, int]:
    """(rows, micro-batches with some)."""
    agent, length = [0] * len(turns), self.length
    if packed:
      chats, buckets = [(i,) for i in range(len(turns))], (length,)
      size = batching.size(
        turns, chats, buckets, owner, row_tokens=micro_tokens
      )
      shape = batching.shape(
        [size],
        buckets,
        micro_tokens=micro_tokens,
        shards=1,
        only_sampled=True,
      )
      places = range(len(turns))
      batch = batching.pack(turns, places, agent, shape, policy_index=owner)
      return batch, shape.trips
    micro_rows = batching.micro_rows(micro_tokens, length, 1)
    trips = -(-len(turns) // micro_rows)
    batch = scores.lay_out(
      turns,
      agent,
      owner,
      num_micro=batching.num_micro(trips),
      micro_rows=micro_rows,
      length=length,
    )
    return batch, trips


def model_of(sizes: dict, folder: str = "") -> transformer.DecoderConfig:
  """Of what SIZES has beside OPTIONS, and of a checkpoint if there is one."""
  sizes = {k: sizes[k] for k in sizes.keys() - OPTIONS.keys()}
  if folder:
    return dataclasses.replace(weights.read_config(folder), **sizes)
  return transformer.DecoderConfig(
    family="qwen3",
    max_positions=32_768,
    rope_theta=1e6,
    tied=True,
    qk_norm=True,
    **sizes,
  )


def weights_of(
  model: transformer.DecoderConfig, mesh: jax.sharding.Mesh, folder: str = ""
) -> transformer.Params:
  """Random ones, or those of a checkpoint."""
  if folder:
    return weights.load(folder, model, mesh)
  where = sharding.replicated(mesh)
  init = jax.jit(transformer.init_params, static_argnums=0, out_shardings=where)
  return init(model, jax.random.key(0))


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


# -- without a learner ---------------------------------------------------------


class Rollouts:
  """Of `lab.MODEL`, by a sampler that is made for the first."""

  sampler: Any = None

  def run(self, num: int) -> dict:
    if self.sampler is None:
      self.sampler = lab.make_sampler(lab.random_params())
    requests = [
      lab.request((i, 0, 0), prompt, lab.NEW)
      for i, prompt in enumerate(lab.prompts(num))
    ]
    lab.serve(self.sampler, requests)
    return {}


def product(shape: Sequence[int], num: int) -> dict:
  """`num` products of a shape [batch, m, k, n], and nothing else."""
  operands = _operands(*shape)
  for _ in range(num):
    _multiply(*operands).block_until_ready()
  return {}


@functools.lru_cache(maxsize=1)
def _operands(batch: int, m: int, k: int, n: int) -> tuple[jax.Array, ...]:
  lead = [batch] if batch > 1 else []
  return jnp.ones([*lead, m, k]), jnp.ones([*lead, k, n])


_multiply = jax.jit(jnp.matmul)
