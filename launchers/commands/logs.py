"""`async-rl logs`: the log entries of a run's processes by time, and new ones as they are written.

Invariants: an entry is a line with the indented lines after it (tracebacks); the entries of several
processes are ordered by their time. Reads files only, so it works during and after a run.
"""

import re
import time
from pathlib import Path
from typing import Annotated

import typer

from async_rl.composition.problems import hint
from async_rl.core.errors import ConfigError
from async_rl.core.visible import visible
from async_rl.launchers.commands.options import OutputDir, Run
from async_rl.runs.control import living_pid
from async_rl.runs.directory import find_run

POLL_S = 0.3  # files change without an event that every filesystem delivers
_TIME = 23


def logs(
    run: Run = None,
    process: Annotated[
        str | None,
        typer.Argument(help="generator-0, learner-0, ...; default: all"),
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
    # How far each file has been read.
    offsets = dict.fromkeys(_paths(run_dir, process, ".out" if output else ".log"), 0)
    # All files are read once to sort by time; a log has a few megabytes at most.
    entries = new_entries(offsets)
    for entry in entries[max(0, len(entries) - num) :]:
        _print(entry)
    while follow:
        # Asked before reading, so that the last entries of a finished run are shown.
        is_alive = living_pid(run_dir) is not None
        for entry in new_entries(offsets):
            _print(entry)
        if not is_alive:
            return
        time.sleep(POLL_S)


def new_entries(offsets: dict[Path, int]) -> list[str]:
    """Return the whole entries of these files after the offsets, by time; those without a time
    first. In place: the offsets move to the end of what was read.
    """
    entries: list[str] = []
    for path, offset in offsets.items():
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
        # A line that is being written is read with the next call.
        whole = data[: data.rfind(b"\n") + 1]
        offsets[path] += len(whole)
        # A traceback is indented, as the log writes it, and belongs to its entry.
        entries += re.findall(r".*\n(?: .*\n)*", whole.decode(errors="replace"))
    return sorted((entry[:-1] for entry in entries), key=_time_of)


def _paths(run_dir: Path, process: str | None, suffix: str) -> list[Path]:
    paths = sorted((run_dir / "logs").glob(f"*{suffix}"))
    if process is None:
        return paths
    matches = [path for path in paths if path.stem == process]
    if matches:
        return matches
    raise ConfigError(
        f"{process}: no process of run {run_dir.name} has a {suffix} file in {run_dir}/logs;"
        f" {hint(process, among=[path.stem for path in paths])}"
    )


def _time_of(entry: str) -> str:
    return entry[:_TIME] if entry[:4].isdigit() else ""


def _print(entry: str) -> None:
    # Libraries print anything; the log itself has no control characters.
    typer.echo(visible(entry))
