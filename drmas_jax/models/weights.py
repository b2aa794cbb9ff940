"""Hugging Face folders: config.json and safetensors, read and written.

Each tensor is read once, straight into the shards of this process's devices.

Loading is strict (rule 23): every tensor of the file is consumed and every
parameter filled, or a ValueError names the tensors.
"""

import contextlib
import dataclasses
import functools
import importlib
import json
import math
import pathlib
import pkgutil
import shutil
import types
import weakref
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import (
  Mesh,
  NamedSharding,
  PartitionSpec,
  Sharding,
  SingleDeviceSharding,
)

from drmas_jax import sharding
from drmas_jax.models import files, transformer
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


def tensor_names(config: DecoderConfig) -> dict[str, str]:
  """Parameter -> name of its tensor; {} is the layer's number."""
  return _families()[config.family].names(config)


def public_sizes(name: str) -> DecoderConfig | None:
  """Of a public checkpoint that a family's table names, such as
  "Qwen/Qwen3-4B"; None if none does."""
  for family in _families().values():
    if name in family.SIZES:
      return family.SIZES[name]
  return None


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
  if quantized := raw.get("quantization_config"):
    raise ValueError(
      f"{path}: quantization_config: {quantized}: quantized weights cannot be "
      "trained; take the checkpoint in bfloat16, float16 or float32"
    )
  try:
    config = known[named].read(raw)
  except KeyError as e:
    raise ValueError(f"{path}: the key {e} is missing") from e
  except ValueError as e:
    raise ValueError(f"{path}: {e}") from e
  except (TypeError, AttributeError, ArithmeticError) as e:
    raise ValueError(
      f"{path}: a value is not what its key asks for ({e}); compare it with "
      "the checkpoint as it was published"
    ) from e
  for field in dataclasses.fields(config):
    value, kinds = getattr(config, field.name), _KINDS.get(field.type)
    if kinds and not isinstance(value, kinds):
      raise ValueError(
        f"{path}: what gives {field.name} is {value!r}; it must be of "
        f"{field.type.__name__}"
      )
  heads, kv_heads = config.num_heads, config.num_kv_heads
  few = min(heads, kv_heads, config.head_dim) < 1
  if few or heads % kv_heads or config.head_dim % 2:
    raise ValueError(
      f"{path}: {heads} heads of {config.head_dim} and {kv_heads} kv heads; "
      "allowed are heads that the kv heads share evenly, of an even size"
    )
  return config


