"""The interface between the endpoint and the forms of its APIs, and what all forms share.

A form reads a request into calls of the session. The exchange that it returns writes the answers
as one body, or as the server-sent events of a stream. Log-probs are written as OpenAI's API and
vLLM do.
"""

import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from async_rl.protocol.generator import Completion, Scores
from async_rl.sessions.calls import Answer, Call
from async_rl.sessions.endpoint import MODEL
from async_rl.sessions.errors import Json, Refused
from async_rl.sessions.session import Session
from async_rl.sessions.tools import tool_call

Event = tuple[str, Any]
"""The name of an event of a stream (empty if its API names none) and its JSON value."""
Name = Callable[[int], str]
"""Returns the text of a token."""
# The newest and the oldest names of roles that chat templates know.
_ROLES = {"developer": "system", "function": "tool"}
_TEXTS = ("text", "input_text", "output_text")
"""The types of parts that are text."""
# JSON has no -inf, which a token outside of the support has.
_LEAST = -9999.0


class Exchange(ABC):
    """One request whose answers are written. head: the first fields of the answer, `id` among them,
    which a later life of the gateway takes over.
    model: the name in the request.
    """

    def __init__(self, request: Any, calls: list[Call], **head: Any) -> None:
        self.model = request.model or MODEL
        self.calls = calls
        self.is_streamed = bool(request.stream)
        self.head = {**head, "model": MODEL}

    @abstractmethod
    def reply(self, answers: Sequence[Answer]) -> Json:
        """Return the body of an answer that is not streamed."""

    @abstractmethod
    def events(self, body: Json) -> list[Event]:
        """Return the events of a stream in place of this body."""


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
    """Return the values that a request has for the chat template. more: by the names that templates
    of reasoning models read.
    """
    found = {name: value for name, value in more.items() if value is not None}
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


def named_token(token: int, name: Name) -> Json:
    """Return a token as chat completions and responses name it."""
    text = name(token)
    return {"token": text, "bytes": list(text.encode())}


def scored_tokens(written: Completion, named: Callable[[int], Json]) -> list[Json]:
    """Return the tokens of an answer with their alternatives. named: the fields of a token."""
    return [
        {
            **named(token),
            "logprob": logprob,
            "top_logprobs": [{**named(other), "logprob": value} for other, value in top],
        }
        for token, logprob, top in zip(*_columns(written), strict=True)
    ]


def scores_by_text(written: Completion, name: Name) -> Json:
    """Return the log-probs of /v1/completions, whose alternatives contain the token itself."""
    ids, logprobs, tops = _columns(written)
    tokens = [name(token) for token in ids]
    tops = [
        {token: logprob, **{name(other): value for other, value in top}}
        for token, logprob, top in zip(tokens, logprobs, tops, strict=True)
    ]
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": None if written.likeliest is None else tops,
        "text_offset": np.cumsum([0, *map(len, tokens)])[:-1].tolist(),
    }


def prompt_scores(written: Completion, name: Name) -> Json:
    """Return the field with the log-probs of the prompt; without them none."""
    if written.prompt is None:
        return {}
    positions: list[Json | None] = [None]
    for (token, logprob), *top in list(_pairs(written.prompt))[1:]:
        ranked = [(token, logprob, None), *((*each, rank) for rank, each in enumerate(top, 1))]
        positions.append(
            {
                str(token): {"logprob": logprob, "rank": rank, "decoded_token": name(token)}
                for token, logprob, rank in ranked
            }
        )
    return {"prompt_logprobs": positions}


def _columns(written: Completion) -> tuple[list[int], list[float], Sequence[Any]]:
    tops: Sequence[Any] = [()] * len(written.token_ids)
    if written.likeliest is not None:
        tops = list(_pairs(written.likeliest))
    return written.token_ids.tolist(), written.logprobs.tolist(), tops


def _pairs(scores: Scores) -> Iterator[list[tuple[int, float]]]:
    """Yield the tokens of each position with their log-probs."""
    logprobs = np.maximum(scores.logprobs, _LEAST).tolist()
    for ids, values in zip(scores.ids.tolist(), logprobs, strict=True):
        yield list(zip(ids, values, strict=True))
