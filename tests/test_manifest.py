"""What a manifest says of code, versions and data, and how it is kept."""

import dataclasses
import hashlib
import json
import pathlib
import subprocess
import sys

import numpy
import pytest

from drmas_jax import config as config_lib
from drmas_jax import manifest

pytestmark = pytest.mark.quick

DATA = {"train/a": "1f", "eval/a": "2f"}
CPU = {"platform": "cpu", "kind": "cpu", "count": 8, "processes": 1}


def git(folder, *args):
  author = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "gc.auto=0")
  subprocess.run(
    ["git", "-C", str(folder), *author, *args],
    check=True,
    capture_output=True,
    timeout=60,
  )


@pytest.fixture
def project(tmp_path, monkeypatch):
  """The working directory: a user's repository with one commit."""
  folder = tmp_path / "project"
  folder.mkdir()
  git(folder, "init")
  (folder / "mine.py").write_text("x = 1\n")
  git(folder, "add", "mine.py")
  git(folder, "commit", "-m", "first")
  monkeypatch.chdir(folder)
  # As installed: this tree may have changes that are not committed.
  monkeypatch.setattr(manifest, "__file__", str(tmp_path / "manifest.py"))
  manifest._code.cache_clear()
  yield folder
  manifest._code.cache_clear()


@pytest.fixture(scope="module")
def config(root):
  return config_lib.read(root / "tests" / "small_run.py")


def collect(config, **changes):
  manifest._code.cache_clear()  # as a new process
  return manifest.collect(config, **{"data": DATA, "devices": CPU} | changes)


def read(workdir):
  """The file as it is; `manifest.read` gives what it comes to."""
  return json.loads((workdir / "manifest.json").read_text())


def test_what_is_in_it(project, config, tmp_path):
  found = collect(config)
  assert found["config"]["steps"] == 5 and found["config"]["seed"] == 0
  assert found["config"]["advantage"]["name"]  # defaults are filled in
  assert found["python"] == ".".join(map(str, sys.version_info[:3]))
  assert found["versions"]["numpy"] == numpy.__version__
  assert {"jax", "jaxlib", "flax", "transformers"} <= found["versions"].keys()
  assert len(found["commit"]) == 40 and found["dirty"] is False
  assert found["diff_sha256"] is None and found["untracked"] == []
  assert found["data"] == DATA and found["devices"] == CPU
  assert found["grader"]["environment"] == "math"
  assert found["created"].endswith("+00:00")
  manifest.record(tmp_path, found, 0)
  assert read(tmp_path) == found
  assert not list(tmp_path.glob("*.patch"))


def test_the_grader_has_a_version(project, config, monkeypatch):
  module = type(sys)("my_env")
  monkeypatch.setitem(sys.modules, "my_pkg.env", module)
  monkeypatch.setitem(sys.modules, "my_pkg", type(sys)("my_pkg"))
  environment = config_lib.Environment("my_pkg.env", {"rule": "em"})
  own = dataclasses.replace(config, environment=environment)
  grader = {"environment": "my_pkg.env", "options": {"rule": "em"}}
  assert collect(own)["grader"] == grader | {"version": None}
  module.VERSION = "3"
  assert collect(own)["grader"] == grader | {"version": "3"}


def test_uncommitted_code(project, config, tmp_path, monkeypatch):
  monkeypatch.setenv("API_KEY", "hunter2")
  (project / "mine.py").write_text("x = 2\n")
  (project / "new.py").write_text("y = 'hunter3'\n")
  (project / "notes.txt").write_text("z")
  found = collect(config)
  assert found["dirty"] is True and found["untracked"] == ["new.py"]
  manifest.record(tmp_path, found, 0)
  patch = (tmp_path / "manifest_diff.patch").read_bytes()
  assert found["diff_sha256"] == hashlib.sha256(patch).hexdigest()
  assert b"-x = 1\n+x = 2\n" in patch
  text = (tmp_path / "manifest.json").read_text() + patch.decode()
  assert "hunter" not in text
  # It is a patch: what was committed and it give the code that ran.
  git(project, "checkout", "mine.py")
  git(project, "apply", tmp_path / "manifest_diff.patch")
  assert (project / "mine.py").read_text() == "x = 2\n"
  # A new run in this workdir leaves nothing of the old one.
  git(project, "checkout", "mine.py")
  manifest.record(tmp_path, collect(config), 0)
  assert not list(tmp_path.glob("*.patch"))


