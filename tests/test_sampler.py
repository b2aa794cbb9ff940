"""Continuous batching over a strict engine of checksums, and a real one."""

import dataclasses
import random

import numpy as np
import pytest
from fake_engine import FakeEngine, expected

from drmas_jax import config as config_lib
from drmas_jax import sampler as sampler_lib
from drmas_jax.sampler import Request, Sampler

pytestmark = pytest.mark.quick

SAMPLING = config_lib.Sampling()


class Letters:
  """Token i is the i-th letter; enough of a tokenizer for a sampler."""

  text = "".join(chr(48 + i) for i in range(100))

  def decode(self, ids):
    return "".join(self.text[i] for i in ids)

  def tokens_until(self, ids, end):
    return end


def make(weights=7, **sizes):
  made = Sampler(FakeEngine(**sizes), Letters())
  made.resume(weights, 0)
  return made


def ids(*lengths, seed=0):
  """Prompts that begin alike nowhere."""
  rng = np.random.default_rng(seed)
  return [rng.integers(3, 40, n).astype(np.int32) for n in lengths]


def request(key, prompt, limit=6, **fields):
  fields = {"closes": None, "shared_by": 1, "deadline": np.inf} | fields
  return Request(key, prompt, limit, SAMPLING, **fields)


def run(made, requests=(), rounds=5000):
  """{id: completion}; within a number of rounds."""
  for asked in requests:
    made.submit(asked)
  done = []
  for _ in range(rounds):
    if not made.busy:
      break
    made.dispatch()
    done += made.harvest()
  assert not made.busy
  found = {c.request.id: c for c in done}
  assert len(found) == len(done)
  return found


def calls(made, name):
  return [what for call, what in made.engine.calls if call == name]


def check_nothing_is_held(made):
  """Everything is forgotten; only heads may have pages, and none is pinned."""
  prefixes = made._prefixes
  heads = {page for h in prefixes._heads.values() for page in h.pages}
  pages = prefixes.pages
  assert pages.num_free + len(heads) == pages.num - 1
  assert pages.num_pinned == 0 and not prefixes.prompts and not made._groups


def test_who_never_comes_is_not_waited_for_when_its_episode_is_over():
  made = make()
  (prompt,) = ids(20)
  run(made, [request((0, e, 0), prompt, shared_by=3) for e in range(2)])
  assert made._prefixes.prompts
  for episode in range(3):
    made.forget(0, episode)
  check_nothing_is_held(made)


# -- episodes: chats, groups and heads, in any order ---------------------------


@dataclasses.dataclass
class Episode:
  """Turns one after the other: of a chat, which goes on with all ids, or apart
  from it, with a head."""

  position: int
  number: int
  turns: list  # (kind, new tokens, limit)
  said: list = dataclasses.field(default_factory=list)
  chat: np.ndarray | None = None

  def ask(self, heads, group):
    turn = len(self.said)
    kind, new, limit = self.turns[turn]
    head = heads[kind] if kind in heads else new[:0]
    goes_on = kind == "chat" and self.chat is not None
    prompt = np.concatenate([self.chat if goes_on else head, new])
    return request(
      (self.position, self.number, turn),
      prompt,
      limit,
      shared_by=group if turn == 0 else 1,
      parents=tuple((self.position, self.number, t) for t in range(turn)),
      head=0 if goes_on else len(head),
      kind=kind,
      closes=lambda text: 5 if len(text) >= 5 and turn % 3 == 2 else None,
      min_tokens=2 if turn % 2 else 0,
      stop_ids=(4, 5) if turn % 2 else None,
    )

  def hear(self, completion):
    if self.turns[len(self.said)][0] == "chat":
      self.chat = np.concatenate(
        [completion.request.prompt_ids, completion.ids]
      )
    self.said.append(completion)


def episodes(seed, num_tasks=4, group=3):
  rng = np.random.default_rng(seed)

  def tokens(most):
    return rng.integers(3, 40, rng.integers(1, most)).astype(np.int32)

  made = []
  for position in range(num_tasks):
    first = (("chat", "solver")[position % 2], tokens(24), 20)
    for number in range(group):
      turns = [first]
      for _ in range(rng.integers(0, 4)):
        kind = ("chat", "solver", "judge")[rng.integers(3)]
        turns.append((kind, tokens(7), int(rng.integers(1, 30))))
      made.append(Episode(position, number, turns))
  heads = {k: ids(n, seed=n)[0] for k, n in (("solver", 10), ("judge", 8))}
  return made, heads, group


