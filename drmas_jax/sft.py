"""`--mode=sft`: a warm start from demonstrations, by the learner's own step.

Every trained policy learns what its agents say in demonstrations of the
training tasks, with cross-entropy in place of the policy loss, and is written
as a Hugging Face folder: <workdir>/policies/<name>. The shipped tiny policies
were made so. A demonstration is messages and a text, or ids that a policy has
sampled (`datasets.sampled`), which stay as they are.

Steps are counted over all policies, one after the other. Every
`checkpoint.every` of them a checkpoint of the policy at work is left in
<workdir>/sft, from which a run that was ended goes on bit for bit.
"""

import dataclasses
import pathlib
import shutil
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from drmas_jax import (
  batching,
  checkpoint,
  learner,
  placement,
  prompts,
  rollout,
  sampling,
  sharding,
)
from drmas_jax import config as config_lib
from drmas_jax.backbone import Backbone, abstract
from drmas_jax.data import Stream
from drmas_jax.datasets.dataset import Demonstration, Sampled
from drmas_jax.models import transformer, weights
from drmas_jax.types import RunError, Turn


class Session(NamedTuple):
  """What `train` is told by whoever starts it.

  Attributes:
    workdir: of the run.
    report: report(step, {name: float}).
    stopping: whether to end after the step.
    checkpoints: of the run.
    begun: the newest of these; None: it is a new run.
  """

  workdir: pathlib.Path
  report: Callable[[int, dict[str, float]], None]
  stopping: Callable[[], bool]
  checkpoints: checkpoint.Checkpoints
  begun: checkpoint.Run | None


def begun(
  config: config_lib.Config, checkpoints: checkpoint.Checkpoints
) -> checkpoint.Run | None:
  """The newest checkpoint, if there is one.

  Raises:
    ConfigError: it is of a run with another config.
  """
  run = checkpoints.run()
  if run is None:
    return None
  faults = [
    f"{c.key}: was {c.old!r} when {checkpoints.workdir} was begun, is now "
    f"{c.new!r}; write it back, or start a new --workdir"
    for c in checkpoint.changes_between(run.config, config_lib.to_dict(config))
    if c.kind != "free" or c.key.startswith("sft.")
  ]
  if faults:
    raise config_lib.ConfigError("\n".join(faults))
  return run


def train(
  config: config_lib.Config,
  backbones: dict[str, Backbone],
  stream: Stream,
  session: Session,
) -> list[str]:
  """Trains every policy in turn.

  Once the session is `stopping`, the policy at work is written as it is after
  its step, and the others are not begun. Returns the names of those written.
  """
  team = rollout.Team(config)
  makers = {
    key: config_lib.load_module(
      "datasets", config_lib.named(key, source).name
    ).demonstrations
    for key, source in config.data.sources.items()
  }
  shown = {
    name: _Demonstrations(config, backbones[name], team, makers)
    for name in config.trained
  }
  for name, demonstrations in shown.items():
    demonstrations.check_any(name, stream)
  done = session.begun.step if session.begun else 0
  written = []
  for place, (name, demonstrations) in enumerate(shown.items()):
    first = place * config.sft.steps
    if done < first + config.sft.steps:
      state = _fit(
        config, backbones[name], stream, demonstrations, session, first
      )
      _write(session.workdir / "policies" / name, state, backbones[name])
    written.append(name)
    if session.stopping():
      break
    if done < first + config.sft.steps:  # only now, so that it is whole
      _save(config, session, first + config.sft.steps, {})
  session.checkpoints.close()
  return written


def _write(folder: pathlib.Path, state, backbone: Backbone) -> None:
  """The policy's folder, which is there as a whole or not at all."""
  part = folder.with_name(f".{folder.name}.part")
  shutil.rmtree(part, ignore_errors=True)
  weights.save(
    part,
    placement.fetch(state.params),
    backbone.learner.model,
    like=backbone.folder,
    dtype="float32",  # where a run starts, so nothing is rounded off
  )
  shutil.rmtree(folder, ignore_errors=True)
  part.rename(folder)


