"""Low-rank adapters (LoRA) of several policies on one frozen decoder.

    y = x W + alpha / rank * (x A_k) B_k      in the rows of policy k

A tree of adapters has the form of the decoder's layers, and in the place of the
weight W [L, *in, *out] of a target the pair

    a [K, L, *in, rank]      b [K, L, rank, *out]

with the policies in front, so that what belongs to policy k is [k] of every
leaf: parameters, optimizer state, checkpoint. Rows whose policy index is K are
the decoder's own.

Source: Hu et al. 2021 (arXiv 2106.09685); initialised as in PEFT, A uniform
within 1 / sqrt(in) and B zero, so that a policy begins as the decoder.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from drmas_jax import products, sharding
from drmas_jax.config import Adapter

_MODULE = {
  **dict.fromkeys(("q", "k", "v", "o"), "attention"),
  **dict.fromkeys(("gate", "up", "down"), "mlp"),
}


def shapes(weights: Any, adapter: Adapter, num_policies: int) -> Any:
  """The tree of adapters as float32 ShapeDtypeStructs.

  Args:
    weights: shapes of the decoder's stacked layers.
    adapter: of each policy.
    num_policies: K.
  """

  def pair(name: str) -> dict[str, jax.ShapeDtypeStruct]:
    num_layers, *dims = weights[_MODULE[name]][name].shape
    inputs, outputs = dims[: _num_in(name)], dims[_num_in(name) :]
    lead = num_policies, num_layers
    return {
      "a": jax.ShapeDtypeStruct((*lead, *inputs, adapter.rank), jnp.float32),
      "b": jax.ShapeDtypeStruct((*lead, adapter.rank, *outputs), jnp.float32),
    }

  return _tree(adapter, pair)


def axes(weights: Any, adapter: Adapter) -> Any:
  """The tree of adapters as tuples of logical axes, from the layers'."""

  def pair(name: str) -> dict[str, sharding.Axes]:
    _, *dims = weights[_MODULE[name]][name]
    inputs, outputs = dims[: _num_in(name)], dims[_num_in(name) :]
    return {
      "a": ("policies", "layers", *inputs, "rank"),
      "b": ("policies", "layers", "rank", *outputs),
    }

  return _tree(adapter, pair)


def init(found: Any, keys: jax.Array) -> Any:
  """New adapters of the `shapes` found, one policy for each of the keys [K]."""
  paths = jax.tree_util.tree_flatten_with_path(found)[0]
  leaves = []
  for number, (path, shape) in enumerate(paths):
    if path[-1].key == "b":
      leaves.append(jnp.zeros(shape.shape, shape.dtype))
      continue
    bound = math.prod(shape.shape[2:-1]) ** -0.5
    leaves.append(
      jax.vmap(
        lambda key, n=number, s=shape, high=bound: jax.random.uniform(
          jax.random.fold_in(key, n), s.shape[1:], s.dtype, -high, high
        )
      )(keys)
    )
  return jax.tree.unflatten(jax.tree.structure(found), leaves)


def by_layer(tree: Any) -> list[Any]:
  """One tree for each layer, with the policies in front."""
  num_layers = jax.tree.leaves(tree)[0].shape[1]
  return [jax.tree.map(lambda x, i=i: x[:, i], tree) for i in range(num_layers)]


def delta(
  pair: dict[str, jax.Array],
  x: Float[Array, "B T *in"],
  policy_index: Int[Array, " B"],
  scale: float,
  *,
  trained: bool,
) -> Float[Array, "B T *out"]:
  """What a layer's adapters add to a product, in float32.

  Args:
    pair: a [K, *in, rank] and b [K, rank, *out].
    x: input of the product.
    policy_index: of each row; K: no adapter.
    scale: alpha / rank.
    trained: rows are multiplied with their own adapters alone, so that what is
      not finite in one policy's rows reaches no other's gradient; otherwise
      with all of them at once, which reads each adapter once.
  """
  a, b = (products.rounded(pair[name], x.dtype) for name in "ab")
  num, rank = a.shape[0], a.shape[-1]
  outputs = b.shape[2:]
  rows, length = x.shape[:2]
  a, b = a.reshape(num, -1, rank), b.reshape(num, rank, -1)
  x = x.reshape(rows, length, -1)

  def dot(x, w):
    return jnp.matmul(
      x,
      w,
      precision=products.precision(x.dtype),
      preferred_element_type=jnp.float32,
    )

  if trained:
    a, b = (
      jnp.take(w, policy_index, axis=0, mode="fill", fill_value=0)
      for w in (a, b)
    )
    y = dot(dot(x, a).astype(x.dtype), b)
  else:
    inner = dot(x, a.transpose(1, 0, 2).reshape(-1, num * rank))
    own = policy_index[:, None, None, None] == jnp.arange(num)[:, None]
    inner = jnp.where(own, inner.reshape(rows, length, num, rank), 0)
    y = dot(
      inner.reshape(rows, length, -1).astype(x.dtype),
      b.reshape(num * rank, -1),
    )
  return y.reshape(rows, length, *outputs) * scale


def merge(weights: Any, tree: Any, adapter: Adapter) -> Any:
  """The layers with one policy's adapters added to their weights.

  Args:
    weights: of the stacked layers, float32.
    tree: leaves without the dim of policies: a [L, *in, rank].
    adapter: of the policy.
  """
  merged = dict(weights)
  for module, targets in tree.items():
    merged[module] = dict(weights[module])
    for name, pair in targets.items():
      merged[module][name] += change(pair, adapter).reshape(
        merged[module][name].shape
      )
  return merged


def change(pair: dict[str, jax.Array], adapter: Adapter) -> jax.Array:
  """[L, in, out], what one policy's adapter adds to a weight: alpha / rank A B.

  Args:
    pair: a [L, *in, rank] and b [L, rank, *out].
    adapter: of the policy.
  """
  num, rank = pair["a"].shape[0], adapter.rank
  a, b = pair["a"].reshape(num, -1, rank), pair["b"].reshape(num, rank, -1)
  product = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
  return adapter.alpha / rank * product


def _num_in(name: str) -> int:
  return 2 if name == "o" else 1


def _tree(adapter: Adapter, pair: Any) -> Any:
  found: dict[str, Any] = {}
  for name in sorted(adapter.targets):
    found.setdefault(_MODULE[name], {})[name] = pair(name)
  return found
