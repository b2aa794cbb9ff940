"""Devices -> mesh slices, what they must hold, and the moves between them.

`plan` first works in numbers (which local devices, which mesh axes, how many
bytes), so that what cannot run is refused before any device work, and then
names the devices. A strategy is one function of the table `STRATEGIES`.

    policy    devices of every host     train mesh        rollout meshes
    solver    0 1 2 3                   over all hosts    this host's 0 1, 2 3
    verifier  4 5 6 7                   over all hosts    this host's 4 5, 6 7

An engine is one host's: hosts generate independently and train together. A
policy may have several engines on a host, each on a mesh of its own, whose
devices split weights and kv heads and not slots.
"""

import dataclasses
import functools
import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from drmas_jax import config as config_lib
from drmas_jax import hosts, sharding
from drmas_jax.config import Config, ConfigError
from drmas_jax.models import transformer
from drmas_jax.models.transformer import DecoderConfig

_GB = 10**9

Shape = tuple[int, int, int]  # of a mesh: data, fsdp, tensor


@dataclasses.dataclass(frozen=True)
class Layout:
  """A slice in numbers.

  Attributes:
    train: local devices (0 is a host's first) of the learner, the same on every
      host.
    rollout: local devices of each of a host's engines.
    train_shape: of the mesh over all hosts' `train` devices.
    rollout_shape: of the mesh of one engine, where data is 1.
  """

  train: tuple[int, ...]
  rollout: tuple[tuple[int, ...], ...]
  train_shape: Shape
  rollout_shape: Shape


