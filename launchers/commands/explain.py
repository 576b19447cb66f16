"""`async-rl explain`: where the time of a run went, and which change would have saved most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.launchers.api.metrics import RowReader
from async_rl.launchers.commands import runs
from async_rl.launchers.commands.options import OutputDir, Run, console, open_table
from async_rl.launchers.forecast.recorded import Recorded, read_times
from async_rl.launchers.forecast.simulation import Forecast, Scenario, scenario_of, simulate

_KINDS = (("busy", "stage_s/"), ("waits", "wait_s/"), ("held back", "blocked_s/"))
_ROLES = ("generator", "verifier", "buffer", "learner")
_BAR = 30
_LEAST_SHARE = 0.01
_LEAST_GAIN = 0.02  # below it a change is not listed
_TRUSTED_ERROR = 0.1


def explain(run: Run = None, output_dir: OutputDir = None) -> None:
    """Show where a run's time went by process and stage, and predict the gain of changes.

    Works on ended runs and on live ones. Examples: async-rl explain; async-rl explain my-run
    """
    run_dir = runs.find(run, output_dir)
    config = runs.config_of(run_dir)
    recorded = read_times(run_dir)
    terminal = console()
    terminal.print(
        f"{run_dir.name}: {recorded.steps_per_s * 3600:.0f} steps/hour over"
        f" {len(recorded.step_s) - recorded.num_warm} steps after the first {recorded.num_warm}\n"
    )
    table = open_table("process", "", "stage", "s/step", "share", "")
    for row in stages(run_dir, recorded):
        table.add_row(*row)
    terminal.print(table)
    for line in predictions(config, recorded):
        terminal.print(line, soft_wrap=True)


def stages(run_dir: Path, recorded: Recorded) -> Iterator[tuple[str, ...]]:
    """Yield (role, kind, stage, seconds per step, share of the step, bar), the largest first."""
    rows = [row for row in RowReader(run_dir).new() if row["step"] > recorded.num_warm]
    rows = [row for row in rows if "time/step_s" in row]
    step_s = 1 / recorded.steps_per_s
    for role in _ROLES:
        found = []
        for kind, prefix in _KINDS:
            names = {n for row in rows for n in row if n.startswith(f"{prefix}{role}/")}
            for name in names:
                seconds = sum(row.get(name, 0.0) for row in rows) / len(rows)
                found.append((seconds, kind, name.rpartition("/")[2].replace("_", " ")))
        for seconds, kind, stage in sorted(found, reverse=True):
            share = seconds / step_s
            if share >= _LEAST_SHARE:
                bar = "█" * round(_BAR * min(share, 1.0))
                yield role, kind, stage, f"{seconds:.3f}", f"{share:.0%}", bar


def predictions(config: RunConfig, recorded: Recorded) -> Iterator[str]:
    """Yield the sentences of the forecast."""
    if config.placement == "colocated":
        raise ConfigError(
            "placement=colocated: generators and learner take turns, which the forecast does not"
            " simulate; the table above is all that explain can show"
        )
    base = scenario_of(config, recorded)
    own = simulate(base, recorded)
    error = own.steps_per_s / recorded.steps_per_s - 1
    yield (
        f"\nsimulated from its recorded times, this run makes {own.steps_per_s * 3600:.0f}"
        f" steps/hour ({error:+.0%}); the learner waits {own.learner_waits:.0%} of the time,"
        f" generators are idle {own.generators_idle:.0%}"
    )
    if abs(error) > _TRUSTED_ERROR:
        yield "the simulation misses the measured rate by more than 10 %: take gains as directions"
    gains = sorted(_gains(base, recorded, own), reverse=True)
    if not gains or gains[0][0] < _LEAST_GAIN:
        yield "no single change below would make it faster by 2 % or more"
        return
    yield "changes that would have made it faster (each alone):"
    for gain, text in gains[:3]:
        if gain >= _LEAST_GAIN:
            yield f"  {gain:+5.0%}  {text}"


def _gains(base: Scenario, recorded: Recorded, own: Forecast) -> Iterator[tuple[float, str]]:
    for scenario, text in _changes(base):
        forecast = simulate(scenario, recorded)
        gain = forecast.steps_per_s / own.steps_per_s - 1
        yield gain, f"{text} (oldest token {own.age:.1f} -> {forecast.age:.1f} versions)"


def _changes(base: Scenario) -> Iterator[tuple[Scenario, str]]:
    more, bound = base.generators + 1, base.max_staleness_versions + 1
    where = "on separate cores or a separate GPU"
    yield replace(base, generators=more), f"generators.count={more}, {where}"
    yield replace(base, max_staleness_versions=bound), f"buffer.max_staleness_versions={bound}"
    yield replace(base, learner_speed=2.0), "a learner twice as fast, such as twice learner.ranks"
    yield replace(base, scoring_speed=2.0), "scoring twice as fast: more verifiers.cells or .count"
    yield (
        replace(base, generation_speed=1.5),
        "generation 1.5 times as fast: a shorter limit",
    )
    if base.push_every_steps == 1:
        yield replace(base, push_every_steps=2), "weights.push_every_steps=2"
    if base.evaluate_every_steps:
        yield replace(base, evaluate_every_steps=0), "a separate pool for evaluation"
