"""OpenAI's Responses API as the real, unchanged `openai` package uses it."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from sessions_support import CHATML, Policy, Row, endpoint, open_session

from async_rl.sessions.session import Session

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def use(do: Any, texts: list[str], *, limit: int = 10_000) -> Session:
    session, policy = open_session(CHATML, texts, limit=limit)

    async def main() -> None:
        async with (
            endpoint(session) as url,
            openai.AsyncOpenAI(
                base_url=f"{url}/v1", api_key=session.token, max_retries=0
            ) as client,
        ):
            await do(client, policy)

    asyncio.run(main())
    return session


def test_an_agent_with_a_tool_is_one_segment() -> None:
    async def agent(client: Any, policy: Policy) -> None:
        how = {"model": "policy", "instructions": "be brief", "tools": [TOOL]}
        history: list[Any] = [{"role": "user", "content": "1 + 1"}]
        first = await client.responses.create(input=history, **how)
        assert [item.type for item in first.output] == ["message", "function_call"]
        assert first.output_text == "I add"
        call = first.output[1]
        assert [call.name, call.arguments] == ["add", '{"a":1}']
        history += first.output
        history.append({"type": "function_call_output", "call_id": call.call_id, "output": "2"})
        last = await client.responses.create(input=history, **how)
        assert [last.output_text, last.status] == ["2", "completed"]
        assert last.usage.output_tokens == 2
        assert last.usage.input_tokens > first.usage.input_tokens

    assert Row(use(agent, [f"I add {CALL}", "2"])).num_segments == 1


def test_an_earlier_response_stands_for_its_history() -> None:
    async def agent(client: Any, policy: Policy) -> None:
        first = await client.responses.create(model="policy", input="1 + 1")
        policy.say("4")
        last = await client.responses.create(
            model="policy", input="2 + 2", previous_response_id=first.id
        )
        assert last.output_text == "4"
        assert last.previous_response_id == first.id
        with pytest.raises(openai.BadRequestError, match="is not a response of this session"):
            await client.responses.create(model="policy", input="x", previous_response_id="resp_1")

    session = use(agent, ["2"])
    assert Row(session).num_segments == 1
    assert len(session.record.turns) == 2


def test_streams_of_text_and_of_tool_calls() -> None:
    text = " ".join(f"w{i}" for i in range(60))

    async def agent(client: Any, policy: Policy) -> None:
        deltas = []
        async with client.responses.stream(model="policy", input="go") as stream:
            async for event in stream:
                if event.type == "response.output_text.delta":
                    deltas.append(event.delta)
            final = await stream.get_final_response()
        assert ["".join(deltas), final.output_text] == [text, text]
        assert len(deltas) > 2
        policy.say(CALL)
        events = [
            event
            async for event in await client.responses.create(
                model="policy", input="on", tools=[TOOL], stream=True
            )
        ]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        done = next(e for e in events if e.type == "response.function_call_arguments.done")
        assert done.arguments == '{"a":1}'
        assert events[-1].type == "response.completed"
        assert events[-1].response.output[0].name == "add"

    use(agent, [text])


def test_an_answer_that_reaches_its_limit_is_incomplete() -> None:
    async def agent(client: Any, policy: Policy) -> None:
        cut = await client.responses.create(model="policy", input="go", max_output_tokens=3)
        assert [cut.status, cut.incomplete_details.reason] == ["incomplete", "max_output_tokens"]
        assert cut.usage.output_tokens == 3

    use(agent, ["a b c d e"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{"type": "web_search"}]}, "a tool of type 'web_search' is not supported"),
        ({"background": True}, "background=true is not supported"),
        ({"conversation": "conv_1"}, "conversation is not supported"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format=json_object"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "an item of type 'item_reference'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "'input_image'"),
        ({"model": "gpt-5"}, "is not served here"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    async def agent(client: Any, policy: Policy) -> None:
        with pytest.raises(openai.APIStatusError, match=message) as refused:
            await client.responses.create(**{"model": "policy", "input": "go", **fields})
        assert refused.value.status_code in (400, 404)

    assert use(agent, []).record.turns == {}
