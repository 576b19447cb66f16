"""Scores of responses by a running verifier, for code that belongs to another trainer.

A row has its tests in any of the layouts of `async_rl/data/problems.py`; the program is extracted
from the response as in a run. Waits while the server is full or restarts, for `timeout_s`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import msgspec

from async_rl.core.errors import ConfigError, DataError, InfrastructureError
from async_rl.core.languages import PYTHON, Language
from async_rl.core.types import AnswerTest, CodeTest, Verdict
from async_rl.data.problems import read_problem
from async_rl.rewards.text_process import TextProcess
from async_rl.rewards.verifier.protocol import TestResult, VerifyRequest, VerifyResponse

_PAUSE_S = 0.2
# 429: the queue of the verifier is full; 502 to 504: it restarts behind a proxy.
_RETRIED = frozenset({429, 502, 503, 504})


class Grader:
    """The verifier at a URL. cpu_s: limit of each test; None for the limit of the server."""

    def __init__(
        self, url: str | None = None, *, cpu_s: float | None = None, timeout_s: float = 300
    ) -> None:
        address = url or os.environ.get("ASYNC_RL_VERIFIER_URL")
        if not address:
            raise ConfigError(
                "ASYNC_RL_VERIFIER_URL is not set; start `async-rl verifier` and set it to"
                " http://host:port/token/SECRET"
            )
        self._url = address.rstrip("/")
        self._cpu_s = cpu_s
        self._timeout_s = timeout_s

    def scores(self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
        """As `scores_async`, for callers without an event loop in their thread."""
        return asyncio.run(self.scores_async(responses, rows))

    async def scores_async(
        self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> list[float]:
        """The share of passed tests of each response.

        Raises DataError if a row has no usable tests or a broken one, InfrastructureError if a
        response could not be judged within timeout_s.
        """
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._score(response, row), name="score a response")
                for response, row in zip(responses, rows, strict=True)
            ]
        return [task.result() for task in tasks]

    async def _score(self, response: str, row: Mapping[str, Any]) -> float:
        problem, _ = read_problem("the row of a response", dict(row))
        # An answer in words is compared with the whole response.
        wants_words = any(isinstance(test, AnswerTest) for test in problem.tests)
        extractor = TextProcess()
        try:
            code = (
                response
                if wants_words
                else await extractor.code(response, "auto", problem.language)
            )
        finally:
            await extractor.close()
        if code is None:
            return 0.0
        results = await self.results(code, problem.tests, problem.setup, language=problem.language)
        num_passed = sum(result.verdict is Verdict.PASS for result in results)
        # A program that does not compile has one result for all its tests.
        return num_passed / max(len(results), len(problem.tests))

    async def results(
        self,
        code: str,
        tests: Sequence[CodeTest],
        setup: str = "",
        *,
        language: Language = PYTHON,
        stop: bool = False,
    ) -> list[TestResult]:
        """One result per test that ran. Raises InfrastructureError, ConfigError, DataError."""
        request = VerifyRequest(
            code=code,
            tests=list(tests),
            language=language,
            setup=setup,
            timeout_s=self._cpu_s,
            stop_at_first_failure=stop,
        )
        body = msgspec.json.encode(request)
        problem = ""
        deadline = time.monotonic() + self._timeout_s
        # Not through a proxy, which could not reach a verifier on this machine.
        async with httpx.AsyncClient(timeout=self._timeout_s, trust_env=False) as http:
            while time.monotonic() < deadline:
                try:
                    reply = await http.post(f"{self._url}/verify", content=body)
                    if reply.status_code == 200:
                        answer = msgspec.json.decode(reply.content, type=VerifyResponse)
                        for test in answer.tests:
                            if test.verdict is Verdict.TEST_ERROR:
                                raise DataError(f"a test is broken: {test.message}")
                        # Says nothing about the program, so it is judged again.
                        if answer.verdict is not Verdict.INFRASTRUCTURE_ERROR:
                            return answer.tests
                        problem = answer.tests[0].message
                    elif reply.status_code in _RETRIED:
                        problem = reply.text[:200]
                    else:
                        raise ConfigError(f"the verifier refused a program: {reply.text[:300]}")
                except httpx.HTTPError as error:
                    problem = f"{type(error).__name__} {error}"
                await asyncio.sleep(_PAUSE_S)
        raise InfrastructureError(f"no verdict within {self._timeout_s:g} s: {problem}")
