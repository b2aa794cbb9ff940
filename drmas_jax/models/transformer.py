"""The one decoder: llama, qwen2 and qwen3 are settings of it.

`forward(params, inputs, cache, pages)` is all that learner and engine receive.
Params are a plain tree of arrays:

    embedding        [V, D]
    layers           {attention: .., mlp: .., *_norm: ..}, stacked [L, ..]
    final_norm       [D]
    head             [D, V], unless tied to the embedding

A layer's parameters are declared by `_param`: name, shape, logical axes and
init on one line. sharding.py lays the axes on a mesh.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from drmas_jax import products, sharding
from drmas_jax.models import adapters, attention, kernels, layers, paged
from drmas_jax.models.layers import RopeScaling
from drmas_jax.types import Spread

Params = dict[str, Any]
Cache = list[dict[str, jax.Array]]


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """Sizes and switches of a decoder; hashable, so a static argument.

  Attributes:
    family: name of the family's file; it says how the weights are stored.
    vocab_size: rows of the embedding, padded ones included.
    max_positions: longest sequence that the checkpoint claims to handle.
    compute_dtype: "float32" or "bfloat16", of activations.
    attention: of a pass without a cache, as `attention.resolve` takes it.
    remat: what of a layer the backward pass computes again: "none", "dots"
      (all but the products) or "full".
    adapter_scale: alpha / rank of the adapters, where there are any.
    unroll: layers per iteration of the training scan; 0 lets the backend
      decide (`_unroll`).
  """

  family: str
  vocab_size: int
  embed_dim: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_dim: int
  max_positions: int
  rope_theta: float = 10_000.0
  rope_scaling: RopeScaling | None = None
  norm_eps: float = 1e-6
  tied: bool = False
  qkv_bias: bool = False
  qk_norm: bool = False
  compute_dtype: str = "float32"
  attention: str = "auto"
  remat: str = "dots"
  adapter_scale: float = 1.0
  unroll: int = 0


class Inputs(NamedTuple):
  """What a forward pass reads of its rows.

  Attributes:
    tokens: [B, T] int32.
    positions: [B, T] int32, within the segment.
    segment_ids: [B, T] int32, 0 for padding.
    policy_index: [B] int32, whose adapter a row has; see `models/adapters.py`.
    spread: where rows whose segments share tokens are whole, for attention.
  """

  tokens: Int[Array, "B T"]
  positions: Int[Array, "B T"]
  segment_ids: Int[Array, "B T"]
  policy_index: Int[Array, " B"]
  spread: Spread | None = None


class View(NamedTuple):
  """What all layers share of one forward pass.

  Attributes:
    positions: [B, T].
    sin: [B, T, 1, C/2], rotary.
    cos: [B, T, 1, C/2].
    segment_ids: [B, T], what a token sees where there is no cache.
    policy_index: [B], as in `Inputs`.
    spread: as in `Inputs`.
    pages: where the rows' tokens are, where there is one.
    mesh: where the activations are laid; None on one device.
  """

  positions: jax.Array
  sin: jax.Array
  cos: jax.Array
  segment_ids: jax.Array
  policy_index: jax.Array
  spread: Spread | None
  pages: paged.Pages | None
  mesh: Mesh | None

  @property
  def rows(self) -> str:
    """Logical axis of the rows."""
    return "batch" if self.pages is None else "slots"

  @property
  def one_device(self) -> bool:
    return self.mesh is None or self.mesh.size == 1


# -- parameters ----------------------------------------------------------------

_ones, _zeros = nn.initializers.ones, nn.initializers.zeros


def _param(
  module: nn.Module,
  name: str,
  shape: tuple[int, ...],
  axes: sharding.Axes,
  init: Callable | None = None,
) -> jax.Array:
  """Declares a parameter, and returns it in the compute dtype.

  Without `init` it is normal, of variance 1/fan-in.

  (A fixed deviation of 0.02, as in large models, leaves a narrow one untrained
  for hundreds of steps.)
  """
  if init is None:
    # A product's input is the embedding dim, or all dims before it.
    inputs = shape[:1] if axes[0] == "embed" else shape[:-1]
    width = shape[-1] if axes[0] == "vocab" else math.prod(inputs)
    init = nn.initializers.normal(width**-0.5)
  value = module.param(
    name, nn.with_logical_partitioning(init, axes), shape, jnp.float32
  )
  return products.rounded(value, module.config.compute_dtype)


def _project(
  module: nn.Module,
  name: str,
  x: jax.Array,
  w: jax.Array,
  view: View,
  num_in: int = 1,
) -> jax.Array:
  """A product with a weight, and with the adapters of that name if any."""
  y = layers.product(x, w, num_in, view.one_device)
  if not module.has_variable("adapters", name):
    return y
  return y + adapters.delta(
    module.get_variable("adapters", name),
    x,
    view.policy_index,
    module.config.adapter_scale,
    trained=view.pages is None,
  )


class Attention(nn.Module):
  """Rotary grouped-query attention over the row or over a cache."""

  config: DecoderConfig

  @nn.compact
  def __call__(self, x, view, cache):
    c = self.config
    d, h, k, hd = c.embed_dim, c.num_heads, c.num_kv_heads, c.head_dim
    heads, kv_heads = ("heads", "head_dim"), ("kv_heads", "head_dim")
    w_q = _param(self, "q", (d, h, hd), ("embed", *heads))
    w_k = _param(self, "k", (d, k, hd), ("embed", *kv_heads))
    w_v = _param(self, "v", (d, k, hd), ("embed", *kv_heads))
    w_o = _param(self, "o", (h, hd, d), (*heads, "embed"))
    qkv = [
      _project(self, name, x, w, view)
      for name, w in (("q", w_q), ("k", w_k), ("v", w_v))
    ]
    if c.qkv_bias:
      biases = (
        _param(self, "q_bias", (h, hd), heads, _zeros),
        _param(self, "k_bias", (k, hd), kv_heads, _zeros),
        _param(self, "v_bias", (k, hd), kv_heads, _zeros),
      )
      qkv = [y + b for y, b in zip(qkv, biases, strict=True)]
    q, k, v = qkv
    if c.qk_norm:
      q_scale = _param(self, "q_norm", (hd,), ("head_dim",), _ones)
      k_scale = _param(self, "k_norm", (hd,), ("head_dim",), _ones)
      q = layers.rms_norm(q, q_scale, c.norm_eps)
      k = layers.rms_norm(k, k_scale, c.norm_eps)
    q, k = (layers.rope(n, view.sin, view.cos) for n in (q, k))
    q, k, v = (n.astype(c.compute_dtype) for n in (q, k, v))
    if cache is None:
      q = sharding.constrain(q, ("batch", "length", *heads), view.mesh)
      kind = attention.resolve(c.attention, view.mesh, hd, c.compute_dtype)
      where = view.segment_ids if view.spread is None else view.spread
      out = attention.attend(q, k, v, where, kind=kind, mesh=view.mesh)
    else:
      held = ("slots", "length", "cache_heads", None)
      q, k, v = (sharding.constrain(n, held, view.mesh) for n in (q, k, v))
      cache = paged.append(cache, k, v, view.positions, view.pages)
      out = paged.attend(q, cache, view.positions, view.pages, view.mesh)
    return _project(self, "o", out, w_o, view, num_in=2), cache


class Mlp(nn.Module):
  """SwiGLU: (silu(x gate) * (x up)) down."""

  config: DecoderConfig

  @nn.compact
  def __call__(self, x, view):
    d, f = self.config.embed_dim, self.config.mlp_dim
    gate = _param(self, "gate", (d, f), ("embed", "mlp"))
    up = _param(self, "up", (d, f), ("embed", "mlp"))
    down = _param(self, "down", (f, d), ("mlp", "embed"))
    y = jax.nn.silu(_project(self, "gate", x, gate, view))
    y *= _project(self, "up", x, up, view)
    y = y.astype(self.config.compute_dtype)
    y = sharding.constrain(y, (view.rows, "length", "mlp"), view.mesh)
    return _project(self, "down", y, down, view)


class Block(nn.Module):
  """One layer, normed before attention and before the mlp."""

  config: DecoderConfig

  @nn.compact
  def __call__(self, x, view, cache):
    c = self.config
    attention_norm = _param(
      self, "attention_norm", (c.embed_dim,), ("embed",), _ones
    )
    mlp_norm = _param(self, "mlp_norm", (c.embed_dim,), ("embed",), _ones)
    y = layers.rms_norm(x, attention_norm, c.norm_eps).astype(c.compute_dtype)
    y, cache = Attention(c, name="attention")(y, view, cache)
    x = sharding.constrain(x + y, (view.rows, "length", None), view.mesh)
    y = layers.rms_norm(x, mlp_norm, c.norm_eps).astype(c.compute_dtype)
    x += Mlp(c, name="mlp")(y, view)
    x = sharding.constrain(x, (view.rows, "length", None), view.mesh)
    return x, cache


class Ends(nn.Module):
  """What stands before and after the layers."""

  config: DecoderConfig

  @nn.compact
  def __call__(self):
    v, d = self.config.vocab_size, self.config.embed_dim
    _param(self, "embedding", (v, d), ("vocab", "embed"))
    _param(self, "final_norm", (d,), ("embed",), _ones)
    if not self.config.tied:
      _param(self, "head", (d, v), ("embed", "vocab"))


def _declare(config: DecoderConfig, key: jax.Array) -> Params:
  """The parameters, each in the box that carries its logical axes."""
  ends_key, layers_key = jax.random.split(key)
  zero = jnp.zeros((1, 1), jnp.int32)
  view = _view(Inputs(zero, zero, zero, zero[0]), None, config, None)

  def layer(key):
    x = jnp.zeros((1, 1, config.embed_dim))
    return Block(config).init(key, x, view, None)["params"]

  stacked = jax.vmap(layer)(jax.random.split(layers_key, config.num_layers))
  return {**Ends(config).init(ends_key)["params"], "layers": stacked}


def init_params(config: DecoderConfig, key: jax.Array) -> Params:
  """Random float32 parameters; jit it with out_shardings to lay them out."""
  return nn.meta.unbox(_declare(config, key))


@functools.lru_cache(maxsize=32)
def _boxes(config: DecoderConfig) -> Params:
  """What `_declare` would make; tracing it takes a tenth of a second."""
  return jax.eval_shape(lambda: _declare(config, jax.random.key(0)))


def param_shapes(config: DecoderConfig) -> Params:
  """The tree of parameters as ShapeDtypeStructs."""
  return nn.meta.unbox(_boxes(config))


def param_axes(config: DecoderConfig) -> Params:
  """The tree of parameters as tuples of logical axes."""
  axes = jax.tree.map(
    lambda box: box.names,
    _boxes(config),
    is_leaf=lambda x: isinstance(x, nn.meta.AxisMetadata),
  )
  axes["layers"] = jax.tree.map(
    lambda names: ("layers", *names),
    axes["layers"],
    is_leaf=lambda x: isinstance(x, tuple),
  )
  return axes


def unstack(params: Params) -> Params:
  """The engine's layout: a list of layers in place of the stacked ones.

  Decoding goes through the layers one by one; slices of stacked weights would
  be copied in every call. With a cache `forward` takes either layout.
  """
  stacked = params["layers"]
  num_layers = stacked["mlp_norm"].shape[0]
  layered = [
    jax.tree.map(lambda p, i=i: p[i], stacked) for i in range(num_layers)
  ]
  return {**params, "layers": layered}


# -- cache ---------------------------------------------------------------------


def init_cache(
  config: DecoderConfig, num_pages: int, page_size: int, dtype: Any
) -> Cache:
  """One pool a layer; dtype float32, bfloat16 or int8 (`paged`)."""
  return [
    paged.init(
      num_pages, page_size, config.num_kv_heads, config.head_dim, dtype
    )
    for _ in range(config.num_layers)
  ]


def cache_axes(
  config: DecoderConfig, dtype: Any
) -> list[dict[str, sharding.Axes]]:
  """Of every leaf of a cache. Those with "length" have a place for each token
  of a page; one without would hold a state as it is behind a page."""
  return [paged.axes(dtype) for _ in range(config.num_layers)]


def fused(config: DecoderConfig, page_size: int, mesh: Mesh) -> bool:
  """Whether tokens are decoded by a kernel that reads the pool as it lies."""
  return kernels.implementation(mesh, page_size, config.head_dim) is not None


def rewinds(config: DecoderConfig) -> bool:
  """Whether a cache serves any beginning of what it holds."""
  del config
  return True


# -- forward -------------------------------------------------------------------


def forward(
  params: Params,
  inputs: Inputs,
  cache: Cache | None = None,
  pages: paged.Pages | None = None,
  *,
  config: DecoderConfig,
  mesh: Mesh | None = None,
) -> tuple[Float[Array, "B T D"], Cache | None]:
  """Hidden states after the final norm, in the compute dtype.

  Without a cache a token sees the earlier tokens of its own segment, and
  itself. With one, the T tokens of a row, at contiguous positions, are written
  to the row's pages and token t then sees all of them up to positions[b, t].
  What is behind is overwritten before it is seen, so padding at the end of a
  prompt needs no mask.

  Args:
    params: stacked, or as `unstack` returns them. "adapters", if there are any,
      in the form of the layers.
    inputs: rows of T tokens; T = 1 in decoding.
    cache: as `init_cache` makes it, or None.
    pages: where in the cache the rows are.
    config: sizes and switches.
    mesh: where the activations are laid; None on one device.

  Returns:
    Hidden states and the updated cache.
  """
  view = _view(inputs, pages, config, mesh)
  dtype = jnp.dtype(config.compute_dtype)
  x = products.rounded(params["embedding"][inputs.tokens], dtype)
  x = x.astype(jnp.float32)  # the sum over the layers
  x = sharding.constrain(x, (view.rows, "length", None), mesh)
  if cache is None:
    x = _scan(params, x, view, config)
  else:
    x, cache = _each(params, x, view, cache, config)
  scale = products.rounded(params["final_norm"], dtype)
  return layers.rms_norm(x, scale, config.norm_eps).astype(dtype), cache


_saves = jax.checkpoint_policies
_REMAT = {
  "none": None,
  # Weights' products: those of attention are batched, and as many as T^2.
  "dots": _saves.save_from_both_policies(
    _saves.dots_with_no_batch_dims_saveable,
    _saves.save_only_these_names(attention.SAVED),
  ),
  "full": _saves.nothing_saveable,
}


# A switch picks weights of a layer, and the others are theirs before a product.
_OF_WEIGHTS = {"cond", "reduce_precision", "convert_element_type", "reshape"}


def _all_but_weights(primitive, *_, **__) -> bool:
  """Keeps what a layer computes, and none of its weights: they are there."""
  return primitive.name not in _OF_WEIGHTS


def _keeps_scores(config: DecoderConfig, view: View) -> bool:
  """Whether attention is over rows so short that its products are no more than
  the others. (A policy reaches into what `attention` itself would forget.)"""
  where = view.segment_ids if view.spread is None else view.spread.segment_ids
  dims = config.head_dim, config.compute_dtype
  kind = attention.resolve(config.attention, view.mesh, *dims)
  return attention.keeps(kind, where.shape[-1], config.head_dim)


def _variables(layer: Any, adapter: Any) -> dict[str, Any]:
  """Of one `Block`."""
  return {"params": layer} | ({"adapters": adapter} if adapter else {})


def _scan(params, x, view, config):
  """The layers of a training pass, in one program for all of them.

  Layers that lie apart, as an engine has them, are picked by their number, so
  that there is a second copy of one at a time. (Written out one by one, 24 of
  d = 896 with adapters took 2.5 times as long to compile, and 10.5 GB beside
  their weights under every remat policy; "full" leaves 0.9 GB of these.)
  """
  layers = params["layers"]
  each_alone = isinstance(layers, list)

  def step(x, own):
    layer, adapter = own
    if each_alone:
      layer = jax.lax.switch(layer, [lambda w=w: w for w in layers])
    variables = _variables(layer, adapter)
    return Block(config).apply(variables, x, view, None)

  policy = _REMAT[config.remat]
  if config.remat == "dots" and _keeps_scores(config, view):
    policy = _saves.dots_saveable
  if policy is None and each_alone:
    policy = _all_but_weights
  if policy is not None:
    # In a scan's body nothing is there to be merged with what is run again.
    step = jax.checkpoint(step, prevent_cse=False, policy=policy)
  own = jnp.arange(config.num_layers) if each_alone else layers
  found = params.get("adapters")
  found = found and jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), found)
  x, _ = jax.lax.scan(step, x, (own, found), unroll=_unroll(config))
  return x


def _each(params, x, view, cache, config):
  """The layers one by one: a scan would copy the caches in every step."""
  if not isinstance(params["layers"], list):
    params = unstack(params)
  each = params.get("adapters") or [None] * config.num_layers
  updated = []

  @jax.jit  # is traced once for all layers
  def step(variables, x, entry):
    return Block(config).apply(variables, x, view, entry)

  for layer, adapter, entry in zip(params["layers"], each, cache, strict=True):
    x, entry = step(_variables(layer, adapter), x, entry)
    updated.append(entry)
  return x, updated


def _unroll(config: DecoderConfig) -> int:
  """Layers per iteration of the scan.

  XLA's CPU code gains a quarter from seeing several narrow layers at once. Wide
  layers and accelerators gain nothing: a train step of 30 layers, d = 576, then
  takes 21 s to compile instead of 6, a quarter more memory, and no less time.
  """
  if config.unroll:
    return config.unroll
  narrow = config.embed_dim <= 128 and jax.default_backend() == "cpu"
  return min(config.num_layers, 8) if narrow else 1


def _view(
  inputs: Inputs,
  pages: paged.Pages | None,
  config: DecoderConfig,
  mesh: Mesh | None,
) -> View:
  angles = layers.rope_angles(
    inputs.positions, config.head_dim, config.rope_theta, config.rope_scaling
  )
  if pages is not None:  # there is no scan over the layers to keep them
    angles = layers.computed_once(angles, inputs.positions)
  return View(
    inputs.positions,
    *angles,
    inputs.segment_ids,
    inputs.policy_index,
    inputs.spread,
    pages,
    mesh,
  )


def head(params: Params, config: DecoderConfig) -> Float[Array, "D V"]:
  """The output weights, the transposed embedding where they are tied."""
  return params["embedding"].T if config.tied else params["head"]
