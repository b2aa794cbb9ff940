"""Parts a to d of `rollouts.py`: against the peers, and each switch by itself.

Every part is `part(args, peers) -> figures`.
"""

import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import numpy as np
import rollouts_lab as lab
import rollouts_team

from drmas_jax import dispatch
from drmas_jax.sampler import Request, Sampler


def uniform(args, peers: Sequence[lab.Peer]) -> dict:
  """a. 32 sequences of 64 + 128 tokens, none of which ends early."""
  num = 32
  sampler = lab.make_sampler(lab.random_params())
  prompts = lab.prompts(num)
  runs = {
    "this": lambda: lab.timed(lambda: lab.serve(sampler, _alone(prompts)))
  }
  for way in lab.ways(peers):
    runs[way.name] = way.run(prompts, lab.NEW, num)
  costs = lab.in_turns(runs, args.rounds)
  return lab.compare(costs, "this", num * lab.NEW)


def group(args, peers: Sequence[lab.Peer]) -> dict:
  """b. 8 prompts x 8 samples of skewed lengths; useful tokens are counted.

  The peers decode a batch until its longest sequence ends. Each side gets the
  batch, or the slots, of 64 or 32 that it is faster with.
  """
  params, prompts = lab.random_params(), lab.prompts(8)
  requests = functools.partial(_groups, prompts, 8, shared_by=8)
  samplers = {
    n: lab.make_sampler(params, stop_ids=lab.stop_ids(), num_slots=n)
    for n in _WIDTHS
  }
  ended = lab.serve(samplers[32], requests())
  lengths = np.array([len(c.ids) for c in ended.values()])
  rows, longest = np.repeat(prompts, 8, axis=0), int(lengths.max())
  sides = {"this": lambda n: _serves(samplers[n], requests)} | {
    way.name: functools.partial(way.run, rows, longest)
    for way in lab.ways(peers)
  }
  chosen = {name: _faster(side) for name, side in sides.items()}
  costs = lab.in_turns({k: run for k, (_, run) in chosen.items()}, args.rounds)
  return {
    "median_length": float(np.median(lengths)),
    "longest": longest,
    "at_once": {name: width for name, (width, _) in chosen.items()},
  } | lab.compare(costs, "this", int(lengths.sum()))


_WIDTHS = (64, 32)


def _faster(side: Callable[[int], Callable[[], lab.Cost]]):
  """The width by CPU seconds, and the run of that width."""
  runs = {n: side(n) for n in _WIDTHS}
  costs = {n: (run(), run())[1] for n, run in runs.items()}
  width = min(costs, key=lambda n: costs[n].cpu)
  return width, runs[width]


def team(args, peers: Sequence[lab.Peer]) -> dict:
  """c. The math orchestra, 8 tasks x 8, against a barrier at each call; and two
  engines on one CPU together, against one at a time.

  Every round draws other episodes: with 32 slots the longest of 64 decides as
  much as all others together, so one draw says little.
  """
  del peers
  params = lab.random_params()
  found = {}
  for name, policy_of in rollouts_team.POLICIES.items():
    kinds = {"Sampler": Sampler, "LockStep": rollouts_team.LockStep}
    if len(set(policy_of.values())) > 1:
      kinds[_IN_TURN] = Sampler
    sides = {
      side: rollouts_team.make(kind, policy_of, params)
      for side, kind in kinds.items()
    }
    tokens = {side: [] for side in sides}
    runs = {
      side: functools.partial(next, _draws(made, tokens[side]))
      for side, made in sides.items()
    }
    if _IN_TURN in runs:
      one_only = mock.patch.object(dispatch, "at_once", lambda devices: 1)
      runs[_IN_TURN] = one_only(runs[_IN_TURN])
    costs = lab.in_turns(runs, args.rounds)
    one, *others = tokens.values()
    if any(one != other for other in others):
      raise RuntimeError(f"the sides played different episodes: {tokens}")
    found[name] = lab.compare(costs, "Sampler", statistics.mean(one))
    found[name]["steps"] = {
      side: sum(s.counts.steps for s in made.samplers.values())
      for side, made in sides.items()
    }
    found[name]["wall_ratio of each draw"] = [
      round(other.wall / own.wall, 2)
      for own, other in zip(costs["Sampler"], costs["LockStep"], strict=True)
    ]
  return found


_IN_TURN = "one engine at a time"


def _draws(made, tokens: list[int]) -> Iterator[lab.Cost]:
  """What it takes to play draw 0, 1, ..; `tokens` gets those sampled."""
  for draw in itertools.count():
    play = functools.partial(rollouts_team.play, made, 8, 8, draw)
    yield lab.timed(lambda play=play: tokens.append(play()))


def switches(args, peers: Sequence[lab.Peer]) -> dict:
  """d. Each means on and off; a ratio says what being off costs."""
  del peers
  params = lab.random_params()
  found = {}
  for part in (_fusion, _slots, _growth, _sharing, _head, _chat, _cache):
    name = part.__name__.strip("_")
    runs, num_tokens = part(params)
    costs = lab.in_turns(runs, args.rounds)
    found[name] = lab.compare(costs, next(iter(runs)), num_tokens)
    print(name, found[name], flush=True)
  return found


