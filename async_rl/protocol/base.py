"""The base of all messages: requests, replies, failures.

Each request names its reply in the class attribute `Reply`; `wire/rpc.py` sends requests and checks
replies. Invariants: every request to the buffer may be sent twice without harm, because it is
recognised by its ids; no message names code.
"""

from __future__ import annotations

from async_rl.core.types import Value


class Message(Value, tag_field="type", tag=True):
    """Base of requests and replies."""


class Ok(Message):
    """Done."""


class Failure(Message):
    """The handler raised `error` (a name from errors.py) with `message`."""

    error: str
    message: str