@dataclasses.dataclass(frozen=True)
class Slice:
  """The devices of one backbone: its learner's, and this host's engines'."""

  train_mesh: Mesh
  rollout_meshes: tuple[Mesh, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
  """Where everything is.

  Attributes:
    slices: by policy.
    layouts: the same in numbers.
    memory: bytes by phase and local device, see `memory`.
  """

  slices: dict[str, Slice]
  layouts: dict[str, Layout]
  memory: dict[str, tuple[int, ...]]


def plan(
  config: Config,
  models: Mapping[str, DecoderConfig],
  devices: Sequence[jax.Device] | None = None,
) -> Plan:
  """Lays the policies out on devices (default: all of all hosts).

  Raises:
    ConfigError: it cannot be laid out, or does not fit the memory.
  """
  by_host: dict[int, list[jax.Device]] = {}
  for device in sorted(devices or jax.devices(), key=lambda d: d.id):
    by_host.setdefault(device.process_index, []).append(device)
  counts = {len(d) for d in by_host.values()}
  if len(counts) > 1:
    raise ConfigError(
      f"placement: hosts have {sorted(counts)} devices; all must have the same "
      "number; start the run on equal hosts"
    )
  grid = [by_host[h] for h in sorted(by_host)]
  here = by_host[jax.process_index()]
  layouts = lay_out(config, len(grid), len(here))
  needs = check_fits(
    config, models, len(grid), len(here), device_memory(config, here)
  )
  slices = {
    name: Slice(
      _mesh([row[i] for row in grid for i in layout.train], layout.train_shape),
      tuple(
        _mesh([here[i] for i in local], layout.rollout_shape)
        for local in layout.rollout
      ),
    )
    for name, layout in layouts.items()
  }
  return Plan(slices, layouts, needs)


def _mesh(devices: Sequence[jax.Device], shape: Shape) -> Mesh:
  """Host by host along the slowest axis, so that fsdp and tensor stay within
  a host where their sizes allow it."""
  return Mesh(np.array(devices).reshape(shape), sharding.AXES)


# -- strategies: (config, hosts, devices of one) -> policy -> local devices ----


def _shared(
  config: Config, num_hosts: int, num_local: int
) -> dict[str, tuple[int, ...]]:
  del num_hosts
  if config.placement.shares:
    raise ConfigError(
      f"placement.shares: {config.placement.shares} has no effect where "
      "placement.strategy='shared' gives every policy all devices; remove it, "
      "or set the strategy to 'split' or 'columns'"
    )
  return dict.fromkeys(sorted(config.policies), tuple(range(num_local)))


def _split(
  config: Config, num_hosts: int, num_local: int
) -> dict[str, tuple[int, ...]]:
  if num_hosts > 1:
    raise ConfigError(
      f"placement.strategy: 'split' is for one host, and there are "
      f"{num_hosts}; set it to 'columns'"
    )
  return _columns(config, num_hosts, num_local)


def _columns(
  config: Config, num_hosts: int, num_local: int
) -> dict[str, tuple[int, ...]]:
  del num_hosts
  shares = {
    n: config.placement.shares.get(n, 1) for n in sorted(config.policies)
  }
  total = sum(shares.values())
  if min(shares.values()) < 1 or num_local % total:
    raise ConfigError(
      f"placement.shares: {shares} add up to {total}, and a host has "
      f"{num_local} devices; allowed are shares >= 1 whose sum divides "
      f"{num_local}; change them, or set placement.strategy='shared'"
    )
  slices, start = {}, 0
  for name, share in shares.items():
    end = start + share * num_local // total
    slices[name], start = tuple(range(start, end)), end
  return slices


Strategy = Callable[[Config, int, int], dict[str, tuple[int, ...]]]
STRATEGIES: dict[str, Strategy] = {
  "shared": _shared,
  "split": _split,
  "columns": _columns,
}


# -- numbers -------------------------------------------------------------------


def lay_out(
  config: Config, num_hosts: int, num_local: int
) -> dict[str, Layout]:
  """Every policy's slice, for hosts of `num_local` devices each.

  Raises:
    ConfigError: every fault, one line each.
  """
  owned = STRATEGIES[config.placement.strategy](config, num_hosts, num_local)
  faults: list[str] = []
  if config.data.num_tasks % num_hosts:
    faults.append(
      f"data.num_tasks: {config.data.num_tasks} tasks cannot be shared evenly "
      f"by {num_hosts} hosts; allowed are multiples of {num_hosts}"
    )
  layouts = {}
  for name, local in owned.items():
    try:
      layouts[name] = _layout(config.placement, name, local, num_hosts)
    except ConfigError as e:
      faults.append(str(e))
    else:
      faults += _check_rows(name, config.policies[name], layouts[name])
  if faults:
    raise ConfigError("\n".join(faults))
  return layouts


def _layout(
  placement: config_lib.Placement,
  name: str,
  local: tuple[int, ...],
  num_hosts: int,
) -> Layout:
  aside = placement.rollout_devices
  if aside >= len(local):
    raise ConfigError(
      f"placement.rollout_devices: {aside} leaves no training device of the "
      f"{len(local)} that {name!r} has on a host; allowed is less than "
      f"{len(local)}; lower it, or 0 to use the same devices in turn"
    )
  cut = len(local) - aside
  train, rollout = local[:cut], local[cut:] or local
  wide = _shape("train_mesh", placement.train_mesh, name, num_hosts * cut)
  if cut % wide[2]:
    raise ConfigError(
      f"placement.train_mesh.tensor: {wide[2]} reaches over hosts, and rows "
      f"stay on theirs; allowed are divisors of the {cut} training devices "
      f"that {name!r} has on a host"
    )
  num, *own = _shape("rollout_mesh", placement.rollout_mesh, name, len(rollout))
  each = len(rollout) // num
  engines = tuple(rollout[i * each : (i + 1) * each] for i in range(num))
  return Layout(train, engines, wide, (1, *own))


def _shape(key: str, mesh: config_lib.Mesh, name: str, num: int) -> Shape:
  """Sizes of the axes for `num` devices."""
  sizes = dataclasses.asdict(mesh)
  free = [axis for axis, size in sizes.items() if size == 0]
  known = math.prod(size for size in sizes.values() if size)
  text = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
  if len(free) > 1:
    raise ConfigError(
      f"placement.{key}: {text}: allowed is one axis of size 0 (what is left); "
      f"give {free[1]} a size"
    )
  if num % known or (not free and known != num):
    raise ConfigError(
      f"placement.{key}: {text} does not lay out the {num} devices of "
      f"{name!r}; allowed are sizes whose product is {num}; set one axis to 0 "
      "to take what is left"
    )
  sizes.update({axis: num // known for axis in free})
  return sizes["data"], sizes["fsdp"], sizes["tensor"]


def _check_rows(
  name: str, policy: config_lib.Policy, layout: Layout
) -> list[str]:
  """The rows of a micro-batch must divide among the devices that hold them."""
  num, shape = policy.micro_batch, layout.train_shape
  ways = shape[0] * shape[1]
  if policy.frozen or num % ways == 0:
    return []
  return [
    f"policies.{name}.micro_batch: {num} rows cannot be laid on a mesh of "
    f"data={shape[0]} x fsdp={shape[1]}; allowed are multiples of {ways}; "
    f"set it to {ways * -(-num // ways)}, or use fewer devices"
  ]


def pool(sizes: config_lib.Engine) -> tuple[int, int]:
  """(most pages of an engine's cache, tokens of a page).

  Page 0 is nobody's, and a sequence that goes on from the middle of a page and
  forks within another holds these two beside its own.
  """
  size = sizes.page_size or (128 if jax.default_backend() == "tpu" else 64)
  num = sizes.num_slots * -(-sizes.max_length // size)
  if sizes.cache_tokens:
    num = -(-sizes.cache_tokens // size)
  return 3 + num, size


# -- bytes ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Bytes:
  """What one backbone puts on each of its devices.

  Attributes:
    state: parameters, and two moments of a trained policy, in float32.
    update: the gradient's sum and one micro-batch's gradient, in float32, and
      the activations of that micro-batch.
    score: activations of scoring a micro-batch again; 0 if it never does.
    engine: of one engine: weights, cache at its largest, twice where decoding
      works on a copy, and the activations of a prefill.
  """

  state: int
  update: int
  score: int
  engine: int


def measure(
  policy: config_lib.Policy, model: DecoderConfig, layout: Layout
) -> Bytes:
  """Exact for arrays, by the very shapes and axes that lay them out;
  activations are estimated."""
  train = AbstractMesh(layout.train_shape, sharding.AXES)
  shapes, axes = transformer.param_shapes(model), transformer.param_axes(model)
  params = tree_bytes(shapes, axes, train, np.float32)
  length = max((*policy.row_buckets, policy.engine.max_length))
  rows = policy.micro_batch // math.prod(layout.train_shape[:2])
  run = functools.partial(activation_bytes, model, rows, length, train.shape)
  scores = not policy.frozen and policy.old_logprobs == "learner"
  return Bytes(
    state=params if policy.frozen else 3 * params,
    update=0
    if policy.frozen
    else 2 * params + run(policy.compute_dtype, policy.remat, grad=True),
    score=run(policy.compute_dtype, policy.remat) if scores else 0,
    engine=_engine_bytes(policy, model, layout),
  )


def _engine_bytes(
  policy: config_lib.Policy, model: DecoderConfig, layout: Layout
) -> int:
  mesh = AbstractMesh(layout.rollout_shape, sharding.AXES)
  sizes, dtype = policy.engine, policy.rollout_dtype
  weights = tree_bytes(
    transformer.param_shapes(model), transformer.param_axes(model), mesh, dtype
  )
  _, page_size = pool(sizes)
  copies = 1 if transformer.fused(model, page_size, None) else 2
  longest = (sizes.prefill_buckets or (sizes.max_length,))[-1]
  prefill = activation_bytes(
    *(model, sizes.prefill_rows, longest, mesh.shape, dtype), page=page_size
  )
  return weights + copies * cache_bytes(policy, model, mesh) + prefill


def cache_bytes(
  policy: config_lib.Policy, model: DecoderConfig, mesh: Any
) -> int:
  """Of an engine's cache at its largest, on each device of its mesh."""
  dtype = jnp.dtype(policy.engine.cache_dtype or policy.rollout_dtype)
  init = functools.partial(
    transformer.init_cache, model, *pool(policy.engine), dtype
  )
  axes = transformer.cache_axes(model, dtype)
  return tree_bytes(jax.eval_shape(init), axes, mesh)


def tree_bytes(shapes: Any, axes: Any, mesh: Any, dtype: Any = None) -> int:
  """Bytes on each device of a mesh, of arrays laid out by `sharding.spec`.

  Args:
    shapes: tree of ShapeDtypeStruct.
    axes: tree of tuples of logical axes.
    mesh: a Mesh or an AbstractMesh.
    dtype: if not each leaf's own.
  """
  placed = sharding.shardings(axes, shapes, mesh)
  return sum(
    math.prod(s.shard_shape(x.shape)) * jnp.dtype(dtype or x.dtype).itemsize
    for x, s in zip(
      jax.tree.leaves(shapes), jax.tree.leaves(placed), strict=True
    )
  )


def activation_bytes(
  model: DecoderConfig,
  rows: int,
  length: int,
  mesh: Mapping[str, int],
  dtype: str,
  remat: bool = False,
  *,
  grad: bool = False,
  page: int = 0,
) -> int:
  """An estimate of the temporary bytes of a forward (and backward) pass.

  Of a layer: the residual stream and its norms (4 D a token), q, k, v before
  and after their rotation, the MLP's four products, and the attention scores
  and weights [H, T, T] in float32, which this decoder forms. (An engine's
  prefill attends page by page: [H, T, page], and a sum so far [H, T, C].) A
  backward pass keeps that of every layer, or with `remat` the stream alone. The
  head adds the logits of one chunk (64 MB), or of all tokens of a small
  vocabulary. Beside XLA's own plan for a float32 update of 8 layers, d = 256,
  without remat on CPU: 564 of 581 MB. With remat or bfloat16 it is too low
  there by up to 2.7 times, because XLA's CPU code saves little by either.

  Args:
    model: sizes.
    rows: on one device.
    length: tokens of a row.
    mesh: sizes of the axes by name.
    dtype: of activations.
    remat: layers are run again in the backward pass.
    grad: there is a backward pass.
    page: tokens that attention looks at at a time; 0: all.
  """
  tokens, item = rows * length, jnp.dtype(dtype).itemsize
  stream = tokens * model.embed_dim * item
  heads = model.num_heads + 2 * model.num_kv_heads
  inner = tokens * (2 * heads * model.head_dim + 4 * model.mlp_dim) * item
  seen = page + model.head_dim if page else length
  scores = 2 * 4 * tokens * model.num_heads * seen
  layer = 4 * stream + (inner + scores) // mesh["tensor"]
  logits = min(4 * tokens * model.vocab_size, 64 << 20)
  if not grad:
    return layer + logits
  kept = model.num_layers * (stream if remat else layer)
  return kept + 2 * layer + 2 * logits


def memory(
  config: Config,
  models: Mapping[str, DecoderConfig],
  layouts: Mapping[str, Layout],
) -> dict[str, tuple[int, ...]]:
  """{phase: bytes by local device}, the same on every host.

  rollout: training state and all engines, which work at the same time; of a
    policy's engines every device has a part of one.
  score, update: engines are released; backbones on one device take turns, so
    the largest counts, and every training state stays.
  """
  used = [i for x in layouts.values() for i in (*x.train, *sum(x.rollout, ()))]
  num = 1 + max(used)
  state, engines, score, update = (np.zeros(num, np.int64) for _ in range(4))
  for name, layout in layouts.items():
    size = measure(config.policies[name], models[name], layout)
    train, rollout = list(layout.train), list(sum(layout.rollout, ()))
    state[train] += size.state
    engines[rollout] += size.engine
    score[train] = np.maximum(score[train], size.score)
    update[train] = np.maximum(update[train], size.update)
  phases = {"rollout": state + engines, "score": state + score}
  phases["update"] = state + update
  return {p: tuple(int(b) for b in values) for p, values in phases.items()}


def device_memory(config: Config, devices: Sequence[jax.Device]) -> int:
  """Bytes of one device: the config's, the device's own word, or on CPU its
  part of the machine's memory."""
  if config.placement.device_memory_gb:
    return int(config.placement.device_memory_gb * _GB)
  stats = devices[0].memory_stats()
  if stats and "bytes_limit" in stats:
    return stats["bytes_limit"]
  machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  return machine // len(devices)


def check_fits(
  config: Config,
  models: Mapping[str, DecoderConfig],
  num_hosts: int,
  num_local: int,
  limit: int,
) -> dict[str, tuple[int, ...]]:
  """The plan's `memory`; refuses one that needs over `limit` of a device.

  Raises:
    ConfigError: with the bytes by phase, and the strategies that would fit.
  """
  found = memory(config, models, lay_out(config, num_hosts, num_local))
  if _peak(found) <= limit:
    return found
  p = config.placement
  fitting = []
  for strategy in sorted(STRATEGIES.keys() - {p.strategy}):
    other = dataclasses.replace(
      config, placement=dataclasses.replace(p, strategy=strategy, shares={})
    )
    try:
      there = lay_out(other, num_hosts, num_local)
    except ConfigError:
      continue
    if _peak(memory(other, models, there)) <= limit:
      fitting.append(repr(strategy))
  raise ConfigError(
    f"placement.strategy: {p.strategy!r} needs up to "
    f"{_peak(found) / _GB:.2f} GB of a device; allowed is {limit / _GB:.2f} "
    f"(placement.device_memory_gb={p.device_memory_gb:g}, where 0 asks the "
    "device); "
    + (f"{' or '.join(fitting)} would fit" if fitting else _OTHER_FIX)
    + "\n"
    + table(found)
  )


_OTHER_FIX = (
  "no strategy fits; use more devices, a smaller micro_batch or engine "
  "(num_slots, cache_tokens, max_length), remat=True, or "
  "rollout_dtype='bfloat16'"
)


def _peak(found: Mapping[str, Sequence[int]]) -> int:
  return max(max(values) for values in found.values())


def table(found: Mapping[str, Sequence[int]]) -> str:
  """Gigabytes by phase (rows) and local device (columns)."""
  num = len(next(iter(found.values())))
  lines = ["  GB on device" + "".join(f"{i:>9}" for i in range(num))]
  for phase, values in found.items():
    lines.append(f"  {phase:<12}" + "".join(f"{v / _GB:>9.3f}" for v in values))
  return "\n".join(lines)


def describe(plan: Plan) -> str:
  """One line: the devices, and what the fullest of them must hold."""
  devices = {d for s in plan.slices.values() for d in s.train_mesh.devices.flat}
  kind = next(iter(devices)).device_kind
  return (
    f"{len(devices)} device(s), {kind}, at most "
    f"{_peak(plan.memory) / _GB:.2f} GB on one"
  )


# -- moves ---------------------------------------------------------------------


def sync(
  params: Any,
  targets: Sequence[Any],
  dtype: Any,
  layout: Callable[[Any], Any] | None = None,
) -> list[Any]:
  """Train slice -> rollout slice: a whole copy for each of this host's engines.

  On the same devices one program casts, lays out and gives every engine, of
  this host and the others, its copy; their shards then become local arrays. To
  other devices the cast arrays are copied, from this host's own devices.
  Nothing goes from host to host through their memories, and all hosts must
  enter it.

  The result never shares a buffer with `params`, also where neither dtype nor
  layout changes: the next train step donates its buffers, and an engine that
  still runs must see neither that nor changed weights.

  Args:
    params: on the train mesh.
    targets: of each engine, in the order of their devices, a tree of
      NamedSharding on its mesh, in the form that `layout` returns. They differ
      in nothing but their devices.
    dtype: of the result.
    layout: applied within the program, such as `transformer.unstack`.
  """
  leaves, tree = jax.tree.flatten(targets[0])
  source = jax.tree.leaves(params)[0].sharding
  cast = functools.partial(_program, dtype, layout)
  used = set().union(*(jax.tree.leaves(t)[0].device_set for t in targets))
  aside = not used <= source.device_set
  if aside and source.is_fully_addressable:
    moved = cast(None, None)(params)
    return [jax.device_put(moved, target) for target in targets]
  if aside:
    shapes = jax.eval_shape(layout or (lambda x: x), params)
    leaves = _spread(jax.tree.leaves(shapes), source.mesh)
  everywhere = tuple(_for_all(source.mesh, s) for s in leaves)
  with hosts.together("sync"):
    copies = cast(everywhere, tree)(params)
  if aside:
    moved = jax.tree.map(_local, copies, jax.tree.unflatten(tree, leaves))
    return [jax.device_put(moved, target) for target in targets]
  return [jax.tree.map(_local, copies, target) for target in targets]


def checksum(params: Any) -> str:
  """Equal for equal bits, on whatever mesh they lie; all hosts must enter it.

  A sum of the words of each leaf, each times an odd number of its place, modulo
  2^32: in whatever order devices add, the sum is the same.
  """
  with hosts.together("checksum"):
    sums = np.asarray(_word_sums(jax.tree.leaves(params)))
  return hashlib.sha256(sums.tobytes()).hexdigest()[:16]


@jax.jit
def _word_sums(leaves: Sequence[jax.Array]) -> jax.Array:
  sums = []
  for x in leaves:
    unsigned = jnp.uint32 if x.dtype.itemsize == 4 else jnp.uint16
    words = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    place = jnp.zeros(x.shape, jnp.uint32)
    for dim, size in enumerate(x.shape):
      here = jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim)
      place = place * np.uint32(size) + here
    mixed = (place ^ (place >> 15)) * np.uint32(0x9E3779B1)
    sums.append(jnp.sum(words * (mixed | 1), dtype=jnp.uint32))
  return jnp.stack(sums)


def _local(x: jax.Array, where: NamedSharding) -> jax.Array:
  """One copy out of an array that all groups of devices have one of: that on
  the devices of `where`."""
  shards = [
    shard.data
    for shard in x.addressable_shards
    if shard.device in where.device_set
  ]
  return jax.make_array_from_single_device_arrays(x.shape, where, shards)


@functools.cache
def _program(dtype: Any, layout: Any, leaves: Any, tree: Any) -> Any:
  """Casts and lays out; where `leaves` is None, as the input is."""

  def cast(params):
    params = params if layout is None else layout(params)
    return jax.tree.map(lambda x: x.astype(dtype), params)

  if leaves is None:
    return jax.jit(cast)
  return jax.jit(cast, out_shardings=jax.tree.unflatten(tree, leaves))


def _spread(shapes: Sequence[Any], mesh: Mesh) -> list[NamedSharding]:
  """Over this host's devices of the train mesh, by the first dim that divides:
  a stop on the way to rollout devices of their own."""
  local = np.array(
    [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
  )
  here = Mesh(local, ("fsdp",))
  specs = []
  for shape in shapes:
    dim = next((i for i, n in enumerate(shape.shape) if n % len(local) == 0), 0)
    whole = not shape.shape or shape.shape[dim] % len(local)
    parts = () if whole else (*[None] * dim, "fsdp")
    specs.append(NamedSharding(here, PartitionSpec(*parts)))
  return specs


def _for_all(mesh: Mesh, local: NamedSharding) -> NamedSharding:
  """A copy laid out as `local` for every group of as many devices of `mesh`:
  groups lie along an axis "copy" that no dim is laid on."""
  shape = local.mesh.devices.shape
  devices = mesh.devices.reshape(-1, *shape)
  over = Mesh(devices, ("copy", *local.mesh.axis_names))
  return NamedSharding(over, local.spec)


def global_batch(rows: Any, mesh: Mesh, leading: int = 1) -> Any:
  """Host-local rows -> global arrays, laid over the mesh's batch axes.

  Args:
    rows: tree of numpy arrays [M, b, ..] with the b rows of this host.
    mesh: of the train slice.
    leading: the dim that counts rows; 0 for arrays [b, ..].

  Returns:
    Arrays [M, b * hosts, ..]; the rows of a host stay on it.
  """
  return jax.tree.map(
    lambda x: jax.make_array_from_process_local_data(
      sharding.rows(mesh, x.ndim, leading), x
    ),
    rows,
  )


def fetch(tree: Any) -> Any:
  """Any arrays as numpy, whole on every host.

  Where arrays span hosts all of them must call it, with equal trees.
  """
  with hosts.together("fetch"):
    return jax.tree.map(_fetch, tree)


def _fetch(x: Any) -> np.ndarray:
  if isinstance(x, jax.Array) and not x.is_fully_addressable:
    if x.is_fully_replicated:
      return np.asarray(x.addressable_data(0))
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))
  return np.asarray(x)
