"""The device side of sampling, on JetStream's engine contract.

    prefill   chunks of prompts of one bucket -> their pages, last hidden states
    insert    hidden states -> slots
    generate  sample from the hidden state, run the decoder, in all slots

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
these it runs again. So a step costs what few cost where few are left of many.

The programs are built once per `Spec` by `programs`, so that engines of equal
shape share them; the class holds weights and state and only forwards.
"""

import dataclasses
import functools
import itertools
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from drmas_jax import config as config_lib
from drmas_jax import jetstream_compat, logprobs, sampling, sharding
from drmas_jax.models import paged, transformer

MAX_STOPS = 8  # stop ids that a request may have beside the tokenizer's
_SMALL_POOL = 64 << 20  # bytes
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


def _pool(spec: Spec, num_pages: int) -> Any:
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
  return DecodeState(_pool(spec, num_pages), _empty_slots(spec))


def _grow(spec: Spec, num_pages: int, cache: Any) -> Any:
  def put(wide, narrow):
    return jax.lax.dynamic_update_slice(wide, narrow, (0,) * wide.ndim)

  return jax.tree.map(put, _pool(spec, num_pages), cache)


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


def _lengths(slots: Slots, lanes: jax.Array) -> jax.Array:
  """[L]; any where a lane has no slot."""
  return slots.length.at[lanes].get(mode="clip")


def _take(spec: Spec, room, cache, slots: Slots, lanes, ids, table):
  """The pages `ids` of the pool in a row; of a state, each lane's.

  Args:
    spec: of the engine.
    room: what was taken last, of the same sizes, or None; donated. The pages
      are copied to where it lies: fresh memory costs the system more than the
      copy does.
    cache: the pool.
    slots: as they are before the run.
    lanes: [L] slots, or num_slots.
    ids: [W] pages.
    table: [L, M] the lanes' pages, as places in `ids`.
  """
  del room
  last = ids[_last_page(spec, table, _lengths(slots, lanes))]
  return _map_cache(
    spec, lambda leaf: leaf[ids], lambda leaf: leaf[last], cache
  )


