"""Where an update's seconds go: its operations in the profiler's trace, by the
text of the compiled program."""

import gzip
import json
import math
import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

_LINE = re.compile(r"\s*(?:ROOT )?%?([\w.-]+) = (.*?) ([\w-]+)\((.*)")
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")
_BODY = re.compile(r"%?([\w.-]+) (?:\(.*)?\{$")
_HOLDS = {"while", "call", "conditional"}  # their operations have lines, too


class Operation(NamedTuple):
  """A line of the program.

  Attributes:
    kind: of work.
    shape: of a product: [batch, m, k, n]; else none.
    seconds: of all its runs.
    runs: how often it ran.
  """

  kind: str
  shape: tuple[int, ...]
  seconds: float
  runs: int


def operations(
  run: Callable[[], Any], text: str, vocab_size: int
) -> dict[str, Any]:
  """Runs under the profiler what has been compiled to `text`."""
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      run()
    (path,) = pathlib.Path(folder).rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
  lines = _lines(text)
  spent: dict[str, list[float]] = {}
  for event in events:
    if event.get("ph") == "X" and event.get("name") in lines:
      spent.setdefault(event["name"], []).append(event["dur"] / 1e6)
  return {
    "operations": [
      Operation(*_describe(lines[name], vocab_size), sum(times), len(times))
      for name, times in spent.items()
    ]
  }


class _Line(NamedTuple):
  """An instruction: its name, opcode, the name that JAX gave it, dims of result
  and operands, and of the product that it is, or that is fused into it."""

  name: str
  opcode: str
  made_by: str
  dims: list[tuple[int, ...]]
  product: tuple[int, ...]


def _lines(text: str) -> dict[str, _Line]:
  """By name, of all computations; a fusion stands for what is in it."""
  found: dict[str, _Line] = {}
  inside: dict[str, tuple[int, ...]] = {}  # product, by computation
  shapes: dict[str, tuple[int, ...]] = {}
  body = ""
  for line in text.splitlines():
    if begun := _BODY.match(line.removeprefix("ENTRY ")):
      body = begun[1]
    if not (parsed := _LINE.match(line)) or parsed[3] in _HOLDS:
      continue
    name, made, opcode, rest = parsed.groups()
    dims = [_dims(d) for d in _SHAPE.findall(made)]
    shapes[name] = dims[0] if dims else ()
    operands = re.findall(r"%([\w.-]+)", rest.partition(")")[0])
    dims += [shapes.get(o, ()) for o in operands]
    product = ()
    if opcode == "dot":
      product = _product(shapes[operands[0]], shapes[operands[1]], rest)
      inside[body] = product
    elif called := re.search(r"calls=%?([\w.-]+)", rest):
      product = inside.get(called[1], ())
    origin = re.search('op_name="([^"]*)"', rest)
    found[name] = _Line(
      name, opcode, origin[1] if origin else "", dims, product
    )
  return found


def _dims(text: str) -> tuple[int, ...]:
  return tuple(map(int, text.split(","))) if text else ()


def _product(lhs, rhs, attributes: str) -> tuple[int, ...]:
  """[batch, m, k, n] of a dot."""

  def named(name: str) -> list[int]:
    found = re.search(name + r"={([\d,]*)}", attributes)
    return list(_dims(found[1])) if found else []

  batch = math.prod(lhs[i] for i in named("lhs_batch_dims"))
  inner = math.prod(lhs[i] for i in named("lhs_contracting_dims"))
  return (
    batch,
    math.prod(lhs) // batch // inner,
    inner,
    math.prod(rhs) // batch // inner,
  )


def _describe(line: _Line, vocab_size: int) -> tuple[str, tuple[int, ...]]:
  """(kind, product)."""
  if line.product:
    if line.product[0] > 1:
      return "attention: products", line.product
    in_layers = "Block" in line.made_by
    return f"{'layers' if in_layers else 'head'}: products", line.product
  return _element_wise(line, vocab_size), ()


def _element_wise(line: _Line, vocab_size: int) -> str:
  # What XLA adds has no name.
  if not line.made_by or line.opcode == "copy" or "transpos" in line.name:
    return "copies"
  if "while" not in line.made_by:
    return "optimizer"
  if "Block" not in line.made_by:
    wide = any(vocab_size in dims for dims in line.dims)
    return "head: the rest" if wide else "loss and sums"
  part = "attention" if "attention" in line.made_by else "layers"
  return f"{part}: the rest"
