"""POST /v1/responses of OpenAI's API, which the package openai-agents uses by default.

parameters.toml has its parameters. Items of reasoning in the input are left out: the record has the
policy's text. The text of a compaction is the user's. A tool in a namespace is shown as
namespace__name. A custom tool is a function of one text, `input`; a local shell is a function
`local_shell` of a command. Tools that OpenAI runs are left out.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from async_rl.core.calls import Alternatives
from async_rl.sessions.calls import Answer, Call
from async_rl.sessions.errors import Json, Refused
from async_rl.sessions.forms.form import (
    Event,
    Exchange,
    History,
    function_of,
    named_token,
    new_id,
    refuse_unless,
    scored_tokens,
    stops_of,
    variables_of,
)
from async_rl.sessions.forms.parameters import HOSTED, read_request
from async_rl.sessions.session import Session
from async_rl.sessions.tools import json_of, schema_of

_TEMPLATES = msgspec.json.decode(Path(__file__).with_name("responses.json").read_bytes())
"""Of responses: the fields that repeat those of a request, with their defaults, and the fixed ones;
of tools: the parameters of a custom tool, and a local shell as a function.
"""
_SHELL = _TEMPLATES["local_shell"]
_PREFIXES = {"text": "msg_", "thinking": "rs_"}
"""Of the ids of items."""
_LOGPROBS = "message.output_text.logprobs"
_STREAMS = _TEMPLATES["streams"]
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
    tools = _Tools(request.tools or ())
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
        elif not _read_call(item, history):
            refuse_unless(kind == "reasoning", f"an item of type {kind!r}")
    return history.messages


class _Tools:
    """The tools of one request. functions: as the chat template shows them."""

    def __init__(self, tools: Sequence[Json]) -> None:
        self.functions: list[Json] = []
        self._known: dict[str, Json] = {}
        self._add(tools, {})

    def _add(self, tools: Sequence[Json], place: Json) -> None:
        """Add tools. place: the fields that their calls have next to the name."""
        for tool in tools:
            kind = str(tool.get("type"))
            if kind == "namespace":
                self._add(tool["tools"], {"namespace": tool["name"]})
            elif not kind.startswith(HOSTED):
                refuse_unless(
                    kind in ("function", "custom", "local_shell"), f"a tool of type {kind!r}"
                )
                tool = {**tool, **(_SHELL if kind == "local_shell" else {})}
                fields = {"name": tool["name"], **place}
                name = _shown(fields)
                self._known[name] = {"type": kind, **fields}
                # The grammar of a custom tool tells the policy what to write.
                about = [tool.get("description"), (tool.get("format") or {}).get("definition")]
                parameters = _TEMPLATES["custom"] if kind == "custom" else tool.get("parameters")
                described = {"name": name, "description": "\n".join(filter(None, about))}
                self.functions.append(function_of(described, parameters))

    def item(self, call: Json) -> Json:
        """Return a call as an item of a response."""
        name = call["function"]["name"]
        arguments = call["function"]["arguments"]
        known = dict(self._known.get(name) or {"type": "function", "name": name})
        kind = known.pop("type")
        # An item has an id next to the id of the call, which the result of the tool repeats.
        item = {"id": f"fc_{call['id']}", "call_id": call["id"], "status": "completed"}
        if kind == "local_shell":
            action = {"type": "exec", "env": {}, **arguments}
            return {"type": "local_shell_call", **item, "action": action}
        if kind == "custom":
            written = arguments.get("input")
            text = written if isinstance(written, str) else json_of(call)
            return {"type": "custom_tool_call", **item, **known, "input": text}
        return {"type": "function_call", **item, **known, "arguments": json_of(call)}


def _read_call(item: Json, history: History) -> bool:
    """Add an item that is a call or its result to the history; return whether it is one."""
    kind = item["type"]
    call_id = item.get("call_id") or item.get("id")
    if kind in ("function_call_output", "custom_tool_call_output", "local_shell_call_output"):
        history.add("tool", item.get("output"), call_id)
    elif kind == "function_call":
        history.add_call(call_id, _shown(item), item.get("arguments"))
    elif kind == "custom_tool_call":
        history.add_call(call_id, _shown(item), {"input": item["input"]})
    elif kind == "local_shell_call":
        # Packages write the fields that the policy left out as null.
        written = {key: value for key, value in item["action"].items() if key != "type" and value}
        history.add_call(call_id, _SHELL["name"], written)
    else:
        return False
    return True


def _shown(fields: Any) -> str:
    """Return the name under which the chat template shows a tool."""
    return "__".join(filter(None, [fields.get("namespace"), fields["name"]]))


class _ResponsesExchange(Exchange):
    """history: the messages of the request, which a later request may continue by the id."""

    def __init__(
        self, request: Any, call: Call, session: Session, history: list[Any], tools: _Tools
    ) -> None:
        super().__init__(
            request,
            [replace(call, alternatives=Alternatives(num_top=request.top_logprobs or 0))],
            id=new_id("resp_"),
            created_at=int(time.time()),
            parallel_tool_calls=request.parallel_tool_calls is not False,
            # Packages require all these names.
            **_TEMPLATES["fixed"],
            **{name: getattr(request, name) or it for name, it in _TEMPLATES["repeated"].items()},
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
        shown = {**_TEMPLATES["contents"][kind], "text": written}
        if self._has_logprobs and kind == "text":
            name = self._session.chat.text_of_token
            shown["logprobs"] = scored_tokens(
                answer.written, lambda token: named_token(token, name)
            )
        return {
            "id": new_id(_PREFIXES[kind]),
            **_TEMPLATES["items"][kind],
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
