"""One policy's engine: weights, slots and a pool of pages, on JetStream's
contract.

The host's side of `decoding`'s programs. The class holds weights and state, and
lays out what the programs read; who gets which slot and page is the sampler's
business.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from drmas_jax import config as config_lib
from drmas_jax import decoding, dispatch, jetstream_compat, sharding
from drmas_jax.models import paged

_SMALL_POOL = 64 << 20  # bytes


def _bucket(num: int) -> int:
  """The smallest of 1, 2, 3, 4, 6, 8, 12, .. that is at least `num`."""
  power = 1 << max(num - 1, 0).bit_length()
  return power * 3 // 4 if power >= 4 and num <= power * 3 // 4 else power


class PolicyEngine(jetstream_compat.Engine):
  """JetStream's contract over one policy, and what training needs beyond it.

  The sampler calls `prefill_rows`, `insert_rows` and `generate_n` on the state
  that the engine holds; the contract's own methods take and return states.
  """

  def __init__(self, spec: decoding.Spec, tokenizer: Any = None):
    """`tokenizer` only serves JetStream's own orchestrator."""
    self.spec = spec
    # Root of all sampling; on the host, so that `release` leaves no array.
    self.key = np.array(jax.random.key_data(jax.random.key(0)))
    self.params: Any = None
    self.state: decoding.DecodeState | None = None
    self.version = -1
    # Of the parts of a run: where they are dispatched from, and the copy of
    # pages that each last worked on, with their number, as room for the next.
    self._strands = dispatch.Strands(self.devices)
    self._rooms: dict[int, tuple[int, Any]] = {}
    self.num_pages = _first_pages(spec)
    # Programs that were run, by name and sizes: what had to be compiled.
    self.shapes: set[tuple[str, str]] = set()
    self.default_sampling = config_lib.Sampling()  # of JetStream's requests
    self._tokenizer = tokenizer
    self._programs = decoding.programs(spec)

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
    self.params = self.state = None
    self._rooms.clear()

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

  def prefill_rows(self, chunks: Sequence[decoding.Chunk]) -> jax.Array:
    """Prefills up to num_slots chunks of one bucket.

    Returns:
      [S, D], the hidden state behind each chunk's last token.
    """
    cache, hidden = self._prefill(self.params, self.state.cache, chunks)
    self.state = self.state._replace(cache=cache)
    return hidden

  def _prefill(
    self, params, cache, chunks: Sequence[decoding.Chunk], bucket: int = 0
  ):
    bucket = bucket or self.bucket(max(len(c.tokens) for c in chunks))
    num = decoding.rows_at_once(self.spec.prefill_rows, bucket)
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
    requests: decoding.Requests,
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
  ) -> list[decoding.Part]:
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
    """Part by part; those that work on copies of pages may do so side by side,
    and give them back when all have begun."""
    num, parts, aside = self.spec.lanes or self.spec.num_slots, [], []
    for first in range(0, len(running), num):
      some = running[first : first + num]
      lanes = np.full([num], self.spec.num_slots, np.int32)
      lanes[: len(some)] = some
      own = [tables[slot] for slot in some] + [()] * (num - len(some))
      if self.spec.fused:
        self.shapes.add(("generate", f"{num} slots on the pool"))
        pages = paged.Pages(_rectangle(own, self.spec.pages_per_row))
        state, out = self._programs.generate_on_pool(
          params, state, pages, lanes, num_steps, leave
        )
      else:
        ids, pages = self._in_a_row(own)
        self.shapes.add(("generate", f"{num} slots on {len(ids)} pages"))
        where = lanes, ids, pages.table
        how = self._room(len(aside), ids), where, pages, num_steps, leave
        taken, out = self._strands(len(aside), self._begin, params, state, *how)
        aside.append((taken, out.valid, *where))
      parts.append(decoding.Part(some, out))
    for i, (taken, valid, lanes, ids, table) in enumerate(aside):
      state = self._programs.give(state, taken, valid, lanes, ids, table)
      self._rooms[i] = len(ids), taken.cache
    return state, parts

  def _begin(self, params, state, room, where, pages, num_steps, leave):
    taken = self._programs.take(room, state, *where)
    return self._programs.generate(params, taken, pages, num_steps, leave)

  def _room(self, part: int, ids: np.ndarray) -> Any:
    """Of the last run's copy, if it was as large; it is used up."""
    num_pages, cache = self._rooms.pop(part, (0, None))
    return cache if num_pages == len(ids) else None

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

  def init_decode_state(self) -> decoding.DecodeState:
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
    existing_prefix: decoding.Prefix | None = None,
    padded_tokens: Any,
    true_length: int,
  ) -> decoding.Prefix:
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
    chunk = decoding.Chunk(tokens, start, pages, source)
    cache, hidden = self._prefill(params, cache, [chunk], len(padded))
    return decoding.Prefix(cache, hidden, np.int32(start + len(tokens)))

  def insert(
    self, prefix: decoding.Prefix, decode_state: decoding.DecodeState, slot: int
  ) -> decoding.DecodeState:
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
    requests = decoding.Requests(
      seed=np.array([[0, slot, 0]], np.int32),
      limit=np.array([limit], np.int32),
      min_tokens=np.zeros([1], np.int32),
      temperature=np.array([ask.temperature], np.float32),
      top_k=np.array([ask.top_k], np.int32),
      top_p=np.array([ask.top_p], np.float32),
      stops=np.full([1, decoding.MAX_STOPS], -1, np.int32),
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
    self, params: Any, decode_state: decoding.DecodeState
  ) -> tuple[decoding.DecodeState, jetstream_compat.ResultTokens]:
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


def _first_pages(spec: decoding.Spec) -> int:
  """All of a pool that is small, or that a kernel was compiled for; a large one
  begins with one sequence, and grows."""
  cache = jax.eval_shape(functools.partial(decoding.pool, spec, 1))
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
