"""The interface between the endpoint and the forms of its APIs.

A form reads a request into calls of the session; the exchange that it returns writes the answers.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from async_rl.sessions.calls import Answer, Call
from async_rl.sessions.refusals import Refused
from async_rl.sessions.session import Session

MODEL = "policy"
"""The name of the model that is trained."""
T = TypeVar("T", bound=msgspec.Struct)
Event = tuple[str, Any]
"""The name of an event of a stream (empty if its API names none) and its JSON value."""


class Exchange(Protocol):
    """One request whose answers are written."""

    calls: list[Call]
    is_streamed: bool

    def reply(self, answers: Sequence[Answer]) -> Any:
        """Return the body of an answer that is not streamed."""

    def opened(self) -> list[Event]:
        """Return the first events of a stream."""

    def part(self, index: int, text: str) -> list[Event]:
        """Return the events for further text of an answer."""

    def done(self, index: int, answer: Answer) -> list[Event]:
        """Return the events for the end of an answer."""

    def closed(self, answers: Sequence[Answer]) -> list[Event]:
        """Return the last events of a stream."""


Form = Callable[[bytes, Session], Exchange]
"""Reads the body of a request. Raises Refused."""


def read(body: bytes, expected: type[T]) -> T:
    """Return the JSON body. Raises Refused with the path of the field that is wrong."""
    try:
        return msgspec.json.decode(body, type=expected)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, f"bad request: {error}") from error


def require_model(name: str) -> None:
    """Raise Refused for the name of another model."""
    if name != MODEL:
        raise Refused(
            404,
            f"the model {name!r} is not served here; ask for {MODEL!r} (the variable"
            " OPENAI_MODEL of an agent has the name)",
            code="model_not_found",
        )


def refuse_unless(is_fine: bool, feature: str) -> None:
    """Raise Refused for a feature that would change the distribution that is trained."""
    if not is_fine:
        raise Refused(400, f"{feature} is not supported by this endpoint; leave it out")


def text_of(content: Any, kinds: tuple[str, ...] = ("text",)) -> str:
    """Return the text of a message, which is a string or a list of parts. Raises Refused."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refused(400, f"content is a {type(content).__name__}; send text")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in kinds:
            name = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise Refused(400, f"a part of type {name!r} is not supported; send text")
        texts.append(str(part.get("text", "")))
    return "".join(texts)


def arguments_of(text: Any) -> dict[str, Any]:
    """Return the arguments of a tool call, which are an object, or JSON text of one."""
    value = text
    if isinstance(text, str):
        try:
            value = msgspec.json.decode(text or "{}")
        except msgspec.DecodeError as error:
            raise Refused(400, f"the arguments of a tool call are not JSON: {error}") from error
    if not isinstance(value, dict):
        raise Refused(400, "the arguments of a tool call are not a JSON object")
    return value


def new_id(prefix: str) -> str:
    """Return an id in the way of the API."""
    return f"{prefix}{uuid.uuid4().hex}"
