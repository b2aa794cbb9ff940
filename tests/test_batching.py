"""Turns become tokens of rows once each, and however, nothing changes."""

import dataclasses
import itertools
import time
import types

import jax
import numpy as np
import pytest

from drmas_jax import (
  backbone,
  batching,
  learner,
  placement,
  rewards,
  rollout,
  sharding,
)
from drmas_jax import config as config_lib
from drmas_jax.models import transformer
from drmas_jax.sampling import root_key
from drmas_jax.types import Task, Turn

MODEL = transformer.DecoderConfig(
  family="qwen2",
  vocab_size=32,
  embed_dim=32,
  num_layers=1,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  mlp_dim=48,
  max_positions=64,
  tied=True,
  qkv_bias=True,
)


def turn(index, prompt, completion, continues=None, agent="a"):
  rng = np.random.default_rng(index)
  return Turn(
    agent=agent,
    policy="p",
    index=index,
    prompt_ids=np.array(prompt, np.int32),
    completion_ids=np.array(completion, np.int32),
    sampler_logprobs=-3 - rng.random(len(completion)).astype(np.float32),
    log_kept_mass=np.zeros(len(completion), np.float32),
    stop_reason="stop",
    policy_version=0,
    valid=True,
    continues=continues,
  )


def chat(first, num, agent="a", seed=0):
  """`num` turns of one chat; their indices are first, first + 2, .."""
  rng = np.random.default_rng(seed)
  turns, known = [], []
  for i in range(num):
    prompt = [*known, *rng.integers(0, 30, 2 + i)]
    completion = rng.integers(0, 30, 3 - i % 2)
    index = first + 2 * i
    turns.append(turn(index, prompt, completion, index - 2 if i else None))
    known = [*prompt, *completion]
  return [dataclasses.replace(t, agent=agent) for t in turns]


# Two chats that take turns in an episode, a chat whose history was rewritten
# after its second turn, and a turn of its own in another episode.
_SPLIT = chat(0, 2, seed=2)
TURNS = [
  *sorted(chat(0, 3, seed=0) + chat(1, 3, "b", seed=1), key=lambda t: t.index),
  *_SPLIT,
  turn(4, range(9), [7, 8]),
  turn(0, [4, 5], [6, 7, 8]),
]
EPISODES = [0] * 6 + [1] * 3 + [2]
CHATS = [(0, 2, 4), (1, 3, 5), (6, 7), (8,), (9,)]
ADVANTAGES = np.array([1, -1, 0, 0.5, -0.7, 2, 0.3, 0, 0, -0.2], np.float32)
AGENTS = [int(t.agent == "b") for t in TURNS]


def pack(chats, num_micro, micro_rows, length=24):
  shape = batching.Shape(num_micro, micro_rows, length, num_micro)
  return batching.pack(TURNS, range(len(TURNS)), AGENTS, shape, chats=chats)


def apart(num_micro, micro_rows, length=24):
  """Each turn in a row of its own."""
  batch = batching.pack(
    TURNS,
    range(len(TURNS)),
    AGENTS,
    batching.Shape(num_micro, micro_rows, length, num_micro),
    policy_index=range(len(TURNS)),  # chats of different ones share no row
  )
  assert batch.segment_ids.max() == 1
  return batch._replace(policy_index=np.zeros_like(batch.policy_index))


@pytest.mark.quick
def test_chats():
  assert batching.chats(TURNS, EPISODES) == CHATS
  assert batching.chats([], []) == []
  # The same indices in another episode are another chat.
  assert batching.chats(TURNS[:1] + TURNS[2:3], [0, 1]) == [(0,), (1,)]
  alone = [dataclasses.replace(t, continues=None) for t in TURNS]
  assert batching.chats(alone, EPISODES) == [(i,) for i in range(10)]


