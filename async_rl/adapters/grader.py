"""Scores of responses by a running verifier, for code that belongs to another trainer.

A row has its tests in any of the layouts of `async_rl/data/problems.py`; the program is extracted
from the response as in a run. Waits while the server is full or restarts, for `timeout_s`.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

from async_rl.core.errors import ConfigError, at
from async_rl.data.problems import read_problem
from async_rl.rewards.functions import share_of_tests
from async_rl.rewards.verifier.pool import VerifierPool


async def scores_of(
    responses: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    *,
    url: str | None = None,
    timeout_s: float = 300,
) -> list[float]:
    """The share of passed tests of each response.

    url: of the verifier, as in ASYNC_RL_VERIFIER_URL.  Raises ConfigError if there is none,
    DataError if a row has no usable tests or a broken one, ProtocolError if the server refused a
    request, InfrastructureError if a response could not be judged within timeout_s or in
    `MAX_ATTEMPTS` attempts (verifier/pool.py).
    """
    address = url or os.environ.get("ASYNC_RL_VERIFIER_URL")
    if not address:
        raise ConfigError(
            "ASYNC_RL_VERIFIER_URL is not set; start `async-rl verifier` and set it to"
            " http://host:port/token/SECRET"
        )
    # Apart: errors and tasks name the address, and must not name the token.
    server, _, token = address.rstrip("/").partition("/token/")
    verifier = VerifierPool(token, [server], limit_s=timeout_s)
    try:
        async with asyncio.TaskGroup() as group:
            scores = [
                group.create_task(_score(verifier, response, row))
                for response, row in zip(responses, rows, strict=True)
            ]
    finally:
        await verifier.close()
    return [score.result() for score in scores]


async def _score(verifier: VerifierPool, response: str, row: Mapping[str, Any]) -> float:
    with at("the row of a response"):
        problem, _ = read_problem(dict(row))
    return await share_of_tests(verifier, problem, response, "auto")
