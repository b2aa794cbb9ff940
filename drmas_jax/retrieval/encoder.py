"""Texts to vectors: an encoder of the BERT family in JAX.

It reads a Hugging Face folder as sentence-transformers publishes it: MiniLM,
e5, bge, gte and others of `model_type` "bert", with their pooling, prefixes and
length limit. Without the files of sentence-transformers it is mean pooling and
unit length, as e5's authors have it.

    vectors = Encoder(folder).encode(texts)      [texts, D] float32

Shapes are few, `_ROWS` by `_LENGTHS`: a program is compiled once for each.
"""

import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

_ROWS = (8, 64)  # of a block, for each device
_LENGTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_WEIGHTS = "model.safetensors"
_PRECISION = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class BertConfig:
  """Sizes, from config.json.

  Attributes:
    layers: L.
    heads: H.
    epsilon: of every layer norm.
    pooling: "mean" over tokens, or "cls", the first one.
    normalise: whether vectors have length 1.
  """

  layers: int
  heads: int
  epsilon: float
  pooling: str
  normalise: bool


class Layer(NamedTuple):
  """Of all layers: each array has a leading dim L. Products are x @ w + b."""

  qkv: Any  # [L, D, 3 D]
  qkv_bias: Any  # [L, 3 D]
  out: Any  # [L, D, D]
  out_bias: Any
  norm1: Any  # [L, 2, D] scale and shift, behind attention
  up: Any  # [L, D, F]
  up_bias: Any
  down: Any  # [L, F, D]
  down_bias: Any
  norm2: Any  # [L, 2, D] behind the two products


class Params(NamedTuple):
  """Of an encoder."""

  words: Any  # [V, D]
  positions: Any  # [longest, D], the one token type's row added
  norm: Any  # [2, D]
  layers: Layer


def forward(
  params: Params,
  tokens: Int[Array, "B T"],
  mask: Int[Array, "B T"],
  *,
  config: BertConfig,
) -> Float[Array, "B D"]:
  """Vectors of texts (https://arxiv.org/abs/1810.04805, section 3).

  Args:
    params: of the encoder.
    tokens: ids, padded.
    mask: 1 where there is a token.
    config: of the encoder.
  """
  x = params.words[tokens] + params.positions[: tokens.shape[1]]
  x = _norm(x, params.norm, config.epsilon)
  bias = jnp.where(mask[:, None, None, :] > 0, 0.0, -jnp.inf)

  def block(x, layer):
    return _block(x, layer, bias, config), None

  x, _ = jax.lax.scan(block, x, params.layers)
  if config.pooling == "cls":
    x = x[:, 0]
  else:
    weights = mask[:, :, None].astype(x.dtype)
    x = (x * weights).sum(1) / weights.sum(1)
  if config.normalise:
    x = x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
  return x


