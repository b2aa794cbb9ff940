"""Rules that turn a policy's gradient into its update.

A rule is a row of `OPTIMIZERS`: the direction in which optax would step. What
all have in common stands around it:

    gradient -> clip by the global norm -> direction u -> p - rate (u + decay p)

The decay is AdamW's (Loshchilov & Hutter 2019, arXiv:1711.05101), times the
rate of the schedule, for every rule and every parameter. Muon's second paper
(Liu et al. 2025, arXiv:2502.16982) has that too, Adafactor's has none.

Each parameter has a rule and a state of its own, so a state is a tree like the
parameters with the rule's state in the place of each; how a rule sees a
parameter follows from its logical axes. With `offload` states lie in the host's
memory, and visit the device one after the other, those of stacked layers layer
by layer.

All is arithmetic on arrays, so `init` and `update` may be run under `jax.vmap`
over policies.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from drmas_jax import config as config_lib
from drmas_jax import sharding

HOST = "pinned_host"  # memory of an offloaded state

_STACKED = ("policies", "layers")  # axes of dims that only count parameters
_MUON_RMS = 0.2  # of an update's elements, as AdamW's (arXiv:2502.16982)


def make_optimizer(
  config: config_lib.Optimizer, axes: Any
) -> optax.GradientTransformationExtraArgs:
  """Clip by the global norm, then the rule on the schedule.

  `update` takes a fourth argument, `live`: where it is False the updates are 0
  and the state stays as it was.

  Args:
    config: rule, rates, decay and the memory that the state lies in.
    axes: of the parameters, a tree of tuples of logical axes.
  """
  clip = optax.clip_by_global_norm(config.clip_norm)
  rules = jax.tree.map(
    functools.partial(_rule, config), axes, is_leaf=sharding.is_axes
  )

  def init(params):
    return _map_rules(lambda rule, p: rule.init(p), rules, params)

  def update(grads, state, params, *, live=True):
    grads, _ = clip.update(grads, optax.EmptyState())
    done = None

    def one(rule, grad, own, param):
      nonlocal done
      if config.offload:  # one state on the device at a time
        own, done = jax.lax.optimization_barrier((own, done))
      grad, done = rule.update(grad, own, param, live=live)
      return grad, done

    pairs = _map_rules(one, rules, grads, state, params)
    return tuple(
      _map_rules(lambda _, pair, i=i: pair[i], rules, pairs) for i in (0, 1)
    )

  return optax.GradientTransformationExtraArgs(init, update)


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


# -- one parameter -------------------------------------------------------------


def _map_rules(function: Callable[..., Any], rules: Any, *trees: Any) -> Any:
  return jax.tree.map(
    function,
    rules,
    *trees,
    is_leaf=lambda x: isinstance(x, optax.GradientTransformation),
  )


def _rule(
  config: config_lib.Optimizer, axes: sharding.Axes
) -> optax.GradientTransformationExtraArgs:
  """All of an update but the clip, of a parameter with these axes."""
  rule = optax.chain(
    OPTIMIZERS[config.name](config, axes),
    optax.add_decayed_weights(config.weight_decay),
    optax.scale_by_learning_rate(make_schedule(config)),
  )
  init = rule.init
  selecting = _gated(rule, config.offload, _select)
  branching = _gated(rule, config.offload, _branch)
  if "layers" in axes:
    init = jax.vmap(init)
    # Muon's temporaries are several times a matrix.
    one_by_one = config.offload or config.name == "muon"
    selecting = (_one_by_one if one_by_one else _at_once)(selecting)
    branching = _one_by_one(branching)

  def update(grad, state, param, *, live):
    return jax.lax.platform_dependent(
      *(grad, state, param, live), cpu=branching, default=selecting
    )

  return optax.GradientTransformationExtraArgs(init, update)


Update = Callable[..., tuple[Any, Any]]  # of gradient, state, parameter, live


def _select(rule: optax.GradientTransformation) -> Update:
  """The rule where `live`, and what there was elsewhere."""

  def update(grad, state, param, live):
    step, new = rule.update(grad, state, param)
    new = jax.tree.map(lambda n, s: jnp.where(live, n, s), new, state)
    return jnp.where(live, step, 0), new

  return update


def _branch(rule: optax.GradientTransformation) -> Update:
  """The same for XLA's CPU code: it would merge a new moment with what is made
  of it, compute it twice, and keep a copy of the old one for that. A branch is
  computed from what it is given."""

  def stay(grad, state, param):
    del param
    return jnp.zeros_like(grad), state

  def update(grad, state, param, live):
    return jax.lax.cond(live, rule.update, stay, grad, state, param)

  return update


def _gated(
  rule: optax.GradientTransformation, offload: bool, gate: Callable
) -> Update:
  """On the device, and back to where the state was."""
  gated = gate(rule)

  def update(grad, state, param, live):
    if offload:
      state = move(state, jax.memory.Space.Device)
    step, new = gated(grad, state, param, live)
    return step, move(new, jax.memory.Space.Host) if offload else new

  return update


def move(state: Any, memory: jax.memory.Space) -> Any:
  """What is large enough to be worth it, to a memory."""
  return jax.tree.map(
    lambda x: jax.device_put(x, memory) if x.ndim > 1 else x, state
  )


def _at_once(update: Update) -> Update:
  """The update of a layer's parameter on a stack of them, [L, ..]."""

  def stacked(grads, state, params, live):
    one = functools.partial(update, live=live)
    return jax.vmap(one)(grads, state, params)

  return stacked