def _save(config, session: Session, step: int, states, cursor=0, ready=0):
  """A checkpoint after a step, counted over all policies.

  Args:
    config: of the run.
    session: of the run.
    step: so many are done.
    states: of the policy at work, by its name; none between policies.
    cursor: of its tasks.
    ready: its demonstrations before the cursor that no step has had.
  """
  run = checkpoint.Run(
    step, cursor, config_lib.to_dict(config), {}, {"ready": ready}
  )
  session.checkpoints.save(run, states)


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

  def check_any(self, name: str, stream: Stream) -> None:
    """Raises RunError where an epoch of all sources has nothing for a policy,
    whose training would then wait for ever."""
    for cursor in range(sum(map(len, stream.sources.values()))):
      (task,) = stream.tasks(cursor, 1)
      if self.turns(task, np.random.default_rng(0)):
        return
    agents = ", ".join(member.name for member in self._members)
    raise RunError(
      f"policies.{name}: data.sources has no demonstration of its agents "
      f"({agents}); add some, or set policies.{name}.frozen=True"
    )

  def turns(self, task, rng: np.random.Generator) -> list[Turn]:
    make = self._makers[task.source]
    played = make(task, rng, **self._config.sft.options)
    shown = [
      (member, demonstration)
      for member in self._members
      for demonstration in played.get(member.name, ())
    ]
    return [
      self._turn(i, task, member, demonstration)
      for i, (member, demonstration) in enumerate(shown)
    ]

  def _turn(
    self, index: int, task, member, shown: Demonstration | Sampled
  ) -> Turn:
    row = f"{task.source}[{task.index}]"
    where = f"a demonstration of {member.name!r} for {row}"
    encode = self._given if isinstance(shown, Sampled) else self._encoded
    prompt_ids, ids = encode(where, member, shown)
    if len(ids) > member.config.max_tokens:  # it could never be sampled
      raise RunError(
        f"{where}: it has {len(ids)} tokens; allowed are "
        f"agents.{member.name}.max_tokens={member.config.max_tokens}; raise it"
      )
    return Turn(
      agent=member.name,
      policy=member.config.policy,
      index=index,
      prompt_ids=prompt_ids,
      completion_ids=ids,
      sampler_logprobs=np.zeros(len(ids), np.float32),
      log_kept_mass=np.zeros(len(ids), np.float32),
      stop_reason="stop",
      policy_version=0,
      valid=True,
    )

  def _encoded(
    self, where: str, member, shown: Demonstration
  ) -> tuple[np.ndarray, np.ndarray]:
    """Ids of the prompt and of the completion with its end."""
    messages = member.role.messages(member.config.template, *shown.args)
    prompt = prompts.Chat(self._tokenizer).ask(
      messages, self._limit[member.name], member.config.cut
    )
    if prompt.fault is not None:
      raise RunError(f"{where}: {prompt.fault.message}")
    ids = self._tokenizer.encode(shown.completion)
    ids = np.append(ids, self._tokenizer.end_of_turn_id)
    return prompt.ids, ids.astype(np.int32)

  def _given(
    self, where: str, member, shown: Sampled
  ) -> tuple[np.ndarray, np.ndarray]:
    """The ids as they are, if they are of this tokenizer."""
    top, ids = max(*shown.prompt_ids, *shown.completion_ids), shown.prompt_ids
    known = top < self._tokenizer.vocab_size
    if not known or self._tokenizer.decode(ids, True) != shown.prompt:
      raise RunError(
        f"{where}: its token ids are not of the tokenizer of policies."
        f"{member.config.policy}; allowed is the one that they were sampled "
        "with; name a checkpoint that has it"
      )
    if len(shown.prompt_ids) > self._limit[member.name]:
      raise RunError(
        f"{where}: its prompt has {len(shown.prompt_ids)} tokens; allowed are "
        f"{self._limit[member.name]}; raise max_prompt_tokens of the agent or "
        "engine.max_length"
      )
    return (
      np.array(shown.prompt_ids, np.int32),
      np.array(shown.completion_ids, np.int32),
    )


