"""The endpoint as the real packages use it: every API alike, then what only one of them has."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import openai
import pytest
import xgrammar
from clients_support import APIS, CALL, CLAUDE, FUNCTION, TOOL, user, using
from sessions_support import Policy, Row, read_by
from tables import table

from async_rl.core.errors import Unavailable
from async_rl.sessions import server

each_api = pytest.mark.parametrize("name", APIS)
LONG = " ".join(f"w{i}" for i in range(60))


@each_api
@pytest.mark.parametrize(("stream", "said"), [(True, "I add"), (False, "")])
async def test_an_agent_with_a_tool_is_one_segment(
    name: str, stream: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if an answer only calls the tool, and while comments keep its stream alive."""
    monkeypatch.setattr(server, "QUIET_S", 0.0)
    api = APIS[name]
    async with using([f"{said} {CALL}".strip(), "2"]) as (found, session, policy):

        async def write(*given: Any) -> Any:
            for _ in range(20):
                await asyncio.sleep(0)
            return await policy(*given)

        session.write = write
        how: Any = {"system": "be brief", "tools": True, "stream": stream}
        history = [user("1 + 1")]
        first = await api.ask(found, history, **how)
        ((call_id, function, arguments),) = first.calls
        assert (first.text, function, arguments) == (said, "add", {"a": 1})
        assert first.why == "tool_calls"
        history += [*first.items, api.result(call_id, "2")]
        last = await api.ask(found, history, **how)
        assert (last.text, last.calls, last.why, last.num_written) == ("2", [], "stop", 2)
    row = Row(session)
    assert row.num_segments == 1
    assert session.last_text == "2"
    shown = session.chat.decode(row.tokens.token_ids, with_special=True)
    for message in ("system\nbe brief", "user\n1 + 1", "tool\n2"):
        assert f"<|im_start|>{message}<|im_end|>" in shown


@each_api
async def test_a_stream_has_the_text_and_a_limit_cuts_it(name: str) -> None:
    async with using([LONG]) as (found, session, policy):
        reply = await APIS[name].ask(found, [user("go")], stream=True)
        assert "".join(reply.parts) == reply.text == LONG
        assert (reply.why, reply.num_written) == ("stop", 120)
        policy.say(LONG)
        cut = await APIS[name].ask(found, [user("on")], most=3)
        assert (cut.why, cut.num_written, cut.text) == ("length", 3, "w0 w1")
    assert Row(session).tokens.is_written.sum() == 123


async def test_a_tool_that_is_chosen_begins_the_answer_and_is_not_trained() -> None:
    """Of Anthropic's API; tests/sessions/test_tool_forms.py has the choice of the other one."""
    async with using(['{"b": 2}}</tool_call>']) as (found, session, _):
        how: Any = {"tools": [CLAUDE], "tool_choice": {"type": "tool", "name": "add"}}
        reply: Any = await found.claude.messages.create(
            model="policy", max_tokens=90, messages=[user("go")], **how
        )
        assert reply.content[0].input == {"b": 2}
    assert Row(session).tokens.is_written.sum() == 14


async def test_completions_continue_text_and_token_ids() -> None:
    async with using(["one two"]) as (found, session, policy):
        create = found.openai.completions.create
        one: Any = await create(model="policy", prompt="go ", logprobs=0)
        assert one.choices[0].text == "one two"
        assert one.choices[0].logprobs.text_offset == [0, 3, 4, 7]
        policy.say("three")
        two = await create(model="policy", prompt="go one two and ")
        assert two.choices[0].text == "three"
        ids = [*session.record.turns[1].path.tolist(), 1]
        policy.say("four")
        assert (await create(model="policy", prompt=ids)).choices[0].text == "four"
        policy.say("five")
        stream = await create(model="policy", prompt="new ", stream=True)
        assert "".join([c.choices[0].text async for c in stream]) == "five"
    assert Row(session).num_segments == 3


async def test_several_prompts_have_n_answers_each_in_order_and_the_model_is_listed() -> None:
    async with using(["one", "two", "three", "four", "five", "six"]) as (found, session, _):
        reply: Any = await found.openai.completions.create(
            model="policy", prompt=["a ", "b c "], n=2
        )
        assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
        asked = [len(read_by(session.record.turns[number])) for number in range(4)]
        assert asked == [2, 2, 4, 4]
        chat = found.openai.chat.completions
        reply = await chat.create(model="policy", messages=[user("go")], n=2)
        assert {choice.message.content for choice in reply.choices} == {"five", "six"}
        assert [model.id async for model in found.openai.models.list()] == ["policy"]


