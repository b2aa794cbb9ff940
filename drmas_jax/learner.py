"""The jitted score and train step of one backbone.

    score       batch -> log-probs by token
    train_step  (state, base, data, denominators) -> (state, output)

What is trained is all of the decoder's weights, or the adapters of K policies
on weights that stay: these are `base`, which is None in the first case. An
update is of all K at once; their gradients, clips, moments, step counts and
what an update says of itself are each policy's own, and one whose gradient is
not finite stays as it was (rule 11), as does one that is not `live`.

A batch has a leading dim of micro-batches, [M, b, T]. One program adds up the
gradients of the first `num_micro` of them, in a loop with a dynamic number of
trips, and applies them once. The loss is sum(loss * weight) / denominator with
the denominator given, so it does not depend on how rows fall into
micro-batches, on padding, or on the number of devices (rule 10).

The row dim of every array is sharded over the mesh; parameters, gradients and
optimizer state by `sharding.py`. The programs are built once per `Spec`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from drmas_jax import config as config_lib
from drmas_jax import logprobs, losses, optimizers, sharding
from drmas_jax.models import adapters, transformer
from drmas_jax.types import Batch, TrainState


@dataclasses.dataclass(frozen=True)
class Spec:
  """All that decides the programs of a learner.

  Attributes:
    model: the decoder, in the compute dtype.
    mesh: the train slice; None: one device (`scores`).
    loss, optimizer: see `config`; loss None is cross-entropy.
    num_agents: agents of the run, for sums by agent.
    vocab_size: real tokens.
    head_chunk: tokens whose logits exist at a time; 0 for all.
    adapter: of each policy; None: all weights are trained.
    num_policies: K; 1 without adapters.
    rates: of the policies, in the place of the optimizer's learning rate; ():
      they have that one.
  """

  model: transformer.DecoderConfig
  mesh: Mesh | None
  loss: config_lib.Loss | None
  optimizer: config_lib.Optimizer
  num_agents: int
  vocab_size: int
  head_chunk: int = 0
  adapter: config_lib.Adapter | None = None
  num_policies: int = 1
  rates: tuple[float, ...] = ()


class AgentSums(NamedTuple):
  """Sums over the tokens in an update's loss by agent, [num_agents] each.

  `log_ratio_abs` and `_max` compare the learner's log-probs, before the
  update, with the sampler's: |difference|, summed and at most. `importance` is
  the sum of the importance weights, `importance_cut` counts those at the bound.
  `kl` is the sum of the estimates of the distance to the reference policy; None
  without one.
  """

  tokens: Any
  clipped: Any
  dual_clipped: Any
  importance: Any
  importance_cut: Any
  log_ratio_abs: Any
  log_ratio_max: Any
  kl: Any


class StepOutput(NamedTuple):
  """What one update says of itself; [K] each but `sums`.

  Attributes:
    loss: as minimised.
    grad_norm: before clipping.
    finite: False where the update was skipped (rule 11).
    ratio_error: max |ratio - 1| over trained tokens.
    sums: by agent.
    gap: [M, b, T] |learner's log-prob - the sampler's|, before the update, of
      each token in the loss; 0 elsewhere.
  """

  loss: Any
  grad_norm: Any
  finite: Any
  ratio_error: Any
  sums: AgentSums
  gap: Any


class Programs(NamedTuple):
  init: Any
  score: Any
  train_step: Any
  agent_norms: Any


def trainable_shapes(spec: Spec) -> Any:
  """What is trained, as ShapeDtypeStructs."""
  shapes = transformer.param_shapes(spec.model)
  if spec.adapter is None:
    return shapes
  return adapters.shapes(shapes["layers"], spec.adapter, spec.num_policies)


def trainable_axes(spec: Spec) -> Any:
  """The same as tuples of logical axes."""
  axes = transformer.param_axes(spec.model)
  if spec.adapter is None:
    return axes
  return adapters.axes(axes["layers"], spec.adapter)


def trainable_shardings(spec: Spec) -> Any:
  return sharding.shardings(
    trainable_axes(spec), trainable_shapes(spec), spec.mesh
  )


def state_shapes(spec: Spec) -> TrainState:
  """The state as ShapeDtypeStructs."""
  return jax.eval_shape(functools.partial(_init, spec), trainable_shapes(spec))


def state_shardings(spec: Spec) -> TrainState:
  """Optimizer moments are laid out as the parameters they belong to."""
  params = trainable_shardings(spec)
  opt_state = optimizers.state_shardings(
    spec.optimizer, trainable_axes(spec), trainable_shapes(spec), spec.mesh
  )
  return TrainState(sharding.replicated(spec.mesh), params, opt_state)


def _optimizer(spec: Spec) -> optax.GradientTransformation:
  """Of one policy."""
  axes = trainable_axes(spec)
  if spec.adapter is not None:
    axes = jax.tree.map(lambda a: a[1:], axes, is_leaf=sharding.is_axes)
  rule = spec.optimizer
  if spec.rates:  # every schedule is in proportion to its rate
    rule = dataclasses.replace(rule, learning_rate=1.0)
  return optimizers.make_optimizer(rule, axes)


def _init(spec: Spec, params) -> TrainState:
  def start(params):
    zero = jnp.zeros([], jnp.int32)
    return TrainState(zero, params, _optimizer(spec).init(params))

  return start(params) if spec.adapter is None else jax.vmap(start)(params)


def policy_state(spec: Spec) -> tuple[TrainState, TrainState]:
  """Shapes and shardings of the state of one policy."""
  shapes, where = state_shapes(spec), state_shardings(spec)
  if spec.adapter is None:
    return shapes, where
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), shapes
  )
  where = jax.tree.map(
    lambda s: sharding.NamedSharding(
      spec.mesh,
      sharding.PartitionSpec(*s.spec[1:]),
      memory_kind=s.memory_kind,
    ),
    where,
  )
  return shapes, where


def new_adapters(spec: Spec, keys: jax.Array) -> Any:
  """Adapters to begin with, from a key for each policy [K]."""
  init = jax.jit(
    functools.partial(adapters.init, trainable_shapes(spec)),
    out_shardings=trainable_shardings(spec),
  )
  return init(keys)


def split(spec: Spec, tree: Any) -> list[Any]:
  """What belongs to each policy, of a state of K adapters or of the adapters
  alone."""
  program = _splitter(spec, isinstance(tree, TrainState))
  return [program(tree, k) for k in range(spec.num_policies)]


def join(spec: Spec, each: Sequence[Any]) -> Any:
  """What `split` took apart."""
  where = state_shardings(spec)
  if not isinstance(each[0], TrainState):
    where = where.params
  return jax.jit(
    lambda trees: jax.tree.map(
      lambda *x: jnp.stack(x), *(_visiting(spec, tree) for tree in trees)
    ),
    out_shardings=where,
  )(each)


@functools.cache
def _splitter(spec: Spec, with_state: bool) -> Any:
  where = policy_state(spec)[1]
  return jax.jit(
    lambda tree, k: jax.tree.map(lambda x: x[k], _visiting(spec, tree)),
    out_shardings=where if with_state else where.params,
  )


def _visiting(spec: Spec, tree: Any) -> Any:
  """On the device, where what lies in the host's memory can be cut."""
  if not spec.optimizer.offload:
    return tree
  return optimizers.move(tree, jax.memory.Space.Device)


