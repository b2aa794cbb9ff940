"""Panels of lines over steps, as a picture: what compares runs."""

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from drmas_jax import writers


class Line(NamedTuple):
  """A series over steps.

  Attributes:
    label: of the legend.
    steps: where it was measured.
    values: likewise long.
    color: number of one of ten colors.
    look: of matplotlib: "-", "--", "o-"; with points it is never smoothed.
    band: (low, high) around the values, where several runs are behind them.
  """

  label: str
  steps: np.ndarray
  values: np.ndarray
  color: int
  look: str = "-"
  band: tuple[np.ndarray, np.ndarray] | None = None


class Panel(NamedTuple):
  """A panel of a figure; `scale` is "share" (0 to 1), "log" or "linear"."""

  title: str
  scale: str
  lines: Sequence[Line]


def draw(panels: Sequence[Panel], path: pathlib.Path, columns: int) -> None:
  """All panels, over steps, as what the path's suffix says (.png, .pdf, ..)."""
  from matplotlib.figure import Figure

  rows = -(-len(panels) // columns)
  figure = Figure(figsize=(5.5 * columns, 3.75 * rows), layout="constrained")
  all_axes = figure.subplots(rows, columns, squeeze=False).flat
  for axes, panel in zip(all_axes, panels, strict=True):
    axes.set_title(panel.title, loc="left", fontsize=11)
    axes.set_xlabel("step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    for line in panel.lines:
      _draw_line(axes, line)
    if panel.lines:
      axes.legend(frameon=False, fontsize=9)
    else:
      middle = {"ha": "center", "transform": axes.transAxes}
      axes.text(0.5, 0.5, "not measured", **middle)
    _set_range(axes, [line.values for line in panel.lines], panel.scale)
  with writers.replacing(path) as f:
    figure.savefig(f, format=path.suffix.removeprefix("."))


def _draw_line(axes: Any, line: Line) -> None:
  """A long one is smoothed: its moving mean, over what was measured if that
  is of one run."""
  series, color = (
    [line.steps, line.values, *(line.band or ())],
    f"C{line.color}",
  )
  width = max(1, len(line.values) // 20)
  if "o" not in line.look and width > 1:
    if line.band is None:
      axes.plot(*series, color=color, alpha=0.25, linewidth=0.8)
    mean = np.ones(width) / width
    series = [np.convolve(values, mean, "valid") for values in series]
  steps, values, *band = series
  axes.plot(
    steps, values, line.look, color=color, label=line.label, markersize=4
  )
  if band:
    axes.fill_between(steps, *band, color=color, alpha=0.15, linewidth=0)


def _set_range(axes: Any, lines: list[np.ndarray], scale: str) -> None:
  """Logarithmic, or for shares the whole of 0 to 1."""
  values = np.concatenate([*lines, np.zeros(0)])
  if scale == "log" and (values > 0).any():
    axes.set_yscale("log")
  if scale == "share" and ((values >= 0) & (values <= 1)).all():
    axes.set_ylim(-0.03, 1.03)
