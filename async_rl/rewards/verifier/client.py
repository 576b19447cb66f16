"""Scores programs on the pool of verifiers: batches what comes together, routes to the least busy
server, retries elsewhere.

Takes programs from rollouts; waits for a server and its answer; gives verdicts, or
InfrastructureError after `verifiers.max_attempts` answers that were none, or DeadlineExceeded after
`verifiers.timeout_s`.  A server that cannot be reached or is full costs no attempt: the program
waits, with jitter, for another or for its return.  Woken by: answers, a change of the set of
servers, back-off timers. Invariants: no program is answered twice; none waits for the calls of slow
reward functions, which have streams of their own; nothing here blocks the event loop; every wait
ends at the program's deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import struct
import time
from collections import deque
from collections.abc import Sequence

import httpx
import msgspec

from async_rl.config.run import RunConfig
from async_rl.core.errors import (
    DeadlineExceeded,
    InfrastructureError,
    ProtocolError,
    RewardError,
    Unavailable,
)
from async_rl.core.types import CodeProblem, CodeTest, Verdict
from async_rl.observability.activity import Activity
from async_rl.rewards.verifier.protocol import (
    BatchLine,
    BatchRequest,
    ErrorReply,
    RewardSample,
    TestResult,
    VerifyRequest,
    VerifyResponse,
)

_MAX_BATCH = 32
_MAX_STREAMS = 4
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_LATENCIES_KEPT = 2048
_Item = tuple[VerifyRequest, asyncio.Future[VerifyResponse]]
_QUANTILE_EVERY = 64
"""Verdicts between two sortings of the latencies: the quantiles are read far more often than they
change.
"""
_HEADERS = {"content-type": "application/msgpack"}


class VerifierClient:
    """One per generator process. Servers come and go by `update_servers`. activity: told why nobody
    takes a program.
    """

    def __init__(self, config: RunConfig, token: str, activity: Activity | None = None) -> None:
        self._activity = activity or Activity()
        self._verifiers, self._sandbox, self._num_calls = (
            config.verifiers,
            config.sandbox,
            config.reward.concurrency,
        )
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(self._verifiers.timeout_s, pool=None)
        headers = {"authorization": f"Bearer {token}", **_HEADERS}
        self._http = httpx.AsyncClient(
            headers=headers, timeout=timeout, limits=limits, trust_env=False
        )
        self._servers: dict[str, _Server] = {}
        self._changed = asyncio.Event()
        self._random = random.Random()
        self._latencies: deque[float] = deque(maxlen=_LATENCIES_KEPT)
        self._ordered: list[float] = []
        self._num_since_ordered = 0
        self.num_retries = 0

    def update_servers(self, urls: Sequence[str]) -> None:
        """The servers there are now. Work on one that left goes on until it answers or breaks."""
        for url in set(self._servers) - set(urls):
            self._servers.pop(url).retire()
        for url in urls:
            if url not in self._servers:
                self._servers[url] = _Server(url, self._http, self._num_calls)
        self._changed.set()
        self._changed = asyncio.Event()

    async def verify(self, problem: CodeProblem, code: str) -> list[Verdict]:
        """One verdict per test run. Raises InfrastructureError when nobody could judge the program."""
        results = await self.test(
            code,
            problem.tests,
            problem.setup,
            stop_at_first_failure=self._sandbox.stop_at_first_failure,
        )
        return [result.verdict for result in results]

    async def test(
        self,
        code: str,
        tests: Sequence[CodeTest],
        setup: str = "",
        *,
        stop_at_first_failure: bool = False,
    ) -> list[TestResult]:
        """How each test ended, with its message. Raises InfrastructureError when nobody could judge
        the program.
        """
        response = await self.verify_request(
            VerifyRequest(
                code=code,
                tests=list(tests),
                setup=setup,
                timeout_s=self._sandbox.timeout_s,
                memory_mb=self._sandbox.memory_mb,
                output_kb=self._sandbox.output_kb,
                stop_at_first_failure=stop_at_first_failure,
            )
        )
        return response.tests

    async def ask_functions(
        self, functions: Sequence[str], sample: RewardSample
    ) -> dict[str, dict[str, float]]:
        """Of each function its parts. Raises RewardError if one failed, InfrastructureError when
        nobody could be asked.
        """
        response = await self.verify_request(
            VerifyRequest(code="", tests=[], functions=list(functions), sample=sample)
        )
        if response.failure:
            raise RewardError(response.failure)
        return response.scores

    async def verify_request(self, request: VerifyRequest) -> VerifyResponse:
        """The whole answer for one program. Raises InfrastructureError, ProtocolError if the
        servers refuse the request itself.
        """
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._verifiers.timeout_s):
                with contextlib.ExitStack() as told:
                    response = await self._try(request, told)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"no verdict within {self._verifiers.timeout_s:g} s from {len(self._servers)}"
                " verifiers; add verifiers.cells or raise verifiers.timeout_s"
            ) from error
        self._latencies.append(time.monotonic() - started)
        self._num_since_ordered += 1
        return response

    async def _try(self, request: VerifyRequest, told: contextlib.ExitStack) -> VerifyResponse:
        """The first answer that is a verdict. told: holds what the program waits for, once nobody
        took it.
        """
        attempts = 0
        is_told = False
        avoided: _Server | None = None
        while True:
            server = await self._least_busy(avoided)
            try:
                response = await server.submit(request)
                if response.verdict is not Verdict.INFRASTRUCTURE_ERROR or response.failure:
                    return response
                problem = response.tests[0].message if response.tests else "no reason given"
                attempts += 1
                await self._pause(_FIRST_PAUSE_S)
            except Unavailable as error:
                problem = str(error)
                if not is_told:
                    is_told = True
                    told.enter_context(self._activity.waiting(f"verdicts: {problem}"))
            except InfrastructureError as error:
                problem = str(error)
                attempts += 1
            if attempts >= self._verifiers.max_attempts:
                raise InfrastructureError(
                    f"no verifier could judge a program in {attempts} attempts; the last said:"
                    f" {problem}"
                )
            self.num_retries += 1
            avoided = server

    async def _least_busy(self, avoided: _Server | None) -> _Server:
        """The server with the fewest of our programs, among those that do not rest; waits while
        there is none.
        """
        while True:
            now = time.monotonic()
            awake = [server for server in self._servers.values() if server.rests_until <= now]
            if awake:
                return min(
                    (server for server in awake if server is not avoided or len(awake) == 1),
                    key=lambda server: server.num_open,
                )
            if self._servers:
                await self._pause(
                    min(server.rests_until for server in self._servers.values())
                    - now
                    + _FIRST_PAUSE_S
                )
            else:
                await self._changed.wait()

    async def _pause(self, longest_s: float) -> None:
        """A random pause, cut short when the set of servers changes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest_s * self._random.uniform(0.5, 1.0)):
                await self._changed.wait()

    def latency_quantile_s(self, quantile: float) -> float:
        """Quantile (0..1) of the time from a program's submission to its verdict, over the newest
        few thousand; 0 before the first.
        """
        if self._num_since_ordered >= _QUANTILE_EVERY or len(self._ordered) < min(
            len(self._latencies), _QUANTILE_EVERY
        ):
            self._ordered, self._num_since_ordered = sorted(self._latencies), 0
        ordered = self._ordered
        return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))] if ordered else 0.0

    @property
    def num_open(self) -> int:
        """Programs that wait for their verdict."""
        return sum(server.num_open for server in self._servers.values())

    async def close(self) -> None:
        """Give up what is in flight and close the connections."""
        for server in self._servers.values():
            await server.close()
        await self._http.aclose()


