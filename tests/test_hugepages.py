"""A command begins anew with large pages, once, and otherwise as it was."""

import ast
import json
import os
import pathlib
import subprocess
import sys

import pytest

from drmas_jax import hugepages

pytestmark = pytest.mark.quick

TUNABLE = "glibc.malloc.hugetlb"
# 256 MB in pages of 4 kB are 65,536 faults.
PROGRAM = """
import json, os, pathlib, resource, sys
print("begun", os.getpid(), flush=True)
from drmas_jax import hugepages
if sys.argv[1] != "-":
  hugepages._ENABLED = pathlib.Path(sys.argv[1])
hugepages.restart()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
len(b"x" * (1 << 28))
after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
tunables = os.environ.get("GLIBC_TUNABLES")
print(json.dumps([tunables, sys.argv[2:], sys.flags.utf8_mode, after - before]))
"""


def begin(enabled, *arguments, program=PROGRAM, **env):
  """(times that it began, what it then said)."""
  given = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"} | env
  out = subprocess.run(
    [sys.executable, "-X", "utf8", "-c", program, str(enabled), *arguments],
    env=given,
    check=True,
    capture_output=True,
    text=True,
    timeout=60,
  ).stdout.splitlines()
  assert len(set(out[:-1])) == 1  # one process
  return len(out) - 1, json.loads(out[-1])


@pytest.fixture
def enabled(tmp_path):
  """The kernel's setting, to be chosen by a test."""
  path = tmp_path / "enabled"
  path.write_text("always [madvise] never\n")
  return path


@pytest.fixture(autouse=True)
def needs_glibc():
  if sys.platform != "linux" or not os.confstr("CS_GNU_LIBC_VERSION"):
    pytest.skip("what is asked for is glibc's")


def test_it_begins_once_more_with_its_arguments(enabled):
  times, (tunables, arguments, utf8, _) = begin(enabled, "--a=b c", "'")
  assert (times, tunables) == (2, f"{TUNABLE}=1")
  assert (arguments, utf8) == (["--a=b c", "'"], 1)


def test_other_tunables_stay(enabled):
  other = "glibc.malloc.arena_max=4"
  _, (tunables, *_) = begin(enabled, GLIBC_TUNABLES=other)
  assert tunables == f"{other}:{TUNABLE}=1"


@pytest.mark.parametrize("setting", [f"{TUNABLE}=0", f"{TUNABLE}=1"])
def test_a_setting_of_the_users_stands(enabled, setting):
  times, (tunables, *_) = begin(enabled, GLIBC_TUNABLES=setting)
  assert (times, tunables) == (1, setting)


@pytest.mark.parametrize(
  "setting", ["[always] madvise never", "always madvise [never]", None]
)
def test_where_asking_changes_nothing_it_does_not(enabled, setting):
  enabled.unlink()
  if setting:
    enabled.write_text(setting)
  times, (tunables, *_) = begin(enabled)
  assert (times, tunables) == (1, None)


@pytest.mark.parametrize(
  ("line", "times"),
  [
    # What a program that may do more than its user does not get.
    ("os.environ.pop('GLIBC_TUNABLES', None)", 2),
    # A notebook's kernel, which would be gone.
    (
      "import threading, time\n"
      "threading.Thread(target=time.sleep, args=(5,), daemon=True).start()",
      1,
    ),
    ("sys.executable = '/nowhere'", 1),
  ],
)
def test_it_ends(enabled, line, times):
  program = PROGRAM.replace(
    "hugepages.restart()", f"{line}\nhugepages.restart()"
  )
  assert begin(enabled, program=program)[0] == times


@pytest.mark.parametrize("command", ["main", "serve", "study"])
def test_a_command_begins_with_it(command):
  """Before it imports what would have to be imported twice."""
  path = pathlib.Path(hugepages.__file__).with_name(f"{command}.py")
  body = [n for n in ast.parse(path.read_text()).body if not _standard(n)]
  imported, guarded = body[0], body[1]
  assert ast.unparse(imported) == "from drmas_jax import hugepages"
  assert ast.unparse(guarded) == (
    "if __name__ == '__main__':\n    hugepages.restart()"
  )


def _standard(node) -> bool:
  """A docstring, or an import of the standard library."""
  match node:
    case ast.Expr():
      return True
    case ast.Import(names=[ast.alias(name=name), *_]):
      return name.partition(".")[0] in sys.stdlib_module_names
    case ast.ImportFrom(module=name):
      return name.partition(".")[0] in sys.stdlib_module_names
  return False


def test_memory_comes_in_large_pages():
  if not hugepages._given():
    pytest.skip("the kernel does not give large pages to those who ask")
  faults = begin("-")[1][-1]
  small = begin("-", GLIBC_TUNABLES=f"{TUNABLE}=0")[1][-1]
  assert faults < small / 8, (faults, small)
