"""An engine of numpy and checksums, for tests of what drives it.

A token depends on all that the pages of its sequence hold, so that a wrong page
is a wrong token; and, with `shapes`, on how each of these got there (in which
chunk of which bucket, or by decoding), as the last bits of a real one do. What
the contract of `PolicyEngine` asks of its caller is asserted.
"""

import copy
import types
import zlib

import numpy as np

from drmas_jax import decoding
from drmas_jax.pages import needed


def chain(value, *what):
  return zlib.crc32(repr(what).encode(), value)


def draw(value, seed, generated, vocab_size, banned):
  for attempt in range(100):
    word = chain(value, tuple(map(int, seed)), generated, attempt)
    if word % vocab_size not in banned:
      return word % vocab_size, -(word % 97 + 1) / 97
  raise AssertionError("all is banned")


class Page:
  def __init__(self, size):
    self.tokens = [None] * size  # (id, how it got there)
    self.state = None  # (tokens before, checksum), where it does not rewind


class Slot:
  """What an engine holds of one; see `decoding.Slots`."""

  def __init__(self):
    self.active, self.length, self.generated, self.value = False, 0, 0, 0


class FakeEngine:
  """See the module's docstring."""

  def __init__(
    self,
    num_slots=4,
    max_length=64,
    page_size=4,
    max_pages=0,
    num_pages=0,
    steps_per_call=4,
    prefill_rows=2,
    buckets=(8, 16, 32, 64),
    stop_ids=(1, 2),
    vocab_size=40,
    rewinds=True,
    shapes=True,
  ):
    per_row = needed(max_length, page_size)
    self.spec = types.SimpleNamespace(
      num_slots=num_slots,
      max_length=max_length,
      page_size=page_size,
      pages_per_row=per_row,
      max_pages=max_pages or per_row * num_slots * 4 + 3,
      steps_per_call=steps_per_call,
      prefill_rows=prefill_rows,
      prefill_buckets=buckets,
      stop_ids=stop_ids,
      vocab_size=vocab_size,
    )
    self.rewinds, self.shapes = rewinds, shapes
    self.num_pages = num_pages or self.spec.max_pages
    self.version, self.params, self.weights = -1, None, 0
    self.calls = []  # (name, what was in it)

  @property
  def max_concurrent_decodes(self):
    return self.spec.num_slots

  def resume(self, params, version):
    """`params` is a number, from which all checksums begin."""
    self.params, self.version = params, version
    self.pool = [self._page() for _ in range(self.num_pages)]
    self.slots = [Slot() for _ in range(self.spec.num_slots)]

  def release(self):
    self.params = self.pool = self.slots = None

  def _page(self):
    return Page(self.spec.page_size)

  def grow(self, num_pages):
    assert self.num_pages < num_pages <= self.spec.max_pages
    self.pool += [self._page() for _ in range(num_pages - self.num_pages)]
    self.num_pages = num_pages
    self.calls.append(("grow", num_pages))

  def bucket(self, length):
    return next(b for b in self.spec.prefill_buckets if length <= b)

  # -- pages -------------------------------------------------------------------

  def _check(self, pages):
    assert all(0 < page < self.num_pages for page in pages), pages
    assert len(set(pages)) == len(pages), pages

  def _read(self, pages, num):
    size = self.spec.page_size
    return [self.pool[pages[i // size]].tokens[i % size] for i in range(num)]

  def _value(self, tokens):
    value = self.params
    for token, how in tokens:
      value = chain(value, token, how if self.shapes else None)
    return value

  def _write(self, pages, place, token):
    size = self.spec.page_size
    self.pool[pages[place // size]].tokens[place % size] = token

  def _save(self, pages, length, value):
    self.pool[pages[(length - 1) // self.spec.page_size]].state = length, value

  # -- the contract ------------------------------------------------------------

  def prefill_rows(self, chunks):
    assert 0 < len(chunks) <= self.spec.num_slots
    buckets = {self.bucket(len(c.tokens)) for c in chunks}
    assert len(buckets) == 1, buckets
    size, written = self.spec.page_size, []
    for c in chunks:
      self._check(c.pages)
      assert len(c.tokens) and len(c.pages) == needed(
        c.start + len(c.tokens), size
      )
      written += c.pages[c.start // size :]
    assert len(set(written)) == len(written), "two rows write one page"
    read = {p for c in chunks for p in c.pages[: c.start // size]}
    read |= {c.source for c in chunks if c.start}
    assert not read & set(written), "a row writes what another one reads"
    self.calls.append(("prefill", [(c.start, len(c.tokens)) for c in chunks]))
    return [self._prefill_row(c, *buckets) for c in chunks]

  def _prefill_row(self, chunk, bucket):
    size, start, pages = self.spec.page_size, chunk.start, list(chunk.pages)
    assert (start == 0) == (chunk.source == 0)
    if start % size:
      held = self.pool[chunk.source].tokens[: start % size]
      self.pool[pages[start // size]].tokens[: start % size] = held
    elif start:
      assert pages[start // size - 1] == chunk.source
    if self.rewinds or not start:
      value = self._value(self._read(pages, start))
    else:
      length, value = self.pool[chunk.source].state
      assert length == start, "a state is gone on from where it is not"
    how = (start, len(chunk.tokens), bucket)
    for place, token in enumerate(chunk.tokens.tolist(), start):
      token = token, chunk.policy  # whose adapter it went through
      self._write(pages, place, (token, how))
      value = chain(value, token, how if self.shapes else None)
    length = start + len(chunk.tokens)
    # Padding is written behind the end.
    for place in range(length, len(pages) * size):
      self._write(pages, place, ("padding", place))
    self._save(pages, length, value)
    return value

  def insert_rows(self, hidden, rows, slots, copies, lengths, requests):
    assert len(set(slots)) == len(slots) <= self.spec.num_slots
    for field in requests:
      assert len(field) == len(rows)
    for i, (row, slot, (source, target)) in enumerate(
      zip(rows, slots, copies, strict=True)
    ):
      assert (source == 0) == (target == 0)
      if target:
        self.pool[target] = copy.deepcopy(self.pool[source])
      new = self.slots[slot] = Slot()
      new.active, new.length, new.value = True, lengths[i], hidden[row]
      new.ask = decoding.Requests(*(field[i] for field in requests))
    self.calls.append(("insert", [c for c in copies if c != (0, 0)]))

  def generate_n(self, tables, live, leave_when_free):
    spec, slots = self.spec, self.slots
    assert len(tables) == len(live) == spec.num_slots and any(live)
    self._check_tables(tables, live)
    for slot, lives in zip(slots, live, strict=True):
      slot.active &= bool(lives)
    out = decoding.Generated(
      *(np.zeros([spec.steps_per_call, spec.num_slots], t) for t in "iff?"),
      num_steps=0,
      active=None,
    )
    started = running = sum(s.active for s in slots)
    step = 0
    while step < spec.steps_per_call and running:
      if leave_when_free and running < started:
        break
      for i, slot in enumerate(slots):
        if slot.active:
          found = self._step(slot, tables[i])
          out.tokens[step, i], out.logprobs[step, i] = found
          out.log_kept_mass[step, i], out.valid[step, i] = -0.5, True
      step += 1
      running = sum(s.active for s in slots)
    for i, slot in enumerate(slots):
      if live[i]:
        self._save(tables[i], slot.length, slot.value)
    self.calls.append(("generate", int(sum(live))))
    out = out._replace(
      num_steps=step, active=np.array([s.active for s in slots])
    )
    return [decoding.Part(range(spec.num_slots), out)]

  def _check_tables(self, tables, live):
    spec, readers, writers = self.spec, {}, {}
    for i, (table, slot) in enumerate(zip(tables, self.slots, strict=True)):
      assert bool(live[i]) == bool(table)
      if not live[i]:
        continue
      assert slot.active, "a slot is live that has ended"
      self._check(table)
      left = min(spec.steps_per_call, slot.ask.limit - slot.generated)
      most = slot.length + left
      assert most <= spec.max_length
      assert len(table) == needed(most, spec.page_size)
      first = slot.length // spec.page_size
      for block, page in enumerate(table):
        (writers if block >= first else readers).setdefault(page, []).append(i)
      if self.rewinds:
        value = self._value(self._read(table, slot.length))
      else:
        last = table[(slot.length - 1) // spec.page_size]
        length, value = self.pool[last].state
        assert length == slot.length
      assert value == slot.value, f"what slot {i} had has been overwritten"
    assert all(len(of) == 1 for of in writers.values()), writers
    assert not writers.keys() & readers.keys()

  def _step(self, slot, table):
    ask, spec = slot.ask, self.spec
    stops = {*spec.stop_ids, *ask.stops.tolist()} - {-1}
    token, logprob = draw(
      slot.value,
      ask.seed,
      slot.generated,
      spec.vocab_size,
      stops if slot.generated < ask.min_tokens else (),
    )
    own = token, int(ask.policy)
    self._write(table, slot.length, (own, "decoded"))
    slot.value = chain(slot.value, own, "decoded" if self.shapes else None)
    slot.length += 1
    slot.generated += 1
    slot.active = token not in stops and slot.generated < ask.limit
    return token, logprob

  def spill(self, slot, pages):
    self._check(pages)
    self.calls.append(("spill", slot))
    row = None if slot is None else copy.deepcopy(self.slots[slot])
    return [copy.deepcopy(self.pool[page]) for page in pages], row

  def restore(self, blob, slot, pages):
    content, row = blob
    self._check(pages)
    assert len(pages) <= len(content)
    for page, held in zip(pages, content, strict=False):
      self.pool[page] = copy.deepcopy(held)
    if slot is not None:
      self.slots[slot] = copy.deepcopy(row)
    self.calls.append(("restore", slot))


def expected(engine, prompt, seed, limit, stops=(), min_tokens=0):
  """What a request must come to, of an engine without `shapes`."""
  value = engine.params
  for token in prompt.tolist():
    value = chain(value, (token, 0), None)
  ids = []
  stops = {*engine.spec.stop_ids, *stops}
  while len(ids) < limit:
    banned = stops if len(ids) < min_tokens else ()
    token, _ = draw(value, seed, len(ids), engine.spec.vocab_size, banned)
    ids.append(token)
    value = chain(value, (token, 0), None)
    if token in stops:
      break
  return ids
