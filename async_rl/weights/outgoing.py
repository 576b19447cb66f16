"""The learner's end of a broadcast over NCCL: pieces of the block on their way through its GPU,
while the GPU trains.

A copy from ordinary memory, or on the default stream, waits for everything that training has
enqueued there: each piece would wait for the rest of a step. So the block is page-locked, and
copies and NCCL follow a stream of their own, with a high priority.
Invariant: two pieces are under way at most. While NCCL sends one, the next one is copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from async_rl.core.frozen import frozen


@frozen
class _Slot:
    """device: uint8 [piece_bytes]; copied: the event after the newest copy to it."""

    device: torch.Tensor
    copied: Any


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
            self._slots = [
                _Slot(
                    device=torch.empty(piece_bytes, dtype=torch.uint8, device=device),
                    copied=cuda.Event(),
                )
                for _ in range(2)
            ]
        self._turns = itertools.cycle(self._slots)
        self._newest = self._slots[0]

    @contextmanager
    def in_use(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """Make the stream the current one of this thread, for NCCL too, and yield `stage`."""
        with self._cuda.stream(self._stream):
            yield self.stage

    def stage(self, source: torch.Tensor) -> torch.Tensor:
        """uint8 [N], page-locked -> a copy on the GPU, complete for work of the current stream.

        The piece before the previous one must be sent: this one gets its buffer.
        """
        self._newest = slot = next(self._turns)
        flat = slot.device[: source.numel()].copy_(source, non_blocking=True)
        slot.copied.record(self._cuda.current_stream(flat.device))
        return flat

    @property
    def is_copying(self) -> bool:
        """The newest piece has not reached the GPU, so NCCL waits for the learner."""
        return not self._newest.copied.query()
