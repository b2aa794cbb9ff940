"""What chats share is computed once, and nothing else changes."""

import dataclasses
import functools
import time

import jax
import numpy as np
import pytest
import test_adapters as adapting
import test_batching as packing
import test_learner as learning
from hypothesis import given, settings
from hypothesis import strategies as st

from drmas_jax import batching, learner, placement, rewards, trie
from drmas_jax import config as config_lib
from drmas_jax.models import transformer

quick = pytest.mark.quick


def chat(ids, prompt, owner=0):
  return trie.Chat(np.array(ids, np.int32), prompt, owner)


def whole(chats, row):
  """The tokens of each chat of a row, through what it shares."""
  found, before = {}, []
  for place in row:
    own = len(chats[place.chat].ids) - place.shared
    before = [
      *before[: place.shared],
      *range(place.start, place.start + own),
    ]
    found[place.chat] = before
  return found


def laid(chats, row, width):
  tokens = np.full(width, -1)
  for place in row:
    own = chats[place.chat].ids[place.shared :]
    here = slice(place.start, place.start + len(own))
    assert (tokens[here] == -1).all()
    tokens[here] = own
  return tokens


@quick
def test_a_row_by_hand():
  head = [5, 6, 7, 8]
  chats = [
    chat([*head, 1, 1], 4),
    chat([*head, 2, 2, 2], 4),
    chat([*head[:2], 9], 2),  # shares the 5: its 6 is the last of its prompt
    chat([*head, 3], 4),
  ]
  in_order = trie.order(chats)
  assert in_order == [(0, 0), (1, 3), (3, 3), (2, 1)]
  [row] = trie.fill(chats, in_order, width=16, length=8, most=3)
  assert row == [
    trie.Place(0, 0, 0, 0, 0),
    trie.Place(1, 6, 3, 1, 0),
    trie.Place(3, 10, 3, 2, 0),
    trie.Place(2, 12, 1, 2, 5),  # the row for attention with the least room
  ]
  assert laid(chats, row, 16).tolist() == [
    *(5, 6, 7, 8, 1, 1),
    *(8, 2, 2, 2),
    *(8, 3),
    *(6, 9),
    *(-1, -1),
  ]


