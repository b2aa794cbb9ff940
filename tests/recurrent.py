"""A toy family whose cache is not all keys and values: the engine's second.

Every layer is a gated linear recurrence, then the transformer's own block:

    h[t] = a[t] h[t-1] + (1 - a[t]) b[t]    a = sigmoid(x decay), b = x entry
    x[t] += silu(h[t]) out

The state h [F] has no place for tokens. In the cache it is a snapshot, of the
sequence whose last page has that index; what `forward` is given are the states
of its rows. It offers what the engine uses of models/transformer.py, for rows
of one sequence each.
"""

import jax
import jax.numpy as jnp

from drmas_jax.models import layers, transformer
from drmas_jax.models.transformer import (  # noqa: F401 (the same in both)
  DecoderConfig,
  fused,
  head,
  unstack,
)


def _recurrence_shapes(config):
  """{name: (shape, logical axes)}, behind the dim of the layers."""
  d, f = config.embed_dim, config.mlp_dim
  return {
    "decay": ((d, f), ("embed", "mlp")),
    "entry": ((d, f), ("embed", "mlp")),
    "out": ((f, d), ("mlp", "embed")),
  }


def _with_recurrence(params, make):
  """The transformer's tree and, in its layers, make(shape, axes) of ours."""
  return {**params, "layers": {**params["layers"], "recurrence": make}}


def param_shapes(config):
  ours = {
    name: jax.ShapeDtypeStruct((config.num_layers, *shape), jnp.float32)
    for name, (shape, _) in _recurrence_shapes(config).items()
  }
  return _with_recurrence(transformer.param_shapes(config), ours)


def param_axes(config):
  ours = {
    name: ("layers", *axes)
    for name, (_, axes) in _recurrence_shapes(config).items()
  }
  return _with_recurrence(transformer.param_axes(config), ours)


def init_cache(config, num_pages, page_size, dtype):
  """The transformer's, and states [N, F] in float32 whatever the dtype."""
  return [
    entry | {"state": jnp.zeros([num_pages, config.mlp_dim], jnp.float32)}
    for entry in transformer.init_cache(config, num_pages, page_size, dtype)
  ]


def cache_axes(config, dtype):
  return [
    entry | {"state": ("pages", "mlp")}
    for entry in transformer.cache_axes(config, dtype)
  ]


def rewinds(config):
  """What a state was some tokens ago is not to be had."""
  del config
  return False


def forward(params, inputs, cache=None, pages=None, *, config, mesh=None):
  """See `transformer.forward`; a state goes on at the tokens of segment 1."""
  rows = inputs.tokens.shape[0]
  view = transformer._view(inputs, pages, config, mesh)
  x = params["embedding"][inputs.tokens].astype(config.compute_dtype)
  if not isinstance(params["layers"], list):
    params = unstack(params)
  updated = []
  for i, layer in enumerate(params["layers"]):
    entry = {"state": jnp.zeros([rows, config.mlp_dim])}
    if cache is not None:
      entry = dict(cache[i])
    state = entry.pop("state")
    weights = dict(layer)
    x, state = _recur(weights.pop("recurrence"), x, state, inputs.segment_ids)
    x, entry = transformer.Block(config).apply(
      {"params": weights}, x, view, entry or None
    )
    updated.append({**(entry or {}), "state": state})
  x = layers.rms_norm(x, params["final_norm"], config.norm_eps)
  return x, None if cache is None else updated


def _recur(weights, x, state, segment_ids):
  """x [B, T, D] and states [B, F], before and behind the row's real tokens."""
  goes_on = (segment_ids != 0)[..., None]
  decay = jax.nn.sigmoid(layers.product(x, weights["decay"]))
  entry = (1 - decay) * layers.product(x, weights["entry"])
  decay = jnp.where(goes_on, decay, 1).astype(jnp.float32)
  entry = jnp.where(goes_on, entry, 0).astype(jnp.float32)

  def step(h, one):
    h = one[0] * h + one[1]
    return h, h

  by_time = jax.tree.map(lambda a: a.swapaxes(0, 1), (decay, entry))
  state, h = jax.lax.scan(step, state, by_time)
  h = jax.nn.silu(h.swapaxes(0, 1)).astype(x.dtype)
  return x + layers.product(h, weights["out"]), state
