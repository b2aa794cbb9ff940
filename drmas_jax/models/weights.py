"""Hugging Face folders: config.json and safetensors, read and written.

Tensors are read one by one from memory-mapped files, straight into the shards
of this process's devices. On the host at most the local shards of one stacked
parameter exist at a time (and the pages of the file that the kernel keeps).

Loading is strict (rule 23): every tensor of the file is consumed and every
parameter filled, or a ValueError names the tensors.
"""

import dataclasses
import functools
import importlib
import json
import math
import pathlib
import pkgutil
import shutil
import types
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from drmas_jax import sharding
from drmas_jax.models import transformer
from drmas_jax.models.transformer import DecoderConfig, Params

CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"

# Buffers that old checkpoints carry; the rotation is computed.
_IGNORED_SUFFIX = "rotary_emb.inv_freq"


# -- config --------------------------------------------------------------------


@functools.cache
def _families() -> dict[str, types.ModuleType]:
  """The files of this folder that declare an ARCHITECTURE, by file name."""
  package = importlib.import_module(__package__)
  modules = {
    m.name: importlib.import_module(f"{__package__}.{m.name}")
    for m in pkgutil.iter_modules(package.__path__)
  }
  return {n: m for n, m in modules.items() if hasattr(m, "ARCHITECTURE")}


def read_config(folder: str | pathlib.Path) -> DecoderConfig:
  """Sizes and switches from a folder's config.json.

  Raises:
    ValueError: no such folder or file, an unknown architecture (names those
      there are), a missing key, or a switch that the decoder does not have.
  """
  path = _folder(folder) / CONFIG
  if not path.is_file():
    raise ValueError(f"{path}: no such file; is this a checkpoint folder?")
  raw = _object(path)
  named = (raw.get("architectures") or [raw.get("model_type")])[0]
  known = {}
  for family in _families().values():
    known |= {family.ARCHITECTURE: family, family.MODEL_TYPE: family}
  if named not in known:
    supported = sorted(f.ARCHITECTURE for f in _families().values())
    raise ValueError(
      f"{path}: architecture {named!r} is not supported; allowed are "
      f"{', '.join(supported)}"
    )
  try:
    config = known[named].read(raw)
  except KeyError as e:
    raise ValueError(f"{path}: the key {e} is missing") from e
  except (TypeError, AttributeError, ValueError) as e:
    raise ValueError(f"{path}: {e}") from e
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if field.type is int and not isinstance(value, int):
      raise ValueError(
        f"{path}: what gives {field.name} is {value!r}; it must be an integer"
      )
  return config


def _object(path: pathlib.Path) -> dict[str, Any]:
  """A JSON file that must hold an object."""
  try:
    raw = json.loads(path.read_text())
  except ValueError as e:
    raise ValueError(f"{path}: not JSON: {e}") from e
  if not isinstance(raw, dict):
    raise ValueError(f"{path}: holds no JSON object; fetch the file again")
  return raw


def _folder(folder: str | pathlib.Path) -> pathlib.Path:
  path = pathlib.Path(folder)
  if not path.is_dir():
    raise ValueError(
      f"{path}: no such checkpoint folder; give a Hugging Face folder with "
      f"{CONFIG} and {WEIGHTS}"
    )
  return path


# -- load ----------------------------------------------------------------------


def load(
  folder: str | pathlib.Path,
  config: DecoderConfig,
  mesh: Mesh | None = None,
  dtype: Any = np.float32,
) -> Params:
  """The parameters of a checkpoint folder, laid on a mesh.

  Args:
    folder: with model.safetensors, or shards and their index.
    config: as `read_config` returns it.
    mesh: of this or several processes; None for one device.
    dtype: of the parameters.

  Returns:
    The tree that `transformer.forward` takes, stacked by layer.

  Raises:
    ValueError: a file is missing or broken; tensors are missing, surplus or
      misshapen; or a head in the file contradicts `tie_word_embeddings`.
  """
  files = _open(_folder(folder))
  shapes = transformer.param_shapes(config)
  axes = transformer.param_axes(config)
  names = _families()[config.family].names(config)
  if config.tied:
    _check_tied(files, names.pop("head"), names["embedding"], folder)
  _check_tensors(files, names, shapes, axes, folder)

  def one(path, shape, axes):
    place = (
      SingleDeviceSharding(jax.local_devices()[0])
      if mesh is None
      else sharding.shardings(axes, shape, mesh)
    )
    read = functools.partial(
      _read, files, names[_key(path)], axes, shape.shape, np.dtype(dtype)
    )
    return jax.make_array_from_callback(shape.shape, place, read)

  return jax.tree_util.tree_map_with_path(one, shapes, axes)


def _open(folder: pathlib.Path) -> dict[str, Any]:
  """Tensor name -> the open file that holds it."""
  if (folder / WEIGHTS).is_file():
    parts = [WEIGHTS]
  elif (folder / INDEX).is_file():
    shards = _object(folder / INDEX).get("weight_map")
    if not isinstance(shards, dict) or not shards:
      raise ValueError(f"{folder / INDEX}: has no weight_map; fetch it again")
    parts = sorted(set(shards.values()))
    if absent := [p for p in parts if not (folder / p).is_file()]:
      raise ValueError(
        f"{folder / INDEX}: names files that are not there: "
        f"{', '.join(absent)}; fetch them"
      )
  else:
    raise ValueError(f"{folder}: has neither {WEIGHTS} nor {INDEX}")
  files = {}
  for part in parts:
    try:
      file = safe_open(folder / part, framework="np")
    except SafetensorError as e:
      raise ValueError(f"{folder / part}: cannot be read: {e}") from e
    files |= dict.fromkeys(file.keys(), file)
  return files


