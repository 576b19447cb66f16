"""The work of one verifier process, whoever speaks to it: admission, a place in the queue, judging,
counting, the drain.

Takes admitted programs; waits for a cell; gives verdicts.  Woken by: a program that ends.
Invariants: at most `queue_size` programs wait, the next one is refused; a program waits at most
`queue_timeout_s` and is then an infrastructure error, never a verdict; a cancelled program leaves
the queue, or its cell, at once; after `drain` nothing new is admitted. Used by `server.py`, which
speaks HTTP for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from async_rl.core.errors import InfrastructureError, RewardError, root_cause
from async_rl.core.types import Verdict
from async_rl.observability.activity import Activity
from async_rl.rewards.verifier.judging import Judge, Printed
from async_rl.rewards.verifier.protocol import (
    Health,
    RewardSample,
    VerifyRequest,
    VerifyResponse,
    infrastructure_response,
)
from async_rl.rewards.verifier.reward_process import RewardProcess
from async_rl.rewards.verifier.service_metrics import ServiceMetrics
from async_rl.sandbox.warm_cells import WarmCells

T = TypeVar("T")


class Refused(Exception):
    """A request that gets an error reply."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(kw_only=True)
class VerifierService:
    """See above. num_cells: programs that run side by side."""

    cells: WarmCells
    judge: Judge
    functions: RewardProcess | None = None
    queue_size: int
    num_cells: int
    queue_timeout_s: float
    activity: Activity = field(default_factory=Activity)
    num_done: int = 0
    num_infrastructure_errors: int = 0
    is_draining: bool = False
    num_admitted: int = 0
    num_running: int = 0
    metrics: ServiceMetrics = field(init=False)
    _free: asyncio.Semaphore = field(init=False)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.num_cells)
        self.metrics = ServiceMetrics(self.health)

    def admit(self, count: int) -> None:
        """Take `count` programs on, or raise Refused. A batch larger than the queue is taken by a
        verifier that has nothing else.
        """
        if self.is_draining:
            self.metrics.count_refused(503)
            raise Refused(503, "this verifier is shutting down; ask another one")
        if self.num_admitted and self.num_admitted + count > self.queue_size + self.num_cells:
            self.metrics.count_refused(429)
            raise Refused(
                429,
                f"{self.num_admitted} programs are here and {self.queue_size} may wait; come back"
                " later",
            )
        self.num_admitted += count
        self._idle.clear()

    def release(self, count: int) -> None:
        """Programs that were admitted are done, or given up."""
        self.num_admitted -= count
        if not self.num_admitted:
            self._idle.set()

    async def verify(self, request: VerifyRequest) -> VerifyResponse:
        """One admitted program or sample. An infrastructure failure is a response of its own, and
        so is that of a function.
        """
        if request.sample is not None:
            return await self._score(request.functions, request.sample)
        response = await self._judge(
            lambda: self.judge.verify(request),
            lambda error: infrastructure_response(str(error), self.cells.level),
        )
        self._count(response.verdict)
        return response

    async def _score(self, functions: Sequence[str], sample: RewardSample) -> VerifyResponse:
        """What the functions say; they take no cell, so that slow ones hold up no program."""
        started = time.monotonic()
        response = VerifyResponse(verdict=Verdict.PASS, tests=[], level=self.cells.level)
        try:
            if self.functions is None:
                raise RewardError(
                    "this verifier has no reward functions; start it with reward.fn or reward.fns"
                )
            with self.activity("scoring"):
                response = msgspec.structs.replace(
                    response, scores=await self.functions.score(functions, sample)
                )
        except* RewardError as errors:
            response = msgspec.structs.replace(
                response, verdict=Verdict.INFRASTRUCTURE_ERROR, failure=str(root_cause(errors))
            )
        finally:
            self.metrics.observe_s(time.monotonic() - started)
        self._count(response.verdict)
        return response

    async def run(self, request: VerifyRequest, stdin: str) -> Printed:
        """What one admitted program prints for one standard input; the request's tests are left
        aside.
        """
        printed = await self._judge(
            lambda: self.judge.run(request, stdin),
            lambda error: Printed(Verdict.INFRASTRUCTURE_ERROR, "", str(error), 0.0),
        )
        self._count(printed.verdict)
        return printed

    async def _judge(
        self, work: Callable[[], Awaitable[T]], failed: Callable[[InfrastructureError], T]
    ) -> T:
        started = time.monotonic()
        try:
            async with self._place():
                with self.activity("judging"):
                    return await work()
        except InfrastructureError as error:
            return failed(error)
        finally:
            self.metrics.observe_s(time.monotonic() - started)

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """One of the `num_cells` places, in order of arrival. Raises InfrastructureError after
        `queue_timeout_s` without one.
        """
        try:
            async with asyncio.timeout(self.queue_timeout_s if self._free.locked() else None):
                await self._free.acquire()
        except TimeoutError as error:
            raise InfrastructureError(
                f"no cell was free within {self.queue_timeout_s:g} s; add verifiers or cells"
            ) from error
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
            self._free.release()

    def _count(self, verdict: Verdict) -> None:
        self.num_done += 1
        self.num_infrastructure_errors += verdict is Verdict.INFRASTRUCTURE_ERROR
        self.metrics.count_verdict(verdict)

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new work and wait for what was admitted; False if some was left after `timeout_s`."""
        self.is_draining = True
        if not self.num_admitted:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def health(self) -> Health:
        """The state of this process."""
        return Health(
            status="draining" if self.is_draining else "ok",
            level=self.cells.level,
            landlock_abi=self.cells.hello.landlock_abi,
            has_seccomp=self.cells.hello.has_seccomp,
            cells=self.num_cells,
            queued=self.num_admitted - self.num_running,
            running=self.num_running,
            done=self.num_done,
            infrastructure_errors=self.num_infrastructure_errors,
            cells_replaced=self.judge.num_replaced,
            reasons=list(self.cells.reasons),
        )
