"""The interface between the endpoint and the forms of its APIs, and what all forms share.

A form reads a request into calls of the session. The exchange that it returns writes the answers,
whole or as server-sent events. Invariant: the first list of events comes once the policy has
written something, so an answer that fails before that is an error with a status.
"""

import asyncio
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec

from async_rl.core.errors import AsyncRLError
from async_rl.sessions.calls import Answer, Call, Noted, Part
from async_rl.sessions.endpoint import MODEL
from async_rl.sessions.errors import Json, Refused, error_of, refusal_of
from async_rl.sessions.session import Session
from async_rl.sessions.tools import tool_call

Event = tuple[str, Any]
"""The name of an event of a stream (empty if its API names none) and its JSON value."""
# The newest and the oldest names of roles that chat templates know.
_ROLES = {"developer": "system", "function": "tool"}
_TEXTS = ("text", "input_text", "output_text")
"""The types of parts that are text."""


class Exchange(ABC):
    """One request whose answers are written. head: the first fields of the answer, `id` among them,
    which a later life of the gateway takes over.
    model: the name in the request. numbers: of the answers in the session.

    The events of a stream: `opened`; for each part of each answer `begun`, `more` as often as it
    comes in pieces, and `ended`; after the last one of an answer `done`; then `closed`. index: of
    the answer among those of the request; number: of the part in its answer.
    """

    def __init__(self, request: Any, calls: list[Call], **head: Any) -> None:
        self.model = request.model or MODEL
        self.calls = calls
        self.numbers: list[int] = []
        self.is_streamed = bool(request.stream)
        self.head = {**head, "model": MODEL}

    @abstractmethod
    def reply(self, answers: Sequence[Answer]) -> Any:
        """Return the body of an answer that is not streamed."""

    def opened(self) -> list[Event]:
        """Return the first events of a stream."""
        return []

    def parts(self, answer: Answer) -> list[Part]:
        """Return the parts that a client gets."""
        return answer.parts

    def begun(self, number: int, part: Part) -> list[Event]:
        """Return the events before a part."""
        return []

    @abstractmethod
    def more(self, index: int, number: int, part: Part, text: str) -> list[Event]:
        """Return the events for the first or further text of a part."""

    def ended(self, number: int, part: Part) -> list[Event]:
        """Return the events after a part."""
        return []

    def done(self, index: int, answer: Answer) -> list[Event]:
        """Return the events for the end of an answer."""
        return []

    @abstractmethod
    def closed(self, answers: Sequence[Answer]) -> list[Event]:
        """Return the last events of a stream."""


Form = Callable[[bytes, Session], Exchange]
"""Reads the body of a request. Raises Refused."""


def read(body: bytes, expected: Any) -> Any:
    """Return the JSON body, of the expected type. Raises Refused with the path of the field that is
    wrong.
    """
    try:
        return msgspec.json.decode(body, type=expected)
    # Deep nesting raises RecursionError.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        name = re.search(r"(?:field `|\$\.)(\w+)", str(error))
        raise Refused(f"bad request: {error}", param=name and name[1]) from error


def refuse_unless(is_fine: bool, feature: str) -> None:
    """Raise Refused for a feature that would change the distribution that is trained."""
    if not is_fine:
        raise Refused(f"{feature} is not supported by this endpoint; leave it out")


def stops_of(stop: str | list[str] | None) -> tuple[str, ...]:
    """Return the texts that stop an answer."""
    return tuple(filter(None, [stop] if isinstance(stop, str) else stop or []))


def variables_of(request: Any, **more: Any) -> Json:
    """Return the values that a request has for the chat template. effort, thinking: of the names
    that templates of reasoning models read.
    """
    names = {"effort": "reasoning_effort", "thinking": "enable_thinking"}
    found = {names[key]: value for key, value in more.items() if value is not None}
    return found | (request.chat_template_kwargs or {})


