"""Reads the tool calls and the thinking of answers with vLLM's parsers, by their names in
`vllm serve --tool-call-parser` and `--reasoning-parser`.

The first answer imports vLLM: that takes 12 MB in a process that has imported vLLM's engine, and
410 MB in another one.
"""

import asyncio
import functools
import logging
from typing import Any

import msgspec

from async_rl.core.errors import AsyncRLError, ConfigError
from async_rl.protocol.generator import CallsRead, ReadCalls

_HARMONY = ("openai", "openai_gptoss")
"""The parsers of gpt-oss, whose answers vLLM reads by token ids."""
_log = logging.getLogger(__name__)


class ToolCalls:
    """The tool calls in the answers of one model."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._class_of = functools.cache(self._open)

    async def read(self, request: ReadCalls) -> CallsRead:
        """Return the calls of an answer; none if the parser fails. Raises ConfigError if no answer
        can be read: vLLM is missing, or its parser does not suit the model or the tools.
        """
        # In a thread: the import and a long answer take longer than the engine's steps.
        reading = asyncio.to_thread(self._read, request)
        # The policy's text; a parser that fails on it must neither end the generator nor have
        # another answer drawn, which would prefer texts that the parser can read.
        [found] = await asyncio.gather(reading, return_exceptions=True)
        if isinstance(found, AsyncRLError):
            raise found
        if isinstance(found, BaseException):
            _log.warning("the parser %s failed on an answer", request.parser, exc_info=found)
            return CallsRead(content="", calls=[])
        return found

    def _read(self, request: ReadCalls) -> CallsRead:
        try:
            from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        except ImportError as error:
            raise ConfigError(
                f"this model's tool calls are read by vLLM, which cannot be imported: {error}"
            ) from error
        parser = self._class_of(request.parser, request.thinking)
        tools = msgspec.json.decode(request.tools)
        try:
            chat = ChatCompletionRequest(
                messages=[{"role": "user", "content": ""}],
                # vLLM refuses an empty list.
                **({"tools": tools, "tool_choice": "auto"} if tools else {}),
            )
        except ValueError as error:
            raise ConfigError(f"vLLM refuses the tools of the request: {error}") from error
        thinking, content, calls = parser(chat.tools).parse(
            request.text,
            chat,
            enable_auto_tools=bool(request.parser),
            model_output_token_ids=request.token_ids.tolist(),
        )
        read = [(call.id or "", call.name, call.arguments) for call in calls or ()]
        return CallsRead(content=content or "", calls=read, thinking=thinking or "")

    def _open(self, name: str, thinking: str) -> Any:
        """Return the parser as a function of the tools."""
        from vllm.parser.parser_manager import ParserManager
        from vllm.tokenizers.hf import get_cached_tokenizer

        # Parsers read the whole vocabulary each time they are made.
        tokenizer = get_cached_tokenizer(self._tokenizer)
        try:
            opened = ParserManager.get_parser(
                tool_parser_name=name,
                reasoning_parser_name=thinking,
                enable_auto_tools=bool(name),
                is_harmony=not {name, thinking}.isdisjoint(_HARMONY),
                tokenizer=tokenizer,
            )
        except TypeError as error:
            raise ConfigError(
                f"vLLM's parsers {name} {thinking} cannot read this model's answers: {error}; name"
                ' others by "tool_call_parser=NAME" and "reasoning_parser=NAME" in'
                " generation.vllm.extra"
            ) from error
        return functools.partial(opened, tokenizer)
