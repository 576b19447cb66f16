"""The common parts of other systems' requests: their base, and a program with its tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from async_rl.core.errors import DataError
from async_rl.core.languages import LANGUAGES, PYTHON, language_of
from async_rl.core.types import CodeTest
from async_rl.rewards.verifier.protocol import (
    MAX_MEMORY_MB,
    MAX_TIMEOUT_S,
    MIN_MEMORY_MB,
    VerifyRequest,
)
from async_rl.rewards.verifier.service import Refused

Timeout = Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)]


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """Base of requests and answers: unknown fields are ignored."""


def memory_mb_of(given: float) -> int | None:
    """The memory limit of a request within the server's bounds; None below 1 MB: its default."""
    return min(max(int(given), MIN_MEMORY_MB), MAX_MEMORY_MB) if given >= 1 else None


def program_request(
    code: str,
    tests: Callable[[], list[CodeTest]],
    *,
    language: str = PYTHON,
    timeout_s: float | None,
    memory_mb: int | None = None,
    stop_at_first_failure: bool | None = None,
) -> VerifyRequest:
    """A request with these tests. Raises Refused if they are malformed or there are none, or if the
    language is unknown.
    """
    known = language_of(language)
    if known is None:
        raise Refused(
            400,
            f"bad request: language {language[:40]!r} is not one of {', '.join(LANGUAGES)} - at"
            " `$.language`",
        )
    try:
        given = tests()
    except DataError as error:
        raise Refused(400, f"bad request: {error}") from error
    if not given:
        raise Refused(
            400, "bad request: no tests, so every program would pass - at `$.problem.input_output`"
        )
    try:
        return VerifyRequest(
            code=code,
            tests=given,
            language=known,
            timeout_s=timeout_s,
            memory_mb=memory_mb,
            stop_at_first_failure=stop_at_first_failure,
        )
    except ValueError as error:
        raise Refused(400, f"bad request: {error}") from error
