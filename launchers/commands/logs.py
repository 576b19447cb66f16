"""`async-rl logs`: the log entries of a run's processes by time, and new ones as they are written.

Invariants: an entry is a line with the indented lines after it (tracebacks); the entries of several
processes are ordered by their time. Reads files only, so it works during and after a run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from async_rl.composition.problems import nearest
from async_rl.core.errors import ConfigError
from async_rl.core.visible import visible
from async_rl.launchers.commands.options import OutputDir, Run
from async_rl.runs.control import living_pid
from async_rl.runs.directory import find_run

_POLL_S = 0.3  # files change without an event that every filesystem delivers
_LEVELS = {" WARNING ": "yellow", " ERROR ": "red", " CRITICAL ": "red"}
_HEAD = 40
_TIME = 23


def logs(
    run: Run = None,
    process: Annotated[
        str | None,
        typer.Argument(metavar="[PROCESS]", help="generator-0, learner-0, ...; default: all"),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="show new entries until the run exits")
    ] = False,
    output: Annotated[
        bool, typer.Option("--output", help="show what libraries printed instead of the log")
    ] = False,
    num: Annotated[
        int, typer.Option("--num", "-n", min=0, help="number of newest entries to start with")
    ] = 50,
    output_dir: OutputDir = None,
) -> None:
    """Show the newest log entries of a run, of all its processes or of one.

    Examples: async-rl logs; async-rl logs --follow; async-rl logs my-run learner-0; async-rl logs
    my-run generator-0 --output
    """
    run_dir = find_run(run, output_dir)
    files = _Files(_paths(run_dir, process, ".out" if output else ".log"))
    # All files are read once to sort by time; a log has a few megabytes at most.
    entries = files.new()
    for entry in entries[max(0, len(entries) - num) :]:
        _print(entry)
    while follow:
        # Asked before reading, so that the last entries of a finished run are shown.
        is_alive = living_pid(run_dir) is not None
        for entry in files.new():
            _print(entry)
        if not is_alive:
            return
        time.sleep(_POLL_S)


class _Files:
    """Files and how far each has been read."""

    def __init__(self, paths: list[Path]) -> None:
        self._offsets = dict.fromkeys(paths, 0)

    def new(self) -> list[str]:
        """Return whole entries added since the last call, by time; those without a time first."""
        entries: list[str] = []
        for path in self._offsets:
            entries += self._entries(path)
        return sorted(entries, key=_time_of)

    def _entries(self, path: Path) -> Iterator[str]:
        with path.open("rb") as file:
            file.seek(self._offsets[path])
            data = file.read()
        # A line that is being written is read with the next call.
        whole = data[: data.rfind(b"\n") + 1]
        self._offsets[path] += len(whole)
        entry = ""
        for line in whole.decode(errors="replace").splitlines():
            # A traceback is indented, as the log writes it, and belongs to its entry.
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
    matches = [path for path in paths if path.stem == process]
    if matches:
        return matches
    names = [path.stem for path in paths]
    best = nearest(process, among=names)
    hint = f"did you mean {best}?" if best else f"there are {', '.join(names) or 'none yet'}"
    raise ConfigError(
        f"{process}: no process of run {run_dir.name} has a {suffix} file in {run_dir}/logs; {hint}"
    )


def _time_of(entry: str) -> str:
    return entry[:_TIME] if entry[:4].isdigit() else ""


def _print(entry: str) -> None:
    head = entry.partition("\n")[0][:_HEAD]
    # Only the head: a level inside a message is text.
    color = next((color for level, color in _LEVELS.items() if level in head), None)
    # Libraries print anything; the log itself has no control characters.
    typer.secho(visible(entry), fg=color)