class History:
    """The messages of a request in the form of the chat templates.

    They have only the fields that templates read: a client may add others to a message that it
    repeats.
    """

    def __init__(self) -> None:
        self.messages: list[Json] = []

    def add(self, role: Any, content: Any, call_id: Any = None, thinking: Any = None) -> None:
        """Add a message. call_id: of the call whose result it is. thinking: before the content.
        Raises Refused.
        """
        role = _ROLES.get(str(role), role)
        if role not in ("system", "user", "assistant", "tool"):
            raise Refused(f"a message has the role {role!r}; use system, user, assistant or tool")
        message = {"role": role, "content": _text_of(content)}
        if role == "tool" and call_id:
            message["tool_call_id"] = str(call_id)
        if thinking:
            message["reasoning_content"] = _text_of(thinking)
        self.messages.append(message)

    @property
    def is_begun(self) -> bool:
        """Whether the last message is the assistant's."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"

    def prefill(self) -> str:
        """Remove the last message, which is the beginning of the answer; return it."""
        is_text = self.is_begun and "tool_calls" not in self.messages[-1]
        refuse_unless(is_text, "to continue a last message that is not the assistant's text")
        return str(self.messages.pop()["content"])

    def add_call(self, call_id: Any, name: Any, arguments: Any) -> None:
        """Add a tool call to the last message. arguments: an object, or its JSON text."""
        # An answer that only calls tools may have no message before them.
        if not self.is_begun:
            self.add("assistant", None)
        call = tool_call(str(call_id or ""), str(name), _arguments_of(arguments))
        self.messages[-1].setdefault("tool_calls", []).append(call)


def function_of(tool: Json, parameters: Any) -> Json:
    """Return a tool in the form of the chat templates. parameters: its JSON schema."""
    fields = {
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": parameters,
    }
    return {"type": "function", "function": {key: fields[key] for key in fields if fields[key]}}


def _text_of(content: Any) -> str:
    """Return the text of a message, which is a string or a list of parts. Raises Refused."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refused(f"content is a {type(content).__name__}; send text")
    for part in content:
        refuse_unless(part.get("type") in _TEXTS, f"a part of type {part.get('type')!r}")
    return "".join(str(part.get("text", "")) for part in content)


def _arguments_of(value: Any) -> Json:
    """Return the arguments of a tool call, which are an object, or JSON text of an object."""
    try:
        if isinstance(value, str):
            value = msgspec.json.decode(value or "{}")
        return msgspec.convert(value, Json)
    except msgspec.MsgspecError as error:
        raise Refused(f"the arguments of a tool call are not a JSON object: {error}") from error


def new_id(prefix: str) -> str:
    """Return an id as the API writes it."""
    return f"{prefix}{uuid.uuid4().hex}"


def _rest(
    exchange: Exchange, index: int, seen: Sequence[Part], answer: Answer, *, is_whole: bool
) -> tuple[list[Part], list[Event]]:
    """Return the parts of an answer, and the events for what these parts have more than those that
    the client has seen.
    """
    # A part without text is one only if none comes.
    parts = [part for part in exchange.parts(answer) if part.text or is_whole]
    events: list[Event] = []
    for number, part in enumerate(parts):
        is_new = number >= len(seen)
        text = part.text if is_new else part.text.removeprefix(seen[number].text)
        if is_new:
            events += exchange.begun(number, part)
        if is_new or text:
            events += exchange.more(index, number, part, text)
        is_last = number == len(parts) - 1
        if number >= len(seen) - 1 and (is_whole or not is_last):
            events += exchange.ended(number, part)
    return parts, events + (exchange.done(index, answer) if is_whole else [])


async def events_of(
    exchange: Exchange, session: Session, request: Noted
) -> AsyncIterator[list[Event]]:
    """Yield the events of a stream with one answer, in lists that are sent together. The request
    is noted before the last text is sent; if that fails, the answer is not trained.
    """
    news: asyncio.Queue[Answer | None] = asyncio.Queue()
    (call,), (number,) = exchange.calls, exchange.numbers
    writing = asyncio.create_task(session.answer(call, number, news.put_nowait))
    writing.add_done_callback(lambda _: news.put_nowait(None))
    seen: list[Part] = []
    opened = exchange.opened()
    try:
        while (piece := await news.get()) is not None:
            seen, events = _rest(exchange, 0, seen, piece, is_whole=False)
            yield [*opened, *events]
            opened = []
        # Raises the error of a call that failed.
        answer = await writing
        try:
            session.note(request)
        except AsyncRLError:
            session.forget(exchange.numbers)
            raise
        yield [*opened, *_rest(exchange, 0, seen, answer, is_whole=True)[1]]
        yield exchange.closed([answer])
    finally:
        # A client that disconnects cancels its call, which records the text that it has read.
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)


async def lines_of(first: list[Event], events: AsyncIterator[list[Event]]) -> AsyncIterator[bytes]:
    """Yield the events as lines of the stream; if the answer fails, the last one is the error."""
    yield lines(first)
    try:
        async for more in events:
            yield lines(more)
    # The status has been sent, so the error comes as an event.
    except AsyncRLError as error:
        yield lines([("error", error_of(refusal_of(error)))])


def replayed(exchange: Exchange, answers: Sequence[Answer]) -> list[Event]:
    """Return all events of a stream whose answers are complete."""
    events = exchange.opened()
    for index, answer in enumerate(answers):
        events += _rest(exchange, index, [], answer, is_whole=True)[1]
    return [*events, *exchange.closed(answers)]


def lines(events: Sequence[Event]) -> bytes:
    """Return the lines of a stream for these events."""
    parts = []
    for name, value in events:
        data = value.encode() if isinstance(value, str) else msgspec.json.encode(value)
        head = f"event: {name}\n".encode() if name else b""
        parts.append(head + b"data: " + data + b"\n\n")
    return b"".join(parts)
