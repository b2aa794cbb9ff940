"""`--mode=sft`: a warm start from demonstrations, by the learner's own step.

Every trained policy learns what its agents say in demonstrations of the
training tasks, with cross-entropy in place of the policy loss, and is written
as a Hugging Face folder: <workdir>/policies/<name>. The shipped tiny policies
were made so.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable

import jax
import numpy as np

from drmas_jax import (
  batching,
  learner,
  placement,
  prompts,
  rollout,
  sampling,
  sharding,
)
from drmas_jax import config as config_lib
from drmas_jax.backbone import Backbone
from drmas_jax.data import Stream
from drmas_jax.models import transformer, weights
from drmas_jax.types import RunError, Turn


def train(
  config: config_lib.Config,
  backbones: dict[str, Backbone],
  stream: Stream,
  workdir: pathlib.Path,
  report,
  stopping: Callable[[], bool],
) -> list[str]:
  """Trains every policy in turn; `report(step, {name: float})` is told.

  Once `stopping` says so, the policy at work is written as it is after its
  step, and the others are not begun. Returns the names of those written.
  """
  team = rollout.Team(config)
  makers = {
    key: config_lib.load_module(
      "datasets", config_lib.named(key, source).name
    ).demonstrations
    for key, source in config.data.sources.items()
  }
  written = []
  for name in config.trained:
    demonstrations = _Demonstrations(config, backbones[name], team, makers)
    state = _fit(
      config, backbones[name], stream, demonstrations, report, stopping
    )
    weights.save(
      workdir / "policies" / name,
      placement.fetch(state.params),
      backbones[name].learner.model,
      like=backbones[name].folder,
      dtype="float32",  # where a run starts, so nothing is rounded off
    )
    written.append(name)
    if stopping():
      break
  return written


class _Demonstrations:
  """Encodes what a policy's agents say into turns."""

  def __init__(self, config, backbone: Backbone, team, makers):
    self._config = config
    self._tokenizer = backbone.tokenizer
    own = backbone.agents[backbone.names[0]]
    self._members = [team.members[a] for a in own]
    self._limit = {
      m.name: prompts.limit(m.config, backbone.policy.engine)
      for m in self._members
    }
    self._makers = makers  # by source

  def turns(self, task, rng: np.random.Generator) -> list[Turn]:
    make = self._makers[task.source]
    played = make(task, rng, **self._config.sft.options)
    shown = [
      (member, demonstration)
      for member in self._members
      for demonstration in played[member.name]
    ]
    return [
      self._turn(i, task, member, *demonstration)
      for i, (member, demonstration) in enumerate(shown)
    ]

  def _turn(self, index: int, task, member, args, completion: str) -> Turn:
    row = f"{task.source}[{task.index}]"
    where = f"a demonstration of {member.name!r} for {row}"
    messages = member.role.messages(member.config.template, *args)
    prompt = prompts.Chat(self._tokenizer).ask(
      messages, self._limit[member.name], member.config.cut
    )
    if prompt.fault is not None:
      raise RunError(f"{where}: {prompt.fault.message}")
    ids = self._tokenizer.encode(completion)
    ids = np.append(ids, self._tokenizer.end_of_turn_id).astype(np.int32)
    if len(ids) > member.config.max_tokens:  # it could never be sampled
      raise RunError(
        f"{where}: it has {len(ids)} tokens; allowed are "
        f"agents.{member.name}.max_tokens={member.config.max_tokens}; raise it"
      )
    return Turn(
      agent=member.name,
      policy=member.config.policy,
      index=index,
      prompt_ids=prompt.ids,
      completion_ids=ids,
      sampler_logprobs=np.zeros(len(ids), np.float32),
      log_kept_mass=np.zeros(len(ids), np.float32),
      stop_reason="stop",
      policy_version=0,
      valid=True,
    )


def _spec(sft: config_lib.Sft, backbone: Backbone) -> learner.Spec:
  """The learner of the backbone, for cross-entropy on a schedule of its own."""
  optimizer = config_lib.Optimizer(
    learning_rate=sft.learning_rate,
    schedule="cosine",
    warmup_steps=sft.warmup_steps,
    decay_steps=max(1, sft.steps - sft.warmup_steps),
    final_fraction=0.1,
    b2=0.95,
  )
  return dataclasses.replace(backbone.learner, loss=None, optimizer=optimizer)


def _fit(config, backbone: Backbone, stream, demonstrations, report, stopping):
  """`sft.steps` steps of `sft.batch_rows` demonstrations."""
  sft, spec = config.sft, _spec(config.sft, backbone)
  programs = learner.programs(spec)
  index = sorted(config.policies).index(backbone.name)
  state = programs.init(_start(config, backbone, index))
  temperature, live = np.ones([spec.num_agents], np.float32), np.ones(1, bool)
  cursor, ready, started = 0, [], time.monotonic()
  for step in range(sft.steps):
    while len(ready) < sft.batch_rows:
      (task,) = stream.tasks(cursor, 1)
      rng = np.random.Generator(np.random.PCG64([config.seed, index, cursor]))
      ready += demonstrations.turns(task, rng)
      cursor += 1
    rows, ready = ready[: sft.batch_rows], ready[sft.batch_rows :]
    batch, trips = _batch(rows, backbone, config)
    tokens = batch.mask.sum()[None]
    batch = placement.global_batch(batch, spec.mesh)
    data = (batch, batch.sampler_logprobs, None, batch.mask)
    state, out = programs.train_step(
      state, None, data, tokens, live, trips, temperature
    )
    last = step == sft.steps - 1 or stopping()
    if step % 50 == 49 or last:
      seconds = time.monotonic() - started
      report(
        step + 1,
        {
          f"loss/{backbone.name}": float(out.loss[0]),
          f"grad_norm/{backbone.name}": float(out.grad_norm[0]),
          "time/seconds": seconds,
        },
      )
    if last:
      break
  return state


def _start(config: config_lib.Config, backbone: Backbone, index: int):
  """The checkpoint's weights, or new ones in its shape."""
  model, mesh = backbone.learner.model, backbone.slice.train_mesh
  if not config.sft.from_scratch:
    return backbone.read()
  key = jax.random.fold_in(sampling.root_key(config.seed, "init"), index)
  where = sharding.shardings(
    transformer.param_axes(model), transformer.param_shapes(model), mesh
  )
  init = jax.jit(transformer.init_params, static_argnums=0, out_shardings=where)
  return init(model, key)


def _batch(turns: list[Turn], backbone: Backbone, config: config_lib.Config):
  """(batch, micro-batches with rows) of one demonstration a turn."""
  alone = [(i,) for i in range(len(turns))]
  size = batching.size(turns, alone, backbone.row_buckets)
  shape = backbone.shape([size])
  names = config.agent_names
  agents = [names.index(t.agent) for t in turns]
  batch = batching.pack(turns, range(len(turns)), agents, shape)
  return batch, shape.trips
