"""The entries of `generation.vllm.extra`, read. Pure.

config/checks/vllm_extra.py decides which entries may be passed on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from async_rl.config.generation import VllmConfig

TOOL_PARSER = "tool_call_parser"
"""The entry that no engine reads: the parser of tool calls, under its name in `vllm serve`."""


def extra_arguments(entries: Sequence[str]) -> dict[str, Any]:
    """Return the engine's arguments of `name=value` entries. A value that is not JSON is text."""
    pairs = (entry.partition("=") for entry in entries)
    return {name: _value(text) for name, _, text in pairs if name != TOOL_PARSER}


def tool_parser(entries: Sequence[str]) -> str:
    """Return the parser of tool calls; empty if the chat template decides."""
    pairs = (entry.partition("=") for entry in entries)
    return next((text for name, _, text in pairs if name == TOOL_PARSER), "")


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def num_workers(vllm: VllmConfig, tensor_parallel_size: int | None = None) -> int:
    """Return the number of devices of an engine: tensor parallel parts of each pipeline stage.

    tensor_parallel_size: replaces the value in `vllm`.
    """
    stages = extra_arguments(vllm.extra).get("pipeline_parallel_size", 1)
    parts = tensor_parallel_size or vllm.tensor_parallel_size
    # vLLM refuses text instead of a number; this function only must not raise.
    return parts * (stages if isinstance(stages, int) else 1)
