"""`async-rl status`: the state of a run, once, as JSON, or live until the run exits.

Invariants: every picture is a new request to the run's control socket, so a run that starts or
restarts appears; a run that does not answer is described from its files.
"""

import collections
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import RenderableType
from rich.live import Live

from async_rl.launchers.api.run import ended
from async_rl.launchers.commands.options import AsJson, OutputDir, Run, console
from async_rl.monitoring.status import render
from async_rl.protocol.control import StatusReply
from async_rl.runs.control import ask_status, living_pid
from async_rl.runs.directory import find_run
from async_rl.runs.status import result_lines, status_of

REDRAW_S = 1.0
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
        if reply is None:
            console().print(_without_answer(run_dir), soft_wrap=True)
        else:
            console().print(render(reply))


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
