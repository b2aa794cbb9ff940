"""The main job cut small: its config, its processes, what it leaves.

As a config file (`--config tests/small_run.py`) it is configs/math_tiny.py with
few tasks, few slots and a held-out evaluation after every step.
"""

import json
import os
import pathlib
import runpy
import socket
import subprocess
import sys

import numpy as np
import xla_flags

ROOT = pathlib.Path(__file__).parents[1]
STEPS = 5
FAULTY = ROOT / "tests" / "faulty_main.py"


def get_config():
  config = runpy.run_path(str(ROOT / "configs" / "math_tiny.py"))[
    "get_config"
  ]()
  config.steps = STEPS
  config.data.update(num_tasks=4, group_size=4)
  config.eval.update(every=1, num_tasks=4, final_num_tasks=0, k=2)
  config.checkpoint.update(every=2)
  # One engine a policy on however many devices: each of several is compiled.
  config.placement = dict(rollout_mesh=dict(data=1, fsdp=0))
  for policy in config.policies.values():
    policy.micro_tokens = 1792
    # Adam's first step is the sign of the gradient otherwise, and turns
    # rounding into whole steps where meshes are compared.
    policy.optimizer.eps = 1e-3
    policy.engine.update(num_slots=8, prefill_rows=8, steps_per_call=4)
  return config


def start(workdir, *flags, fault=None, num_devices=1, **env):
  """The command in a process of its own, with a fault of faulty_main.py."""
  command = ["-m", "drmas_jax.main"] if fault is None else [FAULTY, fault]
  xla = xla_flags.flags(num_devices)
  return subprocess.Popen(
    [
      sys.executable,
      *command,
      f"--config={ROOT / 'tests' / 'small_run.py'}",
      f"--workdir={workdir}",
      *flags,
    ],
    env=os.environ | {"XLA_FLAGS": xla, "PYTHONPATH": str(ROOT)} | env,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def finish(process, timeout_s=300):
  """(exit code, what it said)."""
  try:
    output, _ = process.communicate(timeout=timeout_s)
  finally:
    process.kill()
  return process.returncode, output


def finish_all(processes):
  """[(exit code, what it said)] of processes that wait for each other."""
  try:
    return [finish(p) for p in processes]
  finally:
    for p in processes:
      p.kill()


def free_port():
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    return s.getsockname()[1]


def run(workdir, *flags, **kwargs):
  return finish(start(workdir, *flags, **kwargs))


def metrics(workdir):
  """{(step, name): value} of metrics.jsonl, without what the machine decides:
  times and memory."""
  found = {}
  for line in (workdir / "metrics.jsonl").read_text().splitlines():
    record = json.loads(line)
    for name, value in record.items():
      measured = name.startswith(("time/", "memory/"))
      if not measured and not name.endswith("_per_s"):
        found[record["step"], name] = value
  return found


# What of a step depends on how many engines there are, and the alarms.
_OF_ENGINES = (
  *("parked/", "prefilled_", "prefix_", "slot_", "spilled/"),
  "alarms/",
)


def assert_close(one, two, step):
  """What a step on different devices came to, and the states behind it."""
  assert_close_metrics(one, two, step)
  ours, theirs = state(one, step), state(two, step)
  assert ours.keys() == theirs.keys()
  for name in ours:
    np.testing.assert_allclose(
      ours[name], theirs[name], rtol=1e-3, atol=1e-5, err_msg=str(name)
    )


def assert_close_metrics(one, two, step):
  """Of a step on different devices: the same, up to rounding."""
  ours, theirs = (
    {
      name: value
      for (at, name), value in metrics(workdir).items()
      if at == step and not name.startswith(_OF_ENGINES)
    }
    for workdir in (one, two)
  )
  assert ours.keys() == theirs.keys()
  for name, value in ours.items():
    error = abs(value - theirs[name])
    assert error <= 1e-4 + 1e-3 * abs(value), (name, value, theirs[name])


def transcripts(workdir):
  """Every episode written, in order."""
  return [
    json.loads(line)
    for path in sorted((workdir / "transcripts").glob("*.jsonl"))
    for line in path.read_text().splitlines()
  ]


def policy(workdir, step, name):
  """{path: array} of a policy in a checkpoint: step, params, opt_state."""
  import jax
  import orbax.checkpoint as ocp

  folder = pathlib.Path(workdir) / "checkpoints" / str(step) / f"policy_{name}"
  with ocp.PyTreeCheckpointer() as reader:
    structure = reader.metadata(folder).item_metadata.tree
    tree = reader.restore(
      folder,
      restore_args=jax.tree.map(
        lambda _: ocp.RestoreArgs(restore_type=np.ndarray), structure
      ),
    )
  return {
    jax.tree_util.keystr(path): np.asarray(leaf)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def state(workdir, step=STEPS):
  """{(policy, path): array} of a whole checkpoint."""
  return {
    (name, path): array
    for name in ("solver", "verifier")
    for path, array in policy(workdir, step, name).items()
  }


def assert_equal(one, two):
  """Two states, bit for bit."""
  assert one.keys() == two.keys()
  for name in one:
    np.testing.assert_array_equal(one[name], two[name], err_msg=str(name))
