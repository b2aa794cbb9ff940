"""One set of decoder weights on one placement: its learner, engines, sampler.

In this version a backbone is a policy. It is built from a checkpoint folder,
trained by `update`, and its weights go to its engines by `resume`. Updates are
dispatched and not waited for, so that backbones work at the same time.
"""

import dataclasses
import functools
import hashlib
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np

from drmas_jax import batching, engine, folders, learner, losses, placement
from drmas_jax import config as config_lib
from drmas_jax.checkpoint import SavedPolicy
from drmas_jax.models import transformer, weights
from drmas_jax.replicas import Replicas
from drmas_jax.rewards import Rows
from drmas_jax.sampler import Sampler
from drmas_jax.tokenizer import Tokenizer
from drmas_jax.types import Batch, TrainState

_TINY = pathlib.Path(__file__).parent / "models" / "tiny"
_SMALLEST_BUCKET = 32


def checkpoint_folder(checkpoint: str) -> pathlib.Path:
  """ "tiny:NAME" is a policy that is shipped, "run:WORKDIR/POLICY" one of
  another run (its weights are in the run's checkpoints; this is the folder that
  they began with); anything else is a folder, here or elsewhere (`folders`).

  Raises:
    ValueError: there is no such folder, it cannot be fetched, or it is not as
      the run found it.
  """
  kind, _, name = checkpoint.partition(":")
  if kind == "run":
    return original_folder(SavedPolicy.parse(checkpoint))
  if kind != "tiny":
    return folders.fetch(checkpoint)
  shipped = sorted(p.parent.name for p in _TINY.glob("*/config.json"))
  if name not in shipped:
    raise ValueError(
      f"not shipped; allowed are {', '.join(f'tiny:{n}' for n in shipped)}"
    )
  return _TINY / name


def checkpoint_sizes(checkpoint: str) -> transformer.DecoderConfig:
  """What a plan needs of a checkpoint, whose weights may still be elsewhere.

  Raises:
    ValueError: as `checkpoint_folder`, or as `weights.read_config`.
  """
  if checkpoint.startswith(("tiny:", "run:")):
    return weights.read_config(checkpoint_folder(checkpoint))
  return folders.sizes(checkpoint)


def original_folder(saved: SavedPolicy) -> pathlib.Path:
  """The folder whose config.json and tokenizer a run's policy has.

  Raises:
    ValueError: it is gone, or not as the run found it.
  """
  began = f"its run began with {saved.checkpoint!r}"
  try:
    folder = checkpoint_folder(saved.checkpoint)
  except ValueError as e:
    raise ValueError(
      f"{saved}: {began}: {e} (a relative path is one from the folder that the "
      "run was started in)"
    ) from e
  if digest(folder) != saved.digest:
    raise ValueError(
      f"{saved}: {began}, and config.json or the tokenizer of {str(folder)!r} "
      "is not what it was then; put it back"
    )
  return folder


def pinned(checkpoint: str) -> str:
  """A checkpoint's name; that of another run's policy with the step it means.

  Raises:
    ValueError: there is no such run, policy or step.
  """
  if not checkpoint.startswith("run:"):
    return checkpoint
  return SavedPolicy.parse(checkpoint).pinned


def digest(folder: pathlib.Path) -> str:
  """Of the model's shape and the tokenizer, as a checkpoint folder has them."""
  found = hashlib.sha256()
  for name in (
    *("config.json", "tokenizer.json", "tokenizer_config.json"),
    "chat_template.jinja",
  ):
    path = folder / name
    found.update(path.read_bytes() if path.is_file() else b"")
  return found.hexdigest()[:16]


def _read_tokenizer(
  name: str, policy: config_lib.Policy, folder: pathlib.Path
) -> Tokenizer:
  try:
    return Tokenizer.load(folder, policy.chat_template_kwargs)
  except ValueError as e:  # it begins with the key
    raise config_lib.ConfigError(f"policies.{name}.{e}") from e


def _check_model(
  name: str,
  policy: config_lib.Policy,
  model: transformer.DecoderConfig,
  vocab_size: int,
) -> None:
  """What the config asks for and the checkpoint cannot give."""
  if vocab_size > model.vocab_size:
    raise config_lib.ConfigError(
      f"policies.{name}.checkpoint: its tokenizer has {vocab_size} ids and its "
      f"embedding {model.vocab_size} rows; allowed are at most as many ids as "
      "rows; the folder mixes two checkpoints"
    )
  if policy.engine.max_length > model.max_positions:
    raise config_lib.ConfigError(
      f"policies.{name}.engine.max_length: {policy.engine.max_length} is more "
      f"than the {model.max_positions} positions of its checkpoint; lower it"
    )