@pytest.mark.quick
def test_a_row_by_hand():
  one = turn(3, [5, 6], [7, 8])
  two = turn(7, [5, 6, 7, 8, 2, 9], [1], continues=3)
  alone = turn(4, [3], [4, 5])
  batch = batching.pack(
    [one, alone, two],
    [30, 40, 70],
    [4, 1, 4],
    batching.Shape(1, 2, 12, 1),
    chats=[(0, 2), (1,)],
    policy_index=[6, 6, 6],
    weights=[0.5, 1, 2],
  )
  row = jax.tree.map(lambda a: a[0, 0], batch)
  assert row.tokens.tolist() == [5, 6, 7, 8, 2, 9, 1, 3, 4, 5, 0, 0]
  assert row.mask.tolist() == [0, 0, 1, 1, 0, 0, 1, 0, 1, 1, 0, 0]
  assert row.weights.tolist() == [0, 0, 0.5, 0.5, 0, 0, 2, 0, 1, 1, 0, 0]
  assert row.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 0, 0]
  assert row.segment_ids.tolist() == [1] * 7 + [2] * 3 + [0] * 2
  by_hand = [30] * 4 + [70] * 3 + [40] * 3 + [0] * 2
  assert row.turn_index.tolist() == by_hand
  assert row.agent_index.tolist() == [4] * 7 + [1] * 3 + [0] * 2
  assert batch.policy_index.tolist() == [[6, 0]]
  logprobs = np.zeros(12, np.float32)
  logprobs[2:4], logprobs[6:7] = one.sampler_logprobs, two.sampler_logprobs
  logprobs[8:10] = alone.sampler_logprobs
  np.testing.assert_array_equal(row.sampler_logprobs, logprobs)
  by_token = batching.gather(np.arange(71.0), batch)[0]
  assert by_token[0].tolist() == by_hand
  assert not by_token[1].any()


@pytest.mark.quick
def test_every_turn_is_there_once():
  for batch in (apart(1, 10), pack(CHATS, 1, 4), pack(CHATS, 2, 1, 64)):
    sampled = batch.mask > 0
    found = np.stack([batch.turn_index[sampled], batch.tokens[sampled]])
    want = [(i, t) for i, turn in enumerate(TURNS) for t in turn.completion_ids]
    assert sorted(map(tuple, found.T.tolist())) == sorted(want)
    # What is sampled is predicted from its own segment.
    before = np.roll(batch.segment_ids, 1, axis=-1)
    np.testing.assert_array_equal(before[sampled], batch.segment_ids[sampled])
    assert not sampled[..., 0].any()


# -- rows of many --------------------------------------------------------------


def skewed(rng, num, median, longest):
  """Lengths, one of which is the longest."""
  drawn = np.exp(rng.normal(np.log(median), 0.6, num)).astype(int)
  return [longest, *np.clip(drawn, 4, longest).tolist()]


@pytest.mark.quick
def test_rows_are_full_and_never_too_full():
  rng = np.random.default_rng(0)
  for num, median, width in 20 * [(200, 60, 192), (90, 70, 256), (400, 30, 64)]:
    lengths = skewed(rng, num, median, width)
    owners = rng.integers(0, rng.integers(1, 3), len(lengths)).tolist()
    rows = batching.fill(lengths, owners, width)
    assert sorted(itertools.chain(*rows)) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in row) for row in rows]
    assert max(sums) == width and sum(sums) >= 0.85 * width * len(rows)
    assert all(len({owners[i] for i in row}) == 1 for row in rows)
    assert rows == batching.fill(lengths, owners, width)
  assert batching.fill([], [], 8) == []
  # A new row only where no open one has room: 5 + 3, 4 + 4, 2.
  assert batching.fill([2, 4, 5, 4, 3], [0] * 5, 8) == [[2, 4], [1, 3], [0]]


