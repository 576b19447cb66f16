"""The commands that watch or change a live run: `async-rl status`, `logs`, `runs`, `stop`, `scale`.

Invariants
- Every picture of status is a new request to the run's control socket, so a run that starts or
  restarts appears; a run that does not answer is described from its files.
- A log entry is a line with the indented lines after it (tracebacks); the entries of several
  processes are ordered by their time. Files only are read, so it works during and after a run.
- stop returns when the run has exited; scale returns immediately, and `status` shows the progress.
  A wrong name or number of a pool is reported with its remedy and changes nothing.
"""

import collections
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import RenderableType
from rich.live import Live

from async_rl.composition.problems import hint
from async_rl.config.checks.run import raise_if_any
from async_rl.core.errors import ConfigError
from async_rl.core.text import visible
from async_rl.launchers.api.run import ended, open_run
from async_rl.launchers.commands.options import AsJson, OutputDir, Run, console, print_table
from async_rl.monitoring.status import render
from async_rl.protocol.supervisor import StatusReply
from async_rl.runs.control import ask_status, living_pid
from async_rl.runs.directory import default_output_dir, find_run
from async_rl.runs.report import duration, number
from async_rl.runs.status import result_lines, status_of
from async_rl.runs.view.library import Library

REDRAW_S = 1.0
POLL_S = 0.3  # files change without an event that every filesystem delivers
_TIME = 23
_RATES_OVER = 10
"""Pictures: rates cover about the last ten seconds."""


def status(
    run: Run = None,
    watch: Annotated[
        bool,
        typer.Option("--watch", "-w", help="show a new picture every second until the run exits"),
    ] = False,
    as_json: AsJson = False,
    output_dir: OutputDir = None,
) -> None:
    """Show the work and the waits of each process, and the part that delays the run.

    Examples: async-rl status; async-rl status --watch; async-rl status my-run --json
    """
    run_dir = find_run(run, output_dir)
    if as_json:
        status = status_of(run_dir)
        answer = {"is_running": status.is_running, **msgspec.to_builtins(status)}
        typer.echo(msgspec.json.encode(answer))
    elif watch:
        _watch(run_dir)
    else:
        reply = ask_status(run_dir)
        shown = _without_answer(run_dir) if reply is None else render(reply)
        console().print(shown, soft_wrap=reply is None)


def _watch(run_dir: Path) -> None:
    """Draw in place on a terminal, otherwise one picture below the other, until the run exits."""
    terminal = console()
    try:
        # A file or a pipe cannot be drawn over.
        if terminal.is_terminal:
            with Live(console=terminal, screen=True, auto_refresh=False) as live:
                for picture in _pictures(run_dir):
                    live.update(picture, refresh=True)
        else:
            for picture in _pictures(run_dir):
                terminal.print(picture)
    except KeyboardInterrupt:
        return
    terminal.print(_without_answer(run_dir), soft_wrap=True)


def _pictures(run_dir: Path) -> Iterator[RenderableType]:
    """Yield one picture each second while the run is alive."""
    answers: collections.deque[StatusReply] = collections.deque(maxlen=_RATES_OVER)
    # A run that starts has a process before it has a socket.
    while (reply := ask_status(run_dir)) is not None or living_pid(run_dir) is not None:
        if reply is None:
            yield _without_answer(run_dir)
        else:
            before = answers[0] if answers else None
            yield render(reply, before=before)
            answers.append(reply)
        time.sleep(REDRAW_S)


def _without_answer(run_dir: Path) -> str:
    """Describe a run that does not answer: it is starting, or it has exited."""
    status = status_of(run_dir)
    pid = living_pid(run_dir)
    if pid is None:
        return "\n".join([ended(status), *result_lines(run_dir)])
    return (
        f"run {status.run_name} is starting (pid {pid}): its processes do not answer yet; see"
        f" {run_dir}/logs"
    )


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
    return sorted(
        (entry[:-1] for entry in entries),
        key=lambda entry: entry[:_TIME] if entry[:4].isdigit() else "",
    )


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


def _print(entry: str) -> None:
    # Libraries print anything; the log itself has no control characters.
    typer.echo(visible(entry))


def list_runs(output_dir: OutputDir = None) -> None:
    """List the runs of a directory: state, step, held-out result, duration.

    Examples: async-rl runs; async-rl runs --output-dir /data/runs
    """
    directory = output_dir or default_output_dir()
    summaries = [run.summary() for run in Library(directory).runs()]
    # A table without rows would look like a fault.
    if not summaries:
        console().print(f"no run in {directory}; start one with async-rl launch conf=ppo_code")
        return
    titles = "run,state,step,held-out pass@1,best,reward,duration,settings"
    rows = (
        (
            run.name,
            f"{run.state}: {run.cause}" if run.cause else run.state,
            f"{run.step} of {run.num_steps}",
            *(run.held_out, run.best, number(run.reward)),
            *(duration(run.result.duration_s), run.settings),
        )
        for run in summaries
    )
    print_table(titles.split(","), rows)


def stop(
    run: Run = None,
    now: Annotated[
        bool, typer.Option("--now", help="do not finish the step in progress; it is lost")
    ] = False,
    output_dir: OutputDir = None,
) -> None:
    """Finish the step, save and stop a run; return when it has exited.

    Examples: async-rl stop; async-rl stop my-run --now
    """
    opened = open_run(find_run(run, output_dir))
    # Printed before the wait, which lasts for a step.
    if living_pid(opened.directory) is not None:
        how = "ending" if now else "stopping: it finishes its step and saves"
        typer.echo(f"run {opened.name} is {how}")
    typer.echo(ended(opened.stop(now=now)))


def scale(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN] POOL=COUNT ...",
            help=(
                "a run (default: the newest), then generators=N, verifiers=N, gateways=N, or a pool"
                " as status shows it"
            ),
        ),
    ],
    output_dir: OutputDir = None,
) -> None:
    """Change how many generators, verifiers or gateways (of agents) a live run has.

    Examples: async-rl scale generators=4; async-rl scale my-run generators=2 verifiers=2; async-rl
    scale generators.big=3 generators.small=1
    """
    # A pool is given with its count; the first word without one names a run.
    run = None if "=" in words[0] else words[0]
    wanted = counts(words[1:] if run else words)
    opened = open_run(find_run(run, output_dir))
    for pool in opened.scale(**wanted):
        state = f"live {pool.live}, starting {pool.starting}, draining {pool.draining}"
        typer.echo(f"{pool.pool}: wanted {pool.wanted}; now {state}")


def counts(words: list[str]) -> dict[str, int]:
    """Parse `POOL=COUNT` words. Raises ConfigError with a line per wrong one."""
    raise_if_any(
        f"{word}: is not of the form POOL=COUNT, as in generators=4"
        for word in words
        if not re.fullmatch(r"[^=]+=\d+", word)
    )
    return {pool: int(count) for pool, _, count in (word.rpartition("=") for word in words)}
