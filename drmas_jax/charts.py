"""A self-contained HTML page with curves as inline SVG.

No text can become markup: every string that is not `Html` is escaped as it is
put in, and the policy of a `document` forbids what is not its own. Curves tell
who they are by colour, dashes and marks; a small script shows the values under
the pointer, and without it everything else is still there.
"""

import base64
import hashlib
import html
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

_POINTS = 240  # of a curve; a longer one is thinned


# -- markup: what is not Html is text -----------------------------------------


class Html(str):
  """Markup; any other string is text, and escaped."""


def tag(_name: str, *children: Any, **attributes: Any) -> Html:
  """An element; `class_` is the attribute class, x_y is x-y; None: none."""
  given = "".join(
    f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
    for key, value in attributes.items()
    if value is not None
  )
  return Html(f"<{_name}{given}>{join(children)}</{_name}>")


def join(parts: Iterable[Any]) -> Html:
  return Html(
    "".join(
      p if isinstance(p, Html) else html.escape(str(p))
      for p in parts
      if p is not None
    )
  )


def table(
  header: Sequence[Any], rows: Iterable[Sequence[Any]], kind: str = ""
) -> Html:
  """A table, whose wide ones scroll by themselves."""
  head = tag("tr", *(tag("th", cell) for cell in header))
  body = [tag("tr", *(tag("td", cell) for cell in row)) for row in rows]
  whole = tag("table", tag("thead", head), tag("tbody", *body))
  return tag("div", whole, class_=f"scroll {kind}".strip())


def section(title: str, *children: Any) -> Html:
  return tag("section", tag("h2", title), *children)


def folded(title: Any, *children: Any, **attributes: Any) -> Html:
  return tag("details", tag("summary", title), *children, **attributes)


def number(value: Any) -> str:
  """Four digits that matter, without an exponent where it reads well."""
  if value is None or isinstance(value, (str, bool)):
    return "" if value is None else str(value)
  size = abs(value)
  if size >= 1e6 or 0 < size < 1e-3:
    return f"{value:.3g}"
  return f"{value:,.0f}" if size >= 1e4 else f"{value:.4g}"


# -- curves --------------------------------------------------------------------


class Line(NamedTuple):
  """A curve; `look` numbers its colour, dashes and marks."""

  label: str
  steps: np.ndarray
  values: np.ndarray
  look: int


class Chart(NamedTuple):
  """Curves over steps.

  Attributes:
    title: what is measured; with its unit.
    note: how to read it, in a sentence.
    scale: "share" (0 to 1), "log" or "linear".
    lines: those that there are.
    factor: points more than so many times the running median are marked;
      0: none.
    window: steps that the median is over.
  """

  title: str
  note: str
  scale: str
  lines: list[Line]
  factor: float = 0.0
  window: int = 0


class _Axis(NamedTuple):
  """Values to places: `low` at `start`, `high` at `end`."""

  low: float
  high: float
  start: float
  end: float
  log: bool = False

  def at(self, values: Any) -> np.ndarray:
    low, high = self.low, self.high
    if self.log:
      low, high = math.log(low), math.log(high)
      values = np.log(np.maximum(values, self.low))
    share = (np.asarray(values, float) - low) / (high - low)
    return self.start + share * (self.end - self.start)

  def ticks(self) -> list[float]:
    """Round numbers, five or so."""
    if not self.log or self.high / self.low < 4:
      return _ticks(self.low, self.high)
    powers = range(
      math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1
    )
    every = max(1, len(powers) // 5)
    kinds = (1, 2, 5) if len(powers) <= 3 else (1,)
    found = [k * 10.0**p for p in powers if p % every == 0 for k in kinds]
    return [v for v in found if self.low <= v <= self.high]


def _ticks(low: float, high: float, whole: bool = False) -> list[float]:
  rough = (high - low) / 5
  size = 10.0 ** math.floor(math.log10(rough))
  size *= next(k for k in (1, 2, 5, 10) if k * size >= rough)
  size = max(size, 1.0) if whole else size
  first, last = math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9)
  return [i * size for i in range(first, last + 1)]


_WIDTH, _HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 20, 18, 34
_DASHES = (None, None, "7 4", "2 3", "9 3 2 3", "12 3")
_MARKS = "ocsdtx"  # circle, ring, square, diamond, triangle, cross


