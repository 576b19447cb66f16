"""`async-rl status`: what a run does now, once, as JSON, or live until the run ends.

Invariants: asks the run's control socket anew for each picture, so a run that is starting or coming
back is found; a run that does not answer is told from its files.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import RenderableType
from rich.live import Live

from async_rl.launchers.commands import runs
from async_rl.launchers.commands.control import ask_status, living_pid
from async_rl.launchers.commands.options import OutputDir, Run, console, default_output_dir
from async_rl.protocol.control import StatusReply

_REDRAW_S = 1.0
_RATES_OVER = 10  # pictures, so rates and the bottleneck are of about the last ten seconds


def status(
    run: Run = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="a new picture every second until the run ends")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
    output_dir: OutputDir = None,
) -> None:
    """Show what each process of a run does, what it waits for, and which part holds up the others.

    Examples: async-rl status; async-rl status --watch; async-rl status my-run --json
    """
    run_dir = runs.find(run, output_dir or default_output_dir())
    if as_json:
        typer.echo(_as_json(run_dir))
    elif watch:
        _watch(run_dir)
    else:
        reply = ask_status(run_dir)
        console().print(
            _without_answer(run_dir) if reply is None else _picture(reply, None),
            soft_wrap=reply is None,
        )


def ended(remains: runs.Remains) -> str:
    """What became of a run that is not running, in a line."""
    cause = f": {remains.cause}" if remains.cause else ""
    outcome = remains.outcome or "was killed"
    return (
        f"run {remains.run_name} is not running ({outcome}); last step {remains.step} of"
        f" {remains.num_steps}{cause}"
    )


def _as_json(run_dir: Path) -> bytes:
    reply = ask_status(run_dir)
    is_running = reply is not None or living_pid(run_dir) is not None
    answer: dict[str, Any] = {
        "is_running": is_running,
        **msgspec.to_builtins(runs.remains(run_dir)),
        "members": [],
    }
    answer.update(msgspec.to_builtins(reply) if reply is not None else {})
    return msgspec.json.encode({key: value for key, value in answer.items() if key != "type"})


def _watch(run_dir: Path) -> None:
    """Draws in place on a terminal, one picture below the other elsewhere; returns when the run has
    ended.
    """
    terminal = console()
    try:
        if terminal.is_terminal:
            with Live(console=terminal, screen=True, auto_refresh=False) as live:
                for picture in _pictures(run_dir):
                    live.update(picture, refresh=True)
        else:
            for picture in _pictures(run_dir):
                terminal.print(picture)
    except KeyboardInterrupt:
        return
    terminal.print(ended(runs.remains(run_dir)), markup=False, soft_wrap=True)


def _pictures(run_dir: Path) -> Iterator[RenderableType]:
    """One each second while the run lives."""
    from async_rl.monitoring.bottleneck import bottleneck
    from async_rl.monitoring.status import training_members

    answers: collections.deque[StatusReply] = collections.deque(maxlen=_RATES_OVER)
    last = ""
    while (reply := ask_status(run_dir)) is not None or living_pid(run_dir) is not None:
        if reply is None:
            yield _without_answer(run_dir)
        else:
            before = answers[0] if answers else None
            yield _picture(reply, before, last)
            last = bottleneck(
                training_members(reply), before.members if before is not None else (), last=last
            )
            answers.append(reply)
        time.sleep(_REDRAW_S)


def _picture(reply: StatusReply, before: StatusReply | None, last: str = "") -> RenderableType:
    from async_rl.monitoring.status import render

    return render(
        reply, before=before, rewards=runs.history(Path(reply.run_dir), "reward/mean"), last=last
    )


def _without_answer(run_dir: Path) -> str:
    """What is known of a run that does not answer: it starts, or it has ended."""
    remains, pid = runs.remains(run_dir), living_pid(run_dir)
    if pid is None:
        return ended(remains)
    return (
        f"run {remains.run_name} is starting (pid {pid}): its processes do not answer yet; see"
        f" {remains.run_dir}/logs"
    )
