"""Thinking apart from the answer, in the form of each API."""

from __future__ import annotations

from typing import Any

import pytest
from clients_support import CALL, TOOL, Clients, use, user
from sessions_support import CHATML, END, Policy, Row

from async_rl.protocol.generator import CallsRead, ReadCalls
from async_rl.sessions.session import Session
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


@pytest.mark.parametrize(
    ("text", "begun", "found"),
    [
        ("two", False, ("", "two")),
        (THOUGHT + "two", False, ("1 and 1", "two")),
        ("1 and 1\n</think>two", True, ("1 and 1", "two")),
        ("\n<think>1 and", False, ("1 and", "")),
        ("two </think> three", False, ("", "two </think> three")),
        ("<think>a</think>b</think>c", False, ("a", "b</think>c")),
    ],
)
def test_thinking_is_what_the_tags_enclose(text: str, begun: bool, found: tuple[str, str]) -> None:
    assert split(text, begun=begun) == found


@pytest.mark.parametrize("template", [PLAIN, BEGUN])
@pytest.mark.parametrize("stream", [False, True])
def test_every_api_shows_it_in_its_form_and_the_next_request_continues(
    template: str, stream: bool
) -> None:
    written = THOUGHT.removeprefix("<think>\n") if template == BEGUN else THOUGHT

    async def agent(found: Clients, session: Session, policy: Policy) -> None:
        history: list[Any] = [user("1 + 1")]
        policy.say(written + "two")
        chat = found.openai.chat.completions
        if stream:
            thinking = text = ""
            async for chunk in await chat.create(model="policy", messages=history, stream=True):
                delta = chunk.choices[0].delta
                thinking += (delta.model_extra or {}).get("reasoning_content", "")
                text += delta.content or ""
            history.append({"role": "assistant", "content": text})
        else:
            reply = await chat.create(model="policy", messages=history)
            message = reply.choices[0].message
            thinking, text = message.reasoning_content, message.content  # type: ignore[attr-defined]
            # Clients repeat the whole message, with its thinking.
            history.append(message)
        assert (thinking, text) == ("1 and 1", "two")
        policy.say(written + "four")
        more = [*history, user("again")]
        how: Any = {"model": "policy", "messages": more, "max_tokens": 99, "thinking": ENABLED}
        if template == BEGUN:
            # Without thinking in its request, Anthropic's client gets the text only.
            del how["thinking"]
        claude: Any = found.claude.messages
        if stream:
            async with claude.stream(**how) as events:
                answer = await events.get_final_message()
        else:
            answer = await claude.create(**how)
        blocks = [(b.type, b.thinking if b.type == "thinking" else b.text) for b in answer.content]
        assert blocks[-1] == ("text", "four")
        assert blocks[:-1] == ([] if template == BEGUN else [("thinking", "1 and 1")])
        policy.say(written + "six")
        asked: Any = {"model": "policy", "input": "3 + 3"}
        responses = found.openai.responses
        if stream:
            async with responses.stream(**asked) as shown:
                answered = await shown.get_final_response()
        else:
            answered = await responses.create(**asked)
        reasoning, spoken = answered.output
        assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "1 and 1")
        assert answered.output_text == spoken.content[0].text == "six"

    session = use(agent, template=template)
    assert session.last_text == "six"
    row = Row(session)
    # The second request continues the first, and all that the policy wrote is trained.
    assert row.num_segments == 2
    ids = row.tokens.token_ids[row.tokens.is_written]
    answers = [written + text + END for text in ("two", "four", "six")]
    assert session.chat.decode(ids, with_special=True) == "".join(answers)


def test_a_call_after_thinking_is_a_call_and_an_unfinished_thought_is_no_answer() -> None:
    async def agent(found: Clients, session: Session, policy: Policy) -> None:
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

    use(agent, template=PLAIN)


def test_other_forms_are_read_by_a_generator() -> None:
    asked: list[ReadCalls] = []

    async def read(request: ReadCalls) -> CallsRead:
        asked.append(request)
        return CallsRead(content="two", calls=[], thinking="1 and 1")

    async def agent(found: Clients, session: Session, policy: Policy) -> None:
        chunks = []
        how: Any = {"model": "policy", "messages": [user("go")]}
        async for chunk in await found.openai.chat.completions.create(**how, stream=True):
            chunks.append(chunk.choices[0].delta)
        assert "".join(chunk.content or "" for chunk in chunks) == "two"
        assert chunks[1].model_extra == {"reasoning_content": "1 and 1"}

    use(agent, ["[THINK]1 and 1[/THINK]two"], template=CHATML + "{# [THINK] #}", read=read)
    (request,) = asked
    assert (request.parser, request.thinking) == ("", "mistral")
    assert request.text == "[THINK]1 and 1[/THINK]two"
