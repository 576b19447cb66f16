"""POST /v1/responses of OpenAI's API, which the package openai-agents uses unless told otherwise.

Sampling is ignored as in openai_chat.py. Items of reasoning in the input are left out: the policy's
own text is recorded, and no chat template expects the items.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from async_rl.sessions.errors import Refused
from async_rl.sessions.forms.form import (
    Event,
    Exchange,
    new_id,
    read,
    refuse_unless,
    require_model,
    text_of,
)
from async_rl.sessions.forms.openai_chat import Count, json_of, message_of
from async_rl.sessions.session import Answer, Call, Session
from async_rl.sessions.tools import calls_of, chosen
from async_rl.sessions.worker import MODEL

_TEXT_PARTS = ("input_text", "output_text", "text")


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """The fields that are read; others are ignored."""

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_output_tokens: Count | None = None
    stream: bool | None = False
    text: dict[str, Any] | None = None
    include: list[str] | None = None
    background: bool | None = False
    conversation: Any = None
    prompt: Any = None


def responses(body: bytes, session: Session) -> Exchange:
    """Read a request for a response."""
    request = read(body, ResponsesRequest)
    require_model(request.model)
    refuse_unless(not request.background, "background=true")
    refuse_unless(request.conversation is None, "conversation")
    refuse_unless(request.prompt is None, "prompt, a stored template,")
    refuse_unless("message.output_text.logprobs" not in (request.include or ()), "logprobs")
    form = ((request.text or {}).get("format") or {"type": "text"}).get("type")
    refuse_unless(form == "text", f"text.format={form}")
    history = [*_earlier(request.previous_response_id, session), *_messages(request.input)]
    shown = history
    if request.instructions:
        shown = [{"role": "system", "content": request.instructions}, *history]
    functions = [_function(tool) for tool in request.tools or []]
    tools, begin = chosen(functions, request.tool_choice, session.chat.form)
    call = session.chat_call(
        shown,
        tools,
        begin=begin,
        max_tokens=request.max_output_tokens,
        in_pieces=bool(request.stream) and not tools,
    )
    return _ResponsesExchange(request, call, session, history)


def _earlier(name: str | None, session: Session) -> Sequence[Any]:
    """The messages up to and with an earlier response of the session. Raises Refused."""
    if name is None:
        return ()
    if name not in session.responses:
        raise Refused(
            400,
            f"previous_response_id={name!r} is no response of this session; send the id of one,"
            " or the whole history as input",
            code="previous_response_not_found",
        )
    return session.responses[name]


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in the form of the chat templates. Raises Refused."""
    kind = tool.get("type")
    refuse_unless(kind == "function", f"a tool of type {kind!r}")
    fields = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key)}
    return {"type": "function", "function": fields}