def test_a_patch_is_bounded(project, config, tmp_path):
  (project / "mine.py").write_text("x = 1\n" * 400_000)
  manifest.record(tmp_path, collect(config), 0)
  patch = (tmp_path / "manifest_diff.patch").read_bytes()
  assert len(patch) == 1_000_000 + len(manifest._CUT)
  assert patch.endswith(b"[only the first 1,000,000 bytes are kept]\n")


def test_the_package_has_its_own_repository(
  project, config, tmp_path, monkeypatch
):
  copy = tmp_path / "checkout" / "drmas_jax"
  copy.mkdir(parents=True)
  (copy / "manifest.py").write_text("a = 1\n")
  monkeypatch.setattr(manifest, "__file__", str(copy / "manifest.py"))
  git(copy.parent, "init")
  # A copy that is no part of the repository around it, such as in a .venv.
  assert collect(config)["package"] is None
  git(copy.parent, "add", ".")
  git(copy.parent, "commit", "-m", "first")
  (copy / "manifest.py").write_text("a = 2\n")
  found = collect(config)
  assert found["package"]["dirty"] and not found["dirty"]
  assert found["package"]["commit"] != found["commit"]
  manifest.record(tmp_path, found, 0)
  names = [p.name for p in tmp_path.glob("*.patch")]
  assert names == ["manifest_diff_package.patch"]
  monkeypatch.chdir(copy)  # work on the package itself
  found = collect(config)
  assert found["package"] is None and found["dirty"]


def test_without_a_repository(config, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
  nothing = {"commit": None, "dirty": False}
  assert collect(config).items() >= nothing.items()
  git(tmp_path, "init")  # a repository without a commit
  assert collect(config).items() >= nothing.items()
  monkeypatch.setenv("PATH", "")  # no git at all
  found = collect(config)
  assert found.items() >= nothing.items() and found["package"] is None
  manifest.record(tmp_path, found, 0)
  assert read(tmp_path) == found
  manifest._code.cache_clear()


def test_a_git_that_hangs(config, tmp_path, monkeypatch):
  folder = tmp_path / "bin"
  folder.mkdir()
  (folder / "git").write_text(f"#!{sys.executable}\nimport time\ntime.sleep(9)")
  (folder / "git").chmod(0o755)
  monkeypatch.setenv("PATH", str(folder))
  monkeypatch.setattr(manifest, "_GIT_S", 0.05)
  assert collect(config)["commit"] is None
  manifest._code.cache_clear()


def test_sessions_of_a_resumed_run(project, config, tmp_path):
  first = collect(config)
  manifest.record(tmp_path, first, 0)
  manifest.record(tmp_path, collect(config), 2)  # nothing is different
  assert read(tmp_path) == first

  longer = dataclasses.replace(config, steps=9)
  (project / "mine.py").write_text("x = 2\n")
  second = collect(longer)
  manifest.record(tmp_path, second, 3)
  whole = read(tmp_path)
  assert whole | {"sessions": []} == first | {"sessions": []}
  (session,) = whole["sessions"]
  assert session["step"] == 3 and session["config"]["steps"] == 9
  assert session["dirty"] is True and "versions" not in session
  patch = (tmp_path / "manifest_diff.1.patch").read_bytes()
  assert session["diff_sha256"] == hashlib.sha256(patch).hexdigest()
  manifest.record(tmp_path, collect(longer), 5)  # as the session before
  assert read(tmp_path) == whole

  third = collect(longer, data=DATA | {"train/a": "other"})
  manifest.record(tmp_path, third, 7)
  sessions = read(tmp_path)["sessions"]
  assert [s["step"] for s in sessions] == [3, 7]
  assert sessions[1].keys() == {"step", "created", "data"}
  latest = manifest.read(tmp_path)
  assert latest["config"]["steps"] == 9 and latest["data"] == third["data"]
  assert "sessions" not in latest
  assert manifest.read(tmp_path / "elsewhere") is None
  names = {p.name for p in pathlib.Path(tmp_path).glob("*.patch")}
  assert names == {"manifest_diff.1.patch"}
