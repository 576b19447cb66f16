"""The picture of the league: mean curves with their standard errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.comparing import mean_and_error
from benchmarks.learning.staleness_cell import GOAL
from benchmarks.learning.staleness_results import cells_of, factor_of
from benchmarks.study import Row

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "staleness.png"


def mean_curve(runs: Sequence[Sequence[Row]], name: str) -> dict[int, tuple[float, float]]:
    """Return mean and standard error of a column by step. A finished run keeps its last value."""
    columns = [{row["step"]: row[name] for row in rows if name in row} for rows in runs]
    curve = {}
    for step in sorted({step for column in columns for step in column}):
        values = [
            column[max(known)] for column in columns if (known := [s for s in column if s <= step])
        ]
        curve[step] = mean_and_error(values)
    return curve


def draw(methods: Sequence[str], ages: Sequence[int]) -> None:
    """Write the mean curves of the held-out pass rate and of the effective sequences, a column of
    pictures per age. The band is the standard error.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = {
        "eval/pass_at_1": "held-out pass@1",
        "policy/effective_sequences": "effective sequences",
    }
    size = (4 * len(ages), 7.5)
    picture, axes = pyplot.subplots(
        len(columns), len(ages), figsize=size, sharey="row", squeeze=False
    )
    for row, (name, words) in zip(axes, columns.items(), strict=True):
        row[0].set_ylabel(words)
        for axis, age in zip(row, ages, strict=True):
            axis.set_title(f"age {age}")
            axis.set_xlabel("step")
            if name == "eval/pass_at_1":
                axis.axhline(GOAL, color="grey", linewidth=0.5)
            for index, method in enumerate(methods):
                runs = [cell.recorded.rows() for cell in cells_of(method, age)]
                curve = mean_curve(runs, name)
                means = [mean for mean, _ in curve.values()]
                label = f"{method} x{factor_of(method):g}"
                axis.plot(list(curve), means, color=f"C{index}", label=label)
                low = [mean - error for mean, error in curve.values()]
                high = [mean + error for mean, error in curve.values()]
                axis.fill_between(list(curve), low, high, color=f"C{index}", alpha=0.2)
    handles, labels = axes[0][0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="lower center", ncols=9, fontsize=8)
    picture.tight_layout(rect=(0, 0.06, 1, 1))
    picture.savefig(PICTURE, dpi=80)