class _Lane:
    """Requests of one kind: sent in batches, at most `most` at a time, the rest waits here."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.waiting: deque[_Item] = deque()
        self.streams: set[asyncio.Task[None]] = set()


class _Server:
    """One verifier and what it has of ours. num_calls: of reward functions, at a time; a slow one
    must not make others wait.
    """

    def __init__(self, url: str, http: httpx.AsyncClient, num_calls: int) -> None:
        self._url, self._http = url, http
        self._programs, self._calls = _Lane(_MAX_STREAMS), _Lane(num_calls)
        self._is_flush_due = False
        self._rest_s = _FIRST_PAUSE_S
        self.rests_until = 0.0
        self.num_open = 0

    async def submit(self, request: VerifyRequest) -> VerifyResponse:
        """The server's answer. Raises Unavailable if it took nothing, InfrastructureError if it
        broke off, ProtocolError if it refused.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[VerifyResponse] = loop.create_future()
        lane = self._programs if request.sample is None else self._calls
        lane.waiting.append((request, future))
        self._schedule(loop)
        self.num_open += 1
        try:
            return await future
        finally:
            self.num_open -= 1

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        """Flush after the callbacks that are ready now, so that programs that finish together
        travel together.
        """
        if not self._is_flush_due:
            self._is_flush_due = True
            loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        for lane in (self._programs, self._calls):
            while lane.waiting and len(lane.streams) < lane.most:
                batch: list[_Item] = []
                while lane.waiting and len(batch) < _MAX_BATCH:
                    item = lane.waiting.popleft()
                    if not item[1].done():
                        batch.append(item)
                if batch:
                    task = asyncio.create_task(self._send(batch), name=f"verify on {self._url}")
                    lane.streams.add(task)
                    task.add_done_callback(functools.partial(self._on_stream_done, lane))

    def _on_stream_done(self, lane: _Lane, task: asyncio.Task[None]) -> None:
        lane.streams.discard(task)
        self._flush()

    def retire(self) -> None:
        """The server is gone: what has not been sent goes elsewhere."""
        for lane in (self._programs, self._calls):
            for _, future in lane.waiting:
                _fail(future, Unavailable(f"verifier {self._url} left"))
            lane.waiting.clear()

    async def close(self) -> None:
        """End every stream."""
        self.retire()
        streams = [*self._programs.streams, *self._calls.streams]
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)

    async def _send(self, batch: list[_Item]) -> None:
        """One batch, its answers handed out as they come. Every future is settled at the end."""
        futures = [future for _, future in batch]
        problem: Exception = InfrastructureError(f"verifier {self._url} ended its answer early")
        try:
            body = msgspec.msgpack.encode(BatchRequest(requests=[request for request, _ in batch]))
            async with self._http.stream(
                "POST", f"{self._url}/verify_batch", content=body
            ) as response:
                if response.status_code == 200:
                    await self._hand_out(response, futures)
                else:
                    problem = _refusal(self._url, response.status_code, await response.aread())
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            problem = Unavailable(f"verifier {self._url} cannot be reached: {error}")
        except httpx.HTTPError as error:
            problem = InfrastructureError(
                f"verifier {self._url} broke off: {type(error).__name__} {error}"
            )
        except (msgspec.DecodeError, IndexError) as error:
            problem = InfrastructureError(f"verifier {self._url} sent what is no answer: {error}")
        except (OverflowError, TypeError) as error:
            problem = ProtocolError(
                f"a test cannot travel: {error}; integers have at most 64 bits, values are plain"
            )
        finally:
            self._rest_if(any(not future.done() for future in futures))
            for future in futures:
                _fail(future, problem)

    def _rest_if(self, has_failed: bool) -> None:
        """A server that failed gets nothing for a while, twice as long each time; one that answered
        is awake.
        """
        if has_failed:
            self.rests_until = time.monotonic() + self._rest_s
            self._rest_s = min(2 * self._rest_s, _LONGEST_PAUSE_S)
        else:
            self.rests_until, self._rest_s = 0.0, _FIRST_PAUSE_S

    async def _hand_out(
        self, response: httpx.Response, futures: list[asyncio.Future[VerifyResponse]]
    ) -> None:
        buffer = bytearray()
        async for chunk in response.aiter_raw():
            buffer += chunk
            while len(buffer) >= 4 and len(buffer) >= 4 + (
                size := struct.unpack_from("<I", buffer)[0]
            ):
                line = msgspec.msgpack.decode(bytes(buffer[4 : 4 + size]), type=BatchLine)
                del buffer[: 4 + size]
                if not futures[line.index].done():
                    futures[line.index].set_result(line.response)


def _fail(future: asyncio.Future[VerifyResponse], problem: Exception) -> None:
    if not future.done():
        future.set_exception(problem)


def _refusal(url: str, status: int, body: bytes) -> Exception:
    try:
        said = msgspec.json.decode(body, type=ErrorReply).error
    except msgspec.DecodeError:
        said = body[:200].decode(errors="replace")
    if status in (429, 503):
        return Unavailable(f"verifier {url} takes nothing now: {said}")
    return ProtocolError(f"verifier {url} refused the request ({status}): {said}")
