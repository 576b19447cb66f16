"""The reports that are made from the recorded times of a run.

`explain`: where its time went, and which change would have saved most. `plan`: forecasts with other
settings, a row of a table for every combination of values.
"""

import heapq
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from async_rl.composition.problems import hint
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError, InfrastructureError
from async_rl.runs.forecast.ranges import Range, doubts, forecast, margin, own_run
from async_rl.runs.forecast.recorded import WARM_SHARE
from async_rl.runs.forecast.scenario import KNOWN, Profile, Values, profile_of, with_values
from async_rl.runs.forecast.selection import selection_gain
from async_rl.runs.forecast.simulation import Forecast
from async_rl.runs.metrics import newest_row, newest_rows
from async_rl.runs.report import Report, Section, Table
from async_rl.runs.status import config_of

_KINDS = {"stage_s": "busy", "wait_s": "waits", "blocked_s": "held back"}
"""Condition of a process, by the section of the metrics with its seconds."""
_ROLES = ("generator", "gateway", "verifier", "buffer", "learner")
_BAR = 30  # characters for the whole time
_LEAST_SHARE = 0.01  # of a stage that is listed
_LEAST_GAIN = 0.02  # of a change that is listed: a forecast is hardly more exact
_NUM_CHANGES = 3
_MOST_STEPS = 5_000  # enough for a mean; the rows of a long run are gigabytes
_TRUSTED_ERROR = 0.1
_UNKNOWN = 0.5  # between the values that an input may have


def explain(run_dir: Path) -> Report:
    """Report the seconds of each stage of a run, live or finished, and the gain of changes.

    Raises ConfigError if not even the metrics of a step are recorded.
    """
    config = config_of(run_dir)
    newest = int(newest_row(run_dir).get("step", 0))
    rows = newest_rows(run_dir, max(newest - _MOST_STEPS, 0) + 1)
    measured = [row for row in rows.values() if "time/step_s" in row]
    # The run fills its buffer first, so these steps are left out.
    measured = measured[round(WARM_SHARE * len(measured)) :]
    if not measured:
        raise ConfigError(f"{run_dir.name} has no step yet; there is nothing to explain")
    steps_per_s = len(measured) / sum(row["time/step_s"] for row in measured)
    stages = tuple(_stages(measured, steps_per_s))
    table = Table(columns=("process", "", "stage", "s/step", "share", ""), rows=stages)
    return Report(
        title=(
            f"{run_dir.name}: {steps_per_s * 3600:.0f} steps/hour over {len(measured)} steps from"
            f" step {measured[0]['step']}"
        ),
        sections=(
            Section(table=table),
            Section(lines=tuple(_forecast(run_dir, config))),
        ),
    )


