"""FSDP2 for the learner's models, and the few collectives that the learner needs besides.

Invariant: sums over ranks are sums over the batch, because every rank holds a disjoint share of it.
At one rank in float32 on a CPU nothing is wrapped: there `fully_shard` would cost 15 percent of a step of the embedded model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Where this process stands in the pool, and how models are laid over it."""

    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype

    @property
    def is_sharded(self) -> bool:
        """Whether models are wrapped at all."""
        return self.world_size > 1 or self.device.type != "cpu" or self.dtype != torch.float32

    def shard(self, model: nn.Module, lm: PreTrainedModel) -> None:
        """Lay the model over all ranks: each block that lm must not split is one unit, the rest is another."""
        model.to(self.device)
        if not self.is_sharded:
            return
        if not dist.is_initialized():
            backend = "gloo" if self.device.type == "cpu" else "nccl"
            dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        precision = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        blocks = set(lm._no_split_modules or ())
        for module in model.modules():
            if type(module).__name__ in blocks:
                fully_shard(module, mesh=mesh, mp_policy=precision)
        fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=False)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(x)
        return x

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier()


def full_tensor(x: Tensor) -> Tensor:
    """The whole of a sharded tensor (collective), or x itself."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Global norm of the gradients of all shards (collective)."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return full_tensor(torch.nn.utils.get_total_norm(gradients))