async def test_an_earlier_response_stands_for_its_history() -> None:
    async with using(["2"]) as (found, session, policy):
        create = found.openai.responses.create
        first = await create(model="policy", input="1 + 1")
        policy.say("4")
        last = await create(model="policy", input="2 + 2", previous_response_id=first.id)
        assert [last.output_text, last.previous_response_id] == ["4", first.id]
    assert Row(session).num_segments == 1


async def test_an_engine_that_is_gone_is_an_error_that_clients_repeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before a stream begins, and after the comments that keep it alive."""
    monkeypatch.setattr(server, "QUIET_S", 0.0)
    async with using(["one"]) as (found, session, policy):

        async def gone(*_: Any) -> Any:
            for _ in range(20):
                await asyncio.sleep(0)
            session.write = policy
            raise Unavailable("the generator ended")

        session.write = gone
        how: Any = {"model": "policy", "messages": [user("go")]}
        stream = await found.openai.chat.completions.create(**how, stream=True)
        with pytest.raises(openai.APIError, match="the generator ended"):
            _ = [chunk async for chunk in stream]
        session.write = gone
        again = found.openai.with_options(max_retries=2).chat.completions
        assert (await again.create(**how)).choices[0].message.content == "one"
    assert len(session.record.turns) == 1


def blocking(policy: Policy, names: tuple[str, ...]) -> tuple[Any, asyncio.Event, asyncio.Event]:
    """A policy that never answers these calls; set when one begins, and when it was cancelled."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def write(name: str, before: Any, limit: int, support: Any, shown: Any) -> Any:
        if name not in names:
            return await policy(name, before, limit, support, shown)
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            asyncio.get_running_loop().call_soon(ended.set)

    return write, begun, ended


@pytest.mark.parametrize(
    ("last", "more"), [("0.0", {}), ("0.1", {"stop": "no", "stream": True, "tools": [TOOL]})]
)
async def test_a_call_that_ends_before_it_was_read_leaves_nothing(last: str, more: Any) -> None:
    """Before its first part is written, or after: an answer with stop texts is written in pieces,
    and one that may call a tool is delivered when it is complete.
    """
    async with using([" ".join(["w"] * 60)]) as (found, session, policy):
        session.write, begun, ended = blocking(policy, (last,))
        create: Any = found.openai.chat.completions.create
        reserved = session.record.num_tokens()
        waiting = asyncio.ensure_future(create(model="policy", messages=[user("go")], **more))
        await begun.wait()
        assert session.record.num_tokens() > reserved
        waiting.cancel()
        await ended.wait()
        assert session.record.turns == {}
        assert session.record.num_tokens() == reserved
        assert session.usage.num_open == 0
        # The next answer to the same request is another one, and the only one that is trained.
        policy.say("later")
        reply = await create(model="policy", messages=[user("go")])
        assert reply.choices[0].message.content == "later"
    row = Row(session)
    assert row.num_segments == 1
    assert int(row.tokens.is_written.sum()) == 2


async def test_a_session_that_was_closed_says_so() -> None:
    async with using() as (found, session, _):
        session.close("it is older than 2 versions")
        with pytest.raises(openai.APIStatusError, match="older than 2 versions") as ended:
            await APIS["chat"].ask(found, [user("go")])
        assert ended.value.status_code == 410


async def test_the_agent_s_own_key_rewards_and_ends_nothing() -> None:
    async with using() as (found, session, _):
        for path in ("reward", "end"):
            refused = await found.http.post(f"/v1/session/{path}", json=1.0)
            assert refused.status_code == 403
    assert session.rewards == []


async def test_token_ids_and_versions_come_with_each_choice() -> None:
    async with using(["one two three"]) as (found, session, policy):

        async def write(*given: Any) -> Any:
            done = await policy(*given)
            # A push in the middle of the answer.
            versions = np.array([7] * 2 + [8] * (len(done.token_ids) - 2), np.int32)
            return msgspec.structs.replace(done, versions=versions)

        session.write = write
        how: Any = {"model": "policy", "extra_body": {"return_token_ids": True}}
        chat = await found.openai.chat.completions.create(**how, messages=[user("go")], stream=True)
        chunks = [chunk.to_dict() async for chunk in chat]
        policy.say("one two three")
        text = (await found.openai.completions.create(**how, prompt="new ")).to_dict()
        shown = [(chunks[0], chunks[-1]["choices"][0]), (text["choices"][0],) * 2]
        for number, (first, last) in enumerate(shown):
            turn = session.record.turns[number]
            assert first["prompt_token_ids"] == read_by(turn).tolist()
            assert last["token_ids"] == turn.answer.token_ids.tolist()
            assert last["weight_versions"] == [
                {"version": "7", "start": 0, "end": 2},
                {"version": "8", "start": 2, "end": len(turn.answer.token_ids)},
            ]


