"""The base of all messages (requests, replies, failures), and the fingerprint of their fields.

`Request.Reply` is the type of the reply; `wire/rpc.py` sends requests and checks replies.

Invariants
- The buffer recognizes a request by its ids, so sending it twice does no harm.
- No message names code.
"""

import functools
import hashlib
import importlib
import pkgutil
from typing import ClassVar

from async_rl import protocol
from async_rl.core.frozen import Value

_PACKAGES = ("async_rl.core.", f"{protocol.__name__}.")
_DIGITS = 12


class Message(Value, tag_field="type", tag=True):
    """Base of requests and replies."""


class Ok(Message):
    """The request succeeded and has no other result."""


class Request(Message):
    """Base of the messages that are answered, by `Ok` unless they name another reply."""

    Reply: ClassVar[type] = Ok


class Failure(Message):
    """The handler raised `error` (the name of a class in core/errors.py) with `message`."""

    error: str
    message: str


@functools.cache
def message_schema() -> str:
    """Return a hash of the names, fields and types of all messages and of the values in them.

    Processes of different versions recognise each other by it: it follows from the code, so nobody
    has to remember to raise a version number.
    """
    for module in pkgutil.iter_modules(protocol.__path__, f"{protocol.__name__}."):
        importlib.import_module(module.name)
    text = "\n".join(sorted(_described(Value)))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def _described(kind: type[Value]) -> list[str]:
    """Return a line per class below this one that crosses a socket."""
    lines = []
    for child in kind.__subclasses__():
        # Other packages have values too, but not every process imports them, so they would make the
        # hash differ between processes of one version.
        if child.__module__.startswith(_PACKAGES):
            lines.append(f"{child.__name__} {child.__annotations__}")
        lines += _described(child)
    return lines
