"""An agent written with the real package openai-agents, which knows nothing of this project."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from sessions_support import CHATML, Row, endpoint, open_session

# Read by the package when it is imported: it would send traces to its maker.
os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"
agents: Any = pytest.importorskip("agents", reason="openai-agents: make adapters installs it")

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def test_an_agent_with_a_tool_is_trained_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    added = []

    @agents.function_tool  # type: ignore[untyped-decorator]
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        added.append((a, b))
        return a + b

    async def plain(agent: Any) -> Any:
        return (await agents.Runner.run(agent, "1 + 2")).final_output

    async def streamed(agent: Any) -> Any:
        result = agents.Runner.run_streamed(agent, "1 + 2")
        async for _ in result.stream_events():
            pass
        return result.final_output

    async def main() -> None:
        # In one event loop: the package keeps its connections.
        for run in (plain, streamed):
            session, _ = open_session(CHATML, [f"I add {CALL}", "the sum is 3"])
            async with endpoint(session) as url:
                # All that an agent of a run is given.
                monkeypatch.setenv("OPENAI_BASE_URL", f"{url}/v1")
                monkeypatch.setenv("OPENAI_API_KEY", session.token)
                agent = agents.Agent(
                    name="adder", instructions="use the tool", tools=[add], model="policy"
                )
                assert await run(agent) == "the sum is 3"
            row = Row(session)
            assert row.num_segments == 1, "the second request repeats what was served"
            assert len(session.record.turns) == 2

    asyncio.run(main())
    assert added == [(1, 2), (1, 2)]