def figure(chart: Chart) -> Html:
  """A chart with its title and legend; the script shows its values."""
  x, y = _axes(chart)
  drawn, shown = [_grid(x, y)], []
  for line in chart.lines:
    steps, values, band = _thin(line.steps, line.values)
    band = None if band is None else y.at(band)
    drawn.append(_curve(line, x.at(steps), y.at(values), band))
    shown.append(
      {
        "name": line.label,
        "look": line.look % len(_DASHES),
        "x": steps.tolist(),
        "y": [float(f"{v:.4g}") for v in values],
      }
    )
    if chart.factor:
      above = _spikes(line.values, chart.factor, chart.window)
      for step, value in zip(
        line.steps[above], line.values[above], strict=True
      ):
        drawn.append(_spike(line, step, value, x, y))
  drawn.append(tag("line", class_="at", y1=y.end, y2=y.start))
  places = {"low": x.low, "high": x.high, "start": x.start, "end": x.end}
  picture = tag(
    "svg",
    *drawn,
    viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
    role="img",
    aria_label=chart.title,
  )
  legend = [tag("span", _sample(line.look), line.label) for line in chart.lines]
  if chart.factor:
    legend.append(
      tag(
        "span", f"▼ over {chart.factor:g}x the running median", class_="spike"
      )
    )
  return tag(
    "figure",
    tag("figcaption", tag("b", chart.title), tag("small", chart.note)),
    picture,
    tag("div", *legend, class_="legend"),
    tag("output"),
    data_x=json.dumps(places),
    data_lines=json.dumps(shown, separators=(",", ":")),
  )


def _axes(chart: Chart) -> tuple[_Axis, _Axis]:
  steps = np.concatenate([line.steps for line in chart.lines])
  values = np.concatenate([line.values for line in chart.lines])
  right = max(float(steps.max()), 1.0)
  log = chart.scale == "log" and bool((values > 0).any())
  low, high = float(values.min()), float(values.max())
  if log:
    low = float(values[values > 0].min()) / 1.15
    high = max(high * 1.15, low * 2)
  elif chart.scale == "share" and low >= 0 and high <= 1:
    low, high = 0.0, 1.0
  else:
    low, high = min(low, 0.0), max(high, 0.0)
    room = 0.05 * (high - low) or 1.0
    low, high = low - room * (low < 0), high + room * (high > 0 or low == 0)
  return (
    _Axis(0.0, right, _LEFT, _WIDTH - _RIGHT),
    _Axis(low, high, _HEIGHT - _BOTTOM, _TOP, log),
  )


def _grid(x: _Axis, y: _Axis) -> Html:
  parts = []
  for value in y.ticks():
    at = _place(y.at(value))
    parts.append(tag("line", class_="grid", x1=x.start, x2=x.end, y1=at, y2=at))
    parts.append(
      tag("text", number(value), x=_LEFT - 6, y=at, dy="0.35em", class_="y")
    )
  for value in _ticks(x.low, x.high, whole=True):
    at = _place(x.at(value))
    parts.append(
      tag("line", class_="tick", x1=at, x2=at, y1=y.start, y2=y.start + 4)
    )
    parts.append(tag("text", number(value), x=at, y=y.start + 16, class_="x"))
  parts.append(
    tag("line", class_="axis", x1=x.start, x2=x.end, y1=y.start, y2=y.start)
  )
  middle = (x.start + x.end) / 2
  parts.append(tag("text", "step", x=middle, y=_HEIGHT - 3, class_="x"))
  return join(parts)


def _curve(line: Line, xs: np.ndarray, ys: np.ndarray, band: Any) -> Html:
  """A line, with marks where points are few, over its band if it has one."""
  look = line.look % len(_DASHES)
  parts = []
  if band is not None:
    edge = [*zip(xs, band[0], strict=True)]
    edge += reversed([*zip(xs, band[1], strict=True)])
    parts.append(tag("polygon", points=_points(edge)))
  parts.append(
    tag(
      "polyline",
      points=_points(zip(xs, ys, strict=True)),
      stroke_dasharray=_DASHES[look],
    )
  )
  if len(xs) <= 30:
    parts += [_mark(look, a, b) for a, b in zip(xs, ys, strict=True)]
  return tag("g", *parts, class_=f"c{look}")