def whole(base: Any, trainable: Any) -> transformer.Params:
  """What `transformer.forward` takes: the decoder, with adapters or without."""
  return trainable if base is None else base | {"adapters": trainable}


def _shift(x: jax.Array) -> jax.Array:
  """x[:, t + 1] at t: what the hidden state at t predicts."""
  return jnp.concatenate([x[:, 1:], jnp.zeros_like(x[:, :1])], axis=1)


def _unshift(x: jax.Array) -> jax.Array:
  """Back from what t predicts to the token at t."""
  return jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], axis=1)


def _next(rows: Batch) -> Batch:
  """The rows as the hidden states see them: what each is to predict."""
  by_token = {
    name: _shift(array)
    for name, array in rows._asdict().items()
    if name not in ("policy_index", "sampled", "spread")  # of rows
  }
  return rows._replace(**by_token)


def _logprobs(
  spec: Spec, params, rows: Batch, temperature, with_entropy: bool = False
):
  """[b, T] each: log-prob of token t + 1 at t, and the entropy there or
  None; with `rows.sampled`, 0 where t + 1 is none of these."""
  inputs = transformer.Inputs(
    rows.tokens,
    rows.positions,
    rows.segment_ids,
    rows.policy_index,
    rows.spread,
  )
  hidden, _ = transformer.forward(
    params, inputs, config=spec.model, mesh=spec.mesh
  )
  targets, whose = _shift(rows.tokens), _shift(rows.agent_index)
  length = targets.shape[1]
  if rows.sampled is not None:
    # What predicts them; T is no place, and there nothing comes back.
    places = jnp.where(rows.sampled < length, rows.sampled - 1, length)
    hidden, targets, whose = (
      _take(x, places) for x in (hidden, targets, whose)
    )
  found = logprobs.token_logprobs(
    hidden,
    transformer.head(params, spec.model),
    targets,
    temperature[whose],
    vocab_size=spec.vocab_size,
    chunk=spec.head_chunk,
    ways=1 if spec.mesh is None else spec.mesh.shape["tensor"],
    tied=spec.model.tied,
    with_entropy=with_entropy,
  )
  if rows.sampled is None:
    return found
  return jax.tree.map(lambda x: _put(x, places, length), found)


