"""`--mode=sft`: a warm start from demonstrations, by the learner's own step.

Every trained policy learns what its agents say in demonstrations of the
training tasks, with cross-entropy in place of the policy loss, and is written
as a Hugging Face folder: <workdir>/policies/<name>. The shipped tiny policies
were made so. A demonstration is messages and a text, or ids that a policy has
sampled (`datasets.sampled`), which stay as they are.

Steps are counted over all policies, one after the other. Every
`checkpoint.every` of them a checkpoint of the policy at work is left in
<workdir>/sft, from which a run that was ended goes on bit for bit. Each step is
told of and watched as one of training is: metrics, alarms, report.html.
"""

import dataclasses
import pathlib
import shutil
import time
from typing import Any

import jax
import numpy as np

from drmas_jax import (
  batching,
  building,
  checkpoint,
  health,
  hosts,
  learner,
  manifest,
  placement,
  prompts,
  rollout,
  sampling,
  sharding,
  signals,
  usercode,
  watching,
)
from drmas_jax import config as config_lib
from drmas_jax.backbone import Backbone, abstract
from drmas_jax.data import Stream
from drmas_jax.datasets.dataset import Demonstration, Sampled
from drmas_jax.models import transformer, weights
from drmas_jax.types import RunError, Turn


def main(
  config: config_lib.Config,
  workdir: pathlib.Path,
  *,
  processes: tuple[str | None, int | None, int | None] = (None, None, None),
) -> int:
  """`--mode=sft`; returns the exit code.

  Args:
    config: checked.
    workdir: of the run; one that was begun goes on.
    processes: see `building.prepare`; only one can train so.

  Raises:
    ConfigError: it cannot run here.
    RunError: an alarm ended it; what it had is written.
  """
  config, backbones = building.prepare(config, processes)
  if jax.process_count() > 1:
    raise config_lib.ConfigError(
      f"--mode=sft: runs in one process, and there are {jax.process_count()}; "
      "start it without --coordinator_address"
    )
  if (workdir / "checkpoints").exists():
    raise config_lib.ConfigError(
      f"--workdir={workdir}: holds a training run; name another for --mode=sft"
    )
  stop = signals.Stop()
  try:
    session = Session(config, workdir, building.stream(config), stop)
    with session.watch:
      written = train(config, backbones, session)
  finally:
    stop.close()
  session.close()
  print(f"{workdir}/policies: {', '.join(written)}")
  if session.unwell:
    raise RunError(session.unwell)
  return stop.exit_code if stop.signal else 0


class Session:
  """What a run has beside its policies: tasks, files, alarms, checkpoints.

  Attributes:
    begun: the checkpoint that it goes on from; None: it is a new run.
    unwell: why an alarm ends it; "": none does.
    watch: of its steps.

  Args:
    config: of the run.
    workdir: likewise.
    stream: likewise.
    stop: ends it.

  Raises:
    ConfigError: the workdir has a run with another config.
  """

  def __init__(
    self,
    config: config_lib.Config,
    workdir: pathlib.Path,
    stream: Stream,
    stop: signals.Stop,
  ):
    self.workdir, self.stream = workdir, stream
    self._config, self._stop = config, stop
    self.checkpoints = checkpoint.Checkpoints(workdir / "sft", keep=1)
    self.begun = begun(config, self.checkpoints)
    done = self.begun and self.begun.step
    if self.begun is not None:
      hosts.say(f"goes on from step {done} of {workdir}")
    self.monitor = health.Monitor(config, "sft")
    if self.begun is not None and "health" in self.begun.extra:  # is newer
      self.monitor.restore(self.begun.extra["health"])
    self.unwell = ""
    self.watch = watching.watchdog(config, workdir)
    self._steps = config.sft.steps * len(config.trained)
    self._writer = watching.open_writer(config, workdir, self._steps, done)
    prints = {f"train/{k}": s.fingerprint for k, s in stream.sources.items()}
    manifest.record(workdir, building.about(config, prints), done or 0)

  def tell(self, step: int, found: dict[str, float]) -> None:
    """A step is done, counted over all policies."""
    unwell = watching.tell(self.monitor, self._writer, step, found)
    self.unwell = self.unwell or unwell
    self._writer.flush()

  @property
  def stopping(self) -> bool:
    """Whether to end after the step."""
    return bool(self._stop.signal or self.unwell)

  def save(self, step: int, states, cursor: int = 0, ready: int = 0) -> None:
    """A checkpoint after a step, counted over all policies.

    Args:
      step: so many are done.
      states: of the policy at work, by its name; none between policies.
      cursor: of its tasks.
      ready: its demonstrations before the cursor that no step has had.
    """
    extra = {"ready": ready, "health": self.monitor.state()}
    config = config_lib.to_dict(self._config)
    with self.watch.during("checkpoint"):
      run = checkpoint.Run(step, cursor, config, {}, extra)
      self.checkpoints.save(run, states)

  def close(self) -> None:
    """The summary, unless there is more to do."""
    if not self.stopping:
      found = {"steps": self._steps, "alarms": self.monitor.summary()}
      self._writer.write_json("summary.json", found)
    self._writer.close()


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
  config: config_lib.Config, backbones: dict[str, Backbone], session: Session
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
    demonstrations.check_any(name, session.stream)
  done = session.begun.step if session.begun else 0
  written = []
  for place, (name, demonstrations) in enumerate(shown.items()):
    first = place * config.sft.steps
    if done < first + config.sft.steps:
      state = _fit(config, backbones[name], demonstrations, session, first)
      with session.watch.during("folder"):
        _write(session.workdir / "policies" / name, state, backbones[name])
    written.append(name)
    if session.stopping:
      break
    if done < first + config.sft.steps:  # only now, so that it is whole
      session.save(first + config.sft.steps, {})
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