def _messages(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a chat template that stand for the items of the input. Raises Refused."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    converted: list[dict[str, Any]] = []
    for item in given:
        kind = item.get("type", "message")
        if kind == "message":
            content = text_of(item.get("content"), _TEXT_PARTS)
            converted.append(message_of({"role": item.get("role"), "content": content}))
        elif kind == "function_call":
            # The calls of one answer are items of their own, after its text.
            if not converted or converted[-1]["role"] != "assistant":
                converted.append({"role": "assistant", "content": ""})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id", ""), "function": function}
            read_call = message_of({"role": "assistant", "tool_calls": [call]})["tool_calls"]
            converted[-1].setdefault("tool_calls", []).extend(read_call)
        elif kind == "function_call_output":
            output = text_of(item.get("output"), _TEXT_PARTS)
            name = str(item.get("call_id", ""))
            converted.append({"role": "tool", "content": output, "tool_call_id": name})
        else:
            refuse_unless(kind == "reasoning", f"an item of type {kind!r}")
    return converted


class _ResponsesExchange:
    def __init__(
        self, request: ResponsesRequest, call: Call, session: Session, history: list[Any]
    ) -> None:
        self.calls = [call]
        self.is_streamed = bool(request.stream)
        self._in_pieces = call.in_pieces
        self._session = session
        self._history = history
        self._num_prompt_tokens = len(call.context.token_ids)
        self._num_events = 0
        self._message_id = new_id("msg_")
        self._head = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "model": MODEL,
            "instructions": request.instructions,
            "previous_response_id": request.previous_response_id,
            "max_output_tokens": request.max_output_tokens,
            "tools": request.tools or [],
            "tool_choice": request.tool_choice or "auto",
            "parallel_tool_calls": True,
            "text": {"format": {"type": "text"}},
            "metadata": {},
            "error": None,
            "incomplete_details": None,
        }

    def reply(self, answers: Sequence[Answer]) -> Any:
        answer = answers[0]
        self._session.responses[str(self._head["id"])] = [*self._history, answer.message]
        num_written = len(answer.written.token_ids)
        body = {
            **self._head,
            "status": "completed",
            "output": self._items(answer),
            "usage": {
                "input_tokens": self._num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": num_written,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self._num_prompt_tokens + num_written,
            },
        }
        if answer.why == "length":
            body["status"] = "incomplete"
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        return body

    def opened(self) -> list[Event]:
        begun = {**self._head, "status": "in_progress", "output": [], "usage": None}
        events = [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
        ]
        if self._in_pieces:
            events += self._message_begins(0)
        return events

    def part(self, index: int, text: str) -> list[Event]:
        if not self._in_pieces or not text:
            return []
        return [self._text_event("delta", 0, delta=text, logprobs=[])]

    def done(self, index: int, answer: Answer) -> list[Event]:
        events = []
        for number, item in enumerate(self._items(answer)):
            if item["type"] == "message":
                text = item["content"][0]["text"]
                if not self._in_pieces:
                    events += self._message_begins(number)
                    events.append(self._text_event("delta", number, delta=text, logprobs=[]))
                part = item["content"][0]
                events += [
                    self._text_event("done", number, text=text, logprobs=[]),
                    self._part_event("done", number, part),
                ]
            else:
                begun = {**item, "arguments": "", "status": "in_progress"}
                events.append(self._item_event("added", number, begun))
                where = {"item_id": item["id"], "output_index": number}
                name = "response.function_call_arguments"
                written = item["arguments"]
                events += [
                    self._event(f"{name}.delta", **where, delta=written),
                    self._event(f"{name}.done", **where, name=item["name"], arguments=written),
                ]
            events.append(self._item_event("done", number, item))
        return events

    def closed(self, answers: Sequence[Answer]) -> list[Event]:
        response = self.reply(answers)
        return [self._event(f"response.{response['status']}", response=response)]

    def _items(self, answer: Answer) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        calls = calls_of(answer.message)
        if answer.message["content"] or not calls:
            items.append(self._message("completed", [_text_part(answer.message["content"])]))
        for call in calls:
            function = {"name": call["function"]["name"], "arguments": json_of(call)}
            of_call = {"id": f"fc_{call['id']}", "call_id": call["id"], "status": "completed"}
            items.append({"type": "function_call", **of_call, **function})
        return items

    def _message(self, status: str, content: list[Any]) -> dict[str, Any]:
        what = {"type": "message", "role": "assistant", "status": status}
        return {"id": self._message_id, **what, "content": content}

    def _message_begins(self, number: int) -> list[Event]:
        return [
            self._item_event("added", number, self._message("in_progress", [])),
            self._part_event("added", number, _text_part("")),
        ]

    def _item_event(self, kind: str, number: int, item: Any) -> Event:
        return self._event(f"response.output_item.{kind}", output_index=number, item=item)

    def _part_event(self, kind: str, number: int, part: Any) -> Event:
        where = self._place(number)
        return self._event(f"response.content_part.{kind}", **where, part=part)

    def _text_event(self, kind: str, number: int, **fields: Any) -> Event:
        return self._event(f"response.output_text.{kind}", **self._place(number), **fields)

    def _place(self, number: int) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": number, "content_index": 0}

    def _event(self, name: str, /, **fields: Any) -> Event:
        self._num_events += 1
        return name, {"type": name, "sequence_number": self._num_events - 1, **fields}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
