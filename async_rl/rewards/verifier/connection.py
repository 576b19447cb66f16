"""One verifier as its client sees it: sends requests in batches and hands out the answers.

Takes requests, waits for a free stream, and returns answers. Woken by: a request, the end of a
stream. Invariants: the end of a stream settles all its requests; programs do not wait for calls of
slow reward functions, which use other streams.
"""

import asyncio
import time
from collections import deque

import httpx
import msgspec

from async_rl.core.errors import InfrastructureError, ProtocolError, Unavailable
from async_rl.rewards.verifier.protocol import (
    BatchLine,
    VerifyRequest,
    VerifyResponse,
)

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


class _Lane:
    """Requests of one kind, sent in batches over at most `max_streams` streams at a time."""

    def __init__(self, max_streams: int) -> None:
        self.max_streams = max_streams
        self.waiting: deque[_Item] = deque()
        self.streams: set[asyncio.Task[None]] = set()


class Connection:
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
