"""The math orchestra as a load: what `rollouts.py` measures a team with.

The orchestra and the rollout are the real ones. The words are numbers, and a
verdict hangs on a checksum of the verifier's answer, so that a draw is the same
episodes in every run: up to three solutions, answers of 40 tokens in the median
and 256 at most.
"""

import dataclasses
import zlib

import numpy as np
import rollouts_lab as lab

from drmas_jax import config as config_lib
from drmas_jax import engine as engine_lib
from drmas_jax import rollout, sampler, sampling
from drmas_jax.types import Agent, Outcome, Reply, Task

NEW, LOOPS = 256, 3
ENGINE = {
  "num_slots": 32,
  # A question, and all that may be said about it.
  "max_length": lab.PROMPT + (2 * LOOPS - 1) * NEW,
  # Few turns come at a time, and most go on from what is there.
  "prefill_rows": 4,
  "prefill_buckets": (4, 64, 128, 256, 512, lab.PROMPT + 2 * LOOPS * NEW),
  "steps_per_call": 16,
}
POLICIES = {
  "two policies": {"solver": "s", "verifier": "v"},
  "one policy": {"solver": "p", "verifier": "p"},
}


class Numbers(lab.Silent):
  """Text is ids, a space between them."""

  end_of_turn_id = None

  def render(self, messages):
    return " ".join(m["content"] for m in messages)

  def encode_rendered(self, text):
    ids = [int(word) if word.isdigit() else 0 for word in text.split()]
    return np.array(ids, np.int32)

  def decode(self, ids, control=False):
    del control
    return " ".join(map(str, ids))


class LockStep(sampler.Sampler):
  """A barrier at each agent call: nobody goes on before all have answered."""

  def __init__(self, *args):
    super().__init__(*args)
    self._held, self._done = [], []

  @property
  def busy(self):
    return bool(self.num_requests)

  @property
  def num_requests(self):
    return super().num_requests + len(self._held) + len(self._done)

  def submit(self, request, fault=None):
    self._held.append((request, fault))

  def dispatch(self):
    if not super().busy:
      for request, fault in self._held:
        super().submit(request, fault)
      self._held = []
    super().dispatch()

  def harvest(self):
    self._done += super().harvest()
    if super().busy:
      return []
    done, self._done = self._done, []
    return done


class Environment:
  def score(self, task, episode):
    del task, episode
    return Outcome(0.0)


def _template(task, said=()):
  content = " ".join([task.question, *(text for _, text in said)])
  return [{"role": "user", "content": content}]


def _parse(text, stop_reason):
  del stop_reason
  approved = zlib.crc32(text.encode()) % 2
  return Reply(text, verdict="approve" if approved else "reject")


ROLE = Agent(templates={"default": _template}, parse=_parse)


def _config(policy_of: dict[str, str]) -> config_lib.Config:
  return config_lib.build(
    {
      "policies": {
        name: {"checkpoint": "random", "engine": ENGINE}
        for name in dict.fromkeys(policy_of.values())
      },
      "agents": {
        agent: {
          "role": f"math.{agent}",
          "policy": policy,
          "max_tokens": NEW,
        }
        for agent, policy in policy_of.items()
      },
      "orchestra": {"name": "math", "options": {"max_loops": LOOPS}},
      "environment": {"name": "math"},
      "data": {"sources": {"arithmetic": {}}},
    }
  )


def make(kind: type, policy_of: dict[str, str], params) -> rollout.Rollout:
  """A rollout over samplers of a kind; all policies have the same weights.

  Args:
    kind: `Sampler` or LockStep.
    policy_of: of the solver and the verifier.
    params: weights.
  """
  config = _config(policy_of)
  team = rollout.Team(config)
  team.environment = Environment()
  team.members = {
    name: dataclasses.replace(member, role=ROLE)
    for name, member in team.members.items()
  }
  samplers = {}
  for name in config.policies:
    samplers[name] = kind(
      engine_lib.PolicyEngine(lab.spec(stop_ids=lab.stop_ids(), **ENGINE)),
      Numbers(),
    )
    samplers[name].resume(lab.rollout_params(params), 0)
  return rollout.Rollout(team, samplers, config)


def play(
  made: rollout.Rollout, num_tasks: int, group_size: int, draw: int
) -> int:
  """Plays the episodes of a draw; returns the tokens sampled."""
  questions = lab.prompts(num_tasks)
  tasks = [
    Task("s", i, i, " ".join(map(str, ids)), "")
    for i, ids in enumerate(questions)
  ]
  key = sampling.root_key(draw, "train")
  return rollout.count_tokens(made.collect(tasks, group_size, key))
