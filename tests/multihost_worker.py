"""One process of test_multihost.py, on 4 fake devices.

Arguments: the scenario (a function below), index, port, limit in seconds.
"""

import os
import signal
import sys
import time

import xla_flags

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = xla_flags.flags(4)

import jax
import jax.numpy as jnp
import numpy as np

from drmas_jax import config as config_lib
from drmas_jax import hosts, placement, sharding

AXES = {"w": ("embed", "mlp"), "layers": ("layers", "embed", "mlp")}
VALUES = {
  "w": np.arange(48, dtype=np.float32).reshape(8, 6),
  "layers": np.arange(64, dtype=np.float32).reshape(2, 8, 4),
}


def make_slices(**kwargs):
  """Of two policies in columns over both hosts."""
  config = config_lib.Config(
    policies=dict.fromkeys(
      ("solver", "verifier"), config_lib.Policy(checkpoint="none")
    ),
    agents={},
    orchestra=config_lib.Orchestra("single"),
    environment=config_lib.Environment("math"),
    data=config_lib.Data({"arithmetic": config_lib.TrainSource()}),
    placement=config_lib.Placement(strategy="columns", **kwargs),
  )
  layouts = placement.lay_out(config, jax.process_count(), 4)
  devices = np.array(jax.devices()).reshape(2, 4)
  return {
    name: placement.Slice(
      placement._mesh(devices[:, list(part.train)], part.train_shape),
      tuple(
        placement._mesh(
          devices[jax.process_index(), list(local)], part.rollout_shape
        )
        for local in part.rollout
      ),
    )
    for name, part in layouts.items()
  }


def globally(mesh):
  """VALUES on a mesh over the hosts, made shard by shard."""
  where = sharding.shardings(AXES, VALUES, mesh)
  return jax.tree.map(
    lambda v, s: jax.make_array_from_callback(v.shape, s, lambda i: v[i]),
    VALUES,
    where,
  )


def check_sync(part, layout=None):
  axes, want = AXES, VALUES
  if layout is not None:
    axes = {"w": AXES["w"], "layers": [AXES["layers"][1:]] * 2}
    want = layout(VALUES)
  meshes = part.rollout_meshes
  where = [sharding.shardings(axes, want, mesh) for mesh in meshes]
  moved = placement.sync(globally(part.train_mesh), where, "bfloat16", layout)
  for own, mesh in zip(moved, meshes, strict=True):
    for x, v in zip(jax.tree.leaves(own), jax.tree.leaves(want), strict=True):
      assert x.devices() == set(mesh.devices.flat)
      assert x.is_fully_addressable and x.dtype == jnp.bfloat16
      np.testing.assert_array_equal(x.astype(np.float32), v)


def unstack(params):
  return {"w": params["w"], "layers": [params["layers"][i] for i in range(2)]}


def work(index):
  """Everything that works between two hosts."""
  slices = make_slices(train_mesh=config_lib.Mesh(data=2, fsdp=0))
  mine = {"turns": 3 + index, "note": {"x": np.float32(0.5), "of": [index]}}
  assert hosts.agree("step", mine) == [
    {"turns": 3, "note": {"x": 0.5, "of": [0]}},
    {"turns": 4, "note": {"x": 0.5, "of": [1]}},
  ]
  assert hosts.share([0, 1, 2, 3, 4]) == [[0, 2, 4], [1, 3]][index]
  rows = np.full([2, 2, 3], 1.0 + index, np.float32)  # [M, b, T] of this host
  total = jax.jit(lambda x: x.sum())
  outputs = {}
  with hosts.together("update"):
    for name, part in slices.items():
      batch = placement.global_batch(rows, part.train_mesh)
      assert batch.shape == (2, 4, 3)
      for shard in batch.addressable_shards:  # own rows stay on this host
        np.testing.assert_array_equal(shard.data, rows[:, :1])
      outputs[name] = total(batch), batch
    fetched = placement.fetch(outputs)
  want = np.concatenate([np.full([2, 2, 3], 1.0), np.full([2, 2, 3], 2.0)], 1)
  for value, batch in fetched.values():
    assert float(value) == want.sum() == 36
    np.testing.assert_array_equal(batch, want)
  # Two engines on the training devices, one on both, one set aside.
  assert len(slices["verifier"].rollout_meshes) == 2
  check_sync(slices["verifier"])
  check_sync(slices["solver"], unstack)
  wide = config_lib.Mesh(data=1, fsdp=1, tensor=2)
  check_sync(make_slices(rollout_mesh=wide)["solver"], unstack)
  aside = make_slices(rollout_devices=1)["solver"]
  assert [len(m.devices.flat) for m in aside.rollout_meshes] == [1]
  check_sync(aside, unstack)
  for k in range(3):  # rounds of one name do not mix
    assert hosts.agree("again", {"k": k + index}) == [{"k": k}, {"k": k + 1}]
  data = bytes([7 + index]) * (2_500_000 + index)
  sent = hosts.to_first("bytes", data)
  assert list(map(len, sent)) == ([] if index else [2_500_000, 2_500_001])
  assert not sent or (sent[0] == data and set(sent[1]) == {8})
  try:
    hosts.check_alike("config", {"seed": index})
  except config_lib.ConfigError as e:
    assert "seed: is 0 on host 0, and 1 on host 1" in str(e)
    print("worked", flush=True)


def wait_for_all(mesh, timeout_s=None):
  """A device collective; it blocks while another host is missing."""
  with hosts.together("the update", timeout_s):
    x = placement.global_batch(np.ones([4, 1], np.float32), mesh, leading=0)
    jax.jit(lambda x: x.sum())(x).block_until_ready()


def killed(index):
  """Host 1 dies while host 0 is in a device collective."""
  mesh = make_slices()["solver"].train_mesh
  wait_for_all(mesh, timeout_s=60)  # it compiles
  if index == 1:
    os.kill(os.getpid(), signal.SIGKILL)
  wait_for_all(mesh)


def stuck(index):
  """Host 1 lives and sleeps; host 0 is in a device collective."""
  mesh = make_slices()["solver"].train_mesh
  wait_for_all(mesh, timeout_s=60)  # it compiles
  if index == 1:
    time.sleep(60)
  wait_for_all(mesh)


def silent(index):
  """Host 0 does not answer in a round; it leads."""
  if index == 0:
    time.sleep(60)
  hosts.agree("step", {})


def left(index):
  """Host 1 fails on its own, host 0 waits for its answer."""
  if index == 1:
    raise RuntimeError("only here")
  hosts.agree("step", {})


def leader_killed(index):
  """Host 0 dies while host 1 is busy on its own."""
  if index == 0:
    os.kill(os.getpid(), signal.SIGKILL)
  time.sleep(60)


if __name__ == "__main__":
  hosts.initialize(
    f"127.0.0.1:{sys.argv[3]}",
    num_processes=2,
    process_id=int(sys.argv[2]),
    timeout_s=60,
  )
  # The start is slow on a busy machine; the limit under test begins here.
  hosts.agree("ready", {})
  hosts._hosts.timeout_s = float(sys.argv[4])
  globals()[sys.argv[1]](jax.process_index())