@pytest.mark.quick
def test_tens_of_thousands_of_chats_take_no_time():
  lengths = skewed(np.random.default_rng(0), 40_000, 400, 4096)
  began = time.process_time()
  rows = batching.fill(lengths, [0] * len(lengths), 4096)
  assert time.process_time() - began < 2  # 0.1 as it is; its square, hours
  assert sum(lengths) > 0.99 * 4096 * len(rows)


@pytest.mark.quick
def test_parts():
  assert batching.parts(10, 1) == [slice(0, 10)]
  assert [len(range(10)[p]) for p in batching.parts(10, 4)] == [2, 3, 2, 3]
  assert sum(len(TURNS[p]) for p in batching.parts(10, 3)) == 10
  assert [p.stop - p.start for p in batching.parts(1, 3)] == [0, 0, 1]


@pytest.mark.quick
def test_size():
  # Chats of 17, 17, 10, 11 and 5 tokens.
  buckets = (16, 17, 32, 64)
  found = batching.size(TURNS, CHATS, buckets)
  assert found.longest == 17 and not found.shared
  assert [f.rows for f in found.whole] == [0, 4, 2, 1]
  # They sampled 8, 8, 5, 2 and 3; of 32 tokens a row holds 17, 10 and 5.
  assert [f.sampled for f in found.whole] == [0, 8, 16, 26]
  owners = [int(i in CHATS[0]) for i in range(len(TURNS))]
  found = batching.size(TURNS, CHATS, buckets, owners)
  assert [f.rows for f in found.whole] == [0, 4, 3, 2]
  none = batching.size(TURNS, [], buckets)
  assert none == batching.Size(0, (batching.Fit(),) * 4)


@pytest.mark.quick
def test_shape():
  buckets = (16, 32, 64)

  def shape(*sizes, micro_tokens=128, shards=2):
    return batching.shape(
      [
        batching.Size(longest, tuple(map(batching.Fit, rows)))
        for longest, rows in sizes
      ],
      buckets,
      micro_tokens=micro_tokens,
      shards=shards,
    )[:4]

  assert shape((10, (7, 4, 2))) == (16, 8, 16, 1)
  # The host with the longest chat decides on T, the other on the rows.
  assert shape((30, (0, 5, 3)), (10, (99, 47, 20))) == (64, 2, 32, 24)
  assert shape((0, (0, 0, 0)), (10, (7, 4, 2))) == (16, 4, 16, 2)
  # A multiple of the shards, and one row for each at the least.
  assert shape((10, (7, 4, 2)), micro_tokens=112, shards=3) == (16, 6, 16, 2)
  assert shape((60, (0, 0, 2)), micro_tokens=1, shards=8) == (16, 8, 64, 1)
  with pytest.raises(ValueError, match="65 tokens; allowed are at most 64"):
    shape((65, (0, 0, 0)))


# -- the learner ---------------------------------------------------------------


def make_mesh(data=1, fsdp=1, tensor=1):
  devices = np.array(jax.devices()[: data * fsdp * tensor])
  return jax.sharding.Mesh(devices.reshape(data, fsdp, tensor), sharding.AXES)


@pytest.fixture(scope="module")
def step():
  """Batch, trips, mesh -> (weights after an update, what it says, program)."""
  start = jax.jit(transformer.init_params, static_argnums=0)
  params = jax.device_get(start(MODEL, jax.random.key(0)))

  def run(batch, trips, mesh=None, head_chunk=0):
    spec = learner.Spec(
      MODEL,
      mesh or make_mesh(),
      config_lib.Loss(),
      # Far from the sign of the gradient: a step is in proportion to it.
      config_lib.Optimizer(learning_rate=1e-2, eps=1.0, clip_norm=1e9),
      num_agents=2,
      vocab_size=30,
      head_chunk=head_chunk,
    )
    programs = learner.programs(spec)
    where = learner.state_shardings(spec).params
    by_token = batching.gather(ADVANTAGES, batch)
    batch, by_token = placement.global_batch((batch, by_token), spec.mesh)
    state, out = programs.train_step(
      programs.init(jax.device_put(params, where)),
      None,
      (batch, batch.sampler_logprobs, None, by_token),
      np.full([1], 26, np.float32),
      np.ones([1], bool),
      trips,
      np.array([1.0, 0.7], np.float32),
    )
    program = programs.train_step.func
    return placement.fetch(state.params), jax.device_get(out), program

  return run


