"""POST /v1/messages of Anthropic's API, and /v1/messages/count_tokens.

parameters.toml has their parameters. The thinking of an answer is shown if the request has
`thinking`: other clients expect text first.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from async_rl.sessions.calls import Answer, Call
from async_rl.sessions.errors import Json
from async_rl.sessions.forms.form import (
    Event,
    Exchange,
    History,
    function_of,
    new_id,
    refuse_unless,
    stops_of,
    variables_of,
)
from async_rl.sessions.forms.parameters import HOSTED, read_request
from async_rl.sessions.session import Session
from async_rl.sessions.tools import schema_of

# The words of this API for what sessions call otherwise.
_CHOICES = {"any": "required"}
_WHY = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_BLOCKS = ("thinking", "redacted_thinking", "tool_result", "tool_use")
"""The blocks that are not text."""


def messages(body: bytes, session: Session) -> Exchange:
    """Read a request of messages."""
    request = read_request(body, "messages")
    call = _call(
        request,
        session,
        max_tokens=request.max_tokens,
        stops=stops_of(request.stop_sequences),
    )
    return _MessagesExchange(request, [call], id=new_id("msg_"), type="message", role="assistant")


def count_tokens(body: bytes, session: Session) -> Json:
    """Return the number of tokens that a request of messages would have."""
    call = _call(read_request(body, "count_tokens"), session)
    return {"input_tokens": len(call.context.token_ids)}


def _call(request: Any, session: Session, **more: Any) -> Call:
    """Return the call of a request. more: arguments of chat_call."""
    for edit in (request.context_management or {}).get("edits") or ():
        refuse_unless(edit["type"].startswith("clear_thinking"), f"the edit {edit['type']!r}")
    output = request.output_config or {}
    history = History()
    # This API has the system's text next to the messages.
    if request.system:
        history.add("system", request.system)
    for message in request.messages:
        _read(message, history)
    choice = request.tool_choice or {}
    kind = choice.get("type", "auto")
    tools = [t for t in request.tools or () if not str(t.get("type")).startswith(HOSTED)]
    thinking = (request.thinking or {}).get("type")
    return session.chat_call(
        history.messages,
        [function_of(tool, tool.get("input_schema")) for tool in tools],
        choice if kind == "tool" else _CHOICES.get(str(kind), kind),
        schema=schema_of(request.output_format or output.get("format")),
        prefill=history.prefill() if history.is_begun else "",
        is_single=bool(choice.get("disable_parallel_tool_use")),
        variables=variables_of(
            request,
            reasoning_effort=output.get("effort"),
            enable_thinking=thinking and thinking != "disabled",
        ),
        **more,
    )


def _read(message: Json, history: History) -> None:
    """Add a message, which may have results of tools, text and calls, each in blocks."""
    role = message.get("role")
    content = message.get("content")
    if not isinstance(content, list):
        history.add(role, content)
        return
    texts: list[Json] = []
    blocks: dict[Any, list[Json]] = {kind: [] for kind in _BLOCKS}
    for block in content:
        blocks.get(block.get("type"), texts).append(block)
    # Templates expect the results of tools before the user's next text.
    for result in blocks["tool_result"]:
        history.add("tool", result.get("content"), result.get("tool_use_id"))
    if texts or role == "assistant":
        thinking = "\n".join(str(block.get("thinking", "")) for block in blocks["thinking"])
        history.add(role, texts, thinking=thinking)
    for use in blocks["tool_use"]:
        history.add_call(use.get("id"), use.get("name"), use["input"])


class _MessagesExchange(Exchange):
    def __init__(self, request: Any, calls: list[Call], **head: Any) -> None:
        super().__init__(request, calls, **head)
        self._thinks = (request.thinking or {}).get("type", "disabled") != "disabled"

    def reply(self, answers: Sequence[Answer]) -> Json:
        answer = answers[0]
        return {
            **self.head,
            "content": [
                _block(kind, written)
                for kind, written in answer.parts
                if self._thinks or kind != "thinking"
            ],
            # The answer does not record whether a stop text or an end token finished it.
            "stop_reason": _WHY[answer.why],
            "stop_sequence": None,
            "usage": {
                "input_tokens": answer.num_prompt_tokens,
                "output_tokens": len(answer.written.token_ids),
            },
        }

    def events(self, body: Json) -> list[Event]:
        usage = body["usage"]
        begun = {**body, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
        events = [_event("message_start", message=begun)]
        for number, block in enumerate(body["content"]):
            events += _block_events(number, block)
        delta = {"stop_reason": body["stop_reason"], "stop_sequence": None}
        # The length of the answer is here, and not in the first event.
        written = {"output_tokens": usage["output_tokens"]}
        events.append(_event("message_delta", delta=delta, usage=written))
        return [*events, _event("message_stop")]


def _block(kind: str, written: Any) -> Json:
    if kind == "call":
        function = written["function"]
        use = {"id": written["id"], "name": function["name"], "input": function["arguments"]}
        return {"type": "tool_use", **use}
    signed = {"signature": ""} if kind == "thinking" else {}
    return {"type": kind, kind: written, **signed}


def _block_events(number: int, block: Json) -> list[Event]:
    kind = block["type"]
    field = "input" if kind == "tool_use" else kind
    if kind == "tool_use":
        arguments = msgspec.json.encode(block[field]).decode()
        deltas = [{"type": "input_json_delta", "partial_json": arguments}]
    else:
        deltas = [{"type": f"{kind}_delta", kind: block[field]}]
    if kind == "thinking":
        deltas.append({"type": "signature_delta", "signature": ""})
    begun = {**block, field: type(block[field])()}
    return [
        _event("content_block_start", index=number, content_block=begun),
        *(_event("content_block_delta", index=number, delta=delta) for delta in deltas),
        _event("content_block_stop", index=number),
    ]


def _event(name: str, **fields: Any) -> Event:
    return name, {"type": name, **fields}
