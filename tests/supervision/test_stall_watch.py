"""A stalled run is reported, and ends at the deadline."""

from __future__ import annotations

import asyncio

import pytest
from test_fleet import LIMITS

from async_rl.config.base import replace
from async_rl.config.timeouts import TimeoutsConfig
from async_rl.core.errors import RunFailed
from async_rl.protocol.membership import Heartbeat, Register
from async_rl.supervision.liveness import Liveness, StallWatch
from async_rl.supervision.registry import Registry


def watch(registry: Registry, limits: TimeoutsConfig) -> StallWatch:
    return StallWatch(registry, Liveness(registry, limits, is_local=True), limits)


def beat(registry: Registry, stall_watch: StallWatch, version: int, pid: int = 1) -> None:
    message = Heartbeat(
        name="learner-0",
        pid=pid,
        state="waiting",
        waits_for="a batch",
        since_s=0,
        version=version,
        counters={},
    )
    registry.beat(message)
    stall_watch.observe()


def test_a_second_stall_is_told_as_soon_as_the_first_however_far_the_deadline_is() -> None:
    async def main() -> None:
        registry = Registry()
        registry.register(Register(name="learner-0", role="learner", pid=1, address="tcp://x"))
        limits = replace(LIMITS, start_s=0.15)
        stall_watch = watch(registry, limits)
        beat(registry, stall_watch, 1)
        reports = stall_watch.reports()
        async with asyncio.timeout(20):
            for version in (1, 2, 3):
                assert f"no learner step after version {version}" in await anext(reports)
                beat(registry, stall_watch, version + 1)
                assert await anext(reports) == ""

    asyncio.run(main())


def test_a_stall_is_told_once_and_taken_back_and_ends_the_run_with_the_sentence() -> None:
    async def main() -> list[str]:
        registry = Registry()
        found: list[str] = []
        registry.register(Register(name="learner-0", role="learner", pid=1, address="tcp://x"))
        limits = replace(LIMITS, call_s=10, start_s=0.05)
        stall_watch = watch(registry, limits)
        beat(registry, stall_watch, 1)
        async with asyncio.timeout(10):
            reports = stall_watch.reports()
            found.append(await anext(reports))
            beat(registry, stall_watch, 2)
            found += [await anext(reports), await anext(reports)]
            with pytest.raises(
                RunFailed,
                match=(r"no learner step after version 2 .*a batch.*10 timeouts\.start_s = 0\.5 s"),
            ):
                await anext(reports)
        return found

    first, taken_back, again = asyncio.run(main())
    assert "no learner step after version 1" in first
    assert taken_back == ""
    assert "no learner step after version 2" in again


def test_only_a_new_version_or_a_new_learner_is_progress() -> None:
    async def main() -> None:
        now_s = 0.0
        registry = Registry(lambda: now_s)
        stall_watch = watch(registry, LIMITS)
        registry.register(Register(name="learner-0", role="learner", pid=1, address="tcp://x"))
        registry.register(Register(name="generator-0", role="generator", pid=3, address="tcp://y"))
        for pid, version, at_s, since_s in ((1, 0, 5, 5), (1, 0, 9, 5), (1, 1, 11, 11)):
            now_s = at_s
            beat(registry, stall_watch, version, pid=pid)
            assert stall_watch.since_s == since_s
        now_s = 14.0
        registry.register(Register(name="learner-0", role="learner", pid=2, address="tcp://x"))
        beat(registry, stall_watch, 0, pid=2)
        assert stall_watch.since_s == 14.0

    asyncio.run(main())
