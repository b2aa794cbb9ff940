"""What is kept between runs, in the user's cache folder."""

import os
import pathlib


def folder(kind: str) -> pathlib.Path:
  """$XDG_CACHE_HOME/drmas_jax/<kind>, by default in ~/.cache; it need not be
  there.

  Args:
    kind: of what is kept: "xla", "checkpoints", "datasets", "replies".
  """
  base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  return pathlib.Path(base).expanduser() / "drmas_jax" / kind
