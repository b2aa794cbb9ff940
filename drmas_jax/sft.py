"""`--mode=sft`: a warm start from demonstrations, by the learner's own step.

Every trained policy learns what its agents say in demonstrations of the
training tasks, with cross-entropy in place of the policy loss, and is written
as a Hugging Face folder: <workdir>/policies/<name>. The shipped tiny policies
were made so.
"""

import dataclasses
import pathlib
import time

import jax
import numpy as np

from drmas_jax import batching, learner, placement, rollout, sampling, sharding
from drmas_jax import config as config_lib
from drmas_jax.backbone import Backbone
from drmas_jax.data import Stream
from drmas_jax.models import transformer, weights
from drmas_jax.types import Turn


def train(
  config: config_lib.Config,
  backbones: dict[str, Backbone],
  source,
  workdir: pathlib.Path,
  report,
) -> None:
  """Trains every policy in turn; `report(step, {name: float})` is told."""
  team = rollout.Team(config)
  module = config_lib.load_module("datasets", config.data.source.name)
  for name in config.trained:
    demonstrations = _Demonstrations(config, backbones[name], team, module)
    state = _fit(config, backbones[name], source, demonstrations, report)
    weights.save(
      workdir / "policies" / name,
      placement.fetch(state.params),
      backbones[name].learner.model,
      like=backbones[name].folder,
    )


class _Demonstrations:
  """Encodes what a policy's agents say into turns."""

  def __init__(self, config, backbone: Backbone, team, module):
    self._config = config
    self._tokenizer = backbone.tokenizer
    self._members = [team.members[a] for a in backbone.agents]
    self._make = module.demonstrations

  def turns(self, task, rng: np.random.Generator) -> list[Turn]:
    played = self._make(task, rng, **self._config.sft.options)
    turns = []
    for member in self._members:
      for args, completion in played[member.name]:
        messages = member.role.messages(member.config.template, *args)
        ids = self._tokenizer.encode(completion)
        ids = np.append(ids, self._tokenizer.end_of_turn_id).astype(np.int32)
        turns.append(
          Turn(
            agent=member.name,
            policy=member.config.policy,
            index=len(turns),
            prompt_ids=self._tokenizer.encode_chat(messages),
            completion_ids=ids,
            sampler_logprobs=np.zeros(len(ids), np.float32),
            log_kept_mass=np.zeros(len(ids), np.float32),
            stop_reason="stop",
            policy_version=0,
            valid=True,
          )
        )
    return turns


def _fit(config, backbone: Backbone, source, demonstrations, report):
  """`sft.steps` steps of `sft.batch_rows` demonstrations."""
  sft = config.sft
  spec = dataclasses.replace(
    backbone.learner,
    loss=None,
    optimizer=config_lib.Optimizer(
      learning_rate=sft.learning_rate,
      schedule="cosine",
      warmup_steps=sft.warmup_steps,
      decay_steps=max(1, sft.steps - sft.warmup_steps),
      final_fraction=0.1,
      b2=0.95,
    ),
  )
  programs = learner.programs(spec)
  index = sorted(config.policies).index(backbone.name)
  state = programs.init(_start(config, backbone, index))
  stream = Stream(source, config.seed)
  temperature = np.ones([spec.num_agents], np.float32)
  cursor, ready, started = 0, [], time.monotonic()
  for step in range(sft.steps):
    while len(ready) < sft.batch_rows:
      (task,) = stream.tasks(cursor, 1)
      rng = np.random.Generator(np.random.PCG64([config.seed, index, cursor]))
      ready += demonstrations.turns(task, rng)
      cursor += 1
    rows, ready = ready[: sft.batch_rows], ready[sft.batch_rows :]
    batch = _batch(rows, backbone, config)
    trips = -(-len(rows) // backbone.policy.micro_batch)
    tokens = float(batch.mask.sum())
    batch = placement.global_batch(batch, spec.mesh)
    state, out = programs.train_step(
      state,
      batch,
      batch.sampler_logprobs,
      batch.mask,
      np.float32(tokens),
      trips,
      temperature,
    )
    if step % 50 == 49 or step == sft.steps - 1:
      seconds = time.monotonic() - started
      report(
        step + 1,
        {
          f"loss/{backbone.name}": float(out.loss),
          f"grad_norm/{backbone.name}": float(out.grad_norm),
          "time/seconds": seconds,
        },
      )
  return state


def _start(config: config_lib.Config, backbone: Backbone, index: int):
  """The checkpoint's weights, or new ones in its shape."""
  model, mesh = backbone.learner.model, backbone.slice.train_mesh
  if not config.sft.from_scratch:
    return weights.load(backbone.folder, model, mesh)
  key = jax.random.fold_in(sampling.root_key(config.seed, "init"), index)
  where = sharding.shardings(
    transformer.param_axes(model), transformer.param_shapes(model), mesh
  )
  init = jax.jit(transformer.init_params, static_argnums=0, out_shardings=where)
  return init(model, key)


def _batch(turns: list[Turn], backbone: Backbone, config: config_lib.Config):
  size = batching.size(turns)
  num_micro, local, length = backbone.shape(size, num_hosts=1)
  names = config.agent_names
  return batching.pack(
    turns,
    range(len(turns)),
    [names.index(t.agent) for t in turns],
    num_micro=num_micro,
    micro_batch=local,
    length=length,
  )
