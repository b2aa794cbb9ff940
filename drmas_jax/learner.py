"""The jitted score and train step of one backbone.

    score       batch -> log-probs by token
    train_step  (state, batch, advantages, denominator) -> (state, metrics)

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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from drmas_jax import config as config_lib
from drmas_jax import logprobs, losses, sharding
from drmas_jax.models import transformer
from drmas_jax.types import Batch, TrainState


@dataclasses.dataclass(frozen=True)
class Spec:
  """All that decides the programs of a learner.

  Attributes:
    model: the decoder, in the compute dtype.
    mesh: the train slice.
    loss, optimizer: see `config`; loss None is cross-entropy.
    num_agents: agents of the run, for sums by agent.
    vocab_size: real tokens.
    head_chunk: tokens whose logits exist at a time; 0 for all.
  """

  model: transformer.DecoderConfig
  mesh: Mesh
  loss: config_lib.Loss | None
  optimizer: config_lib.Optimizer
  num_agents: int
  vocab_size: int
  head_chunk: int = 0


class AgentSums(NamedTuple):
  """Sums over the tokens in an update's loss by agent, [num_agents] each.

  `log_ratio_abs` and `_max` compare the learner's log-probs, before the
  update, with the sampler's: |difference|, summed and at most. `importance` is
  the sum of the importance weights, `importance_cut` counts those at the bound.
  """

  tokens: Any
  clipped: Any
  dual_clipped: Any
  importance: Any
  importance_cut: Any
  log_ratio_abs: Any
  log_ratio_max: Any


class StepOutput(NamedTuple):
  """What one update says of itself.

  Attributes:
    loss: as minimised.
    grad_norm: before clipping.
    finite: False where the update was skipped (rule 11).
    ratio_error: max |ratio - 1| over trained tokens.
    sums: by agent.
  """

  loss: Any
  grad_norm: Any
  finite: Any
  ratio_error: Any
  sums: AgentSums


class Programs(NamedTuple):
  init: Any
  score: Any
  train_step: Any
  agent_norms: Any


def make_optimizer(
  config: config_lib.Optimizer,
) -> optax.GradientTransformation:
  """Clip by the global norm, then AdamW on the schedule."""
  return optax.chain(
    optax.clip_by_global_norm(config.clip_norm),
    optax.adamw(
      make_schedule(config),
      b1=config.b1,
      b2=config.b2,
      eps=config.eps,
      weight_decay=config.weight_decay,
    ),
  )


def make_schedule(config: config_lib.Optimizer) -> optax.Schedule:
  """Linear rise, then constant or a fall over `decay_steps`."""
  peak, final = config.learning_rate, config.final_fraction
  after = {
    "constant": optax.constant_schedule(peak),
    "cosine": optax.cosine_decay_schedule(peak, config.decay_steps, final),
    "linear": optax.linear_schedule(peak, peak * final, config.decay_steps),
  }[config.schedule]
  if not config.warmup_steps:
    return after
  # The first update has rate peak / warmup_steps, not 0.
  rise = optax.linear_schedule(
    peak / config.warmup_steps, peak, config.warmup_steps - 1
  )
  return optax.join_schedules([rise, after], [config.warmup_steps])


def state_shapes(spec: Spec) -> TrainState:
  """The state as ShapeDtypeStructs."""
  shapes = transformer.param_shapes(spec.model)
  return jax.eval_shape(functools.partial(_init, spec), shapes)


def state_shardings(spec: Spec) -> TrainState:
  """Optimizer moments are laid out as the parameters they belong to."""
  shapes = transformer.param_shapes(spec.model)
  params = sharding.shardings(
    transformer.param_axes(spec.model), shapes, spec.mesh
  )
  tx = make_optimizer(spec.optimizer)
  whole = sharding.replicated(spec.mesh)
  opt_state = optax.tree_map_params(
    tx,
    lambda _, s: s,
    jax.eval_shape(tx.init, shapes),
    params,
    transform_non_params=lambda _: whole,
  )
  return TrainState(whole, params, opt_state)


def _init(spec: Spec, params) -> TrainState:
  tx = make_optimizer(spec.optimizer)
  return TrainState(jnp.zeros([], jnp.int32), params, tx.init(params))


def _shift(x: jax.Array) -> jax.Array:
  """x[:, t + 1] at t: what the hidden state at t predicts."""
  return jnp.concatenate([x[:, 1:], jnp.zeros_like(x[:, :1])], axis=1)


def _next(rows: Batch) -> Batch:
  """The rows as the hidden states see them: what each is to predict."""
  by_token = {
    name: _shift(array)
    for name, array in rows._asdict().items()
    if name != "policy_index"  # of rows
  }
  return rows._replace(**by_token)


def _logprobs(
  spec: Spec, params, rows: Batch, temperature, with_entropy: bool = False
):
  """[b, T] each: log-prob of token t + 1 at t, and the entropy there or
  None."""
  inputs = transformer.Inputs(
    rows.tokens, rows.positions, rows.segment_ids, rows.policy_index
  )
  hidden, _ = transformer.forward(
    params, inputs, config=spec.model, mesh=spec.mesh
  )
  return logprobs.token_logprobs(
    hidden,
    transformer.head(params, spec.model),
    _shift(rows.tokens),
    temperature[_shift(rows.agent_index)],
    vocab_size=spec.vocab_size,
    chunk=spec.head_chunk,
    with_entropy=with_entropy,
  )


def _loss(spec: Spec, params, rows: Batch, old, advantages, scale, temperature):
  """sum(loss * weight) * scale, and sums by agent."""
  settings = spec.loss or config_lib.Loss()
  new, entropy = _logprobs(
    spec, params, rows, temperature, settings.entropy_weight > 0
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
  loss = out.loss * factor
  if settings.entropy_weight:
    loss -= settings.entropy_weight * entropy
  loss = jnp.sum(jnp.where(weights > 0, loss * weights, 0.0)) * scale
  sums, error = _agent_sums(
    spec,
    jnp.where(weights > 0, shifted.agent_index, -1),
    out,
    (factor, cut),
    jnp.abs(new - shifted.sampler_logprobs),
  )
  return loss, (sums, error)


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


def _agent_sums(spec: Spec, agent, out: losses.TokenLoss, importance, gap):
  """Sums by agent, and max |ratio - 1|; `agent` is -1 for what is left out."""

  def total(x):
    return jnp.stack(
      [jnp.sum(jnp.where(agent == k, x, 0.0)) for k in range(spec.num_agents)]
    )

  factor, cut = importance
  sums = AgentSums(
    tokens=total(1.0),
    clipped=total(out.clipped),
    dual_clipped=total(out.dual_clipped),
    importance=total(factor),
    importance_cut=total(cut),
    log_ratio_abs=total(gap),
    log_ratio_max=jnp.stack(
      [jnp.max(jnp.where(agent == k, gap, 0.0)) for k in range(spec.num_agents)]
    ),
  )
  return sums, jnp.max(jnp.where(agent >= 0, jnp.abs(out.ratio - 1), 0.0))


def _micro(tree, i):
  return jax.tree.map(
    lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), tree
  )


def _gradients(spec, params, batch, old, advantages, scale, num_micro, temp):
  """Sums over the first num_micro micro-batches: gradients, loss, metrics."""
  value_and_grad = jax.value_and_grad(
    functools.partial(_loss, spec), has_aux=True
  )

  def body(i, carry):
    grads, loss, sums, error = carry
    rows, olds, advs = _micro((batch, old, advantages), i)
    (value, (more, err)), new = value_and_grad(
      params, rows, olds, advs, scale, temp
    )
    top = jnp.maximum(sums.log_ratio_max, more.log_ratio_max)
    sums = jax.tree.map(jnp.add, sums, more)._replace(log_ratio_max=top)
    grads = jax.tree.map(jnp.add, grads, new)
    return grads, loss + value, sums, jnp.maximum(error, err)

  zeros = jnp.zeros([spec.num_agents], jnp.float32)
  start = (
    jax.tree.map(jnp.zeros_like, params),
    jnp.zeros([], jnp.float32),
    AgentSums(*(zeros for _ in AgentSums._fields)),
    jnp.zeros([], jnp.float32),
  )
  return jax.lax.fori_loop(0, num_micro, body, start)


def _train_step(
  spec, state, batch, old, advantages, denominator, num_micro, temperature
):
  grads, loss, sums, error = _gradients(
    spec,
    state.params,
    batch,
    old,
    advantages,
    1.0 / denominator,
    num_micro,
    temperature,
  )
  norm = optax.tree.norm(grads)
  finite = jnp.isfinite(norm)
  tx = make_optimizer(spec.optimizer)
  updates, opt_state = tx.update(grads, state.opt_state, state.params)
  updated = TrainState(
    state.step + 1, optax.apply_updates(state.params, updates), opt_state
  )
  state = jax.tree.map(
    lambda new, old: jnp.where(finite, new, old), updated, state
  )
  return state, StepOutput(loss, norm, finite, error, sums)


def _agent_norms(
  spec,
  params,
  batch,
  old,
  advantages,
  denominator,
  num_micro,
  temperature,
  indices,
):
  """Norms of the gradient over the own rows of each agent in `indices` [K].

  The loss's denominator stays the update's, so that the agents' gradients add
  up to the update's.
  """

  def norm(agent):
    own = batch._replace(weights=batch.weights * (batch.agent_index == agent))
    grads, *_ = _gradients(
      spec,
      params,
      own,
      old,
      advantages,
      1.0 / denominator,
      num_micro,
      temperature,
    )
    return optax.tree.norm(grads)

  return jax.lax.map(norm, indices)


def _score(spec, params, batch, num_micro, temperature):
  """[M, b, T] log-probs of the tokens themselves, 0 where none was sampled."""

  def body(i, out):
    rows = _micro(batch, i)
    values, _ = _logprobs(spec, params, rows, temperature)
    # Back from "what t predicts" to "the token at t".
    values = jnp.concatenate(
      [jnp.zeros_like(values[:, :1]), values[:, :-1]], axis=1
    )
    return out.at[i].set(jnp.where(rows.mask > 0, values, 0.0))

  start = jnp.zeros(batch.tokens.shape, jnp.float32)
  return jax.lax.fori_loop(0, num_micro, body, start)


@functools.cache
def programs(spec: Spec) -> Programs:
  """The jitted programs of a spec; state shardings never change."""
  state = state_shardings(spec)
  whole = sharding.replicated(spec.mesh)
  tokens = sharding.rows(spec.mesh, ndim=3, leading=1)
  jit = functools.partial(jax.jit, static_argnums=0)
  return Programs(
    init=functools.partial(
      jit(_init, out_shardings=state, donate_argnums=1), spec
    ),
    score=functools.partial(jit(_score, out_shardings=tokens), spec),
    train_step=functools.partial(
      jit(_train_step, donate_argnums=1, out_shardings=(state, whole)), spec
    ),
    agent_norms=functools.partial(jit(_agent_norms, out_shardings=whole), spec),
  )
