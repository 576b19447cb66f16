"""An agent whose tools come from an MCP server, with the real package `mcp` on both sides."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest
from sessions_support import Row, endpoint, open_session

from async_rl.config.rollout import Agent
from async_rl.rollouts.environments import open_environments
from async_rl.sessions.endpoint import Endpoint

TUTORIAL = Path(__file__).parents[2] / "docs/tutorials/own_agent.md"
SERVER = """
from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")


@server.tool()
def add(a: int, b: int) -> int:
    return a + b


server.run()
"""


def test_the_agent_of_the_tutorial_calls_the_tools_of_a_server(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    (program,) = re.findall(r"```python\n# mcp_agent.py\n(.*?)```", TUTORIAL.read_text(), re.DOTALL)
    (tmp_path / "agent.py").write_text(program)
    (tmp_path / "server.py").write_text(SERVER)
    words = [sys.executable, f"{tmp_path}/agent.py", sys.executable, f"{tmp_path}/server.py"]
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 41}}\n</tool_call>'
    session, _ = open_session(texts=[call, "done"])

    async def main() -> None:
        async with endpoint(session) as url:
            reached = Endpoint.of(url, session.token, session.session_key)
            agents = open_environments(Agent(command=words, fn=None, workers=1))
            await agents.run(reached, {"prompt": "go"})

    asyncio.run(main())
    row = Row(session)
    assert (row.num_segments, session.last_text) == (1, "done")
    read = session.chat.decode(row.tokens.token_ids[~row.tokens.is_written])
    assert "tool\n42" in read
    written = session.chat.decode(row.tokens.token_ids[row.tokens.is_written])
    assert written == call + "done"
