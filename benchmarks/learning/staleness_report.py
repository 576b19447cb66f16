"""Tables and picture of the league, the rates and the whole runs, from their records.

Every number of a table is a mean +- its standard error. A cell that never reached the goal counts
with all samples that it trained, and the mean has ">=" in front of it. Differences are tested by a
t test of the log-ratios of samples, paired by seed (benchmarks/comparing.py), and the p values of
a table are corrected for their number by Holm's method.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.comparing import Ratio, holm, ratio, spread
from benchmarks.figures import figure, with_table
from benchmarks.learning.staleness_picture import draw
from benchmarks.learning.staleness_results import (
    AGES,
    AS_LAUNCHED,
    DEFAULT,
    FACTORS,
    FEW,
    MAY_DIFFER,
    METHODS,
    RATE_AGES,
    RATES,
    SEEDS,
    Cell,
    Result,
    cells_of,
    factor_of,
    rate_cells,
    result,
    tuning,
)
from benchmarks.learning.staleness_whole import WholeRun
from benchmarks.study import refuse_mixing

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "staleness.md"
LINES = (*METHODS, AS_LAUNCHED)
_LEVEL = 0.05


def report() -> None:
    """Print every table, and write the tables of the page and its picture. Raises SystemExit if
    cells of one line ran with different settings.
    """
    if not _ages():
        raise SystemExit("no cell has run: python -m benchmarks.learning.staleness run")
    text = PAGE.read_text()
    for name, make in _TABLES.items():
        table = make()
        print(f"{name}\n{table}")
        if f"<!-- {name}: begin -->" in text:
            text = with_table(text, name, table)
    PAGE.write_text(text)
    for method in _methods():
        for age in AGES:
            for seed, found in results(method, age).items():
                name = f"{method}, age {age}, seed {seed}: final held-out pass rate"
                figure(name, found.final, "share")
    draw(_methods(), _ages())


def results(method: str, age: int) -> dict[int, Result]:
    """Return the results of the scored cells of a method at an age by seed."""
    return {cell.seed: result(cell.recorded.rows()) for cell in cells_of(method, age)}


def _methods() -> list[str]:
    """The methods that have cells, each with one set of settings: the lines of the tables."""
    found = []
    for method in LINES:
        cells = [cell for age in AGES for cell in cells_of(method, age)]
        if cells:
            refuse_mixing([cell.recorded for cell in cells], apart_from=MAY_DIFFER)
            found.append(method)
    return found


def _ages() -> list[int]:
    """The ages of the recorded runs, youngest first."""
    return sorted(age for age in AGES if any(cells_of(method, age) for method in _methods()))


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = (f"| {' | '.join(cells)} |" for cells in (heads, *lines))
    head, *rest = rows
    return "\n".join([head, f"|{'---|' * len(heads)}", *rest]) + "\n"


def thousands(found: Sequence[Result]) -> str:
    """Return thousands of samples to the goal, and how many of the cells reached it."""
    if not found:
        return ""
    num_reached = sum(not each.is_censored for each in found)
    sign = ">= " if num_reached < len(found) else ""
    text = spread([each.samples / 1000 for each in found], ".2f")
    return f"{sign}{text} ({num_reached} of {len(found)})"


def league_table() -> str:
    """Return the samples to the goal and the last rates of the cells: a line per method."""
    ages = _ages()
    heads = ["method", *(f"age {age}" for age in ages), "mean age until then", "collapsed"]
    lines = []
    for method in _methods():
        by_age = [list(results(method, age).values()) for age in ages]
        every = [each for found in by_age for each in found]
        lines.append(
            [
                f"{method} x{factor_of(method):g}",
                *map(thousands, by_age),
                ", ".join(
                    f"{statistics.fmean(each.mean_age for each in found):.1f}" if found else ""
                    for found in by_age
                ),
                f"{sum(each.is_collapsed for each in every)} of {len(every)}",
            ]
        )
    return _table(heads, lines)


def ends_table() -> str:
    """Return the final pass rate and the collapses at each age."""
    ages = _ages()
    heads = ["method", *(f"final rate, age {age}" for age in ages)]
    heads += [f"collapsed, age {age}" for age in ages]
    lines = []
    for method in _methods():
        by_age = [list(results(method, age).values()) for age in ages]
        finals = [spread([e.final for e in found], ".2f") if found else "" for found in by_age]
        falls = [
            f"{sum(e.is_collapsed for e in found)} of {len(found)}" if found else ""
            for found in by_age
        ]
        lines.append([f"{method} x{factor_of(method):g}", *finals, *falls])
    return _table(heads, lines)


class _Compared(NamedTuple):
    """A ratio of samples, and which of its sides has a cell that never reached the goal."""

    ratio: Ratio
    is_above_censored: bool
    is_below_censored: bool

    def text(self, p: float) -> str:
        """Return the ratio, the interval of one standard error, and the corrected p value."""
        # A bound on one side of a ratio bounds it; bounds on both sides bound nothing.
        sign = ">= " if self.is_above_censored else ""
        if self.is_below_censored:
            sign = "~ " if self.is_above_censored else "<= "
        value, error, *_ = self.ratio
        text = f"{sign}{value:.2f} ({value / error:.2f} to {value * error:.2f}), p {p:.2g}"
        return f"**{text}**" if p < _LEVEL else text


def _compare(ones: Mapping[int, Result], others: Mapping[int, Result]) -> _Compared | None:
    seeds = sorted({*ones} & {*others})
    if len(seeds) < 2:
        return None
    sides = [[side[seed] for seed in seeds] for side in (ones, others)]
    above, below = ([each.samples for each in side] for side in sides)
    censored = [any(each.is_censored for each in side) for side in sides]
    return _Compared(ratio(above, below), *censored)


_Pairs = Mapping[tuple[str, str], tuple[Mapping[int, Result], Mapping[int, Result]]]


def _ratio_table(first: str, pairs: _Pairs) -> str:
    """A line and a column per pair, with p values corrected for the number of pairs."""
    tried = {key: _compare(*sides) for key, sides in pairs.items()}
    found = {key: compared for key, compared in tried.items() if compared is not None}
    corrected = holm({key: compared.ratio.p for key, compared in found.items()})
    texts = {key: compared.text(corrected[key]) for key, compared in found.items()}
    columns = list(dict.fromkeys(column for _, column in found))
    lines = [
        [line, *(texts.get((line, column), "") for column in columns)]
        for line in dict.fromkeys(line for line, _ in found)
    ]
    return _table([first, *columns], lines)


def against_default() -> str:
    """Return the samples of each method, in samples of the default on the same seeds."""
    pairs = {
        (method, f"age {age}"): (results(method, age), results(DEFAULT, age))
        for method in _methods()
        for age in _ages()
        if method != DEFAULT
    }
    return _ratio_table(f"samples, {DEFAULT} = 1", pairs)


def cost_of_age() -> str:
    """Return the samples at each age, in samples at the youngest age on the same seeds."""
    youngest, *others = _ages()
    pairs = {
        (method, f"age {age}"): (results(method, age), results(method, youngest))
        for method in _methods()
        for age in others
    }
    return _ratio_table(f"samples, age {youngest} = 1", pairs)


def tuning_table() -> str:
    """Return samples to the goal and final rate of each method and factor of the tuning."""
    lines = []
    for method in METHODS:
        made = {cell.factor: cell.recorded for cell in tuning(method) if cell.recorded.exists()}
        refuse_mixing(list(made.values()), apart_from=(*MAY_DIFFER, "learner.optimizer.lr"))
        cells = []
        for factor in sorted(FACTORS):
            if factor not in made:
                cells.append("")
                continue
            tuned = result(made[factor].rows())
            collapsed = ", collapsed" if tuned.is_collapsed else ""
            cells.append(f"{thousands([tuned])}; {tuned.final:.2f}{collapsed}")
        if made:
            lines.append([method, *cells])
    return _table(["method", *(f"x{factor:g}" for factor in sorted(FACTORS))], lines)


def warnings_table() -> str:
    """Return how many cells had ten steps with few effective sequences, by what became of them."""
    every = [result(cell.recorded.rows()) for cell in _all_cells()]
    lines = []
    for name, is_collapsed in (("collapsed", True), ("did not collapse", False)):
        found = [each for each in every if each.is_collapsed is is_collapsed]
        warned = [each for each in found if each.lowest_share < FEW]
        first = sum(each.is_warned_first for each in warned) if is_collapsed else 0
        before = f"{first}" if is_collapsed else ""
        lines.append([name, str(len(found)), str(len(warned)), before])
    return _table(["cells", "n", f"mean share below {FEW}", "before the pass rate fell"], lines)


def _all_cells() -> list[Cell]:
    tuned = [cell for method in METHODS for cell in tuning(method)]
    scored = [cell for method in _methods() for age in AGES for cell in cells_of(method, age)]
    found = {cell.recorded.name: cell for cell in (*tuned, *scored)}
    return [cell for cell in found.values() if cell.recorded.exists()]


def rates_table() -> str:
    """Return samples to the goal of the default with each rate, and the higher by the lower."""
    ages = sorted(age for age in RATE_AGES if all(rate_cells(rate, age) for rate in RATES))
    by_rate = {
        rate: {
            age: {cell.seed: result(cell.recorded.rows()) for cell in rate_cells(rate, age)}
            for age in ages
        }
        for rate in RATES
    }
    for rate in RATES:
        runs = [cell.recorded for age in ages for cell in rate_cells(rate, age)]
        refuse_mixing(runs, apart_from=MAY_DIFFER)
    lines = []
    for age in ages:
        sides = [by_rate[rate][age] for rate in RATES]
        lines.append([f"cells, exact age {age}", *_rate_cells(sides)])
    whole = [_whole_results(rate) for rate in RATES]
    if all(whole):
        lines.append(["whole runs, bound 2", *_rate_cells(whole)])
    heads = ["", *(f"{rate:g}" for rate in RATES)]
    heads += [f"final rate, {rate:g}" for rate in RATES]
    return _table([*heads, f"{RATES[0]:g} / {RATES[1]:g}", "n", "p"], lines)


def fresh_table() -> str:
    """Return the samples at age 1, to which late admission brings a run that its learner bounds, in
    samples at age 2, the bound of its ages; constant rate, from the initial policy.
    """
    sides = [
        {cell.seed: result(cell.recorded.rows()) for cell in rate_cells(RATES[-1], age)}
        for age in (1, 2)
    ]
    return _ratio_table("samples, age 2 = 1", {(DEFAULT, "age 1"): (sides[0], sides[1])})


def _whole_results(rate: float) -> dict[int, Result]:
    runs = {seed: WholeRun(rate=rate, seed=seed).recorded for seed in SEEDS}
    made = {seed: run for seed, run in runs.items() if run.exists()}
    refuse_mixing(list(made.values()), apart_from=MAY_DIFFER)
    return {seed: result(run.rows()) for seed, run in made.items()}


def _rate_cells(sides: Sequence[Mapping[int, Result]]) -> list[str]:
    seeds = sorted({*sides[0]} & {*sides[1]})
    samples = [thousands([side[seed] for seed in seeds]) for side in sides]
    finals = [spread([side[seed].final for seed in seeds], ".3f") for side in sides]
    if len(seeds) < 2:
        return [*samples, *finals, "", str(len(seeds)), ""]
    compared = ratio(*([side[seed].samples for seed in seeds] for side in sides))
    low, high = compared.value / compared.error, compared.value * compared.error
    text = f"{compared.value:.2f} ({low:.2f} to {high:.2f})"
    return [*samples, *finals, text, str(len(seeds)), f"{compared.p:.2g}"]


_TABLES: Mapping[str, Callable[[], str]] = {
    "league": league_table,
    "ends": ends_table,
    "against": against_default,
    "cost": cost_of_age,
    "tuning": tuning_table,
    "warnings": warnings_table,
    "rates": rates_table,
    "fresh": fresh_table,
}