def _check_tied(
  files: dict[str, Any], head: str, embedding: str, folder: pathlib.Path
) -> None:
  """A tied head may be in the file if it is the embedding; then drops it."""
  if head not in files or embedding not in files:
    return
  tensors = (files[n].get_tensor(n) for n in (head, embedding))
  if not np.array_equal(*tensors):
    raise ValueError(
      f"{folder}: {head} differs from {embedding}, but {CONFIG} says "
      "tie_word_embeddings=true; set it to false, or remove the tensor"
    )
  del files[head]


def _check_tensors(
  files: dict[str, Any],
  names: dict[str, str],
  shapes: Params,
  axes: Params,
  folder: pathlib.Path,
) -> None:
  """Every tensor consumed, every parameter filled, every shape as expected."""
  wanted = {}

  def want(path, shape, axes):
    stacked = axes[0] == "layers"
    each = _file_shape(axes[stacked:], shape.shape[stacked:])
    for i in range(shape.shape[0] if stacked else 1):
      wanted[names[_key(path)].format(i)] = each

  jax.tree_util.tree_map_with_path(want, shapes, axes)
  there = {n for n in files if not n.endswith(_IGNORED_SUFFIX)}
  faults = [f"{n} is missing" for n in sorted(wanted.keys() - there)]
  faults += [f"{n} is surplus" for n in sorted(there - wanted.keys())]
  for name in sorted(there & wanted.keys()):
    found = tuple(files[name].get_slice(name).get_shape())
    if found != wanted[name]:
      faults.append(f"{name} is {found}, {CONFIG} asks for {wanted[name]}")
  if faults:
    raise ValueError(
      f"{folder}: the tensors do not fit {CONFIG}: {'; '.join(faults)}"
    )


def _read(
  files: dict[str, Any],
  name: str,
  axes: sharding.Axes,
  shape: tuple[int, ...],
  dtype: np.dtype,
  index: tuple[slice, ...],
) -> np.ndarray:
  """One shard of a parameter; always a copy, as the file may change later."""
  if axes[0] != "layers":
    tensor = files[name].get_tensor(name)
    return np.array(_to_ours(tensor, axes, shape)[index], dtype)
  numbers = range(shape[0])[index[0]]
  out = None
  for row, i in enumerate(numbers):
    tensor = files[name.format(i)].get_tensor(name.format(i))
    shard = _to_ours(tensor, axes[1:], shape[1:])[index[1:]]
    if out is None:
      out = np.empty((len(numbers), *shard.shape), dtype)
    out[row] = shard
  return out


def _key(path: tuple) -> str:
  return jax.tree_util.keystr(path, simple=True, separator="/")


# -- the two layouts of a tensor -----------------------------------------------


def _is_product(axes: sharding.Axes) -> bool:
  """Whether a parameter is multiplied with rows; the embedding is not."""
  return len(axes) > 1 and "embed" in axes and axes[0] != "vocab"


def _file_shape(axes: sharding.Axes, shape: tuple[int, ...]) -> tuple[int, ...]:
  """[out, in] of a product's weight, as torch keeps it; heads are merged."""
  if axes[0] == "vocab":
    return shape
  if not _is_product(axes):
    return (math.prod(shape),)
  # Of our dims [*in, *out] one side is the embedding dim alone.
  num_in = 1 if axes[0] == "embed" else len(shape) - 1
  return math.prod(shape[num_in:]), math.prod(shape[:num_in])


def _to_ours(
  tensor: np.ndarray, axes: sharding.Axes, shape: tuple[int, ...]
) -> np.ndarray:
  return (tensor.T if _is_product(axes) else tensor).reshape(shape)


def _to_file(tensor: np.ndarray, axes: sharding.Axes) -> np.ndarray:
  shape = _file_shape(axes, tensor.shape)
  if _is_product(axes):
    tensor = tensor.reshape(shape[::-1]).T
  return np.ascontiguousarray(tensor.reshape(shape))


# -- save ----------------------------------------------------------------------


def save(
  folder: str | pathlib.Path,
  params: Params,
  config: DecoderConfig,
  like: str | pathlib.Path | None = None,
) -> None:
  """Writes a Hugging Face folder that `load` and transformers read.

  Args:
    folder: made if it is not there.
    params: stacked; host arrays, or arrays that this process can address.
    config: as for `load`.
    like: a checkpoint folder whose other files (config.json, tokenizer, chat
      template) are copied; without it config.json is written from `config`.
  """
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  family = _families()[config.family]
  names, tensors = family.names(config), {}

  def one(path, axes, value):
    name, value = names[_key(path)], np.asarray(value)
    if axes[0] != "layers":
      tensors[name] = _to_file(value, axes)
      return
    for i, layer in enumerate(value):
      tensors[name.format(i)] = _to_file(layer, axes[1:])

  axes = transformer.param_axes(config)
  jax.tree_util.tree_map_with_path(
    one, axes, params, is_leaf=lambda x: isinstance(x, tuple)
  )
  save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
  raw = family.write(config)
  if like is not None:
    raw = json.loads((_folder(like) / CONFIG).read_text())
    _copy_others(_folder(like), folder)
  raw.pop("dtype", None)
  raw["torch_dtype"] = str(params["embedding"].dtype)
  (folder / CONFIG).write_text(json.dumps(raw, indent=2) + "\n")


def _copy_others(source: pathlib.Path, target: pathlib.Path) -> None:
  """Tokenizer, chat template and the like: all that is not weights."""
  for path in source.iterdir():
    text = path.suffix in (".json", ".jinja", ".txt", ".model")
    if text and path.name not in (CONFIG, INDEX):
      shutil.copyfile(path, target / path.name)