# What is taken for a field of this type.
_KINDS = {int: int, float: (int, float), bool: bool}


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

  First what stands before and after the layers, then layer by layer: tensors go
  to the devices as the file has them, and a program there turns and casts them,
  and puts a layer in its place of the stacked parameters. Each tensor is read
  once, and on the host there is at most this process's part of one tensor and
  a quarter of the largest.

  Args:
    folder: with model.safetensors, or shards and their index.
    config: as `read_config` returns it.
    mesh: of this or several processes; None for one device.
    dtype: of the parameters.

  Returns:
    The tree that `transformer.forward` takes, stacked by layer.

  Raises:
    ValueError: a file is missing, surplus or broken, or tensors are missing,
      surplus, misshapen or quantized (all before a device is touched); or a
      head in the file contradicts `tie_word_embeddings`.
  """
  folder = _folder(folder)
  tensors = _open(folder)
  _check_tensors(tensors, config, folder)
  names = tensor_names(config)
  programs = _programs(config, mesh, np.dtype(dtype))
  block_bytes = max(t.num_bytes for t in tensors.values()) // 4

  twin = names["head"] if config.tied and names["head"] in tensors else None
  digests, held = {}, []

  def read(key, name):
    return files.read(tensors[name], programs.places[key], block_bytes)

  def fetch(key, layer=0):
    name = names[key].format(layer)
    parts = read(key, name)
    held[:] = map(weakref.ref, parts.values())
    if twin and key == "embedding":
      digests[name] = files.digest(parts)
    return files.to_devices(parts, programs.places[key], tensors[name].shape)

  params = {}
  for key, program in programs.ends.items():
    params[key] = jax.block_until_ready(program(fetch(key)))
    files.let_go(held)
  for name, digest in digests.items():
    if files.digest(read("embedding", twin)) != digest:
      raise ValueError(
        f"{folder}: {twin} differs from {name}, but {CONFIG} says "
        "tie_word_embeddings=true; set it to false, or remove the tensor"
      )
  layers = programs.empty()
  for i in range(config.num_layers):
    layer = {key: fetch(key, i) for key in layers}
    # Waited for, or the tensors of many layers would lie on the devices.
    layers = jax.block_until_ready(programs.put(layers, layer, i))
  return _tree(config, params | layers)


class _Programs(NamedTuple):
  """From tensors as files have them to parameters, on the devices.

  Attributes:
    places: parameter -> how a tensor of it is laid before the program.
    ends: parameter outside the layers -> (tensor) -> parameter.
    empty: () -> the layers' parameters, of zeros.
    put: (layers, tensors of a layer, its number) -> layers.
  """

  places: dict[str, Sharding]
  ends: dict[str, Callable]
  empty: Callable
  put: Callable


@functools.lru_cache(maxsize=8)
def _programs(
  config: DecoderConfig, mesh: Mesh | None, dtype: np.dtype
) -> _Programs:
  shapes = _flat(transformer.param_shapes(config))
  axes = _flat(transformer.param_axes(config))
  if mesh is None:
    one = SingleDeviceSharding(jax.local_devices()[0])
    where, places = dict.fromkeys(shapes, one), dict.fromkeys(shapes, one)
  else:
    where = sharding.shardings(axes, shapes, mesh)
    places = {
      k: NamedSharding(mesh, _file_spec(a, where[k].spec))
      for k, a in axes.items()
    }

  def turn(key, tensor):
    own, shape = axes[key], shapes[key].shape
    stacked = own[0] == "layers"
    return _to_ours(tensor, own[stacked:], shape[stacked:]).astype(dtype)

  def empty():
    return {k: jnp.zeros(shapes[k].shape, dtype) for k in stacked}

  def put(layers, layer, number):
    return {
      k: jax.lax.dynamic_update_index_in_dim(x, turn(k, layer[k]), number, 0)
      for k, x in layers.items()
    }

  stacked = {k: w for k, w in where.items() if axes[k][0] == "layers"}
  return _Programs(
    places,
    {
      k: jax.jit(functools.partial(turn, k), out_shardings=w)
      for k, w in where.items()
      if k not in stacked
    },
    jax.jit(empty, out_shardings=stacked),
    jax.jit(put, out_shardings=stacked, donate_argnums=0),
  )


def _parts(folder: pathlib.Path) -> list[str]:
  """Names of the files with tensors; no other may lie beside them, as it would
  be a part of this checkpoint that is not read, or of another one (rule 23)."""
  if (folder / WEIGHTS).is_file():
    parts = [WEIGHTS]
  elif (folder / INDEX).is_file():
    shards = _object(folder / INDEX).get("weight_map")
    if not isinstance(shards, dict) or not shards:
      raise ValueError(f"{folder / INDEX}: has no weight_map; fetch it again")
    parts = sorted(set(map(str, shards.values())))
    if absent := [p for p in parts if not (folder / p).is_file()]:
      raise ValueError(
        f"{folder / INDEX}: names files that are not there: "
        f"{', '.join(absent)}; fetch them"
      )
  else:
    raise ValueError(
      f"{folder}: has neither {WEIGHTS} nor {INDEX}"
      + (", and only safetensors are read" if _others(folder) else "")
      + f": {', '.join(_others(folder)) or 'no weights at all'}; fetch or "
      "save the checkpoint as safetensors"
    )
  found = {p.name for p in folder.glob("*.safetensors") if p.is_file()}
  if surplus := sorted(found - set(parts)):
    raise ValueError(
      f"{folder}: {', '.join(surplus)} would not be read: the weights are in "
      f"{', '.join(parts[:3])}{' ..' * (len(parts) > 3)}; remove what is of "
      "another checkpoint"
    )
  return parts


def _open(folder: pathlib.Path) -> dict[str, files.Tensor]:
  """Tensor name -> where it is; rotary buffers are left out."""
  found: dict[str, files.Tensor] = {}
  for part in _parts(folder):
    for name, tensor in files.header(folder / part).items():
      if name in found:
        raise ValueError(
          f"{folder}: {name} is in {found[name].path.name} and in {part}; "
          "fetch the checkpoint again into an empty folder"
        )
      found[name] = tensor
  return {k: v for k, v in found.items() if not k.endswith(_IGNORED_SUFFIX)}


def _check_tensors(
  tensors: dict[str, files.Tensor], config: DecoderConfig, folder: pathlib.Path
) -> None:
  """Every tensor consumed, every parameter filled, every shape as expected."""
  family = _families()[config.family]
  names = family.names(config)
  wanted = _file_shapes(
    names, transformer.param_shapes(config), transformer.param_axes(config)
  )
  if config.tied and names["head"] in tensors:  # a copy of the embedding
    wanted[names["head"]] = wanted[names["embedding"]]
  misfits = []
  for name in sorted(tensors.keys() & wanted.keys()):
    _, _, spelled, shape = tensors[name]
    if shape != wanted[name]:
      misfits.append(f"{name} is {shape}, {CONFIG} asks for {wanted[name]}")
    if spelled not in files.DTYPES:
      misfits.append(
        f"{name} is of {spelled}, allowed are {', '.join(files.DTYPES)}; take "
        "the checkpoint before its quantization"
      )
  faults = [
    *_first(
      [f"{n} is surplus" for n in sorted(tensors.keys() - wanted.keys())]
    ),
    *_first(
      [f"{n} is missing" for n in sorted(wanted.keys() - tensors.keys())]
    ),
    *_first(misfits),
  ]
  if faults:
    raise ValueError(
      f"{folder}: the tensors do not fit {CONFIG}, which is of the family "
      f"{config.family} ({family.ARCHITECTURE}): {'; '.join(faults)}"
    )


def _first(faults: list[str], num: int = 8) -> list[str]:
  more = len(faults) - num
  return faults[:num] + [f"and {more} more"] * (more > 0)


def _file_shapes(
  names: dict[str, str], shapes: Params, axes: Params
) -> dict[str, tuple[int, ...]]:
  """Tensor name -> its shape in a file."""
  found = {}

  def one(path, shape, axes):
    stacked = axes[0] == "layers"
    each = _file_shape(axes[stacked:], shape.shape[stacked:])
    for i in range(shape.shape[0] if stacked else 1):
      found[names[_key(path)].format(i)] = each

  jax.tree_util.tree_map_with_path(one, shapes, axes)
  return found


def _others(folder: pathlib.Path) -> list[str]:
  """Weights in other formats."""
  kinds = (".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5")
  return sorted(p.name for p in folder.iterdir() if p.suffix in kinds)


def _flat(tree: Any) -> dict[str, Any]:
  """{"layers/attention/q": leaf, ..}"""
  leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=sharding.is_axes)
  return {_key(path): leaf for path, leaf in leaves}


def _tree(config: DecoderConfig, flat: dict[str, Any]) -> Params:
  return jax.tree_util.tree_map_with_path(
    lambda path, _: flat[_key(path)], transformer.param_shapes(config)
  )


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
  num_in = _num_in(axes)
  return math.prod(shape[num_in:]), math.prod(shape[:num_in])


def _file_spec(axes: sharding.Axes, spec: PartitionSpec) -> PartitionSpec:
  """Of a tensor (of one layer), so that each device has what it will hold: a
  merged dim is laid as its first, which is the one that is sharded."""
  stacked = axes[0] == "layers"
  axes, parts = axes[stacked:], spec[stacked:]
  if axes[0] == "vocab":
    return PartitionSpec(*parts)
  if not _is_product(axes):
    return PartitionSpec(parts[0])
  return PartitionSpec(parts[_num_in(axes)], parts[0])


def _num_in(axes: sharding.Axes) -> int:
  """Of a product's dims [*in, *out] one side is the embedding dim alone."""
  return 1 if axes[0] == "embed" else len(axes) - 1


