"""Tensors that move between a GPU and page-locked main memory while something else is computed.

A copy into ordinary memory blocks until the GPU has done all earlier work. A copy into page-locked
memory does not block, and has the full rate of the bus. Two buffers, or two pieces on the device,
suffice: one is used while the other one is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from async_rl.config.learner import MOMENTS_PIECE_BYTES
from async_rl.learner.sharding import local, one_ahead


class HostCopies:
    """Two buffers in page-locked memory, allocated at the first use and kept.

    largest_bytes: size of the largest tensor. Without a GPU the memory is ordinary, and every copy
    is complete immediately.
    """

    def __init__(self, largest_bytes: int) -> None:
        self._largest_bytes = largest_bytes
        self._buffers: list[Tensor] = []

    def copy(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield a copy of each tensor, which is valid until the next one is requested."""
        # The reader of a buffer has requested a later tensor, so it has finished.
        begun = (_Copy(tensor, self._buffer(i % 2)) for i, tensor in enumerate(tensors))
        yield from map(_Copy.result, one_ahead(begun))

    def _buffer(self, index: int) -> Tensor:
        # Ranks that only send their parts never come here.
        if index == len(self._buffers):
            self._buffers.append(
                torch.empty(
                    self._largest_bytes,
                    dtype=torch.uint8,
                    pin_memory=torch.cuda.is_available(),
                )
            )
        return self._buffers[index]


class _Copy:
    """One copy that may still be under way. It keeps the tensor that it reads."""

    def __init__(self, tensor: Tensor, buffer: Tensor) -> None:
        self._tensor = tensor
        size = tensor.numel() * tensor.element_size()
        self._target = buffer[:size].view(tensor.dtype).view(tensor.shape)
        self._target.copy_(tensor, non_blocking=True)
        self._done = torch.get_device_module(tensor.device).Event()
        self._done.record()

    def result(self) -> Tensor:
        """Return the complete copy."""
        self._done.synchronize()
        return self._target


_NAMES = ("exp_avg", "exp_avg_sq")
_MOMENT_BYTES = 8  # two float32 values for each parameter


class Moments:
    """The moments of one optimizer's parameters.

    Offloaded, they are zeros in host memory from the start. Neither a first step nor a
    checkpoint that is read allocates them on the device.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        *,
        is_offloaded: bool,
    ) -> None:
        self._states = optimizer.state
        self._is_offloaded = is_offloaded
        self._pieces = [list(parameters)]
        if not is_offloaded:
            return
        self._pieces = list(_divided(parameters))
        is_gpu = torch.cuda.is_available()
        for parameter in parameters:
            homes = {
                name: torch.zeros_like(parameter, device="cpu", pin_memory=is_gpu)
                for name in _NAMES
            }
            # AdamW counts the steps on the device.
            self._states[parameter] = {"step": torch.zeros((), device=parameter.device), **homes}

    def pieces(self) -> Iterator[list[nn.Parameter]]:
        """Yield lists of parameters whose moments are on the device until the next list is
        requested.

        The changes of a step are in host memory when the iterator is exhausted.
        """
        if not self._is_offloaded:
            yield from self._pieces
            return
        device = self._pieces[0][0].device
        module: Any = torch.get_device_module(device)
        arriving = module.Stream()
        leaving = module.Stream()
        visits = (_Visit(self._states, piece, device, arriving) for piece in self._pieces)
        following = next(visits)
        ending: deque[_Visit] = deque()
        for piece in self._pieces:
            visit = following
            following = next(visits, following)
            visit.copied.wait()
            yield piece
            visit.leave(leaving)
            ending.append(visit)
            if len(ending) > 1:
                # Its memory is free for the piece after the next.
                ending.popleft().copied.wait()
        ending.pop().copied.synchronize()

    def move(self, device: torch.device) -> None:
        """Move moments that are not offloaded."""
        if not self._is_offloaded:
            for state in self._states.values():
                for name in _NAMES:
                    state[name] = state[name].to(device)


class _Visit:
    """The moments of a piece on the device. `copied` is the event after the last copy."""

    def __init__(
        self, states: Any, parameters: Iterable[nn.Parameter], device: torch.device, stream: Any
    ) -> None:
        self._module: Any = torch.get_device_module(device)
        self._slots = [(states[p], name) for p in parameters for name in _NAMES]
        self._homes: list[Tensor] = [state[name] for state, name in self._slots]
        # Kept until they have been copied back.
        self._guests = [torch.empty_like(home, device=device) for home in self._homes]
        self.copied = self._copy(self._guests, stream)

    def leave(self, stream: Any) -> None:
        """Begin to copy the moments to where they came from."""
        self.copied = self._copy(self._homes, stream)

    def _copy(self, targets: Iterable[Tensor], stream: Any) -> Any:
        # After everything that was queued: the use of the moments, or of what had this memory.
        stream.wait_stream(self._module.current_stream())
        with self._module.stream(stream):
            for (state, name), target in zip(self._slots, targets, strict=True):
                state[name] = target.copy_(state[name], non_blocking=True)
            copied = self._module.Event()
            copied.record()
        return copied


def _divided(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield pieces with at most MOMENTS_PIECE_BYTES of moments, or with one larger parameter."""
    piece: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        own = _MOMENT_BYTES * local(parameter).numel()
        if piece and size + own > MOMENTS_PIECE_BYTES:
            yield piece
            piece = []
            size = 0
        piece.append(parameter)
        size += own
    yield piece
