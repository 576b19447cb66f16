"""The work of a verifier: its cells, admission, the queue for cells, judging, counting, the drain.

Takes admitted programs, waits for a cell, and returns verdicts. Woken by: a program that finishes.
Invariants: at most `queue_size` programs wait, and the next one is refused; a program waits at most
`queue_timeout_s` and is then an infrastructure error, never a verdict; a cancelled program leaves
the queue, or its cell, immediately; a program that runs for longer than `SLOW_S` moves to a spare
place while one is free, so that a few programs that sleep or loop do not delay the quick ones;
after `drain` nothing new is admitted.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections import Counter
from collections.abc import AsyncIterator

from starlette.exceptions import HTTPException

from async_rl.config.run import RunConfig
from async_rl.core.errors import (
    ConfigError,
    InfrastructureError,
    RewardError,
    Unsupported,
    root_cause,
)
from async_rl.core.types import Verdict
from async_rl.observability.activity import Activity
from async_rl.rewards.verifier.judging import Judge
from async_rl.rewards.verifier.protocol import (
    SLOW_S,
    FunctionScores,
    Health,
    RewardSample,
    TestResult,
    VerifyRequest,
    VerifyResponse,
)
from async_rl.rewards.verifier.reward_process import RewardProcess
from async_rl.sandbox.cells import Cells, Unsafe

QUEUE_SIZE = 4096
"""Programs that wait at most; the next is refused with 429. Eight generators with 64 groups of 8
can have this number in flight; more than usual, because some trainers count a refusal as a wrong
answer.
"""


@contextlib.asynccontextmanager
async def open_service(
    config: RunConfig, activity: Activity | None = None, *, has_functions: bool = False
) -> AsyncIterator[VerifierService]:
    """A service with warm cells. has_functions: load the functions of the configuration.

    Raises ConfigError if no jail works here, with the reason of each level, or if a function cannot
    be loaded.
    """
    # The jobs of eight cells need more descriptors than the usual limit of a shell.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # As many again for slow programs, which would otherwise hold up the quick ones.
    num_cells = 2 * config.verifiers.cells
    async with contextlib.AsyncExitStack() as stack:
        try:
            cells = await Cells.start(num_cells, allow_unsafe=config.sandbox.allow_unsafe)
        except Unsafe as error:
            raise ConfigError(str(error)) from error
        await stack.enter_async_context(cells)
        judge = Judge(
            cells, config.sandbox, num_others=num_cells, num_containers=config.verifiers.cells
        )
        stack.push_async_callback(judge.close)
        functions = RewardProcess(config.reward, timeouts=config.timeouts)
        stack.push_async_callback(functions.close)
        if has_functions:
            await functions.start()
        yield VerifierService(
            functions=functions,
            cells=cells,
            judge=judge,
            queue_size=QUEUE_SIZE,
            num_cells=config.verifiers.cells,
            num_spare=config.verifiers.cells,
            queue_timeout_s=config.timeouts.score_s,
            activity=activity,
        )


class VerifierService:
    """One verifier, independent of the protocol.

    functions: of the configuration; num_cells: programs that run at a time; num_spare: slow
    programs that may run next to them, in additional cells.
    """

    def __init__(
        self,
        *,
        cells: Cells,
        judge: Judge,
        queue_size: int,
        num_cells: int,
        queue_timeout_s: float,
        functions: RewardProcess,
        activity: Activity | None = None,
        num_spare: int = 0,
    ) -> None:
        self.cells = cells
        self.judge = judge
        self._functions = functions
        self.queue_size = queue_size
        self.num_cells = num_cells
        self.queue_timeout_s = queue_timeout_s
        self._activity = activity or Activity()
        self._free = asyncio.Semaphore(num_cells)
        self._num_spare = num_spare
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False
        self.num_admitted = 0
        self.num_running = 0
        self.num_refused = 0
        self.num_judged: Counter[Verdict] = Counter()

    async def require(self, request: VerifyRequest) -> None:
        """Refuse a program that cannot be judged on this machine."""
        try:
            await self.judge.require(request)
        except Unsupported as error:
            place = "language" if request.is_command else "tests"
            raise HTTPException(400, f"{error} - at `$.{place}`") from error

    def admit(self, count: int) -> None:
        """Admit `count` programs, or raise HTTPException.

        An idle verifier admits even a batch that is larger than the queue, because it could never
        fit otherwise.
        """
        if self._is_draining:
            raise HTTPException(503, "this verifier is shutting down; use another one")
        if self.num_admitted and self.num_admitted + count > self.queue_size + self.num_cells:
            self.num_refused += 1
            raise HTTPException(
                429,
                f"the verifier has {self.num_admitted} programs, and its queue holds"
                f" {self.queue_size}; try again later",
            )
        # No await lies between the check and this line, so requests that arrive together cannot
        # pass the limit together.
        self.num_admitted += count
        self._idle.clear()

    def release(self) -> None:
        """Count an admitted program as done or given up."""
        self.num_admitted -= 1
        if not self.num_admitted:
            self._idle.set()

    async def verify(self, request: VerifyRequest) -> VerifyResponse:
        """Judge one admitted program, or score one sample.

        Infrastructure failures and failures of functions are responses too.
        """
        # A sample for reward functions needs no jail: functions run in their own process.
        if request.sample is not None:
            response = await self._score(request.functions, request.sample)
        else:
            try:
                async with self._cell():
                    response = await self.judge.verify(request)
            except InfrastructureError as error:
                result = _unjudged(error)
                response = VerifyResponse(
                    verdict=result.verdict,
                    # Clients show the message of the first test that failed.
                    tests=[result],
                    level=self.cells.level,
                    # Another try is useless.
                    failure=result.message if isinstance(error, Unsupported) else "",
                )
        self.num_judged[response.verdict] += 1
        return response

    async def _score(self, names: list[str], sample: RewardSample) -> VerifyResponse:
        """Call reward functions. They take no cell, so that slow ones delay no program."""
        scores: FunctionScores = {}
        failure = ""
        try:
            with self._activity("scoring"):
                scores = await self._functions.score(names, sample)
        # The group of functions raises an ExceptionGroup; the response names its first cause.
        except* RewardError as errors:
            failure = str(root_cause(errors))
        return VerifyResponse(
            verdict=Verdict.INFRASTRUCTURE_ERROR if failure else Verdict.PASS,
            tests=[],
            level=self.cells.level,
            scores=scores,
            failure=failure,
        )

    async def run(self, request: VerifyRequest) -> tuple[TestResult, bytes]:
        """Run one admitted program on the standard input of its only test, and do not compare."""
        try:
            async with self._cell():
                ran = await self.judge.run(request)
        except InfrastructureError as error:
            ran = _unjudged(error), b""
        self.num_judged[ran[0].verdict] += 1
        return ran

    @contextlib.asynccontextmanager
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
                self._num_spare -= 1
                has_moved = True
                self._free.release()

        self.num_running += 1
        slow = asyncio.get_running_loop().call_later(SLOW_S, move)
        try:
            with self._activity("judging"):
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

    async def drain(self) -> bool:
        """Refuse new work and wait for admitted programs; False if some are left in the end."""
        self._is_draining = True
        try:
            async with asyncio.timeout(self.queue_timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def health(self) -> Health:
        """The state of this process."""
        return Health(
            status="draining" if self._is_draining else "ok",
            level=self.cells.level,
            cells=self.num_cells,
            queued=self.num_admitted - self.num_running,
            running=self.num_running,
            verdicts=self.num_judged,
            refused=self.num_refused,
            cells_replaced=self.judge.num_replaced,
            reasons=list(self.cells.reasons),
        )


def _unjudged(error: InfrastructureError) -> TestResult:
    return TestResult(verdict=Verdict.INFRASTRUCTURE_ERROR, message=str(error))
