"""Signals that stop a run."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from async_rl.supervision.control import StopRequest


async def _received(*numbers: signal.Signals) -> tuple[bool, bool]:
    stop = StopRequest()
    stop.handle_signals()
    for number in numbers:
        os.kill(os.getpid(), number)
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    return stop.graceful.done(), stop.immediate.done()


@pytest.mark.parametrize(
    ("hang_up", "numbers", "expected"),
    [
        (signal.SIG_DFL, [signal.SIGHUP], (True, False)),
        (signal.SIG_DFL, [signal.SIGTERM, signal.SIGHUP], (True, False)),
        (signal.SIG_DFL, [signal.SIGINT, signal.SIGINT], (True, True)),
        # Under nohup a run continues without its terminal.
        (signal.SIG_IGN, [signal.SIGHUP], (False, False)),
    ],
)
def test_a_closed_terminal_stops_a_run_in_order(
    hang_up: signal.Handlers, numbers: list[signal.Signals], expected: tuple[bool, bool]
) -> None:
    before = signal.signal(signal.SIGHUP, hang_up)
    try:
        assert asyncio.run(_received(*numbers)) == expected
    finally:
        signal.signal(signal.SIGHUP, before)
