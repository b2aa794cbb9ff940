"""What a run was made of: enough to say later why two runs differ.

    manifest.json         config, versions, commit, devices, data, grader
    manifest_diff.patch   what was not committed

Nothing of the environment's variables is kept, and of files that git does not
know only the names.
"""

import datetime
import functools
import hashlib
import json
import os
import pathlib
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from typing import Any, NamedTuple

from drmas_jax import config as config_lib
from drmas_jax import writers

PACKAGES = (
  *("drmas-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint"),
  *("google-jetstream", "numpy", "transformers", "mpmath"),
)
_GIT_S = 10.0  # of one call
_PATCH_BYTES = 1_000_000
_DIFF = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD")
_CUT = b"\n[only the first 1,000,000 bytes are kept]\n"


def collect(
  config: config_lib.Config,
  *,
  data: Mapping[str, str],
  devices: Mapping[str, Any],
) -> dict[str, Any]:
  """The manifest of this process, as plain data.

  `commit`, `dirty`, `diff_sha256` and `untracked` (Python files) are of the git
  repository of the working directory, where a user's own modules are; `package`
  has the same of this package where that is run from another repository.

  Args:
    config: as it runs, all defaults filled in.
    data: {name of a source: its fingerprint}.
    devices: what they are and how many.
  """
  environment = config.environment
  module = config_lib.load_module("environments", environment.name)
  code = _code()
  return {
    "created": datetime.datetime.now(datetime.UTC).isoformat("T", "seconds"),
    "config": config_lib.to_dict(config),
    "python": platform.python_version(),
    "versions": _versions(),
    **code["project"].facts(),
    "package": code["package"].facts() if "package" in code else None,
    "devices": dict(devices),
    "data": dict(data),
    "grader": {
      "environment": environment.name,
      "version": vars(module).get("VERSION"),  # a user's need not have one
      "options": config_lib.to_dict(environment.options),
    },
  }


def record(
  workdir: pathlib.Path, manifest: Mapping[str, Any], step: int
) -> None:
  """Writes a run's manifest, or what is new in it where the run goes on.

  The first manifest of a run stays. A later start on other versions, code,
  devices, data or config adds to its `sessions` the step that it goes on from
  and what has changed; the session's patches are numbered as it is.

  Args:
    workdir: of the run; it exists.
    manifest: from `collect`, in the same process.
    step: that the run goes on from; 0: it is new, whatever lies there.
  """
  path = workdir / "manifest.json"
  if not step or not path.exists():
    writers.write_json(path, dict(manifest))
    for old in workdir.glob("manifest_diff*.patch"):
      old.unlink()
    write_patches(workdir)
    return
  whole = json.loads(path.read_text())
  before = _latest(whole)
  fresh = json.loads(json.dumps(manifest))  # as a file has it
  changed = {
    key: value
    for key, value in fresh.items()
    if key != "created" and value != before.get(key)
  }
  if not changed:
    return
  session = {"step": step, "created": manifest["created"], **changed}
  whole["sessions"] = [*whole.get("sessions", []), session]
  writers.write_json(path, whole)
  if changed.keys() & {"diff_sha256", "package"}:
    write_patches(workdir, f".{len(whole['sessions'])}")


def read(
  workdir: pathlib.Path, step: int | None = None
) -> dict[str, Any] | None:
  """A run's manifest as its last session left it, or the session that made a
  step; None: there is no run."""
  path = workdir / "manifest.json"
  return _latest(json.loads(path.read_text()), step) if path.is_file() else None


def _latest(
  manifest: Mapping[str, Any], step: int | None = None
) -> dict[str, Any]:
  """With what its sessions changed, or those that began before a step."""
  current = dict(manifest)
  for session in current.pop("sessions", []):
    if step is None or session["step"] < step:
      current |= session
  return current


def _versions() -> dict[str, str]:
  """Of what is installed, without importing it."""
  found = {}
  for name in PACKAGES:
    try:
      found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
      continue
  return found


class _Code(NamedTuple):
  """The state of a git repository; all empty where there is none."""

  commit: str | None = None
  patch: bytes = b""
  untracked: tuple[str, ...] = ()

  def facts(self) -> dict[str, Any]:
    digest = hashlib.sha256(self.patch).hexdigest() if self.patch else None
    return {
      "commit": self.commit,
      "dirty": bool(self.patch),
      "diff_sha256": digest,
      "untracked": list(self.untracked),
    }


@functools.cache
def _code() -> Mapping[str, _Code]:
  """Once per process: what was imported does not change with the files."""
  here, own = pathlib.Path.cwd(), pathlib.Path(__file__)
  code = {"project": _state(here)}
  # An installed copy may lie in somebody's repository and be no part of it.
  known = _git(own.parent, "ls-files", "--error-unmatch", own.name) is not None
  if known and _root(own.parent) != _root(here):
    code["package"] = _state(own.parent)
  return code


def _state(folder: pathlib.Path) -> _Code:
  commit = _git(folder, "rev-parse", "--verify", "HEAD")
  root = _root(folder)
  if commit is None or root is None:
    return _Code()
  patch = _git(root, *_DIFF) or b""
  if len(patch) > _PATCH_BYTES:
    patch = patch[:_PATCH_BYTES] + _CUT
  others = ("ls-files", "--others", "--exclude-standard", "--", "*.py")
  names = (_git(root, *others) or b"").decode(errors="replace").split("\n")
  return _Code(commit.decode().strip(), patch, tuple(filter(None, names)))


def _root(folder: pathlib.Path) -> pathlib.Path | None:
  found = _git(folder, "rev-parse", "--show-toplevel")
  return found and pathlib.Path(os.fsdecode(found.removesuffix(b"\n")))


def _git(folder: pathlib.Path, *args: str) -> bytes | None:
  """What git prints; None without git, outside a repository, or too late."""
  try:
    return subprocess.run(
      ["git", "-C", str(folder), "--no-optional-locks", *args],
      stdin=subprocess.DEVNULL,
      capture_output=True,
      timeout=_GIT_S,
      check=True,
    ).stdout
  except (OSError, subprocess.SubprocessError):
    return None


def write_patches(folder: pathlib.Path, number: str = "") -> None:
  """What was not committed when this process began, where there is any.

  Args:
    folder: it exists; gets manifest_diff.patch, and manifest_diff_package.patch
      where the package has a repository of its own.
    number: of a session, before the suffix.
  """
  for name, code in _code().items():
    part = "" if name == "project" else f"_{name}"
    if code.patch:
      path = folder / f"manifest_diff{part}{number}.patch"
      path.write_bytes(code.patch)
