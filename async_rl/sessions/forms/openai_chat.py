"""POST /v1/chat/completions.

The sampling of a request (temperature, top_p, seed, penalties) is ignored: the run's configuration
decides from which distribution the policy is sampled, because that is the one that is trained.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from async_rl.sessions.chat import Chat
from async_rl.sessions.errors import Refused
from async_rl.sessions.forms.form import (
    Event,
    Exchange,
    arguments_of,
    new_id,
    read,
    refuse_unless,
    require_model,
    text_of,
)
from async_rl.sessions.session import Answer, Call, Session
from async_rl.sessions.tools import calls_of, chosen
from async_rl.sessions.worker import MODEL

_ROLES = {"developer": "system", "function": "tool"}
Count = Annotated[int, msgspec.Meta(ge=1)]


class ChatRequest(msgspec.Struct, kw_only=True):
    """The fields that are read; others are ignored."""

    model: str
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] | None = 1
    logprobs: bool | None = False
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    logit_bias: dict[str, float] | None = None


def chat_completions(body: bytes, session: Session) -> Exchange:
    """Read a request of chat completions."""
    request = read(body, ChatRequest)
    require_model(request.model)
    refuse_unless(not request.top_logprobs, "top_logprobs")
    refuse_unless(not request.logit_bias, "logit_bias")
    form = (request.response_format or {"type": "text"}).get("type")
    refuse_unless(form == "text", f"response_format={form}")
    tools, begin = chosen(request.tools or [], request.tool_choice, session.chat.form)
    messages = [message_of(message) for message in request.messages]
    call = session.chat_call(
        messages,
        tools,
        begin=begin,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        stops=stops_of(request.stop),
        # With tools the text may become a call, which only its end shows.
        in_pieces=bool(request.stream) and not tools,
    )
    return _ChatExchange(request, call, session.chat)


def stops_of(stop: str | list[str] | None) -> tuple[str, ...]:
    """Return the texts that stop an answer."""
    return tuple(filter(None, [stop] if isinstance(stop, str) else stop or []))


def message_of(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of a request in the form of the chat templates. Raises Refused."""
    role = message.get("role")
    role = _ROLES.get(str(role), role)
    if role not in ("system", "user", "assistant", "tool"):
        raise Refused(400, f"a message has the role {role!r}; use system, user, assistant or tool")
    result: dict[str, Any] = {"role": role, "content": text_of(message.get("content"))}
    if role == "tool" and message.get("tool_call_id"):
        result["tool_call_id"] = str(message["tool_call_id"])
    try:
        calls = [
            {
                "id": str(call.get("id", "")),
                "type": "function",
                "function": {
                    "name": str(call["function"]["name"]),
                    "arguments": arguments_of(call["function"].get("arguments")),
                },
            }
            for call in calls_of(message)
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise Refused(400, f"a tool call has no function with a name: {error}") from error
    if calls:
        result["tool_calls"] = calls
    return result


class _ChatExchange:
    def __init__(self, request: ChatRequest, call: Call, chat: Chat) -> None:
        self.calls = [call] * (request.n or 1)
        self.is_streamed = bool(request.stream)
        self._request = request
        self._chat = chat
        self._in_pieces = call.in_pieces
        self._head = {"id": new_id("chatcmpl-"), "created": int(time.time()), "model": MODEL}

    def reply(self, answers: Sequence[Answer]) -> Any:
        choices = [
            {
                "index": index,
                "message": {"refusal": None, **wire_message(answer)},
                "finish_reason": answer.why,
                "logprobs": self._logprobs(answer),
            }
            for index, answer in enumerate(answers)
        ]
        return {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage_of(answers),
        }

    def opened(self) -> list[Event]:
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(index, delta) for index in range(len(self.calls))]

    def part(self, index: int, text: str) -> list[Event]:
        return [self._chunk(index, {"content": text})] if self._in_pieces and text else []

    def done(self, index: int, answer: Answer) -> list[Event]:
        events = []
        if not self._in_pieces:
            delta = wire_message(answer)
            for number, call in enumerate(delta.get("tool_calls", ())):
                call["index"] = number
            events.append(self._chunk(index, delta))
        logprobs = self._logprobs(answer)
        return [*events, self._chunk(index, {}, why=answer.why, logprobs=logprobs)]

    def closed(self, answers: Sequence[Answer]) -> list[Event]:
        if not (self._request.stream_options or {}).get("include_usage"):
            return [("", "[DONE]")]
        last = {**self._head, "object": "chat.completion.chunk", "choices": []}
        return [("", {**last, "usage": usage_of(answers)}), ("", "[DONE]")]

    def _chunk(
        self, index: int, delta: dict[str, Any], *, why: str | None = None, logprobs: Any = None
    ) -> Event:
        choice = {"index": index, "delta": delta, "finish_reason": why, "logprobs": logprobs}
        return "", {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def _logprobs(self, answer: Answer) -> Any:
        if not self._request.logprobs:
            return None
        content = []
        for token, logprob in zip(
            answer.written.token_ids, answer.written.logprobs.tolist(), strict=True
        ):
            text = self._chat.decode(token[None], with_special=True)
            row = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
            content.append({**row, "top_logprobs": []})
        return {"content": content, "refusal": None}


def wire_message(answer: Answer) -> dict[str, Any]:
    """Return the answer as a message of the API."""
    message = dict(answer.message)
    calls = calls_of(message)
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json_of(call)}} for call in calls
        ]
    return message


def json_of(call: Any) -> str:
    """Return the arguments of a tool call as JSON text."""
    return msgspec.json.encode(call["function"]["arguments"]).decode()


def usage_of(answers: Sequence[Answer]) -> dict[str, int]:
    """Return the numbers of tokens."""
    prompt = answers[0].num_prompt_tokens if answers else 0
    written = sum(len(answer.written.token_ids) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
