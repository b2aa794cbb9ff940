"""What holds for every test: 8 fake CPU devices, programs that compile fast,
and one cache of them.

The environment is set here, before anything imports jax; pytest-xdist's
workers are children of this process and inherit it.
"""

import os
import pathlib
import shutil
import tempfile

import pytest
import xla_flags

_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
  own = os.environ.get("XLA_FLAGS", "")
  os.environ["XLA_FLAGS"] = f"{own} {xla_flags.flags(8)}"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that needs the network is a defect
_OWN_CACHE = "JAX_COMPILATION_CACHE_DIR" not in os.environ
if _OWN_CACHE:
  os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(
    prefix="drmas-jax-"
  )
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

ROOT = pathlib.Path(__file__).parents[1]


def pytest_unconfigure(config):
  # In a worker the variable was inherited, so only its maker removes it.
  del config
  if _OWN_CACHE:
    shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


# The files that take longest come first, so that both workers end together.
_LONG = (
  "test_resume.py",
  "test_adapter_run.py",
  "test_readme.py",
  "test_main.py",
  "test_engine.py",
  "test_models.py",
  "test_learner.py",
  "test_adapters.py",
  "test_two_hosts.py",
  "test_replay.py",
  "test_evaluate.py",
  "test_export.py",
  "test_own_team.py",
  "test_multihost.py",
  "test_serve.py",
)


def pytest_collection_modifyitems(items):
  place = {name: i for i, name in enumerate(_LONG)}
  items.sort(key=lambda item: place.get(item.path.name, len(_LONG)))


@pytest.fixture(scope="session")
def root() -> pathlib.Path:
  """The project's own folder."""
  return ROOT


@pytest.fixture(scope="session")
def shared() -> pathlib.Path:
  """Data sets and checkpoints that lie beside the project and not in it."""
  folder = ROOT.parent / "shared"
  if not folder.is_dir():
    pytest.skip("needs the folder ../shared (data sets that are not shipped)")
  return folder


@pytest.fixture
def mesh():
  """All 8 fake devices as data 2, fsdp 2, tensor 2."""
  import jax
  import numpy as np

  from drmas_jax import sharding

  devices = np.asarray(jax.devices()[:8]).reshape(2, 2, 2)
  return jax.sharding.Mesh(devices, sharding.AXES)