def _stages(rows: Sequence[Mapping[str, float]], steps_per_s: float) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each stage by role: work, then waits, then blocks, the longest of each
    first, with its share of a step.
    """
    names = sorted({name for row in rows for name in row})
    for role, (section, kind) in itertools.product(_ROLES, _KINDS.items()):
        prefix = f"{section}/{role}/"
        # A step without this stage spent no time in it.
        means = {
            name.removeprefix(prefix): statistics.fmean(row.get(name, 0.0) for row in rows)
            for name in names
            if name.startswith(prefix)
        }
        for stage in sorted(means, key=means.__getitem__, reverse=True):
            share = means[stage] * steps_per_s
            if share >= _LEAST_SHARE:
                bar = "█" * round(_BAR * min(share, 1.0))
                yield (
                    *(role, kind, stage.replace("_", " ")),
                    *(f"{means[stage]:.3f}", f"{share:.0%}", bar),
                )


def _forecast(run_dir: Path, config: RunConfig) -> Iterator[str]:
    """Yield the forecast, or why there is none."""
    try:
        profile = profile_of(run_dir, config)
        yield from selection_gain(run_dir, config)
    except (ConfigError, InfrastructureError) as error:
        # The table needs no simulation, so it is shown in any case.
        yield f"no forecast: {error}; the table is all that explain can show"
        return
    yield from sentences(profile)


class Change(NamedTuple):
    """A change and its forecast. gain: in steps per second, relative to the simulated run, between
    least and most. case: the changed values.
    """

    gain: float
    least: float
    most: float
    text: str
    case: Values


def predict(profile: Profile) -> tuple[Forecast, list[Change]]:
    """Return the forecast of the run, and the changes that would have saved most, best first."""
    # Gains are relative to the simulated run, not to the measured one, so that most of its error
    # cancels.
    own = own_run(profile)
    # A learner that never waits makes one step after the other; changes of others save no more.
    waits = np.nan_to_num(profile.recorded.learner_waits, nan=1.0)
    changes = []
    for case, text in _cases(profile):
        found = forecast(profile, case, error=0.0)
        bound = with_values(profile, case).learner_speed / max(1 - waits, 1e-9) - 1
        rates = (found.forecast.steps_per_s, found.least, found.most)
        gain, least, most = (min(rate / own.steps_per_s - 1, bound) for rate in rates)
        # The age is shown because a faster run with older data may learn less per step.
        if gain >= _LEAST_GAIN:
            text += f" (oldest token {own.age:.1f} -> {found.forecast.age:.1f} versions)"
            changes.append(Change(gain, least, most, text, case))
    return own, heapq.nlargest(_NUM_CHANGES, changes, key=lambda change: change.gain)


def sentences(profile: Profile) -> Iterator[str]:
    """Yield the forecast as text."""
    own, changes = predict(profile)
    error = own.steps_per_s / profile.recorded.steps_per_s - 1
    yield (
        f"simulated from its recorded times, this run makes {own.steps_per_s * 3600:.0f}"
        f" steps/hour ({error:+.0%}); the learner waits {own.learner_waits:.0%} of the"
        f" time, generators are idle {own.generators_idle:.0%}"
    )
    if own.scores_wait_s * own.steps_per_s > _LEAST_GAIN:
        yield (
            f"samples wait {own.scores_wait_s:.2f} s for one of the {own.places} places of scoring"
        )
    if abs(error) > _TRUSTED_ERROR:
        yield "the simulation misses the measured rate by more than 10 %: take gains as directions"
    yield from doubts(profile, own)
    yield from _open_slowdown(profile)
    if not changes:
        yield "no single change below would make it faster by 2 % or more"
        return
    yield "changes that would have made it faster (each alone):"
    for change in changes:
        between = ""
        if change.most - change.least >= _LEAST_GAIN:
            between = f", between {change.least:+.0%} and {change.most:+.0%}"
        yield f"  {change.gain:+5.0%}  {change.text}{between}"


def _open_slowdown(profile: Profile) -> Iterator[str]:
    """Yield a sentence if the recording does not show how samples in flight slow each other."""
    values = [each.beside for each in (profile.recorded, *profile.others)]
    if max(values) - min(values) > _UNKNOWN:
        yield (
            "not measured: by how much samples in flight slow each other down, because their number"
            f" hardly differs in the recording; a step is {min(values):.0%} to {max(values):.0%}"
            " longer for a further sample"
        )


def _cases(profile: Profile) -> Iterator[tuple[Values, str]]:
    """Yield the changes that are tried, each with its description."""
    base = profile.scenario.config
    yield {"learner_speed": 2}, "a learner twice as fast, such as twice learner.ranks"
    yield {"scoring_speed": 2}, "a verifier twice as fast"
    yield {"generation_speed": 1.5}, "generation 1.5 times as fast: a shorter limit"
    where = ", on separate cores or a separate GPU"
    settings = [
        ("generators.count", base.generators.count + 1, where),
        ("verifiers.count", base.verifiers.count + 1, where),
        ("generation.max_concurrent_groups", 2 * base.generation.max_concurrent_groups, ""),
        ("buffer.max_staleness_versions", base.buffer.max_staleness_versions + 1, ""),
    ]
    # Half of the group must still have a mean to compare its samples with.
    half = base.generation.group_size // 2
    if half > 1:
        settings.append(("generation.group_size", half, ", so each step has fewer samples"))
    if base.weights.push_every_steps == 1:
        settings.append(("weights.push_every_steps", 2, ""))
    for path, value, remark in settings:
        yield {path: value}, f"{path}={value}{remark}"
    # Evaluations use generators that could train.
    if base.evaluation.every_steps:
        yield {"evaluation.every_steps": 0}, "a separate pool for evaluation"


_MAY_BE_ZERO = ("buffer.max_staleness_versions", "evaluation.every_steps")
_MOST_ROWS = 400  # a table of this length is still read; a simulation takes about 10 ms
_RANGE = ".."
_TOKENS = ("buffer.groups_per_step", "generation.group_size", "data.max_response_tokens")
"""Settings that change the tokens of a batch."""

Sweep = Mapping[str, Sequence[float]]
"""The values to forecast, by setting."""


def sweep(settings: Sequence[str]) -> Sweep:
    """Read KEY=VALUE[,VALUE]... and KEY=A..B. Raises ConfigError for a setting whose effect is
    unknown.
    """
    swept: dict[str, list[float]] = {}
    for word in settings:
        path, _, text = word.partition("=")
        if path not in KNOWN:
            remedy = hint(path, among=KNOWN)
            raise ConfigError(f"{word}: the forecast knows no effect of {path}; {remedy}")
        swept[path] = list(_numbers(word, path, text))
    num_rows = math.prod(map(len, swept.values()))
    if num_rows > _MOST_ROWS:
        raise ConfigError(f"{num_rows} combinations; give values for at most {_MOST_ROWS}")
    return swept


def _numbers(word: str, path: str, text: str) -> Iterator[float]:
    # 0 means synchronous, or no evaluation.
    least = 0 if path in _MAY_BE_ZERO else 1
    for part in text.split(","):
        bounds = part.split(_RANGE)
        for bound in bounds:
            if not bound.isdecimal() or int(bound) < least:
                raise ConfigError(f"{word}: {bound!r} is not a whole number >= {least}")
        # A single number is a range of one value; 4..1 is 1..4.
        numbers = sorted(map(int, bounds))
        yield from range(numbers[0], numbers[-1] + 1)


def plan(profile: Profile, swept: Sweep) -> Report:
    """Forecast every combination of the values."""
    own = own_run(profile)
    error = margin(profile, own)
    rows = []
    for values in itertools.product(*swept.values()):
        chosen = dict(zip(swept, values, strict=True))
        rows.append(tuple(_cells(profile, chosen, forecast(profile, chosen, error=error))))
    columns = (
        *swept,
        *("steps/hour", "range", "groups/hour", "learner waits", "generators idle", "age"),
    )
    section = Section(
        lines=(*_inputs(profile, swept), *doubts(profile, own)),
        table=Table(columns=columns, rows=tuple(rows)),
    )
    return Report(title="Forecasts with other settings", sections=(section,))


def _inputs(profile: Profile, swept: Sweep) -> Iterator[str]:
    """Yield the source of each input of the forecast."""
    recorded = profile.recorded
    yield (
        f"measured in {profile.origin}: generation, scoring, training and push times;"
        f" {recorded.num_generators} generators, {recorded.steps_per_s * 3600:.0f} steps/hour"
    )
    yield from _open_slowdown(profile)
    yield (
        "assumed: additional generators have separate cores or GPUs and are as fast as the"
        " recorded ones"
    )
    # Assumptions are listed only where a swept setting makes them matter.
    if any(path in swept for path in _TOKENS):
        shares = [each.by_tokens for each in (recorded, *profile.others)]
        known = "assumed" if max(shares) - min(shares) > _UNKNOWN else "measured"
        yield (
            f"{known}: {recorded.by_tokens:.0%} of the learner's time grows with the tokens of its"
            f" batch; the range has {min(shares):.0%} to {max(shares):.0%}"
        )
    if "generation.group_size" in swept:
        yield "assumed: further samples of a group are as long as the samples of the next groups"
    if any(each.cut_tokens for each in profile.others) and "data.max_response_tokens" in swept:
        yield (
            "assumed: responses that were cut off at the recorded limit do not become longer; the"
            " range has them as long as the new limit"
        )
    if any(swept.get("evaluation.every_steps", ())) and not recorded.evaluation:
        yield "assumed: evaluations take no time, because the recording has none"
    if "learner.ranks" in swept:
        yield "assumed: a learner with twice the ranks is twice as fast"


def _cells(profile: Profile, chosen: Values, found: Range) -> Iterator[str]:
    yield from (f"{value:g}" for value in chosen.values())
    likeliest = found.forecast
    per_hour = likeliest.steps_per_s * 3600
    yield f"{per_hour:.0f}"
    yield f"{found.least * 3600:.0f} to {found.most * 3600:.0f}"
    groups = chosen.get("buffer.groups_per_step", profile.scenario.config.buffer.groups_per_step)
    yield f"{per_hour * groups:.0f}"
    yield f"{likeliest.learner_waits:.0%}"
    yield f"{likeliest.generators_idle:.0%}"
    yield f"{likeliest.age:.2f}"
