"""The metrics of sessions: what agents did, and where their time went."""

import asyncio
from typing import Any

import pytest
from sessions_support import answered, open_session, said

from async_rl.observability.catalogue import describe
from async_rl.sessions.calls import Usage
from async_rl.sessions.open_sessions import Sessions
from async_rl.sessions.session import Session


def timed(now_s: list[float], *texts: str, environment: str = "guess") -> Session:
    """A session whose policy takes two seconds for each call."""
    session, policy = open_session(texts=texts)
    session.usage = Usage(clock=lambda: now_s[0], environment=environment)

    async def later(*given: Any) -> Any:
        now_s[0] += 2.0
        return await policy(*given)

    session.write = later
    return session


def test_means_are_over_the_sessions_that_ended_and_counts_by_environment() -> None:
    clock, sessions = [0.0], Sessions()

    async def main() -> None:
        for texts in (["one two"], ["three", "four five six"]):
            session = timed(clock, *texts)
            with sessions.open(session):
                for index, _ in enumerate(texts):
                    await answered(session, session.chat_call([said(str(index))], []))
                    clock[0] += 3.0
                await session.run_tool(b"fine")
            await asyncio.sleep(0)
        guess, maze = timed(clock), timed(clock, environment="maze")
        with sessions.open(guess), sessions.open(maze), guess.usage.calling():
            await maze.run_tool(b"raise")
            gauges = sessions.gauges
            assert (gauges["open"], gauges["open_in/guess"], gauges["open_in/maze"]) == (2, 1, 1)
            assert (gauges["calling"], gauges["calling_in/guess"]) == (1, 1)
            assert gauges["calling_in/maze"] == 0

    asyncio.run(main())
    gauges = sessions.gauges
    assert (gauges["open"], gauges["open_in/guess"], gauges["calling_in/maze"]) == (0, 0, 0)
    # Words, spaces and the end: 4, 2 and 6 tokens.
    assert (gauges["turns"], gauges["tokens_per_turn"]) == (3 / 4, pytest.approx(12 / 3))
    assert gauges["tool_error_share"] == pytest.approx(1 / 3)
    assert (gauges["tool_error_share_in/guess"], gauges["tool_error_share_in/maze"]) == (0, 1)
    assert gauges["outside_engine_share"] == pytest.approx(9 / 15)
    assert [name for name in gauges if describe(f"sessions/{name}") is None] == []
