"""One rank of the learner that sends pieces of a broadcast, as weights/broadcast.py describes it,
in a thread of its own next to training.

Every sending rank has the whole block in its memory: rank 0 writes it, and the other ranks of its
machine map it. Each sends every n-th piece and receives the pieces in between, which it discards.
Over NCCL pieces pass through the rank's GPU, which trains. A copy from ordinary memory, or on the
default stream, waits for everything that training has enqueued there: each piece would wait for the
rest of a step. So the block is page-locked, and copies and NCCL follow a stream of their own, with
a high priority.
Invariant: two pieces are under way at most. While NCCL sends one, the next one is copied.
"""

import asyncio
import functools
import itertools
import mmap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from msgspec.structs import replace

from async_rl.core.errors import BroadcastBroken, SenderLate
from async_rl.core.sequences import one_ahead
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.weights import Manifest, MapBlock, Mapped, SendPart, StopSending
from async_rl.weights.block import SharedTensorsReader
from async_rl.weights.communicator import Communicator, begin, device_name
from async_rl.weights.receiving import Seated, buckets, senders
from async_rl.wire.rpc import Handler

T = TypeVar("T")


class SendingRank(Seated):
    """host: the address of this process in the run.

    late_s: the longest time for which the other ranks waited for this one in the last load.
    piece_s: the slowest piece of that load.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        host: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(device)
        self._host = host
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        self._outgoing: Outgoing | None = None
        self._mapped: SharedTensorsReader | None = None
        # The newest one of rank 0.
        self._request: SendPart | None = None
        self._sent: asyncio.Future[None]
        self.late_s = self.piece_s = 0.0

    @property
    def handlers(self) -> dict[type[Message], Handler]:
        """The calls of rank 0 to every other rank."""
        return {MapBlock: self._map, SendPart: self._send_part, StopSending: self._stop}

    async def _map(self, request: MapBlock) -> Mapped:
        await self._in_thread(functools.partial(self._map_once, request.manifest))
        return Mapped(device=device_name(self._device))

    def _map_once(self, manifest: Manifest) -> None:
        # Rank 0 sends a call again if the answer is late.
        if self._mapped is None:
            self._mapped = SharedTensorsReader(manifest, mmap.ACCESS_WRITE)
            self._mapped.page_lock(torch.cuda if self._device.type == "cuda" else None)

    async def _send_part(self, request: SendPart) -> Ok:
        assert self._mapped is not None, "rank 0 asks only ranks that have mapped the block"
        # As above.
        if request != self._request:
            self._request = request
            self._sent = self.send(request, self._mapped.content, begun_s=self._clock())
        await self._sent
        return Ok()

    async def _stop(self, request: StopSending) -> Ok:
        self.cancel()
        return Ok()

    def send(
        self, request: SendPart, block: torch.Tensor, *, begun_s: float
    ) -> asyncio.Future[None]:
        """Take part in a whole broadcast.

        block: uint8, the bytes that the manifest, or the difference of the seat, describes.
        begun_s: from when on the other ranks wait. The future raises BroadcastBroken, or SenderLate
        if this rank is the cause.
        """
        return self._in_thread(functools.partial(self._send, request, block, begun_s))

    def _in_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _send(self, request: SendPart, block: torch.Tensor, begun_s: float) -> None:
        seat = request.seat
        self.late_s = self._clock() - begun_s
        self.piece_s = 0.0
        try:
            own = replace(seat, host=self._host)
            communicator = self.joined(own, request.rank)
            self.send_pieces(communicator, request, block)
        except BroadcastBroken as error:
            if self._outgoing is not None and self._outgoing.is_copying:
                self.late_s = max(self.late_s, seat.timeout_s)
            self.leave()
            # Near the limit it may have been passed for a member, whose clock started earlier.
            if self.late_s > seat.timeout_s / 2:
                raise SenderLate(
                    f"it let the generators wait for {self.late_s:.1f} s, and they wait for"
                    f" {seat.timeout_s:g} s; they try again and wait for twice as long. Free its"
                    " processor and memory, or raise timeouts.start_s"
                ) from error
            raise

    def send_pieces(
        self, communicator: Communicator, request: SendPart, block: torch.Tensor
    ) -> None:
        """Take part in the broadcast of all pieces; see `send`."""
        seat = request.seat
        sent = request.manifest if seat.difference is None else seat.difference.manifest
        way: Outgoing | Unstaged = Unstaged()
        if communicator.device.type != "cpu":
            if self._outgoing is None:
                piece_bytes = min(seat.bucket_bytes, request.manifest.total_bytes)
                self._outgoing = Outgoing(communicator.device, piece_bytes=piece_bytes)
            way = self._outgoing
        ready_s = self._clock()

        def begun() -> Iterator[tuple[float, Callable[[], None]]]:
            nonlocal ready_s
            ranks = senders(seat)
            for first, last in _pieces(sent, seat.bucket_bytes):
                sender = next(ranks)
                is_own = sender == request.rank
                flat = way.stage(block[first:last]) if is_own else way.room(last - first)
                begun_s = self._clock()
                self.late_s = max(self.late_s, begun_s - ready_s)
                yield begun_s, begin(communicator, flat, sender, timeout_s=seat.timeout_s)
                ready_s = self._clock()

        with way.in_use():
            for begun_s, finish in one_ahead(begun()):
                finish()
                self.piece_s = max(self.piece_s, self._clock() - begun_s)

    def close(self, *then: Callable[[], None]) -> None:
        """End a broadcast, close the connections, free the block if it is mapped, and call `then`
        in the thread.
        """
        self.cancel()
        for each in (self.leave, self._unmap, *then):
            self._thread.submit(each)
        # A member that hangs would delay the learner's exit until the deadline of its load.
        self._thread.shutdown(wait=False)

    def _unmap(self) -> None:
        if self._mapped is not None:
            self._mapped.close()


class Outgoing:
    """Two buffers on the GPU, kept between versions.

    piece_bytes: size of the largest piece. cuda: torch.cuda, or a recorder of its calls.
    """

    def __init__(self, device: torch.device, *, piece_bytes: int, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        # The lowest number is the highest priority: the copies start before kernels of a step that
        # are enqueued already.
        self._stream = cuda.Stream(device, priority=-1)
        with cuda.stream(self._stream):
            # Here: torch's cache then gives no memory that another stream may still use.
            buffers = [torch.empty(piece_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._turns = itertools.cycle(buffers)
        # After the newest copy to one of them.
        self._copied = cuda.Event()

    def in_use(self) -> AbstractContextManager[object]:
        """Make the stream the current one of this thread, for NCCL too."""
        stream: AbstractContextManager[object] = self._cuda.stream(self._stream)
        return stream

    def stage(self, source: torch.Tensor) -> torch.Tensor:
        """uint8 [N], page-locked -> a copy on the GPU, complete for work of the current stream."""
        flat = self.room(source.numel()).copy_(source, non_blocking=True)
        self._copied.record(self._cuda.current_stream(flat.device))
        return flat

    def room(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 [num_bytes] on the GPU, for a piece that another rank sends.

        The piece before the previous one must be sent: this one gets its buffer.
        """
        buffer: torch.Tensor = next(self._turns)
        return buffer[:num_bytes]

    @property
    def is_copying(self) -> bool:
        """The newest piece has not reached the GPU, so NCCL waits for this rank."""
        return not self._copied.query()


class Unstaged:
    """The same between main memories, where pieces are sent from the block."""

    def in_use(self) -> AbstractContextManager[object]:
        """Do nothing."""
        return nullcontext()

    def stage(self, source: torch.Tensor) -> torch.Tensor:
        """Return the source."""
        return source

    def room(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 [num_bytes]."""
        return torch.empty(num_bytes, dtype=torch.uint8)


def _pieces(manifest: Manifest, most_bytes: int) -> Iterator[tuple[int, int]]:
    for bucket in buckets(manifest, most_bytes):
        for first in range(bucket.begin, bucket.end, most_bytes):
            yield first, min(first + most_bytes, bucket.end)
