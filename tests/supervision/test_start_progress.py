"""A start has no limit while it advances; one that does not is ended."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable

import psutil

from async_rl.config.timeouts import TimeoutsConfig
from async_rl.protocol.membership import Heartbeat, Register
from async_rl.runtime.context import PROGRESS_MB, moved_mb
from async_rl.supervision.liveness import Liveness
from async_rl.supervision.registry import Registry

LIMITS = TimeoutsConfig(call_s=0.1, start_s=0.2, group_s=120)
NAME = "generator-0"


def beat(moved: float, waits_for: str = "") -> Heartbeat:
    return Heartbeat(
        name=NAME,
        pid=7,
        state="starting",
        waits_for=waits_for,
        since_s=0.0,
        version=-1,
        counters={"gauge/progress_mb": moved},
    )


async def end_of_start(beats: Callable[[int], Heartbeat], *, num_beats: int) -> str:
    """Return why a process that beats ten times per limit was given up; empty if it was not."""
    registry = Registry()
    registry.add(NAME, "generator", 7)
    liveness = Liveness(registry, LIMITS, is_local=True)
    lost = asyncio.create_task(liveness.until_lost(NAME))
    for number in range(num_beats):
        registry.beat(beats(number))
        await asyncio.sleep(LIMITS.start_s / 10)
        if lost.done():
            return lost.result()
    registry.register(Register(name=NAME, role="generator", pid=7, address="tcp://x:1"))
    await asyncio.sleep(0)
    lost.cancel()
    return ""


def test_a_start_that_reads_has_no_limit() -> None:
    assert asyncio.run(end_of_start(lambda n: beat(n * PROGRESS_MB), num_beats=30)) == ""


def test_a_start_that_reaches_new_stages_has_no_limit() -> None:
    stages = asyncio.run(end_of_start(lambda n: beat(0.0, f"stage {n}"), num_beats=30))
    assert stages == ""


def test_a_start_that_only_beats_is_ended() -> None:
    reason = asyncio.run(end_of_start(lambda n: beat(5.0 + n * 0.01), num_beats=30))
    assert reason == "was not ready and made no progress for 0.2 s"


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
