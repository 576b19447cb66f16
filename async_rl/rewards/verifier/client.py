"""Scores programs on a pool of verifiers: routes each to the least busy server and retries
elsewhere.

Takes programs, waits for a server and its answer, and returns verdicts. Raises
InfrastructureError after MAX_ATTEMPTS attempts without a verdict, or DeadlineExceeded after a limit
(`timeouts.score_s` in a run). A server that cannot be reached or is full costs no attempt: the
program waits, with jitter, for another server or for its return. Woken by: answers, a change of the
set of servers, back-off timers. Invariants: a program gets one answer; nothing here blocks the
event loop; no wait is longer than the program's deadline.
"""

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Sequence

import httpx
import numpy as np

from async_rl.config.rewards import Extraction
from async_rl.config.run import RunConfig
from async_rl.core.errors import (
    DataError,
    DeadlineExceeded,
    InfrastructureError,
    RewardError,
    Unavailable,
)
from async_rl.core.types import CodeProblem, Verdict
from async_rl.observability.activity import Activity
from async_rl.rewards.responses import extract_code
from async_rl.rewards.verifier.connection import Connection
from async_rl.rewards.verifier.protocol import (
    FunctionScores,
    RewardSample,
    TestResult,
    VerifyRequest,
    VerifyResponse,
)

MAX_ATTEMPTS = 4
"""Calls for one program before the sample's attempt fails: each goes to another verifier if there
is one, and a program that breaks four is more likely at fault than the verifiers.
"""
# Enough for a 99th percentile of 20 programs, and sorted in a fraction of a millisecond.
_LATENCIES_KEPT = 2048
# A verifier that lost its cells needs this time to start new ones.
_SHORT_PAUSE_S = 0.05


