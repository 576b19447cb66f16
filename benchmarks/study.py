"""The recorded runs of a study: one file of benchmarks/results, one line per run.

A line is `{"run": NAME, "rows": [...]}`, with `"config"`, the value of every setting by its dotted
name, and `"commit"` where the study records them. A run that is recorded again replaces its line.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import json
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rl.config.run import RunConfig

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]
_MISSING = "not set"


@dataclasses.dataclass(frozen=True, slots=True)
class Recorded:
    """One run of a study, which may not have run yet."""

    file: Path
    name: str

    def exists(self) -> bool:
        """Return whether the run was recorded."""
        return self.name in _lines(self.file)

    def rows(self) -> list[Row]:
        """Return its rows. Raises KeyError if it was not recorded."""
        return list(_lines(self.file)[self.name]["rows"])

    def config(self) -> Mapping[str, Any]:
        """Return the settings that it ran with. Raises SystemExit if they were not recorded."""
        line = _lines(self.file)[self.name]
        if "config" not in line:
            raise SystemExit(
                f"{self.file}: {self.name} has no configuration, so it cannot be compared; delete"
                " its line and run the cell again"
            )
        return dict(line["config"])

    def write(self, rows: Sequence[Row], *, config: RunConfig | None = None) -> None:
        """Record the run, and with `config` all settings and the commit of this tree."""
        line: dict[str, Any] = {"run": self.name, "rows": list(rows)}
        if config is not None:
            line |= {"commit": commit(), "config": flat(config.model_dump(mode="json"))}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a+") as file:
            # Several processes may run cells of one study.
            fcntl.flock(file, fcntl.LOCK_EX)
            lines = {**_read(self.file), self.name: line}
            text = "".join(f"{json.dumps(lines[name])}\n" for name in sorted(lines))
            file.truncate(0)
            file.write(text)


def recorded(file: Path) -> Mapping[str, list[Row]]:
    """Return the rows of every run of a study by its name, in order of names."""
    return {name: line["rows"] for name, line in _lines(file).items()}


def refuse_mixing(runs: Sequence[Recorded], *, apart_from: Collection[str]) -> None:
    """Raise SystemExit if two runs differ in a setting that is not in `apart_from`, and name it."""
    first = runs[0].config() if runs else {}
    for run in runs[1:]:
        other = run.config()
        for setting in sorted({*first, *other} - {*apart_from}):
            values = [each.get(setting, _MISSING) for each in (first, other)]
            if values[0] != values[1]:
                raise SystemExit(
                    f"{run.file}: {runs[0].name} ran with {setting}={values[0]}, {run.name} with"
                    f" {values[1]}; delete the lines of one of them and run its cells again"
                )


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested settings by their dotted names; an empty section is a value."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


@functools.cache
def commit() -> str:
    """Return the commit of this tree when it was first called, with -dirty after it if the code was
    changed since.
    """

    def git(*words: str) -> str:
        command = ["git", *words]
        root = RESULTS.parents[1]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    # Recording a run changes results and reporting changes documents, which no run depends on.
    changed = git("status", "--porcelain", "-uno", "--", ".", ":!benchmarks/results", ":!docs")
    return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")


def _lines(file: Path) -> Mapping[str, dict[str, Any]]:
    if not file.exists():
        return {}
    status = file.stat()
    return _parsed(file, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=8)
def _parsed(file: Path, changed_ns: int, size: int) -> Mapping[str, dict[str, Any]]:
    return _read(file)


def _read(file: Path) -> dict[str, dict[str, Any]]:
    lines = (json.loads(line) for line in file.read_text().splitlines())
    return {line["run"]: line for line in lines}
