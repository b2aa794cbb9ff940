"""The device side of sampling, on JetStream's engine contract.

    prefill   R prompts of one bucket -> Prefix (cache rows, last hidden state)
    insert    rows of a Prefix -> slots of the DecodeState
    generate  sample from the last hidden state, run the decoder, in all slots

A slot keeps the hidden state that its next token is sampled from, so each of
the G slots that share one prefill draws its own first token, and the first
token is no special case. The random key of a token is
fold_in(fold_in(fold_in(key, position), episode), turn), then the number of
tokens generated: it depends on the request alone, not on slot or time.

The programs are built once per `Spec` by `programs`, so that engines of equal
shape share them; the class holds weights and state and only forwards.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from drmas_jax import jetstream_compat, logprobs, sampling, sharding
from drmas_jax.models import transformer


@dataclasses.dataclass(frozen=True)
class Spec:
  """All that decides the programs of an engine.

  Attributes:
    model: the decoder, in the engine's dtype.
    mesh: one host's devices.
    num_slots, max_length, prefill_rows, steps_per_call: see `config.Engine`.
    prefill_buckets: padded lengths of prompts, rising.
    stop_ids: tokens that end a completion.
    vocab_size: real tokens; ids from here on are padding of the head.
    dtype: of the cache.
  """

  model: transformer.DecoderConfig
  mesh: Mesh
  num_slots: int
  max_length: int
  prefill_rows: int
  prefill_buckets: tuple[int, ...]
  steps_per_call: int
  stop_ids: tuple[int, ...]
  vocab_size: int
  dtype: str = "float32"


class Requests(NamedTuple):
  """What the slots need to know of their requests; [S] unless said.

  Attributes:
    seed: [S, 3] int32: task position, episode, turn.
    limit: most tokens to generate.
    temperature, top_k, top_p: see `sampling.sample`.
  """

  seed: Any
  limit: Any
  temperature: Any
  top_k: Any
  top_p: Any


class Prefix(NamedTuple):
  """R prefilled prompts: cache [R, .., bucket], hidden [R, D], length [R]."""

  cache: Any
  hidden: Any
  length: Any


class DecodeState(NamedTuple):
  """Everything a step reads and writes; leading dim S, the slots."""

  cache: Any
  hidden: Any
  length: Any
  generated: Any
  active: Any
  key: Any
  requests: Requests


class Generated(NamedTuple):
  """Of up to n steps: [n, S] each, valid where the slot was active.

  `num_steps` says how many ran; `active` [S] which slots go on.
  """

  tokens: Any
  logprobs: Any
  log_kept_mass: Any
  valid: Any
  num_steps: Any
  active: Any


class Programs(NamedTuple):
  init: Any
  prefill: Any
  insert: Any
  generate: Any


def _state_axes(spec: Spec) -> DecodeState:
  slots = ("slots",)
  return DecodeState(
    cache=transformer.cache_axes(spec.model),
    hidden=("slots", "embed"),
    length=slots,
    generated=slots,
    active=slots,
    key=("slots", None),
    requests=Requests(("slots", None), slots, slots, slots, slots),
  )


def _prefix_shardings(spec: Spec) -> Prefix:
  """The same for every bucket: rows as slots are, and lengths whole."""
  bucket = spec.prefill_buckets[0]
  shapes = jax.eval_shape(
    lambda: Prefix(
      transformer.init_cache(
        spec.model, spec.prefill_rows, bucket, jnp.dtype(spec.dtype)
      ),
      jnp.zeros([spec.prefill_rows, spec.model.embed_dim]),
      jnp.zeros([spec.prefill_rows], jnp.int32),
    )
  )
  axes = Prefix(
    transformer.cache_axes(spec.model), ("slots", "embed"), ("slots",)
  )
  return sharding.shardings(axes, shapes, spec.mesh)


def _init(spec: Spec) -> DecodeState:
  num = spec.num_slots
  zeros = jnp.zeros([num], jnp.int32)
  return DecodeState(
    cache=transformer.init_cache(
      spec.model, num, spec.max_length, jnp.dtype(spec.dtype)
    ),
    hidden=jnp.zeros([num, spec.model.embed_dim], jnp.dtype(spec.dtype)),
    length=zeros,
    generated=zeros,
    active=jnp.zeros([num], bool),
    key=jnp.zeros([num, 2], jnp.uint32),
    requests=Requests(
      seed=jnp.zeros([num, 3], jnp.int32),
      limit=zeros,
      temperature=jnp.ones([num], jnp.float32),
      top_k=zeros,
      top_p=jnp.ones([num], jnp.float32),
    ),
  )


def _prefill(spec: Spec, params, tokens, lengths, existing: Prefix | None):
  """tokens [R, bucket], lengths [R]; `existing` has the text before them."""
  rows, bucket = tokens.shape
  start = jnp.zeros([rows], jnp.int32)
  room = bucket
  if existing is not None:
    start = existing.length
    room = min(bucket + _cache_length(spec, existing.cache), spec.max_length)
  cache = transformer.init_cache(spec.model, rows, room, jnp.dtype(spec.dtype))
  if existing is not None:
    cache = jax.tree.map(
      lambda wide, narrow: jax.lax.dynamic_update_slice(
        wide, narrow, (0,) * wide.ndim
      ),
      cache,
      existing.cache,
    )
  offsets = jnp.arange(bucket, dtype=jnp.int32)
  inputs = transformer.Inputs(
    tokens=tokens,
    positions=start[:, None] + offsets,
    segment_ids=(offsets < lengths[:, None]).astype(jnp.int32),
    policy_index=jnp.zeros([rows], jnp.int32),
  )
  hidden, cache = transformer.forward(
    params, inputs, cache, config=spec.model, mesh=spec.mesh
  )
  last = jnp.maximum(lengths - 1, 0)
  hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
  return Prefix(cache, hidden, start + lengths)


def _cache_length(spec: Spec, cache: Any) -> int:
  """How many positions a cache has room for (static)."""
  axes = jax.tree.leaves(
    transformer.cache_axes(spec.model),
    is_leaf=sharding.is_axes,
  )
  return jax.tree.leaves(cache)[0].shape[axes[0].index("length")]


def _insert(spec: Spec, prefix, state, rows, slots, count, key, requests):
  """Row rows[i] goes to slot slots[i] for i < count, one after the other.

  A loop with a dynamic number of trips: one program for any number of
  insertions, and work in proportion to it.
  """
  del spec

  def put(array, value, slot):
    return jax.lax.dynamic_update_slice(
      array, value[None].astype(array.dtype), (slot,) + (0,) * value.ndim
    )

  def body(i, state):
    row, slot = rows[i], slots[i]
    seed = requests.seed[i]
    own = functools.reduce(jax.random.fold_in, seed, key)
    return DecodeState(
      cache=jax.tree.map(
        lambda c, p: put(
          c, jax.lax.dynamic_index_in_dim(p, row, keepdims=False), slot
        ),
        state.cache,
        prefix.cache,
      ),
      hidden=put(state.hidden, prefix.hidden[row], slot),
      length=state.length.at[slot].set(prefix.length[row]),
      generated=state.generated.at[slot].set(0),
      active=state.active.at[slot].set(True),
      key=put(state.key, own, slot),
      requests=jax.tree.map(
        lambda a, r: put(a, r[i], slot), state.requests, requests
      ),
    )

  return jax.lax.fori_loop(0, count, body, state)


def _step(spec: Spec, params, state: DecodeState):
  """One token in every slot; a slot that is not active stays as it is."""
  head = transformer.head(params, spec.model)
  logits = logprobs.logits(state.hidden, head, spec.vocab_size)
  keys = jax.vmap(jax.random.fold_in)(state.key, state.generated)
  ask = state.requests
  drawn = sampling.sample(keys, logits, ask.temperature, ask.top_k, ask.top_p)
  active = state.active
  inputs = transformer.Inputs(
    tokens=drawn.token[:, None],
    # A slot that has ended writes where it would have gone on: at a place that
    # is overwritten before anything attends to it.
    positions=jnp.minimum(state.length, spec.max_length - 1)[:, None],
    segment_ids=jnp.ones([spec.num_slots, 1], jnp.int32),
    policy_index=jnp.zeros([spec.num_slots], jnp.int32),
  )
  hidden, cache = transformer.forward(
    params, inputs, state.cache, config=spec.model, mesh=spec.mesh
  )
  generated = state.generated + active
  stops = jnp.asarray(spec.stop_ids, jnp.int32)
  ended = jnp.any(drawn.token[:, None] == stops, axis=-1)
  state = state._replace(
    cache=cache,
    hidden=hidden[:, 0].astype(state.hidden.dtype),
    length=state.length + active,
    generated=generated,
    active=active & ~ended & (generated < ask.limit),
  )
  return state, drawn, active


def _generate(spec: Spec, params, state, live, num_steps, leave_when_free):
  """Up to num_steps steps in one program.

  Args:
    spec: of the engine.
    params: rollout weights.
    state: donated.
    live: [S] bool, False ends a slot (its tag closed, its episode is gone).
    num_steps: at most spec.steps_per_call.
    leave_when_free: return as soon as a slot ends (there is work for it).
  """
  size = (spec.steps_per_call, spec.num_slots)
  state = state._replace(active=state.active & live)
  started = jnp.sum(state.active)
  out = Generated(
    tokens=jnp.zeros(size, jnp.int32),
    logprobs=jnp.zeros(size, jnp.float32),
    log_kept_mass=jnp.zeros(size, jnp.float32),
    valid=jnp.zeros(size, bool),
    num_steps=jnp.zeros([], jnp.int32),
    active=state.active,
  )

  def go_on(carry):
    state, out = carry
    running = jnp.sum(state.active)
    free = leave_when_free & (running < started)
    return (out.num_steps < num_steps) & (running > 0) & ~free

  def body(carry):
    state, out = carry
    state, drawn, valid = _step(spec, params, state)
    i = out.num_steps
    out = Generated(
      tokens=out.tokens.at[i].set(drawn.token),
      logprobs=out.logprobs.at[i].set(drawn.logprob),
      log_kept_mass=out.log_kept_mass.at[i].set(drawn.log_kept_mass),
      valid=out.valid.at[i].set(valid),
      num_steps=i + 1,
      active=state.active,
    )
    return state, out

  return jax.lax.while_loop(go_on, body, (state, out))


@functools.cache
def param_shardings(spec: Spec) -> Any:
  """Of the rollout weights, layer by layer (`transformer.unstack`)."""
  shapes = jax.eval_shape(
    transformer.unstack, transformer.param_shapes(spec.model)
  )
  axes = transformer.param_axes(spec.model)
  layer = jax.tree.map(
    lambda names: names[1:], axes["layers"], is_leaf=sharding.is_axes
  )
  axes["layers"] = [layer] * spec.model.num_layers
  return sharding.shardings(axes, shapes, spec.mesh)


def to_host(out: Generated) -> Generated:
  """Waits for a run and fetches it in one transfer."""
  return jax.device_get(out)


@functools.cache
def programs(spec: Spec) -> Programs:
  """The jitted programs of a spec; every state keeps its shardings."""
  axes = _state_axes(spec)
  shapes = jax.eval_shape(functools.partial(_init, spec))
  state = sharding.shardings(axes, shapes, spec.mesh)
  whole = sharding.replicated(spec.mesh)
  jit = functools.partial(jax.jit, static_argnums=0)
  return Programs(
    init=functools.partial(jit(_init, out_shardings=state), spec),
    prefill=functools.partial(
      jit(_prefill, out_shardings=_prefix_shardings(spec)), spec
    ),
    insert=functools.partial(
      jit(_insert, donate_argnums=2, out_shardings=state), spec
    ),
    generate=functools.partial(
      jit(_generate, donate_argnums=2, out_shardings=(state, whole)), spec
    ),
  )


class PolicyEngine(jetstream_compat.Engine):
  """JetStream's contract over one policy, and what training needs beyond it.

  The sampler calls `prefill_rows`, `insert_rows` and `generate_n` on the state
  that the engine holds; the contract's own methods take and return states.
  """

  def __init__(self, spec: Spec, tokenizer: Any = None):
    """`tokenizer` only serves JetStream's own orchestrator."""
    self.spec = spec
    self.key = jax.random.key_data(jax.random.key(0))  # root of all sampling
    self.params: Any = None
    self.state: DecodeState | None = None
    self.version = -1
    self._tokenizer = tokenizer
    self._programs = programs(spec)

  # -- what training uses ------------------------------------------------------

  def resume(self, params: Any, version: int) -> None:
    """Takes rollout weights (after `version` updates) and an empty cache."""
    self.params, self.version = params, version
    self.state = self._programs.init()

  def release(self) -> None:
    """Drops the rollout weights and the cache."""
    self.params = self.state = None

  def bucket(self, length: int) -> int:
    """The padded length of a prompt: a function of its own length alone."""
    for size in self.spec.prefill_buckets:
      if length <= size:
        return size
    raise ValueError(
      f"prompt of {length} tokens; allowed are at most "
      f"{self.spec.prefill_buckets[-1]}; raise engine.max_length"
    )

  def prefill_rows(self, prompts: list[np.ndarray]) -> Prefix:
    """Prefills up to prefill_rows prompts of one bucket; pads the rest."""
    rows = self.spec.prefill_rows
    bucket = self.bucket(max(len(p) for p in prompts))
    tokens = np.zeros([rows, bucket], np.int32)
    lengths = np.ones([rows], np.int32)
    for i, prompt in enumerate(prompts):
      tokens[i, : len(prompt)] = prompt
      lengths[i] = len(prompt)
    return self._programs.prefill(self.params, tokens, lengths, None)

  def insert_rows(
    self, prefix: Prefix, rows: list[int], slots: list[int], requests: Requests
  ) -> None:
    """Row rows[i] of `prefix` goes to slots[i] with requests[i]."""
    num = self.spec.num_slots
    pad = num - len(slots)
    self.state = self._programs.insert(
      prefix,
      self.state,
      np.asarray(rows + [0] * pad, np.int32),
      np.asarray(slots + [0] * pad, np.int32),
      len(slots),
      self.key,
      jax.tree.map(
        lambda a: np.concatenate([a, np.zeros([pad, *a.shape[1:]], a.dtype)]),
        requests,
      ),
    )

  def generate_n(self, live: np.ndarray, leave_when_free: bool) -> Generated:
    """The one-step `generate` up to steps_per_call times; see `_generate`."""
    self.state, out = self._programs.generate(
      self.params, self.state, live, self.spec.steps_per_call, leave_when_free
    )
    return out

  # -- JetStream's contract ----------------------------------------------------

  def load_params(self, params: Any) -> Any:
    return params

  def init_decode_state(self) -> DecodeState:
    return self._programs.init()

  def prefill(
    self,
    *,
    params: Any,
    existing_prefix: Prefix | None = None,
    padded_tokens: Any,
    true_length: int,
  ) -> Prefix:
    """One prompt (or its continuation) in row 0 of a Prefix."""
    rows = self.spec.prefill_rows
    tokens = np.zeros([rows, len(padded_tokens)], np.int32)
    tokens[0] = np.asarray(padded_tokens)
    lengths = np.ones([rows], np.int32)
    lengths[0] = true_length
    return self._programs.prefill(params, tokens, lengths, existing_prefix)

  def insert(
    self, prefix: Prefix, decode_state: DecodeState, slot: int
  ) -> DecodeState:
    """Row 0 into a slot, at temperature 1, up to the end of the cache."""
    num = self.spec.num_slots
    requests = Requests(
      seed=np.tile(np.array([[0, slot, 0]], np.int32), (num, 1)),
      limit=np.full([num], self.spec.max_length, np.int32),
      temperature=np.ones([num], np.float32),
      top_k=np.zeros([num], np.int32),
      top_p=np.ones([num], np.float32),
    )
    slots = np.full([num], slot, np.int32)
    return self._programs.insert(
      prefix, decode_state, np.zeros_like(slots), slots, 1, self.key, requests
    )

  def generate(
    self, params: Any, decode_state: DecodeState
  ) -> tuple[DecodeState, jetstream_compat.ResultTokens]:
    """One token in every slot, as JetStream's packed [S, 3] array."""
    live = np.ones([self.spec.num_slots], bool)
    state, out = self._programs.generate(params, decode_state, live, 1, False)
    columns = (out.tokens[0], out.valid[0].astype(jnp.int32), state.generated)
    result = jetstream_compat.ResultTokens(
      data=jnp.stack(columns, axis=1),
      tokens_idx=(0, 1),
      valid_idx=(1, 2),
      length_idx=(2, 3),
      samples_per_slot=1,
    )
    return state, result

  def get_prefix_destination_sharding(self) -> Any:
    return sharding.replicated(self.spec.mesh)

  def get_tokenizer(self) -> jetstream_compat.TokenizerParameters:
    return jetstream_compat.TokenizerParameters()

  def build_tokenizer(self, metadata: Any) -> Any:
    del metadata
    return self._tokenizer

  @property
  def max_concurrent_decodes(self) -> int:
    return self.spec.num_slots

  @property
  def samples_per_slot(self) -> int:
    return 1

  @property
  def max_prefill_length(self) -> int:
    return self.spec.prefill_buckets[-1]

  @property
  def mesh(self) -> Mesh:
    return self.spec.mesh

  @property
  def colocated_cpus(self) -> None:
    return None
