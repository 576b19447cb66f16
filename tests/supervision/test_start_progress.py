"""A start has no limit while it advances; one that does not is ended."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable

import psutil
import pytest
from fleet_support import LIMITS, virtual_registry, virtually
from members import heartbeat

from async_rl.config.base import replace
from async_rl.protocol.membership import Heartbeat, Register
from async_rl.runtime.context import PROGRESS_MB, moved_mb
from async_rl.supervision.liveness import Liveness

NAME = "generator-0"


def beat(moved_mb: float, waits_for: str = "") -> Heartbeat:
    counters = {"gauge/progress_mb": moved_mb}
    return heartbeat(NAME, counters, pid=7, state="starting", waits_for=waits_for, version=-1)


@pytest.mark.proves("timeouts.start_s")
@pytest.mark.parametrize(
    ("beats", "start_s", "reason"),
    [
        (lambda n: beat(n * PROGRESS_MB), 120, ""),
        (lambda n: beat(0.0, f"stage {n}"), 120, ""),
        (lambda n: beat(5 + n * 0.01), 120, "was not ready and made no progress for 120 s"),
        (lambda n: beat(5 + n * 0.01), 60, "was not ready and made no progress for 60 s"),
    ],
    ids=["reads", "reaches stages", "only beats", "a shorter limit"],
)
def test_a_start_has_no_limit_while_it_advances(
    beats: Callable[[int], Heartbeat], start_s: float, reason: str
) -> None:
    async def main() -> str:
        registry = virtual_registry()
        registry.add(NAME, "generator", 7)
        limits = replace(LIMITS, start_s=start_s)
        lost = asyncio.create_task(Liveness(registry, limits, is_local=True).until_lost(NAME))
        for number in range(30):
            registry.beat(beats(number))
            await asyncio.wait({lost}, timeout=start_s / 10)
            if lost.done():
                return lost.result()
        registry.register(Register(name=NAME, role="generator", pid=7, address="tcp://x:1"))
        lost.cancel()
        return ""

    assert virtually(main()) == reason


def test_a_process_that_reads_or_grows_has_moved() -> None:
    process = psutil.Process()
    before = moved_mb(process)
    # Not a bytearray: malloc may reuse memory that this process has freed but still has resident.
    block = mmap.mmap(-1, 64 << 20)
    for place in range(0, len(block), 4096):
        block[place] = 1
    after = moved_mb(process)
    assert after - before > PROGRESS_MB
    with open("/dev/zero", "rb") as zeros:
        zeros.readinto(block)
    assert moved_mb(process) - after > PROGRESS_MB
