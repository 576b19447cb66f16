"""The work of one verifier process: admission, the queue for cells, judging, counting, the drain.

Takes admitted programs, waits for a cell, and returns verdicts. Woken by: a program that finishes.
Invariants: at most `queue_size` programs wait, and the next one is refused; a program waits at most
`queue_timeout_s` and is then an infrastructure error, never a verdict; a cancelled program leaves
the queue, or its cell, immediately; a program that runs for longer than `SLOW_S` moves to a spare
place while one is free, so that a few programs that sleep or loop do not delay the quick ones;
after `drain` nothing new is admitted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from async_rl.core.errors import InfrastructureError, RewardError, Unsupported, root_cause
from async_rl.core.types import Verdict
from async_rl.observability.activity import Activity
from async_rl.rewards.verifier.judging import Judge
from async_rl.rewards.verifier.outcomes import Ran
from async_rl.rewards.verifier.protocol import (
    Health,
    RewardSample,
    VerifyRequest,
    VerifyResponse,
    infrastructure_response,
)
from async_rl.rewards.verifier.reward_process import RewardProcess
from async_rl.sandbox.cells import Cells

T = TypeVar("T")
SLOW_S = 0.5
"""Most programs take a hundredth of this; one that uses its limit up takes ten times as long."""

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_GAUGES: dict[str, tuple[str, Callable[[Health], float]]] = {
    "queued": ("programs that wait for a cell", lambda health: health.queued),
    "running": ("programs in a cell", lambda health: health.running),
    "cells": ("programs that may run side by side", lambda health: health.cells),
    "level": (
        "strength of the jail: 1 namespaces, 2 Landlock and seccomp, 3 nothing",
        lambda health: health.level,
    ),
    "draining": (
        "1 while the verifier finishes and refuses new work",
        lambda health: health.status == "draining",
    ),
    "cells_replaced": (
        "cells that broke and were replaced since the start",
        lambda health: health.cells_replaced,
    ),
}


class Refused(Exception):
    """A request that gets an error reply with this HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ServiceMetrics:
    """Counters of one verifier. health: returns its present state."""

    def __init__(self, health: Callable[[], Health]) -> None:
        self._registry = CollectorRegistry()
        verdicts = Counter(
            "verifier_verdicts", "programs judged, by verdict", ["verdict"], registry=self._registry
        )
        self._verdicts = {verdict: verdicts.labels(verdict.value) for verdict in Verdict}
        self._refused = Counter(
            "verifier_refused",
            "requests refused, by HTTP status",
            ["status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "verifier_seconds",
            "seconds from a program's admission to its verdict",
            buckets=_SECONDS,
            registry=self._registry,
        )
        for name, (meaning, read) in _GAUGES.items():
            Gauge(f"verifier_{name}", meaning, registry=self._registry).set_function(
                lambda read=read: float(read(health()))  # type: ignore[misc]
            )

    def count_verdict(self, verdict: Verdict) -> None:
        """Count one judged program."""
        self._verdicts[verdict].inc()

    def count_refused(self, status: int) -> None:
        """Count one refused request."""
        self._refused.labels(str(status)).inc()

    def observe_s(self, seconds: float) -> None:
        """Record the time of one program, its wait included."""
        self._seconds.observe(seconds)

    def text(self) -> bytes:
        """All metrics in Prometheus' text form."""
        return generate_latest(self._registry)


class VerifierService:
    """One verifier, independent of the protocol.

    functions: None if the configuration has no reward functions; num_cells: programs that run at a
    time; num_spare: slow programs that may run next to them, in additional cells.
    """

    def __init__(
        self,
        *,
        cells: Cells,
        judge: Judge,
        queue_size: int,
        num_cells: int,
        queue_timeout_s: float,
        functions: RewardProcess | None = None,
        activity: Activity | None = None,
        num_spare: int = 0,
    ) -> None:
        self.cells, self.judge, self._functions = cells, judge, functions
        self.queue_size, self.num_cells = queue_size, num_cells
        self.queue_timeout_s = queue_timeout_s
        self._activity = activity or Activity()
        self._free = asyncio.Semaphore(num_cells)
        self._num_spare = num_spare
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False
        self.num_done = 0
        self.num_infrastructure_errors = 0
        self.num_admitted = 0
        self.num_running = 0
        self.metrics = ServiceMetrics(self.health)

    async def require(self, request: VerifyRequest) -> None:
        """Refuse a program that cannot be judged on this machine."""
        try:
            await self.judge.require(request)
        except Unsupported as error:
            place = "language" if request.is_command else "tests"
            raise Refused(400, f"{error} - at `$.{place}`") from error

    def admit(self, count: int) -> None:
        """Admit `count` programs, or raise Refused.

        An idle verifier admits even a batch that is larger than the queue, because it could never
        fit otherwise.
        """
        if self._is_draining:
            self.metrics.count_refused(503)
            raise Refused(503, "this verifier is shutting down; use another one")
        if self.num_admitted and self.num_admitted + count > self.queue_size + self.num_cells:
            self.metrics.count_refused(429)
            raise Refused(
                429,
                f"the verifier has {self.num_admitted} programs, and its queue holds"
                f" {self.queue_size}; try again later",
            )
        # No await lies between the check and this line, so requests that arrive together cannot
        # pass the limit together.
        self.num_admitted += count
        self._idle.clear()

    def release(self, count: int) -> None:
        """Count admitted programs as done or given up."""
        self.num_admitted -= count
        if not self.num_admitted:
            self._idle.set()

    async def verify(self, request: VerifyRequest) -> VerifyResponse:
        """Judge one admitted program, or score one sample.

        Infrastructure failures and failures of functions are responses too.
        """
        # A sample for reward functions needs no jail: functions run in their own process, outside
        # the cells.
        if request.sample is None:
            response = await self._judge(
                lambda: self.judge.verify(request),
                lambda error: infrastructure_response(
                    str(error), self.cells.level, is_final=isinstance(error, Unsupported)
                ),
            )
        else:
            response = await self._score(request.functions, request.sample)
        self._count(response.verdict)
        return response

    async def _score(self, names: list[str], sample: RewardSample) -> VerifyResponse:
        """Call reward functions. They take no cell, so that slow ones delay no program."""
        started = time.monotonic()
        response = VerifyResponse(verdict=Verdict.PASS, tests=[], level=self.cells.level)
        try:
            if self._functions is None:
                raise RewardError(
                    "this verifier has no reward functions; start it with reward.terms"
                )
            with self._activity("scoring"):
                scores = await self._functions.score(names, sample)
            response = msgspec.structs.replace(response, scores=scores)
        # The group of functions raises an ExceptionGroup; the response names its first cause.
        except* RewardError as errors:
            failure, verdict = str(root_cause(errors)), Verdict.INFRASTRUCTURE_ERROR
            response = msgspec.structs.replace(response, verdict=verdict, failure=failure)
        finally:
            self.metrics.observe_s(time.monotonic() - started)
        return response

    async def run(self, request: VerifyRequest, stdin: str) -> Ran:
        """Run one admitted program on one standard input; the request's tests are not used."""
        ran = await self._judge(
            lambda: self.judge.run(request, stdin),
            lambda error: Ran(verdict=Verdict.INFRASTRUCTURE_ERROR, output=b"", message=str(error)),
        )
        self._count(ran.verdict)
        return ran

    async def _judge(
        self, work: Callable[[], Awaitable[T]], failed: Callable[[InfrastructureError], T]
    ) -> T:
        started = time.monotonic()
        try:
            async with self._cell():
                with self._activity("judging"):
                    return await work()
        except InfrastructureError as error:
            return failed(error)
        finally:
            self.metrics.observe_s(time.monotonic() - started)

    @asynccontextmanager
    async def _cell(self) -> AsyncIterator[None]:
        """The right to use one cell, in order of arrival.

        Raises InfrastructureError after `queue_timeout_s`.
        """
        try:
            # Without a deadline if a cell is free: a timer costs more than the semaphore.
            async with asyncio.timeout(self.queue_timeout_s if self._free.locked() else None):
                await self._free.acquire()
        except TimeoutError as error:
            raise InfrastructureError(
                f"no cell was free within {self.queue_timeout_s:g} s; add verifiers or cells"
            ) from error
        has_moved = False

        def move() -> None:
            nonlocal has_moved
            # Without a spare place the program keeps its place: the cells are then all in use.
            if self._num_spare:
                self._num_spare, has_moved = self._num_spare - 1, True
                self._free.release()

        self.num_running += 1
        slow = asyncio.get_running_loop().call_later(SLOW_S, move)
        try:
            yield
        finally:
            slow.cancel()
            self.num_running -= 1
            # Its place was released when the program moved; a second release would let more than
            # `num_cells` quick programs run.
            if has_moved:
                self._num_spare += 1
            else:
                self._free.release()

    def _count(self, verdict: Verdict) -> None:
        self.num_done += 1
        if verdict is Verdict.INFRASTRUCTURE_ERROR:
            self.num_infrastructure_errors += 1
        self.metrics.count_verdict(verdict)

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new work and wait for admitted programs; False if some are left in the end."""
        self._is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def health(self) -> Health:
        """The state of this process."""
        hello = self.cells.hello
        return Health(
            status="draining" if self._is_draining else "ok",
            level=hello.level,
            landlock_abi=hello.landlock_abi,
            has_seccomp=hello.has_seccomp,
            cells=self.num_cells,
            queued=self.num_admitted - self.num_running,
            running=self.num_running,
            done=self.num_done,
            infrastructure_errors=self.num_infrastructure_errors,
            cells_replaced=self.judge.num_replaced,
            reasons=list(self.cells.reasons),
        )