def play(made, seed, order):
  """Plays episodes, asked for in an order of its own; {id: what came of it}."""
  rng = random.Random(order)
  playing, heads, group = episodes(seed)
  ready = list(playing)
  by_key = {(e.position, e.number): e for e in playing}
  found = {}
  for _ in range(5000):
    rng.shuffle(ready)
    for _ in range(rng.randint(0, len(ready))):
      made.submit(ready.pop().ask(heads, group))
    made.dispatch()
    for completion in made.harvest():
      assert completion.fault is None
      found[completion.request.id] = completion
      episode = by_key[completion.request.id[:2]]
      episode.hear(completion)
      if len(episode.said) < len(episode.turns):
        ready.append(episode)
      else:
        made.forget(episode.position, episode.number)
    if not made.busy and not ready:
      break
  assert all(len(e.said) == len(e.turns) for e in playing)
  check_nothing_is_held(made)
  counts = made.counts
  cached = sum(c.cached_tokens for c in found.values())
  assert counts.prompt_tokens == cached + counts.prefilled_tokens
  return {
    key: (c.ids.tolist(), c.logprobs.tolist(), c.stop_reason, c.text)
    for key, c in found.items()
  }


LARGE = {"max_length": 128, "buckets": (8, 16, 32, 128), "vocab_size": 90}
SIZES = {
  "roomy": {},
  "one slot": {"num_slots": 1, "steps_per_call": 1, "prefill_rows": 1},
  "many slots": {"num_slots": 16, "steps_per_call": 9, "prefill_rows": 8},
  "tiny pool": {"max_pages": 35, "num_pages": 5, "num_slots": 9},
  "tiny pages": {"page_size": 1, "max_pages": 131},
  "growing pool": {"max_pages": 90, "num_pages": 2},
  "one page": {"page_size": 128, "max_pages": 5, "num_slots": 6},
}


@pytest.mark.parametrize("rewinds", [True, False])
def test_tokens_depend_on_the_request_alone(rewinds):
  """Rule 26, to the last bit: whatever order, slots, steps, pages, room."""
  before = None
  for order, (name, sizes) in enumerate(SIZES.items()):
    made = make(rewinds=rewinds, **LARGE, **sizes)
    found = play(made, 3, order)
    assert before is None or found == before, name
    before = found
    if name == "tiny pool":
      assert made.counts.spilled and made.counts.parked
    if name == "growing pool":
      assert calls(made, "grow")
  reasons = {reason for _, _, reason, _ in before.values()}
  assert reasons == {"stop", "length", "tag"}


