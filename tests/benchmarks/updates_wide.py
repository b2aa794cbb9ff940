"""Part d of `updates.py`: what a wider decoder's update makes of the machine,
and where the rest goes."""

import argparse
import collections
from collections.abc import Callable, Mapping, Sequence

import rollouts_lab as lab
import updates_lab
from updates_lab import MICRO_TOKENS, UNIFORM, WIDE, Rows, cost

SQUARE = (1, 2048, 2048, 2048)
ROWS = UNIFORM[:32]
_MEASURED = 4e9  # flop of a shape's bare products, at least

Shape = tuple[int, ...]  # of a product: [batch, m, k, n]
Costs = Mapping[Shape | str, Sequence[lab.Cost]]


def wide(args: argparse.Namespace) -> dict:
  """d. Products of 2048 x 2048, updates, and bare products of the shapes that
  an update has, in turns; then one update under the profiler."""
  job = {"rows": ROWS, "micro_tokens": MICRO_TOKENS}
  with updates_lab.one(WIDE) as peer:
    said = peer.ask({"do": "profile"} | job)
    found = [
      (kind, tuple(shape), seconds, runs)
      for kind, shape, seconds, runs in said["operations"]
    ]
    shapes = {SQUARE} | {shape for _, shape, _, _ in found if shape}
    costs = lab.in_turns(
      {"update": lambda: cost(peer.ask({"do": "update"} | job))}
      | {shape: _bare(peer, shape) for shape in sorted(shapes)},
      args.rounds,
    )
  flop = update_flop(WIDE, ROWS)
  rates = {
    "product": _rate(_flop(SQUARE) * _num(SQUARE), costs[SQUARE]),
    "update": _rate(flop, costs["update"]),
  }
  share = {
    clock: round(rates["update"][clock] / rates["product"][clock], 3)
    for clock in lab.Cost._fields
  }
  table = _table(found, costs)
  print(_text(table), flush=True)  # the JSON is for programs
  return {
    "gflop_per_s": rates,
    "share": share,
    "gflop": round(flop / 1e9, 1),
    "wall_s": round(lab.median(costs["update"], "wall"), 3),
    "by_kind": _by_kind(table),
    "table": table,
  }


def _flop(shape: Shape) -> int:
  batch, m, k, n = shape
  return 2 * batch * m * k * n


def _num(shape: Shape) -> int:
  return max(1, round(_MEASURED / _flop(shape)))


def _bare(peer: lab.Peer, shape: Shape) -> Callable[[], lab.Cost]:
  job = {"do": "product", "shape": shape, "num": _num(shape)}
  return lambda: cost(peer.ask(job))


def _rate(flop: float, spent: Sequence[lab.Cost]) -> dict[str, float]:
  """GFLOP/s by each clock."""
  return {
    clock: round(flop / lab.median(spent, clock) / 1e9, 1)
    for clock in lab.Cost._fields
  }


def _table(found: Sequence[tuple], costs: Costs) -> list[dict]:
  """A row for each kind of work and shape of product, the longest first.

  Seconds are those of the operations, added up over threads: where two run at
  a time they are more than the wall's. `bare_s` is what the same products take
  with nothing beside them.
  """
  groups = collections.defaultdict(lambda: [0.0, 0])
  for kind, shape, seconds, runs in found:
    groups[kind, shape][0] += seconds
    groups[kind, shape][1] += runs
  total = sum(seconds for seconds, _ in groups.values())
  rows = []
  for (kind, shape), (seconds, runs) in groups.items():
    row = {"kind": kind, "runs": runs, "s": seconds, "share": seconds / total}
    if shape:
      gflop = _flop(shape) * runs / 1e9
      bare = _rate(_flop(shape) * _num(shape), costs[shape])["wall"]
      row |= {
        "shape": "x".join(map(str, shape)),
        "gflop_per_s": round(gflop / seconds, 1),
        "bare_gflop_per_s": bare,
        "bare_s": round(gflop / bare, 3),
      }
    rows.append(row | {"s": round(seconds, 3), "share": round(row["share"], 3)})
  return sorted(rows, key=lambda row: -row["s"])


def _by_kind(table: Sequence[Mapping]) -> dict[str, dict[str, float]]:
  """Sums over the shapes of each kind; seconds, and of products bare ones."""
  found: dict[str, collections.Counter] = {}
  for row in table:
    spent = found.setdefault(row["kind"], collections.Counter())
    spent.update({k: row[k] for k in ("s", "share", "bare_s") if k in row})
  return {
    kind: {name: round(value, 3) for name, value in spent.items()}
    for kind, spent in found.items()
  }


def _text(table: Sequence[Mapping]) -> str:
  columns = {
    "kind": 24,
    "shape": -20,
    "runs": -6,
    "s": -8,
    "share": -7,
    "gflop_per_s": -12,
    "bare_gflop_per_s": -17,
    "bare_s": -8,
  }
  lines = [{name: name for name in columns}, *table]
  return "\n".join(
    "".join(
      f"{line.get(name, ''):{'<' if width > 0 else '>'}{abs(width)}}"
      for name, width in columns.items()
    )
    for line in lines
  )


def update_flop(sizes: Mapping[str, int], rows: Rows) -> float:
  """Of the products that an update cannot do without: forward, and twice that
  backward; of attention what lies under the diagonal."""
  heads, kv_heads = sizes["num_heads"], sizes["num_kv_heads"]
  d, inner = sizes["embed_dim"], sizes["head_dim"]
  layer = d * inner * (2 * heads + 2 * kv_heads) + 3 * d * sizes["mlp_dim"]
  weights = sizes["num_layers"] * layer + d * sizes["vocab_size"]
  lengths = [sum(pair) for pair in rows]
  pairs = sum(n * (n + 1) / 2 for n in lengths)
  attention = 2 * sizes["num_layers"] * heads * inner * pairs
  return 3 * 2 * (weights * sum(lengths) + attention)
