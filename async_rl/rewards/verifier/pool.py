"""Programs judged by a pool of verifiers: each goes to the least busy server, in a batch, and
elsewhere if that server fails.

Takes requests, waits for a server and its answer, and returns answers. Raises InfrastructureError
after MAX_ATTEMPTS attempts without a verdict, or DeadlineExceeded after a limit (`timeouts.score_s`
in a run). A server that cannot be reached or is full costs no attempt: the program waits, with
jitter, for another server or for its return. Woken by: answers, the end of a stream, a change of
the set of servers, back-off timers. Invariants: a program gets one answer; nothing here blocks the
event loop; no wait is longer than the program's deadline; the end of a stream settles all its
requests; programs do not wait for calls of slow reward functions, which use other streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Sequence

import httpx
import msgspec
import numpy as np

from async_rl.core.errors import (
    DeadlineExceeded,
    InfrastructureError,
    ProtocolError,
    RewardError,
    Unavailable,
)
from async_rl.core.types import Verdict
from async_rl.observability.activity import Activity
from async_rl.rewards.verifier.protocol import BatchLine, VerifyRequest, VerifyResponse

MAX_ATTEMPTS = 4
"""Calls for one program before the sample's attempt fails: each goes to another verifier if there
is one, and a program that breaks four is more likely at fault than the verifiers.
"""
# Enough for a 99th percentile of 20 programs, and sorted in a fraction of a millisecond.
_LATENCIES_KEPT = 2048
# A verifier that lost its cells needs this time to start new ones.
_SHORT_PAUSE_S = 0.05
# A verifier that restarts is back after seconds, and a full queue lasts for that long.
_PAUSE_S = 0.5
# A broken connection costs all its programs an attempt, so a batch is not larger.
_MAX_BATCH = 32
# A server refuses a body of 64 MB: a batch ends here, unless its last program alone is larger.
_BATCH_BYTES = 8 << 20
# With one stream a slow program would hold the stream while quick programs wait for their turn.
_MAX_PROGRAM_STREAMS = 4
_DECODER = msgspec.json.Decoder(BatchLine)
_Waiting = asyncio.Future[VerifyResponse]
_Item = tuple[msgspec.Raw, _Waiting]


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
        self._servers: dict[str, _Connection] = {}
        self._changed = asyncio.Event()
        self._latencies: deque[float] = deque(maxlen=_LATENCIES_KEPT)
        self.update_servers(urls)

    def update_servers(self, urls: Sequence[str]) -> None:
        """Set the servers. Requests on a server that left continue until it answers or breaks."""
        for url in set(self._servers) - set(urls):
            self._servers.pop(url).retire()
        for url in urls:
            if url not in self._servers:
                self._servers[url] = _Connection(url, self._http, self._max_calls)
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
        avoided: _Connection | None = None
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

    async def _least_busy(self, avoided: _Connection | None) -> _Connection:
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


class _Lane:
    """Requests of one kind, sent in batches over at most `max_streams` streams at a time."""

    def __init__(self, max_streams: int) -> None:
        self.max_streams = max_streams
        self.waiting: deque[_Item] = deque()
        self.streams: set[asyncio.Task[None]] = set()


class _Connection:
    """The requests of this client on one verifier.

    max_calls: calls of reward functions at a time.
    """

    def __init__(self, url: str, http: httpx.AsyncClient, max_calls: int) -> None:
        self._url = url
        self._http = http
        self._programs = _Lane(_MAX_PROGRAM_STREAMS)
        self._calls = _Lane(max_calls)
        self.paused_until = 0.0
        self.num_open = 0

    async def submit(self, request: VerifyRequest) -> VerifyResponse:
        """The server's answer.

        Raises Unavailable if the server did not take the request, InfrastructureError if the
        connection broke, ProtocolError if the server refused the request.
        """
        try:
            # Not JSON, which has no infinity and no numbers as keys. Here, so that a request that
            # cannot be encoded fails alone.
            encoded = msgspec.Raw(msgspec.msgpack.encode(request))
        except (OverflowError, TypeError) as error:
            raise ProtocolError(
                f"a test cannot be encoded: {error}; integers have at most 64 bits, values are"
                " plain"
            ) from error
        future = _Waiting()
        lane = self._programs if request.sample is None else self._calls
        lane.waiting.append((encoded, future))
        # A stream starts after the callbacks that are ready now, so the first one that starts takes
        # the requests of all programs that finish together.
        if len(lane.streams) < lane.max_streams:
            lane.streams.add(asyncio.create_task(self._stream(lane), name=f"verify on {self._url}"))
        self.num_open += 1
        try:
            return await future
        finally:
            self.num_open -= 1

    async def _stream(self, lane: _Lane) -> None:
        try:
            while lane.waiting:
                batch: list[_Item] = []
                num_bytes = 0
                while lane.waiting and len(batch) < _MAX_BATCH and num_bytes < _BATCH_BYTES:
                    batch.append(lane.waiting.popleft())
                    num_bytes += memoryview(batch[-1][0]).nbytes
                # A request may have been given up while it waited.
                wanted = [item for item in batch if not item[1].done()]
                if wanted:
                    await self._send(wanted)
        finally:
            # No await since the last look at `waiting`, so no request is left without a stream.
            lane.streams.discard(asyncio.current_task())

    def retire(self) -> None:
        """The server has left: requests that were not sent raise Unavailable."""
        for lane in (self._programs, self._calls):
            for _, future in lane.waiting:
                _fail(future, Unavailable(f"verifier {self._url} left"))
            lane.waiting.clear()

    async def close(self) -> None:
        """End every stream."""
        self.retire()
        streams = self._programs.streams | self._calls.streams
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)

    async def _send(self, batch: list[_Item]) -> None:
        """Send one batch and hand out its answers as they come. Settles every future."""
        futures = [future for _, future in batch]
        problem: Exception = InfrastructureError(f"verifier {self._url} closed its answer early")
        try:
            body = msgspec.msgpack.encode({"requests": [encoded for encoded, _ in batch]})
            async with self._http.stream(
                "POST", f"{self._url}/verify_batch", content=body
            ) as response:
                if response.status_code == 200:
                    await _hand_out(response, futures)
                else:
                    status = response.status_code
                    reason = (await response.aread())[:200].decode(errors="replace")
                    problem = ProtocolError(
                        f"verifier {self._url} refused the request ({status}): {reason}"
                    )
                    # 429: its queue is full; 502 to 504: it restarts behind a proxy.
                    if status in (429, 502, 503, 504):
                        problem = Unavailable(
                            f"verifier {self._url} takes no request now: {reason}"
                        )
        # Nothing was sent, so these programs can go elsewhere without costing an attempt.
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            problem = Unavailable(f"verifier {self._url} cannot be reached: {error}")
        except httpx.HTTPError as error:
            problem = InfrastructureError(
                f"the connection to verifier {self._url} broke: {type(error).__name__} {error}"
            )
        except (msgspec.DecodeError, IndexError) as error:
            problem = InfrastructureError(f"verifier {self._url} sent a malformed answer: {error}")
        finally:
            # A server that fails is paused, until it answers again.
            is_answered = all(future.done() for future in futures)
            self.paused_until = 0.0 if is_answered else time.monotonic() + _PAUSE_S
            for future in futures:
                _fail(future, problem)


async def _hand_out(response: httpx.Response, futures: list[_Waiting]) -> None:
    rest = b""
    async for piece in response.aiter_raw():
        # A piece may end inside a line. Not httpx's lines, which also end at U+2028.
        *lines, rest = (rest + piece).split(b"\n")
        for line in map(_DECODER.decode, lines):
            future = futures[line.index]
            # The caller may have given up.
            if not future.done():
                future.set_result(line.response)


def _fail(future: _Waiting, problem: Exception) -> None:
    if not future.done():
        future.set_exception(problem)