def _mark(look: int, x: float, y: float) -> Html:
  shapes = {
    "o": lambda: tag("circle", cx=_place(x), cy=_place(y), r=3),
    "c": lambda: tag("circle", cx=_place(x), cy=_place(y), r=3, class_="ring"),
    "s": lambda: _path(f"M{x - 3:.1f} {y - 3:.1f}h6v6h-6z"),
    "d": lambda: _path(f"M{x:.1f} {y - 4:.1f}l4 4l-4 4l-4 -4z"),
    "t": lambda: _path(f"M{x:.1f} {y - 4:.1f}l4 7h-8z"),
    "x": lambda: _path(f"M{x - 3:.1f} {y:.1f}h6M{x:.1f} {y - 3:.1f}v6"),
  }
  return shapes[_MARKS[look]]()


def _path(d: str) -> Html:
  return tag("path", d=d)


def _spike(line: Line, step: float, value: float, x: _Axis, y: _Axis) -> Html:
  a, b = float(x.at(step)), float(y.at(value))
  said = f"{line.label}, step {number(step)}: {number(value)}"
  return tag(
    "path",
    tag("title", said),
    d=f"M{a:.1f} {b - 5:.1f}l-6 -10h12z",
    class_=f"spike c{line.look % len(_DASHES)}",
  )


def _sample(look: int) -> Html:
  """A curve's look, for a legend."""
  look %= len(_DASHES)
  drawn = tag("line", x1=0, x2=30, y1=6, y2=6, stroke_dasharray=_DASHES[look])
  return tag(
    "svg",
    tag("g", drawn, _mark(look, 15.0, 6.0), class_=f"c{look}"),
    width=30,
    height=12,
    aria_hidden="true",
  )


def _points(places: Iterable[tuple[float, float]]) -> str:
  return " ".join(f"{a:.1f},{b:.1f}" for a, b in places)


def _place(value: Any) -> str:
  return f"{float(value):.1f}"


