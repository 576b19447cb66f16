"""POST /v1/messages of Anthropic's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from async_rl.sessions.errors import Refused
from async_rl.sessions.forms.form import (
    Event,
    Exchange,
    arguments_of,
    new_id,
    read,
    require_model,
    text_of,
)
from async_rl.sessions.forms.openai_chat import Count
from async_rl.sessions.session import Answer, Call, Session
from async_rl.sessions.tools import calls_of, chosen
from async_rl.sessions.worker import MODEL

_CHOICES = {"any": "required"}
_WHY = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesRequest(msgspec.Struct, kw_only=True):
    """The fields that are read; others are ignored."""

    model: str
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    max_tokens: Count
    system: str | list[Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    stream: bool = False


def messages(body: bytes, session: Session) -> Exchange:
    """Read a request of messages."""
    request = read(body, MessagesRequest)
    require_model(request.model)
    converted: list[dict[str, Any]] = []
    if request.system:
        converted.append({"role": "system", "content": text_of(request.system)})
    for message in request.messages:
        converted += _chat_messages(message)
    functions = [
        {
            "type": "function",
            "function": {
                "name": str(tool.get("name")),
                "description": str(tool.get("description", "")),
                "parameters": tool.get("input_schema", {}),
            },
        }
        for tool in request.tools or []
    ]
    choice = (request.tool_choice or {"type": "auto"}).get("type")
    wanted: Any = _CHOICES.get(str(choice), choice)
    if choice == "tool":
        wanted = request.tool_choice
    tools, begin = chosen(functions, wanted, session.chat.form)
    call = session.chat_call(
        converted,
        tools,
        begin=begin,
        max_tokens=request.max_tokens,
        stops=tuple(filter(None, request.stop_sequences or [])),
        in_pieces=request.stream and not tools,
    )
    return _MessagesExchange(request, call)


def _chat_messages(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a chat template that stand for one message with blocks. Raises Refused."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise Refused(400, f"a message has the role {role!r}; use user or assistant")
    if not isinstance(content, list):
        return [{"role": role, "content": text_of(content)}]
    results, texts, calls = [], [], []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            text = text_of(block.get("content"))
            results.append({"role": "tool", "content": text})
            if block.get("tool_use_id"):
                results[-1]["tool_call_id"] = str(block["tool_use_id"])
        elif kind == "tool_use":
            function = {"name": str(block.get("name")), "arguments": arguments_of(block["input"])}
            calls.append({"id": str(block.get("id")), "type": "function", "function": function})
        else:
            texts.append(block)
    converted: list[dict[str, Any]] = results
    if texts or role == "assistant":
        converted = [*results, {"role": role, "content": text_of(texts)}]
    if calls:
        converted[-1]["tool_calls"] = calls
    return converted


class _MessagesExchange:
    def __init__(self, request: MessagesRequest, call: Call) -> None:
        self.calls = [call]
        self.is_streamed = request.stream
        self._in_pieces = call.in_pieces
        self._num_prompt_tokens = len(call.context.token_ids)
        self._head = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": MODEL}

    def reply(self, answers: Sequence[Answer]) -> Any:
        answer = answers[0]
        usage = self._usage(len(answer.written.token_ids))
        return {**self._head, "content": _blocks(answer), **_reason(answer), "usage": usage}

    def opened(self) -> list[Event]:
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = {**self._head, **empty, "usage": self._usage(0)}
        events: list[Event] = [_event("message_start", message=message)]
        if self._in_pieces:
            block = {"type": "text", "text": ""}
            events.append(_event("content_block_start", index=0, content_block=block))
        return events

    def part(self, index: int, text: str) -> list[Event]:
        if not self._in_pieces or not text:
            return []
        delta = {"type": "text_delta", "text": text}
        return [_event("content_block_delta", index=index, delta=delta)]

    def done(self, index: int, answer: Answer) -> list[Event]:
        if self._in_pieces:
            return [_event("content_block_stop", index=0)]
        events = []
        for number, block in enumerate(_blocks(answer)):
            start: dict[str, Any]
            if block["type"] == "text":
                start = {"type": "text", "text": ""}
                delta = {"type": "text_delta", "text": block["text"]}
            else:
                start = {**block, "input": {}}
                text = msgspec.json.encode(block["input"]).decode()
                delta = {"type": "input_json_delta", "partial_json": text}
            events += [
                _event("content_block_start", index=number, content_block=start),
                _event("content_block_delta", index=number, delta=delta),
                _event("content_block_stop", index=number),
            ]
        return events

    def closed(self, answers: Sequence[Answer]) -> list[Event]:
        usage = {"output_tokens": len(answers[0].written.token_ids)}
        return [
            _event("message_delta", delta=_reason(answers[0]), usage=usage),
            _event("message_stop"),
        ]

    def _usage(self, num_written: int) -> dict[str, int]:
        return {"input_tokens": self._num_prompt_tokens, "output_tokens": num_written}


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    calls = calls_of(answer.message)
    if answer.message["content"] or not calls:
        blocks.append({"type": "text", "text": answer.message["content"]})
    for call in calls:
        function = call["function"]
        use = {"id": call["id"], "name": function["name"], "input": function["arguments"]}
        blocks.append({"type": "tool_use", **use})
    return blocks


def _reason(answer: Answer) -> dict[str, Any]:
    # The answer does not say whether a stop text or an end token ended it.
    return {"stop_reason": _WHY[answer.why], "stop_sequence": None}


def _event(name: str, **fields: Any) -> Event:
    return name, {"type": name, **fields}
