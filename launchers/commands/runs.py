"""The runs on disk: their names, which one a person means, and what a run that has ended left
behind.

Invariants: a run is a directory with a config.yaml; its name is the directory's name; the newest is
the one launched last. Called by the command line.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import msgspec

from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.launchers.backends.slurm import SCRIPT_FILE
from async_rl.launchers.configuration import schema

ADJECTIVES = (
    *(
        "agile",
        "amber",
        "ample",
        "azure",
        "brave",
        "bright",
        "brisk",
        "calm",
        "clear",
        "clever",
        "coral",
        "crisp",
        "deft",
        "eager",
        "early",
    ),
    *(
        "fair",
        "fleet",
        "fond",
        "frank",
        "fresh",
        "gentle",
        "glad",
        "golden",
        "grand",
        "green",
        "happy",
        "hardy",
        "ivory",
        "jolly",
        "keen",
    ),
    *(
        "kind",
        "lively",
        "lucid",
        "lunar",
        "merry",
        "mild",
        "misty",
        "noble",
        "olive",
        "patient",
        "plain",
        "proud",
        "quick",
        "quiet",
        "rapid",
    ),
    *(
        "ready",
        "royal",
        "ruby",
        "sandy",
        "silver",
        "smart",
        "snowy",
        "solar",
        "solid",
        "steady",
        "sunny",
        "swift",
        "tidy",
        "vivid",
        "warm",
        "wise",
    ),
)
ANIMALS = (
    *(
        "badger",
        "bear",
        "beaver",
        "bison",
        "camel",
        "cat",
        "condor",
        "crane",
        "crow",
        "deer",
        "dolphin",
        "dove",
        "duck",
        "eagle",
        "egret",
    ),
    *(
        "falcon",
        "ferret",
        "finch",
        "fox",
        "gecko",
        "gibbon",
        "goose",
        "hare",
        "hawk",
        "heron",
        "horse",
        "ibex",
        "jackal",
        "jay",
        "koala",
    ),
    *(
        "lark",
        "lemur",
        "lion",
        "llama",
        "lynx",
        "marten",
        "mole",
        "moose",
        "newt",
        "otter",
        "owl",
        "panda",
        "parrot",
        "pony",
        "puffin",
    ),
    *(
        "rabbit",
        "raven",
        "robin",
        "salmon",
        "seal",
        "sparrow",
        "stork",
        "swan",
        "tapir",
        "tern",
        "tiger",
        "trout",
        "turtle",
        "whale",
        "wolf",
        "wren",
    ),
)


_QUEUED = "its job has not started yet: squeue"


class Remains(msgspec.Struct, frozen=True, kw_only=True):
    """What the directory of a run tells once nobody answers for it. outcome: finished, stopped,
    failed, not started by Slurm, or empty if it was killed.
    """

    run_name: str
    run_dir: str
    step: int
    num_steps: int
    outcome: str
    cause: str
    metrics: dict[str, float]


class _State(msgspec.Struct, frozen=True):
    outcome: str
    cause: str = ""


def unique_name(output_dir: Path, *, rng: random.Random, now: time.struct_time) -> str:
    """A name like `amber-otter-1120-1931` (month and day, hour and minute) that no run in
    `output_dir` has.
    """
    stamp = time.strftime("%m%d-%H%M", now)
    while True:
        name = f"{rng.choice(ADJECTIVES)}-{rng.choice(ANIMALS)}-{stamp}"
        if not (output_dir / name).exists():
            return name


def find(run: str | None, output_dir: Path) -> Path:
    """The directory of the run that a person means by a name, a directory, or nothing (the newest).
    Raises ConfigError if there is none.
    """
    runs = all_runs(output_dir)
    if run is None:
        if not runs:
            raise ConfigError(
                f"there is no run in {output_dir}; give its directory, or start one with async-rl"
                " launch conf=ppo_code"
            )
        return runs[0]
    for candidate in (output_dir / run, Path(run).expanduser()):
        if (candidate / "config.yaml").is_file():
            return candidate.absolute()
    best = schema.nearest(run, among=[path.name for path in runs])
    hint = (
        f"; did you mean {best}?"
        if best
        else "; the newest are " + ", ".join(path.name for path in runs[:5])
        if runs
        else ""
    )
    raise ConfigError(f"{run}: neither a run in {output_dir} nor the directory of one{hint}")


def all_runs(output_dir: Path) -> list[Path]:
    """Directories of all runs, newest first."""
    configs = {path: path.stat().st_mtime_ns for path in output_dir.glob("*/config.yaml")}
    return [
        path.parent.absolute()
        for path in sorted(configs, key=lambda path: configs[path], reverse=True)
    ]


def config_of(run_dir: Path) -> RunConfig:
    """The run's resolved configuration. Raises ConfigError if it cannot be read."""
    try:
        return msgspec.yaml.decode((run_dir / "config.yaml").read_bytes(), type=RunConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{run_dir}/config.yaml is of another version of async_rl ({error}); read this run with"
            " the version that made it"
        ) from error
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{run_dir}/config.yaml cannot be read: {error}") from error


def remains(run_dir: Path) -> Remains:
    """What is known of a run from its files alone. Raises ConfigError if its configuration cannot
    be read.
    """
    config = config_of(run_dir)
    last = _last_row(run_dir / "metrics.jsonl")
    try:
        state = msgspec.json.decode((run_dir / "state.json").read_bytes(), type=_State)
    except (OSError, msgspec.DecodeError):
        # The supervisor in the job writes control.json early on.
        is_queued = (run_dir / SCRIPT_FILE).is_file() and not (run_dir / "control.json").is_file()
        state = _State(_QUEUED if is_queued else "")
    return Remains(
        run_name=run_dir.name,
        run_dir=str(run_dir),
        step=int(last.get("step", 0)),
        num_steps=config.num_steps,
        outcome=state.outcome,
        cause=state.cause,
        metrics={name: value for name, value in last.items() if isinstance(value, int | float)},
    )


def history(run_dir: Path, metric: str) -> list[float]:
    """The metric's values in metrics.jsonl, step by step; none before the first step that has it."""
    rows = (_row(line) for line in _lines(run_dir / "metrics.jsonl"))
    return [float(row[metric]) for row in rows if metric in row]


def _last_row(path: Path) -> dict[str, Any]:
    """The last complete line of a jsonl file; empty if there is none."""
    return next((row for line in reversed(_lines(path)) if (row := _row(line))), {})


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines()
    except OSError:
        return []


def _row(line: bytes) -> dict[str, Any]:
    """Empty for a line that was not written to its end."""
    try:
        return msgspec.json.decode(line, type=dict)
    except msgspec.DecodeError:
        return {}
