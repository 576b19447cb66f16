"""`async-rl explain`: where the time of a run went, and which change would have saved most."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from async_rl.buffer.store.times import clock_offsets, group_times
from async_rl.core.errors import ConfigError, InfrastructureError
from async_rl.core.frozen import frozen
from async_rl.launchers.commands import pages
from async_rl.launchers.commands.options import OutputDir, Run, console, open_table
from async_rl.launchers.commands.pages import refuse_existing
from async_rl.launchers.commands.plan import profile_of
from async_rl.runs.config import config_of
from async_rl.runs.directory import find_run
from async_rl.runs.forecast.live import TRUSTED_ERROR, newest_groups
from async_rl.runs.forecast.profile import Profile
from async_rl.runs.forecast.recorded import read_times
from async_rl.runs.forecast.simulation import Forecast, simulate
from async_rl.runs.forecast.sweep import Values, with_values
from async_rl.runs.metrics import newest_rows

_KINDS = (("busy", "stage_s/"), ("waits", "wait_s/"), ("held back", "blocked_s/"))
_ROLES = ("generator", "verifier", "buffer", "learner")
_BAR = 30
_LEAST_SHARE = 0.01
_LEAST_GAIN = 0.02  # below it a change is not listed
_NUM_CHANGES = 3
_NOTED_S = 0.05  # difference of clocks beyond its error


def explain(
    run: Run = None,
    html: Annotated[Path | None, typer.Option(help="also write this as a page to the file")] = None,
    output_dir: OutputDir = None,
) -> None:
    """Show where a run's time went by process and stage, and predict the gain of changes.

    Works on ended runs and on live ones. Examples: async-rl explain; async-rl explain my-run
    --html why.html
    """
    run_dir = find_run(run, output_dir)
    refuse_existing(html)
    title, first, steps_per_s = _measured(run_dir)
    terminal = console()
    terminal.print(f"{title}\n")
    found = list(stages(run_dir, first, steps_per_s))
    table = open_table("process", "", "stage", "s/step", "share", "")
    for stage in found:
        bar = "█" * round(_BAR * min(stage.share, 1.0))
        seconds, share = f"{stage.seconds:.3f}", f"{stage.share:.0%}"
        table.add_row(stage.role, stage.kind, stage.name, seconds, share, bar)
    terminal.print(table)
    lines = list(_forecast(run_dir))
    terminal.print()
    for line in lines:
        terminal.print(line, soft_wrap=True)
    if html is not None:
        text = pages.rendered("explain.html", title=title, stages=found, lines=lines)
        html.write_text(text)
        terminal.print(f"\nthe page is in {html}", soft_wrap=True)


def _measured(run_dir: Path) -> tuple[str, int, float]:
    """Return a title, the first step of the means, and the steps per second."""
    try:
        recorded = read_times(run_dir, config_of(run_dir))
        number, warm, paused_s = len(recorded.step_s), recorded.num_warm, recorded.left_out_s
        begin, rate = recorded.first_step, recorded.steps_per_s
    except InfrastructureError:
        # Without a readable store the metrics still have the seconds of each stage.
        step_s = [r["time/step_s"] for r in newest_rows(run_dir, 1).values() if "time/step_s" in r]
        if not step_s:
            raise
        number, warm, begin, rate, paused_s = len(step_s), 0, 1, len(step_s) / sum(step_s), 0.0
    where = f"after the first {warm}" if begin == 1 else f"from step {begin + warm}"
    title = f"{run_dir.name}: {rate * 3600:.0f} steps/hour over {number - warm} steps {where}"
    if paused_s:
        title += f"; left out: {paused_s:.0f} s around restarts of the learner"
    return title, begin + warm, rate


def _forecast(run_dir: Path) -> Iterator[str]:
    """Yield the forecast, or why there is none, and how far the clocks can be trusted."""
    try:
        profile = profile_of(run_dir)
    except (ConfigError, InfrastructureError) as error:
        yield f"no forecast: {error}; the table is all that explain can show"
        return
    yield from predict(profile).sentences()
    offsets = clock_offsets(group_times(run_dir))
    away = {name: pair for name, pair in offsets.items() if abs(pair[0]) > _NOTED_S + pair[1]}
    for name, (offset_s, error_s) in sorted(away.items()):
        yield (
            f"the clock of {name} differs from that of the buffer by {-offset_s:.2f} s (within"
            f" {error_s:.2f} s); the forecast uses no difference between clocks"
        )


@frozen
class Stage:
    """Seconds per step of one stage, mean over the processes of the role, and their share."""

    role: str
    kind: str
    name: str
    seconds: float
    share: float


def stages(run_dir: Path, first: int, steps_per_s: float) -> Iterator[Stage]:
    """Yield the stages by role, the largest first, as means from this step on."""
    newest = newest_rows(run_dir, first).values()
    rows = [row for row in newest if "time/step_s" in row]
    for role in _ROLES:
        found = []
        for kind, prefix in _KINDS:
            names = {n for row in rows for n in row if n.startswith(f"{prefix}{role}/")}
            for name in names:
                seconds = sum(row.get(name, 0.0) for row in rows) / len(rows)
                found.append((seconds, kind, name.rpartition("/")[2].replace("_", " ")))
        for seconds, kind, name in sorted(found, reverse=True):
            share = seconds * steps_per_s
            if share >= _LEAST_SHARE:
                yield Stage(role=role, kind=kind, name=name, seconds=seconds, share=share)


@frozen
class Change:
    """One change and its forecast: gain in steps per second, relative to the simulated run; case:
    as words of `async-rl plan`.
    """

    gain: float
    text: str
    case: Values


@frozen
class Predictions:
    """The forecast of a run: the run itself, its error against the measured rate, and the changes
    that would save most, the best first.
    """

    own: Forecast
    error: float
    changes: tuple[Change, ...]

    def sentences(self) -> Iterator[str]:
        """Yield the forecast in words."""
        own = self.own
        yield (
            f"simulated from its recorded times, this run makes {own.steps_per_s * 3600:.0f}"
            f" steps/hour ({self.error:+.0%}); the learner waits {own.learner_waits:.0%} of the"
            f" time, generators are idle {own.generators_idle:.0%}"
        )
        if own.scores_wait_s * own.steps_per_s > _LEAST_GAIN:
            yield (
                f"samples wait {own.scores_wait_s:.2f} s for one of the {own.places} places of"
                " scoring"
            )
        if abs(self.error) > TRUSTED_ERROR:
            yield (
                "the simulation misses the measured rate by more than 10 %: take gains as"
                " directions"
            )
        if not self.changes:
            yield "no single change below would make it faster by 2 % or more"
            return
        yield "changes that would have made it faster (each alone):"
        for change in self.changes:
            yield f"  {change.gain:+5.0%}  {change.text}"


def predict(profile: Profile) -> Predictions:
    """Forecast the run and the changes that would have saved most."""
    own = simulate(profile.scenario, profile.recorded)
    changes = []
    for case, text in _changes(profile):
        forecast = simulate(with_values(profile, case), profile.recorded)
        gain = forecast.steps_per_s / own.steps_per_s - 1
        text += f" (oldest token {own.age:.1f} -> {forecast.age:.1f} versions)"
        changes.append(Change(gain=gain, text=text, case=case))
    best = heapq.nlargest(_NUM_CHANGES, changes, key=lambda change: change.gain)
    return Predictions(
        own=own,
        error=own.steps_per_s / profile.recorded.steps_per_s - 1,
        changes=tuple(change for change in best if change.gain >= _LEAST_GAIN),
    )


def best_change(run_dir: Path) -> str:
    """Return the change that would make a live run fastest, or why there is no forecast."""
    try:
        found = predict(profile_of(run_dir, most=newest_groups(config_of(run_dir))))
    except (ConfigError, InfrastructureError) as error:
        return f"no forecast: {error}"
    if abs(found.error) > TRUSTED_ERROR:
        return (
            f"no forecast: the simulated rate differs from the measured one by {found.error:+.0%}"
        )
    if not found.changes:
        return "forecast: no single change would make it 2 % faster"
    best = found.changes[0]
    return f"forecast: {best.gain:+.0%} with {best.text}; async-rl explain has others"


def _changes(profile: Profile) -> Iterator[tuple[Values, str]]:
    base, size = profile.scenario, profile.group_size
    more, bound = base.generators + 1, base.max_staleness_versions + 1
    where = "on separate cores or a separate GPU"
    yield {"generators.count": more}, f"generators.count={more}, {where}"
    yield {"buffer.max_staleness_versions": bound}, f"buffer.max_staleness_versions={bound}"
    yield {"learner_speed": 2}, "a learner twice as fast, such as twice learner.ranks"
    yield {"scoring_speed": 2}, "a verifier twice as fast"
    verifiers = base.verifiers + 1
    yield {"verifiers.count": verifiers}, f"verifiers.count={verifiers}, {where}"
    yield {"generation_speed": 1.5}, "generation 1.5 times as fast: a shorter limit"
    if all(work.lengths for work in profile.recorded.train) and size > 3:
        half = size // 2
        yield (
            {"generation.group_size": half},
            f"generation.group_size={half}, which gives each step fewer samples",
        )
    if base.push_every_steps == 1:
        yield {"weights.push_every_steps": 2}, "weights.push_every_steps=2"
    if base.evaluate_every_steps:
        yield {"evaluation.every_steps": 0}, "a separate pool for evaluation"