def _to_ours(
  tensor: jax.Array, axes: sharding.Axes, shape: tuple[int, ...]
) -> jax.Array:
  return (tensor.T if _is_product(axes) else tensor).reshape(shape)


def _to_file(tensor: np.ndarray, axes: sharding.Axes) -> np.ndarray:
  shape = _file_shape(axes, tensor.shape)
  if _is_product(axes):
    tensor = tensor.reshape(shape[::-1]).T
  return np.ascontiguousarray(tensor.reshape(shape))


# -- save ----------------------------------------------------------------------

# How a header spells a dtype.
_SPELLED = {dtype.name: spelled for spelled, dtype in files.DTYPES.items()}

Layout = dict[str, dict[str, str]]  # file name -> tensor name -> its dtype


def save(
  folder: str | pathlib.Path,
  params: Params,
  config: DecoderConfig,
  like: str | pathlib.Path | None = None,
  dtype: str | None = None,
) -> None:
  """Writes a Hugging Face folder that `load` and transformers read.

  Tensors are written one by one, each to its place in its file: on the host
  there are one leaf of `params` and one tensor at a time.

  Args:
    folder: made if it is not there.
    params: stacked; each leaf an array that this process can address, or a
      function without arguments that returns one, called when its turn comes.
    config: as for `load`.
    like: a checkpoint folder to be like: the same files hold the same tensors
      in the same order and dtypes, and its other files (config.json, tokenizer,
      chat template) are copied. Only what `load` does not take of it (a second
      copy of a tied head, rotary buffers) is left out. Without it there is one
      file, and config.json is written from `config`.
    dtype: "float32", "bfloat16" or "float16"; None: as in `like`, or the
      parameters' own.

  Raises:
    ValueError: `like` lacks a tensor, or has it in another shape or dtype than
      can be written.
  """
  folder, axes = pathlib.Path(folder), transformer.param_axes(config)
  names = tensor_names(config)
  shapes = _file_shapes(names, transformer.param_shapes(config), axes)
  if like is None:
    dtype = dtype or str(params["embedding"].dtype)
    layout = {WEIGHTS: dict.fromkeys(sorted(shapes), "")}
  else:
    layout = _layout(_folder(like), config, shapes)
  if dtype is not None:
    layout = {
      file: dict.fromkeys(tensors, _SPELLED[dtype])
      for file, tensors in layout.items()
    }
  folder.mkdir(parents=True, exist_ok=True)
  if like is not None:
    _copy_others(pathlib.Path(like), folder)
  if dtype is not None:
    _write_config(folder, config, like, dtype)
  if set(layout) != {WEIGHTS}:
    _write_index(folder, pathlib.Path(like), layout, shapes)
  _write_tensors(folder, layout, shapes, params, names, axes)


