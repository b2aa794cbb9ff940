"""Turns become rows once each; a chat's turns one row, and nothing changes."""

import dataclasses

import jax
import numpy as np
import pytest

from drmas_jax import backbone, batching, learner, placement, rewards, rollout
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
ROWS = [(0, 2, 4), (1, 3, 5), (6, 7), (8,), (9,)]
ADVANTAGES = np.array([1, -1, 0, 0.5, -0.7, 2, 0.3, 0, 0, -0.2], np.float32)
AGENTS = [int(t.agent == "b") for t in TURNS]


def pack(rows, num_micro, micro_batch, length=24):
  return batching.pack(
    TURNS,
    range(len(TURNS)),
    AGENTS,
    num_micro=num_micro,
    micro_batch=micro_batch,
    length=length,
    rows=rows,
  )


@pytest.mark.quick
def test_rows():
  assert batching.rows(TURNS, EPISODES) == ROWS
  assert batching.rows([], []) == []
  # The same indices in another episode are another chat.
  assert batching.rows(TURNS[:1] + TURNS[2:3], [0, 1]) == [(0,), (1,)]
  alone = [dataclasses.replace(t, continues=None) for t in TURNS]
  assert batching.rows(alone, EPISODES) == [(i,) for i in range(10)]


@pytest.mark.quick
def test_a_row_of_a_chat_by_hand():
  one = turn(3, [5, 6], [7, 8])
  two = turn(7, [5, 6, 7, 8, 2, 9], [1], continues=3)
  batch = batching.pack(
    [one, two],
    [30, 70],
    [4, 4],
    num_micro=1,
    micro_batch=2,
    length=9,
    rows=[(0, 1)],
  )
  row = batching.Batch(*(np.asarray(a)[0, 0] for a in batch))
  assert row.tokens.tolist() == [5, 6, 7, 8, 2, 9, 1, 0, 0]
  assert row.mask.tolist() == [0, 0, 1, 1, 0, 0, 1, 0, 0]
  assert row.weights.tolist() == row.mask.tolist()
  assert row.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 0]
  assert row.segment_ids.tolist() == [1] * 7 + [0] * 2
  assert row.turn_index.tolist() == [30] * 4 + [70] * 3 + [0] * 2
  assert row.agent_index.tolist() == [4] * 7 + [0] * 2
  logprobs = np.zeros(9, np.float32)
  logprobs[2:4], logprobs[6:7] = one.sampler_logprobs, two.sampler_logprobs
  np.testing.assert_array_equal(row.sampler_logprobs, logprobs)
  values = np.arange(71.0)
  by_token = batching.gather(values, batch)[0]
  assert by_token[0].tolist() == [30] * 4 + [70] * 3 + [0] * 2
  assert not by_token[1].any()


@pytest.mark.quick
def test_every_turn_is_there_once():
  alone, merged = pack(None, 1, 10), pack(ROWS, 1, 5)
  for batch in (alone, merged):
    sampled = batch.mask > 0
    found = np.stack([batch.turn_index[sampled], batch.tokens[sampled]])
    want = [(i, t) for i, turn in enumerate(TURNS) for t in turn.completion_ids]
    assert sorted(map(tuple, found.T.tolist())) == sorted(want)
  assert batching.size([TURNS[r[-1]] for r in ROWS]) == batching.Size(5, 17)


@pytest.fixture(scope="module")
def step():
  """Batch, trips -> (weights after an update, what it says)."""
  mesh = jax.sharding.Mesh(
    np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor")
  )
  spec = learner.Spec(
    MODEL,
    mesh,
    config_lib.Loss(),
    # Far from the sign of the gradient, so that a step is in proportion to it.
    config_lib.Optimizer(learning_rate=1e-2, eps=1.0, clip_norm=1e9),
    num_agents=2,
    vocab_size=30,
  )
  programs = learner.programs(spec)
  start = jax.jit(transformer.init_params, static_argnums=0)

  def run(batch, trips):
    state, out = programs.train_step(
      programs.init(start(MODEL, jax.random.key(0))),
      *placement.global_batch(
        (
          batch,
          batch.sampler_logprobs,
          batching.gather(ADVANTAGES, batch),
        ),
        mesh,
      ),
      np.float32(26),
      trips,
      np.array([1.0, 0.7], np.float32),
    )
    return placement.fetch(state.params), jax.device_get(out)

  return run


def test_one_row_trains_as_its_turns_would_apart(step):
  """Rule 8: loss, gradient and sums, in one micro-batch and in several."""
  alone, apart = step(pack(None, 8, 2), 5)
  assert apart.grad_norm > 0.1
  for num_micro, micro_batch, trips in ((8, 2, 3), (1, 6, 1)):
    merged, out = step(pack(ROWS, num_micro, micro_batch), trips)
    for a, b in zip(
      jax.tree.leaves(alone), jax.tree.leaves(merged), strict=True
    ):
      # A hundredth of the gradient's difference.
      np.testing.assert_allclose(a, b, rtol=0, atol=1e-7)
    np.testing.assert_allclose(out.loss, apart.loss, atol=1e-5)
    np.testing.assert_allclose(out.grad_norm, apart.grad_norm, rtol=1e-5)
    for one, other in zip(out.sums, apart.sums, strict=True):
      np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.quick
def test_work_keeps_a_row_if_one_of_its_turns_has_a_signal():
  """Turns are counted, rows are trained."""
  scores = np.zeros(len(TURNS), np.float32)
  ids = np.zeros(len(TURNS), np.int32)
  rows = rewards.Rows(
    TURNS, scores, ids, np.array(AGENTS), np.array(EPISODES), False
  )
  made = object.__new__(backbone.Backbone)
  made.name, made.policy = "p", config_lib.Policy(checkpoint="x")
  kept = [0, 1, 2, 4]  # the fourth row's only turn has advantage 0
  work = made.work(rows, ADVANTAGES)
  assert work.rows == [ROWS[i] for i in kept]
  assert work.size == batching.Size(4, 17)
  assert work.tokens == sum(len(t.completion_ids) for t in TURNS) == 26
  last = made.work(rows, np.where(np.arange(10) == 4, 1.0, 0.0))
  assert last.rows == [(0, 2, 4)]
  assert not made.work(rows, np.zeros(10)).rows
  made.name = "q"
  other = made.work(rows, ADVANTAGES)
  assert (other.rows, other.tokens) == ([], 0)


# -- through engine and learner ------------------------------------------------

TEAM = r"""
from drmas_jax.agents.agent import Agent
from drmas_jax.types import Reply

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
  """The learner's log-probs of a chat's one row are the sampler's by turn."""
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
  made = backbone.Backbone("p", config, plan.slices["p"], models["p"], folder)
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
  work = made.work(rows, values)
  assert len(work.rows) == 4 and work.size.num_rows == 4
  output, _ = made.update(rows, values, work, work.size, work.tokens)
  output = placement.fetch(output)
  assert output.finite and output.grad_norm > 0
  assert output.sums.tokens.tolist() == [work.tokens]
  assert 0 < output.sums.log_ratio_max[0] < 1e-4
