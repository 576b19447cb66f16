"""The runs on disk: which one a person means, and what is known of a run from its files.

Invariants: a run is a directory with a config.yaml; its name is the directory's name; the newest is
the one launched last.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.core.jsonl import lines_backwards
from async_rl.launchers.backends.slurm import SCRIPT_FILE
from async_rl.launchers.configuration.choices import expand
from async_rl.launchers.configuration.old_names import modernized
from async_rl.launchers.configuration.problems import nearest, problems_of

_NUM_SUGGESTED = 5
QUEUED = "its job has not started yet: squeue"


class Remains(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run according to its files. outcome: finished, stopped, failed, not started by
    Slurm, or empty if it was killed.
    """

    run_name: str
    run_dir: str
    step: int
    num_steps: int
    outcome: str
    cause: str
    metrics: dict[str, float]


def default_output_dir() -> Path:
    """Return the output_dir of conf/."""
    from async_rl.launchers.configuration.compose import compose
    from async_rl.launchers.configuration.files import QUICKSTART

    return Path(compose(QUICKSTART).output_dir)


class _State(msgspec.Struct, frozen=True):
    outcome: str
    cause: str = ""


def find(run: str | None, output_dir: Path | None) -> Path:
    """Return the directory of a run, given its name, its directory, or None for the newest. Raises
    ConfigError if there is none. output_dir: None for that of conf/.
    """
    output_dir = output_dir or default_output_dir()
    runs = all_runs(output_dir)
    if run is None:
        # One that failed before its first step is found by its name; its logs tell why.
        started = (path for path in runs if outcome(path)[0] != "failed" or _has_steps(path))
        if runs:
            return next(started, runs[0])
        raise ConfigError(
            f"no run exists in {output_dir}; give its directory, or start one with async-rl"
            " launch conf=ppo_code"
        )
    for candidate in (output_dir / run, Path(run).expanduser()):
        if (candidate / "config.yaml").is_file():
            return candidate.absolute()
    names = [path.name for path in runs]
    best = nearest(run, among=names)
    hint = ""
    if best is not None:
        hint = f"; did you mean {best}?"
    elif names:
        hint = f"; the newest are {', '.join(names[:_NUM_SUGGESTED])}"
    raise ConfigError(f"{run}: neither a run in {output_dir} nor the directory of one{hint}")


def _has_steps(run_dir: Path) -> bool:
    return bool(_last_row(run_dir / "metrics.jsonl"))


def is_directory_of_runs(path: Path) -> bool:
    """Return whether the path is a directory, but not that of a run."""
    path = path.expanduser()
    return path.is_dir() and not (path / "config.yaml").is_file()


def all_runs(output_dir: Path) -> list[Path]:
    """Return the directories of all runs, newest first."""
    configs = sorted(
        # By the configuration, which is written at launch and at a resume.
        output_dir.glob("*/config.yaml"),
        key=lambda path: path.stat().st_mtime_ns,
        reverse=True,
    )
    return [path.parent.absolute() for path in configs]


def config_of(run_dir: Path) -> RunConfig:
    """Read the run's resolved configuration. Raises ConfigError if it cannot be read."""
    try:
        tree = msgspec.yaml.decode((run_dir / "config.yaml").read_bytes(), type=dict[str, Any])
        present = modernized(tree)
        expand(present)
        problems = problems_of(present)
        if problems:
            first = next(iter(problems.values()))
            raise ConfigError(
                f"{run_dir}/config.yaml is damaged or of another version of async_rl ({first});"
                " restore it from a copy, or read this run with the version that made it"
            )
        return RunConfig.model_validate(present)
    except (OSError, msgspec.DecodeError) as error:
        reason = " ".join(str(error).split())  # a YAML error has several lines
        raise ConfigError(
            f"{run_dir}/config.yaml cannot be read: {reason}; restore it from a copy"
        ) from error


def remains(run_dir: Path) -> Remains:
    """Read the state of a run from its files. Raises ConfigError if its configuration cannot be
    read.
    """
    config = config_of(run_dir)
    last = _last_row(run_dir / "metrics.jsonl")
    ending, cause = outcome(run_dir)
    return Remains(
        run_name=run_dir.name,
        run_dir=str(run_dir),
        step=int(last.get("step", 0)),
        num_steps=config.num_steps,
        outcome=ending,
        cause=cause,
        metrics={name: value for name, value in last.items() if isinstance(value, int | float)},
    )


def outcome(run_dir: Path) -> tuple[str, str]:
    """Return (outcome, cause of a failure) of a run without processes, from its files; `Remains`
    has the outcomes.
    """
    try:
        state = msgspec.json.decode((run_dir / "state.json").read_bytes(), type=_State)
    except (OSError, msgspec.DecodeError):
        # The supervisor in the job writes control.json soon after its start.
        is_queued = (run_dir / SCRIPT_FILE).is_file() and not (run_dir / "control.json").is_file()
        state = _State(QUEUED if is_queued else "")
    return state.outcome, state.cause


def history(run_dir: Path, metric: str) -> list[float]:
    """Return the metric's values in metrics.jsonl, step by step; steps without it are left out."""
    return [float(row[metric]) for row in _rows(run_dir / "metrics.jsonl") if metric in row]


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a jsonl file; a killed writer may leave half a line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            yield msgspec.json.decode(line, type=dict)
        except msgspec.DecodeError:
            continue


def _last_row(path: Path) -> dict[str, Any]:
    """Return the last complete line; empty if there is none."""
    for _, line in lines_backwards(path):
        with contextlib.suppress(msgspec.DecodeError):
            last: dict[str, Any] = msgspec.json.decode(line, type=dict)
            return last
    return {}
