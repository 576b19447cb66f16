"""Geometry of the charts: from columns to the coordinates that the templates draw as SVG.

Pure. Coordinates are in units of the drawing, whose origin is the upper left corner.
"""

import math

import numpy as np
from numpy.typing import ArrayLike

from async_rl.core.frozen import frozen
from async_rl.core.types import DoubleArray
from async_rl.runs.report import Graph, number

FRAME = {"width": 430, "height": 210, "left": 52, "right": 422, "top": 8, "bottom": 186}
"""Size of the drawing, and edges of the area of the lines: the labels of the axes are at its left
and below it.
"""
Span = tuple[float, float]
_ACROSS: Span = (FRAME["left"], FRAME["right"])
_UP: Span = (FRAME["bottom"], FRAME["top"])  # positions grow downwards, values upwards
_MOST_POINTS = 300  # more than pixels of a line only make the page larger
_NUM_TICKS = 4
_NICE = (1.0, 2.0, 2.5, 5.0, 10.0)
NUM_COLOURS = 8


@frozen
class Chart:
    """A drawing. lines: label, colour and points of an SVG polyline. x, y: smallest and largest
    value of each axis. x_ticks, y_ticks: position in the drawing and label of each mark.
    """

    graph: Graph
    lines: list[tuple[str, int, str]]
    x: Span
    y: Span
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]


def line_chart(graph: Graph) -> Chart | None:
    """Return the drawing of a graph; None if no series has a value."""
    drawn = [(colour, series) for colour, series in enumerate(graph.series) if len(series.xs)]
    if not drawn:
        return None
    x = _span(np.concatenate([series.xs for _, series in drawn]), is_padded=False)
    y = _span(np.concatenate([series.ys for _, series in drawn]), is_padded=True)
    return Chart(
        graph=graph,
        lines=[
            (series.label, colour % NUM_COLOURS, _points(series.xs, series.ys, x, y))
            for colour, series in drawn
        ],
        x=x,
        y=y,
        x_ticks=_ticks(x, _ACROSS),
        y_ticks=_ticks(y, _UP),
    )


def ticks(low: float, high: float) -> list[float]:
    """Return round values between low and high, about four."""
    about = (high - low) / _NUM_TICKS
    magnitude = 10.0 ** math.floor(math.log10(about))
    step = magnitude * next(nice for nice in _NICE if nice * magnitude >= about * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def _span(values: DoubleArray, *, is_padded: bool) -> Span:
    low = float(values.min())
    high = float(values.max())
    if low == high:
        # A constant has no range, so its own size is used as the scale.
        half = (abs(low) or 1.0) / 2
        low -= half
        high += half
    # So that the largest value is not drawn on the frame.
    margin = (high - low) * 0.05 if is_padded else 0.0
    return low - margin, high + margin


def _drawn(values: ArrayLike, span: Span, edges: Span) -> list[float]:
    """Return the positions of values between the edges of the drawing that show the span."""
    low, high = span
    shares = (np.asarray(values) - low) / (high - low)
    begin, end = edges
    places = begin + shares * (end - begin)
    return [round(at, 1) for at in places.tolist()]


def _ticks(span: Span, edges: Span) -> list[tuple[float, str]]:
    values = ticks(*span)
    return list(zip(_drawn(values, span, edges), map(number, values), strict=True))


def _points(xs: DoubleArray, ys: DoubleArray, x: Span, y: Span) -> str:
    if len(xs) > _MOST_POINTS:
        # Means of neighbours keep the level, which every n-th value alone would not.
        bounds = np.linspace(0, len(xs), _MOST_POINTS + 1).astype(int)[:-1]
        sizes = np.diff([*bounds, len(xs)])
        xs = np.add.reduceat(xs, bounds) / sizes
        ys = np.add.reduceat(ys, bounds) / sizes
    across = _drawn(xs, x, _ACROSS)
    up = _drawn(ys, y, _UP)
    if len(xs) == 1:
        # A line of one point would be invisible.
        across = [across[0] - 3, across[0] + 3]
        up *= 2
    return " ".join(f"{at:g},{value:g}" for at, value in zip(across, up, strict=True))
