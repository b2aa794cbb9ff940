"""Devices -> mesh slices, what they must hold, and the moves between them.

`plan` first works in numbers (which local devices, which mesh axes, how many
bytes), so that what cannot run is refused before any device work, and then
names the devices. A strategy is one function of the table `STRATEGIES`.

    backbone  devices of every host     train mesh        rollout meshes
    solver    0 1 2 3                   over all hosts    this host's 0 1, 2 3
    verifier  4 5 6 7                   over all hosts    this host's 4 5, 6 7

An engine is one host's: hosts generate independently and train together. A
backbone (a policy, or several on one set of weights) may have several engines
on a host, each on a mesh of its own, whose devices split weights and kv heads
and not slots.
"""

import dataclasses
import functools
import hashlib
import math
import os
import pathlib
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from drmas_jax import batching, decoding, hosts, optimizers, sharding
from drmas_jax import config as config_lib
from drmas_jax.config import Config, ConfigError
from drmas_jax.models import adapters, attention, transformer
from drmas_jax.models.transformer import DecoderConfig

_GB = 10**9
_SAMPLING = 6  # float32 arrays [slots, V] that a decode step has beside logits

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
    slices: by backbone (`Config.backbones`).
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
  *,
  train: bool = True,
) -> Plan:
  """Lays the backbones out on devices (default: all of all hosts).

  Args:
    config: of the run.
    models: sizes by policy.
    devices: of all hosts.
    train: False plans no learner.

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
  _check_host_memory(config, here[0])
  needs = check_fits(
    config, models, len(grid), len(here), device_memory(config, here), train
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


def _check_host_memory(config: Config, device: jax.Device) -> None:
  kinds = [memory.kind for memory in device.addressable_memories()]
  faults = [
    f"policies.{name}.optimizer.offload: True needs a memory of kind "
    f"{optimizers.HOST!r}, and {device.device_kind} has {', '.join(kinds)}; "
    "allowed is False; write that"
    for name in config.trained
    if config.policies[name].optimizer.offload and optimizers.HOST not in kinds
  ]
  if faults:
    raise ConfigError("\n".join(faults))


def _mesh(devices: Sequence[jax.Device], shape: Shape) -> Mesh:
  """Host by host along the slowest axis, so that fsdp and tensor stay within
  a host where their sizes allow it."""
  return Mesh(np.array(devices).reshape(shape), sharding.AXES)


# -- strategies: (config, hosts, devices of one) -> backbone -> local devices --


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
  return dict.fromkeys(config.backbones, tuple(range(num_local)))


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
    name: max(config.placement.shares.get(n, 1) for n in policies)
    for name, policies in config.backbones.items()
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
  """Every backbone's slice, for hosts of `num_local` devices each.

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


def prefill_rows(sizes: config_lib.Engine) -> int:
  """Most prompts that an engine prefills together."""
  return sizes.prefill_rows or (1 if jax.default_backend() == "cpu" else 16)


