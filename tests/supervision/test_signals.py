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
    ("numbers", "expected"),
    [
        ([signal.SIGHUP], (True, False)),
        ([signal.SIGTERM, signal.SIGTERM], (True, False)),
        ([signal.SIGTERM, signal.SIGHUP], (True, False)),
        ([signal.SIGINT, signal.SIGINT], (True, True)),
    ],
)
def test_a_closed_terminal_stops_a_run_in_order(
    numbers: list[signal.Signals], expected: tuple[bool, bool]
) -> None:
    # The tests themselves may run under nohup, where a process inherits that SIGHUP is ignored.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert asyncio.run(_received(*numbers)) == expected
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_under_nohup_continues_without_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert asyncio.run(_received(signal.SIGHUP)) == (False, False)
    finally:
        signal.signal(signal.SIGHUP, before)
