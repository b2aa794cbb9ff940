"""One set of decoder weights on one placement: its learner, engines, sampler.

A backbone is one policy, or several: adapters on weights that they share, and
frozen policies that are these weights. It is built from a checkpoint folder,
trained by `update`, and its weights go to its engines by `resume`, the shared
ones once. Updates are dispatched and not waited for, so that backbones work at
the same time. K counts the policies of its learner: 1, or those with adapters.
"""

import dataclasses
import functools
import hashlib
import itertools
import math
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from drmas_jax import (
  batching,
  decoding,
  engine,
  folders,
  learner,
  losses,
  placement,
  sampling,
  scores,
  sharding,
)
from drmas_jax import config as config_lib
from drmas_jax.checkpoint import SavedPolicy
from drmas_jax.models import adapters, attention, transformer, weights
from drmas_jax.replicas import Replicas, Seat
from drmas_jax.rewards import Rows
from drmas_jax.sampler import Sampler
from drmas_jax.tokenizer import Tokenizer
from drmas_jax.types import Batch, TrainState, Turn

# Its logits cost less than one more shape of them to compile.
_SMALL_VOCABULARY = 1024
_TPU_PAGE = 128  # tokens that chats share at a time, see `trie`
_TINY = pathlib.Path(__file__).parent / "models" / "tiny"


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
  mesh: jax.sharding.Mesh,
) -> None:
  """What the config asks for and checkpoint or devices cannot give."""
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
  asked = mesh, model.head_dim, policy.compute_dtype
  why = attention.check(policy.attention, *asked)
  if why is not None:
    raise config_lib.ConfigError(
      f"policies.{name}.attention: {policy.attention!r} cannot run here, "
      f"{why}; allowed are 'auto' and "
      f"{attention.resolve('auto', *asked)!r}; set it to 'auto'"
    )


class Part(NamedTuple):
  """What one update is made of on this host.

  Attributes:
    chats: the turns of each, by their places among the step's; a chat is there
      if one of its turns has a signal.
    size: what they pack into.
    num_chats: [K] of them, by policy.
    denominators: [K] of the losses, whose sums go over all turns of the part,
      those without a signal too.
  """

  chats: list[tuple[int, ...]]
  size: batching.Size
  num_chats: list[int]
  denominators: list[float]


class Work(NamedTuple):
  """What one backbone would train on; hosts agree on its numbers.

  Attributes:
    parts: one for each update of an epoch.
    tokens: [K] sampled tokens of all real turns, with a signal or without.
    weights: [N] float32, in the loss, of a token of each of the step's turns.
  """

  parts: list[Part]
  tokens: list[int]
  weights: np.ndarray

  def numbers(self) -> dict[str, Any]:
    """Plain data, for the other hosts."""
    return {
      "tokens": self.tokens,
      "parts": [part._replace(chats=[])._asdict() for part in self.parts],
    }


class Update(NamedTuple):
  """One update that was dispatched.

  Attributes:
    output: what it says of itself.
    live: [K] which policies it was of.
    norms: of the gradient by agent, or None.
    tokens: (turn_index, weights) of the batch, [M, b, T] each.
  """

  output: learner.StepOutput
  live: np.ndarray
  norms: Any
  tokens: Any


def logprob_gaps(
  updates: Mapping[str, Sequence[Update]], num_turns: int
) -> np.ndarray:
  """[N] mean |learner - sampler| log-prob of each turn's tokens, on this host.

  Of every backbone's first update: those behind it are of weights that have
  moved. nan for turns that are not in it.

  Args:
    updates: by backbone, dispatched.
    num_turns: N.
  """
  total, count = np.zeros([2, num_turns])
  for first in (done[0] for done in updates.values() if done):
    turn, weight, gap = map(
      placement.local_rows, (*first.tokens, first.output.gap)
    )
    here = weight > 0
    total += np.bincount(turn[here], gap[here], num_turns)
    count += np.bincount(turn[here], minlength=num_turns)
  return total / np.where(count > 0, count, np.nan)


def without_tokens(updates: Sequence[Update]) -> list[Update]:
  """What is no larger than every host may fetch."""
  return [
    u._replace(output=u.output._replace(gap=None), tokens=None) for u in updates
  ]


