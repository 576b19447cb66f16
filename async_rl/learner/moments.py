"""AdamW's moments: on the device, or in host memory between steps and on the device piece by piece.

A step needs every moment once. While one piece is used, the next one arrives and the one before
leaves, each on a stream of its own and from page-locked memory, so a step takes about as long as
the copies in one direction, and at most three pieces are on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from async_rl.learner.sharding import local
from async_rl.planning.learner_memory import MOMENT_BYTES, PIECE_BYTES

_NAMES = ("exp_avg", "exp_avg_sq")


class Moments:
    """The moments of one optimizer's parameters.

    Offloaded, they are zeros in host memory from the beginning. Neither a first step nor a
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
        """Yield lists of parameters whose moments are on the device until the next is asked for.

        What a step changes in them is in host memory when the iterator has ended.
        """
        if not self._is_offloaded:
            yield from self._pieces
            return
        device = self._pieces[0][0].device
        module: Any = torch.get_device_module(device)
        arriving, leaving = module.Stream(), module.Stream()
        visits = (_Visit(self._states, piece, device, arriving) for piece in self._pieces)
        following = next(visits)
        ending: deque[_Visit] = deque()
        for piece in self._pieces:
            visit, following = following, next(visits, following)
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
    """Yield the parameters in pieces with at most PIECE_BYTES of moments, or of one parameter."""
    piece: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        own = MOMENT_BYTES * local(parameter).numel()
        if piece and size + own > PIECE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(parameter)
        size += own
    yield piece
