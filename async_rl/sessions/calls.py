"""A call of the policy and its answer, in the gateway's own terms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from async_rl.core.frozen import frozen
from async_rl.protocol.generator import Completed
from async_rl.sessions.record import Context, History


@frozen
class Call:
    """A request for one answer.

    max_tokens: None = as many as fit. stops: texts before which the answer ends. in_pieces: the
    agent reads along. start: the text that the context already has of the answer. prompt: the
    text before it, if the call has no messages. tools: those that the answer may call.
    """

    context: Context
    history: History = ()
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    in_pieces: bool = False
    begin: str = ""
    prompt: str = ""
    tools: Sequence[Any] = ()


@frozen
class Answer:
    """An answer to the agent. text: without the stop text. why: stop, length or tool_calls."""

    number: int
    text: str
    message: dict[str, Any]
    written: Completed
    why: str
    num_prompt_tokens: int
