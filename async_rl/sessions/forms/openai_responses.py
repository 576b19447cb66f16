"""POST /v1/responses of OpenAI's API, which the package openai-agents uses by default.

parameters.toml has its parameters. Items of reasoning in the input are left out: the record has the
policy's text. The text of a compaction is the user's.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from async_rl.core.support import Alternatives
from async_rl.sessions.calls import Answer, Call
from async_rl.sessions.errors import Json, Refused
from async_rl.sessions.forms.form import (
    Event,
    Exchange,
    History,
    new_id,
    refuse_unless,
    stops_of,
    variables_of,
)
from async_rl.sessions.forms.log_probs import content, named
from async_rl.sessions.forms.parameters import read_request
from async_rl.sessions.forms.response_tools import TEMPLATES, Tools, read_call
from async_rl.sessions.grammars import schema_of
from async_rl.sessions.session import Session

_LOGPROBS = "message.output_text.logprobs"
_WRITTEN = {
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}
"""Items whose text comes in events of its own: the name of the events, the field of the text."""


def responses(body: bytes, session: Session) -> Exchange:
    """Read a request for a response."""
    request = read_request(body, "responses")
    form = (request.text or {}).get("format")
    # Without the instructions, which OpenAI does not carry over to a later response.
    history = [*_earlier(request.previous_response_id, session), *_messages(request.input)]
    shown = history
    if request.instructions:
        shown = [{"role": "system", "content": request.instructions}, *history]
    tools = Tools(request.tools or ())
    call = session.chat_call(
        shown,
        tools.functions,
        request.tool_choice,
        max_tokens=request.max_output_tokens,
        stops=stops_of(request.stop),
        is_streamed=bool(request.stream),
        is_single=request.parallel_tool_calls is False,
        schema=schema_of(form),
        variables=variables_of(request, effort=(request.reasoning or {}).get("effort")),
    )
    return _ResponsesExchange(request, call, session, history, tools)


def response(name: str, session: Session) -> Json:
    """Return an earlier response of the session. Raises Refused."""
    return _known(name, session)[1]


def _earlier(name: str | None, session: Session) -> Sequence[Any]:
    """Return the messages up to and with an earlier response of the session. Raises Refused."""
    return _known(name, session)[0] if name is not None else ()


def _known(name: str, session: Session) -> tuple[list[Any], Json]:
    """Return a response with the messages up to it. Raises Refused."""
    if name not in session.responses:
        raise Refused(
            f"{name!r} is not a response of this session; send the id of one,"
            " or the whole history as input",
            code="previous_response_not_found",
        )
    return session.responses[name]


def _messages(given: str | list[Json]) -> list[Json]:
    """Return the messages of a chat template for the items of the input. Raises Refused."""
    history = History()
    if isinstance(given, str):
        history.add("user", given)
        return history.messages
    for item in given:
        kind = item.get("type", "message")
        if kind == "message":
            history.add(item.get("role"), item.get("content"))
        elif kind == "compaction":
            history.add("user", item["encrypted_content"])
        elif not read_call(item, history):
            refuse_unless(kind == "reasoning", f"an item of type {kind!r}")
    return history.messages


class _ResponsesExchange(Exchange):
    """history: the messages of the request, which a later request may continue by the id."""

    def __init__(
        self, request: Any, call: Call, session: Session, history: list[Any], tools: Tools
    ) -> None:
        super().__init__(
            request,
            [replace(call, alternatives=Alternatives(num_top=request.top_logprobs or 0))],
            id=new_id("resp_"),
            created_at=int(time.time()),
            parallel_tool_calls=request.parallel_tool_calls is not False,
            # Packages require all these names.
            **TEMPLATES["fixed"],
            **{name: getattr(request, name) or it for name, it in TEMPLATES["repeated"].items()},
        )
        self._has_logprobs = bool(request.top_logprobs) or _LOGPROBS in (request.include or ())
        self._session = session
        self._tools = tools
        self._history = history
        self._num_events = 0
        self._ids = {"message": new_id("msg_"), "reasoning": new_id("rs_")}

    def reply(self, answers: Sequence[Answer]) -> Any:
        answer = answers[0]
        num_prompt = answer.num_prompt_tokens
        num_written = len(answer.written.token_ids)
        body = {
            **self._head,
            "status": "completed",
            "output": self._items(answer),
            "usage": {
                "input_tokens": num_prompt,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": num_written,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": num_prompt + num_written,
            },
        }
        # A stop text cannot be requested here, so only the limit makes an answer incomplete.
        if answer.why == "length":
            body["status"] = "incomplete"
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        # A later request may name this response instead of its history.
        self._session.responses[self._head["id"]] = [*self._history, answer.message], body
        return body

    def opened(self) -> list[Event]:
        begun = {**self._head, "status": "in_progress", "output": [], "usage": None}
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
        ]

    def text(self, index: int, text: str, *, is_first: bool) -> list[Event]:
        # Text that comes in pieces is the first item, as its answer is the first one.
        item = self._message("in_progress", [])
        events = []
        if is_first:
            events = [
                self._item("added", index, item),
                self._in_part("content_part.added", index, item, part=_text_part("")),
            ]
        delta = {"delta": text, "logprobs": []}
        return [*events, self._in_part("output_text.delta", index, item, **delta)]

    def done(self, index: int, answer: Answer, *, is_shown: bool) -> list[Event]:
        events = []
        for number, item in enumerate(self._items(answer)):
            if item["type"] == "message":
                (part,) = item["content"]
                events += [] if is_shown else self.text(number, part["text"], is_first=True)
                done = {"text": part["text"], "logprobs": []}
                events.append(self._in_part("output_text.done", number, item, **done))
                events.append(self._in_part("content_part.done", number, item, part=part))
            elif item["type"] == "reasoning":
                text = item["content"][0]["text"]
                events += [
                    self._item("added", number, {**item, "content": []}),
                    self._in_part("reasoning_text.delta", number, item, delta=text),
                    self._in_part("reasoning_text.done", number, item, text=text),
                ]
            else:
                events += self._call_written(number, item)
            events.append(self._item("done", number, item))
        return events

    def _call_written(self, number: int, item: Json) -> list[Event]:
        # The arguments come as one part, because only the whole answer shows the call.
        started = self._item("added", number, {**item, "status": "in_progress"})
        if item["type"] not in _WRITTEN:
            return [started]
        name, field = _WRITTEN[item["type"]]
        written = item[field]
        place = {"item_id": item["id"], "output_index": number}
        started[1]["item"][field] = ""
        return [
            started,
            self._event(f"response.{name}.delta", **place, delta=written),
            self._event(f"response.{name}.done", **place, name=item["name"], **{field: written}),
        ]

    def closed(self, answers: Sequence[Answer]) -> list[Event]:
        response = self.reply(answers)
        return [self._event(f"response.{response['status']}", response=response)]

    def _items(self, answer: Answer) -> list[Json]:
        items: list[Json] = []
        if answer.thinking:
            part = {"type": "reasoning_text", "text": answer.thinking}
            kind = {"type": "reasoning", "summary": []}
            items.append({"id": self._ids["reasoning"], **kind, "content": [part]})
        if answer.content is not None:
            written = _text_part(answer.content)
            if self._has_logprobs:
                name = self._session.chat.text_of_token
                written["logprobs"] = content(answer.written, lambda token: named(token, name))
            items.append(self._message("completed", [written]))
        return [*items, *map(self._tools.item, answer.calls)]

    def _message(self, status: str, content: list[Any]) -> Json:
        kind = {"type": "message", "role": "assistant", "status": status}
        return {"id": self._ids["message"], **kind, "content": content}

    def _item(self, kind: str, number: int, item: Any) -> Event:
        return self._event(f"response.output_item.{kind}", output_index=number, item=item)

    def _in_part(self, kind: str, number: int, item: Json, **fields: Any) -> Event:
        place = {"item_id": item["id"], "output_index": number, "content_index": 0}
        return self._event(f"response.{kind}", **place, **fields)

    def _event(self, name: str, /, **fields: Any) -> Event:
        # Clients order the events by this number.
        self._num_events += 1
        return name, {"type": name, "sequence_number": self._num_events - 1, **fields}


def _text_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
