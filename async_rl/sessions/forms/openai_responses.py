"""POST /v1/responses of OpenAI's API, which the package openai-agents uses by default.

parameters.toml has its parameters. Items of reasoning in the input are left out: the record has the
policy's text. The text of a compaction is the user's.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from async_rl.core.support import Alternatives
from async_rl.sessions.calls import Answer, Call, Part
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
_STREAMS = TEMPLATES["streams"]
"""By the type of an item: the name of the events of its text (empty: it has none), its fields
before its text, and further fields of the events.
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
        is_streamed=bool(request.stream),
        is_single=request.parallel_tool_calls is False,
        schema=schema_of(form),
        variables=variables_of(request, effort=(request.reasoning or {}).get("effort")),
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
        self._num_events = 0
        self._ids = {"text": new_id("msg_"), "thinking": new_id("rs_")}

    def reply(self, answers: Sequence[Answer]) -> Any:
        answer = answers[0]
        num_prompt = answer.num_prompt_tokens
        num_written = len(answer.written.token_ids)
        body = {
            **self.head,
            "status": "completed",
            "output": [self._whole(part) for part in self.parts(answer)],
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

    def opened(self) -> list[Event]:
        begun = {**self.head, "status": "in_progress", "output": [], "usage": None}
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
        ]

    def parts(self, answer: Answer) -> list[Part]:
        self._written_so_far = answer.written
        return answer.parts

    def begun(self, number: int, part: Part) -> list[Event]:
        item = self._item(part)
        begun = {**item, "status": "in_progress", **_STREAMS[item["type"]]["empty"]}
        events = [self._event("response.output_item.added", output_index=number, item=begun)]
        if part.kind == "text":
            events.append(self._content("added", number, item["id"], _content("text", "")))
        return events

    def more(self, index: int, number: int, part: Part, text: str) -> list[Event]:
        # The arguments come as one piece, because only the whole answer shows the call.
        delta = "".join(self._written(part).values()) if part.call else text
        return self._in(number, part, "delta", delta=delta)

    def ended(self, number: int, part: Part) -> list[Event]:
        item = self._whole(part)
        named = {"name": item["name"]} if "name" in item else {}
        events = self._in(number, part, "done", **named, **self._written(part))
        if part.kind == "text":
            events.append(self._content("done", number, item["id"], item["content"][0]))
        return [*events, self._event("response.output_item.done", output_index=number, item=item)]

    def closed(self, answers: Sequence[Answer]) -> list[Event]:
        response = self.reply(answers)
        return [self._event(f"response.{response['status']}", response=response)]

    def _item(self, part: Part) -> Json:
        if part.call:
            return self._tools.item(part.call)
        content = [_content(part.kind, part.text)]
        return {"id": self._ids[part.kind], **TEMPLATES["items"][part.kind], "content": content}

    def _whole(self, part: Part) -> Json:
        """Return the item of a complete part."""
        item = self._item(part)
        if self._has_logprobs and part.kind == "text":
            name = self._session.chat.text_of_token
            scores = content(self._written_so_far, lambda token: named(token, name))
            item["content"][0]["logprobs"] = scores
        return item

    def _written(self, part: Part) -> Json:
        """Return the field of an item whose text comes in pieces, with all of its text."""
        if not part.call:
            return {"text": part.text}
        item = self._item(part)
        return {field: item[field] for field in _STREAMS[item["type"]]["empty"]}

    def _in(self, number: int, part: Part, kind: str, **fields: Any) -> list[Event]:
        """Return the event about the text of an item, if it has events of its own."""
        item = self._item(part)
        stream = _STREAMS[item["type"]]
        place = {"item_id": item["id"], "output_index": number, **stream["more"]}
        name = f"response.{stream['name']}.{kind}"
        return [self._event(name, **place, **fields)] if stream["name"] else []

    def _content(self, kind: str, number: int, item_id: str, part: Json) -> Event:
        place = {"item_id": item_id, "output_index": number, "content_index": 0}
        return self._event(f"response.content_part.{kind}", **place, part=part)

    def _event(self, name: str, /, **fields: Any) -> Event:
        # Clients order the events by this number.
        self._num_events += 1
        return name, {"type": name, "sequence_number": self._num_events - 1, **fields}


def _content(kind: str, text: str) -> Json:
    return {**TEMPLATES["contents"][kind], "text": text}