@jax.vmap
def _take(x: jax.Array, places: jax.Array) -> jax.Array:
  """x [T, ..] at places [H]."""
  return x.at[places].get(mode="clip")


@functools.partial(jax.vmap, in_axes=(0, 0, None))
def _put(x: jax.Array, places: jax.Array, length: int) -> jax.Array:
  """[T], x [H] at its places, of which those beyond the end are none."""
  return jnp.zeros(length, x.dtype).at[places].set(x, mode="drop")


def row_logprobs(spec: Spec, params, rows: Batch, temperature) -> jax.Array:
  """[b] log-prob of all that was sampled in each row [b, T]; `params` as
  `whole` returns them."""
  values, _ = _logprobs(spec, params, rows, temperature)
  return jnp.sum(jnp.where(_shift(rows.mask) > 0, values, 0.0), axis=1)


def batch_loss(
  spec: Spec, trainable, base, rows: Batch, old, ref, advantages, scale, temp
):
  """Sum over the policies of sum(loss * weight) * scale; and of each policy
  this and max |ratio - 1|, sums by agent, and by token the gap to the sampler.

  Args:
    spec: of the learner.
    trainable: the gradient's.
    base: what is not trained, or None.
    rows: of one micro-batch, [b, T].
    old: [b, T] log-probs at sampling.
    ref: [b, T] log-probs of the reference policy, or None.
    advantages: [b, T].
    scale: [K].
    temp: temperature by agent.
  """
  settings = spec.loss or config_lib.Loss()
  new, entropy = _logprobs(
    spec, whole(base, trainable), rows, temp, settings.entropy_weight > 0
  )
  shifted = _next(rows)
  weights, sampled = shifted.weights, shifted.mask > 0
  # Where nothing was sampled both sides are 0, so that ratios there are 1.
  new = jnp.where(sampled, new, 0.0)
  old = jnp.where(sampled, _shift(old), 0.0)
  completions = _completions(shifted.turn_index, sampled)
  out = _token_loss(spec)(
    new,
    old,
    _shift(advantages),
    completions,
    clip_low=settings.clip_low,
    clip_high=settings.clip_high,
    dual_clip=settings.dual_clip,
  )
  behaviour = shifted.sampler_logprobs - shifted.log_kept_mass
  factor, cut = losses.importance_weights(
    old - jnp.where(sampled, behaviour, 0.0),
    completions,
    kind=settings.importance,
    bound=settings.importance_bound,
  )
  loss = settings.reward_weight * out.loss
  kl = None
  if ref is not None:
    kl = losses.KL[settings.kl](new, jnp.where(sampled, _shift(ref), 0.0))
    loss += settings.kl_weight * kl
  loss *= factor  # both are means over tokens that were drawn
  if settings.entropy_weight:
    loss -= settings.entropy_weight * entropy
  counted = weights > 0
  own = jnp.arange(spec.num_policies)[:, None, None]
  own = (own == rows.policy_index[:, None]) & counted  # [K, b, T]
  by_policy = jnp.sum(jnp.where(own, loss * weights, 0.0), axis=(1, 2)) * scale
  error = jnp.where(own, jnp.abs(out.ratio - 1), 0.0).max(axis=(1, 2))
  gap = jnp.abs(new - shifted.sampler_logprobs)
  sums = _agent_sums(
    spec,
    jnp.where(counted, shifted.agent_index, -1),
    out,
    (factor, cut),
    gap,
    kl,
  )
  gap = _unshift(jnp.where(counted, gap, 0.0))
  return jnp.sum(by_policy), (by_policy, error, sums, gap)