def lanes(sizes: config_lib.Engine) -> int:
  """Slots that an engine decodes together: all, or on CPU one of the equal
  parts of at most 32 that they are divided into."""
  num = sizes.num_slots
  if jax.default_backend() != "cpu":
    return num
  return -(-num // -(-num // 32))


# -- bytes ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Bytes:
  """What one backbone puts on each of its devices.

  Attributes:
    state: parameters in float32, and the optimizer's state of a trained policy,
      where it does not lie in the host's memory.
    update: the gradient's sum and one micro-batch's gradient, in float32, the
      activations of that micro-batch, and what an optimizer's state in the
      host's memory takes while it visits.
    score: activations of scoring a micro-batch again; 0 if it never does.
    engine: of one engine: weights, cache at its largest, where decoding works
      on a copy of pages also all of these, and the activations of a prefill or
      of sampling.
  """

  state: int
  update: int
  score: int
  engine: int


def measure(
  policies: Sequence[config_lib.Policy],
  model: DecoderConfig,
  layout: Layout,
  *,
  train: bool = True,
) -> Bytes:
  """Exact for arrays, by the very shapes and axes that lay them out;
  activations are estimated.

  Args:
    policies: of a backbone; those with adapters come first.
    model: sizes.
    layout: the backbone's slice.
    train: whether there is a learner.
  """
  policy = policies[0]
  mesh = AbstractMesh(layout.train_shape, sharding.AXES)
  shapes, axes = transformer.param_shapes(model), transformer.param_axes(model)
  frozen = not train or policy.frozen
  run = functools.partial(_most_bytes, policy, model, layout.train_shape)
  base, engine_bytes = 0, _engine_bytes(policy, model, layout)
  own, own_axes = shapes, axes
  if policy.adapter is not None:
    num = sum(p.adapter is not None for p in policies)
    base = tree_bytes(shapes, axes, mesh, policy.compute_dtype)
    own = adapters.shapes(shapes["layers"], policy.adapter, num)
    own_axes = adapters.axes(axes["layers"], policy.adapter)
    if _one_copy(policy, layout):
      engine_bytes -= base
  params = tree_bytes(own, own_axes, mesh, np.float32)
  rule = policy.optimizer
  if jax.default_backend() == "cpu":  # whose memory is the host's
    rule = dataclasses.replace(rule, offload=False)
  stay, visit = optimizers.state_bytes(rule, own_axes, own, mesh)
  scores = not frozen and policy.old_logprobs == "learner"
  return Bytes(
    state=base + (params if frozen else params + stay),
    update=0 if frozen else visit + 2 * params + run(grad=True),
    score=run(grad=False) if scores else 0,
    engine=engine_bytes,
  )


def _one_copy(policy: config_lib.Policy, layout: Layout) -> bool:
  """Whether learner and engine read the same arrays below adapters."""
  return (
    policy.compute_dtype == policy.rollout_dtype
    and layout.rollout == (layout.train,)
    and layout.rollout_shape == layout.train_shape
  )


def _most_bytes(
  policy: config_lib.Policy, model: DecoderConfig, shape: Shape, *, grad: bool
) -> int:
  """Of a micro-batch's activations, at the row length that takes the most."""
  shards = math.prod(shape[:2])
  mesh = AbstractMesh(shape, sharding.AXES).shape
  return max(
    activation_bytes(
      model,
      batching.micro_rows(policy.micro_tokens, length, shards)
      // shards
      * length,
      length,
      mesh,
      policy.compute_dtype,
      remat=policy.remat if grad else None,
      kind=attention.resolve(
        policy.attention, None, model.head_dim, policy.compute_dtype
      ),
    )
    for length in batching.row_buckets(policy)
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
  cache = cache_bytes(policy, model, mesh)
  if not transformer.fused(model, page_size, None):
    # A copy for every slot of a run, also of a page that many share.
    most = dataclasses.replace(sizes, cache_tokens=0)
    alone = dataclasses.replace(policy, engine=most)
    cache += cache_bytes(alone, model, mesh)
  longest = (sizes.prefill_buckets or (sizes.max_length,))[-1]
  rows = decoding.rows_at_once(prefill_rows(sizes), longest)
  prefill = activation_bytes(
    *(model, rows * longest, longest, mesh.shape, dtype), page=page_size
  )
  sampling = _SAMPLING * sizes.num_slots * model.vocab_size * 4
  return weights + cache + max(prefill, sampling)


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
  tokens: int,
  length: int,
  mesh: Mapping[str, int],
  dtype: str,
  *,
  remat: str | None = None,
  kind: attention.Kind = "xla",
  page: int = 0,
) -> int:
  """An estimate of the temporary bytes of a forward (and backward) pass.

  Of a layer at work: the residual stream, in float32, and its norms (4 D a
  token), q, k, v before and after their rotation, the MLP's four products, and
  the attention scores and weights [H, T, T] in float32, twice as much backward,
  where XLA's attention serves. (An engine's prefill attends page by page: [H,
  T, page], and a sum so far [H, T, C].) A learner's rows may hold what chats
  share once: q, k, v and the result are then there again for each chat, up to
  `batching.MOST_VIEWS` times, and so are scores that are kept. A backward pass
  keeps of every layer what `_kept_bytes` says, and with remat has one layer's
  more at a time. The head adds the logits of one chunk (64 MB), or of all
  tokens of a small vocabulary.

  Without what such rows add, beside XLA's own plan for a gradient of 6 layers
  on CPU, float32 or bfloat16, d = 256 and 1024, T = 512 and 1024: 0.94 to 1.02
  of it with remat "none", 1.09 to 1.26 with the others.

  Args:
    model: sizes.
    tokens: on one device.
    length: tokens of a row, for attention.
    mesh: sizes of the axes by name.
    dtype: of activations.
    remat: the policy's; None: there is no backward pass.
    kind: of attention.
    page: tokens that attention looks at at a time; 0: all.
  """
  item = jnp.dtype(dtype).itemsize
  heads = model.num_heads + 2 * model.num_kv_heads
  inner = tokens * (2 * heads * model.head_dim + 4 * model.mlp_dim) * item
  seen = page + model.head_dim if page else length
  # cuDNN's own arrays are small; the mask that it is given is as one head.
  num = {"xla": model.num_heads, "cudnn": 1, "splash": 0}[kind]
  scores = 2 * 4 * tokens * num * seen
  logits = min(4 * tokens * model.vocab_size, 64 << 20)
  views, seen = 0, 0
  if not page:
    width = 2 * model.head_dim * (model.num_heads + model.num_kv_heads)
    views = batching.MOST_VIEWS * tokens * width * item
    if attention.keeps(kind, length, model.head_dim):
      seen = batching.MOST_VIEWS * (length + model.head_dim)
      scores *= batching.MOST_VIEWS
  if remat is None:
    layer = 4 * 4 * tokens * model.embed_dim
    return layer + (inner + views + scores) // mesh["tensor"] + logits
  kept = _kept_bytes(model, tokens, mesh, remat, seen)
  again = _kept_bytes(model, tokens, mesh, "none", seen) - kept
  return (
    model.num_layers * kept
    + again
    + 2 * (views + scores) // mesh["tensor"]
    + 2 * logits
  )


def _kept_bytes(
  model: DecoderConfig,
  tokens: int,
  mesh: Mapping[str, int],
  remat: str,
  seen: int,
) -> int:
  """Of one layer for its backward pass, as XLA's plans have it.

  Exact for "full" (what enters the layer) and "dots" (that, and the products
  but the last, all in float32); without remat a fit. `seen` is what attention's
  products, if they are kept, have of a token and head.
  """
  heads = model.num_heads
  width = model.head_dim * (heads + 2 * model.num_kv_heads)
  stream, inner = {
    "none": (10, 6 * model.mlp_dim + 4.5 * width + 2 * heads * seen),
    "dots": (2, 2 * model.mlp_dim + width + heads * seen),
    "full": (1, 0),
  }[remat]
  split = inner / mesh["tensor"]
  return int(4 * tokens * (stream * model.embed_dim + split))


def memory(
  config: Config,
  models: Mapping[str, DecoderConfig],
  layouts: Mapping[str, Layout],
  train: bool = True,
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
    names = config.backbones[name]
    policies = [config.policies[n] for n in names]
    sampled = any(map(config.is_sampled, names))
    if not train and not sampled:
      continue  # it is there for a loss
    size = measure(policies, models[names[0]], layout, train=train)
    if not sampled:
      size = dataclasses.replace(size, engine=0)
    own, rollout = list(layout.train), list(sum(layout.rollout, ()))
    state[own] += size.state
    engines[rollout] += size.engine
    scored = size.score
    for user in config.trained if train else ():
      if config.policies[user].loss.reference in names:
        scored = max(
          scored,
          _most_bytes(
            dataclasses.replace(
              config.policies[user], compute_dtype=policies[0].compute_dtype
            ),
            models[names[0]],
            layout.train_shape,
            grad=False,
          ),
        )
    score[own] = np.maximum(score[own], scored)
    update[own] = np.maximum(update[own], size.update)
  phases = {"rollout": state + engines, "score": state + score}
  phases["update"] = state + update
  return {p: tuple(int(b) for b in values) for p, values in phases.items()}


def peaks() -> dict[str, int]:
  """The most bytes so far: "host" of this process, and where a device tells it
  (not on CPU) "device", of the fullest of its own.

  ru_maxrss would do for the process, were it not handed down: on Linux a child
  begins with the peak of the process that started it.
  """
  status = pathlib.Path("/proc/self/status")
  if status.exists():
    lines = dict(s.split(":", 1) for s in status.read_text().splitlines())
    found = {"host": int(lines["VmHWM"].split()[0]) * 1024}
  else:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {"host": most * (1 if sys.platform == "darwin" else 1024)}
  stats = [device.memory_stats() or {} for device in jax.local_devices()]
  used = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
  return found | ({"device": max(used)} if used else {})


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
  train: bool = True,
) -> dict[str, tuple[int, ...]]:
  """The plan's `memory`; refuses one that needs over `limit` of a device.

  Raises:
    ConfigError: with the bytes by phase, and the strategies that would fit.
  """
  layouts = lay_out(config, num_hosts, num_local)
  found = memory(config, models, layouts, train)
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
    if _peak(memory(other, models, there, train)) <= limit:
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
  "no strategy fits; use more devices, a smaller micro_tokens or engine "
  "(num_slots, cache_tokens, max_length), remat='full', or "
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
  program = functools.partial(_program, dtype, layout)
  used = set().union(*(jax.tree.leaves(t)[0].device_set for t in targets))
  aside = not used <= source.device_set
  if aside and source.is_fully_addressable:
    moved = program(None, None)(params)
    return [jax.device_put(moved, target) for target in targets]
  if aside:
    shapes = jax.eval_shape(layout or (lambda x: x), params)
    leaves = _spread(jax.tree.leaves(shapes), source.mesh)
  everywhere = tuple(_for_all(source.mesh, s) for s in leaves)
  with hosts.together("sync"):
    copies = program(everywhere, tree)(params)
  if aside:
    moved = jax.tree.map(_local, copies, jax.tree.unflatten(tree, leaves))
    return [jax.device_put(moved, target) for target in targets]
  return [jax.tree.map(_local, copies, target) for target in targets]


def cast(params: Any, dtype: Any, layout: Callable[[Any], Any]) -> Any:
  """In another dtype and form, on the same devices; all hosts must enter it."""
  with hosts.together("cast"):
    return _program(dtype, layout, None, None)(params)


def share(params: Any, targets: Sequence[Any], dtype: Any) -> list[Any]:
  """As `sync`, of weights that never change: an engine that would lay them out
  as they are gets these very arrays.

  Args:
    params: in the form of the targets.
    targets: see `sync`.
    dtype: of the result.
  """
  leaves = jax.tree.leaves(params)
  if len(targets) == 1 and leaves[0].is_fully_addressable:
    there = jax.tree.leaves(targets[0])
    if all(
      x.dtype == dtype and x.sharding.is_equivalent_to(where, x.ndim)
      for x, where in zip(leaves, there, strict=True)
    ):
      return [params]
  return sync(params, targets, dtype)


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


def local_rows(x: jax.Array) -> np.ndarray:
  """What `global_batch` was given on this host, of an array [M, b, ..]."""
  found: dict[int, np.ndarray] = {}
  for shard in x.addressable_shards:
    start = shard.index[1].start or 0
    if start not in found:
      found[start] = np.asarray(shard.data)
  return np.concatenate([found[start] for start in sorted(found)], axis=1)


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
