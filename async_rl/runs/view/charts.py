"""Geometry of the charts: from columns to the coordinates that the templates draw as SVG.

Pure. Coordinates are in units of the drawing, whose origin is the upper left corner.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from async_rl.core.frozen import frozen
from async_rl.runs.report import Floats, Graph
from async_rl.runs.view.texts import number

WIDTH, HEIGHT = 430, 210
LEFT, RIGHT, TOP, BOTTOM = 52, 8, 8, 24
FRAME = {
    "width": WIDTH,
    "height": HEIGHT,
    "left": LEFT,
    "right": WIDTH - RIGHT,
    "top": TOP,
    "bottom": HEIGHT - BOTTOM,
}
"""Edges of the area that the lines are drawn in, for the templates."""
_MOST_POINTS = 300  # more than pixels of a line only make the page larger
_NUM_TICKS = 4
_NICE = (1.0, 2.0, 2.5, 5.0, 10.0)
NUM_COLOURS = 8


@frozen
class Line:
    """One run's curve: points of an SVG polyline, smoothed and as measured."""

    label: str
    colour: int
    points: str
    measured: str


@frozen
class Tick:
    """A mark of an axis: its position in the drawing, and its label."""

    at: float
    label: str


@frozen
class Chart:
    """A drawing. x, y: smallest and largest value of each axis."""

    graph: Graph
    lines: list[Line]
    x: tuple[float, float]
    y: tuple[float, float]
    x_ticks: list[Tick]
    y_ticks: list[Tick]


def line_chart(graph: Graph, *, smoothing: float = 0.0) -> Chart | None:
    """Return the drawing of a graph; None if no series has a value.

    smoothing: weight of the past in an exponential mean, 0 (none) to below 1.
    """
    drawn = [series for series in graph.series if len(series.xs)]
    if not drawn:
        return None
    # Spikes of the measured curve may leave the drawing, so that a smoothed one fills it.
    smooth = [smoothed(series.ys, smoothing) for series in drawn]
    x = _span(np.concatenate([series.xs for series in drawn]), is_padded=False)
    y = _span(np.concatenate(smooth), is_padded=True)
    return Chart(
        graph=graph,
        lines=[
            Line(
                label=series.label,
                colour=series.colour % NUM_COLOURS,
                points=_points(series.xs, ys, x, y),
                measured=_points(series.xs, series.ys, x, y) if smoothing else "",
            )
            for series, ys in zip(drawn, smooth, strict=True)
        ],
        x=x,
        y=y,
        x_ticks=[Tick(at=_x_of(value, x), label=number(value)) for value in ticks(*x)],
        y_ticks=[Tick(at=_y_of(value, y), label=number(value)) for value in ticks(*y)],
    )


def smoothed(values: Floats, weight: float) -> Floats:
    """Return the exponential mean of the values so far, without a pull to 0 at the start."""
    if not weight:
        return values
    sums = itertools.accumulate(
        values.tolist(), lambda past, value: weight * past + (1 - weight) * value, initial=0.0
    )
    norms = 1 - weight ** np.arange(1, len(values) + 1)
    result: Floats = np.array(list(sums)[1:]) / norms
    return result


def ticks(low: float, high: float) -> list[float]:
    """Return round values between low and high, about four."""
    step = _nice((high - low) / _NUM_TICKS)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def _nice(step: float) -> float:
    magnitude = 10.0 ** math.floor(math.log10(step))
    return magnitude * next(nice for nice in _NICE if nice * magnitude >= step * (1 - 1e-9))


def _span(values: Floats, *, is_padded: bool) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    if low == high:
        # A constant has no range, so its own size is used as the scale.
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    margin = (high - low) * 0.05 if is_padded else 0.0
    return low - margin, high + margin


def _x_of(value: float, x: tuple[float, float]) -> float:
    return round(LEFT + (value - x[0]) / (x[1] - x[0]) * (WIDTH - LEFT - RIGHT), 1)


def _y_of(value: float, y: tuple[float, float]) -> float:
    return round(HEIGHT - BOTTOM - (value - y[0]) / (y[1] - y[0]) * (HEIGHT - TOP - BOTTOM), 1)


def _points(xs: Floats, ys: Floats, x: tuple[float, float], y: tuple[float, float]) -> str:
    if len(xs) > _MOST_POINTS:
        # Means of neighbours keep the level, which every n-th value alone would not.
        bounds = np.linspace(0, len(xs), _MOST_POINTS + 1).astype(int)[:-1]
        sizes = np.diff([*bounds, len(xs)])
        xs, ys = np.add.reduceat(xs, bounds) / sizes, np.add.reduceat(ys, bounds) / sizes
    if len(xs) == 1:
        # A line of one point would be invisible.
        at, value = _x_of(xs[0], x), _y_of(ys[0], y)
        return f"{at - 3:g},{value:g} {at + 3:g},{value:g}"
    pairs = zip(xs.tolist(), ys.tolist(), strict=True)
    return " ".join(f"{_x_of(at, x):g},{_y_of(value, y):g}" for at, value in pairs)
