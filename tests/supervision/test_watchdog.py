"""A run that stands still is told, and ended at the deadline."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from test_fleet import LIMITS

from async_rl.core.errors import RunFailed
from async_rl.protocol.membership import Heartbeat, Register
from async_rl.supervision.registry import Registry
from async_rl.supervision.watchdog import Watchdog


def beat(registry: Registry, watchdog: Watchdog, version: int) -> None:
    message = Heartbeat(
        name="learner-0",
        pid=1,
        state="waiting",
        waits_for="a batch",
        since_s=0,
        version=version,
        counters={},
    )
    registry.beat(message)
    watchdog.on_heartbeat()


def test_a_second_stall_is_told_as_soon_as_the_first_however_far_the_deadline_is() -> None:
    async def main() -> None:
        registry, told = Registry(), asyncio.Queue[str]()
        registry.register(Register(name="learner-0", role="learner", pid=1, address="tcp://x"))
        limits = msgspec.structs.replace(LIMITS, stall_warning_s=0.05, stall_timeout_s=1000.0)
        watchdog = Watchdog(registry, limits, told.put_nowait)
        beat(registry, watchdog, 1)
        running = asyncio.create_task(watchdog.run())
        async with asyncio.timeout(20):
            for version in (1, 2, 3):
                assert f"no learner step after version {version}" in await told.get()
                beat(registry, watchdog, version + 1)
                assert await told.get() == ""
        running.cancel()

    asyncio.run(main())


def test_a_stall_is_told_once_and_taken_back_and_ends_the_run_with_the_sentence() -> None:
    async def main() -> list[str]:
        registry, told = Registry(), list[str]()
        was_told = asyncio.Event()

        def warn(text: str) -> None:
            told.append(text)
            was_told.set()

        registry.register(Register(name="learner-0", role="learner", pid=1, address="tcp://x"))
        limits = msgspec.structs.replace(LIMITS, stall_warning_s=0.05, stall_timeout_s=0.5)
        watchdog = Watchdog(registry, limits, warn)
        beat(registry, watchdog, 1)
        running = asyncio.create_task(watchdog.run())
        async with asyncio.timeout(10):
            await was_told.wait()
            beat(registry, watchdog, 2)
            with pytest.raises(
                RunFailed,
                match=(
                    r"no learner step after version 2 .*a batch.*supervisor\.stall_timeout_s=0\.5"
                ),
            ):
                await running
        return told

    first, taken_back, again = asyncio.run(main())
    assert "no learner step after version 1" in first
    assert taken_back == ""
    assert "no learner step after version 2" in again
