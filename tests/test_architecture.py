"""The house stays as it is drawn: imports run downward, heavy ones late."""

import ast
import graphlib
import os
import resource
import subprocess
import sys

import pytest

pytestmark = pytest.mark.quick

# From the ground up. A module may import its own floor and those below; a name
# that is a folder stands for every module in it.
FLOORS = (
  ("types", "config", "usercode", "caches", "hugepages"),
  (
    *(
      "advantages",
      "losses",
      "logprobs",
      "sampling",
      "batching",
      "trie",
      "metrics",
    ),
    *("rewards", "products", "health"),
    *("agents", "orchestras", "environments", "grading", "retrieval"),
    *("datasets", "door", "http"),
  ),
  (
    "sharding",
    "hosts",
    "placement",
    "models",
    "optimizers",
    "learner",
    "scores",
    "decoding",
    "dispatch",
    "engine",
    "jetstream_compat",
  ),
  (
    *("tokenizer", "prompts", "data", "pages", "scheduler", "prefixes"),
    *("sampler", "replicas", "remote", "outside", "plays", "rollout"),
    *("watchdog",),
    *("checkpoint", "export", "folders"),
    *("backbone", "sft", "writers", "records", "evaluate", "serving"),
    *("signals", "building", "restoring", "resample", "watching"),
    *("manifest", "compare", "figures", "charts", "report", "transcripts"),
    *("spikes",),
  ),
  ("training", "coordinator"),
  ("main", "serve", "study", "show", "replay", "check", "notebook"),
)
FLOOR = {name: i for i, floor in enumerate(FLOORS) for name in floor}

# What multiplies imports less: these, and its own folder.
ONLY = {
  "types": set(),
  "config": {"usercode"},
  "usercode": {"types"},
  "agents": {"types"},
  "orchestras": {"types"},
  "environments": {"types", "grading", "retrieval"},
  "grading": {"types", "agents"},  # how a completion is read
  "retrieval": {"types", "door", "http"},
  # Config and grading: the command.
  "datasets": {"types", "config", "grading", "caches"},
}

# Loaded where they are used, inside functions, or not at all.
LATE = {
  *("orbax", "transformers", "matplotlib", "tensorboardX"),
  *("tensorflow_datasets", "wandb", "pyarrow", "fsspec", "huggingface_hub"),
  *("bm25s", "safetensors"),
}
NEVER = {"torch", "tensorflow", "seqio"}

# Device code is about integers: it never asks who an agent or policy is.
NAMELESS = ("models", "losses", "learner", "decoding", "engine")
NAMES = {"agents", "agent_names", "agent_name", "policies", "policy_name"}


def _modules(root):
  """{("engine",): tree, ("models", "layers"): tree, ..} of the package."""
  package = root / "drmas_jax"
  return {
    path.relative_to(package).with_suffix("").parts: ast.parse(
      path.read_text(), str(path)
    )
    for path in sorted(package.rglob("*.py"))
    if path != package / "__init__.py"
  }


def _imports(module, node):
  """Full names that one import statement may load."""
  if isinstance(node, ast.Import):
    return [alias.name for alias in node.names]
  if not isinstance(node, ast.ImportFrom):
    return []
  base = node.module or ""
  if node.level:
    above = ("drmas_jax", *module)[: -node.level]
    base = ".".join((*above, *filter(None, [node.module])))
  return [base, *(f"{base}.{alias.name}" for alias in node.names)]


def _own(module, tree):
  """Names on the floors that a module imports, wherever in its code."""
  names = {
    name.split(".")[1]
    for node in ast.walk(tree)
    for name in _imports(module, node)
    if name.startswith("drmas_jax.")
  }
  return names - {"__version__"}


def test_every_module_has_a_floor(root):
  missing = {m[0] for m in _modules(root)} - set(FLOOR)
  assert not missing, f"give each of {sorted(missing)} a floor in FLOORS"


def test_imports_run_downward(root):
  upward = []
  for module, tree in _modules(root).items():
    for name in _own(module, tree) - {module[0]}:
      allowed = ONLY.get(module[0])
      if FLOOR.get(name, 0) > FLOOR.get(module[0], 0) or (
        allowed is not None and name not in allowed
      ):
        upward.append(f"{'.'.join(module)} imports {name}")
  assert not upward


def test_no_cycle_on_a_floor(root):
  graph = {}
  for module, tree in _modules(root).items():
    graph.setdefault(module[0], set()).update(_own(module, tree) - {module[0]})
  graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_jetstream_is_imported_in_one_place(root):
  importers = {
    module
    for module, tree in _modules(root).items()
    for node in ast.walk(tree)
    for name in _imports(module, node)
    if name.split(".")[0] == "jetstream"
  }
  assert importers <= {("jetstream_compat",)}


def _loaded_at_import(tree):
  """Statements that run when a module is imported."""
  stack = list(tree.body)
  while stack:
    node = stack.pop()
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
      continue
    yield node
    stack.extend(ast.iter_child_nodes(node))


def test_heavy_libraries_load_when_used(root):
  early, wrong = [], []
  for module, tree in _modules(root).items():
    for node in _loaded_at_import(tree):
      tops = {name.split(".")[0] for name in _imports(module, node)}
      early += [f"{'.'.join(module)}: {name}" for name in tops & LATE]
    for node in ast.walk(tree):
      tops = {name.split(".")[0] for name in _imports(module, node)}
      wrong += [f"{'.'.join(module)}: {name}" for name in tops & NEVER]
  assert not early, "import these inside the functions that use them"
  assert not wrong


def test_device_code_knows_no_names(root):
  found = []
  for module, tree in _modules(root).items():
    if module[0] not in NAMELESS:
      continue
    for node in ast.walk(tree):
      words = {getattr(node, field, None) for field in ("id", "attr", "arg")}
      found += [f"{'.'.join(module)}: {word}" for word in words & NAMES]
  assert not found


def test_no_drawer_for_everything(root):
  assert not list((root / "drmas_jax").rglob("util*.py"))


def test_help_is_quick_and_light(root):
  before = resource.getrusage(resource.RUSAGE_CHILDREN)
  done = subprocess.run(
    [sys.executable, "-X", "importtime", "-m", "drmas_jax.main", "--help"],
    cwd=root,
    env=os.environ | {"PYTHONPATH": str(root)},
    capture_output=True,
    text=True,
    timeout=60,
    check=False,
  )
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  assert done.returncode == 0, done.stderr[-2000:]
  assert "--config" in done.stdout
  # Processor time, so that a busy machine fails nobody.
  seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
  assert seconds <= 3
  loaded = {
    line.rpartition("|")[2].strip().split(".")[0]
    for line in done.stderr.splitlines()
    if line.startswith("import time:")
  }
  assert "argparse" in loaded or "absl" in loaded  # the list was read
  assert not loaded & (LATE | NEVER | {"jax", "jaxlib", "flax", "optax"})
