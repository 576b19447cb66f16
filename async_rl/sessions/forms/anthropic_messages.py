"""POST /v1/messages of Anthropic's API, and /v1/messages/count_tokens.

parameters.toml has their parameters. The thinking of an answer is shown if the request has
`thinking`: other clients expect text first.
"""

from collections.abc import Sequence
from typing import Any

from async_rl.sessions.calls import Answer, Call, Part
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
from async_rl.sessions.grammars import schema_of
from async_rl.sessions.session import Session

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
            request, effort=output.get("effort"), thinking=thinking and thinking != "disabled"
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

    def reply(self, answers: Sequence[Answer]) -> Any:
        answer = answers[0]
        usage = self._usage(len(answer.written.token_ids))
        blocks = [_block(part) for part in self._parts(answer)]
        return {**self.head, "content": blocks, **_reason(answer), "usage": usage}

    def events(self, answers: Sequence[Answer]) -> list[Event]:
        answer = answers[0]
        empty: Json = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = {**self.head, **empty, "usage": self._usage(0)}
        events = [_event("message_start", message=message)]
        for number, part in enumerate(self._parts(answer)):
            events += _block_events(number, part)
        # The length of the answer is here, and not in the first event.
        usage = {"output_tokens": len(answer.written.token_ids)}
        events.append(_event("message_delta", delta=_reason(answer), usage=usage))
        return [*events, _event("message_stop")]

    def _parts(self, answer: Answer) -> list[Part]:
        return [part for part in answer.parts if self._thinks or part.kind != "thinking"]

    def _usage(self, num_written: int) -> dict[str, int]:
        num_prompt = len(self.calls[0].context.token_ids)
        return {"input_tokens": num_prompt, "output_tokens": num_written}


def _reason(answer: Answer) -> Json:
    # The answer does not record whether a stop text or an end token finished it.
    return {"stop_reason": _WHY[answer.why], "stop_sequence": None}


def _block(part: Part) -> Json:
    if part.call:
        function = part.call["function"]
        use = {"id": part.call["id"], "name": function["name"], "input": function["arguments"]}
        return {"type": "tool_use", **use}
    signed = {"signature": ""} if part.kind == "thinking" else {}
    return {"type": part.kind, part.kind: part.text, **signed}


def _block_events(number: int, part: Part) -> list[Event]:
    if part.call:
        empty: Json = {"input": {}}
        deltas = [{"type": "input_json_delta", "partial_json": part.text}]
    else:
        empty = {part.kind: ""}
        deltas = [{"type": f"{part.kind}_delta", part.kind: part.text}]
    if part.kind == "thinking":
        deltas.append({"type": "signature_delta", "signature": ""})
    return [
        _event("content_block_start", index=number, content_block={**_block(part), **empty}),
        *(_event("content_block_delta", index=number, delta=delta) for delta in deltas),
        _event("content_block_stop", index=number),
    ]


def _event(name: str, **fields: Any) -> Event:
    return name, {"type": name, **fields}
