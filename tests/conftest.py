"""What holds for every test: 8 fake CPU devices and one compile cache.

The environment is set here, before anything imports jax; pytest-xdist's
workers are children of this process and inherit it.
"""

import os
import pathlib
import shutil
import tempfile

import pytest

_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=8"
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


# The files that take longest, one worker each from the start.
_LONG = ("test_resume.py", "test_two_hosts.py", "test_multihost.py")


def pytest_collection_modifyitems(items):
  items.sort(key=lambda item: item.path.name not in _LONG)


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
