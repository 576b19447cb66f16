"""The page of `async-rl plan --html`: the forecasts as curves over one setting, and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from async_rl.launchers.commands import pages
from async_rl.runs.forecast.simulation import Forecast
from async_rl.runs.forecast.sweep import Values

Rows = Sequence[tuple[Values, Forecast]]


def write_page(
    file: Path, rows: Rows, lines: Sequence[str], titles: Sequence[str], cells: Sequence[list[str]]
) -> None:
    """Write one HTML file without scripts or other files."""
    content = {"charts": charts(rows), "lines": lines, "titles": titles, "cells": cells}
    file.write_text(pages.rendered("plan.html", **content))


def charts(rows: Rows) -> list[object]:
    """Return the curves over the setting with the most values, one line for each of the others."""
    from async_rl.runs.view.charts import Series, line_chart

    values = {key: {chosen[key] for chosen, _ in rows} for key in rows[0][0]}
    across = max(values, key=lambda key: len(values[key]), default="")
    if not across or len(values[across]) == 1:
        return []
    series: dict[str, list[tuple[float, Forecast]]] = {}
    for chosen, forecast in rows:
        others = (f"{k}={v:g}" for k, v in chosen.items() if k != across and len(values[k]) > 1)
        series.setdefault(" ".join(others), []).append((chosen[across], forecast))

    def chart(title: str, unit: str, numbers: Sequence[Sequence[float]]) -> object:
        return line_chart(
            title,
            unit,
            f"over {across}",
            [
                Series(
                    label=label,
                    colour=colour,
                    xs=np.array([x for x, _ in points], np.float64),
                    ys=np.array(ys, np.float64),
                )
                for colour, ((label, points), ys) in enumerate(
                    zip(series.items(), numbers, strict=True)
                )
            ],
            smoothing=0.0,
        )

    found = [[forecast for _, forecast in points] for points in series.values()]
    return [
        chart("steps", "per hour", [[f.steps_per_s * 3600 for f in line] for line in found]),
        chart("learner waits", "%", [[100 * f.learner_waits for f in line] for line in found]),
        chart("mean age", "versions", [[f.age for f in line] for line in found]),
    ]