class Backbone:
  """See the module's docstring."""

  def __init__(
    self,
    names: Sequence[str],
    config: config_lib.Config,
    slice_: placement.Slice,
    model: transformer.DecoderConfig,
    folder: pathlib.Path,
    train: bool = True,
  ):
    """Reads the tokenizer; builds no device array.

    Args:
      names: of its policies, those with adapters first. They differ in nothing
        that is read here but their adapters and learning rates.
      config: of the run.
      slice_: its devices.
      model: sizes.
      folder: of the checkpoint.
      train: whether anything will be trained.
    """
    self.names = tuple(names)
    self.policy = config.policies[names[0]]
    self.slice = slice_
    self.folder = folder
    self.tokenizer = _read_tokenizer(names[0], self.policy, folder)
    # By policy, the index of each agent in the run.
    self.agents = {
      n: {a: config.agent_names.index(a) for a in config.agents_of(n)}
      for n in names
    }
    self.policy_index = {name: i for i, name in enumerate(names)}
    self.trained = tuple(n for n in names if train and n in config.trained)
    self._temperatures = np.array(
      [config.agents[a].sampling.temperature for a in config.agent_names],
      np.float32,
    )
    self._roles = config.agents
    init = sampling.root_key(config.seed, "init")
    adapted = [n for n in names if config.policies[n].adapter is not None]
    self._keys = [
      jax.random.fold_in(init, sorted(config.policies).index(name))
      for name in adapted
    ]
    vocab = self.tokenizer.vocab_size
    for name in names:
      _check_model(name, config.policies[name], model, vocab, slice_.train_mesh)
    if self.policy.adapter is not None:
      scale = self.policy.adapter.alpha / self.policy.adapter.rank
      model = dataclasses.replace(model, adapter_scale=scale)
    rates = tuple(config.policies[n].optimizer.learning_rate for n in adapted)
    self.learner = _learner_spec(
      self.policy,
      model,
      slice_.train_mesh,
      vocab_size=vocab,
      num_agents=len(config.agent_names),
      num_policies=max(1, len(self._keys)),
      rates=rates if len(set(rates)) > 1 else (),
    )
    self.engines = [
      engine.PolicyEngine(
        _engine_spec(self.policy, model, mesh, self.tokenizer)
      )
      for mesh in slice_.rollout_meshes
      if any(config.is_sampled(n) for n in names)
    ]
    self.row_buckets = batching.row_buckets(self.policy)
    self.sampler = Replicas([Sampler(e, self.tokenizer) for e in self.engines])
    self.base: Any = None  # weights that stay as they are
    self.state: TrainState | None = None
    self.adapters: Any = None  # where they are not trained, and have no state
    self._rollout_base: list[Any] = []  # of each engine, below adapters
    self.updates = dict.fromkeys(names, 0)

  @property
  def samplers(self) -> dict[str, Any]:
    """What each policy is sampled with; none where a loss alone reads them."""
    if not self.engines:
      return {}
    if len(self.names) == 1:
      return {self.names[0]: self.sampler}
    return {n: Seat(self.sampler, i) for n, i in self.policy_index.items()}

  @property
  def name(self) -> str:
    return "+".join(self.names)

  @functools.cached_property
  def digest(self) -> str:
    return digest(self.folder)

  # -- weights -----------------------------------------------------------------

  @property
  def trainable(self) -> Any:
    """All weights, the adapters, or None where all is frozen."""
    return self.adapters if self.state is None else self.state.params

  @property
  def params(self) -> Any:
    """What the learner's `forward` takes."""
    if self.trainable is None:
      return self.base
    return learner.whole(self._below, self.trainable)

  @property
  def _below(self) -> Any:
    """The weights below adapters; None without adapters."""
    return None if self.learner.adapter is None else self.base

  def read(self, dtype: str = "float32") -> transformer.Params:
    """The checkpoint's parameters, on the train slice.

    Args:
      dtype: of those of a folder; those of a run are as it has them.
    """
    if self.policy.checkpoint.startswith("run:"):
      saved = SavedPolicy.parse(self.policy.checkpoint)
      if saved.adapter is not None:
        raise ValueError(
          f"{saved}: is an adapter on {saved.checkpoint!r}; write it out with "
          "python -m drmas_jax.export and name that folder"
        )
      return saved.restore(self._params_abstract())
    return weights.load(
      self.folder, self.learner.model, self.slice.train_mesh, jnp.dtype(dtype)
    )

  def _params_abstract(self) -> Any:
    model = self.learner.model
    shapes = transformer.param_shapes(model)
    where = sharding.shardings(
      transformer.param_axes(model), shapes, self.slice.train_mesh
    )
    return abstract(shapes, where)

  def load(self) -> None:
    """Reads the checkpoint into the train slice, and begins new adapters."""
    spec = self.learner
    if spec.adapter is not None:
      self.load_base()
      fresh = learner.new_adapters(spec, jnp.stack(self._keys))
      if self.trained:
        self.state = learner.programs(spec).init(fresh)
      else:
        self.adapters = fresh
    elif self.trained:
      self.state = learner.programs(spec).init(self.read())
    else:
      self.base = self.read()

  def load_base(self) -> None:
    """The weights below adapters: layer by layer and in the compute dtype, as
    engines have them, so that both may read one copy."""
    dtype = self.policy.compute_dtype
    self.base = placement.cast(self.read(dtype), dtype, transformer.unstack)

  def abstract_states(self) -> dict[str, TrainState]:
    """Shapes and shardings of each trained policy's state, to restore a
    checkpoint into."""
    found = abstract(*learner.policy_state(self.learner))
    return dict.fromkeys(self.trained, found)

  def states(self) -> dict[str, TrainState]:
    """The state of each trained policy."""
    if self.learner.adapter is None:
      return dict.fromkeys(self.trained, self.state)
    each = learner.split(self.learner, self.state)
    return dict(zip(self.names, each, strict=False))

  def put(self, states: Mapping[str, TrainState]) -> None:
    """Takes restored states, one of each trained policy."""
    own = [states[name] for name in self.trained]
    if self.learner.adapter is None:
      (self.state,) = own
    else:
      self.state = learner.join(self.learner, own)
      self.load_base()

  def restore(self, saved: Mapping[str, SavedPolicy]) -> None:
    """Takes the weights of an evaluation's policies, by name."""
    if self.learner.adapter is None:
      (policy,) = saved.values()
      self.base = policy.restore(self._params_abstract())
      return
    shapes = learner.policy_state(self.learner)
    params = abstract(*(tree.params for tree in shapes))
    found = [
      saved[name].restore(params)
      for name in self.names[: self.learner.num_policies]
    ]
    self.adapters = learner.join(self.learner, found)
    self.load_base()

  def checksums(self) -> dict[str, str]:
    """Of the weights of each policy; all hosts must enter it."""
    if self.learner.adapter is None:
      return dict.fromkeys(self.names, placement.checksum(self.params))
    base = placement.checksum(self.base)
    own = [
      f"{base}+{placement.checksum(tree)}"
      for tree in learner.split(self.learner, self.adapters)
    ]
    return dict(itertools.zip_longest(self.names, own, fillvalue=base))

  def drop(self) -> None:
    """The engines have what they need, and nothing will be trained."""
    self.base = self.adapters = None

  def resume(self) -> None:
    """Train slice -> every engine; the sampler is ready for a rollout."""
    if not self.engines:
      return
    spec, dtype = self.learner, self.policy.rollout_dtype
    targets = [decoding.param_shardings(e.spec) for e in self.engines]
    if spec.adapter is None:
      rollout = placement.sync(self.params, targets, dtype, transformer.unstack)
    else:
      if not self._rollout_base:
        self._rollout_base = placement.share(self.base, targets, dtype)
      moved = placement.sync(
        self.trainable, self._adapter_targets, dtype, adapters.by_layer
      )
      rollout = [
        base | {"adapters": tree}
        for base, tree in zip(self._rollout_base, moved, strict=True)
      ]
    self.sampler.resume(rollout, self.version)

  @functools.cached_property
  def _adapter_targets(self) -> list[Any]:
    """Of each engine."""
    axes = learner.trainable_axes(self.learner)
    shapes = learner.trainable_shapes(self.learner)
    return [
      decoding.adapter_shardings(e.spec, axes, shapes) for e in self.engines
    ]

  @property
  def version(self) -> int:
    """Of the weights: it grows whenever one of the policies is updated."""
    return sum(self.updates.values())

  def release(self) -> None:
    self.sampler.release()
    if not any(base is self.base for base in self._rollout_base):
      self._rollout_base = []  # a copy, which an update may have no room for

  def count_updates(self, name: str, num: int) -> None:
    """Versions are counted on the host; an update is taken back if it turns
    out, when its output is read, that it was skipped (rule 11)."""
    self.updates[name] += num
    self.sampler.engine.version = self.version

  # -- training ----------------------------------------------------------------

  def work(
    self, rows: Rows, advantages: np.ndarray, due: Collection[str]
  ) -> Work:
    """Own turns of the step, of the policies that are `due`.

    Chats without a signal are left out of the gradient, which is exact as every
    loss is 0 at advantage 0, and stay in the denominator. With an entropy bonus
    or a distance to a reference every chat has a signal.
    """
    loss, num = self.policy.loss, self.policy.num_updates
    turns = rows.turns
    owner = np.array([self._place(t, due) for t in turns], int)
    lengths = np.array([len(t.completion_ids) for t in turns], int)
    counted = (owner >= 0) & self.in_loss(turns)
    turn_weights, _ = losses.aggregate(
      lengths, counted, loss.aggregation, loss.divisor
    )
    live = turn_weights > 0
    if not (self.policy.update_on_zero_signal or loss.beyond_rewards):
      live &= advantages != 0
    factors = [self._roles[t.agent].loss_weight for t in turns]
    by_policy: list[list[tuple[int, ...]]] = [[] for _ in self.names]
    for chat in batching.chats(turns, rows.episode):
      if owner[chat[0]] >= 0:
        by_policy[owner[chat[0]]].append(chat)
    parts = []
    for i in range(num):
      own = [c[batching.parts(len(c), num)[i]] for c in by_policy]
      parts.append(self._part(turns, own, lengths, counted, live, owner))
    return Work(
      parts,
      [int(lengths[owner == k].sum()) for k in range(self.num_policies)],
      (turn_weights * factors).astype(np.float32),
    )

  @property
  def num_policies(self) -> int:
    return self.learner.num_policies

  def _place(self, turn: Turn, due: Collection[str]) -> int:
    """The index of a turn's policy; -1: it is not trained here and now."""
    name = turn.policy
    trains = name in self.trained and name in due
    return self.policy_index[name] if trains else -1

  def in_loss(self, turns: Sequence[Turn]) -> np.ndarray:
    """[N] bool: the turns that the loss and its denominator count."""
    cut = self.policy.loss.mask_truncated
    return np.array(
      [
        self._roles[t.agent].train and not (cut and t.stop_reason == "length")
        for t in turns
      ],
      bool,
    )

  def _part(self, turns, own, lengths, counted, live, owner) -> Part:
    """Of the chats of each policy that fall into it."""
    loss, denominators = self.policy.loss, []
    for chats in own[: self.num_policies]:
      here = np.zeros(len(turns), bool)
      here[[i for chat in chats for i in chat]] = True
      denominators.append(
        losses.aggregate(
          lengths, counted & here, loss.aggregation, loss.divisor
        )[1]
      )
    kept = [c for chats in own for c in chats if live[list(c)].any()]
    places = [int(owner[c[0]]) for c in kept]
    return Part(
      kept,
      batching.size(
        turns,
        kept,
        self.row_buckets,
        owner,
        row_tokens=self.policy.micro_tokens // self._shards(None),
        page=self._page,
      ),
      [places.count(k) for k in range(self.num_policies)],
      denominators,
    )

  def update(
    self,
    rows: Rows,
    advantages: np.ndarray,
    work: Work,
    shares: Sequence[Mapping[str, Any]],
    *,
    reference: "Backbone | None" = None,
    agent_norms: bool = False,
  ) -> list[Update]:
    """The step's updates, dispatched.

    Old log-probs, and those of the reference, are of the weights before the
    first of them.

    Args:
      rows: of the step.
      advantages: [N], of its rows.
      work: what `work` found here.
      shares: its numbers on every host.
      reference: that the loss keeps near to.
      agent_norms: also the gradient's norm by agent, of the first update (a
        second pass).
    """
    batches = [
      self._batch(rows, advantages, work, i, shares, reference)
      for i in range(len(work.parts))
    ]
    done: list[Update] = []
    for _ in range(self.policy.num_epochs):
      for i, batch in enumerate(batches):
        if batch is None:
          continue
        live, total = _denominators(shares, i)
        norms = agent_norms and not done
        done.append(self._train(*batch, total, live, norms))
        for k in np.flatnonzero(live):
          self.count_updates(self.names[k], 1)
    return done

  def _batch(self, rows, advantages, work, number, shares, reference):
    """(data of `learner.train_step`, micro-batches with rows), on the train
    slice; None where no host has a row."""
    part = work.parts[number]
    sizes = [batching.Size.of(s["parts"][number]["size"]) for s in shares]
    if not any(size.longest for size in sizes):
      return None
    shape = self.shape(sizes, reference)
    batch = batching.pack(
      rows.turns,
      range(len(rows.turns)),
      rows.agent,
      shape,
      chats=part.chats,
      policy_index=[max(0, self._place(t, self.trained)) for t in rows.turns],
      weights=work.weights,
    )
    by_token = batching.gather(advantages, batch)
    return self._data(batch, by_token, shape.trips, reference), shape.trips

  def _data(self, batch: Batch, by_token: np.ndarray, trips: int, reference):
    """`learner.train_step`'s, on the train slice, of what is on this host."""
    mesh, ref = self.slice.train_mesh, None
    if reference is not None:
      ref = reference.score(batch, self.policy.loss.reference, trips)
      if reference.slice.train_mesh != mesh:
        ref = placement.global_batch(placement.local_rows(ref), mesh)
    batch, by_token = placement.global_batch((batch, by_token), mesh)
    old = batch.sampler_logprobs
    if self.policy.old_logprobs == "learner":
      old = learner.programs(self.learner).score(
        self.params, batch, trips, self._temperatures
      )
    return batch, old, ref, by_token

  def shape(
    self, sizes: Sequence[batching.Size], reference: "Backbone | None" = None
  ) -> batching.Shape:
    """Of a batch that every host can fill with rows of these sizes."""
    shards = self._shards(reference)
    if shards != self._shards(None):  # rows are as wide as the own ones' share
      sizes = [size._replace(shared=()) for size in sizes]
    return batching.shape(
      sizes,
      self.row_buckets,
      micro_tokens=self.policy.micro_tokens,
      shards=shards,
      only_sampled=self.learner.vocab_size > _SMALL_VOCABULARY,
      page=self._page,
    )

  @property
  def _page(self) -> int:
    """Tokens that chats share at a time."""
    platform = self.slice.train_mesh.devices.flat[0].platform
    return _TPU_PAGE if platform == "tpu" else 1

  def _shards(self, reference: "Backbone | None") -> int:
    """Devices, of all hosts, among which rows can be divided."""
    users = [self] if reference is None else [self, reference]
    meshes = [b.slice.train_mesh.shape for b in users]
    return math.lcm(*(m["data"] * m["fsdp"] for m in meshes))

  def score(self, batch: Batch, name: str, trips: int) -> jax.Array:
    """[M, b, T] log-probs of the tokens under one of its policies.

    Args:
      batch: on the host, of any backbone with the same vocabulary.
      name: of the policy.
      trips: micro-batches with rows.
    """
    place = np.full_like(batch.policy_index, self.policy_index[name])
    batch = placement.global_batch(
      batch._replace(policy_index=place), self.slice.train_mesh
    )
    return learner.programs(self.learner).score(
      self.params, batch, trips, self._temperatures
    )

  def extent(self, rows: Rows) -> dict[str, int]:
    """How much `score_norms` has to do on this host."""
    own = [rows.turns[i] for i in self._own(rows)]
    lengths = [len(t.prompt_ids) + len(t.completion_ids) for t in own]
    return {"turns": len(own), "longest": max(lengths, default=0)}

  def _own(self, rows: Rows) -> list[int]:
    return [i for i, t in enumerate(rows.turns) if t.policy in self.trained]

  def score_norms(
    self, rows: Rows, shares: Sequence[Mapping[str, int]]
  ) -> np.ndarray:
    """[N] |z|^2 of each turn of the policies trained here (see `scores`), and
    0 elsewhere.

    Args:
      rows: of the step.
      shares: `extent` on every host.
    """
    batch, trips = self._one_by_one(rows, shares)
    found = scores.programs(self.learner).squares(
      self.state.params,
      self._below,
      placement.global_batch(batch, self.slice.train_mesh),
      trips,
      self._temperatures,
    )
    return self._by_turn(rows, found)

  def _one_by_one(
    self, rows: Rows, shares, reference: "Backbone | None" = None
  ) -> tuple[Batch, int]:
    """(own turns, each in a row of its own, micro-batches with rows)."""
    own = self._own(rows)
    local = self._shards(reference) // len(shares)
    trips = max(1, -(-max(s["turns"] for s in shares) // local))
    batch = scores.lay_out(
      [rows.turns[i] for i in own],
      rows.agent[own],
      [self.policy_index[rows.turns[i].policy] for i in own],
      num_micro=batching.num_micro(trips),
      micro_rows=local,
      length=batching.bucket(
        max(s["longest"] for s in shares), self.row_buckets
      ),
    )
    return batch, trips

  def _by_turn(self, rows: Rows, found: jax.Array) -> np.ndarray:
    """[N] of rows [M, b] that `_one_by_one` has laid out; 0 elsewhere."""
    own = self._own(rows)
    values = np.zeros(len(rows.turns), np.float32)
    values[own] = placement.local_rows(found).reshape(-1)[: len(own)]
    return values

  def row_norms(
    self,
    rows: Rows,
    advantages: np.ndarray,
    work: Work,
    shares: Sequence[Mapping[str, Any]],
    extents: Sequence[Mapping[str, int]],
    *,
    reference: "Backbone | None" = None,
  ) -> np.ndarray:
    """[N] norm of the gradient of what each turn adds to the loss of its
    update, at the weights as they are; 0 for turns in none.

    Args:
      rows: of the step.
      advantages: [N], of its rows.
      work: what `work` found here.
      shares: its numbers on every host.
      extents: `extent` on every host.
      reference: that the loss keeps near to.
    """
    mesh, own = self.slice.train_mesh, self._own(rows)
    batch, trips = self._one_by_one(rows, extents, reference)
    scale = np.zeros(len(rows.turns), np.float32)
    for i, part in enumerate(work.parts):
      total = _denominators(shares, i)[1]
      for chat in part.chats:
        owner = self.policy_index[rows.turns[chat[0]].policy]
        scale[list(chat)] = 1 / total[owner]
    lead = batch.tokens.shape[:2]

    def lay(values: np.ndarray) -> np.ndarray:
      laid = np.zeros(lead, np.float32)
      laid.reshape(-1)[: len(own)] = values[own]
      return laid

    batch = batch._replace(weights=batch.weights * lay(work.weights)[..., None])
    by_token = lay(advantages)[..., None] * (batch.segment_ids > 0)
    data = self._data(batch, by_token.astype(np.float32), trips, reference)
    found = scores.programs(self.learner).norms(
      self.state.params,
      self._below,
      data,
      placement.global_batch(lay(scale), mesh),
      trips,
      self._temperatures,
    )
    return self._by_turn(rows, found)

  def score_vectors(self, rows: Batch) -> np.ndarray:
    """[b, P] z of each row of `scores.lay_out` with one micro-batch, in all P
    trained numbers; for small models."""
    frozen = self.learner.adapter is None and self.state is None
    return np.asarray(
      scores.programs(self.learner).vectors(
        self.base if frozen else self.trainable,
        self._below,
        jax.tree.map(lambda x: x[0], rows),
        self._temperatures,
      )
    )

  def _of_agents(self) -> list[tuple[int, int]]:
    """(index of the agent, of its policy in the learner) of all agents; those
    of a frozen policy have no gradient in any."""
    return [
      (agent, min(k, self.num_policies - 1))
      for k, own in enumerate(self.agents.values())
      for agent in own.values()
    ]

  def agent_norms(
    self,
    rows: Rows,
    advantages: np.ndarray,
    work: Work,
    shares: Sequence[Mapping[str, Any]],
    *,
    reference: "Backbone | None" = None,
  ) -> dict[int, float]:
    """By the index of each agent that is trained here, the norm of its part of
    the gradient of the first update, which is not made; arguments as `update`
    has them."""
    own = [i for n in self.trained for i in self.agents[n].values()]
    batch = self._batch(rows, advantages, work, 0, shares, reference)
    if batch is None:
      return dict.fromkeys(own, 0.0)
    norms = self._agent_norms(*batch, _denominators(shares, 0)[1])
    found = dict(
      zip(
        (agent for agent, _ in self._of_agents()),
        placement.fetch(norms).tolist(),
        strict=True,
      )
    )
    return {agent: found[agent] for agent in own}

  def _agent_norms(self, data, trips, denominators) -> jax.Array:
    return learner.programs(self.learner).agent_norms(
      self.state.params,
      self._below,
      data,
      denominators,
      trips,
      self._temperatures,
      *np.array(self._of_agents()).T,
    )

  def _train(self, data, trips, denominators, live, agent_norms) -> Update:
    programs, norms = learner.programs(self.learner), None
    if agent_norms:
      norms = self._agent_norms(data, trips, denominators)
    self.state, output = programs.train_step(
      self.state,
      self._below,
      data,
      denominators,
      live,
      trips,
      self._temperatures,
    )
    batch = data[0]
    return Update(output, live, norms, (batch.turn_index, batch.weights))


def _denominators(
  shares: Sequence[Mapping[str, Any]], number: int
) -> tuple[np.ndarray, np.ndarray]:
  """Of an update: [K] which policies it is of, [K] what their losses are
  divided by; one of a policy without rows is not 0."""
  parts = [share["parts"][number] for share in shares]
  live = np.sum([p["num_chats"] for p in parts], axis=0) > 0
  total = np.sum([p["denominators"] for p in parts], axis=0)
  return live, np.where(live, total, 1).astype(np.float32)


def abstract(shapes: Any, shardings: Any) -> Any:
  """Trees of shapes and of shardings as one, to restore a checkpoint into."""
  return jax.tree.map(
    lambda shape, where: jax.ShapeDtypeStruct(
      shape.shape, shape.dtype, sharding=where
    ),
    shapes,
    shardings,
  )


def _learner_spec(
  policy: config_lib.Policy,
  model: transformer.DecoderConfig,
  mesh: jax.sharding.Mesh,
  *,
  vocab_size: int,
  num_agents: int,
  num_policies: int,
  rates: tuple[float, ...],
) -> learner.Spec:
  return learner.Spec(
    model=dataclasses.replace(
      model,
      compute_dtype=policy.compute_dtype,
      remat=policy.remat,
      attention=policy.attention,
    ),
    mesh=mesh,
    loss=policy.loss,
    optimizer=policy.optimizer,
    rates=rates,
    num_agents=num_agents,
    vocab_size=vocab_size,
    head_chunk=_head_chunk(vocab_size, mesh),
    adapter=policy.adapter,
    num_policies=num_policies,
  )


def _engine_spec(
  policy: config_lib.Policy,
  model: transformer.DecoderConfig,
  mesh: jax.sharding.Mesh,
  tokenizer: Tokenizer,
) -> decoding.Spec:
  sizes = policy.engine
  max_pages, page_size = placement.pool(sizes)
  return decoding.Spec(
    model=dataclasses.replace(model, compute_dtype=policy.rollout_dtype),
    mesh=mesh,
    num_slots=sizes.num_slots,
    max_length=sizes.max_length,
    prefill_rows=placement.prefill_rows(sizes),
    prefill_buckets=sizes.prefill_buckets
    or batching.powers_of_two(batching.SMALLEST_BUCKET, sizes.max_length),
    steps_per_call=sizes.steps_per_call,
    stop_ids=tokenizer.stop_ids,
    vocab_size=tokenizer.vocab_size,
    page_size=page_size,
    max_pages=max_pages,
    lanes=placement.lanes(sizes),
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