@pytest.mark.parametrize("seed", range(12))
def test_random_worlds_in_random_pools(seed):
  rng = random.Random(seed)
  size = rng.choice([1, 2, 3, 4, 7, 16])
  sizes = {
    "page_size": size,
    "max_pages": -(-128 // size) + 3 + rng.randint(0, 10),
    "num_pages": rng.randint(2, 3),
    "num_slots": rng.randint(1, 9),
    "steps_per_call": rng.randint(1, 9),
    "prefill_rows": rng.randint(1, 4),
    "rewinds": bool(seed % 3),
  }
  alike = make(num_slots=1, page_size=size, rewinds=sizes["rewinds"], **LARGE)
  assert play(make(**sizes, **LARGE), seed, seed) == play(alike, seed, -1)


@pytest.mark.parametrize("seed", range(4))
def test_outputs_are_those_of_one_request_at_a_time(seed):
  """Cases S02 and S05: 32 mixed requests in 4 slots."""
  made = make(shapes=False, num_slots=4, max_pages=24, num_pages=4)
  prompts = ids(3, 17, 63, *[1 + 5 * i % 60 for i in range(29)], seed=seed)
  asked = [
    request((i, 0, 0), p, 1 + 7 * i % 50, min_tokens=i % 3, stop_ids=(6,))
    for i, p in enumerate(prompts)
  ]
  done = run(made, asked)
  for r in asked:
    room = 64 - len(r.prompt_ids)
    limit = min(r.max_tokens, room)
    alone = expected(made.engine, r.prompt_ids, r.id, limit, (6,), r.min_tokens)
    assert done[r.id].ids.tolist() == alone
  seeded = dataclasses.replace(asked[1], id=(99, 0, 0), seed=asked[1].id)
  again = run(made, [seeded])[99, 0, 0]
  assert again.ids.tolist() == done[1, 0, 0].ids.tolist()


# -- reuse ---------------------------------------------------------------------


def test_a_continued_chat_prefills_only_what_is_new():
  """10 turns of 100 tokens prefill 1,000 and not 5,500."""
  made = make(
    max_length=2048, page_size=16, buckets=(128, 2048), steps_per_call=8
  )
  said, chat = [], np.zeros([0], np.int32)
  for turn, new in enumerate(ids(*[100] * 10)):
    prompt = np.concatenate([chat, new])
    parents = tuple((0, 0, t) for t in range(turn))
    done = run(made, [request((0, 0, turn), prompt, 30, parents=parents)])
    (completion,) = done.values()
    assert completion.cached_tokens == len(chat)
    chat = np.concatenate([prompt, completion.ids])
    said.append(completion)
  assert made.counts.prefilled_tokens == 1000
  assert made.counts.prompt_tokens >= 5500
  assert len(made._prefixes._resident) == 1, "a chat is kept once"
  made.forget(0, 0)
  check_nothing_is_held(made)


def test_the_parent_with_most_in_common_is_gone_on_from():
  made = make(num_slots=8, vocab_size=100)
  trunk = ids(30)[0]
  run(
    made,
    [request((0, 0, turn), trunk[: 18 + turn], 1) for turn in range(3)]
    + [request((0, 0, 3), trunk[:15], 1)]
    + [request((0, 0, 4), trunk[:20], 1, seed=(9, 9, 9))],
  )
  parents = tuple((0, 0, turn) for turn in range(5))

  def start(prompt, parents=parents, **fields):
    request_ = request((0, 1, 0), prompt, parents=parents, **fields)
    return made._prefixes.choose(request_)

  assert (0, 0, 2) in made._prefixes and (0, 1, 0) not in made._prefixes
  turns = made._prefixes._turns[0, 0]
  apart = np.concatenate([trunk[:20], [99]]).astype(np.int32)
  latest = start(apart)
  assert latest.start == 20 and latest.turn is turns[4]
  assert start(apart, parents[:4]).turn is turns[2]
  assert start(trunk[:20]).start == 19, "a token is left to be prefilled"
  assert start(trunk[:16], parents[3:4]).start == 0, "15 are too few"
  assert start(trunk[:17]).start == 16
  assert start(apart, ()).start == 0
  assert start(apart, shared_by=2).start == 0
  # The longer of both, of a head and a parent.
  head = 0, apart[:19].tobytes()
  assert start(apart, parents[:1], head=19).head == head
  assert start(apart, parents[:1], head=18).turn is turns[0]
  assert start(trunk[:20], (), head=20).start == 0, "nothing would be left"


@pytest.mark.parametrize("max_pages", [0, 19])  # in a small pool, from the host
def test_a_chat_may_branch(max_pages):
  made = make(shapes=False, num_slots=2, max_pages=max_pages)

  def turn(number, prompt, *parents):
    parents = tuple((0, 0, p) for p in parents)
    asked = request((0, 0, number), prompt, 4, parents=parents)
    (completion,) = run(made, [asked]).values()
    alone = expected(made.engine, prompt, asked.id, 4)
    assert completion.ids.tolist() == alone
    if max_pages:  # all that is kept goes to the host
      pages = made._prefixes.take(18)
      made._prefixes.pages.give(pages)
    return np.concatenate([prompt, completion.ids]), completion.cached_tokens

  new = ids(17, 3, 6, 5, 5)
  trunk, _ = turn(0, new[0])
  left, found = turn(1, np.concatenate([trunk, new[1]]), 0)
  assert found == len(trunk)
  right, found = turn(2, np.concatenate([trunk, new[2]]), 0)
  assert found == len(trunk)
  _, found = turn(3, np.concatenate([left, new[3]]), 0, 1, 2)
  assert found == len(left)
  _, found = turn(4, np.concatenate([right, new[4]]), 0, 1, 2)
  assert found == len(right)
  made.forget(0, 0)
  check_nothing_is_held(made)


def test_a_state_is_gone_on_from_only_where_it_is():
  made = make(rewinds=False, num_slots=8, stop_ids=())
  trunk = ids(20)[0]
  tag = request((0, 0, 1), trunk, 9, closes=lambda text: 3)
  done = run(made, [request((0, 0, 0), trunk, 3), tag])
  assert done[0, 0, 1].stop_reason == "tag"

  def start(turn, *parts):
    prompt = np.concatenate([trunk, *parts]).astype(np.int32)
    asked = request((0, 1, 0), prompt, parents=((0, 0, turn),))
    return made._prefixes.choose(asked).start

  assert start(0, done[0, 0, 0].ids, [9]) == 23
  assert start(0, done[0, 0, 0].ids[:2], [9]) == 0, "it is one too far"
  assert start(1, done[0, 0, 1].ids, [9]) == 0, "it may be beyond its tag"


@pytest.mark.parametrize("length", [9, 12])  # of pages of 4
def test_a_group_shares_one_prefill_and_its_full_pages(length):
  made = make(num_slots=4)
  prompt = ids(length)[0]
  done = run(
    made, [request((7, e, 0), prompt, 9, shared_by=6) for e in range(6)]
  )
  assert calls(made, "prefill") == [[(0, length)]]
  assert made.counts.prefilled_tokens == length
  assert made.counts.prompt_tokens == 6 * length
  assert sum(map(len, calls(made, "insert"))) == (6 if length % 4 else 0)
  cached = sorted(c.cached_tokens for c in done.values())
  assert cached == [0, *[length] * 5]
  kept = made._prefixes._turns
  first = {kept[7, e][0].prefix.pages[0] for e in range(6)}
  assert len(first) == 1, "the full pages are the same"
  for e in range(6):
    made.forget(7, e)
  check_nothing_is_held(made)


def test_a_group_of_several_prompts_shares_each():
  made = make(shapes=False, num_slots=4)
  prompts = ids(9, 9)
  done = run(
    made, [request((7, e, 0), prompts[e % 2], 9, shared_by=4) for e in range(4)]
  )
  for (_, e, _), completion in done.items():
    alone = expected(made.engine, prompts[e % 2], (7, e, 0), 9)
    assert completion.ids.tolist() == alone
  assert made.counts.prefilled_tokens == 18


def test_a_prompt_of_one_takes_its_pages_over():
  made = make()
  run(made, [request((0, 0, 0), ids(9)[0])])
  assert calls(made, "insert") == [[]]


def test_a_head_is_prefilled_once_and_shared_by_tasks():
  made = make(num_slots=4)
  head, *rest = ids(10, 5, 7, 3, 9, 4)
  prompts = [np.concatenate([head, r]) for r in rest]
  asked = [request((i, 0, 0), p, head=10) for i, p in enumerate(prompts)]
  first = run(made, asked)
  prefills = [row for rows in calls(made, "prefill") for row in rows]
  assert sorted(prefills) == [(0, 10), *[(10, n) for n in (3, 4, 5, 7, 9)]]
  # One that was dropped in between is made again, to the same bits.
  many = make(num_slots=1)
  for i, asked_ in enumerate(asked):
    again = run(many, [asked_])
    np.testing.assert_array_equal(
      again[i, 0, 0].logprobs, first[i, 0, 0].logprobs
    )
    others = ids(*[10] * 9, seed=i + 1)
    run(
      many,
      [
        request((9, i, j), np.concatenate([h, rest[0]]), head=10)
        for j, h in enumerate(others)
      ],
    )
  heads = [r for rows in calls(many, "prefill") for r in rows if r == (0, 10)]
  assert len(heads) == 5 * 10, "none of them was there any more"
  assert len(many._prefixes._heads) == 8


def test_nothing_of_other_weights_is_gone_on_from():
  """Case S01."""
  made = make(weights=7, num_slots=2)
  head, rest = ids(10, 5)
  prompt = np.concatenate([head, rest])

  def asked(turn, **fields):
    return request((0, 0, turn), prompt, head=10, **fields)

  old = run(made, [asked(0)])[0, 0, 0]
  made.resume(8, 1)
  new = run(made, [asked(0)])[0, 0, 0]
  fresh = run(make(weights=8, num_slots=2), [asked(0)])[0, 0, 0]
  np.testing.assert_array_equal(new.ids, fresh.ids)
  np.testing.assert_array_equal(new.logprobs, fresh.logprobs)
  assert new.version == 1 and new.cached_tokens == 0
  assert old.ids.tolist() != new.ids.tolist()
  with pytest.raises(RuntimeError, match="stale prefix: turn"):
    made.submit(asked(2, parents=((0, 0, 1),)))
  for fields in ({}, {"parents": ((0, 0, 0),)}, {"shared_by": 2}):
    made = make(num_slots=1)
    run(made, [asked(0)])
    if "shared_by" in fields:
      made.submit(request((5, 0, 0), prompt, **fields))
      made.submit(request((5, 1, 0), prompt, **fields))
      made.dispatch()
      made.harvest()
    else:
      made.submit(asked(1, **fields))
    made.engine.version = 1
    with pytest.raises(RuntimeError, match="stale prefix: of weights of"):
      for _ in range(9):
        made.dispatch()
        made.harvest()


def test_what_was_admitted_when_an_error_came_is_not_inserted_later():
  made, (head, rest) = make(), ids(10, 5)
  stale = request((0, 0, 0), np.concatenate([head, rest]), head=10)
  run(made, [stale])
  made.engine.version = 1
  made.submit(request((1, 0, 0), rest, 9))
  made.submit(dataclasses.replace(stale, id=(2, 0, 0)))
  with pytest.raises(RuntimeError, match="stale prefix"):
    made.dispatch()
  made.cancel(lambda r: True)
  made.resume(7, 1)
  asked = request((3, 0, 0), rest)
  again, fresh = run(made, [asked]), run(make(), [asked])
  assert again[asked.id].ids.tolist() == fresh[asked.id].ids.tolist()
  made.forget(3, 0)
  check_nothing_is_held(made)


def test_weights_do_not_change_under_requests():
  made = make()
  made.submit(request((0, 0, 0), ids(3)[0]))
  for act in (made.release, lambda: made.resume(1, 1)):
    with pytest.raises(RuntimeError, match="1 requests are in flight"):
      act()


# -- memory --------------------------------------------------------------------


def test_the_youngest_makes_room_and_is_back_before_anyone_comes():
  made = make(num_slots=4, max_pages=19, steps_per_call=2, stop_ids=())
  prompts = ids(5, 5, 5, 5, 5)
  ended = []
  for i, prompt in enumerate(prompts):
    made.submit(request((i, 0, 0), prompt, 40))
  while made.busy:
    made.dispatch()
    running = [job.request.id[0] for job in made._active]
    parked = [job.request.id[0] for job in made._parked]
    assert running + parked == sorted(running + parked)
    assert running[0] == min(set(range(5)) - set(ended))
    ended += [c.request.id[0] for c in made.harvest()]
  assert ended == [0, 1, 2, 3, 4] and made.counts.parked
  assert set(made.progress()) == set()


def test_memory_follows_live_tokens():
  """One long sequence among short ones: no slot has room set aside."""
  made = make(
    num_slots=32,
    max_length=12288,
    page_size=64,
    buckets=(64, 12288),
    stop_ids=(),
    steps_per_call=64,
    num_pages=8,
    max_pages=4000,
  )
  short = [request((i, 0, 0), p, 64) for i, p in enumerate(ids(*[40] * 200))]
  made.submit(request((999, 0, 0), ids(40)[0], 3000))
  most = 0
  for asked in short:
    made.submit(asked)
  while made.busy:
    made.dispatch()
    pages = made._prefixes.pages
    most = max(most, pages.num_pinned)
    for completion in made.harvest():
      made.forget(*completion.request.id[:2])
  assert most <= 3040 // 64 + 1 + 31 * 2
  assert made.engine.num_pages <= 2 * most, "and the pool grew to what it took"
  check_nothing_is_held(made)


def test_a_pool_that_one_request_may_outgrow_is_refused():
  make(max_pages=19)
  with pytest.raises(ValueError, match=r"max_pages: 18 .* at least 19"):
    make(max_pages=18)


# -- bad requests, cancelling, deadlines ---------------------------------------


def fault(made, asked):
  made.submit(asked)
  (completion,) = made.harvest()
  assert not made.busy and completion.stop_reason == "fault"
  assert len(completion.ids) == len(completion.logprobs) == 0
  return completion.fault


def test_illegal_requests_are_faults_at_once():
  made = make(vocab_size=100, stop_ids=())
  key = (0, 0, 0)
  for length in (0, 64):
    found = fault(made, request(key, np.full([length], 5, np.int32)))
    assert found.kind == "prompt"
    assert f"prompt of {length} tokens; allowed are 1 to 63" in found.message
  for wrong in (-1, 100):
    found = fault(made, request(key, np.array([5, wrong], np.int32)))
    assert f"id {wrong}; allowed are 0 to 99" in found.message
  for limit in (0, -3):
    found = fault(made, request(key, ids(3)[0], limit))
    assert found.kind == "request" and "at least 1" in found.message
  found = fault(made, request(key, ids(3)[0], stop_ids=tuple(range(9))))
  assert "stop_ids: 9" in found.message
  for wrong in (-1, 100, 2**31):
    found = fault(made, request(key, ids(3)[0], stop_ids=(5, wrong)))
    assert f"stop_ids: {wrong}; allowed are 0 to 99" in found.message
  given = sampler_lib.Fault("prompt", "it does not fit")
  made.submit(request(key, ids(3)[0]), given)
  assert made.harvest()[0].fault is given
  # Case S07: the largest id is legal. What is too long is cut to the room.
  done = run(made, [request((1, 0, 0), np.full([60], 99, np.int32), 50)])
  assert len(done[1, 0, 0].ids) == 4
  assert done[1, 0, 0].stop_reason == "length"
  with pytest.raises(ValueError, match="in flight or kept"):
    made.submit(request((1, 0, 0), ids(3)[0]))
  made.forget(1, 0)
  check_nothing_is_held(made)


def test_the_true_length_decides_on_the_bucket():
  """Case S04."""
  made = make(prefill_rows=8, num_slots=8)
  prompts = ids(7, 8, 9)
  run(made, [request((i, 0, 0), p) for i, p in enumerate(prompts)])
  assert calls(made, "prefill") == [[(0, 7), (0, 8)], [(0, 9)]]
  narrow = make(buckets=(8,))
  found = fault(narrow, request((0, 0, 0), prompts[2]))
  assert "allowed are 1 to 8" in found.message
  assert len(run(narrow, [request((0, 0, 0), prompts[1])])) == 1


def test_two_hundred_at_once_on_eight_slots():
  made = make(num_slots=8, max_pages=40)
  prompts = ids(*[1 + i % 50 for i in range(200)])
  done = run(made, [request((i, 0, 0), p) for i, p in enumerate(prompts)])
  assert len(done) == 200 and all(c.fault is None for c in done.values())
  for i in range(200):
    made.forget(i, 0)
  check_nothing_is_held(made)


def test_cancelled_requests_leave_nothing_behind():
  made = make(num_slots=3, max_pages=19, steps_per_call=2, stop_ids=())
  head, *prompts = ids(8, *[9] * 8)
  for i, p in enumerate(prompts):
    asked = request((i, 0, 0), np.concatenate([head, p]), 40, head=8)
    made.submit(asked)
  for e in range(4):
    made.submit(request((20, e, 0), prompts[0], 40, shared_by=4))
  made.submit(request((30, 0, 0), ids(0)[0]))
  for _ in range(6):
    made.dispatch()
    made.harvest()
  assert made._active and made._parked and made._queue
  made.submit(request((31, 0, 0), ids(0)[0]))
  made.dispatch()
  made.cancel(lambda r: r.id[0] in (1, 20, 31))
  assert not any(c.fault for c in made.harvest())
  made.dispatch()
  made.cancel(lambda r: True)
  assert not made.busy and made.harvest() == [] and made.progress() == {}
  for i in (*range(8), 20):
    for e in range(4):
      made.forget(i, e)
  check_nothing_is_held(made)
  prompt = np.concatenate([head, prompts[0]])
  asked = request((0, 0, 0), prompt, head=8)
  again, fresh = run(made, [asked]), run(make(stop_ids=()), [asked])
  assert again[0, 0, 0].ids.tolist() == fresh[0, 0, 0].ids.tolist()


def test_policies_on_one_engine_share_nothing_in_its_cache():
  """Neither a template's head nor the prompt of a group."""
  (prompt,) = ids(20)
  asked = [
    request((0, e, 0), prompt, head=8, shared_by=2, policy_index=e // 2)
    for e in range(4)
  ]
  together = run(make(shapes=False), asked)
  for one in asked:
    whole = dataclasses.replace(one, shared_by=1, head=0)
    alone = run(make(shapes=False), [whole])
    assert together[one.id].ids.tolist() == alone[one.id].ids.tolist()
  assert together[0, 0, 0].ids.tolist() != together[0, 2, 0].ids.tolist()


def test_a_group_that_loses_some_frees_its_prompt():
  made = make(num_slots=2)
  prompt = ids(9)[0]
  for e in range(5):
    made.submit(request((0, e, 0), prompt, shared_by=5))
  made.dispatch()
  made.harvest()
  made.cancel(lambda r: r.id[1] > 2)
  run(made)
  for e in range(5):
    made.forget(0, e)
  check_nothing_is_held(made)


def test_past_its_deadline_a_request_is_a_fault(monkeypatch):
  now = [100.0]
  monkeypatch.setattr(sampler_lib.time, "monotonic", lambda: now[0])
  made = make(num_slots=2, max_pages=19, stop_ids=(), steps_per_call=2)
  for i, prompt in enumerate(ids(9, 9, 9)):
    made.submit(request((i, 0, 0), prompt, 50, deadline=110.0 + i))
  made.submit(request((3, 0, 0), ids(9)[0], deadline=99.0))
  late = []
  for _ in range(40):
    made.dispatch()
    late += made.harvest()
    if len(late) == 1:
      now[0] = 111.5
  found = {c.request.id[0]: c.fault and c.fault.kind for c in late}
  assert found == {0: "deadline", 1: "deadline", 2: None, 3: "deadline"}
  assert all(c.fault.wall_clock for c in late if c.fault)
  for i in range(4):
    made.forget(i, 0)
  check_nothing_is_held(made)
  for i in range(500):  # none of them is watched for long
    run(made, [request((i, 1, 0), ids(3)[0], 1, deadline=1e9)])
    made.forget(i, 1)
  assert len(made._deadlines) < 100


def test_progress_is_what_there_is_so_far():
  made = make(num_slots=2, stop_ids=(), steps_per_call=3)
  prompts = ids(5, 6, 7)
  for i, prompt in enumerate(prompts):
    made.submit(request((i, 0, 0), prompt, 8))
  done = {}
  seen = []
  while made.busy:
    made.dispatch()
    done |= {c.request.id: c for c in made.harvest()}
    seen.append(made.progress())
  assert [len(t) for t, _ in seen[0].values()] == [3, 3]
  for so_far in seen:
    for key, (tokens, logprobs) in so_far.items():
      assert isinstance(tokens, list) and isinstance(logprobs, list)
      assert tokens == done[key].ids.tolist()[: len(tokens)]
      assert logprobs == done[key].logprobs.tolist()[: len(tokens)]


def test_a_tag_ends_a_completion_with_its_token_kept_whole():
  made, free = make(stop_ids=()), make(stop_ids=())
  prompt = ids(5)[0]
  long = run(free, [request((0, 0, 0), prompt, 20)])[0, 0, 0]
  for end in (1, 4, 7, 20):

    def closes(text, end=end):
      return end if len(text) >= end else None

    asked = request((0, 0, 0), prompt, 20, closes=closes)
    cut = run(made, [asked])[0, 0, 0]
    made.forget(0, 0)
    assert cut.stop_reason == "tag" and len(cut.text) == end
    np.testing.assert_array_equal(cut.ids, long.ids[:end])
  check_nothing_is_held(made)


def test_occupancy_counts_slots_that_work():
  made = make(num_slots=2, stop_ids=(), steps_per_call=4)
  run(made, [request((i, 0, 0), p, 8) for i, p in enumerate(ids(5, 5, 5))])
  counts = made.counts
  assert counts.steps == 16 and counts.slot_steps == 32
  assert counts.busy_steps == counts.completion_tokens == 24
