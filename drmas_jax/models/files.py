"""Safetensors files: what they hold, and parts of it as arrays on devices.

A file is 8 bytes of length, a JSON header of that length, and the tensors'
bytes (https://github.com/huggingface/safetensors, "Format"). It is read and not
mapped: the pages of a mapped file count as the process's own memory for as long
as it is open, which for a whole checkpoint is as much as the weights.
"""

import gc
import hashlib
import json
import math
import operator
import pathlib
import time
import weakref
from typing import NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Sharding

# The header's word for each dtype that is read and written.
DTYPES = {
  "F32": np.dtype(np.float32),
  "BF16": np.dtype(ml_dtypes.bfloat16),
  "F16": np.dtype(np.float16),
}

# The part of a tensor that a shard holds: (start, stop) of each dim.
Span = tuple[tuple[int, int], ...]


class Tensor(NamedTuple):
  """Where a tensor is.

  Attributes:
    path: of its file.
    start: of its bytes in the file.
    spelled: its dtype in the header's word.
    shape: as the header says.
  """

  path: pathlib.Path
  start: int
  spelled: str
  shape: tuple[int, ...]

  @property
  def num_bytes(self) -> int:
    return math.prod(self.shape) * DTYPES[self.spelled].itemsize


def header(path: pathlib.Path) -> dict[str, Tensor]:
  """What a file holds, in its order.

  Raises:
    ValueError: it is no safetensors file, or only a part of one.
  """
  size = path.stat().st_size
  with path.open("rb") as file:
    length = int.from_bytes(file.read(8), "little")
    text = file.read(min(length, size))
  found, end = {}, 8 + length
  try:
    entries = json.loads(text)
    entries.pop("__metadata__", None)
    for name, entry in entries.items():
      first, last = map(operator.index, entry["data_offsets"])
      shape = tuple(map(operator.index, entry["shape"]))
      found[name] = Tensor(path, 8 + length + first, entry["dtype"], shape)
      end = max(end, 8 + length + last)
      known = entry["dtype"] in DTYPES
      if known and found[name].num_bytes != last - first:
        raise ValueError(f"{name}: {last - first} bytes cannot be {shape}")
  except (ValueError, KeyError, TypeError, AttributeError) as e:
    raise ValueError(
      f"{path}: cannot be read: no safetensors header ({e!r}); fetch the file "
      "again"
    ) from e
  if end != size:
    raise ValueError(
      f"{path}: cannot be read: it has {size} bytes, and its header asks for "
      f"{end}; fetch the file again"
    )
  return found


def read(
  tensor: Tensor, place: Sharding, block_bytes: int
) -> dict[Span, np.ndarray]:
  """The parts of a tensor that this process's devices hold.

  Blocks of whole rows are read, each once, and those that no part needs not at
  all. On the host there are the parts and one block.

  Args:
    tensor: of one or more dims.
    place: how it is laid on devices.
    block_bytes: at most so many at a time (but always one row).
  """
  dtype, shape = DTYPES[tensor.spelled], tensor.shape
  # JAX lets go of earlier parts, which it has copied, only when Python collects
  # garbage; the youngest generation takes microseconds.
  gc.collect(0)
  parts = {
    span: np.empty([stop - start for start, stop in span], dtype)
    for span in _spans(place, shape)
  }
  row_bytes = tensor.num_bytes // shape[0]
  step = max(1, block_bytes // row_bytes)
  for start in range(0, shape[0], step):
    stop = min(start + step, shape[0])
    touched = [s for s in parts if s[0][0] < stop and start < s[0][1]]
    if not touched:
      continue
    block = np.fromfile(
      tensor.path,
      np.uint8,
      (stop - start) * row_bytes,
      offset=tensor.start + start * row_bytes,
    )
    block = block.view(dtype).reshape(stop - start, *shape[1:])
    for span in touched:
      (first, last), *rest = span
      low, high = max(first, start), min(last, stop)
      columns = (slice(*dim) for dim in rest)
      parts[span][low - first : high - first] = block[
        (slice(low - start, high - start), *columns)
      ]
    del block  # before the next one is there
  return parts


def to_devices(
  parts: dict[Span, np.ndarray], place: Sharding, shape: tuple[int, ...]
) -> jax.Array:
  """The parts as one array, which on CPU may share their memory: they must not
  be written to any more."""
  arrays = [
    jax.device_put(parts[span], device)
    for span, devices in _spans(place, shape).items()
    for device in devices
  ]
  jax.block_until_ready(arrays)
  return jax.make_array_from_single_device_arrays(shape, place, arrays)


def let_go(held: list[weakref.ref[np.ndarray]]) -> None:
  """Waits a moment for JAX to free parts whose arrays are gone from devices.

  It does so in a thread of its own, and tells Python at a collection. Where an
  array on a CPU device is the part itself, there is nothing to wait for.
  """
  for _ in range(30):
    gc.collect(0)
    if all(part() is None for part in held):
      return
    time.sleep(0.001)


def digest(parts: dict[Span, np.ndarray]) -> str:
  """Of the bytes, to tell whether two tensors laid alike are equal."""
  found = hashlib.sha256()
  for span in sorted(parts):
    found.update(parts[span].view(np.uint8))
  return found.hexdigest()


def _spans(
  place: Sharding, shape: tuple[int, ...]
) -> dict[Span, list[jax.Device]]:
  """The distinct parts that this process holds, and the devices of each."""
  found: dict[Span, list[jax.Device]] = {}
  for device, index in place.addressable_devices_indices_map(shape).items():
    span = tuple(
      s.indices(size)[:2] for s, size in zip(index, shape, strict=True)
    )
    found.setdefault(span, []).append(device)
  return found
