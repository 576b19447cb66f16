"""The endpoint as the real, unchanged `openai` package uses it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from sessions_support import CHATML, Policy, Row, endpoint, open_session

from async_rl.core.errors import Unavailable
from async_rl.sessions.session import Session

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
Use = Callable[[openai.AsyncOpenAI, Session, Policy], Awaitable[None]]


def use(do: Use, texts: list[str], template: str = CHATML, **limits: Any) -> Session:
    session, policy = open_session(template, texts, **limits)

    async def main() -> None:
        async with (
            endpoint(session) as url,
            openai.AsyncOpenAI(
                base_url=f"{url}/v1", api_key=session.token, max_retries=0
            ) as client,
        ):
            await do(client, session, policy)

    asyncio.run(main())
    return session


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def test_an_agent_with_a_tool_is_one_segment() -> None:
    async def agent(client: Any, session: Session, policy: Policy) -> None:
        messages = [user("1 + 1")]
        reply = await client.chat.completions.create(
            model="policy", messages=messages, tools=[TOOL]
        )
        choice = reply.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I add")
        call = choice.message.tool_calls[0]
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
        # The whole message with its null fields, as the package returns it.
        messages += [
            choice.message,
            {"role": "tool", "tool_call_id": call.id, "content": "2"},
        ]
        done = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        assert (done.choices[0].finish_reason, done.choices[0].message.content) == ("stop", "2")
        assert done.usage.completion_tokens == 2

    session = use(agent, [f"I add {CALL}", "2"])
    assert Row(session).num_segments == 1
    assert session.last_text == "2"


def test_a_stream_has_the_text_of_the_answer_in_pieces() -> None:
    text = " ".join(f"w{i}" for i in range(60))

    async def agent(client: Any, session: Session, policy: Policy) -> None:
        stream = await client.chat.completions.create(
            model="policy",
            messages=[user("go")],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        parts = [c.choices[0].delta.content for c in chunks if c.choices]
        assert "".join(filter(None, parts)) == text
        assert sum(bool(part) for part in parts) > 2
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage.completion_tokens == 120

    row = Row(use(agent, [text]))
    assert row.tokens.is_written.sum() == 120


def test_a_streamed_call_of_no_tool_is_text_and_is_recognized_in_the_history() -> None:
    async def agent(client: Any, session: Session, policy: Policy) -> None:
        create = client.chat.completions.create
        stream = await create(model="policy", messages=[user("go")], stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
        text = "".join(choice.delta.content or "" for choice in chunks)
        assert "<tool_call>" in text
        assert [c.finish_reason for c in chunks if c.finish_reason] == ["stop"]
        history = [user("go"), {"role": "assistant", "content": text}, user("on")]
        await create(model="policy", messages=history)

    assert Row(use(agent, [CALL, "yes"])).num_segments == 1


def test_a_streamed_tool_call_is_put_together_by_the_client() -> None:
    async def agent(client: Any, session: Session, policy: Policy) -> None:
        async with client.chat.completions.stream(
            model="policy", messages=[user("go")], tools=[TOOL]
        ) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        assert json.loads(final.choices[0].message.tool_calls[0].function.arguments) == {"a": 1}

    use(agent, [CALL])


def test_a_required_tool_begins_the_answer_and_is_not_trained() -> None:
    async def agent(client: Any, session: Session, policy: Policy) -> None:
        chosen = {"type": "function", "function": {"name": "add"}}
        reply = await client.chat.completions.create(
            model="policy", messages=[user("go")], tools=[TOOL], tool_choice=chosen
        )
        assert reply.choices[0].message.tool_calls[0].function.arguments == '{"b":2}'

    row = Row(use(agent, ['{"b": 2}}</tool_call>']))
    assert row.tokens.is_written.sum() == 14


def test_n_answers_are_branches_of_one_sample() -> None:
    async def agent(client: Any, session: Session, policy: Policy) -> None:
        policy._texts = iter(["one", "two", "three"])
        reply = await client.chat.completions.create(
            model="policy", messages=[user("go")], n=3, logprobs=True, max_tokens=5
        )
        assert {choice.message.content for choice in reply.choices} == {"one", "two", "three"}
        content = reply.choices[0].logprobs.content
        assert [len(content), content[-1].token] == [2, "<|im_end|>"]

    assert Row(use(agent, [])).num_segments == 3


def test_stop_and_max_tokens_end_an_answer() -> None:
    async def agent(client: Any, session: Session, policy: Policy) -> None:
        create = client.chat.completions.create
        first = await create(model="policy", messages=[user("go")], stop=["two"])
        assert [first.choices[0].message.content, first.choices[0].finish_reason] == [
            "one ",
            "stop",
        ]
        policy.say("one two three")
        second = await create(model="policy", messages=[user("on")], max_tokens=2)
        assert second.choices[0].finish_reason == "length"

    use(agent, ["one two three"])


def test_completions_continue_text_and_token_ids() -> None:
    async def agent(client: Any, session: Session, policy: Policy) -> None:
        create = client.completions.create
        one = await create(model="policy", prompt="go ", logprobs=0)
        assert one.choices[0].text == "one two"
        assert len(one.choices[0].logprobs.token_logprobs) == 4
        policy.say("three")
        two = await create(model="policy", prompt="go one two and ")
        assert two.choices[0].text == "three"
        ids = [*session.record.turns[1].path.tolist(), 1]
        policy.say("four")
        assert (await create(model="policy", prompt=ids)).choices[0].text == "four"
        policy.say("five")
        stream = await create(model="policy", prompt="new ", stream=True)
        assert "".join([c.choices[0].text async for c in stream]) == "five"

    session = use(agent, ["one two"])
    # The first answer is a segment with its end token, and again without it before the second.
    assert Row(session).num_segments == 3


def test_models_are_listed() -> None:
    async def agent(client: Any, session: Session, policy: Policy) -> None:
        assert [model.id async for model in client.models.list()] == ["policy"]
        assert (await client.models.retrieve("policy")).id == "policy"

    use(agent, [])


def test_a_request_that_is_sent_again_gets_the_recorded_answer() -> None:
    async def agent(client: Any, session: Session, policy: Policy) -> None:
        again = {"x-stainless-retry-count": "1"}
        replies = [
            await client.chat.completions.create(
                model="policy", messages=[user("go")], extra_headers=headers
            )
            for headers in ({}, again)
        ]
        assert [reply.choices[0].message.content for reply in replies] == ["one", "one"]

    assert len(use(agent, ["one", "two"]).record.turns) == 1


def test_bad_requests_are_answered_in_the_form_of_the_api() -> None:
    async def agent(client: Any, session: Session, policy: Policy) -> None:
        create = client.chat.completions.create
        with pytest.raises(openai.NotFoundError) as missing:
            await create(model="gpt-4o", messages=[user("go")])
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="sk-other").models.list()
        for wrong in (
            {"messages": []},
            {"messages": [{"role": "judge", "content": "x"}]},
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
            {"messages": [user("go")], "tool_choice": "required"},
            {"messages": [user("go")], "top_logprobs": 3},
            {"messages": [user("go")], "response_format": {"type": "json_object"}},
            {"messages": [user("go")], "max_tokens": 0},
            {"messages": [user("go " * 3000)]},
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await create(model="policy", **wrong)
            assert refused.value.body["message"]
        assert refused.value.code == "context_length_exceeded"
        url = f"{str(client.base_url).rstrip('/')}/chat/completions"
        headers = {"authorization": f"Bearer {session.token}"}
        async with httpx.AsyncClient(headers=headers) as plain:
            malformed = await plain.post(url, content=b'{"model": "policy", ')
            large = await plain.post(url, content=b" " * (17 << 20))
            nowhere = await plain.post(url.replace("chat/completions", "images"), content=b"{}")
        assert [r.status_code for r in (malformed, large, nowhere)] == [400, 413, 404]
        assert all(r.json()["error"]["message"] for r in (malformed, large, nowhere))
        # None of them changed the session.
        good = await create(model="policy", messages=[user("go")])
        assert good.choices[0].message.content == "one"

    session = use(agent, ["one"], limit=2000)
    assert len(session.record.turns) == 1
    assert session.record.num_tokens() == len(session.record.turns[0].path)


def test_an_engine_that_is_gone_is_an_error_that_clients_repeat() -> None:
    async def agent(client: Any, session: Session, policy: Policy) -> None:
        failures = iter([Unavailable("the generator ended"), None])

        async def write(name: str, before: Any, limit: int) -> Any:
            failure = next(failures)
            if failure is not None:
                raise failure
            return await policy(name, before, limit)

        session.write = write
        retrying = client.with_options(max_retries=2)
        reply = await retrying.chat.completions.create(model="policy", messages=[user("go")])
        assert reply.choices[0].message.content == "one"

    assert len(use(agent, ["one"]).record.turns) == 1


def test_a_client_that_leaves_leaves_nothing_but_what_it_read() -> None:
    async def agent(client: Any, session: Session, policy: Policy) -> None:
        whole = policy.__call__
        blocked, ended = asyncio.Event(), asyncio.Event()

        async def write(name: str, before: Any, limit: int) -> Any:
            if name in ("0.0", "1.1"):
                blocked.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    if name == "1.1":
                        asyncio.get_running_loop().call_soon(ended.set)
            return await whole(name, before, limit)

        session.write = write
        waiting = asyncio.create_task(
            client.chat.completions.create(model="policy", messages=[user("go")])
        )
        await blocked.wait()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        stream = await client.chat.completions.create(
            model="policy", messages=[user("go")], stream=True
        )
        await anext(aiter(stream))
        chunk = await anext(aiter(stream))
        await stream.close()
        await ended.wait()
        text = chunk.choices[0].delta.content or ""
        path = session.record.turns[1].path
        assert session.chat.decode(path).endswith(text)

    session = use(agent, [" ".join(f"w{i}" for i in range(60))])
    assert [len(turn.answer.token_ids) for turn in session.record.turns.values()] == [32]


@pytest.mark.parametrize("asked", [{}, {"stream": True, "tools": [TOOL]}])
def test_a_call_that_ends_before_anything_was_read_leaves_nothing(asked: Any) -> None:
    """A part is written already: an answer with stop texts is written in pieces, and one that may
    call a tool is delivered when it is complete.
    """

    async def agent(client: Any, session: Session, policy: Policy) -> None:
        whole = policy.__call__
        blocked, ended = asyncio.Event(), asyncio.Event()

        async def write(name: str, before: Any, limit: int) -> Any:
            if name != "0.1":
                return await whole(name, before, limit)
            blocked.set()
            try:
                await asyncio.Event().wait()
            finally:
                asyncio.get_running_loop().call_soon(ended.set)

        session.write = write
        reserved = session.record.num_tokens()
        call = client.chat.completions.create(
            model="policy", messages=[user("go")], stop="never", **asked
        )
        waiting = asyncio.create_task(call)
        await blocked.wait()
        assert session.record.num_tokens() > reserved
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await ended.wait()
        assert session.record.turns == {}
        assert session.record.num_tokens() == reserved
        assert session.usage.num_open == 0
        # The next answer to the same request is another one, and the only one that is trained.
        policy.say("later")
        reply = await client.chat.completions.create(model="policy", messages=[user("go")])
        assert reply.choices[0].message.content == "later"

    row = Row(use(agent, [" ".join(["w"] * 60)]))
    assert row.num_segments == 1
    assert int(row.tokens.is_written.sum()) == 2


def test_a_session_that_was_closed_says_so() -> None:
    async def agent(client: Any, session: Session, policy: Policy) -> None:
        session.close("it is older than 2 versions")
        with pytest.raises(openai.APIStatusError, match="older than 2 versions") as ended:
            await client.chat.completions.create(model="policy", messages=[user("go")])
        assert ended.value.status_code == 410

    use(agent, [])


def test_a_reward_is_a_finite_number_or_parts() -> None:
    async def agent(client: Any, session: Session, policy: Policy) -> None:
        for value in (0.5, {"style": 1.0, "tests": 0.25}):
            await client.post("/session/reward", body=value, cast_to=object)
        for wrong in ("much", {}, {"a": None}, [1.0]):
            with pytest.raises(openai.BadRequestError):
                await client.post("/session/reward", body=wrong, cast_to=object)
        assert (await client.get("/session/task", cast_to=object)) == {}

    session = use(agent, [])
    assert session.rewards == [{"reward": 0.5}, {"style": 1.0, "tests": 0.25}]
    assert np.isfinite(sum(sum(parts.values()) for parts in session.rewards))
