"""Checkpoints that are elsewhere: buckets, the hub, and none at all."""

import os
import pathlib
import shutil
import sys
import time

import huggingface_hub
import pytest
from fsspec.implementations import memory

from drmas_jax import backbone, caches, folders, main
from drmas_jax.models import weights

pytestmark = pytest.mark.quick

TINY = pathlib.Path(backbone.__file__).parent / "models" / "tiny" / "solver"


class Bucket(memory.MemoryFileSystem):
  """gs:// in memory; counts what is read."""

  protocol = ("gs", "gcs")
  store: dict = {}  # noqa: RUF012 (as in the class above it)
  pseudo_dirs = [""]  # noqa: RUF012
  opened: list = []  # noqa: RUF012
  wait_s = 0.0

  @classmethod
  def _strip_protocol(cls, path):
    return super()._strip_protocol(path.replace("gs://", "memory://", 1))

  def ls(self, path, detail=True, **kwargs):
    time.sleep(self.wait_s)
    return super().ls(path, detail=detail, **kwargs)

  def open(self, path, mode="rb", **kwargs):
    if mode == "rb":
      self.opened.append(path.rpartition("/")[2])
    return super().open(path, mode, **kwargs)


@pytest.fixture
def bucket(tmp_path, monkeypatch):
  """A bucket that holds the shipped solver at gs://b/runs/solver."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  for name, empty in (("store", {}), ("pseudo_dirs", [""]), ("opened", [])):
    monkeypatch.setattr(Bucket, name, empty)
  registry = sys.modules["fsspec.registry"]._registry
  for name in ("gs", "gcs"):
    monkeypatch.setitem(registry, name, Bucket)
  system = Bucket()
  for path in TINY.iterdir():
    system.pipe_file(f"gs://b/runs/solver/{path.name}", path.read_bytes())
  system.pipe_file("gs://b/runs/solver/optimizer.bin", b"not wanted")
  system.pipe_file("gs://b/runs/solver/more/config.json", b"{}")
  return system


def test_a_bucket_is_copied_once(bucket, capsys):
  url = "gs://b/runs/solver"
  assert folders.sizes(url) == weights.read_config(TINY)
  assert bucket.opened == ["config.json"]
  folder = folders.fetch(url)
  wanted = {p.name for p in TINY.iterdir()}
  assert {p.name for p in folder.iterdir()} == wanted
  for name in wanted:
    assert (folder / name).read_bytes() == (TINY / name).read_bytes()
  assert sorted(bucket.opened) == sorted(wanted)
  assert url in capsys.readouterr().err  # how far it is
  assert folders.fetch(f"{url}/") == folder
  assert len(bucket.opened) == len(wanted)
  assert backbone.checkpoint_folder(url) == folder


def test_what_changed_in_a_bucket_is_copied_again(bucket):
  folder = folders.fetch("gs://b/runs/solver")
  path = folder / "model.safetensors"
  del bucket.opened[:]
  path.write_bytes(path.read_bytes()[:-1])  # cut short
  os.utime(folder / "config.json", (0, 0))  # of another age
  folders.fetch("gs://b/runs/solver")
  assert bucket.opened == ["config.json", "model.safetensors"]
  assert path.read_bytes() == (TINY / path.name).read_bytes()


def test_a_copy_that_breaks_off_leaves_nothing(bucket, monkeypatch):
  monkeypatch.setattr(folders, "_PIECE", 1000)
  read = memory.MemoryFile.read

  def cut(file, size=-1):
    if file.tell() >= 3000:
      raise OSError("connection lost")
    return read(file, size)

  monkeypatch.setattr(memory.MemoryFile, "read", cut)
  with pytest.raises(ValueError, match="OSError: connection lost"):
    folders.fetch("gs://b/runs/solver")
  (folder,) = caches.folder("checkpoints").iterdir()
  sizes = {p.name: p.stat().st_size for p in folder.iterdir()}
  assert not [name for name in sizes if ".part" in name]
  assert all((TINY / n).stat().st_size == size for n, size in sizes.items())
  monkeypatch.undo()


@pytest.mark.parametrize(
  ("url", "message"),
  [
    ("gs://b/nothing", "FileNotFoundError"),
    ("gs://b/runs", "it holds none of"),
    ("nowhere://b/x", "Protocol not known: nowhere"),
  ],
)
def test_buckets_that_cannot_be_read(bucket, url, message):
  with pytest.raises(ValueError, match=message) as e:
    folders.fetch(url)
  assert "copy the folder here and give its path" in str(e.value)


def test_a_bucket_that_does_not_answer(bucket, monkeypatch):
  monkeypatch.setattr(folders, "_ANSWER_S", 0.05)
  monkeypatch.setattr(Bucket, "wait_s", 0.5)
  with pytest.raises(ValueError, match=r"no answer within 0\.05 s"):
    folders.fetch("gs://b/runs/solver")


# -- the hub -------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
  """A hub that holds the shipped solver as me/solver; what it was asked."""
  asked = []

  def download(name, *, allow_patterns, ignore_patterns, etag_timeout):
    assert ignore_patterns == ["*/*"] and 0 < etag_timeout <= 60
    asked.append((name, allow_patterns))
    if name != "me/solver":
      raise OSError(f"404 {name}\nand more")
    folder = tmp_path / "hub"
    folder.mkdir(exist_ok=True)
    for pattern in allow_patterns:
      for path in TINY.glob(pattern):
        shutil.copy2(path, folder)
    return str(folder)

  monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
  return asked


def test_a_hub_id(hub):
  assert folders.sizes("me/solver") == weights.read_config(TINY)
  assert hub == [("me/solver", ["config.json"])]
  folder = folders.fetch("me/solver")
  assert {p.name for p in folder.iterdir()} == {p.name for p in TINY.iterdir()}
  assert weights.load(folder, weights.read_config(folder))
  with pytest.raises(ValueError, match="OSError: 404 me/other; correct the"):
    folders.fetch("me/other")


def test_a_folder_here_comes_before_the_hub(hub, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  shutil.copytree(TINY, "Qwen/Qwen3-4B")
  assert folders.fetch("Qwen/Qwen3-4B") == pathlib.Path("Qwen/Qwen3-4B")
  assert folders.sizes("Qwen/Qwen3-4B") == weights.read_config(TINY)
  assert not hub


def test_offline_it_is_said_at_once(tmp_path, monkeypatch):
  """conftest.py sets HF_HUB_OFFLINE."""
  monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
  began = time.monotonic()
  with pytest.raises(ValueError, match="no such folder here, and me/absent of"):
    folders.fetch("me/absent")
  assert time.monotonic() - began < 10


@pytest.mark.parametrize("name", ["nowhere", "a/b/c", "./a/b", "/a/b", ""])
def test_what_is_no_hub_id_is_a_folder(hub, name, monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  if name:
    with pytest.raises(ValueError, match="no such folder; allowed are"):
      folders.fetch(name)
  assert not hub


def test_a_plan_that_does_not_fit_fetches_nothing(hub, root, tmp_path, capsys):
  """Exit code 2, by the table of public sizes."""
  code = main.main(
    [
      f"--config={root / 'configs' / 'math_tiny.py'}",
      f"--workdir={tmp_path / 'run'}",
      "--config.policies.solver.checkpoint=Qwen/Qwen3-8B",
      "--config.placement.device_memory_gb=16",
    ]
  )
  said = capsys.readouterr().err
  assert code == 2
  assert "placement.strategy: 'shared' needs up to" in said
  assert not hub and not (tmp_path / "run").exists()