def _block(x, layer: Layer, bias, config: BertConfig):
  """A layer of [B, T, D]. Products are of two or three dims: on CPU, XLA is
  twice as slow with more."""
  B, T, D = x.shape
  heads = (B, T, 3, config.heads, D // config.heads)
  qkv = _product(x.reshape(B * T, D), layer.qkv, layer.qkv_bias)
  qkv = qkv.reshape(heads).transpose(2, 0, 3, 1, 4)
  q, k, v = qkv.reshape(3, -1, T, heads[-1])
  scores = jnp.matmul(q, k.swapaxes(1, 2), precision=_PRECISION)
  scores = scores.reshape(B, -1, T, T) / math.sqrt(heads[-1]) + bias
  probs = jax.nn.softmax(scores).reshape(-1, T, T)
  mixed = jnp.matmul(probs, v, precision=_PRECISION)
  mixed = mixed.reshape(B, -1, T, heads[-1]).swapaxes(1, 2).reshape(B * T, D)
  x = x.reshape(B * T, D)
  x = x + _product(mixed, layer.out, layer.out_bias)
  x = _norm(x, layer.norm1, config.epsilon)
  hidden = _product(x, layer.up, layer.up_bias)
  hidden = jax.nn.gelu(hidden, approximate=False)
  hidden = _product(hidden, layer.down, layer.down_bias)
  return _norm(x + hidden, layer.norm2, config.epsilon).reshape(B, T, D)


def _product(x, w, b):
  return jnp.matmul(x, w, precision=_PRECISION) + b


def _norm(x, scale_shift, epsilon: float):
  mean = x.mean(-1, keepdims=True)
  variance = jnp.square(x - mean).mean(-1, keepdims=True)
  scale, shift = scale_shift
  return (x - mean) * jax.lax.rsqrt(variance + epsilon) * scale + shift


class Encoder:
  """An encoder on the devices of a mesh: texts are split over all of them."""

  def __init__(
    self,
    folder: str | pathlib.Path,
    mesh: Mesh,
    prefixes: Sequence[str] | None = None,
  ):
    """Reads the folder.

    Args:
      folder: of the checkpoint.
      mesh: its axes' names do not matter.
      prefixes: before a query, and before a passage; None: the folder's own.

    Raises:
      ValueError: a file is missing, or is of another kind of encoder.
    """
    folder = pathlib.Path(folder).expanduser()
    self.settings = read_settings(folder)
    if prefixes is not None:
      both = dict(zip(_PROMPTS, prefixes, strict=True))
      self.settings = dataclasses.replace(self.settings, prefixes=both)
    self.config, params = load(folder, self.settings)
    rows = PartitionSpec(mesh.axis_names)
    self._rows = NamedSharding(mesh, rows)
    whole = NamedSharding(mesh, PartitionSpec())
    self._params = jax.device_put(params, whole)
    self._size = mesh.size
    self._forward = jax.jit(
      functools.partial(forward, config=self.config), out_shardings=whole
    )
    with (folder / _WEIGHTS).open("rb") as file:
      self._digest = hashlib.file_digest(file, "sha256").hexdigest()
    self._tokenizer = _tokenizer(folder)

  @property
  def dim(self) -> int:
    """D of the vectors."""
    return self._params.words.shape[1]

  def described(self) -> dict[str, Any]:
    """What vectors of passages depend on, as plain JSON."""
    settings = dataclasses.asdict(self.settings)
    settings["prefixes"] = settings["prefixes"]["passage"]
    return settings | {"weights": self._digest}

  def encode(
    self,
    texts: Sequence[str],
    kind: str,
    tell: Callable[[int], Any] = lambda num: None,
  ) -> np.ndarray:
    """Vectors [texts, D] float32.

    Args:
      texts: what is too long loses its end.
      kind: "query" or "passage": which prefix they get.
      tell: called with the number of each few that are done.
    """
    prefix = self.settings.prefixes[kind]
    texts = [
      prefix + text.encode("utf-8", "replace").decode() for text in texts
    ]
    ids = self._tokenizer(
      texts,
      truncation=True,
      max_length=self.settings.max_tokens,
      return_attention_mask=False,
      return_token_type_ids=False,
    )["input_ids"]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    found = np.empty((len(ids), self.dim), np.float32)
    most = self._size * _ROWS[-1]
    for start in range(0, len(order), most):
      block = order[start : start + most]
      found[block] = self._vectors([ids[i] for i in block])
      tell(len(block))
    return found

  def _vectors(self, ids: Sequence[Sequence[int]]) -> np.ndarray:
    rows = self._size * next(r for r in _ROWS if r * self._size >= len(ids))
    longest = max(map(len, ids))
    length = next(n for n in _LENGTHS if n >= longest)
    length = min(length, self.settings.max_tokens)
    tokens = np.zeros((rows, length), np.int32)
    mask = np.zeros((rows, length), np.int32)
    mask[:, 0] = 1  # of a row that there is not, so that its mean is a number
    for row, one in enumerate(ids):
      tokens[row, : len(one)], mask[row, : len(one)] = one, 1
    put = jax.device_put((tokens, mask), self._rows)
    return np.asarray(self._forward(self._params, *put))[: len(ids)]


def _tokenizer(folder: pathlib.Path) -> Any:
  if not (folder / "tokenizer.json").is_file():
    raise ValueError(
      f"{folder}: has no tokenizer.json; name a Hugging Face folder with one"
    )
  os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
  import transformers

  return transformers.PreTrainedTokenizerFast.from_pretrained(
    str(folder), local_files_only=True
  )


@dataclasses.dataclass(frozen=True)
class Settings:
  """How a folder's encoder is to be used.

  Attributes:
    prefixes: what stands before a "query" and a "passage".
    max_tokens: of a text, special ones included.
    pooling: "mean" or "cls".
    normalise: whether vectors get length 1.
  """

  prefixes: Mapping[str, str]
  max_tokens: int
  pooling: str
  normalise: bool


_PROMPTS = {"query": ("query",), "passage": ("passage", "document", "corpus")}


def read_settings(folder: pathlib.Path) -> Settings:
  """From the files of sentence-transformers, as far as they are there.

  Raises:
    ValueError: a file that is no JSON, or a pooling that is not offered.
  """
  modules = _json(folder / "modules.json", [])
  kinds = {m["type"].rpartition(".")[2]: m["path"] for m in modules}
  pooling = "mean"
  if "Pooling" in kinds:
    pooling = _pooling(folder / kinds["Pooling"] / "config.json")
  prompts = _json(folder / "config_sentence_transformers.json", {})
  prompts = prompts.get("prompts") or {}
  longest = _json(folder / "config.json", {}).get("max_position_embeddings")
  limit = _json(folder / "sentence_bert_config.json", {}).get("max_seq_length")
  return Settings(
    prefixes={
      kind: next((prompts[n] for n in names if n in prompts), "")
      for kind, names in _PROMPTS.items()
    },
    max_tokens=min(n for n in (longest, limit, 512) if n),
    pooling=pooling,
    normalise=not modules or "Normalize" in kinds,
  )


def _pooling(path: pathlib.Path) -> str:
  raw = _json(path, {})
  known = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
  modes = [
    key for key, on in raw.items() if key.startswith("pooling_mode") and on
  ]
  if len(modes) != 1 or modes[0] not in known:
    raise ValueError(
      f"{path}: pooling {modes} is not offered; allowed are one of "
      f"{', '.join(known)}"
    )
  return known[modes[0]]


def _json(path: pathlib.Path, default: Any) -> Any:
  if not path.is_file():
    return default
  try:
    return json.loads(path.read_text())
  except ValueError as e:
    raise ValueError(f"{path}: not JSON: {e}") from e


def load(folder: pathlib.Path, settings: Settings) -> tuple[BertConfig, Params]:
  """Sizes and fp32 weights of a folder.

  Raises:
    ValueError: a file or a tensor is missing, or the encoder is of another
      kind.
  """
  from safetensors import SafetensorError
  from safetensors.flax import load_file

  config = _config(folder, settings)
  path = folder / _WEIGHTS
  if not path.is_file():
    raise ValueError(f"{path}: no such file; is this an encoder's folder?")
  try:
    raw = load_file(path)
  except SafetensorError as e:
    raise ValueError(f"{path}: cannot be read: {e}; fetch it again") from e
  tensors = {
    name.removeprefix("bert."): np.asarray(value, np.float32)
    for name, value in raw.items()
  }
  try:
    return config, _params(tensors, config.layers)
  except KeyError as e:
    raise ValueError(f"{path}: the tensor {e} is missing") from e


def _config(folder: pathlib.Path, settings: Settings) -> BertConfig:
  path = folder / "config.json"
  raw = _json(path, None)
  if raw is None:
    raise ValueError(f"{path}: no such file; is this an encoder's folder?")
  for key, value in _ONLY.items():
    if raw.get(key, value) != value:
      raise ValueError(
        f"{path}: {key} {raw[key]!r} is not offered; allowed is {value!r}"
      )
  try:
    return BertConfig(
      layers=raw["num_hidden_layers"],
      heads=raw["num_attention_heads"],
      epsilon=raw["layer_norm_eps"],
      pooling=settings.pooling,
      normalise=settings.normalise,
    )
  except KeyError as e:
    raise ValueError(f"{path}: the key {e} is missing") from e


# What `forward` computes.
_ONLY = {
  "model_type": "bert",
  "hidden_act": "gelu",
  "position_embedding_type": "absolute",
}


def _params(tensors: Mapping[str, np.ndarray], num_layers: int) -> Params:
  def norm(name: str) -> np.ndarray:
    return np.stack([tensors[f"{name}.weight"], tensors[f"{name}.bias"]])

  def every(name: str, read=tensors.__getitem__) -> np.ndarray:
    each = (f"encoder.layer.{i}.{name}" for i in range(num_layers))
    return np.stack([read(path) for path in each])

  def product(*names: str) -> tuple[np.ndarray, np.ndarray]:
    weights = [every(f"{name}.weight").swapaxes(1, 2) for name in names]
    biases = [every(f"{name}.bias") for name in names]
    return np.concatenate(weights, 2), np.concatenate(biases, 1)

  own = "attention.self"
  layers = Layer(
    *product(f"{own}.query", f"{own}.key", f"{own}.value"),
    *product("attention.output.dense"),
    every("attention.output.LayerNorm", norm),
    *product("intermediate.dense"),
    *product("output.dense"),
    every("output.LayerNorm", norm),
  )
  types = tensors["embeddings.token_type_embeddings.weight"]
  return Params(
    tensors["embeddings.word_embeddings.weight"],
    tensors["embeddings.position_embeddings.weight"] + types[0],
    norm("embeddings.LayerNorm"),
    layers,
  )
