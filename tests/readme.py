"""The README's blocks and, as a script, the `python` that they find.

    python readme.py -m MODULE ..
    python readme.py FILE

The script is Python with three differences that a block does not see, so that
each ends soon and as it is written: flags of `README_CUTS` stand behind its
own, `drmas_jax.run` is given more changes, and a server is asked something once
it is up, and ended by SIGTERM.
"""

import json
import os
import pathlib
import re
import runpy
import signal
import subprocess
import sys
import textwrap
import threading
import urllib.request
from collections.abc import Mapping
from typing import Any, NamedTuple

import xla_flags

ROOT = pathlib.Path(__file__).parents[1]


class Block(NamedTuple):
  """A fenced one, without its indentation."""

  language: str
  text: str


def blocks() -> list[Block]:
  """All of them, in their order."""
  text = (ROOT / "README.md").read_text()
  found = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text, re.M | re.S)
  return [Block(language, textwrap.dedent(body)) for language, body in found]


def block(marker: str) -> str:
  """The first that has it, as .ci/run finds its own."""
  return next(b.text for b in blocks() if marker in b.text)


def bash(
  text: str,
  folder: pathlib.Path,
  config: Mapping[str, Any],
  flags: Mapping[str, Any] | None = None,
) -> str:
  """Runs a block in a folder, on one device, until its first error.

  Args:
    text: of the block, whose `python` is this file and whose `pip` does
      nothing.
    folder: where.
    config: what is changed of the config of each run, by key.
    flags: values of flags, where a command has them.

  Returns:
    What it said.
  """
  found = folder / ".bin"
  found.mkdir(exist_ok=True)
  for name, line in (
    ("python", f'exec "{sys.executable}" "{__file__}" "$@"'),
    ("pip", 'echo "pip $*"'),
  ):
    (found / name).write_text(f"#!/bin/sh\n{line}\n")
    (found / name).chmod(0o755)
  done = subprocess.run(
    ["bash", "-euo", "pipefail", "-c", text],
    cwd=folder,
    env=os.environ
    | {
      "PATH": f"{found}:{os.environ['PATH']}",
      "PYTHONPATH": str(ROOT),
      "README_CUTS": json.dumps({"config": config, "flags": flags or {}}),
      "XLA_FLAGS": xla_flags.flags(),
    },
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    timeout=280,
    check=False,
  )
  assert done.returncode == 0, f"{text}\n{done.stdout}"
  return done.stdout


# -- as a script ---------------------------------------------------------------


def _post(url: str, **body: Any) -> str:
  request = urllib.request.Request(
    url, json.dumps(body).encode(), {"Content-Type": "application/json"}
  )
  with urllib.request.urlopen(request, timeout=100) as reply:
    return reply.read().decode()


def _ask(url: str) -> None:
  """One question to all that a server offers; then its end."""
  try:
    if url.endswith("/retrieve"):
      print(_post(url, queries=["rivers of Norway"], topk=2))
    else:
      with urllib.request.urlopen(f"{url}/models", timeout=100) as reply:
        models = [model["id"] for model in json.load(reply)["data"]]
      content = "solve: 1+2+3 from left to right, modulo 10"
      messages = [{"role": "user", "content": content}]
      for model in models:
        print(_post(f"{url}/chat/completions", model=model, messages=messages))
  except BaseException as e:
    print(f"{type(e).__name__}: {e}", flush=True)
    os._exit(1)
  os.kill(os.getpid(), signal.SIGTERM)


class _Listening:
  """The standard output, in which a server says where it is."""

  def __init__(self, stream):
    self._stream = stream

  def write(self, text: str) -> int:
    if found := re.search(r" serves .* at (http\S+)", text):
      threading.Thread(target=_ask, args=found.groups(), daemon=True).start()
    return self._stream.write(text)

  def __getattr__(self, name):
    return getattr(self._stream, name)


def main() -> None:
  cuts = json.loads(os.environ["README_CUTS"])
  what, *argv = sys.argv[1:]
  sys.path[0] = ""
  if what != "-m":
    import drmas_jax

    whole = drmas_jax.run
    drmas_jax.run = lambda *args, **own: whole(*args, **own | cuts["config"])
    sys.argv[:] = [what, *argv]
    runpy.run_path(what, run_name="__main__")
    return
  module = argv[0]
  if module == "drmas_jax.main":
    argv += [f"--config.{key}={value}" for key, value in cuts["config"].items()]
  if module.endswith(".serve"):
    argv.append("--port=0")
    sys.stdout = _Listening(sys.stdout)
  argv += [f"{k}={v}" for k, v in cuts["flags"].items() if k in argv]
  sys.argv[:] = argv
  runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
  main()
