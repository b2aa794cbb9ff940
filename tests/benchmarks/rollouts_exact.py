"""Part e of `rollouts.py`: what must not change, and what may by how much."""

import dataclasses

import jax
import numpy as np
import rollouts_lab as lab

from drmas_jax import batching, learner
from drmas_jax import config as config_lib
from drmas_jax.sampler import Completion, Sampler
from drmas_jax.types import Turn

# Rule 26 is tried on fewer layers: each variant is compiled anew.
SHALLOW = dataclasses.replace(lab.MODEL, num_layers=2)
TASKS, GROUP, TURNS = 4, 4, 3
HEAD, NEW = 64, 24
SETTINGS = (
  config_lib.Sampling(),
  config_lib.Sampling(temperature=0.6),
  config_lib.Sampling(temperature=1.3, top_p=0.95),
  config_lib.Sampling(top_k=20),
)
# Each against the first: nothing but rounding may come of it (rule 26).
VARIANTS = {
  "as it is": {},
  "1 step a call": {"steps_per_call": 1},
  "8 slots": {"num_slots": 8},
  "64 slots": {"num_slots": 64},
  "pages of 16": {"page_size": 16},
  "1 prompt a prefill": {"prefill_rows": 1},
  "a pool that grows": {"first_pages": 8},
  "a pool too small": {"max_pages": 24},
  "nothing reused": {"reuse": False},
}


def exact(args, peers) -> dict:
  """e. Rule 26, and the sampler's log-probs against the learner's."""
  del args, peers
  params = lab.random_params()
  found = {"variants": _variants(lab.random_params(SHALLOW))}
  print(found["variants"], flush=True)
  found["learner float32"] = _difference(params, "float32", "float32")
  found["learner bfloat16"] = {
    f"T {sampling.temperature}, p {sampling.top_p}, k {sampling.top_k}": (
      _difference(params, "bfloat16", "bfloat16", sampling)
    )
    for sampling in (
      *(config_lib.Sampling(temperature=t) for t in (0.6, 1.0, 1.3)),
      *(
        config_lib.Sampling(temperature=t, top_p=0.95, top_k=20)
        for t in (0.6, 1.0, 1.3)
      ),
    )
  }
  for dtype in ("bfloat16", "int8"):
    name = f"learner float32, cache {dtype}"
    found[name] = _difference(params, "float32", dtype)
  return found


# -- rule 26 -------------------------------------------------------------------


def _variants(params) -> dict:
  plays = {name: _play(params, **changes) for name, changes in VARIANTS.items()}
  base = next(iter(plays.values()))
  found = {}
  for name, play in plays.items():
    if play.keys() != base.keys():
      raise RuntimeError(f"{name}: other turns were played")
    equal = [np.array_equal(play[k].ids, base[k].ids) for k in base]
    # Log-probs are compared where tokens are, which is everywhere.
    largest = max(
      np.max(np.abs(play[k].logprobs - base[k].logprobs), initial=0.0)
      for k, same in zip(base, equal, strict=True)
      if same
    )
    found[name] = {
      "turns": len(equal),
      "of equal tokens": sum(equal),
      "max_difference": float(largest),
    }
  return found


def _play(
  params, reuse: bool = True, first_pages: int = 0, **changes
) -> dict[tuple[int, int, int], Completion]:
  """Groups that share a prompt, whose episodes then go on as chats."""
  settings = {
    "model": SHALLOW,
    "max_length": 320,
    "prefill_buckets": (32, 64, 128, 256, 320),
  }
  sampler = lab.make_sampler(params, **settings | changes)
  if first_pages:
    sampler.engine.num_pages = first_pages
    sampler.resume(lab.rollout_params(params), 0)
  prompts = lab.prompts(TASKS, 100)
  prompts[:, :HEAD] = prompts[0, :HEAD]
  keys = [(p, e) for p in range(TASKS) for e in range(GROUP)]
  past = {key: prompts[key[0]] for key in keys}
  done = {}
  for turn in range(TURNS):
    more = lab.prompts(len(keys), 20, seed=1 + turn)
    ended = lab.serve(
      sampler,
      [_request(key, turn, past[key], reuse) for key in keys],
      keep=True,
    )
    done |= ended
    for key, new in zip(keys, more, strict=True):
      past[key] = np.concatenate([past[key], ended[(*key, turn)].ids, new])
  return done


def _request(key, turn, prompt, reuse):
  parents = tuple((*key, t) for t in range(turn))
  sharing = {
    "parents": parents,
    "head": HEAD,
    "shared_by": GROUP if turn == 0 else 1,
  }
  # Lengths differ, so that slots free and fill at different times.
  return lab.request(
    (*key, turn),
    prompt,
    NEW - 3 * (sum(key) % 5),
    sampling=SETTINGS[key[1]],
    **sharing if reuse else {},
  )


# -- against the learner -------------------------------------------------------


def _difference(
  params, dtype: str, cache_dtype: str, sampling=SETTINGS[0]
) -> dict:
  """|sampler - learner| over the tokens of 32 sequences; both in `dtype`."""
  model = dataclasses.replace(lab.MODEL, compute_dtype=dtype)
  sampler = lab.make_sampler(
    params, model=model, dtype=dtype, cache_dtype=cache_dtype
  )
  done = _completions(sampler, sampling)
  turns = [
    Turn(
      agent="a",
      policy="p",
      index=0,
      prompt_ids=c.request.prompt_ids,
      completion_ids=c.ids,
      sampler_logprobs=c.logprobs,
      log_kept_mass=c.log_kept_mass,
      stop_reason=c.stop_reason,
      policy_version=0,
      valid=True,
    )
    for c in done
  ]
  batch = batching.pack(
    turns,
    range(len(turns)),
    [0] * len(turns),
    batching.Shape(2, 16, lab.PROMPT + lab.NEW, 2),
  )
  scored = learner.programs(
    learner.Spec(
      model=model,
      mesh=lab.one_device(),
      loss=config_lib.Loss(),
      optimizer=config_lib.Optimizer(),
      num_agents=1,
      vocab_size=model.vocab_size,
    )
  ).score(params, batch, 2, np.array([sampling.temperature], np.float32))
  off = np.abs(jax.device_get(scored) - batch.sampler_logprobs)
  off = off[batch.mask > 0]
  return {
    "max": float(off.max()),
    "mean": float(off.mean()),
    "p99": float(np.quantile(off, 0.99)),
    "mean_times_T": float(off.mean() * sampling.temperature),
    "p99_times_T": float(np.quantile(off, 0.99) * sampling.temperature),
  }


def _completions(sampler: Sampler, sampling) -> list[Completion]:
  done = lab.serve(
    sampler,
    [
      lab.request((i, 0, 0), prompt, lab.NEW, sampling=sampling)
      for i, prompt in enumerate(lab.prompts(32))
    ],
  )
  return list(done.values())


PARTS = {"e": exact}
