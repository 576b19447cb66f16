"""POST /v1/responses of OpenAI's API, which the package openai-agents uses by default.

parameters.toml has its parameters. Items of reasoning in the input are left out: the record has the
policy's text. The text of a compaction is the user's.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from async_rl.core.calls import Alternatives
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

_PREFIXES = {"text": "msg_", "thinking": "rs_"}
"""Of the ids of items."""
_LOGPROBS = "message.output_text.logprobs"
_STREAMS = TEMPLATES["streams"]
"""By the type of an item: its fields before its text, and if its text has events their name, the
field of the text, and further fields.
"""


def responses(body: bytes, session: Session) -> Exchange:
    """Read a request for a response."""
    request = read_request(body, "responses")
    form = (request.text or {}).get("format")
    # Without the instructions, which OpenAI does not carry over to a later response.
    name = request.previous_response_id
    earlier = [] if name is None else known_response(name, session)[0]
    history = [*earlier, *_messages(request.input)]
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
        is_single=request.parallel_tool_calls is False,
        schema=schema_of(form),
        variables=variables_of(request, reasoning_effort=(request.reasoning or {}).get("effort")),
    )
    return _ResponsesExchange(request, call, session, history, tools)


def known_response(name: str, session: Session) -> tuple[list[Any], Json]:
    """Return the messages up to and with an earlier response of the session, and its body. Raises
    Refused.
    """
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

    def reply(self, answers: Sequence[Answer]) -> Json:
        answer = answers[0]
        num_prompt = answer.num_prompt_tokens
        num_written = len(answer.written.token_ids)
        body = {
            **self.head,
            "status": "completed",
            "output": [self._item(*part, answer) for part in answer.parts],
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
        self._session.responses[self.head["id"]] = [*self._history, answer.message], body
        return body

    def events(self, body: Json) -> list[Event]:
        begun = {**self.head, "status": "in_progress", "output": [], "usage": None}
        events: list[Event] = [
            ("response.created", {"response": begun}),
            ("response.in_progress", {"response": begun}),
        ]
        for number, item in enumerate(body["output"]):
            events += _item_events(number, item)
        events.append((f"response.{body['status']}", {"response": body}))
        # Clients order the events by the number.
        return [
            (name, {"type": name, "sequence_number": number, **fields})
            for number, (name, fields) in enumerate(events)
        ]

    def _item(self, kind: str, written: Any, answer: Answer) -> Json:
        if kind == "call":
            return self._tools.item(written)
        shown = {**TEMPLATES["contents"][kind], "text": written}
        if self._has_logprobs and kind == "text":
            name = self._session.chat.text_of_token
            shown["logprobs"] = content(answer.written, lambda token: named(token, name))
        return {
            "id": new_id(_PREFIXES[kind]),
            **TEMPLATES["items"][kind],
            "content": [shown],
        }


def _item_events(number: int, item: Json) -> list[Event]:
    """Return the events of an item. number: among the items of the response."""
    stream = _STREAMS[item["type"]]
    place = {"item_id": item["id"], "output_index": number}
    written = item["content"][0] if "content" in item else item
    events: list[Event] = []
    if "field" in stream:
        kind = f"response.{stream['name']}"
        within = {**place, **stream["more"]}
        text = {stream["field"]: written[stream["field"]]}
        named = {"name": item["name"]} if "name" in item else {}
        events = [
            (f"{kind}.delta", {**within, "delta": "".join(text.values())}),
            (f"{kind}.done", {**within, **named, **text}),
        ]
    if item["type"] == "message":
        within = {**place, "content_index": 0}
        begun = {**written, "text": "", "logprobs": []}
        events.insert(0, ("response.content_part.added", {**within, "part": begun}))
        events.append(("response.content_part.done", {**within, "part": written}))
    begun = {**item, "status": "in_progress", **stream["empty"]}
    return [
        ("response.output_item.added", {"output_index": number, "item": begun}),
        *events,
        ("response.output_item.done", {"output_index": number, "item": item}),
    ]
