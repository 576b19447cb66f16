"""The metrics of sessions: what agents did, and where their time went."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sessions_support import answered, open_session

from async_rl.observability.catalogue import describe
from async_rl.sessions.open_sessions import Sessions
from async_rl.sessions.session import Session
from async_rl.sessions.usage import Usage


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def slow(session: Session, clock: Clock, seconds: float) -> None:
    """Let each call of the policy take that long."""
    write = session.write

    async def later(name: str, before: Any, limit: int, support: Any, shown: Any) -> Any:
        clock.now_s += seconds
        return await write(name, before, limit, support, shown)

    session.write = later


def test_means_are_over_the_sessions_that_ended() -> None:
    clock = Clock()
    sessions = Sessions()
    assert sessions.gauges == {"open": 0, "calling": 0}

    async def main() -> None:
        for texts in (["one two"], ["three", "four five six"]):
            session, _ = open_session(texts=texts)
            session.usage = Usage(clock=clock)
            slow(session, clock, 2.0)
            with sessions.open(session):
                assert sessions.gauges["open"] == 1
                for index, _ in enumerate(texts):
                    messages = [{"role": "user", "content": str(index)}]
                    await answered(session, session.chat_call(messages, []))
                    clock.now_s += 3.0
                await session.run_tool(b"fine")
            await asyncio.sleep(0)
        session, _ = open_session(texts=[])
        session.usage = Usage(clock=clock)
        with sessions.open(session):
            await session.run_tool(b"raise")

    asyncio.run(main())
    gauges = sessions.gauges
    assert gauges["turns"] == 1.0
    # Words, spaces and the end: 4, 2 and 6 tokens.
    assert gauges["tokens_per_turn"] == pytest.approx(12 / 3)
    assert gauges["tool_error_share"] == pytest.approx(1 / 3)
    assert gauges["outside_engine_share"] == pytest.approx(9 / 15)


def test_sessions_and_tool_errors_are_counted_by_environment() -> None:
    sessions = Sessions()

    async def main() -> None:
        opened = []
        for environment in ("guess", "guess", "maze"):
            session, _ = open_session(texts=[])
            session.usage.environment = environment
            opened.append(session)
        guess, other, maze = opened
        with sessions.open(guess), sessions.open(other), sessions.open(maze):
            with guess.usage.calling():
                counts = {n: v for n, v in sessions.gauges.items() if "open" in n or "calling" in n}
                assert counts == {
                    "open": 3,
                    "calling": 1,
                    "open_in/guess": 2,
                    "calling_in/guess": 1,
                    "open_in/maze": 1,
                    "calling_in/maze": 0,
                }
            await guess.run_tool(b"raise")
            await other.run_tool(b"fine")
            await maze.run_tool(b"fine")

    asyncio.run(main())
    gauges = sessions.gauges
    assert (gauges["open"], gauges["open_in/guess"], gauges["calling_in/maze"]) == (0, 0, 0)
    assert gauges["tool_error_share"] == pytest.approx(1 / 3)
    assert (gauges["tool_error_share_in/guess"], gauges["tool_error_share_in/maze"]) == (0.5, 0.0)
    for name in gauges:
        assert describe(f"sessions/{name}") is not None, name


def test_calls_at_the_same_time_count_once() -> None:
    clock = Clock()

    async def main() -> Session:
        session, _ = open_session(texts=["a", "b"])
        session.usage = Usage(clock=clock)
        started = asyncio.Event()
        write = session.write

        async def later(name: str, before: Any, limit: int, support: Any, shown: Any) -> Any:
            await started.wait()
            return await write(name, before, limit, support, shown)

        session.write = later
        calls = [
            asyncio.create_task(
                answered(
                    session,
                    session.chat_call([{"role": "user", "content": text}], [], max_tokens=9),
                )
            )
            for text in ("x", "y")
        ]
        with Sessions().open(session):
            await asyncio.sleep(0)
            clock.now_s = 5.0
            started.set()
            await asyncio.gather(*calls)
            clock.now_s = 6.0
        return session

    usage = asyncio.run(main()).usage
    assert (usage.num_turns, usage.calling_s, usage.open_s) == (2, 5.0, 6.0)