# Every test but one has arrays of this shape, so that one program serves all.
NUM_MICRO, MICRO_ROWS, LENGTH = 16, 2, 24


@pytest.fixture(scope="module")
def separate(step):
  weights, out, _ = step(apart(NUM_MICRO, MICRO_ROWS, LENGTH), 5)
  assert out.grad_norm > 0.1
  return weights, out


def assert_equal_updates(one, other):
  (weights, out), (others, said) = one, other
  for a, b in zip(
    jax.tree.leaves(weights), jax.tree.leaves(others), strict=True
  ):
    # A hundredth of the gradient's difference, and a rounding of 1.
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-7 + 2**-23)
  np.testing.assert_allclose(said.loss, out.loss, atol=1e-5)
  np.testing.assert_allclose(said.grad_norm, out.grad_norm, rtol=1e-5)
  for a, b in zip(
    jax.tree.leaves(said.sums), jax.tree.leaves(out.sums), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  ("chats", "trips"),
  [
    (CHATS, 2),  # 3 rows: of two chats, of two, and of one that has three turns
    (None, 3),  # turns side by side that were of one chat
  ],
)
def test_packed_rows_train_as_turns_would_apart(step, separate, chats, trips):
  """Rules 8 and 10: loss, gradient and sums."""
  batch = pack(chats, NUM_MICRO, MICRO_ROWS, LENGTH)
  assert not batch.mask[trips:].any() and batch.segment_ids.max() > 1
  assert_equal_updates(separate, step(batch, trips)[:2])


def test_packed_rows_on_8_devices(step, separate):
  """In one micro-batch, and with a head in chunks across the borders."""
  batch = pack(CHATS, 1, 4, 32)
  found = step(batch, 1, make_mesh(2, 2, 2), head_chunk=32)
  assert_equal_updates(separate, found[:2])