_REPORT = 50  # steps


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


def _fit(
  config, backbone: Backbone, stream, demonstrations, session: Session, first
):
  """`sft.steps` steps of `sft.batch_rows` demonstrations, counted from
  `first`; the state after them, or after the last before it is `stopping`."""
  sft, spec = config.sft, _spec(config.sft, backbone)
  programs = learner.programs(spec)
  feed = _Feed(config, backbone, stream, demonstrations)
  state, done = _resume(config, backbone, programs, feed, session, first)
  temperature, live = np.ones([spec.num_agents], np.float32), np.ones(1, bool)
  started = time.monotonic()
  for step in range(done + 1, first + sft.steps + 1):
    batch, trips = _batch(feed.rows(), backbone, config)
    tokens = batch.mask.sum()[None]
    batch = placement.global_batch(batch, spec.mesh)
    data = (batch, batch.sampler_logprobs, None, batch.mask)
    state, out = programs.train_step(
      state, None, data, tokens, live, trips, temperature
    )
    stops = session.stopping()
    last = stops or step == first + sft.steps
    if last or (step - first) % _REPORT == 0:
      session.report(
        step,
        {
          f"loss/{backbone.name}": float(out.loss[0]),
          f"grad_norm/{backbone.name}": float(out.grad_norm[0]),
          "time/seconds": time.monotonic() - started,
        },
      )
    # After the last one it is saved when its folder is there.
    if step < first + sft.steps and (
      stops or step % config.checkpoint.every == 0
    ):
      saved = {backbone.name: state}
      _save(config, session, step, saved, feed.cursor, len(feed.ready))
    if last:
      break
  return state


class _Feed:
  """The demonstrations of a policy, batch by batch.

  Attributes:
    cursor: of the tasks.
    ready: turns of earlier tasks that no batch has had.
  """

  def __init__(self, config, backbone: Backbone, stream, demonstrations):
    self._stream, self._demonstrations = stream, demonstrations
    self._seeds = config.seed, sorted(config.policies).index(backbone.name)
    self._batch_rows = config.sft.batch_rows
    self.cursor = 0
    self.ready: list[Turn] = []

  def _turns(self, cursor: int) -> list[Turn]:
    (task,) = self._stream.tasks(cursor, 1)
    rng = np.random.Generator(np.random.PCG64([*self._seeds, cursor]))
    return self._demonstrations.turns(task, rng)

  def rows(self) -> list[Turn]:
    while len(self.ready) < self._batch_rows:
      self.ready += self._turns(self.cursor)
      self.cursor += 1
    rows = self.ready[: self._batch_rows]
    self.ready = self.ready[self._batch_rows :]
    return rows

  def go_on(self, cursor: int, num_ready: int) -> None:
    """From where it had so many turns ready."""
    self.cursor, self.ready = cursor, []
    while len(self.ready) < num_ready:
      cursor -= 1
      self.ready = self._turns(cursor) + self.ready
    self.ready = self.ready[len(self.ready) - num_ready :]


def _resume(
  config,
  backbone: Backbone,
  programs: learner.Programs,
  feed: _Feed,
  session: Session,
  first: int,
):
  """(state, steps done, counted over all policies) to go on from."""
  run = session.begun
  if run is None or run.step <= first:
    index = sorted(config.policies).index(backbone.name)
    return programs.init(_start(config, backbone, index)), first
  spec = _spec(config.sft, backbone)
  states, _ = session.checkpoints.restore(
    {
      backbone.name: abstract(
        learner.state_shapes(spec), learner.state_shardings(spec)
      )
    },
    run.step,
  )
  feed.go_on(run.cursor, run.extra["ready"])
  return states[backbone.name], run.step


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