@quick
def test_what_is_never_shared():
  prompt = [4, 4, 4, 4]
  # What was sampled, however alike; the first prompt's last token; another's.
  same = [chat([*prompt, 7, 7], 4), chat([*prompt, 7, 7], 4)]
  assert trie.order(same) == [(0, 0), (1, 3)]
  assert trie.order([chat([4, 7], 1), chat([4, 7], 1)]) == [(0, 0), (1, 0)]
  others = [chat([*prompt, 7], 4, 1), chat([*prompt, 7], 4, 0)]
  assert trie.order(others) == [(1, 0), (0, 0)]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_token_is_there_once(data):
  """And every chat is whole, within the limits."""
  length = 12
  tokens = st.lists(st.integers(0, 2), min_size=2, max_size=length)
  chats = [
    chat(ids, data.draw(st.integers(1, len(ids) - 1)), owner)
    for ids, owner in data.draw(
      st.lists(st.tuples(tokens, st.integers(0, 1)), max_size=25)
    )
  ]
  page, most = (
    data.draw(st.sampled_from([1, 2, 4])),
    data.draw(st.integers(1, 4)),
  )
  width = page * data.draw(st.integers(length // page, 40 // page))
  rows = trie.fill(
    chats, trie.order(chats), width=width, length=length, most=most, page=page
  )
  assert sorted(p.chat for row in rows for p in row) == [*range(len(chats))]
  for row in rows:
    assert len({chats[p.chat].owner for p in row}) == 1
    tokens = laid(chats, row, width)
    views = {}
    for number, places in whole(chats, row).items():
      assert tokens[places].tolist() == chats[number].ids.tolist()
    for p in row:
      own = chats[p.chat]
      assert p.shared < own.prompt and p.row < most
      assert not {p.start % page, p.shared % page, p.offset % page} - {0}
      here = range(p.offset, p.offset + len(own.ids))
      assert here.stop <= length
      assert not views.setdefault(p.row, set()) & {*here}
      views[p.row] |= {*here}


@quick
def test_many_chats_take_a_moment():
  rng = np.random.default_rng(0)
  heads = [rng.integers(0, 9, 12) for _ in range(1000)]
  chats = [
    chat([*heads[i // 10], *rng.integers(0, 9, rng.integers(1, 20))], 12)
    for i in range(10_000)
  ]
  began = time.process_time()
  rows = trie.fill(chats, trie.order(chats), width=65_536, length=32, most=6144)
  assert time.process_time() - began < 2  # 0.1 as it is
  held = sum(len(c.ids) for c in chats) - 9000 * 11
  assert held <= 65_536 * len(rows) < held + 2 * 65_536


# -- batches -------------------------------------------------------------------


def groups():
  """(turns, chats): three prompts behind one head, each sampled four times, by
  two agents; one of them is a chat of two turns."""
  rng = np.random.default_rng(7)
  head = rng.integers(0, 30, 5)
  turns, chats = [], []
  for i in range(3):
    prompt = [*head, *rng.integers(0, 30, 3 + i)]
    for j in range(4):
      chats.append((len(turns),))
      drawn = rng.integers(0, 30, 2 + (i + j) % 3)
      turns.append(packing.turn(0, prompt, drawn, agent="ab"[i % 2]))
  more = [*turns[0].prompt_ids, *turns[0].completion_ids, 3, 4]
  chats[0] = (0, len(turns))
  turns.append(packing.turn(1, more, [8, 9], continues=0))
  return turns, chats


TURNS, CHATS = groups()
AGENTS = [int(t.agent == "b") for t in TURNS]
# None is 0: such a turn has no signal.
ADVANTAGES = np.linspace(-1, 1.1, len(TURNS)).astype(np.float32)
LENGTH, ROW_TOKENS = 16, 48


def pack(
  shared,
  only_sampled=False,
  *,
  row_tokens=ROW_TOKENS,
  page=1,
  shards=1,
  policy_index=None,
):
  """(batch, shape)."""
  size = batching.size(
    TURNS,
    CHATS,
    (8, LENGTH),
    policy_index,
    row_tokens=row_tokens if shared else 0,
    page=page,
  )
  shape = batching.shape(
    [size],
    (8, LENGTH),
    micro_tokens=row_tokens * shards,
    shards=shards,
    only_sampled=only_sampled,
    page=page,
  )
  batch = batching.pack(
    TURNS,
    range(len(TURNS)),
    AGENTS,
    shape,
    chats=CHATS,
    policy_index=policy_index,
  )
  return batch, shape


@quick
def test_a_batch():
  batch, shape = pack(True, only_sampled=True)
  plain, before = pack(False)
  assert (shape.length, shape.view_length) == (ROW_TOKENS, LENGTH)
  assert shape.trips < before.trips and batch.tokens.shape == (16, 1, 48)
  assert (batch.segment_ids > 0).sum() < (plain.segment_ids > 0).sum()
  # Every chat is whole in one row for attention.
  spread, found = batch.spread, []
  for i, row in np.ndindex(shape.trips, shape.views):
    source, segments = spread.source[i, 0, row], spread.segment_ids[i, 0, row]
    for segment in set(segments) - {0}:
      here = source[segments == segment]
      found.append(tuple(batch.tokens[i, 0, here]))
      positions = batch.positions[i, 0, here]
      assert positions.tolist() == [*range(len(here))]
  lasts = [TURNS[c[-1]] for c in CHATS]
  assert sorted(found) == sorted(
    (*t.prompt_ids, *t.completion_ids) for t in lasts
  )
  for i in range(shape.trips):
    there = np.flatnonzero(batch.segment_ids[i, 0])
    home = spread.home[i, 0, there]
    assert spread.source[i, 0].reshape(-1)[home].tolist() == there.tolist()
  # What was sampled is there once, and a row says where.
  for k, t in enumerate(TURNS):
    mine = (batch.turn_index == k) & (batch.mask > 0)
    assert batch.tokens[mine].tolist() == t.completion_ids.tolist()
    assert np.array_equal(batch.sampler_logprobs[mine], t.sampler_logprobs)
  for i in range(shape.num_micro):
    places = batch.sampled[i, 0]
    places = places[places < ROW_TOKENS]
    assert places.tolist() == np.flatnonzero(batch.mask[i, 0]).tolist()


@quick
def test_shared_only_where_it_saves_enough():
  fit = batching.Fit

  def shape(whole, *shared, **kwargs):
    sizes = [
      batching.Size(10, (fit(whole, 90),), (fit(rows, sampled, views),))
      for rows, sampled, views in shared
    ]
    return batching.shape(
      sizes, (16,), micro_tokens=32 * kwargs["shards"], **kwargs
    )

  # 12 rows of 16 are six micro-batches; five of shared tokens would do.
  found = shape(12, (5, 20, 5), shards=1)
  assert found == (16, 1, 32, 5, 0, 6, 16, 1)
  assert shape(11, (6, 20, 5), shards=1) == (16, 2, 16, 6, 0, 0, 0, 1)
  # The sampled ones of a row, in eighths of it.
  assert shape(12, (5, 17, 5), shards=1, only_sampled=True).sampled == 20
  assert shape(12, (5, 0, 5), shards=1, only_sampled=True).sampled == 4
  # Of two hosts with two devices each, the one that has more decides.
  found = shape(60, (7, 20, 2), (9, 21, 4), shards=4)
  assert found == (16, 2, 32, 5, 0, 6, 16, 1)
  # A page that does not divide a row is not for it.
  assert shape(12, (5, 20, 5), shards=1, page=8).page == 8
  assert shape(12, (5, 20, 5), shards=1, page=3).views == 0
  # All of them must have asked.
  sizes = [
    batching.Size(10, (fit(12),), (fit(1, 1, 1),)),
    batching.Size(10, (fit(12),)),
  ]
  assert not batching.shape(sizes, (16,), micro_tokens=64, shards=2).views


@quick
def test_sizes_are_plain_data():
  size = batching.size(TURNS, CHATS, (8, LENGTH), row_tokens=ROW_TOKENS)
  there = [size.longest, *([list(f) for f in fits] for fits in size[1:])]
  assert batching.Size.of(there) == size
  assert size.whole[0] == size.shared[0] == batching.Fit()
  assert size.shared[1].views


@quick
@pytest.mark.parametrize("vocab_size, sampled", [(1024, 0), (2048, 30)])
def test_a_backbone_asks_for_it(vocab_size, sampled):
  made = packing.backbone_of("p")
  made.policy = dataclasses.replace(made.policy, micro_tokens=ROW_TOKENS)
  made.row_buckets = (LENGTH,)
  made.learner.vocab_size = vocab_size
  places = np.arange(len(TURNS))
  places[-1] = 0  # of the chat's episode
  rows = rewards.Rows(
    TURNS,
    np.zeros(len(TURNS), np.float32),
    np.zeros(len(TURNS), np.int32),
    np.array(AGENTS),
    places,
    False,
  )
  [part] = made.work(rows, ADVANTAGES, {"p"}).parts
  assert sorted(part.chats) == sorted(CHATS)
  _, want = pack(True, only_sampled=bool(sampled))
  assert made.shape([part.size]) == want and want.sampled == sampled
  # A reference on more devices takes rows that are cut otherwise.
  other = packing.backbone_of("r")
  other.slice.train_mesh = packing.make_mesh(data=2)
  assert made.shape([part.size]).views
  assert not made.shape([part.size], other).views


# -- the learner ---------------------------------------------------------------


def update(spec, batch, trips, base=None, trainable=None):
  """(log-probs by turn, state after an update, what it says)."""
  programs = learner.programs(spec)
  if trainable is None:
    start = jax.jit(transformer.init_params, static_argnums=0)
    trainable = start(learning.MODEL, jax.random.key(0))
  where = learner.trainable_shardings(spec)
  state = programs.init(jax.device_put(trainable, where))
  by_token = batching.gather(ADVANTAGES, batch)
  placed, by_token = placement.global_batch((batch, by_token), spec.mesh)
  params = learner.whole(base, state.params)
  temperature = np.array([1.0, 0.7], np.float32)
  scores = placement.local_rows(
    programs.score(params, placed, trips, temperature)
  )
  counted = np.zeros([spec.num_policies, len(TURNS)])
  owner = np.broadcast_to(batch.policy_index[..., None], batch.mask.shape)
  here = batch.mask > 0
  np.add.at(counted, (owner[here], batch.turn_index[here]), 1)
  state, out = programs.train_step(
    state,
    base,
    (placed, placed.sampler_logprobs, None, by_token),
    counted.sum(axis=1).astype(np.float32),
    np.ones([spec.num_policies], bool),
    trips,
    temperature,
  )
  sums = np.zeros(len(TURNS))
  np.add.at(sums, batch.turn_index[here], scores[here])
  gaps = np.zeros(len(TURNS))
  np.add.at(gaps, batch.turn_index[here], placement.local_rows(out.gap)[here])
  assert not scores[~here].any()
  return sums, gaps, placement.fetch(state), jax.device_get(out)


def assert_equal_updates(one, other):
  for got, want in zip(one[:2], other[:2], strict=True):
    np.testing.assert_allclose(got, want, atol=2e-5)
  # Adam's first moments are the gradient.
  pairs = functools.partial(zip, strict=True)
  for got, want in pairs(*(jax.tree.leaves(x[2]) for x in (one, other))):
    np.testing.assert_allclose(got, want, atol=1e-5)
  for name in ("loss", "grad_norm", "ratio_error"):
    got, want = (getattr(x[3], name) for x in (one, other))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
  for got, want in pairs(*(jax.tree.leaves(x[3].sums) for x in (one, other))):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def spec_of(mesh=None):
  # Far from the sign of the gradient: a step is in proportion to it.
  optimizer = config_lib.Optimizer(learning_rate=1e-2, eps=1.0)
  return dataclasses.replace(learning.make_spec(mesh), optimizer=optimizer)


@pytest.fixture(scope="module")
def apart():
  batch, shape = pack(False)
  return update(spec_of(), batch, shape.trips)


@pytest.mark.parametrize("only_sampled, page", [(False, 1), (True, 4)])
def test_an_update_is_the_same(apart, only_sampled, page):
  batch, shape = pack(True, only_sampled, page=page)
  assert shape.views and bool(shape.sampled) == only_sampled
  assert shape.page == page
  assert_equal_updates(update(spec_of(), batch, shape.trips), apart)


def test_whole_rows_of_which_the_sampled_are_asked(apart):
  batch, shape = pack(False, only_sampled=True)
  assert 0 < shape.sampled < LENGTH
  assert_equal_updates(update(spec_of(), batch, shape.trips), apart)


def test_on_8_devices(apart):
  """Each of four pairs has a row of its own."""
  batch, shape = pack(True, only_sampled=True, row_tokens=32, shards=4)
  assert shape.views and (shape.micro_rows, shape.length) == (4, 32)
  spec = spec_of(learning.make_mesh(2, 2, 2))
  assert_equal_updates(update(spec, batch, shape.trips), apart)


def test_adapters_share_within_their_policy():
  spec = adapting.make_spec()
  start = jax.jit(transformer.init_params, static_argnums=0)
  base = transformer.unstack(start(adapting.MODEL, jax.random.key(0)))
  run = functools.partial(
    update, spec, base=base, trainable=adapting.some_adapters(2)
  )
  found = []
  for shared in (False, True):
    batch, shape = pack(shared, policy_index=AGENTS)
    assert bool(shape.views) == shared
    found.append(run(batch, shape.trips))
  assert_equal_updates(*found)