async def test_token_ids_are_read_and_written_in_the_form_of_vllm() -> None:
    async with using(["one two"]) as (found, session, policy):
        params = {"max_tokens": 2, "logprobs": 1, "temperature": 1.0, "stop_token_ids": [0]}
        params |= {"skip_special_tokens": False, "include_stop_str_in_output": True}
        params |= {"routed_experts_prompt_start": 1}
        body: Any = {"token_ids": [3, 1], "sampling_params": params, "return_token_ids": True}
        reply = (await found.http.post("/inference/v1/generate", json=body)).json()
        assert (reply["prompt_token_ids"], reply["usage"]["completion_tokens"]) == ([3, 1], 2)
        (choice,) = reply["choices"]
        turn = session.record.turns[0]
        assert read_by(turn).tolist() == [3, 1]
        assert choice["token_ids"] == turn.answer.token_ids.tolist()
        assert choice["finish_reason"] == "length"
        shown = [(each["token_id"], each["token"]) for each in choice["logprobs"]["content"]]
        assert shown == [(token, f"token_id:{token}") for token in choice["token_ids"]]
        policy.say("more")
        again = {"token_ids": [*turn.path.tolist(), 1], "sampling_params": {}, "stream": True}
        events = await found.http.post("/inference/v1/generate", json=again)
        (choice,) = json.loads(events.text.partition("\n")[0][6:])["choices"]
        assert choice["token_ids"] == session.record.turns[1].answer.token_ids.tolist()
    assert Row(session).num_segments == 1


async def test_an_answer_ends_with_the_first_stop_token() -> None:
    async with using(["one two three four three"]) as (found, session, _):
        words = session.chat.tokenizer  # the ids of the words
        stop = words("three", add_special_tokens=False)["input_ids"]
        params = {"stop_token_ids": stop, "stop": ["never"]}
        body = {"token_ids": [1], "sampling_params": params}
        reply = (await found.http.post("/inference/v1/generate", json=body)).json()
        (choice,) = reply["choices"]
        assert choice["finish_reason"] == "stop"
        ids = words("one two three", add_special_tokens=False)["input_ids"]
        assert choice["token_ids"] == ids == session.record.turns[0].answer.token_ids.tolist()


@pytest.mark.parametrize(("path", "more"), table(__file__, "schemas"))
@pytest.mark.parametrize("has_tools", [False, True])
async def test_a_schema_is_the_grammar_of_its_answer(path: str, more: Any, has_tools: bool) -> None:
    tool = {**CLAUDE, "name": "add"} if path == "/v1/messages" else {**TOOL, **FUNCTION}
    async with using(["{}", "{}"]) as (found, _, policy):
        begin = {"input": "go"} if path == "/v1/responses" else {"messages": [user("go")]}
        limit = {} if path == "/v1/responses" else {"max_tokens": 90}
        tools = {"tools": [tool]} if has_tools else {}
        body = {"model": "policy", **begin, **limit, **tools, **more}
        reply = await found.http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        accepted = accepts(policy.supports[-1].grammar)
        assert accepted('{"a": 1}')
        assert not accepted("hello")
        assert accepted('{"b": 1}') == ("json_object" in str(more))
        assert accepted(CALL) == has_tools
        refused = await found.http.post(
            path, content=json.dumps(body).replace('"integer"', '"number", "multipleOf": 5')
        )
        has_schema = has_tools or "json_object" not in str(more)
        assert refused.status_code == (400 if has_schema else 200)
        assert ("/properties/a/multipleOf=5, which" in refused.text) == has_schema


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
async def test_a_forced_call_fits_the_schema_of_its_tool(choice: Any) -> None:
    async with using(["x"]) as (found, session, policy):
        await found.openai.chat.completions.create(
            model="policy", messages=[user("go")], tools=[TOOL], tool_choice=choice
        )
        asked = read_by(session.record.turns[0])
        start = session.chat.decode(asked).rpartition("<tool_call>")[2]
        accepted = accepts(policy.supports[-1].grammar)
        assert accepted(CALL.removeprefix("<tool_call>" + start))
        assert not accepted(CALL.replace("1", '"x"').removeprefix("<tool_call>" + start))


def accepts(grammar: str) -> Callable[[str], bool]:
    """Whether a text fits a grammar, by the library that the engines use."""
    is_tag = json.loads(grammar).get("type") == "structural_tag"
    make = xgrammar.Grammar.from_structural_tag if is_tag else xgrammar.Grammar.from_json_schema
    made = make(grammar)
    return lambda text: xgrammar.testing._is_grammar_accept_string(made, text)
