"""Score vectors of turns: how large the terms of a policy's gradient are.

    z = gradient of log pi(completion | prompt) in what is trained

under the tempered softmax that the turn was drawn from. The gradient of an
update is a weighted sum of advantage * z over its turns, and lemma 4.2 of
Dr. MAS (arXiv 2602.08847) splits the mean of |advantage * z|^2 into
kappa * |z|^2, on average, and a covariance (`metrics.score_norms`).

Each turn takes a gradient of its own, one after the other: the flops of an
update whose rows hold one turn each. For the tiny team on a CPU that is about
the time of the update's gradient (0.7 of it for 233 turns); where a batch of
rows keeps a device busier than a single one it is more. Devices share nothing
but the weights.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from drmas_jax import batching, learner, sharding
from drmas_jax.types import Batch, Turn


class Programs(NamedTuple):
  """Jitted, of rows of one turn each.

  Attributes:
    squares: (trainable, base, batch [M, b, T], micro-batches with rows,
      temperature by agent) -> [M, b] float32 |z|^2, 0 for rows of padding;
      the other arguments are those of `learner`.
    vectors: (trainable, base, rows [b, T], temperature) -> [b, P] float32 z,
      of all P trained numbers: for small models.
    norms: (trainable, base, data of `learner.train_step`, [M, b] what each
      row's loss is multiplied with, micro-batches with rows, temperature) ->
      [M, b] float32 norm of the gradient of what a row adds to the loss.
  """

  squares: Any
  vectors: Any
  norms: Any


@functools.cache
def programs(spec: learner.Spec) -> Programs:
  """Those of a learner's spec."""
  # A row is too small to be split: every device works on it with what it has
  # of the weights. Kernels that must know the mesh are not for such rows.
  model = dataclasses.replace(spec.model, attention="xla")
  alone = dataclasses.replace(spec, mesh=None, model=model)
  by_row = sharding.rows(spec.mesh, ndim=2, leading=1)
  return Programs(
    jax.jit(functools.partial(_squares, alone), out_shardings=by_row),
    jax.jit(functools.partial(_vectors, alone)),
    jax.jit(functools.partial(_norms, alone), out_shardings=by_row),
  )


def lay_out(
  turns: Sequence[Turn],
  agent: Sequence[int],
  policy: Sequence[int],
  *,
  num_micro: int,
  micro_rows: int,
  length: int,
) -> Batch:
  """A row for each turn, in order, as a Batch [num_micro, micro_rows, length].

  Args:
    turns: of one backbone; there is room for num_micro * micro_rows.
    agent: index of each turn's agent.
    policy: index of each turn's policy.
    num_micro: M.
    micro_rows: b.
    length: T, at least the longest turn.
  """
  one = batching.Shape(1, 1, length, 1)
  rows = [
    batching.pack([turn], [0], [a], one, policy_index=[p])
    for turn, a, p in zip(turns, agent, policy, strict=True)
  ]
  empty = batching.pack([], [], [], one)
  rows += [empty] * (num_micro * micro_rows - len(rows))

  def join(*each: np.ndarray) -> np.ndarray:
    dims = each[0].shape[2:]
    return np.concatenate(each, axis=1).reshape(num_micro, micro_rows, *dims)

  return jax.tree.map(join, *rows)


def _vector(spec, trainable, base, temperature, row):
  """z of one row [T], as a tree."""

  def logprob(trainable):
    rows = jax.tree.map(lambda x: x[None], row)
    params = learner.whole(base, trainable)
    return learner.row_logprobs(spec, params, rows, temperature)[0]

  return jax.grad(logprob)(trainable)


def _squares(spec, trainable, base, batch, num_micro, temperature):
  def square(row):
    z = _vector(spec, trainable, base, temperature, row)
    return optax.tree.norm(z, squared=True)

  def body(i, out):
    rows = jax.tree.map(lambda x: x[i], batch)
    return out.at[i].set(jax.lax.map(square, rows))

  start = jnp.zeros(batch.tokens.shape[:2], jnp.float32)
  return jax.lax.fori_loop(0, num_micro, body, start)


def _norms(spec, trainable, base, data, scale, num_micro, temperature):
  def norm(row):
    *row, factor = row

    def loss(trainable):
      rows = jax.tree.map(lambda x: x[None], row)
      factors = jnp.full([spec.num_policies], factor)
      return learner.batch_loss(
        spec, trainable, base, *rows, factors, temperature
      )[0]

    return optax.tree.norm(jax.grad(loss)(trainable))

  def body(i, out):
    rows = jax.tree.map(lambda x: x[i], (*data, scale))
    return out.at[i].set(jax.lax.map(norm, rows))

  start = jnp.zeros(scale.shape, jnp.float32)
  return jax.lax.fori_loop(0, num_micro, body, start)


def _vectors(spec, trainable, base, rows, temperature):
  def vector(row):
    z = _vector(spec, trainable, base, temperature, row)
    return jnp.concatenate([x.reshape(-1) for x in jax.tree.leaves(z)])

  return jax.lax.map(vector, rows)
