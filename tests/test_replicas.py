"""Several engines of a policy: who goes where, and that nobody can tell.

Whole runs with two engines of each policy are in test_main.py.
"""

import types as pytypes

import jax
import numpy as np
import pytest
from fake_engine import FakeEngine, expected
from test_rollout import Role, Scripted, make_config, two_turns, won
from test_sampler import Letters, ids, request, run

from drmas_jax import config as config_lib
from drmas_jax import decoding, engine, placement, rollout, sharding
from drmas_jax.models import transformer
from drmas_jax.replicas import Replicas
from drmas_jax.sampler import Sampler
from drmas_jax.types import Fault, Task

WEIGHTS = 7


def make(num=2, **sizes):
  engines = [FakeEngine(**sizes) for _ in range(num)]
  made = Replicas([Sampler(e, Letters()) for e in engines])
  made.resume([WEIGHTS] * num, 3)
  return made, engines


def sampled(made):
  """Completion tokens of each engine."""
  return [s.counts.completion_tokens for s in made.samplers]


def begun(made):
  """Tasks that run on each engine."""
  return [{key[0] for key in s.progress()} for s in made.samplers]


# -- on engines of numpy -------------------------------------------------------


@pytest.mark.quick
def test_tokens_do_not_depend_on_the_number_of_engines():
  prompts = ids(5, 9, 13, 9, 20, 3, 7, 11)
  asked = [request((i, 0, 0), p, limit=9) for i, p in enumerate(prompts)]
  for num in (1, 2, 3):
    made, engines = make(num, num_slots=2, shapes=False)
    done = run(made, asked)
    for one in asked:
      want = expected(engines[0], one.prompt_ids, one.id, 9)
      assert done[one.id].ids.tolist() == want
      assert done[one.id].version == 3
    assert all(sampled(made)) and made.counts.completion_tokens == sum(
      len(c.ids) for c in done.values()
    )


@pytest.mark.quick
def test_a_group_shares_an_engine_and_an_episode_stays_on_its_own():
  made, engines = make()
  one, two = ids(19, 23)
  for episode in range(3):
    made.submit(request((0, episode, 0), one, shared_by=3))
  for episode in range(3):
    made.submit(request((1, episode, 0), two, shared_by=3))
  made.dispatch()
  assert begun(made) == [{0}, {1}]
  assert made.progress().keys() == {(p, e, 0) for p in (0, 1) for e in range(3)}
  done = {c.request.id: c for c in made.harvest()} | run(made)
  prefills = [[c for c in e.calls if c[0] == "prefill"] for e in engines]
  assert prefills == [[("prefill", [(0, 19)])], [("prefill", [(0, 23)])]]
  # The other engine has less to do, and is not where the episode began.
  first = done[0, 0, 0]
  longer = np.concatenate([one, first.ids, one])
  made.submit(request((2, 0, 0), ids(30)[0], limit=30))
  made.submit(request((2, 1, 0), ids(3)[0]))
  made.submit(request((0, 0, 1), longer, parents=((0, 0, 0),)))
  assert run(made)[0, 0, 1].cached_tokens == 19 + len(first.ids)
  made.forget(0, 0)
  made.submit(request((0, 0, 0), one))  # nothing of its name is kept
  assert run(made).keys() == {(0, 0, 0)}


@pytest.mark.quick
def test_a_new_episode_goes_where_least_is_to_do():
  made, _ = make(3)
  run(made, [request((9, 0, 0), ids(50)[0])])  # what is done counts no more
  for i, (length, limit) in enumerate([(20, 8), (5, 6), (5, 12), (3, 3)]):
    made.submit(request((i, 0, 0), ids(length)[0], limit=limit))
  made.dispatch()
  assert begun(made) == [{0}, {1, 3}, {2}]
  made.cancel(lambda r: r.id[0] == 0)
  made.harvest()
  made.submit(request((4, 0, 0), ids(5)[0]))
  made.dispatch()
  assert begun(made)[0] == {4}


@pytest.mark.quick
def test_what_is_lost_frees_its_slot_on_every_engine():
  """Over-long, refused, late, cancelled while it waits or runs."""
  made, engines = make(num_slots=2)
  for i in range(10):
    late = {"deadline": 0.0} if i in (4, 5) else {}
    length = 65 if i in (8, 9) else 9
    fault = Fault("prompt", "no") if i in (6, 7) else None
    made.submit(request((i, 0, 0), ids(length)[0], limit=40, **late), fault)
  made.dispatch()
  done = {c.request.id[0]: c for c in made.harvest()}
  assert done.keys() == set(range(4, 10))
  assert all(c.fault for c in done.values())
  assert begun(made) == [{0, 2}, {1, 3}]
  made.cancel(lambda r: r.id[0] in (0, 1))
  assert begun(made) == [{2}, {3}]
  made.submit(request((10, 0, 0), ids(9)[0]))
  made.cancel(lambda r: True)
  assert not made.busy and not made.harvest()
  for i in range(20, 24):
    made.submit(request((i, 0, 0), ids(9)[0]))
  made.dispatch()
  assert [e.calls[-1] for e in engines] == [("generate", 2)] * 2
  done = {c.request.id: c for c in made.harvest()} | run(made)
  assert done.keys() == {(i, 0, 0) for i in range(20, 24)}
  made.resume([WEIGHTS] * 2, 4)
  assert made.engine.version == 4


