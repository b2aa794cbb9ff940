"""Errors of a user's own code, told by its file and line, and by the task.

A team, an environment, a data set may be modules outside of the package. Where
the package calls them it does so within `blaming`: what they raise comes out as
a `types.UserError`, which ends the run with one message.
"""

import contextlib
import functools
import os
import pathlib
import sysconfig
import traceback
from collections.abc import Iterator
from typing import Any

from drmas_jax.types import RunError, TransientError, UserError

_PACKAGE = str(pathlib.Path(__file__).parent) + os.sep
_LIBRARIES = tuple(
  path + os.sep
  for name, path in sysconfig.get_paths().items()
  if name in ("stdlib", "platstdlib", "purelib", "platlib")
)


@contextlib.contextmanager
def blaming(
  doing: str,
  where: str = "",
  code: Any = None,
  passes: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
  """Around a call of what may be a user's own code.

  Args:
    doing: what the code was to do, such as "scoring".
    where: the task, and what else tells the call from others.
    code: the function, or the coroutine that is waiting, for an error that none
      of its lines has raised.
    passes: what is let through as it is, beside `TransientError`.

  Raises:
    UserError: in place of any other exception.
  """
  try:
    yield
  except (TransientError, RunError, *passes):
    raise
  except Exception as e:
    raise UserError(describe(e, doing, where, code)) from e


def describe(
  what: BaseException | str, doing: str, where: str = "", code: Any = None
) -> str:
  """The message: place, what is wrong, what was going on, the user's frames.

  Args:
    what: an exception, or a sentence about what `code` returned or asked for.
    doing: see `blaming`.
    where: see `blaming`.
    code: see `blaming`.
  """
  frames, inner = [], ""
  text = what
  if isinstance(what, BaseException):
    text = f"{type(what).__name__}: {what}"
    frames, inner = _frames(what)
  place = line(what) or _place(code) or inner
  lines = [f"{place}: {text}" if place else text]
  lines.append("  " + "; ".join(filter(None, (doing, where))))
  if not frames and inner and inner != place:
    lines.append(f"  raised in {inner}")
  for frame in frames:
    lines.append(
      f"    {_shown(frame.filename)}:{frame.lineno} in {frame.name}: "
      f"{frame.line}"
    )
  return "\n".join(lines)


def line(error: BaseException | str) -> str:
  """ "file:line" of the user's own that an exception is from; "" if none."""
  if isinstance(error, SyntaxError) and error.filename:
    return f"{_shown(error.filename)}:{error.lineno}"
  if not isinstance(error, BaseException):
    return ""
  frames, _ = _frames(error)
  return f"{_shown(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


def _frames(error: BaseException) -> tuple[list[traceback.FrameSummary], str]:
  """The user's own frames, and the place of the innermost one of all."""
  found = traceback.extract_tb(error.__traceback__)
  inner = f"{_shown(found[-1].filename)}:{found[-1].lineno}" if found else ""
  return [f for f in found if _is_users(f.filename)], inner


def _is_users(filename: str) -> bool:
  return not filename.startswith((_PACKAGE, *_LIBRARIES, "<frozen"))


def _shown(filename: str) -> str:
  """As short as it can be from where the command was given."""
  here = os.getcwd() + os.sep
  return filename.removeprefix(here)


def _place(code: Any) -> str:
  """ "file:line" of a function, or of where a coroutine waits."""
  place = ""
  while frame := getattr(code, "cr_frame", None):
    if not place or _is_users(frame.f_code.co_filename):
      place = f"{_shown(frame.f_code.co_filename)}:{frame.f_lineno}"
    code = code.cr_await
  while isinstance(code, functools.partial):
    code = code.func
  code = getattr(code, "__code__", None)  # of a method, too
  if place or code is None:
    return place
  return f"{_shown(code.co_filename)}:{code.co_firstlineno}"