class VerifierPool:
    """Servers that judge programs.

    token: of all servers; urls: the first servers; limit_s: of one answer; max_calls: calls of
    reward functions at a time on each server; activity: shows why no server takes a program.
    """

    def __init__(
        self,
        token: str,
        urls: Sequence[str] = (),
        *,
        limit_s: float,
        max_calls: int = 1,
        activity: Activity | None = None,
    ) -> None:
        self._activity = activity or Activity()
        self._limit_s = limit_s
        self._max_calls = max_calls
        self._http = httpx.AsyncClient(
            headers={
                "authorization": f"Bearer {token}".strip(),
                "content-type": "application/msgpack",
            },
            timeout=limit_s,
            # Unlimited, because the streams of each verifier are limited.
            limits=httpx.Limits(),
            # A proxy of the environment must not see programs and the token.
            trust_env=False,
        )
        self._servers: dict[str, Connection] = {}
        self._changed = asyncio.Event()
        self._latencies: deque[float] = deque(maxlen=_LATENCIES_KEPT)
        self.update_servers(urls)

    def update_servers(self, urls: Sequence[str]) -> None:
        """Set the servers. Requests on a server that left continue until it answers or breaks."""
        for url in set(self._servers) - set(urls):
            self._servers.pop(url).retire()
        for url in urls:
            if url not in self._servers:
                self._servers[url] = Connection(url, self._http, self._max_calls)
        # A new event for the next change, so that no waiter has to clear the set event.
        self._changed.set()
        self._changed = asyncio.Event()

    async def answer(self, request: VerifyRequest) -> VerifyResponse:
        """The answer of a verifier.

        Raises InfrastructureError if none could judge, RewardError if a function failed,
        ProtocolError if the request was refused.
        """
        started = time.monotonic()
        reason = "none"
        num_failed = 0
        avoided: Connection | None = None
        try:
            async with asyncio.timeout(self._limit_s), contextlib.AsyncExitStack() as wait:
                while num_failed < MAX_ATTEMPTS:
                    server = await self._least_busy(avoided)
                    try:
                        response = await server.submit(request)
                        if response.verdict is not Verdict.INFRASTRUCTURE_ERROR or response.failure:
                            break
                        raise InfrastructureError(response.tests[0].message)
                    except Unavailable as error:
                        reason = str(error)
                        # The newest reason, which replaces the reason of another server.
                        await wait.aclose()
                        wait.enter_context(self._activity.waiting(f"verdicts: {reason}"))
                    except InfrastructureError as error:
                        reason = str(error)
                        num_failed += 1
                        await self._pause(_SHORT_PAUSE_S)
                    # The next attempt goes elsewhere if it can: this server may fail again.
                    avoided = server
                else:
                    raise InfrastructureError(
                        f"no verifier could judge a program in {MAX_ATTEMPTS} attempts; the last"
                        f" reason: {reason}"
                    )
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"no verdict within {self._limit_s:g} s from {len(self._servers)} verifiers; the"
                f" last reason: {reason}; add verifiers.cells or raise timeouts.group_s"
            ) from error
        self._latencies.append(time.monotonic() - started)
        if response.failure:
            raise (RewardError if request.sample else InfrastructureError)(response.failure)
        return response

    async def share_of_tests(
        self, problem: CodeProblem, response: str, extraction: Extraction
    ) -> float:
        """The share of the tests of a problem that a response passes; 0 without a program.

        Raises DataError if a test is broken, else as `answer`.
        """
        code: str | None = response
        # An answer in words is compared with the whole response.
        if not problem.wants_words:
            code = extract_code(response, extraction, problem.language)
        if code is None:
            return 0.0
        request = VerifyRequest(
            code=code,
            tests=problem.tests,
            language=problem.language,
            setup=problem.setup,
            stop_at_first_failure=False,
        )
        results = (await self.answer(request)).tests
        for test in results:
            if test.verdict is Verdict.TEST_ERROR:
                raise DataError(f"a test is broken: {test.message}")
        return sum(test.verdict is Verdict.PASS for test in results) / len(problem.tests)

    async def _least_busy(self, avoided: Connection | None) -> Connection:
        """The server with the fewest of our programs that is not paused; waits while there is none.

        avoided: chosen only if it is the last one.
        """
        while True:
            now = time.monotonic()
            if not self._servers:
                await self._changed.wait()
                continue
            server = min(
                self._servers.values(),
                key=lambda server: (
                    max(server.paused_until, now),
                    server is avoided,
                    server.num_open,
                ),
            )
            if server.paused_until <= now:
                return server
            await self._pause(server.paused_until - now + _SHORT_PAUSE_S)

    async def _pause(self, longest_s: float) -> None:
        """A random pause, cut short when the set of servers changes."""
        with contextlib.suppress(TimeoutError):
            # Random, so that the programs that a full server refused do not return together.
            async with asyncio.timeout(longest_s * random.uniform(0.5, 1.0)):
                await self._changed.wait()

    def latency_quantile_s(self, quantile: float) -> float:
        """Quantile (0..1) of the time from submission to verdict, over the newest programs.

        0 before the first verdict.
        """
        return float(np.quantile(self._latencies, quantile)) if self._latencies else 0.0

    async def close(self) -> None:
        """Give up all requests and close the connections."""
        for server in self._servers.values():
            await server.close()
        await self._http.aclose()


class VerifierClient(VerifierPool):
    """The verifiers of a run, one client per generator process."""

    def __init__(self, config: RunConfig, token: str, activity: Activity | None = None) -> None:
        super().__init__(
            token,
            limit_s=config.timeouts.score_s,
            max_calls=config.reward.concurrency,
            activity=activity,
        )
        self._sandbox = config.sandbox
        # A reward that needs every test to pass is decided by the first that fails.
        self._stops = config.reward.mode == "all_or_nothing"

    async def verify(
        self, problem: CodeProblem, code: str, *, stops: bool = True
    ) -> list[TestResult]:
        """One result per test that ran. stops: at the first failure, if the reward needs every
        test. Raises InfrastructureError if no verifier could judge.
        """
        request = VerifyRequest(
            code=code,
            tests=problem.tests,
            language=problem.language,
            setup=problem.setup,
            timeout_s=self._sandbox.timeout_s,
            memory_mb=self._sandbox.memory_mb,
            stop_at_first_failure=stops and self._stops,
        )
        return (await self.answer(request)).tests

    async def ask_functions(self, functions: Sequence[str], sample: RewardSample) -> FunctionScores:
        """The parts of each function's score.

        Raises RewardError if a function failed, InfrastructureError if no verifier could run it.
        """
        request = VerifyRequest(code="", tests=[], functions=list(functions), sample=sample)
        return (await self.answer(request)).scores