def _token_loss(spec: Spec):
  if spec.loss is None:
    return losses.cross_entropy
  return losses.LOSSES[spec.loss.name]


def _completions(turn_index: jax.Array, sampled: jax.Array) -> jax.Array:
  """[b, T]: place of a token's completion in its row, from 1; 0: not sampled.

  Turns of a row lie one behind the other, and each has an index of its own.
  """
  new = turn_index[:, 1:] != turn_index[:, :-1]
  place = jnp.pad(jnp.cumsum(new, axis=1), [(0, 0), (1, 0)])
  return jnp.where(sampled, place + 1, 0)


def _agent_sums(spec: Spec, agent, out: losses.TokenLoss, importance, gap, kl):
  """Sums by agent; `agent` is -1 for what is left out."""

  def total(x):
    return jnp.stack(
      [jnp.sum(jnp.where(agent == k, x, 0.0)) for k in range(spec.num_agents)]
    )

  factor, cut = importance
  return AgentSums(
    tokens=total(1.0),
    clipped=total(out.clipped),
    dual_clipped=total(out.dual_clipped),
    importance=total(factor),
    importance_cut=total(cut),
    log_ratio_abs=total(gap),
    log_ratio_max=jnp.stack(
      [jnp.max(jnp.where(agent == k, gap, 0.0)) for k in range(spec.num_agents)]
    ),
    kl=None if kl is None else total(kl),
  )


def _micro(tree, i):
  return jax.tree.map(
    lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), tree
  )


def _gradients(spec, trainable, base, data, scale, num_micro, temperature):
  """Sums over the first num_micro micro-batches of `data`, which is a batch,
  old and reference log-probs and advantages: gradients, loss and error by
  policy, sums by agent, and the gap to the sampler by token.

  The backward pass adds to the sum of the gradients where it lies, layer by
  layer: there is no second set of them, and of a micro-batch no sum of its own.
  """
  grads = jax.tree.map(lambda p: jax.new_ref(jnp.zeros_like(p)), trainable)

  def body(i, carry):
    loss, error, sums, gaps = carry
    micro = _micro(data, i)
    total, backward, (value, err, more, gap) = jax.vjp(
      lambda own: batch_loss(spec, own, base, *micro, scale, temperature),
      trainable,
      has_aux=True,
    )
    backward.with_refs(grads)(jnp.ones_like(total))
    top = jnp.maximum(sums.log_ratio_max, more.log_ratio_max)
    sums = jax.tree.map(jnp.add, sums, more)._replace(log_ratio_max=top)
    gaps = gaps.at[i].set(gap)
    return loss + value, jnp.maximum(error, err), sums, gaps

  zeros = jnp.zeros([spec.num_agents], jnp.float32)
  sums = AgentSums(*(zeros for _ in AgentSums._fields))
  if data[2] is None:
    sums = sums._replace(kl=None)
  none = jnp.zeros([spec.num_policies], jnp.float32)
  gaps = jnp.zeros(data[0].tokens.shape, jnp.float32)
  start = none, none, sums, gaps
  said = jax.lax.fori_loop(0, num_micro, body, start)
  return jax.tree.map(lambda ref: ref[...], grads), *said


