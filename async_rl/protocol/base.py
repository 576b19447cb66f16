"""The base of all messages: requests, replies, failures.

Each request names the type of its reply in the class attribute `Reply`; `wire/rpc.py` sends
requests and checks replies.

Invariants
- The buffer recognizes a request by its ids, so sending it twice does no harm.
- No message names code.
"""

from __future__ import annotations

from async_rl.core.value import Value


class Message(Value, tag_field="type", tag=True):
    """Base of requests and replies."""


class Ok(Message):
    """The request succeeded and has no other result."""


class Failure(Message):
    """The handler raised `error` (the name of a class in core/errors.py) with `message`."""

    error: str
    message: str
