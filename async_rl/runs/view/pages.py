"""The content of each page: from a run's files to what its template writes. Reads only."""

import bisect
import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple
from urllib.parse import urlencode

import msgspec

from async_rl.buffer.store import trajectories
from async_rl.buffer.store.ledger import OF_GROUP, group_rows, reading
from async_rl.buffer.store.trajectories import Filter, rollout_of
from async_rl.core.errors import ConfigError, Unavailable
from async_rl.core.frozen import frozen
from async_rl.observability.catalogue import FIRST_SCREEN, describe
from async_rl.runs.certificate.certify import certify
from async_rl.runs.comparison import compare
from async_rl.runs.forecast.reports import explain, plan, sweep
from async_rl.runs.forecast.scenario import profile_of
from async_rl.runs.report import Graph, Section, Series
from async_rl.runs.samples import Sample, pieces, samples_of
from async_rl.runs.status import config_of
from async_rl.runs.view.library import Library, RunView, differences

Content = dict[str, Any]
_MOST_WATERFALL = 40
_MOST_RUNS = 8  # of one page of curves: as many as there are colours
_PROBABILITIES = (0.1, 0.5, 0.9)  # a token below the first is a surprise


class Query(Filter, kw_only=True, omit_defaults=True):
    """The parameters of a page's address: the filter of groups, and on other pages the names of
    runs, the axis and section of curves, and the words of `async-rl plan`.
    """

    run: tuple[str, ...] = ()
    x: Literal["step", "time_s"] = "step"
    section: str = ""
    words: str = msgspec.field(default="", name="set")


@frozen
class Visit:
    """A request for a page. path: the variable parts of its address."""

    library: Library
    path: Mapping[str, Any]
    query: Query

    @property
    def run(self) -> RunView:
        """The run of the page. Raises ConfigError if there is none of this name."""
        return self.library.run(self.path["run"])


def overview(visit: Visit) -> Content:
    """Return all runs in one line each."""
    return {"summaries": [run.summary() for run in visit.library.runs()]}


def curves_page(visit: Visit) -> Content:
    """Return the charts of the chosen runs. Raises ConfigError if they are none or too many."""
    names = visit.query.run
    if not names:
        raise ConfigError("choose runs: mark them on the first page")
    if len(names) > _MOST_RUNS:
        raise ConfigError(f"{len(names)} runs are chosen; choose at most {_MOST_RUNS}")
    return _curves([visit.library.run(name) for name in names], visit.query)


def _curves(shown: Sequence[RunView], query: Query) -> Content:
    """Return the charts of several runs: of a section of the metrics' names, or the ten charts to
    look at first.
    """
    for run in shown:
        run.curves.refresh()
    known = sorted({name for run in shown for name in run.curves.names})
    charts = {title: chart.metrics for title, chart in FIRST_SCREEN.items()}
    if query.section:
        charts = {name: (name,) for name in known if name.startswith(f"{query.section}/")}
    return {
        "shown": shown,
        "graphs": [_graph(title, names, shown, query.x) for title, names in charts.items()],
        # Every section, because the form offers the sections that are not drawn too.
        "sections": list(dict.fromkeys(name.partition("/")[0] for name in known)),
        "query": query,
        "differences": differences(shown),
        "is_live": any(run.is_live for run in shown),
    }


def _graph(title: str, names: Sequence[str], shown: Sequence[RunView], x: str) -> Graph:
    """Return the curves of some metrics, of all runs in one drawing."""
    series = []
    for run in shown:
        for name in names:
            xs, ys = run.curves.points(name, x=x)
            label = _label(run.name, name, len(shown), len(names))
            series.append(Series(label=label, xs=xs, ys=ys))
    spec = describe(names[0])
    return Graph(
        title=title,
        unit="" if spec is None else spec.unit,
        meaning="" if spec is None else spec.meaning,
        series=tuple(series),
    )


def plan_page(visit: Visit) -> Content:
    """Return where the time of a run went, and forecasts of it with other settings. Raises
    ConfigError for words that the forecast does not know.
    """
    run = visit.run
    words = visit.query.words
    reports = [explain(run.path)]
    if words:
        swept = sweep(words.split())
        reports.append(plan(profile_of(run.path, config_of(run.path)), swept))
    return {"page": "plan", "run": run, "reports": reports, "words": words}


def certificate_page(visit: Visit) -> Content:
    """Return the certificate of a run."""
    run = visit.run
    return {"page": "certificate", "run": run, "reports": [certify(run.path).report()]}