# -- switches: each gives runs, of which the first is the one that is on -------

Runs = dict[str, Callable[[], lab.Cost]]


def _serves(sampler: Sampler, requests: Callable[[], list[Request]]):
  return lambda: lab.timed(lambda: lab.serve(sampler, requests()))


def _fusion(params) -> tuple[Runs, int]:
  """Steps in one call."""
  prompts = lab.prompts(32)
  runs = {}
  for steps in (16, 1, 4, 64):
    sampler = lab.make_sampler(params, steps_per_call=steps)
    runs[f"{steps} steps"] = _serves(sampler, lambda: _alone(prompts))
  return runs, 32 * lab.NEW


def _slots(params) -> tuple[Runs, int]:
  prompts = lab.prompts(64)
  runs = {}
  for slots in (32, 8, 16, 64):
    sampler = lab.make_sampler(params, num_slots=slots)
    runs[f"{slots} slots"] = _serves(sampler, lambda: _alone(prompts))
  return runs, 64 * lab.NEW


def _growth(params) -> tuple[Runs, int]:
  """A pool that begins small and grows, against one of full size."""
  prompts, weights = lab.prompts(32), lab.rollout_params(params)

  def run(share: int):
    sampler = lab.make_sampler(params)
    engine = sampler.engine

    def begin():
      # Of so small a model the pool would be full from the start.
      engine.num_pages = engine.spec.max_pages // share
      sampler.resume(weights, 0)
      lab.serve(sampler, _alone(prompts))

    return lambda: lab.timed(begin)

  runs = {"grows from an eighth": run(8), "full at once": run(1)}
  return runs, 32 * lab.NEW


def _sharing(params) -> tuple[Runs, int]:
  """The prompt of a group, prefilled once."""
  prompts = lab.prompts(8, 256)
  sampler = lab.make_sampler(params, max_length=320, prefill_buckets=(256,))
  runs = {
    f"shared by {n}": _serves(
      sampler, functools.partial(_groups, prompts, 8, 32, shared_by=n)
    )
    for n in (8, 1)
  }
  return runs, 64 * 32


def _head(params) -> tuple[Runs, int]:
  """The template's beginning, prefilled once for all tasks."""
  prompts = lab.prompts(64, 256)
  prompts[:, :192] = prompts[0, :192]
  weights = lab.rollout_params(params)
  sampler = lab.make_sampler(params, max_length=320, prefill_buckets=(64, 256))

  def run(head: int):
    def begin():
      sampler.resume(weights, 0)  # or the head would be there already
      lab.serve(sampler, _alone(prompts, 32, head=head))

    return lambda: lab.timed(begin)

  return {"head of 192": run(192), "no head": run(0)}, 64 * 32


def _chat(params) -> tuple[Runs, int]:
  """Ten turns of 100 tokens: 84 that are new and 16 sampled."""
  episodes, turns, sampled = 16, 10, 16
  new = lab.prompts(episodes * turns, 84).reshape(episodes, turns, -1)
  sampler = lab.make_sampler(
    params, max_length=1024, prefill_buckets=(128, 256, 512, 1024)
  )

  def play(parents: bool):
    past = [np.zeros([0], np.int32)] * episodes
    for turn in range(turns):
      prompts = [
        np.concatenate([past[e], new[e, turn]]) for e in range(episodes)
      ]
      earlier = range(turn if parents else 0)
      done = lab.serve(
        sampler,
        [
          lab.request(
            (e, 0, turn),
            prompts[e],
            sampled,
            parents=tuple((e, 0, t) for t in earlier),
          )
          for e in range(episodes)
        ],
        keep=True,
      )
      past = [
        np.concatenate([prompts[e], done[e, 0, turn].ids])
        for e in range(episodes)
      ]
    for episode in range(episodes):
      sampler.forget(episode, 0)

  runs = {
    "earlier turns reused": lambda: lab.timed(lambda: play(True)),
    "prefilled anew": lambda: lab.timed(lambda: play(False)),
  }
  return runs, episodes * turns * sampled


def _cache(params) -> tuple[Runs, int]:
  """The cache's dtype, where sequences are long."""
  prompts = lab.prompts(32, 960)
  runs = {}
  for dtype in ("float32", "bfloat16", "int8"):
    sampler = lab.make_sampler(
      params, max_length=1024, prefill_buckets=(960,), cache_dtype=dtype
    )
    runs[dtype] = _serves(sampler, lambda: _alone(prompts, 64))
  return runs, 32 * 64


# -- requests ------------------------------------------------------------------


def _alone(prompts: np.ndarray, new: int = lab.NEW, **changes) -> list[Request]:
  """Of different tasks."""
  return [
    lab.request((i, 0, 0), prompt, new, **changes)
    for i, prompt in enumerate(prompts)
  ]


def _groups(
  prompts: np.ndarray, size: int, new: int = lab.NEW, **changes
) -> list[Request]:
  """`size` episodes of every prompt."""
  return [
    lab.request((i, episode, 0), prompt, new, **changes)
    for i, prompt in enumerate(prompts)
    for episode in range(size)
  ]


PARTS = {"a": uniform, "b": group, "c": team, "d": switches}