def _checked(shown: Any) -> Demonstration | Sampled:
  """A pair will do, so that a user's own data set need import nothing."""
  if isinstance(shown, Sampled):
    return shown
  match shown:
    case (tuple() as args, str() as completion):
      return Demonstration(args, completion)
  raise TypeError(
    f"it gave {shown!r}; write pairs of the arguments of a call, a tuple, and "
    "of its completion, a text"
  )


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
    where = f"task {task.source}[{task.index}]"
    with usercode.blaming("making demonstrations", where, make):
      played = make(task, rng, **self._config.sft.options)
      shown = [
        (member, _checked(demonstration))
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
    template = member.config.template
    code = member.role.templates.get(template)
    with usercode.blaming(f"writing the prompt of {where}", code=code):
      messages = member.role.messages(template, *shown.args)
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


def _fit(config, backbone: Backbone, demonstrations, session: Session, first):
  """`sft.steps` steps of `sft.batch_rows` demonstrations, counted from
  `first`; the state after them, or after the last before it is `stopping`."""
  sft, spec = config.sft, _spec(config.sft, backbone)
  programs = learner.programs(spec)
  feed = _Feed(config, backbone, session.stream, demonstrations)
  state, done = _resume(config, backbone, programs, feed, session, first)
  temperature, live = np.ones([spec.num_agents], np.float32), np.ones(1, bool)
  tell = _Tell(backbone.name, session)
  for step in range(done + 1, first + sft.steps + 1):
    with session.watch.during("step"):
      batch, trips = _batch(feed.rows(), backbone, config)
      tokens = batch.mask.sum()[None]
      batch = placement.global_batch(batch, spec.mesh)
      data = (batch, batch.sampler_logprobs, None, batch.mask)
      state, out = programs.train_step(
        state, None, data, tokens, live, trips, temperature
      )
      tell.done(step, out)
    stops = session.stopping
    last = stops or step == first + sft.steps
    saves = stops or step % config.checkpoint.every == 0
    if last or saves:  # a resume keeps what was told
      tell.rest()
    # After the last one it is saved when its folder is there.
    if step < first + sft.steps and saves:
      saved = {backbone.name: state}
      session.save(step, saved, feed.cursor, len(feed.ready))
    if last:
      break
  return state


class _Tell:
  """Tells of a step while the device is busy with the next one."""

  def __init__(self, name: str, session: Session):
    self._name, self._session = name, session
    self._held: tuple[int, learner.StepOutput] | None = None
    self._told = time.monotonic()

  def done(self, step: int, out: learner.StepOutput) -> None:
    """The step is dispatched."""
    self.rest()
    self._held = step, out._replace(sums=None, gap=None)

  def rest(self) -> None:
    """Waits for the step that has not been told of, if there is one."""
    if self._held is None:
      return
    (step, out), self._held = self._held, None
    found = {
      f"loss/{self._name}": float(out.loss[0]),
      f"grad_norm/{self._name}": float(out.grad_norm[0]),
      f"skipped/non_finite/{self._name}": float(not out.finite[0]),
    }
    before, self._told = self._told, time.monotonic()
    found["time/step_s"] = self._told - before
    self._session.tell(step, found)


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
