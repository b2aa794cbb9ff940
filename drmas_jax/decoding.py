"""The programs of an engine: from prompts to tokens, in slots.

    prefill   chunks of prompts of one bucket -> their pages, last hidden states
    insert    hidden states -> slots
    generate  sample from the hidden state, run the decoder, in some slots

The cache is a pool of pages (`models/paged.py`). Which page belongs to whom is
the host's business: programs get tables, and page 0 is nobody's. A leaf of the
cache that has no place for tokens, such as a recurrent state, holds what the
sequence is whose last page has that index.

A slot keeps the hidden state that its next token is sampled from, so each of
the G slots that share one prefill draws its own first token, and the first
token is no special case. The random key of a token is
fold_in(fold_in(fold_in(key, position), episode), turn), then the number of
tokens generated: it depends on the request alone, not on slot or time.

    backend     a run of decode steps works on
    TPU, GPU    the pool, by a fused kernel
    others      a copy of the pages that its slots need, in a row; `take` copies
                it out for many steps, `give` copies back what was written

A program runs `lanes` of the slots, those that have a sequence; with more of
these it runs once more, beside itself where `dispatch` lets it. So a step costs
what few cost where few are left of many.

The programs are built once per `Spec` by `programs`, so that engines of equal
shape share them; see `engine.PolicyEngine` for who calls them.
"""

import dataclasses
import functools
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from drmas_jax import logprobs, sampling, sharding
from drmas_jax.models import paged, transformer

MAX_STOPS = 8  # stop ids that a request may have beside the tokenizer's
_ENOUGH_TOKENS = 512  # at once: more take longer, and not less for each


