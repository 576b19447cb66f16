"""The configuration of a resumed run: what changed, and which changes its history does not allow.

Invariants: nothing is written unless the run can be resumed; earlier configurations stay in the
run's directory as `config.<n>.yaml`.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from async_rl.buffer.store.connection import STORE_FILE
from async_rl.composition.compose import recompose, to_yaml
from async_rl.composition.overrides import with_defaults
from async_rl.composition.schema import Changes, changes
from async_rl.config.base import replace, show
from async_rl.config.checks.run import raise_if_any
from async_rl.config.pool_sizes import pool_counts
from async_rl.config.pools import SCALE_FILE
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.core.machine import this_machine
from async_rl.core.os import replace_synced
from async_rl.runs.control import leave_mark, living_pid
from async_rl.runs.status import RunState, config_of, ending
from async_rl.training import checkpoints
from async_rl.training.mirror import Mirror

FIXED = {
    "run_name": "a run is identified by its directory",
    "output_dir": "a run is identified by its directory",
    "seed": "the order of prompts depends on it",
    "data": "the prompts and their order depend on it",
    "model.path": "the checkpoint is of that model",
    "model.lora": "the checkpoint has the weights that are trained",
    "generation.group_size": "the stored groups have that many samples",
    "reward.placement": "the stored groups have scores of their steps, or have none",
    "buffer.groups_per_step": "the planned batches have that many groups",
    "buffer.uses_per_group": "the groups that other steps would use again may be deleted",
    "buffer.age_rule": "the audit checks the whole history by one rule",
    "evaluation.num_prompts": "evaluations before and after would measure different prompts",
}
"""Settings and sections that a resumed run cannot change, and why."""
_FREE = ("model.lora.slots",)
"""Settings in such a section that say how the adapter is served."""


def prepare(run_dir: Path, overrides: Sequence[str]) -> tuple[RunConfig, list[str]]:
    """Prepare another start of a run, which the caller owns, and return what `resumed_config`
    returns. Raises ConfigError if it cannot continue or this machine cannot run it.
    """
    # Imports what a run needs, which --help need not wait for.
    from async_rl.launchers.preflight.checks import preflight

    config, changed = resumed_config(run_dir, overrides)
    preflight(config, this_machine(), run_dir=run_dir)
    reopen(config, run_dir)
    return config, changed


def resumed_config(run_dir: Path, overrides: Sequence[str]) -> tuple[RunConfig, list[str]]:
    """Return the configuration to continue with, and a line per changed setting. Raises ConfigError
    if the run is still running or cannot continue with it.

    A cosine schedule continues as it was, whatever num_steps is.
    """
    pid = living_pid(run_dir)
    if pid is not None:
        raise ConfigError(
            f"run {run_dir.name} is running (pid {pid}); end it first with async-rl stop"
            f" {run_dir.name}"
        )
    before = config_of(run_dir)
    after = recompose(before, overrides)
    kept = _kept_schedule(before, after)
    if kept:
        after = recompose(before, with_defaults(overrides, kept))
    changed = changes(before, after)
    raise_if_any(_refusals(run_dir, before, after, changed))
    lines = [f"{path}={show(new)} (was {show(old)})" for path, (old, new) in changed.items()]
    if kept:
        lines.append(
            f"the learning rate as it was scheduled, at its least value from step"
            f" {before.num_steps} on (learner.optimizer.schedule_span)"
        )
    return after, lines


def _kept_schedule(before: RunConfig, after: RunConfig) -> list[str]:
    """Return the span of the cosine schedules as an override, where the number of steps changes.

    By num_steps alone, a longer run would raise the rate that a finished one had lowered.
    """
    critic = before.algorithm.critic
    optimizer = before.learner.optimizer
    schedules = {optimizer.schedule, critic.schedule if critic else ""}
    # The end of a cosine is num_steps only if the file names no span.
    is_same = before.num_steps == after.num_steps or optimizer.schedule_span
    if is_same or "cosine" not in schedules:
        return []
    end = before.num_steps - (critic.warmup_steps if critic else 0)
    return [f"learner.optimizer.schedule_span=[{optimizer.warmup_steps},{end}]"]


def _refusals(
    run_dir: Path, before: RunConfig, after: RunConfig, changed: Changes
) -> Iterator[str]:
    for path, (old, new) in changed.items():
        for fixed, reason in FIXED.items():
            is_inside = path.startswith(fixed + ".") and path not in _FREE
            if path == fixed or is_inside:
                yield (
                    f"{path}={show(new)}: was {show(old)}, and {reason}; start a new"
                    " run with async-rl launch"
                )
    bound = after.buffer.max_staleness_versions
    bound_before = before.buffer.max_staleness_versions
    if bound < bound_before:
        yield (
            f"buffer.max_staleness_versions={bound}: was {bound_before}, and groups admitted under"
            f" that bound would be over age; keep it at {bound_before} or above"
        )
    yield from estimator_problems(before, after)
    saved = checkpoints.versions(run_dir)
    # New ones would be made silently, and would look as if nothing had been before.
    remedies = {
        STORE_FILE: "restore it from a copy (checkpoint.mirror), or start a new run",
        "metrics.jsonl": (
            "restore it from a copy; with an empty file the run continues without the numbers of"
            " these steps"
        ),
    }
    for name, remedy in remedies.items():
        if saved and not (run_dir / name).is_file():
            yield f"{run_dir / name} of the steps up to {saved[-1]} is missing: {remedy}"
    # A run that was stopped after its last checkpoint still lacks the last evaluation.
    is_complete = ending(run_dir)[0] is RunState.FINISHED
    if saved and saved[-1] >= after.num_steps and (is_complete or after.num_steps < saved[-1]):
        yield (
            f"num_steps={after.num_steps}: the run has finished step {saved[-1]}; give a larger"
            " num_steps to continue"
        )


def estimator_problems(before: RunConfig, after: RunConfig) -> Iterator[str]:
    """Yield why the checkpoints and the stored groups of a run do not suit another estimator."""
    old = before.algorithm
    new = after.algorithm
    estimator = old.advantage.kind
    if (old.critic is None) != (new.critic is None):
        yield (
            f"algorithm.advantage={new.advantage.kind}: was {estimator}, and the checkpoint has a"
            " critic, or has none; start a new run with async-rl launch"
        )
    if new.advantage.kind == "remax" and estimator != "remax":
        yield (
            f"algorithm.advantage=remax: was {estimator}, and the stored groups have no greedy"
            f" answer; keep {estimator}"
        )


def is_copy(run: str) -> bool:
    """Return whether this names a run's copy at its mirror: a URL, or a directory with checkpoints
    but without a configuration.
    """
    if "://" in run:
        return True
    return any(Path(run).glob("step_*.complete")) and not (Path(run) / "config.yaml").exists()


def fetch(url: str, output_dir: Path) -> Path:
    """Copy a run from `<checkpoint.mirror>/<name>` into `output_dir` and return its directory."""
    mirror, _, name = url.rstrip("/").rpartition("/")
    run_dir = (output_dir / name).absolute()
    Mirror(mirror, run_dir).fetch()
    config = replace(config_of(run_dir), output_dir=str(run_dir.parent))
    replace_synced(run_dir / "config.yaml", to_yaml(config).encode())
    return run_dir


def reopen(config: RunConfig, run_dir: Path) -> None:
    """Prepare the directory of a finished run for another start with this configuration. Raises
    ConfigError if it cannot be written.
    """
    path = run_dir / "config.yaml"
    before = config_of(run_dir)
    try:
        run_dir.chmod(0o700)  # of an earlier version, it may be open to other users
        # A count that is set now wins over the last scaling.
        if pool_counts(config) != pool_counts(before):
            (run_dir / SCALE_FILE).unlink(missing_ok=True)
        if config != before:
            number = 1 + len(list(run_dir.glob("config.*.yaml")))
            os.link(path, run_dir / f"config.{number}.yaml")
            replace_synced(path, to_yaml(config).encode())
        # They describe the previous start; a reader must not take them for the new one.
        for name in ("state.json", "control.json"):
            (run_dir / name).unlink(missing_ok=True)
        leave_mark(run_dir)
    except OSError as error:
        raise ConfigError(
            f"{run_dir} cannot be written ({error.strerror}); free disk space or grant write"
            " permission"
        ) from error