def _give(spec: Spec, cache, taken, slots: Slots, lanes, valid, ids, table):
  """Back to the pool (donated) goes what a run may have written.

  Args:
    spec: of the engine.
    cache: the pool.
    taken: as `_take` returned it, and the run changed it.
    slots: as they are behind the run.
    lanes: [L] slots, or num_slots.
    valid: [n, L] of the run.
    ids: [W] pages.
    table: [L, M] the lanes' pages, as places in `ids`.
  """
  size, length = spec.page_size, _lengths(slots, lanes)
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

  return _map_cache(
    spec, put, lambda pool, new: pool.at[last].set(new), cache, taken
  )


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
  spec: Spec, params, cache, all_slots, pages, lanes, num_steps, leave_when_free
):
  """Up to num_steps steps of some slots in one program.

  Args:
    spec: of the engine.
    params: rollout weights.
    cache: the pool, or what was taken of it; donated.
    all_slots: donated.
    pages: of the lanes, in `cache`.
    lanes: [L] slots, or num_slots for none.
    num_steps: at most spec.steps_per_call.
    leave_when_free: return as soon as an eighth of the lanes has ended (there
      is work for them): each call has its price.
  """
  pool = cache
  slots = jax.tree.map(lambda x: x.at[lanes].get(mode="clip"), all_slots)
  slots = slots._replace(active=slots.active & (lanes < spec.num_slots))
  if spec.fused:  # otherwise a state was taken with the pages
    last = _last_page(spec, pages.table, slots.length)
    cache = _map_cache(spec, lambda x: x, lambda x: x[last], cache)
  started = jnp.sum(slots.active)

  def go_on(carry):
    _, slots, out = carry
    running = jnp.sum(slots.active)
    free = leave_when_free & (started - running >= -(-len(lanes) // 8))
    return (out.num_steps < num_steps) & (running > 0) & ~free

  def body(carry):
    cache, slots, out = carry
    cache, slots, drawn, valid = _step(spec, params, cache, slots, pages)
    return cache, slots, _noted(out, drawn, valid, slots.active)

  start = cache, slots, _no_steps(spec, slots.active)
  cache, slots, out = jax.lax.while_loop(go_on, body, start)
  if spec.fused:
    last = _last_page(spec, pages.table, slots.length)
    cache = _map_cache(
      spec, lambda _, x: x, lambda old, x: old.at[last].set(x), pool, cache
    )
  all_slots = jax.tree.map(
    lambda old, new: old.at[lanes].set(new, mode="drop"), all_slots, slots
  )
  return cache, all_slots, out


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
    jax.eval_shape(functools.partial(_pool, spec, 2)),
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
    take=jit(_take, cache, donate=(1,)),
    generate=jit(_generate, (cache, slots, whole), donate=(2, 3)),
    give=jit(_give, cache, donate=(1,)),
    read=jit(_read, whole),
    write=jit(_write, state, donate=(1,)),
  )


def _bucket(num: int) -> int:
  """The smallest of 1, 2, 3, 4, 6, 8, 12, .. that is at least `num`."""
  power = 1 << max(num - 1, 0).bit_length()
  return power * 3 // 4 if power >= 4 and num <= power * 3 // 4 else power


class PolicyEngine(jetstream_compat.Engine):
  """JetStream's contract over one policy, and what training needs beyond it.

  The sampler calls `prefill_rows`, `insert_rows` and `generate_n` on the state
  that the engine holds; the contract's own methods take and return states.
  """

  def __init__(self, spec: Spec, tokenizer: Any = None):
    """`tokenizer` only serves JetStream's own orchestrator."""
    self.spec = spec
    # Root of all sampling; on the host, so that `release` leaves no array.
    self.key = np.array(jax.random.key_data(jax.random.key(0)))
    self.params: Any = None
    self.state: DecodeState | None = None
    self.version = -1
    self._taken: Any = None  # what a run worked on, as room for the next one's
    self._taken_pages = 0
    self.num_pages = _first_pages(spec)
    # Programs that were run, by name and sizes: what had to be compiled.
    self.shapes: set[tuple[str, str]] = set()
    self.default_sampling = config_lib.Sampling()  # of JetStream's requests
    self._tokenizer = tokenizer
    self._programs = programs(spec)

  # -- what training uses ------------------------------------------------------

  @property
  def rewinds(self) -> bool:
    """Whether a sequence can be gone on from before its end."""
    return self.spec.decoder.rewinds(self.spec.model)

  def resume(self, params: Any, version: int) -> None:
    """Takes rollout weights (after `version` updates) and an empty cache.

    The pool is as large as it last was: what has to be compiled for a size is
    compiled once.
    """
    self.params, self.version = params, version
    self.shapes.add(
      ("pool", f"{self.num_pages} x {self.spec.page_size} tokens")
    )
    self.state = self._programs.init(self.num_pages)

  def release(self) -> None:
    """Drops the rollout weights and the cache."""
    self.params = self.state = self._taken = None

  def grow(self, num_pages: int) -> None:
    """A pool of `num_pages`; what is in it stays.

    Raises:
      ValueError: over spec.max_pages, or no more than there are.
    """
    if not self.num_pages < num_pages <= self.spec.max_pages:
      raise ValueError(
        f"num_pages: {num_pages}; allowed are more than {self.num_pages}, at "
        f"most {self.spec.max_pages}; raise engine.cache_tokens"
      )
    self.shapes.add(("pool", f"{num_pages} x {self.spec.page_size} tokens"))
    cache = self._programs.grow(num_pages, self.state.cache)
    self.state = self.state._replace(cache=cache)
    self.num_pages = num_pages

  def bucket(self, length: int) -> int:
    """The padded length of a chunk: a function of its own length alone."""
    for size in self.spec.prefill_buckets:
      if length <= size:
        return size
    raise ValueError(
      f"prompt of {length} tokens; allowed are at most "
      f"{self.spec.prefill_buckets[-1]}; raise engine.max_length"
    )

  def prefill_rows(self, chunks: Sequence[Chunk]) -> jax.Array:
    """Prefills up to num_slots chunks of one bucket.

    Returns:
      [S, D], the hidden state behind each chunk's last token.
    """
    cache, hidden = self._prefill(self.params, self.state.cache, chunks)
    self.state = self.state._replace(cache=cache)
    return hidden

  def _prefill(self, params, cache, chunks: Sequence[Chunk], bucket: int = 0):
    bucket = bucket or self.bucket(max(len(c.tokens) for c in chunks))
    num = rows_at_once(self.spec.prefill_rows, bucket)
    rows = -(-self.spec.num_slots // num) * num
    tokens = np.zeros([rows, bucket], np.int32)
    table = np.zeros([rows, self.spec.pages_per_row], np.int32)
    lengths = np.ones([rows], np.int32)
    starts, source, policy = np.zeros([3, rows], np.int32)
    for i, chunk in enumerate(chunks):
      tokens[i, : len(chunk.tokens)] = chunk.tokens
      table[i, : len(chunk.pages)] = chunk.pages
      lengths[i] = len(chunk.tokens)
      starts[i], source[i] = chunk.start, chunk.source
      policy[i] = chunk.policy
    self.shapes.add(("prefill", f"{num} x {bucket} tokens"))
    return self._programs.prefill(
      params,
      cache,
      len(chunks),
      (tokens, lengths, starts, source, policy, table),
    )

  def insert_rows(
    self,
    hidden: jax.Array,
    rows: Sequence[int],
    slots: Sequence[int],
    copies: Sequence[tuple[int, int]],
    lengths: Sequence[int],
    requests: Requests,
  ) -> None:
    """Row rows[i] of `hidden` goes to slots[i] with requests[i].

    Args:
      hidden: [S, D], of `prefill_rows`.
      rows: n of them.
      slots: n of them.
      copies: n pairs (from page, to page), of a page that is shared up to the
        middle; (0, 0) where there is nothing to copy.
      lengths: n, tokens that each slot's sequence has.
      requests: of n.
    """
    self.state = self._insert(
      self.state, hidden, rows, slots, copies, lengths, requests
    )

  def _insert(self, state, hidden, rows, slots, copies, lengths, requests):
    pad = self.spec.num_slots - len(slots)
    what = (
      np.asarray(rows, np.int32),
      np.asarray(slots, np.int32),
      np.asarray(copies, np.int32).reshape(-1, 2),
      np.asarray(lengths, np.int32),
      requests,
    )
    what = jax.tree.map(
      lambda a: np.concatenate([a, np.zeros([pad, *a.shape[1:]], a.dtype)]),
      what,
    )
    return self._programs.insert(state, hidden, len(slots), self.key, what)

  def generate_n(
    self, tables: Sequence[Sequence[int]], live: Any, leave_when_free: bool
  ) -> list[Part]:
    """The one-step `generate` up to steps_per_call times; see `_generate`.

    Args:
      tables: of each slot its pages, with room for the tokens that it may
        still get in this run; of a slot that is not live, none.
      live: [S] bool, some are: those that run.
      leave_when_free: return as soon as an eighth of a part has ended.
    """
    self.state, parts = self._run(
      self.params,
      self.state,
      tables,
      np.flatnonzero(live),
      self.spec.steps_per_call,
      leave_when_free,
    )
    return parts

  def _run(self, params, state, tables, running, num_steps, leave):
    """Part by part."""
    num, parts = self.spec.lanes or self.spec.num_slots, []
    for first in range(0, len(running), num):
      some = running[first : first + num]
      lanes = np.full([num], self.spec.num_slots, np.int32)
      lanes[: len(some)] = some
      own = [tables[slot] for slot in some] + [()] * (num - len(some))
      state, out = self._run_part(params, state, own, lanes, num_steps, leave)
      parts.append(Part(some, out))
    return state, parts

  def _run_part(self, params, state, tables, lanes, num_steps, leave):
    if self.spec.fused:
      self.shapes.add(("generate", f"{len(lanes)} slots on the pool"))
      pages = paged.Pages(_rectangle(tables, self.spec.pages_per_row))
      cache, slots, out = self._programs.generate(
        params, *state, pages, lanes, num_steps, leave
      )
      return DecodeState(cache, slots), out
    ids, pages = self._in_a_row(tables)
    self.shapes.add(("generate", f"{len(lanes)} slots on {len(ids)} pages"))
    room, self._taken = self._taken, None
    if self._taken_pages != len(ids):
      room, self._taken_pages = None, len(ids)
    taken = self._programs.take(
      room, state.cache, state.slots, lanes, ids, pages.table
    )
    taken, slots, out = self._programs.generate(
      params, taken, state.slots, pages, lanes, num_steps, leave
    )
    cache = self._programs.give(
      state.cache, taken, slots, lanes, out.valid, ids, pages.table
    )
    self._taken = taken
    return DecodeState(cache, slots), out

  def _in_a_row(
    self, tables: Sequence[Sequence[int]]
  ) -> tuple[np.ndarray, paged.Pages]:
    """The pages of all lanes one after the other, behind page 0.

    Returns:
      ids [W], filled with 0, where W is of a few sizes; and where among them
      each lane's pages are.
    """
    counts = np.array([len(pages) for pages in tables])
    total, num = int(counts.sum()), len(tables)
    first = np.cumsum(counts) - counts
    fewest = paged.fewest(self.spec.model.num_heads, self.spec.page_size)
    end = self.spec.pages_per_row
    size = min(_bucket(total), num * end)  # as large as all can be
    size = 1 + max(size, num, fewest * self.spec.mesh.size)
    ids, owner = np.zeros([2, size], np.int32)
    # Nothing of a page that is nobody's is seen.
    block = np.full([size], end, np.int32)
    ids[1 : total + 1] = list(itertools.chain.from_iterable(tables))
    owner[1 : total + 1] = np.repeat(np.arange(num), counts)
    block[1 : total + 1] = np.arange(total) - np.repeat(first, counts)
    place = np.arange(end)
    table = np.where(place < counts[:, None], 1 + first[:, None] + place, 0)
    return ids, paged.Pages(table.astype(np.int32), None, owner, block)

  def spill(self, slot: int | None, pages: Sequence[int]) -> Any:
    """A copy, in the host's memory, of a sequence's pages, and of the row of
    the slot that it runs in; waits for it."""
    found = self._programs.read(self.state, slot or 0, self._ids(pages))
    return jax.device_get(found)

  def restore(self, blob: Any, slot: int | None, pages: Sequence[int]) -> None:
    """What `spill` copied, to other pages, and to a slot if it is one's."""
    content, row = blob
    if slot is None:  # no row: that of slot 0 is put where it is
      slot = 0
      row = jax.tree.map(lambda rows: rows[0], self.state.slots)
    self.state = self._programs.write(
      self.state, slot, self._ids(pages), content, row
    )

  def _ids(self, pages: Sequence[int]) -> np.ndarray:
    return _rectangle([pages], self.spec.pages_per_row)[0]

  # -- JetStream's contract ----------------------------------------------------

  def load_params(self, params: Any = None) -> Any:
    """Those given, or those that the engine has been resumed with."""
    return self.params if params is None else params

  def init_decode_state(self) -> DecodeState:
    """With a pool in which every slot has all its pages."""
    return self._programs.init(
      1 + self.spec.num_slots * self.spec.pages_per_row
    )

  def _pages_of(self, slot: int) -> range:
    num = self.spec.pages_per_row
    return range(1 + slot * num, 1 + (slot + 1) * num)

  def prefill(
    self,
    *,
    params: Any,
    existing_prefix: Prefix | None = None,
    padded_tokens: Any,
    true_length: int,
  ) -> Prefix:
    """One prompt, or its continuation."""
    pages = self._pages_of(0)
    if existing_prefix is None:
      start, source = 0, 0
      cache = self._programs.init(len(pages) + 1).cache
    else:
      start = int(existing_prefix.length)
      source = pages[(start - 1) // self.spec.page_size]
      cache = jax.tree.map(jnp.copy, existing_prefix.cache)
    padded = np.asarray(padded_tokens)
    # JetStream cuts the head off a prompt that is too long, not its length.
    tokens = padded[:true_length]
    chunk = Chunk(tokens, start, pages, source)
    cache, hidden = self._prefill(params, cache, [chunk], len(padded))
    return Prefix(cache, hidden, np.int32(start + len(tokens)))

  def insert(
    self, prefix: Prefix, decode_state: DecodeState, slot: int
  ) -> DecodeState:
    """Into a slot, by `default_sampling`, up to the end of the cache."""
    state = self._programs.write(
      decode_state,
      slot,
      np.array(self._pages_of(slot), np.int32),
      jax.tree.map(lambda leaf: leaf[1:], prefix.cache),
      jax.tree.map(lambda rows: rows[slot], decode_state.slots),
    )
    limit = self.spec.max_length - int(prefix.length)
    ask = self.default_sampling
    requests = Requests(
      seed=np.array([[0, slot, 0]], np.int32),
      limit=np.array([limit], np.int32),
      min_tokens=np.zeros([1], np.int32),
      temperature=np.array([ask.temperature], np.float32),
      top_k=np.array([ask.top_k], np.int32),
      top_p=np.array([ask.top_p], np.float32),
      stops=np.full([1, MAX_STOPS], -1, np.int32),
      policy=np.zeros([1], np.int32),
    )
    return self._insert(
      state,
      prefix.hidden,
      [0],
      [slot],
      [(0, 0)],
      [int(prefix.length)],
      requests,
    )

  def generate(
    self, params: Any, decode_state: DecodeState
  ) -> tuple[DecodeState, jetstream_compat.ResultTokens]:
    """One token in every slot, as JetStream's packed [S, 3] array."""
    num = self.spec.num_slots
    tables = [self._pages_of(slot) for slot in range(num)]
    state, parts = self._run(
      params, decode_state, tables, np.arange(num), 1, False
    )
    tokens, valid = (
      jnp.concatenate(
        [getattr(out, name)[0, : len(slots)] for slots, out in parts]
      )
      for name in ("tokens", "valid")
    )
    columns = tokens, valid.astype(jnp.int32), state.slots.generated
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
  def devices(self) -> frozenset[jax.Device]:
    return frozenset(self.spec.mesh.devices.flat)

  @property
  def colocated_cpus(self) -> None:
    return None


def _first_pages(spec: Spec) -> int:
  """All of a pool that is small, or that a kernel was compiled for; a large one
  begins with one sequence, and grows."""
  cache = jax.eval_shape(functools.partial(_pool, spec, 1))
  page = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
  if spec.fused or page * spec.max_pages <= _SMALL_POOL:
    return spec.max_pages
  return min(max(_SMALL_POOL // page, spec.pages_per_row + 3), spec.max_pages)


def _rectangle(tables: Sequence[Sequence[int]], width: int) -> np.ndarray:
  """[S, width], filled with 0."""
  out = np.zeros([len(tables), width], np.int32)
  for i, pages in enumerate(tables):
    out[i, : len(pages)] = pages
  return out