def _layout(
  folder: pathlib.Path,
  config: DecoderConfig,
  shapes: dict[str, tuple[int, ...]],
) -> Layout:
  """Where a folder has the tensors in `shapes`, and in which dtype."""
  tensors = _open(folder)
  _check_tensors(tensors, config, folder)
  layout: Layout = {}
  for name, tensor in tensors.items():
    if name in shapes:
      layout.setdefault(tensor.path.name, {})[name] = tensor.spelled
  return layout


def _write_header(
  file: BinaryIO, tensors: dict[str, str], shapes: dict[str, tuple[int, ...]]
) -> dict[str, int]:
  """Byte for byte as the safetensors library; tensor name -> its place."""
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  end = 0
  for name, spelled in tensors.items():
    start = end
    end += math.prod(shapes[name]) * files.DTYPES[spelled].itemsize
    header[name] = {
      "dtype": spelled,
      "shape": shapes[name],
      "data_offsets": [start, end],
    }
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)
  file.write(len(text).to_bytes(8, "little") + text)
  return {n: file.tell() + header[n]["data_offsets"][0] for n in tensors}


def _write_tensors(
  folder: pathlib.Path,
  layout: Layout,
  shapes: dict[str, tuple[int, ...]],
  params: Params,
  names: dict[str, str],
  axes: Params,
) -> None:
  """Parameter by parameter, so in turns to all files."""
  with contextlib.ExitStack() as stack:
    places = {}
    for part, tensors in layout.items():
      file = stack.enter_context((folder / part).open("wb"))
      for name, start in _write_header(file, tensors, shapes).items():
        places[name] = file, start, files.DTYPES[tensors[name]]

    def put(name, tensor, axes):
      file, start, dtype = places[name]
      tensor = _to_file(np.asarray(tensor), axes).astype(dtype, copy=False)
      file.seek(start)
      file.write(tensor.reshape(-1).view(np.uint8))

    def one(path, axes, value):
      name, value = names[_key(path)], value() if callable(value) else value
      if axes[0] != "layers":
        put(name, value, axes)
        return
      for i in range(value.shape[0]):
        put(name.format(i), value[i], axes[1:])

    jax.tree_util.tree_map_with_path(
      one, axes, params, is_leaf=lambda x: isinstance(x, tuple)
    )


def _write_index(
  folder: pathlib.Path,
  like: pathlib.Path,
  layout: Layout,
  shapes: dict[str, tuple[int, ...]],
) -> None:
  """Of several files, as transformers writes it."""
  index = _object(like / INDEX)
  index["weight_map"] = {n: part for part, ts in layout.items() for n in ts}
  size = sum(
    math.prod(shapes[name]) * files.DTYPES[spelled].itemsize
    for tensors in layout.values()
    for name, spelled in tensors.items()
  )
  index["metadata"] = index.get("metadata", {}) | {"total_size": size}
  text = json.dumps(index, indent=2, sort_keys=True)
  (folder / INDEX).write_text(f"{text}\n")


def _write_config(
  folder: pathlib.Path,
  config: DecoderConfig,
  like: str | pathlib.Path | None,
  dtype: str,
) -> None:
  """config.json, which names the dtype of the tensors."""
  if like is None:
    raw = _families()[config.family].write(config)
  else:
    raw = _object(pathlib.Path(like) / CONFIG)
  raw.pop("dtype", None)  # transformers 5; it reads the older key too
  raw["torch_dtype"] = dtype
  (folder / CONFIG).write_text(json.dumps(raw, indent=2) + "\n")


def _copy_others(source: pathlib.Path, target: pathlib.Path) -> None:
  """All that is not weights: config.json, tokenizer, chat template."""
  for path in source.iterdir():
    text = path.suffix in (".json", ".jinja", ".txt", ".model")
    if text and not path.name.endswith(".index.json"):
      with contextlib.suppress(shutil.SameFileError):
        shutil.copyfile(path, target / path.name)