def test_a_bucket_is_compiled_once(step):
  """Whatever the number of rows: what is behind the last is never run."""
  compiled = set()
  for num in (1, 9, 32):
    chats = [(4,)] * num  # of 17 tokens: one a row
    size = batching.size(TURNS, chats, (LENGTH,))
    shape = batching.shape([size], (LENGTH,), micro_tokens=50, shards=1)
    assert shape[:4] == (NUM_MICRO, MICRO_ROWS, LENGTH, -(-num // 2))
    batch = batching.pack(TURNS, range(10), AGENTS, shape, chats=chats)
    _, out, program = step(batch, shape.trips)
    assert out.sums.tokens.sum() == batch.mask.sum() == 3 * num
    compiled.add(program._cache_size())
  assert len(compiled) == 1


def backbone_of(name):
  """What `work` reads of one, with buckets of 17 and 49 tokens."""
  made = object.__new__(backbone.Backbone)
  made.names = made.trained = (name,)
  made.policy_index = {name: 0}
  made.policy = config_lib.Policy(checkpoint="x", row_buckets=(17, 49))
  made.row_buckets = made.policy.row_buckets
  made.learner = types.SimpleNamespace(num_policies=1)
  made.slice = types.SimpleNamespace(train_mesh=make_mesh())
  agent = config_lib.Agent(role="r", policy=name)
  made._roles = {"a": agent, "b": agent}
  return made


@pytest.mark.quick
def test_work_keeps_a_chat_if_one_of_its_turns_has_a_signal():
  """Turns are counted, chats are trained."""
  scores = np.zeros(len(TURNS), np.float32)
  ids = np.zeros(len(TURNS), np.int32)
  rows = rewards.Rows(
    TURNS, scores, ids, np.array(AGENTS), np.array(EPISODES), False
  )
  made = backbone_of("p")
  # The fourth chat's only turn has advantage 0.
  kept = [CHATS[i] for i in (0, 1, 2, 4)]
  work = made.work(rows, ADVANTAGES, {"p"})
  [part] = work.parts
  assert part.chats == kept and part.num_chats == [4]
  assert part.size.longest == 17
  assert [f.rows for f in part.size.whole] == [3, 1]  # of 17, 17, 10, 5 tokens
  assert work.tokens == [sum(len(t.completion_ids) for t in TURNS)] == [26]
  [last] = made.work(rows, np.eye(10)[4], {"p"}).parts
  assert last.chats == [(0, 2, 4)]
  [none] = made.work(rows, np.zeros(10), {"p"}).parts
  assert not none.chats
  other = backbone_of("q").work(rows, ADVANTAGES, {"q"})
  assert (other.parts[0].chats, other.tokens) == ([], [0])


# -- through engine and learner ------------------------------------------------

TEAM = r"""
from drmas_jax.types import Agent, Reply

ROLES = ("counter",)

counter = Agent(
  templates={
    "default": lambda task: [{"role": "user", "content": task.question}]
  },
  replies={"default": lambda text: [{"role": "user", "content": text}]},
  parse=lambda text, stop_reason: Reply(text),
  tags=("verify",),
)

async def run(task, call):
  for words in (task, "1+", "2*3"):
    reply = await call("counter", words, chat="own")
  return reply.text
"""


def test_a_chat_is_sampled_and_trained(tmp_path, monkeypatch):
  """The learner's log-probs of a chat's turns, packed, are the sampler's."""
  (tmp_path / "own").mkdir()
  (tmp_path / "own" / "chat.py").write_text(TEAM)
  monkeypatch.syspath_prepend(tmp_path)
  raw = {
    "policies": {
      "p": {
        "checkpoint": "tiny:solver",
        "row_buckets": (128,),
        "engine": {
          "num_slots": 4,
          "max_length": 128,
          "prefill_buckets": (112,),
          "prefill_rows": 4,
        },
      }
    },
    "agents": {
      "counter": {"role": "own.chat.counter", "policy": "p", "max_tokens": 12}
    },
    "orchestra": {"name": "own.chat"},
    "environment": {"name": "math"},
    "data": {"sources": {"arithmetic": {}}},
  }
  config = config_lib.check(config_lib.build(raw))
  folder = backbone.checkpoint_folder("tiny:solver")
  models = {"p": backbone.weights.read_config(folder)}
  plan = placement.plan(config, models, jax.devices()[:1])
  made = backbone.Backbone(["p"], config, plan.slices["p"], models["p"], folder)
  made.load()
  made.resume()
  played = rollout.Rollout(rollout.Team(config), {"p": made.sampler}, config)
  try:
    tasks = [Task("arithmetic", 0, 3, "1+2*3", "9", {})]
    groups = played.collect(tasks, 4, root_key(0, "train"))
  finally:
    played.close()
  rows = rewards.row_scores(groups, {"counter": 0.0})
  assert [t.continues for t in rows.turns] == [None, 0, 1] * 4
  end = made.tokenizer.end_of_turn_id
  for turn in rows.turns:
    assert turn.prompt_ids.tolist().count(end) == 1 + 2 * turn.index
  values = np.linspace(-1, 1, 12).astype(np.float32)
  work = made.work(rows, values, {"p"})
  [part] = work.parts
  assert len(part.chats) == 4 and part.size.whole[0].rows < 4
  [update] = made.update(rows, values, work, [work.numbers()])
  output = placement.fetch(update.output)
  assert output.finite[0] and output.grad_norm[0] > 0
  assert output.sums.tokens.tolist() == work.tokens
  assert 0 < output.sums.log_ratio_max[0] < 1e-4
