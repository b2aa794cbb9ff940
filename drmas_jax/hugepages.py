"""Memory in pages of 2 MB, which XLA's CPU code is up to a tenth faster with.

A program takes hundreds of MB from the C library and gives them back at its
end, and the kernel fills them in anew, 4 kB at a time: 49,000 faults in an
update of 8 M parameters and 1024 tokens, a tenth of its CPU seconds. glibc asks
for large pages (`madvise`) where a variable says so when a process starts, so a
command that sees that it would help begins once more.
"""

import contextlib
import os
import pathlib
import sys

_VARIABLE, _TUNABLE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
_ENABLED = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
# An option of Python's for whoever reads it. Variables may get lost on the way.
_AGAIN = "drmas_jax_large_pages"


def restart() -> None:
  """Starts this process anew with the variable, if nothing speaks against it:
  it is no fresh process (a notebook's, a debugger's), another C library, a
  kernel that gives large pages to all or to none, or the user's own setting of
  the tunable, which stands. To be called before anything is done."""
  tunables = os.environ.get(_VARIABLE, "")
  if _AGAIN in sys._xoptions or _TUNABLE in tunables:
    return
  if not _given() or len(os.listdir("/proc/self/task")) > 1:
    return
  tunables = f"{tunables}:{_TUNABLE}=1".removeprefix(":")
  environment = os.environ | {_VARIABLE: tunables}
  command = [sys.executable, "-X", _AGAIN, *sys.orig_argv[1:]]
  with contextlib.suppress(OSError):  # it goes on as it is
    os.execve(sys.executable, command, environment)


def _given() -> bool:
  """Whether large pages go to those who ask, and glibc knows how."""
  try:
    enabled = _ENABLED.read_text()
    library, version = os.confstr("CS_GNU_LIBC_VERSION").split()
  except (OSError, ValueError, AttributeError):  # no Linux, no glibc
    return False
  known = tuple(map(int, version.split(".")[:2])) >= (2, 35)
  return "[madvise]" in enabled and library == "glibc" and known