def _thin(
  steps: np.ndarray, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
  """(steps, values, None), or of a long curve the means of equal parts, each at
  its last step, and [2, parts] the least and the greatest of each."""
  if len(steps) <= _POINTS:
    return steps, values, None
  parts = np.array_split(values, _POINTS)
  last = [part[-1] for part in np.array_split(steps, _POINTS)]
  band = np.array([[p.min() for p in parts], [p.max() for p in parts]])
  return np.array(last), np.array([p.mean() for p in parts]), band


def _spikes(values: np.ndarray, factor: float, window: int) -> np.ndarray:
  """[N] whether a value is over `factor` times the median of up to `window`
  before it; nothing is, before there are 5."""
  above = np.zeros(len(values), bool)
  for i in range(5, len(values)):
    before = np.median(values[max(0, i - window) : i])
    above[i] = values[i] > factor * before > 0
  return above


def bar(share: float, text: str = "") -> Html:
  """A bar of a table, as long as the share of its cell."""
  drawn = tag("rect", width=_place(150 * share), height=12, class_="bar")
  picture = tag("svg", drawn, width=154, height=12, aria_hidden="true")
  return tag("span", picture, text)


# Colours of Okabe and Ito, which differ for colour-blind eyes too; dashes and
# marks tell the same without them.
_STYLE = """
:root { color-scheme: light dark; --back: #fff; --fore: #1b1b1b; --dim: #666;
  --rule: #ddd; --soft: #f5f5f5; --c0: #444; --c1: #0072b2; --c2: #c24e00;
  --c3: #00795a; --c4: #b0578c; --c5: #8a6d00; }
@media (prefers-color-scheme: dark) { :root { --back: #16181b; --fore: #e6e6e6;
  --dim: #a0a0a0; --rule: #3a3d42; --soft: #202327; --c0: #c8c8c8;
  --c1: #56b4e9; --c2: #ff9d5c; --c3: #2fd3a4; --c4: #f0a3cd; --c5: #f0d34a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1280px; padding: 1rem 1.5rem 4rem;
  background: var(--back); color: var(--fore);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { margin: .3rem 0; font-size: 1.5rem; }
h2 { margin: 2.2rem 0 .8rem; font-size: 1.15rem; padding-bottom: .2rem;
  border-bottom: 1px solid var(--rule); }
h4 { margin: .9rem 0 .3rem; } small, .note, dt { color: var(--dim); }
h4 small { font-weight: normal; }
dl { display: flex; flex-wrap: wrap; gap: .6rem 2rem; margin: .8rem 0; }
dt { font-size: .85rem; } dd { margin: 0; font-size: 1.15rem; }
.charts { display: grid; gap: 1.6rem 2rem;
  grid-template-columns: repeat(auto-fill, minmax(min(440px, 100%), 1fr)); }
figure { margin: 0; position: relative; min-width: 0; }
figcaption small { display: block; min-height: 1.4em; }
figure > svg { width: 100%; height: auto; display: block; touch-action: pan-y; }
svg text { fill: var(--dim); font: 12px system-ui, sans-serif; }
text.x { text-anchor: middle; } text.y { text-anchor: end; }
line.grid { stroke: var(--rule); } line.axis, line.tick { stroke: var(--dim); }
line.at { stroke: var(--dim); visibility: hidden; }
g line, polyline { fill: none; stroke: currentColor; stroke-width: 1.8; }
polygon { fill: currentColor; opacity: .18; }
g circle, g path { fill: currentColor; stroke: currentColor; }
g circle.ring { fill: var(--back); }
path.spike { fill: currentColor; stroke: var(--back); }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); }
.c3 { color: var(--c3); } .c4 { color: var(--c4); } .c5 { color: var(--c5); }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1.2rem;
  font-size: .85rem; padding-left: 1rem; }
.legend svg { vertical-align: -1px; margin-right: .4rem; }
output { position: absolute; pointer-events: none; display: none; z-index: 1;
  background: var(--back); border: 1px solid var(--rule); border-radius: 4px;
  padding: .3rem .5rem; font-size: .8rem; white-space: pre; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .87rem; }
th, td { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0;
  border-bottom: 1px solid var(--rule); }
td:last-child { overflow-wrap: anywhere; }
th { color: var(--dim); font-weight: normal; } td { min-width: 3.5rem; }
td svg { margin-right: .5rem; vertical-align: -1px; }
td span { white-space: nowrap; }
rect.bar { fill: var(--c1); }
.alarms td:nth-child(2) { color: var(--c2); font-weight: 600; }
details { margin: .4rem 0; } summary { cursor: pointer; }
details.episode { padding: .3rem .8rem; background: var(--soft); }
pre { margin: .2rem 0; padding: .5rem .7rem; max-height: 24rem; overflow: auto;
  white-space: pre-wrap; overflow-wrap: anywhere; font-size: .83rem;
  background: var(--back); border: 1px solid var(--rule); }
"""

# Under the pointer: the nearest step, and what the curves say there.
_SCRIPT = """
for (const figure of document.querySelectorAll("figure")) {
  const x = JSON.parse(figure.dataset.x);
  const lines = JSON.parse(figure.dataset.lines);
  const steps = [...new Set(lines.flatMap(line => line.x))];
  const svg = figure.querySelector("svg"), width = svg.viewBox.baseVal.width;
  const mark = svg.querySelector("line.at");
  const said = figure.querySelector("output");
  svg.addEventListener("pointerleave", () => {
    said.style.display = "none"; mark.style.visibility = "hidden"; });
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const place = (event.clientX - box.left) * width / box.width;
    const scale = (x.high - x.low) / (x.end - x.start);
    const want = x.low + (place - x.start) * scale;
    const step = steps.reduce((best, s) =>
      Math.abs(s - want) < Math.abs(best - want) ? s : best);
    const at = x.start + (step - x.low) / scale;
    mark.setAttribute("x1", at); mark.setAttribute("x2", at);
    mark.style.visibility = "visible";
    said.replaceChildren("step " + step);
    for (const line of lines) {
      const i = line.x.indexOf(step);
      if (i < 0) continue;
      const row = document.createElement("div");
      row.className = "c" + line.look;
      row.textContent = line.name + "  " + line.y[i];
      said.append(row);
    }
    said.style.display = "block";
    const left = at * box.width / width, right = left > box.width / 2;
    said.style.left = right ? "auto" : left + 12 + "px";
    said.style.right = right ? box.width - left + 12 + "px" : "auto";
    said.style.top = box.top - figure.getBoundingClientRect().top + 8 + "px";
  });
}
"""
_DIGEST = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
_POLICY = (
  "default-src 'none'; style-src 'unsafe-inline'; "
  f"script-src 'sha256-{_DIGEST}'"
)


def document(title: str, *body: Any) -> str:
  """The page; it loads nothing, and runs nothing but its own script."""
  head = (
    Html('<!doctype html><html lang="en"><head><meta charset="utf-8">'),
    Html('<meta name="viewport" content="width=device-width">'),
    Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
    tag("title", title),
    tag("style", Html(_STYLE)),
    Html("</head>"),
  )
  script = tag("script", Html(_SCRIPT))
  return join((*head, tag("body", *body, script), Html("</html>\n")))
