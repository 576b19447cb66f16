"""Reads the tool calls of answers with vLLM's parsers, which the first answer imports: they take
12 MB in a process that has imported vLLM's engine, and 410 MB in another one.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from typing import Any

from async_rl.core.errors import AsyncRLError, ConfigError
from async_rl.protocol.generator import CallsRead, ReadCalls

_log = logging.getLogger(__name__)


class ToolCalls:
    """The tool calls in the answers of one model."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._parsers: Any = None

    async def read(self, request: ReadCalls) -> CallsRead:
        """Return the calls of an answer; none if the parser fails. Raises ConfigError if no answer
        can be read: vLLM is missing, or its parser does not suit the model or the tools.
        """
        loaded = await _outcome(self._load)
        if isinstance(loaded, BaseException):
            raise ConfigError(
                f"this model's tool calls are read by vLLM, which cannot be imported: {loaded}"
            ) from loaded
        # The policy's text; a parser that fails on it must neither end the generator nor have
        # another answer drawn, which would prefer texts that it can read.
        found = await _outcome(functools.partial(loaded.read, request))
        if isinstance(found, AsyncRLError):
            raise found
        if isinstance(found, BaseException):
            _log.warning("the parser %s failed on an answer", request.parser, exc_info=found)
            return CallsRead(content="", calls=[])
        calls: CallsRead = found
        return calls

    def _load(self) -> Any:
        if self._parsers is None:
            from async_rl.generation.vllm.parsers import Parsers

            self._parsers = Parsers(self._tokenizer)
        return self._parsers


async def _outcome(work: Callable[[], Any]) -> Any:
    """The result of blocking work, or its exception."""
    return (await asyncio.gather(asyncio.to_thread(work), return_exceptions=True))[0]