@pytest.mark.quick
def test_weights_change_on_all_engines_or_on_none():
  made, _ = make()
  made.submit(request((0, 0, 0), ids(9)[0]))
  with pytest.raises(RuntimeError, match="in flight"):
    made.resume([1, 2], 4)
  assert run(made)[0, 0, 0].version == 3
  made.engine.key = "root"
  assert [s.engine.key for s in made.samplers] == ["root"] * 2
  assert made.engine.max_concurrent_decodes == 8
  made.release()
  assert all(s.engine.params is None for s in made.samplers)


class Logged(Scripted):
  """A scripted sampler that writes down when it is driven."""

  def __init__(self, name, log, **kwargs):
    super().__init__(lambda key: "ok", **kwargs)
    self.name, self.log = name, log

  def dispatch(self):
    self.log.append(("dispatch", self.name))
    super().dispatch()

  def harvest(self):
    self.log.append(("harvest", self.name))
    return super().harvest()


@pytest.mark.quick
def test_all_engines_of_all_policies_are_dispatched_before_any_is_read():
  config, log = make_config(), []
  samplers = {
    policy: Replicas([Logged(f"{policy}{i}", log) for i in range(2)])
    for policy in "pq"
  }
  team = object.__new__(rollout.Team)
  team.members = {
    n: rollout.Member(n, Role(), a) for n, a in config.agents.items()
  }
  team.start = lambda task: two_turns(
    task,
    lambda agent, *args, chat=None: rollout.request(
      rollout.CallRequest(agent, args, chat)
    ),
  )
  team.environment = pytypes.SimpleNamespace(score=won)
  tasks = [Task("s", i, i, "question", "1") for i in range(4)]
  groups = rollout.Rollout(team, samplers, config).collect(tasks, 2, "root")
  assert all(e.status == "ok" for g in groups for e in g.episodes)
  names = ["p0", "p1", "q0", "q1"]
  rounds = [[]]
  for what, name in log:
    rounds[-1].append((what, name))
    if (what, name) == ("harvest", names[-1]):
      rounds.append([])
  whole = [(what, n) for what in ("dispatch", "harvest") for n in names]
  # A policy that nobody asks anything is not started.
  parts = [whole, whole[:2] + whole[4:], whole[2:]]
  assert rounds.pop() == [] and whole in rounds
  assert all(r in parts for r in rounds)
  for made in samplers.values():
    assert all(s.asked for s in made.samplers)
    assert all(s.engine.key == "root" for s in made.samplers)


# -- on devices ----------------------------------------------------------------

MODEL = transformer.DecoderConfig(
  family="qwen2",
  vocab_size=40,
  embed_dim=32,
  num_layers=1,
  num_heads=4,
  num_kv_heads=4,
  head_dim=8,
  mlp_dim=48,
  max_positions=64,
  tied=True,
)


@pytest.fixture
def quick_compiler():
  """Every engine has programs of its own to be compiled."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


def real(part, params):
  """A sampler over the engines of a slice."""
  engines = [
    engine.PolicyEngine(
      decoding.Spec(
        model=MODEL,
        mesh=mesh,
        num_slots=3,
        max_length=32,
        prefill_rows=2,
        prefill_buckets=(16,),
        steps_per_call=4,
        stop_ids=(1, 2),
        vocab_size=40,
        page_size=32,
        max_pages=16,
      )
    )
    for mesh in part.rollout_meshes
  ]
  made = Replicas([Sampler(e, Letters()) for e in engines])
  targets = [decoding.param_shardings(e.spec) for e in engines]
  held = placement.sync(params, targets, "float32", transformer.unstack)
  made.resume(held, 0)
  return made


def part_of(num_devices, **mesh):
  """A slice of so many devices, all of them for training and rollouts."""
  layout = placement._layout(
    config_lib.Placement(rollout_mesh=config_lib.Mesh(**mesh)),
    *("p", tuple(range(num_devices)), 1),
  )
  devices = jax.devices()
  return placement.Slice(
    placement._mesh(devices[:num_devices], layout.train_shape),
    tuple(
      placement._mesh([devices[i] for i in own], layout.rollout_shape)
      for own in layout.rollout
    ),
  )


@pytest.mark.usefixtures("quick_compiler")
def test_two_engines_of_four_devices_sample_what_one_samples():
  init = jax.jit(transformer.init_params, static_argnums=0)
  params = init(MODEL, jax.random.key(1))
  prompts = ids(5, 9, 13, 9, 16, 3, 7, 11)
  asked = [request((i, 0, 0), p, limit=9) for i, p in enumerate(prompts)]
  asked += [request((9, i, 0), prompts[2], shared_by=3) for i in range(3)]
  found = []
  for part in (
    part_of(1),
    part_of(8, data=2, fsdp=2, tensor=2),
  ):
    where = sharding.shardings(
      transformer.param_axes(MODEL), params, part.train_mesh
    )
    made = real(part, jax.device_put(params, where))
    made.engine.key = jax.random.key_data(jax.random.key(5))
    found.append(run(made, asked))
  assert len(made.samplers) == 2 and all(sampled(made))
  for key, one in found[0].items():
    two = found[1][key]
    np.testing.assert_array_equal(one.ids, two.ids)
    np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-5)
  assert len({tuple(c.ids) for c in found[0].values()}) > 6