def compare_page(visit: Visit) -> Content:
    """Return the first difference of the two chosen runs, their settings, results, times and
    curves. Raises ConfigError if they are not two.
    """
    names = visit.query.run
    # The first page has check boxes, so any number may be chosen.
    if len(names) != 2:
        raise ConfigError(f"{len(names)} runs are chosen; choose two")
    first, second = map(visit.library.run, names)
    graphs = Section(graphs=tuple(_curves([first, second], Query())["graphs"]))
    report = compare(first.path, second.path)
    return {
        "page": "compare",
        "reports": [replace(report, sections=(*report.sections, graphs))],
    }


def run_page(visit: Visit) -> Content:
    """Return a run's result, charts, processes and ages, and the waterfall of the chosen or the
    newest step.
    """
    run = visit.run
    content = _curves([run], Query())
    summary = run.summary()
    chosen = summary.step if visit.query.step is None else visit.query.step
    waterfall: dict[int, list[trajectories.Span]] = {}
    ages: list[tuple[int, int]] = []
    # A run that has stored nothing yet has a page that says so.
    with contextlib.suppress(Unavailable), reading(run.path) as store:
        waterfall = trajectories.spans(store, chosen)
        ages = trajectories.ages(store)
    # A step of thousands of groups would be a page of thousands of rows.
    shown = dict(list(waterfall.items())[:_MOST_WATERFALL])
    return content | {
        "run": run,
        "summary": summary,
        "status": run.status(),
        "step": chosen,
        "waterfall": shown,
        "num_hidden": len(waterfall) - len(shown),
        "waterfall_s": max((spans[-1].end_s for spans in shown.values() if spans), default=0.0),
        "ages": ages,
    }


def sample_list(visit: Visit) -> Content:
    """Return the groups that pass a filter."""
    run = visit.run
    chosen = visit.query
    with reading(run.path) as store:
        # One row more than a page shows whether there is a next page.
        rows = trajectories.page_of(store, chosen, most=trajectories.PAGE + 1)
    # Other orders are of the newest groups only and have no next page.
    has_more = len(rows) > trajectories.PAGE and chosen.sort == "newest"
    rows = rows[: trajectories.PAGE]
    following = msgspec.structs.replace(chosen, before=rows[-1].group_id) if has_more else None
    return {
        "run": run,
        "chosen": chosen,
        "rows": rows,
        "following": following and urlencode(msgspec.to_builtins(following)),
        "sorts": trajectories.SORTS,
        "window": trajectories.WINDOW,
    }


def group_page(visit: Visit) -> Content:
    """Return one group with all its responses. Raises ConfigError if the run has no such group."""
    run = visit.run
    group_id = visit.path["group_id"]
    with reading(run.path) as store:
        row = next(iter(group_rows(store, OF_GROUP, [group_id])), None)
        if row is None:
            raise ConfigError(f"{run.name} has no group {group_id}")
        stored = rollout_of(store, row)
        prompt = trajectories.prompt_text(store, row.purpose, row.prompt_id)
    samples = [] if stored is None else samples_of(stored, run.decode)
    responses = [(sample, tokens_of(sample)) for sample in samples]
    return {"run": run, "row": row, "prompt": prompt, "responses": responses}


def _label(run: str, metric: str, num_runs: int, num_metrics: int) -> str:
    """Return the name of a line: what distinguishes it from the other lines of its chart."""
    # The name of the only run would be on every line of the page.
    parts = [run] if num_runs > 1 or num_metrics == 1 else []
    if num_metrics > 1:
        parts.append(metric.rpartition("/")[2].replace("_", " "))
    return " ".join(parts)


class Token(NamedTuple):
    """A response token and its values. text: what it adds to the response. logprob, version: of the
    policy that sampled it.
    """

    text: str
    token_id: int
    is_sampled: bool
    logprob: float
    version: int

    @property
    def probability(self) -> float:
        """The probability of the token when it was sampled."""
        return math.exp(self.logprob)

    @property
    def probability_grade(self) -> int:
        """The class of its probability, 0 to 3."""
        return bisect.bisect(_PROBABILITIES, self.probability)


def tokens_of(sample: Sample) -> list[Token]:
    """Return the response tokens of a sample."""
    trajectory = sample.trajectory
    columns = (
        trajectory.token_ids,
        trajectory.loss_mask,
        trajectory.behavior_logprobs,
        trajectory.versions,
    )
    values = [column[trajectory.prompt_length :].tolist() for column in columns]
    rows = zip(pieces(sample), *values, strict=True)
    return [Token(*row) for row in rows]