def _apply(spec: Spec, state: TrainState, grads, live, rate=None):
  """One policy's update: its state, the gradient's norm, whether it is finite.

  What is not `live`, or not finite, stays as it was. `rate` is a factor beside
  the optimizer's schedule.
  """
  norm = optax.tree.norm(grads)
  finite = jnp.isfinite(norm)
  live &= finite
  updates, opt_state = _optimizer(spec).update(
    grads, state.opt_state, state.params, live=live
  )
  if rate is not None:
    updates = jax.tree.map(lambda u: rate * u, updates)
  params = jax.tree.map(
    lambda p, u: jnp.where(live, p + u, p), state.params, updates
  )
  return TrainState(state.step + live, params, opt_state), norm, finite


def _train_step(spec, state, base, data, denominators, live, num_micro, temp):
  """One update.

  Args:
    spec: of the learner.
    state: donated.
    base: what is not trained, or None.
    data: (batch [M, b, T], old log-probs, those of the reference policy or
      None, advantages by token).
    denominators: [K] of the losses; one of a policy without rows is not 0.
    live: [K] which policies are updated.
    num_micro: micro-batches with rows.
    temp: temperature by agent.
  """
  grads, loss, error, sums, gap = _gradients(
    spec, state.params, base, data, 1.0 / denominators, num_micro, temp
  )
  apply = functools.partial(_apply, spec)
  if spec.adapter is None:
    state, *said = apply(state, grads, live[0])
    norm, finite = (x[None] for x in said)
  else:
    rates = jnp.asarray(spec.rates, jnp.float32) if spec.rates else None
    state, norm, finite = jax.vmap(apply)(state, grads, live, rates)
  return state, StepOutput(loss, norm, finite, error, sums, gap)


def _agent_norms(
  spec, trainable, base, data, denominators, num_micro, temp, indices, owners
):
  """Norms of the gradient over the own rows of each agent in `indices`, whose
  policies are the `owners`.

  The loss's denominator stays the update's, so that the agents' gradients add
  up to the update's.
  """
  batch, *rest = data

  def norm(agent, owner):
    own = batch._replace(weights=batch.weights * (batch.agent_index == agent))
    grads, *_ = _gradients(
      spec, trainable, base, (own, *rest), 1.0 / denominators, num_micro, temp
    )
    if spec.adapter is not None:  # nothing of another policy's rows
      grads = jax.tree.map(lambda g: g[owner], grads)
    return optax.tree.norm(grads)

  return jax.lax.map(lambda pair: norm(*pair), (indices, owners))


def _score(spec, params, batch, num_micro, temperature):
  """[M, b, T] log-probs of the tokens themselves, 0 where none was sampled;
  `params` as `whole` returns them."""

  def body(i, out):
    rows = _micro(batch, i)
    values, _ = _logprobs(spec, params, rows, temperature)
    return out.at[i].set(jnp.where(rows.mask > 0, _unshift(values), 0.0))

  start = jnp.zeros(batch.tokens.shape, jnp.float32)
  return jax.lax.fori_loop(0, num_micro, body, start)


@functools.cache
def programs(spec: Spec) -> Programs:
  """The jitted programs of a spec; state shardings never change."""
  state = state_shardings(spec)
  replicated = sharding.replicated(spec.mesh)
  tokens = sharding.rows(spec.mesh, ndim=3, leading=1)
  output = StepOutput(*[replicated] * 5, gap=tokens)
  jit = functools.partial(jax.jit, static_argnums=0)
  return Programs(
    init=functools.partial(
      jit(_init, out_shardings=state, donate_argnums=1), spec
    ),
    score=functools.partial(jit(_score, out_shardings=tokens), spec),
    train_step=functools.partial(
      jit(_train_step, donate_argnums=1, out_shardings=(state, output)),
      spec,
    ),
    agent_norms=functools.partial(
      jit(_agent_norms, out_shardings=replicated), spec
    ),
  )
