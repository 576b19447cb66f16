"""Main memory for copies of tensors, page-locked if there is a GPU: for checkpoints, and for models
of a GPU that leave the device.

A copy into ordinary memory blocks until the GPU has done all earlier work. A copy into page-locked
memory does not block, and has the full rate of the bus. New memory of either kind costs several
times the copy, so it is kept.
"""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from async_rl.learner.sharding import local, reshard


class Copies:
    """Copies of tensors by name, whose memory is allocated at the first copy and kept."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Tensor] = {}

    def copy(self, name: Hashable, tensor: Tensor) -> Tensor:
        """Start to copy a tensor into the memory of this name; `wait` returns once it is done."""
        kept = self._kept.get(name)
        if kept is None:
            has_gpu = torch.cuda.is_available()
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=has_gpu)
            self._kept[name] = kept
        return kept.copy_(tensor, non_blocking=True)

    def wait(self) -> None:
        """Return once all copies are complete."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class Owned(NamedTuple):
    """A moment of a parameter: the state that has it, and its name there."""

    parameter: Tensor
    state: dict[str, Tensor]
    name: str


class Resting:
    """Models and moments while they are off the device."""

    def __init__(self) -> None:
        self._copies = Copies()

    @torch.no_grad()
    def leave(self, models: Sequence[nn.Module], moments: Sequence[Owned]) -> None:
        """Move parameters, buffers and moments to the memory."""
        parameters: dict[Tensor, Tensor] = {}
        for model in models:
            # A gathered copy hides the shard, and would stay on the device.
            reshard(model)
            parameters |= {p: self._copies.copy(p, local(p)) for p in model.parameters()}
        copies = [self._copies.copy((p, name), local(state[name])) for p, state, name in moments]
        # Before anything reads the copies: FSDP pads uneven shards as soon as they are set.
        self._copies.wait()

        def resting(tensor: Tensor) -> Tensor:
            if tensor in parameters:
                return _sharded(parameters[tensor], tensor)
            return tensor.to("cpu")

        for model in models:
            # As Module.to, with memory that exists already.
            module_to: Any = model._apply
            module_to(resting)
        for copy, (_, state, name) in zip(copies, moments, strict=True):
            state[name] = _sharded(copy, state[name])

    def enter(
        self, models: Sequence[nn.Module], moments: Sequence[Owned], device: torch.device
    ) -> None:
        """Copy all back, in the order of the current stream; the memory stays allocated."""
        for model in models:
            model.to(device, non_blocking=True)
        for _, state, name in moments:
            state[name] = state[name].to(device, non_blocking=True)


def _sharded(copy: Tensor, like: Tensor) -> Tensor:
    """Return the copy, sharded as the tensor."""
    if not isinstance(like, DTensor):
        return copy
    # Its own memory is never touched, so the system gives none.
    sharded = torch.empty_like(like, device="cpu")
    local(sharded).data = copy
    return sharded