def _one_by_one(update: Update) -> Update:
  """The same in a loop, in the place of gradients and state, with the
  temporaries of one layer."""

  def stacked(grads, state, params, live):
    def layer(i, carry):
      own = _take((*carry, params), i)
      return _put(carry, update(*own, live), i)

    return jax.lax.fori_loop(0, params.shape[0], layer, (grads, state))

  return stacked


def _take(tree: Any, i: jax.Array) -> Any:
  return jax.tree.map(lambda x: _at(x, i), tree)


def _put(tree: Any, part: Any, i: jax.Array) -> Any:
  return jax.tree.map(lambda x, y: _set(x, y, i), tree, part)


# Of policies beside each other a slice is one of all, too: the gather and the
# scatter that `vmap` makes of them are not for the host's memory.
@jax.custom_batching.custom_vmap
def _at(x: jax.Array, i: jax.Array) -> jax.Array:
  """x[i]"""
  return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


@_at.def_vmap
def _(size, batched, x, i):
  del size, batched  # i counts layers
  return jax.lax.dynamic_index_in_dim(x, i, 1, keepdims=False), True


@jax.custom_batching.custom_vmap
def _set(x: jax.Array, y: jax.Array, i: jax.Array) -> jax.Array:
  """x with y in the place of x[i]."""
  return jax.lax.dynamic_update_index_in_dim(x, y, i, 0)


@_set.def_vmap
def _(size, batched, x, y, i):
  del size, batched
  return jax.lax.dynamic_update_index_in_dim(x, y, i, 1), True


def _sides(axes: sharding.Axes) -> list[list[int]]:
  """The dims of one parameter of one layer, those of heads and their insides
  joined: one side is a vector, two are a matrix [in, out].

  [D, H, C] of a query projection is [[0], [1, 2]], [H, C, D] of an output
  projection [[0, 1], [2]], [H, C] of a bias [[0, 1]], [V, D] [[0], [1]].
  """
  sides: list[list[int]] = []
  for dim, axis in enumerate(a for a in axes if a not in _STACKED):
    if axis == "head_dim" and sides:
      sides[-1].append(dim)
    else:
      sides.append([dim])
  return sides


# -- rules: the direction of a step --------------------------------------------


def _adamw(
  config: config_lib.Optimizer, axes: sharding.Axes
) -> optax.GradientTransformation:
  """Kingma & Ba 2015, arXiv:1412.6980."""
  del axes
  return optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)


def _adafactor(
  config: config_lib.Optimizer, axes: sharding.Axes
) -> optax.GradientTransformation:
  """Shazeer & Stern 2018, arXiv:1804.04235, algorithm 4 without its rate.

  The second moment of a matrix [in, out] is kept as its row and column means
  where both sides have 128 or more, otherwise whole. The update is cut to a
  root mean square of 1 and multiplied by that of the parameter (at least 1e-3),
  so the rate is relative: 1e-3 changes a parameter by a thousandth.

  optax factors over the two largest dims. Of [D, H, C] these would be D and C,
  or none for C = 64: the rule gets [D, H C].
  """
  del config
  rule = optax.chain(
    optax.scale_by_factored_rms(),
    optax.clip_by_block_rms(1.0),
    optax.scale_by_param_block_rms(),
  )
  sides = _sides(axes)

  def merge(x):
    return x.reshape([math.prod(x.shape[d] for d in side) for side in sides])

  def update(grad, state, param):
    step, state = rule.update(merge(grad), state, merge(param))
    return step.reshape(grad.shape), state

  return optax.GradientTransformation(lambda p: rule.init(merge(p)), update)