def rows_at_once(prefill_rows: int, bucket: int) -> int:
  """Chunks of a bucket that are prefilled together; fewer are filled up."""
  return max(1, min(prefill_rows, _ENOUGH_TOKENS // bucket))


@dataclasses.dataclass(frozen=True)
class Spec:
  """All that decides the programs of an engine.

  Attributes:
    model: the decoder, in the engine's dtype.
    mesh: one host's devices; they split weights and kv heads.
    num_slots, max_length, prefill_rows, steps_per_call: see `config.Engine`.
    prefill_buckets: padded lengths of what is prefilled, rising.
    stop_ids: tokens that end a completion.
    vocab_size: real tokens; ids from here on are padding of the head.
    page_size: tokens of a page.
    max_pages: of the largest pool, page 0 among them.
    lanes: slots that a decode program runs, whichever they are; 0: all.
    dtype: of weights and activations.
    cache_dtype: "float32", "bfloat16" or "int8".
    decoder: the module that runs `model`; see `models/transformer.py`.
  """

  model: Any
  mesh: Mesh
  num_slots: int
  max_length: int
  prefill_rows: int
  prefill_buckets: tuple[int, ...]
  steps_per_call: int
  stop_ids: tuple[int, ...]
  vocab_size: int
  page_size: int
  max_pages: int
  lanes: int = 0
  dtype: str = "float32"
  cache_dtype: str = "float32"
  decoder: types.ModuleType = transformer

  @property
  def pages_per_row(self) -> int:
    """Of the longest sequence."""
    return -(-self.max_length // self.page_size)

  @property
  def fused(self) -> bool:
    """Decoding is a kernel's, on the pool itself."""
    return self.decoder.fused(self.model, self.page_size, self.mesh)


class Requests(NamedTuple):
  """What the slots need to know of their requests; [S] unless said.

  Attributes:
    seed: [S, 3] int32: task position, episode, turn.
    limit: most tokens to generate.
    min_tokens: no stop id is sampled before there are so many.
    temperature, top_k, top_p: see `sampling.sample`.
    stops: [S, MAX_STOPS] int32, stop ids of its own, filled with -1.
    policy: int32, whose adapter it has; see `models/adapters.py`.
  """

  seed: Any
  limit: Any
  min_tokens: Any
  temperature: Any
  top_k: Any
  top_p: Any
  stops: Any
  policy: Any


class Chunk(NamedTuple):
  """One row of a prefill.

  Attributes:
    tokens: [n] int32, n >= 1, the new ones.
    start: tokens of the sequence that are in its pages already.
    pages: all that the sequence then has: ceil((start + n) / page_size).
    source: the page of token start - 1 in the sequence that this one goes on
      from (0 if start is 0). What it has before `start` is copied to the first
      page that is written, and a state is taken from it.
    policy: whose adapter it has.
  """

  tokens: np.ndarray
  start: int
  pages: Sequence[int]
  source: int
  policy: int = 0


class Slots(NamedTuple):
  """What a step reads and writes beside the cache; leading dim S."""

  hidden: Any
  length: Any
  generated: Any
  active: Any
  key: Any
  requests: Requests


class DecodeState(NamedTuple):
  """Of an engine; in JetStream's contract slot i has the same pages always."""

  cache: Any
  slots: Slots


class Prefix(NamedTuple):
  """JetStream's prefilled prompt: a pool of its own, from page 1 on."""

  cache: Any
  hidden: Any  # [S, D], of which row 0 counts
  length: Any


class Generated(NamedTuple):
  """Of up to n steps in L lanes: [n, L] each, valid where one was active.

  `num_steps` says how many ran; `active` [L] which go on.
  """

  tokens: Any
  logprobs: Any
  log_kept_mass: Any
  valid: Any
  num_steps: Any
  active: Any


class Part(NamedTuple):
  """Of a run: the slots that were in the first of its lanes."""

  slots: Sequence[int]
  out: Generated


class Programs(NamedTuple):
  """`init` and `grow` take a number of pages; the others see it in the pool."""

  init: Any
  grow: Any
  prefill: Any
  insert: Any
  generate_on_pool: Any
  take: Any
  generate: Any
  give: Any
  read: Any
  write: Any


# -- the cache, whatever its leaves are ----------------------------------------


def _map_cache(spec: Spec, tokens: Any, state: Any, *caches: Any) -> Any:
  """Applies `tokens` to leaves with places for tokens, `state` to others."""
  return jax.tree.map(
    lambda axes, *leaves: (tokens if "length" in axes else state)(*leaves),
    spec.decoder.cache_axes(spec.model, spec.cache_dtype),
    *caches,
    is_leaf=sharding.is_axes,
  )


def pool(spec: Spec, num_pages: int) -> Any:
  return spec.decoder.init_cache(
    spec.model, num_pages, spec.page_size, jnp.dtype(spec.cache_dtype)
  )


def _last_page(spec: Spec, table: jax.Array, length: jax.Array) -> jax.Array:
  """[B] page of the last token of each row."""
  block = jnp.maximum(length - 1, 0)[:, None] // spec.page_size
  return jnp.take_along_axis(table, block, axis=1, mode="fill", fill_value=0)[
    :, 0
  ]


def _empty_slots(spec: Spec) -> Slots:
  num = spec.num_slots
  zeros = jnp.zeros([num], jnp.int32)
  ones = jnp.ones([num], jnp.float32)
  return Slots(
    hidden=jnp.zeros([num, spec.model.embed_dim], jnp.dtype(spec.dtype)),
    length=zeros,
    generated=zeros,
    active=jnp.zeros([num], bool),
    key=jnp.zeros([num, 2], jnp.uint32),
    requests=Requests(
      seed=jnp.zeros([num, 3], jnp.int32),
      limit=zeros,
      min_tokens=zeros,
      temperature=ones,
      top_k=zeros,
      top_p=ones,
      stops=jnp.full([num, MAX_STOPS], -1, jnp.int32),
      policy=zeros,
    ),
  )


# -- programs ------------------------------------------------------------------


def _init(spec: Spec, num_pages: int) -> DecodeState:
  return DecodeState(pool(spec, num_pages), _empty_slots(spec))


def _grow(spec: Spec, num_pages: int, cache: Any) -> Any:
  def put(wide, narrow):
    return jax.lax.dynamic_update_slice(wide, narrow, (0,) * wide.ndim)

  return jax.tree.map(put, pool(spec, num_pages), cache)


def _prefill(spec: Spec, params, cache, count, chunks):
  """The first `count` of some chunks, `rows_at_once` at a time: one program for
  any number, and work in proportion to it.

  Args:
    spec: of the engine.
    params: rollout weights.
    cache: the pool; donated.
    count: how many.
    chunks: tokens [R, bucket], lengths [R], starts [R], source [R], policy
      [R], table [R, M]; see `Chunk`.

  Returns:
    The pool, and [S, D], the hidden states behind the last tokens.
  """
  rows, bucket = chunks[0].shape
  num = rows_at_once(spec.prefill_rows, bucket)

  def body(i, carry):
    cache, hidden = carry
    some = (jax.lax.dynamic_slice_in_dim(x, i * num, num) for x in chunks)
    cache, last = _prefill_rows(spec, params, cache, *some)
    return cache, jax.lax.dynamic_update_slice_in_dim(
      hidden, last.astype(hidden.dtype), i * num, 0
    )

  hidden = jnp.zeros([rows, spec.model.embed_dim], jnp.dtype(spec.dtype))
  cache, hidden = jax.lax.fori_loop(
    0, (count + num - 1) // num, body, (cache, hidden)
  )
  return cache, hidden[: spec.num_slots]


def _prefill_rows(
  spec, params, cache, tokens, lengths, starts, source, policy, table
):
  """The pool and hidden states behind some chunks."""
  bucket = tokens.shape[1]
  offsets = jnp.arange(bucket, dtype=jnp.int32)
  inputs = transformer.Inputs(
    tokens=tokens,
    positions=starts[:, None] + offsets,
    segment_ids=(offsets < lengths[:, None]).astype(jnp.int32),
    policy_index=policy,
  )

  def begin(leaf):
    fresh = (starts == 0).reshape(-1, *[1] * (leaf.ndim - 1))
    return jnp.where(fresh, 0, leaf[source])

  hidden, new = spec.decoder.forward(
    params,
    inputs,
    _map_cache(spec, lambda leaf: leaf, begin, cache),
    paged.Pages(table, source),
    config=spec.model,
    mesh=spec.mesh,
  )
  last = _last_page(spec, table, starts + lengths)
  cache = _map_cache(
    spec,
    lambda old, new: new,
    lambda old, new: old.at[last].set(new.astype(old.dtype)),
    cache,
    new,
  )
  place = jnp.maximum(lengths - 1, 0)[:, None, None]
  return cache, jnp.take_along_axis(hidden, place, axis=1)[:, 0]


def _put(array, value, place):
  """array[place] = value, in a loop."""
  return jax.lax.dynamic_update_slice(
    array, value[None].astype(array.dtype), (place, *[0] * value.ndim)
  )


def _insert(spec: Spec, state, hidden, count, key, what):
  """The first `count` of `what`, one after the other: one program for any
  number of insertions, and work in proportion to it.

  Args:
    spec: of the engine.
    state: donated.
    hidden: [S, D], of a prefill.
    count: how many.
    key: root of the sampling.
    what: rows, slots, copies [S, 2], lengths [S], requests.
  """
  del spec
  rows, slots, copies, lengths, requests = what

  def body(i, state):
    slot, (source, target) = slots[i], copies[i]
    own = functools.reduce(jax.random.fold_in, requests.seed[i], key)
    old = state.slots
    return DecodeState(
      jax.tree.map(
        lambda leaf: _put(
          leaf,
          jax.lax.dynamic_index_in_dim(leaf, source, keepdims=False),
          target,
        ),
        state.cache,
      ),
      Slots(
        hidden=_put(old.hidden, hidden[rows[i]], slot),
        length=old.length.at[slot].set(lengths[i]),
        generated=old.generated.at[slot].set(0),
        active=old.active.at[slot].set(True),
        key=_put(old.key, own, slot),
        requests=jax.tree.map(
          lambda a, r: _put(a, r[i], slot), old.requests, requests
        ),
      ),
    )

  return jax.lax.fori_loop(0, count, body, state)


def _some(spec: Spec, slots: Slots, lanes: jax.Array) -> Slots:
  """Those of the lanes; a lane that has none is not active."""
  some = jax.tree.map(lambda x: x.at[lanes].get(mode="clip"), slots)
  return some._replace(active=some.active & (lanes < spec.num_slots))


def _put_back(slots: Slots, some: Slots, lanes: jax.Array) -> Slots:
  return jax.tree.map(
    lambda old, new: old.at[lanes].set(new, mode="drop"), slots, some
  )


def _take(spec: Spec, room, state: DecodeState, lanes, ids, table):
  """A state of some slots alone: the pages `ids` of the pool in a row, of a
  recurrent state each lane's, and the slots.

  Args:
    spec: of the engine.
    room: the cache of what was taken last, of the same sizes, or None; donated.
      The pages are copied to where it lies: fresh memory costs the system more
      than the copy does.
    state: of the engine.
    lanes: [L] slots, or num_slots.
    ids: [W] pages.
    table: [L, M] the lanes' pages, as places in `ids`.
  """
  del room
  slots = _some(spec, state.slots, lanes)
  last = ids[_last_page(spec, table, slots.length)]
  cache = _map_cache(
    spec, lambda leaf: leaf[ids], lambda leaf: leaf[last], state.cache
  )
  return DecodeState(cache, slots)


def _give(spec: Spec, state: DecodeState, taken, valid, lanes, ids, table):
  """Back to the engine's state (donated) goes what a run may have written.

  Args:
    spec: of the engine.
    state: of the engine.
    taken: as `_take` returned it, and the run changed it.
    valid: [n, L] of the run.
    lanes: [L] slots, or num_slots.
    ids: [W] pages.
    table: [L, M] the lanes' pages, as places in `ids`.
  """
  size, length = spec.page_size, taken.slots.length
  most = (spec.steps_per_call + size - 2) // size + 1
  block = (length - jnp.sum(valid, axis=0))[:, None] // size + jnp.arange(most)
  place = jnp.take_along_axis(
    table, block, axis=1, mode="fill", fill_value=0
  ).reshape(-1)
  place = -jnp.sort(-place)  # those that are no one's come last
  last = ids[_last_page(spec, table, length)]

  def put(pool, new):
    # One after the other: XLA's CPU code copies a page as a whole then, five
    # times as fast as it scatters pages.
    def body(i, pool):
      page = jax.lax.dynamic_index_in_dim(new, place[i], keepdims=False)
      return _put(pool, page, ids[place[i]])

    return jax.lax.fori_loop(0, jnp.sum(place > 0), body, pool)

  cache = _map_cache(
    spec,
    put,
    lambda pool, new: pool.at[last].set(new),
    state.cache,
    taken.cache,
  )
  return DecodeState(cache, _put_back(state.slots, taken.slots, lanes))


def _step(spec: Spec, params, cache, slots: Slots, pages: paged.Pages):
  """One token in each of some slots; one that is not active stays as it is."""
  head = spec.decoder.head(params, spec.model)
  logits = logprobs.logits(slots.hidden, head, spec.vocab_size)
  keys = jax.vmap(jax.random.fold_in)(slots.key, slots.generated)
  ask, active = slots.requests, slots.active
  common = jnp.tile(jnp.asarray(spec.stop_ids, jnp.int32), (len(active), 1))
  stops = jnp.concatenate([common, ask.stops], axis=1)
  early = (slots.generated < ask.min_tokens)[:, None]
  drawn = sampling.sample(
    keys,
    logits,
    ask.temperature,
    ask.top_k,
    ask.top_p,
    jnp.where(early, stops, -1),
  )
  inputs = transformer.Inputs(
    tokens=drawn.token[:, None],
    # A slot that has ended goes nowhere: to page 0.
    positions=jnp.where(active, slots.length, 0)[:, None],
    segment_ids=active[:, None].astype(jnp.int32),
    policy_index=ask.policy,
  )
  table = jnp.where(active[:, None], pages.table, 0)
  hidden, cache = spec.decoder.forward(
    params,
    inputs,
    cache,
    pages._replace(table=table),
    config=spec.model,
    mesh=spec.mesh,
  )
  generated = slots.generated + active
  ended = jnp.any(drawn.token[:, None] == stops, axis=-1)
  slots = slots._replace(
    hidden=hidden[:, 0].astype(slots.hidden.dtype),
    length=slots.length + active,
    generated=generated,
    active=active & ~ended & (generated < ask.limit),
  )
  return cache, slots, drawn, active


def _no_steps(spec: Spec, active) -> Generated:
  size = (spec.steps_per_call, len(active))
  return Generated(
    tokens=jnp.zeros(size, jnp.int32),
    logprobs=jnp.zeros(size, jnp.float32),
    log_kept_mass=jnp.zeros(size, jnp.float32),
    valid=jnp.zeros(size, bool),
    num_steps=jnp.zeros([], jnp.int32),
    active=active,
  )


def _noted(out: Generated, drawn: sampling.Sample, valid, active) -> Generated:
  """With one more step."""
  i = out.num_steps
  return Generated(
    tokens=out.tokens.at[i].set(drawn.token),
    logprobs=out.logprobs.at[i].set(drawn.logprob),
    log_kept_mass=out.log_kept_mass.at[i].set(drawn.log_kept_mass),
    valid=out.valid.at[i].set(valid),
    num_steps=i + 1,
    active=active,
  )


def _generate(
  spec: Spec, params, state: DecodeState, pages, num_steps, leave_when_free
):
  """Up to num_steps steps of all slots of a state, in one program.

  Args:
    spec: of the engine.
    params: rollout weights.
    state: as `_take` makes it; donated.
    pages: of its slots, in its cache.
    num_steps: at most spec.steps_per_call.
    leave_when_free: return as soon as an eighth of the slots has ended (there
      is work for them): each call has its price.
  """
  num = len(state.slots.active)
  started = jnp.sum(state.slots.active)

  def go_on(carry):
    _, slots, out = carry
    running = jnp.sum(slots.active)
    free = leave_when_free & (started - running >= -(-num // 8))
    return (out.num_steps < num_steps) & (running > 0) & ~free

  def body(carry):
    cache, slots, out = carry
    cache, slots, drawn, valid = _step(spec, params, cache, slots, pages)
    return cache, slots, _noted(out, drawn, valid, slots.active)

  start = *state, _no_steps(spec, state.slots.active)
  *state, out = jax.lax.while_loop(go_on, body, start)
  return DecodeState(*state), out


def _generate_on_pool(
  spec: Spec, params, state, pages, lanes, num_steps, leave_when_free
):
  """The same of some slots of an engine's state, where a kernel reads the pool
  as it lies; `lanes` [L] as `_take` has them."""
  slots = _some(spec, state.slots, lanes)
  last = _last_page(spec, pages.table, slots.length)
  cache = _map_cache(spec, lambda x: x, lambda x: x[last], state.cache)
  new, out = _generate(
    spec, params, DecodeState(cache, slots), pages, num_steps, leave_when_free
  )
  last = _last_page(spec, pages.table, new.slots.length)
  cache = _map_cache(
    spec,
    lambda _, x: x,
    lambda old, x: old.at[last].set(x),
    state.cache,
    new.cache,
  )
  return DecodeState(cache, _put_back(state.slots, new.slots, lanes)), out


def _read(spec: Spec, state: DecodeState, slot, ids):
  """A slot's row, and pages [M]."""
  del spec
  return (
    jax.tree.map(lambda leaf: leaf[ids], state.cache),
    jax.tree.map(lambda row: row[slot], state.slots),
  )


def _write(spec: Spec, state: DecodeState, slot, ids, pages, row):
  """What `_read` read; `state` is donated."""
  del spec
  return DecodeState(
    jax.tree.map(lambda leaf, x: leaf.at[ids].set(x), state.cache, pages),
    jax.tree.map(lambda rows, x: _put(rows, x, slot), state.slots, row),
  )


# -- layouts -------------------------------------------------------------------


def _slot_axes() -> Slots:
  one = ("slots",)
  two = ("slots", None)
  return Slots(
    hidden=two,
    length=one,
    generated=one,
    active=one,
    key=two,
    requests=Requests(two, one, one, one, one, one, two, one),
  )


def cache_shardings(spec: Spec) -> Any:
  """The same for every number of pages."""
  return sharding.shardings(
    spec.decoder.cache_axes(spec.model, spec.cache_dtype),
    jax.eval_shape(functools.partial(pool, spec, 2)),
    spec.mesh,
  )


def _slot_shardings(spec: Spec) -> Slots:
  shapes = jax.eval_shape(functools.partial(_empty_slots, spec))
  return sharding.shardings(_slot_axes(), shapes, spec.mesh)


@functools.cache
def param_shardings(spec: Spec) -> Any:
  """Of the rollout weights, layer by layer (`transformer.unstack`)."""
  shapes = jax.eval_shape(
    spec.decoder.unstack, spec.decoder.param_shapes(spec.model)
  )
  axes = spec.decoder.param_axes(spec.model)
  layer = jax.tree.map(
    lambda names: names[1:], axes["layers"], is_leaf=sharding.is_axes
  )
  axes["layers"] = [layer] * spec.model.num_layers
  return sharding.shardings(axes, shapes, spec.mesh)


def adapter_shardings(spec: Spec, axes: Any, shapes: Any) -> list[Any]:
  """Of adapters, layer by layer (`adapters.by_layer`).

  Args:
    spec: of the engine.
    axes: of the tree of adapters.
    shapes: the tree.
  """
  one = jax.tree.map(
    lambda names: (names[0], *names[2:]), axes, is_leaf=sharding.is_axes
  )
  layer = jax.eval_shape(
    lambda tree: jax.tree.map(lambda x: x[:, 0], tree), shapes
  )
  return [sharding.shardings(one, layer, spec.mesh)] * spec.model.num_layers


def to_host(parts: Sequence[Part]) -> list[Part]:
  """Waits for a run and fetches it."""
  found = jax.device_get([part.out for part in parts])
  return [p._replace(out=out) for p, out in zip(parts, found, strict=True)]


@functools.cache
def programs(spec: Spec) -> Programs:
  """The jitted programs of a spec; every state keeps its shardings."""
  cache, slots = cache_shardings(spec), _slot_shardings(spec)
  state = DecodeState(cache, slots)
  whole = sharding.replicated(spec.mesh)

  def jit(function, outputs, donate=(), static=()):
    jitted = jax.jit(
      function,
      static_argnums=(0, *static),
      donate_argnums=donate,
      keep_unused=True,  # what is donated gives its memory
      out_shardings=outputs,
    )
    return functools.partial(jitted, spec)

  # What is taken has no pages of its own in a state's leaves, but slots: both
  # are whole dims.
  return Programs(
    init=jit(_init, state, static=(1,)),
    grow=jit(_grow, cache, static=(1,)),
    prefill=jit(_prefill, (cache, whole), donate=(2,)),
    insert=jit(_insert, state, donate=(1,)),
    generate_on_pool=jit(_generate_on_pool, (state, whole), donate=(2,)),
    take=jit(_take, state, donate=(1,)),
    generate=jit(_generate, (state, whole), donate=(2,)),
    give=jit(_give, state, donate=(1,)),
    read=jit(_read, whole),
    write=jit(_write, state, donate=(1,)),
  )
