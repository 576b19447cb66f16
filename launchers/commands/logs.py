"""`async-rl logs`: what the processes of a run wrote down, in order of time, and what they write
from now on.

Invariants: an entry is a line with the indented ones after it (tracebacks); entries of several
processes are told by their time. Reads files only, so it works during and after a run.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from async_rl.core.errors import ConfigError
from async_rl.launchers.commands import runs
from async_rl.launchers.commands.control import living_pid
from async_rl.launchers.commands.options import OutputDir, Run, default_output_dir
from async_rl.launchers.configuration import schema

_LOOK_S = 0.3
_LEVELS = {" WARNING ": "yellow", " ERROR ": "red", " CRITICAL ": "red"}


def logs(
    run: Run = None,
    process: Annotated[
        str | None,
        typer.Argument(metavar="[PROCESS]", help="generator-0, learner-0, ...; default: all"),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="go on until the run has ended")
    ] = False,
    output: Annotated[
        bool, typer.Option("--output", help="what libraries printed, in place of the log")
    ] = False,
    num: Annotated[
        int, typer.Option("--num", "-n", min=0, help="entries to begin with, the newest")
    ] = 50,
    output_dir: OutputDir = None,
) -> None:
    """Show the newest log entries of a run, of all its processes or of one.

    Examples: async-rl logs; async-rl logs --follow; async-rl logs my-run learner-0; async-rl logs
    my-run generator-0 --output
    """
    run_dir = runs.find(run, output_dir or default_output_dir())
    files = _Files(_paths(run_dir, process, ".out" if output else ".log"))
    entries = files.new()
    for entry in entries[len(entries) - min(num, len(entries)) :]:
        _tell(entry)
    while follow:
        is_alive = living_pid(run_dir) is not None
        for entry in files.new():
            _tell(entry)
        if not is_alive:
            return
        time.sleep(_LOOK_S)


class _Files:
    """What has been added to some files since they were read last."""

    def __init__(self, paths: list[Path]) -> None:
        self._read = dict.fromkeys(paths, 0)

    def new(self) -> list[str]:
        """Whole entries added since the last call, by time; those without one (what libraries
        print) come first.
        """
        return sorted(
            itertools.chain.from_iterable(self._of(path) for path in self._read), key=_time_of
        )

    def _of(self, path: Path) -> Iterator[str]:
        with path.open("rb") as file:
            file.seek(self._read[path])
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read[path] += len(whole)
        entry = ""
        for line in whole.decode(errors="replace").splitlines():
            if entry and not line.startswith(" "):
                yield entry
                entry = line
            else:
                entry = f"{entry}\n{line}" if entry else line
        if entry:
            yield entry


def _paths(run_dir: Path, process: str | None, suffix: str) -> list[Path]:
    paths = sorted((run_dir / "logs").glob(f"*{suffix}"))
    if process is None:
        return paths
    found = [path for path in paths if path.stem == process]
    if not found:
        names = [path.stem for path in paths]
        best = schema.nearest(process, among=names)
        hint = f"did you mean {best}?" if best else "there are " + (", ".join(names) or "none yet")
        raise ConfigError(
            f"{process}: no process of run {run_dir.name} has a {suffix} file in {run_dir}/logs;"
            f" {hint}"
        )
    return found


def _time_of(entry: str) -> str:
    return entry[:23] if entry[:4].isdigit() else ""


def _tell(entry: str) -> None:
    head = entry.partition("\n")[0]
    typer.secho(
        entry, fg=next((color for level, color in _LEVELS.items() if level in head[:40]), None)
    )
