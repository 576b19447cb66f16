"""The endpoint as the real, unchanged `anthropic` package uses it."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import pytest
from sessions_support import CHATML, Policy, Row, endpoint, open_session

from async_rl.sessions.session import Session

TOOL = {"name": "add", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def use(do: Any, texts: list[str]) -> Session:
    session, policy = open_session(CHATML, texts)

    async def main() -> None:
        async with (
            endpoint(session) as url,
            anthropic.AsyncAnthropic(base_url=url, api_key=session.token, max_retries=0) as client,
        ):
            await do(client, policy)

    asyncio.run(main())
    return session


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


def test_an_agent_with_a_tool_is_one_segment() -> None:
    async def agent(client: Any, policy: Policy) -> None:
        how = {"model": "policy", "max_tokens": 50, "system": "be brief", "tools": [TOOL]}
        first = await client.messages.create(messages=[user("1 + 1")], **how)
        assert [block.type for block in first.content] == ["text", "tool_use"]
        assert first.stop_reason == "tool_use"
        assert first.content[1].input == {"a": 1}
        result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "2"}
        messages = [user("1 + 1"), {"role": "assistant", "content": first.content}, user([result])]
        last = await client.messages.create(messages=messages, **how)
        assert [last.content[0].text, last.stop_reason] == ["2", "end_turn"]
        assert last.usage.output_tokens == 2

    assert Row(use(agent, [f"I add {CALL}", "2"])).num_segments == 1


def test_streams_of_text_and_of_tool_calls() -> None:
    text = " ".join(f"w{i}" for i in range(60))

    async def agent(client: Any, policy: Policy) -> None:
        how = {"model": "policy", "max_tokens": 500}
        async with client.messages.stream(messages=[user("go")], **how) as stream:
            parts = [part async for part in stream.text_stream]
            final = await stream.get_final_message()
        assert ["".join(parts), final.stop_reason] == [text, "end_turn"]
        assert len(parts) > 2
        policy.say(CALL)
        forced = {"type": "tool", "name": "add"}
        policy.say('{"b": 2}}</tool_call>')
        async with client.messages.stream(
            messages=[user("on")], tools=[TOOL], tool_choice=forced, **how
        ) as stream:
            final = await stream.get_final_message()
        assert final.content[0].input == {"b": 2}

    use(agent, [text])


def test_errors_have_the_form_of_the_api() -> None:
    async def agent(client: Any, policy: Policy) -> None:
        create = client.messages.create
        with pytest.raises(anthropic.NotFoundError) as missing:
            await create(model="claude", max_tokens=5, messages=[user("go")])
        assert missing.value.body["error"]["type"] == "not_found_error"
        with pytest.raises(anthropic.BadRequestError):
            await create(model="policy", max_tokens=5, messages=[user([{"type": "image"}])])
        other = client.with_options(api_key="x")
        with pytest.raises(anthropic.AuthenticationError):
            await other.messages.create(model="policy", max_tokens=5, messages=[user("go")])

    use(agent, [])
