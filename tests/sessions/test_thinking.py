"""Thinking apart from the answer, in the form of each API."""

from collections.abc import Callable
from typing import Any

import pytest
from clients_support import APIS, CALL, TOOL, user, using
from sessions_support import CHATML, END, Row

from async_rl.protocol.generator import CallsRead, ReadCalls
from async_rl.sessions.tools import TAGS, split, thinking_form

# As Qwen3 writes the history: without earlier thinking.
PLAIN = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
# As DeepSeek-R1 and the thinking models of Qwen do.
BEGUN = PLAIN.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
THOUGHT = "<think>\n1 and 1\n</think>\n\n"
ENABLED: Any = {"type": "enabled", "budget_tokens": 1024}


def test_the_form_is_that_of_the_template_or_of_the_setting() -> None:
    assert thinking_form(CHATML) == ""
    assert thinking_form(PLAIN) == TAGS
    assert thinking_form("[THINK]") == "mistral"
    assert thinking_form(PLAIN, "qwen3") == "qwen3"


def test_thinking_is_what_the_tags_enclose() -> None:
    for text, begun, found in (
        ("two", False, ("", "two")),
        (THOUGHT + "two", False, ("1 and 1", "two")),
        ("1 and 1\n</think>two", True, ("1 and 1", "two")),
        ("\n<think>1 and", False, ("1 and", "")),
        ("two </think> three", False, ("", "two </think> three")),
        ("<think>a</think>b</think>c", False, ("a", "b</think>c")),
    ):
        assert split(text, begun=begun) == found


THOUGHTS: dict[str, Callable[[Any], str]] = {
    "chat": lambda items: items[0].reasoning_content,
    "responses": lambda items: items[0].content[0].text,
    "messages": lambda items: items[0]["content"][0].thinking,
}


@pytest.mark.parametrize("name", APIS)
@pytest.mark.parametrize(("template", "stream"), [(PLAIN, True), (BEGUN, False), (BEGUN, True)])
async def test_every_api_shows_it_in_its_form_and_the_next_request_continues(
    name: str, template: str, stream: bool
) -> None:
    written = THOUGHT.removeprefix("<think>\n") if template == BEGUN else THOUGHT
    more = {"thinking": ENABLED} if name == "messages" else {}
    async with using([written + "two", written + "four"], template) as (found, session, _):
        history = [user("1 + 1")]
        for text in ("two", "four"):
            reply = await APIS[name].ask(found, history, stream=stream, **more)
            assert (THOUGHTS[name](reply.items), reply.text) == ("1 and 1", text)
            history += [*reply.items, user("again")]
    row = Row(session)
    # All that the policy wrote is trained.
    assert row.num_segments == 1
    ids = row.tokens.token_ids[row.tokens.is_written]
    shown = session.chat.decode(ids, with_special=True)
    assert shown == f"{written}two{END}{written}four{END}"


async def test_a_call_after_thinking_is_a_call_and_an_unfinished_thought_is_no_answer() -> None:
    async with using(template=PLAIN) as (found, _, policy):
        chat = found.openai.chat.completions
        how: Any = {"model": "policy", "messages": [user("go")]}
        policy.say(THOUGHT + CALL)
        called = (await chat.create(**how, tools=[TOOL])).choices[0]
        assert called.finish_reason == "tool_calls"
        assert called.message.reasoning_content == "1 and 1"  # type: ignore[attr-defined]
        assert called.message.content is None
        policy.say(THOUGHT + "two")
        cut = (await chat.create(**how, max_tokens=3)).choices[0]
        assert (cut.finish_reason, cut.message.content) == ("length", "")
        # Without thinking in its request, Anthropic's client gets the text only.
        policy.say(THOUGHT + "two")
        (item,) = (await APIS["messages"].ask(found, [user("on")])).items
        assert [block.type for block in item["content"]] == ["text"]


async def test_other_forms_are_read_by_a_generator() -> None:
    asked: list[ReadCalls] = []

    async def read(request: ReadCalls) -> CallsRead:
        asked.append(request)
        return CallsRead(content="two", calls=[], thinking="1 and 1")

    texts, template = ["[THINK]1 and 1[/THINK]two"], CHATML + "{# [THINK] #}"
    async with using(texts, template, read=read) as (found, *_):
        chunks = []
        how: Any = {"model": "policy", "messages": [user("go")]}
        async for chunk in await found.openai.chat.completions.create(**how, stream=True):
            chunks.append(chunk.choices[0].delta)
        assert "".join(chunk.content or "" for chunk in chunks) == "two"
        assert chunks[1].model_extra == {"reasoning_content": "1 and 1"}
    (request,) = asked
    assert (request.parser, request.thinking) == ("", "mistral")
    assert request.text == "[THINK]1 and 1[/THINK]two"
