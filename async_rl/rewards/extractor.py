"""Code extraction that does not delay its event loop.

Parsing holds the interpreter's lock, so a thread would not help: a response with much fenced text
is parsed in a child process (`extraction_child.py`), which starts with the first such response.
"""

from __future__ import annotations

from async_rl.core.errors import InfrastructureError
from async_rl.core.languages import PYTHON, Language
from async_rl.rewards import extraction_child
from async_rl.rewards.extraction import (
    Block,
    Extraction,
    complete_blocks,
    fenced_blocks,
    program_of,
)
from async_rl.rewards.extraction_child import ExtractionQuery, ExtractionResult
from async_rl.rewards.verifier.child_process import Respondent

_MAX_INLINE_CHARS = 5_000
"""Less fenced text than this parses in 10 ms at most, and most responses have less."""


class Extractor:
    """Finds the programs in responses."""

    def __init__(self) -> None:
        self._child = Respondent(extraction_child.__name__, ExtractionResult)

    async def code(
        self, response: str, mode: Extraction, language: Language = PYTHON
    ) -> str | None:
        """The program in `response`; None if a block is needed and none is usable."""
        blocks = [] if mode == "whole" else await self.blocks(response, language)
        return program_of(response, blocks, mode)

    async def blocks(self, response: str, language: Language = PYTHON) -> list[Block]:
        """The usable fenced blocks, in order. Raises InfrastructureError if the child exited."""
        fenced = fenced_blocks(response, language)
        if language != PYTHON:
            return fenced
        if sum(len(block.code) for block in fenced) <= _MAX_INLINE_CHARS:
            return complete_blocks(response)
        result = await self._child.ask(ExtractionQuery(response=response))
        if isinstance(result, int):
            raise InfrastructureError(
                f"the process that extracts programs ended with exit code {result}"
            )
        return result.blocks

    async def close(self) -> None:
        """End the child."""
        await self._child.close()
