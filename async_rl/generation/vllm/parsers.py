"""vLLM's parsers of tool calls, by their names in `vllm serve --tool-call-parser`."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager
from vllm.tokenizers.hf import get_cached_tokenizer

from async_rl.core.errors import ConfigError
from async_rl.protocol.generator import CallsRead, ReadCalls

_HARMONY = "openai"
"""The parser of gpt-oss, whose answers vLLM reads by token ids."""


class Parsers:
    """The parsers for the answers of one model."""

    def __init__(self, tokenizer: Any) -> None:
        # Parsers ask for the whole vocabulary each time they are made.
        self._tokenizer = get_cached_tokenizer(tokenizer)
        self._class_of = functools.cache(self._open)

    def _open(self, name: str) -> Any:
        try:
            return ParserManager.get_parser(
                tool_parser_name=name,
                enable_auto_tools=True,
                is_harmony=name == _HARMONY,
                tokenizer=self._tokenizer,
            )
        except TypeError as error:
            raise ConfigError(
                f"vLLM's parser {name} cannot read this model's tool calls: {error}; name another"
                ' one by generation.vllm.extra=["tool_call_parser=NAME"]'
            ) from error

    def read(self, request: ReadCalls) -> CallsRead:
        """Raises ConfigError if the parser, or the tools of the request, do not suit vLLM."""
        opened = self._class_of(request.parser)
        try:
            asked = ChatCompletionRequest(
                messages=[{"role": "user", "content": ""}],
                tools=msgspec.json.decode(request.tools),
                tool_choice="auto",
            )
        except ValueError as error:
            raise ConfigError(f"vLLM refuses the tools of the request: {error}") from error
        _, content, calls = opened(self._tokenizer, asked.tools).parse(
            request.text,
            asked,
            enable_auto_tools=True,
            model_output_token_ids=request.token_ids.tolist(),
        )
        read = [(call.id or "", call.name, call.arguments) for call in calls or ()]
        return CallsRead(content=content or "", calls=read)
