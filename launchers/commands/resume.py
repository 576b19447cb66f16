"""`async-rl resume`: the configuration that a run goes on with, what changed in it, and which
changes its history does not allow.

Invariants: nothing is written unless the run can go on; the configurations of before stay in the
run's directory as `config.<n>.yaml`. Called by the command line.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from async_rl.config.checks.run import raise_if_any
from async_rl.config.pools import pool_counts
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.launchers.commands import runs
from async_rl.launchers.commands.control import leave_mark, living_pid
from async_rl.launchers.configuration import schema
from async_rl.launchers.configuration.compose import recompose, to_yaml
from async_rl.planning.topology import SCALE_FILE
from async_rl.supervision.scaler import wanted_counts
from async_rl.training import checkpoints
from async_rl.training.mirror import Mirror

FIXED = {
    "run_name": "the run is its directory",
    "output_dir": "the run is its directory",
    "seed": "the order of prompts follows from it",
    "data": "the order of prompts, and what was asked, follow from it",
    "model.path": "the checkpoint is of that model",
    "generation.group_size": "the groups that are stored have that many samples",
    "reward.placement": "the groups that are stored have scores of their steps, or have not",
    "buffer.groups_per_step": "the batches that are planned have that many groups",
    "buffer.over_age": "the audit judges the whole history by one rule",
    "learner.critic.enabled": "the checkpoint holds a critic, or does not",
    "evaluation.num_prompts": "evaluations before and after would measure different prompts",
}
"""Settings and sections whose change would break the history of a run, and why."""


def resumed_config(run_dir: Path, overrides: Sequence[str]) -> tuple[RunConfig, list[str]]:
    """The configuration to go on with, and a line per setting that changed. Raises ConfigError if
    the run cannot go on with it.
    """
    if (pid := living_pid(run_dir)) is not None:
        raise ConfigError(
            f"run {run_dir.name} is running (pid {pid}); end it first with async-rl stop"
            f" {run_dir.name}"
        )
    before = runs.config_of(run_dir)
    after = recompose(run_dir / "config.yaml", overrides)
    changed = changes(before, after)
    raise_if_any(_refusals(run_dir, before, after, changed))
    return after, [
        f"{path}={schema.show(new)} (was {schema.show(old)})"
        for path, (old, new) in changed.items()
    ]


def changes(before: RunConfig, after: RunConfig) -> dict[str, tuple[object, object]]:
    """Settings that differ, by path: the old value and the new one."""
    old, new = (dict(schema.flatten(msgspec.to_builtins(config), "")) for config in (before, after))
    return {
        path: (old.get(path), new.get(path))
        for path in {**old, **new}
        if old.get(path) != new.get(path)
    }


def _refusals(
    run_dir: Path, before: RunConfig, after: RunConfig, changed: dict[str, tuple[object, object]]
) -> Iterator[str]:
    for path, (old, new) in changed.items():
        for fixed, reason in FIXED.items():
            if path == fixed or path.startswith(fixed + "."):
                yield (
                    f"{path}={schema.show(new)}: was {schema.show(old)}, and {reason}; start a new"
                    " run with async-rl launch"
                )
    bound, bound_before = after.buffer.max_staleness_versions, before.buffer.max_staleness_versions
    if bound < bound_before:
        yield (
            f"buffer.max_staleness_versions={bound}: was {bound_before}, and groups admitted under"
            f" that bound would be over age; keep it at {bound_before} or above"
        )
    estimator = before.algorithm.advantage
    if after.algorithm.advantage == "remax" and estimator != "remax":
        yield (
            f"algorithm.advantage=remax: was {estimator}, and the groups that are stored have no"
            f" greedy answer; keep {estimator}"
        )
    saved = checkpoints.versions(run_dir)
    if saved and saved[-1] >= after.num_steps:
        yield (
            f"num_steps={after.num_steps}: the run has finished step {saved[-1]}; give a larger"
            " num_steps to go on"
        )


def counts_after_resume(run_dir: Path, config: RunConfig) -> dict[str, int]:
    """Processes per pool: as the run was scaled, unless a count is set anew."""
    is_set = pool_counts(config) != pool_counts(runs.config_of(run_dir))
    return pool_counts(config) if is_set else wanted_counts(config, run_dir)


def is_copy(run: str) -> bool:
    """Whether this names the copy of a run at its mirror: a URL, or a directory that holds
    checkpoints and is no run.
    """
    return "://" in run or (
        any(Path(run).glob("step_*.complete")) and not (Path(run) / "config.yaml").exists()
    )


def fetch(url: str, output_dir: Path) -> Path:
    """Brings a run from its copy at `<checkpoint.mirror>/<name>` to `output_dir`, where it is at
    home from now on; its directory.
    """
    place, _, name = url.rstrip("/").rpartition("/")
    run_dir = (output_dir / name).absolute()
    Mirror(place, run_dir).fetch()
    config = msgspec.structs.replace(runs.config_of(run_dir), output_dir=str(run_dir.parent))
    (run_dir / "config.yaml").write_text(to_yaml(config))
    return run_dir


def take_up(config: RunConfig, run_dir: Path) -> None:
    """Makes the directory that of a running run again, with this configuration. Raises ConfigError
    if it cannot be written.
    """
    path = run_dir / "config.yaml"
    try:
        if pool_counts(config) != pool_counts(runs.config_of(run_dir)):
            (run_dir / SCALE_FILE).unlink(missing_ok=True)
        if config != runs.config_of(run_dir):
            number = 1 + len(list(run_dir.glob("config.*.yaml")))
            os.link(path, run_dir / f"config.{number}.yaml")
            partial = run_dir / "config.partial"
            partial.write_text(to_yaml(config))
            partial.replace(path)
        for name in ("state.json", "control.json"):
            (run_dir / name).unlink(missing_ok=True)
        leave_mark(run_dir)
    except OSError as error:
        raise ConfigError(
            f"{run_dir} cannot be written ({error.strerror}); make room or give permission"
        ) from error