class Work(NamedTuple):
  """What one backbone would train on; hosts agree on its numbers.

  Attributes:
    rows: the step's turns of each row of a batch, by their places; a row is
      there if one of its turns has a signal.
    tokens: sampled tokens of all its real turns, with a signal or without.
    size: of `rows`.
    weights: [N] float32, in the loss, of a token of each of the step's turns.
    denominator: of the loss, whose sum goes over all of those weights, those
      of turns without a signal too.
  """

  rows: list[tuple[int, ...]]
  tokens: int
  size: batching.Size
  weights: np.ndarray
  denominator: float


class Backbone:
  """See the module's docstring."""

  def __init__(
    self,
    name: str,
    config: config_lib.Config,
    slice_: placement.Slice,
    model: transformer.DecoderConfig,
    folder: pathlib.Path,
  ):
    """Reads the tokenizer; builds no device array."""
    self.name = name
    self.policy = config.policies[name]
    self.slice = slice_
    self.folder = folder
    self.tokenizer = _read_tokenizer(name, self.policy, folder)
    self.agents = config.agents_of(name)
    self.agent_index = {a: config.agent_names.index(a) for a in self.agents}
    self._temperatures = np.array(
      [config.agents[a].sampling.temperature for a in config.agent_names],
      np.float32,
    )
    vocab = self.tokenizer.vocab_size
    _check_model(name, self.policy, model, vocab)
    model = dataclasses.replace(model, remat=self.policy.remat)
    self.learner = learner.Spec(
      model=dataclasses.replace(model, compute_dtype=self.policy.compute_dtype),
      mesh=slice_.train_mesh,
      loss=self.policy.loss,
      optimizer=self.policy.optimizer,
      num_agents=len(config.agent_names),
      vocab_size=vocab,
      head_chunk=_head_chunk(vocab, slice_.train_mesh),
    )
    self.engines = [
      engine.PolicyEngine(
        _engine_spec(self.policy, model, mesh, self.tokenizer)
      )
      for mesh in slice_.rollout_meshes
    ]
    self.row_buckets = self.policy.row_buckets or batching.powers_of_two(
      _SMALLEST_BUCKET, self.policy.engine.max_length
    )
    self.sampler = Replicas([Sampler(e, self.tokenizer) for e in self.engines])
    self.state: TrainState | None = None
    self.params: Any = None  # of a frozen policy, which has no state
    self.updates = 0

  @functools.cached_property
  def digest(self) -> str:
    return digest(self.folder)

  # -- weights -----------------------------------------------------------------

  def read(self) -> transformer.Params:
    """The checkpoint's parameters, on the train slice."""
    if self.policy.checkpoint.startswith("run:"):
      saved = SavedPolicy.parse(self.policy.checkpoint)
      return saved.restore(self.abstract_state().params)
    return weights.load(self.folder, self.learner.model, self.slice.train_mesh)

  def load(self) -> None:
    """Reads the checkpoint into the train slice."""
    params = self.read()
    if self.policy.frozen:
      self.params = params
    else:
      self.state = learner.programs(self.learner).init(params)

  def abstract_state(self) -> TrainState:
    """Shapes and shardings of the state, to restore a checkpoint into."""
    return jax.tree.map(
      lambda shape, where: jax.ShapeDtypeStruct(
        shape.shape, shape.dtype, sharding=where
      ),
      learner.state_shapes(self.learner),
      learner.state_shardings(self.learner),
    )

  def resume(self) -> None:
    """Train slice -> every engine; the sampler is ready for a rollout."""
    params = self.params if self.state is None else self.state.params
    rollout = placement.sync(
      params,
      [engine.param_shardings(e.spec) for e in self.engines],
      self.policy.rollout_dtype,
      transformer.unstack,
    )
    self.sampler.resume(rollout, self.updates)

  def release(self) -> None:
    self.sampler.release()

  def count_updates(self, num: int) -> None:
    """Versions are counted on the host; an update is taken back if it turns
    out, when its output is read, that it was skipped (rule 11)."""
    self.updates += num
    self.sampler.engine.version = self.updates

  # -- training ----------------------------------------------------------------

  def work(self, rows: Rows, advantages: np.ndarray) -> Work:
    """Own turns of the step. Rows without a signal are left out of the
    gradient, which is exact as every loss is 0 at advantage 0, and stay in the
    denominator. With an entropy bonus every row has a signal."""
    loss = self.policy.loss
    own = np.array([t.policy == self.name for t in rows.turns], bool)
    lengths = np.array([len(t.completion_ids) for t in rows.turns], int)
    counted = own
    if loss.mask_truncated:
      cut = [t.stop_reason == "length" for t in rows.turns]
      counted = own & ~np.array(cut, bool)
    turn_weights, denominator = losses.aggregate(
      lengths, counted, loss.aggregation, loss.divisor
    )
    live = turn_weights > 0
    if not self.policy.update_on_zero_signal and not loss.entropy_weight:
      live &= advantages != 0
    kept = [
      row
      for row in batching.rows(rows.turns, rows.episode)
      if live[list(row)].any()
    ]
    return Work(
      kept,
      int(lengths[own].sum()),
      batching.size([rows.turns[row[-1]] for row in kept]),
      turn_weights,
      denominator,
    )

  def shape(self, size: batching.Size, num_hosts: int) -> tuple[int, int, int]:
    """(micro-batches, rows of one on this host, row length) for a size."""
    local = self.policy.micro_batch // num_hosts
    return (
      batching.num_micro_batches(size.num_rows, local),
      local,
      batching.bucket(size.longest, self.row_buckets),
    )

  def update(
    self,
    rows: Rows,
    advantages: np.ndarray,
    work: Work,
    agreed: batching.Size,
    denominator: float,
    *,
    num_hosts: int = 1,
    agent_norms: bool = False,
  ) -> tuple[learner.StepOutput, Any]:
    """One update, dispatched; (its output, norms by agent or None).

    Args:
      rows: of the step.
      advantages: [N], of its rows.
      work: what `work` found here.
      agreed: the largest size of any host.
      denominator: that of `work` on all hosts together.
      num_hosts: how many there are.
      agent_norms: also the gradient's norm by agent (a second pass).
    """
    num_micro, local, length = self.shape(agreed, num_hosts)
    batch = batching.pack(
      rows.turns,
      range(len(rows.turns)),
      rows.agent,
      num_micro=num_micro,
      micro_batch=local,
      length=length,
      rows=work.rows,
      weights=work.weights,
    )
    trips = max(1, -(-agreed.num_rows // local))
    by_token = batching.gather(advantages, batch)
    return self._train(batch, by_token, denominator, trips, agent_norms)

  def _train(
    self,
    batch: Batch,
    advantages: np.ndarray,
    denominator: float,
    trips: int,
    agent_norms: bool,
  ) -> tuple[learner.StepOutput, Any]:
    programs = learner.programs(self.learner)
    batch, advantages = placement.global_batch(
      (batch, advantages), self.slice.train_mesh
    )
    params = self.state.params
    old = batch.sampler_logprobs
    if self.policy.old_logprobs == "learner":
      old = programs.score(params, batch, trips, self._temperatures)
    rest = (
      batch,
      old,
      advantages,
      np.float32(denominator),
      trips,
      self._temperatures,
    )
    norms = None
    if agent_norms:
      norms = programs.agent_norms(
        params, *rest, np.array([*self.agent_index.values()])
      )
    self.state, output = programs.train_step(self.state, *rest)
    return output, norms


def _engine_spec(
  policy: config_lib.Policy,
  model: transformer.DecoderConfig,
  mesh: jax.sharding.Mesh,
  tokenizer: Tokenizer,
) -> engine.Spec:
  sizes = policy.engine
  max_pages, page_size = placement.pool(sizes)
  return engine.Spec(
    model=dataclasses.replace(
      model, compute_dtype=policy.rollout_dtype, remat=False
    ),
    mesh=mesh,
    num_slots=sizes.num_slots,
    max_length=sizes.max_length,
    prefill_rows=sizes.prefill_rows,
    prefill_buckets=sizes.prefill_buckets
    or batching.powers_of_two(_SMALLEST_BUCKET, sizes.max_length),
    steps_per_call=sizes.steps_per_call,
    stop_ids=tokenizer.stop_ids,
    vocab_size=tokenizer.vocab_size,
    page_size=page_size,
    max_pages=max_pages,
    dtype=policy.rollout_dtype,
    cache_dtype=sizes.cache_dtype or policy.rollout_dtype,
  )


def _head_chunk(vocab_size: int, mesh: jax.sharding.Mesh) -> int:
  """Tokens whose logits exist at a time: 64 MB of float32 on each device that
  holds rows, or 256 tokens where the vocabulary is larger than that allows."""
  if vocab_size <= 4096:
    return 0
  tokens = max(256, (64 << 20) // (4 * vocab_size))
  return tokens * mesh.shape["data"] * mesh.shape["fsdp"]