def _muon(
  config: config_lib.Optimizer, axes: sharding.Axes
) -> optax.GradientTransformation:
  """Jordan et al. 2024 (kellerjordan.github.io/posts/muon) for the matrices of
  the layers; the embedding, the head, norms and biases as `_adamw`.

  An update of a matrix [in, out] is multiplied by 0.2 sqrt(max(in, out)), which
  gives its elements the root mean square that AdamW's have (Liu et al. 2025,
  arXiv:2502.16982, section 2.2), so that one rate serves both.
  """
  sides = _sides(axes)
  if "layers" not in axes or len(sides) != 2:
    return _adamw(config, axes)
  dims = optax.contrib.MuonDimensionNumbers(*map(tuple, sides))

  def as_large_as_adam(step, _):
    larger = max(math.prod(step.shape[d] for d in side) for side in sides)
    return step * (_MUON_RMS * math.sqrt(larger))

  return optax.chain(
    optax.contrib.scale_by_muon(
      beta=config.momentum, weight_dimension_numbers=dims
    ),
    optax.stateless(as_large_as_adam),
  )


Rule = Callable[
  [config_lib.Optimizer, sharding.Axes], optax.GradientTransformation
]
OPTIMIZERS: dict[str, Rule] = {
  "adamw": _adamw,
  "adafactor": _adafactor,
  "muon": _muon,
}

# The options that a rule reads beside the schedule, `weight_decay` and
# `clip_norm`; `config.check` refuses the others.
READS: dict[str, tuple[str, ...]] = {
  "adamw": ("b1", "b2", "eps"),
  "adafactor": (),
  "muon": ("b1", "b2", "eps", "momentum"),
}


# -- where the state lies ------------------------------------------------------


def state_shapes(config: config_lib.Optimizer, axes: Any, shapes: Any) -> Any:
  """Of a state, as ShapeDtypeStructs.

  Args:
    config: of the optimizer.
    axes: of the parameters; with "policies" in front of all of them `init` is
      mapped over that dim.
    shapes: of the parameters.
  """
  leaves = jax.tree.leaves(axes, is_leaf=sharding.is_axes)
  mapped = leaves[0][0] == "policies"
  one = jax.tree.map(
    lambda names: names[mapped:], axes, is_leaf=sharding.is_axes
  )
  init = make_optimizer(config, one).init
  return jax.eval_shape(jax.vmap(init) if mapped else init, shapes)


def state_shardings(
  config: config_lib.Optimizer, axes: Any, shapes: Any, mesh: Mesh
) -> Any:
  """Of a state: what belongs to a parameter is laid out as that.

  A mean over one side of a matrix has the axes of the other side. Counts, and
  what stands for a moment that is not kept, are whole on every device. With
  `offload` all but vectors and counts is in the host's memory.

  Args:
    config: of the optimizer.
    axes: of the parameters, as in `state_shapes`.
    shapes: of the parameters.
    mesh: of the train slice.

  Returns:
    A tree of NamedSharding like the state.
  """

  def place(names, param, x):
    num = sum(name in _STACKED for name in names)
    own = _state_axes(names, param.shape, x.shape, num)
    where = NamedSharding(mesh, sharding.spec(own, x.shape, mesh))
    aside = config.offload and x.ndim > num + 1
    return where.with_memory_kind(HOST) if aside else where

  return jax.tree.map(
    lambda names, param, own: jax.tree.map(
      functools.partial(place, names, param), own
    ),
    axes,
    shapes,
    state_shapes(config, axes, shapes),
    is_leaf=sharding.is_axes,
  )


def state_bytes(
  config: config_lib.Optimizer, axes: Any, shapes: Any, mesh: Any
) -> tuple[int, int]:
  """(bytes of a state that stay on each device, most that visit it at a time).

  Args:
    config: of the optimizer.
    axes: of the parameters, as in `state_shapes`.
    shapes: of the parameters.
    mesh: a Mesh or an AbstractMesh.
  """

  def one(names, state, placed):
    stays = visits = 0
    for x, where in zip(
      jax.tree.leaves(state), jax.tree.leaves(placed), strict=True
    ):
      size = math.prod(where.shard_shape(x.shape)) * x.dtype.itemsize
      if where.memory_kind != HOST:
        stays += size
      elif "layers" not in names:
        visits += 2 * size  # as it was, and as it will be
    return stays, visits

  found = jax.tree.map(
    one,
    axes,
    state_shapes(config, axes, shapes),
    state_shardings(config, axes, shapes, mesh),
    is_leaf=sharding.is_axes,
  )
  stay, visit = zip(
    *jax.tree.leaves(found, is_leaf=lambda x: type(x) is tuple), strict=True
  )
  return sum(stay), max(visit)


def _state_axes(
  axes: sharding.Axes,
  shape: tuple[int, ...],
  found: tuple[int, ...],
  num_stacked: int,
) -> sharding.Axes:
  """Of an array of a state, by the axes and the shape of its parameter."""
  if found == shape:
    return axes
  stacked, names = shape[:num_stacked], axes[num_stacked:]
  for side in _sides(axes):
    size = math.prod(shape[num_stacked + dim] for dim in side)
    if found == (*stacked, size):
      return (*axes[:num_stacked], names[side[0]])
  return (None,) * len(found)
