"""Requests in the forms of Claude Code 2.1.197 and Codex CLI 0.171.0, written by us and shorter."""

import json
from typing import Any

import pytest
from clients_support import user, using
from sessions_support import CHATML, Row, read_by
from tables import table


def claude(messages: list[Any], **more: Any) -> Any:
    """A request of Claude Code."""
    return {**table(__file__, "claude"), "messages": messages, **more}


def codex(items: list[Any], **more: Any) -> Any:
    """A request of Codex."""
    return {**table(__file__, "codex"), "input": items, **more}


async def test_claude_code_with_a_tool_is_one_segment() -> None:
    call = '<tool_call>{"name": "Bash", "arguments": {"command": "ls"}}</tool_call>'
    async with using([f"I look {call}", "done"]) as (found, session, _):
        opening = [
            user([{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]),
            {"role": "system", "content": "The date is today."},
        ]
        async with found.http.stream(
            "POST", "/v1/messages?beta=true", json=claude(opening, stream=True)
        ) as reply:
            events = [line async for line in reply.aiter_lines()]
        assert reply.status_code == 200
        started = next(json.loads(line[6:]) for line in events if '"tool_use"' in line)
        called = {"type": "tool_use", "id": started["content_block"]["id"], "name": "Bash"}
        answer = [
            {"type": "thinking", "thinking": "of another model", "signature": "x"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I look"},
            {**called, "input": {"command": "ls"}},
        ]
        result = {"type": "tool_result", "tool_use_id": called["id"], "content": "a.py"}
        history = [*opening, {"role": "assistant", "content": answer}, user([result])]
        counted = claude(history)
        for name in ("max_tokens", "metadata"):
            del counted[name]
        count = await found.http.post("/v1/messages/count_tokens?beta=true", json=counted)
        second = await found.http.post("/v1/messages?beta=true", json=claude(history))
        assert second.json()["content"] == [{"type": "text", "text": "done"}]
        assert count.json() == {"input_tokens": second.json()["usage"]["input_tokens"]}
    assert Row(session).num_segments == 1
    shown = session.chat.decode(read_by(session.record.turns[0]), with_special=True)
    assert "<|im_start|>system\nYou are an agent.Be brief.<|im_end|>" in shown
    assert "<|im_start|>system\nThe date is today.<|im_end|>" in shown
    assert "web_search" not in shown


async def test_the_beginning_of_an_answer_is_continued_and_not_repeated() -> None:
    async with using(["x}"]) as (found, session, policy):
        begun = [user("go"), {"role": "assistant", "content": "{"}]
        how: Any = {"model": "policy", "max_tokens": 90}
        async with found.claude.messages.stream(**how, messages=begun) as events:
            assert "".join([part async for part in events.text_stream]) == "x}"
        policy.say("more")
        whole = {"role": "assistant", "content": "{x}"}
        await found.claude.messages.create(**how, messages=[user("go"), whole, user("on")])
        policy.say("y}")
        chat = await found.openai.chat.completions.create(
            model="policy",
            messages=[user("else"), {"role": "assistant", "content": "{"}],
            extra_body={"continue_final_message": True, "add_generation_prompt": False},
        )
        assert chat.choices[0].message.content == "y}"
    assert Row(session).num_segments == 2
    shown = session.chat.decode(read_by(session.record.turns[0]), with_special=True)
    assert shown.endswith("<|im_start|>assistant\n{")
    assert Row(session).tokens.is_written.sum() == 3 + 2 + 3


NAMED = CHATML.replace("{{ t.function.name }} ", "{{ t.function.name }} {{ t.function | tojson }}")


def said(role: str, text: str) -> Any:
    content = [{"type": "input_text", "text": text}]
    return {"type": "message", "id": "msg_1", "role": role, "content": content}


@pytest.mark.parametrize(("name", "arguments", "kind", "fields"), table(__file__, "called"))
async def test_codex_with_each_kind_of_tool_is_one_segment(
    name: str, arguments: Any, kind: str, fields: Any
) -> None:
    call = json.dumps({"name": name, "arguments": arguments})
    texts = [f"<tool_call>{call}</tool_call>", "done", "fine"]
    async with using(texts, NAMED) as (found, session, _):
        opening = [said("developer", "You are an agent."), said("user", "hello")]
        async with found.http.stream("POST", "/v1/responses", json=codex(opening)) as reply:
            lines = [json.loads(line[6:]) async for line in reply.aiter_lines() if line[:1] == "d"]
        assert reply.status_code == 200
        (done,) = [line["item"] for line in lines if line["type"] == "response.output_item.done"]
        assert done["type"] == kind
        assert fields.items() <= done.items()
        if kind == "local_shell_call":
            assert done["action"] == {"type": "exec", "env": {}, "command": ["ls"]}
        output = {"type": f"{kind}_output", "call_id": done["call_id"], "output": "ok"}
        compacted = {"type": "compaction", "encrypted_content": "the summary"}
        again = await found.http.post(
            "/v1/responses", json=codex([*opening, done, output], stream=False)
        )
        assert again.json()["output"][0]["content"][0]["text"] == "done"
        # litellm requires these names.
        assert again.json().keys() >= {"reasoning", "temperature", "top_p", "truncation", "user"}
        same = await found.openai.responses.retrieve(again.json()["id"])
        assert same.output_text == "done"
        later = await found.http.post("/v1/responses", json=codex([compacted], stream=False))
        assert later.status_code == 200
        unknown = await found.http.get("/v1/responses/resp_unknown")
        assert unknown.json()["error"]["code"] == "previous_response_not_found"
    assert Row(session).num_segments == 2
    first, _, last = (session.chat.decode(read_by(turn)) for turn in session.record.turns.values())
    assert "start: LINE" in first
    assert "agents__close" in first
    assert "web_search" not in first
    assert "the summary" in last
