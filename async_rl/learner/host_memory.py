"""Page-locked main memory for models of a GPU that leave the device.

A copy into ordinary memory blocks until the GPU has done all earlier work. A copy into page-locked
memory does not block, and has the full rate of the bus. New memory of either kind costs more than
the copy, so it is kept.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from async_rl.learner.sharding import local, reshard


class Owned(NamedTuple):
    """A moment of a parameter: the state that has it, and its name there."""

    parameter: Tensor
    state: dict[str, Tensor]
    name: str


class Resting:
    """The memory of models and moments while they are off the device, allocated at their first
    leave and kept.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Tensor, str], Tensor] = {}

    @torch.no_grad()
    def leave(self, models: Sequence[nn.Module], moments: Sequence[Owned]) -> None:
        """Move parameters, buffers and moments to the memory."""
        for model in models:
            # A gathered copy hides the shard, and would stay on the device.
            reshard(model)
            for parameter in model.parameters():
                self._begin(parameter, "", parameter)
        for owner, state, name in moments:
            self._begin(owner, name, state[name])
        if torch.cuda.is_available():
            # Before anything reads the copies: FSDP pads uneven shards as soon as they are set.
            torch.cuda.synchronize()

        def resting(tensor: Tensor) -> Tensor:
            if isinstance(tensor, nn.Parameter):
                return self._resting(tensor, "", tensor)
            return tensor.to("cpu")

        for model in models:
            # As Module.to, with memory that exists already.
            module_to: Any = model._apply
            module_to(resting)
        for owner, state, name in moments:
            state[name] = self._resting(owner, name, state[name])

    def enter(
        self, models: Sequence[nn.Module], moments: Sequence[Owned], device: torch.device
    ) -> None:
        """Copy all back, in the order of the current stream; the memory stays allocated."""
        for model in models:
            model.to(device, non_blocking=True)
        for _, state, name in moments:
            state[name] = state[name].to(device, non_blocking=True)

    def _begin(self, parameter: Tensor, name: str, tensor: Tensor) -> None:
        own = local(tensor)
        kept = self._kept.get((parameter, name))
        if kept is None:
            is_pinned = torch.cuda.is_available()
            kept = torch.empty_like(own, device="cpu", pin_memory=is_pinned)
            self._kept[parameter, name] = kept
        kept.copy_(own, non_blocking=True)

    def _resting(self, parameter: Tensor, name: str, tensor: Tensor) -> Tensor:
        """Return the copy, sharded as the tensor."""
        kept = self._kept[parameter, name]
        if not isinstance(tensor, DTensor):
            return kept
        # Its own memory is never touched, so the system gives none.
        sharded = torch.empty_like(tensor, device="cpu")
        local(sharded).data = kept
        return sharded
