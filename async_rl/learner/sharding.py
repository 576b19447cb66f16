"""FSDP2 for the learner's models, and the few collectives that the learner needs besides.

Invariants
- Sums over ranks are sums over the batch, because every rank holds a disjoint share of it.
- Embeddings belong to the model's own unit: the output head's weight is read outside its module,
  and may be the input's.
At one rank in float32 on a CPU nothing is wrapped: there `fully_shard` would cost 15 percent of a
step of the embedded model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Where this process stands in the pool, and how models are laid over it."""

    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype
    min_shard_params: int
    offload: Literal["none", "optimizer", "parameters"]

    @property
    def is_sharded(self) -> bool:
        """Whether models are wrapped at all."""
        return (
            self.world_size > 1
            or self.device.type != "cpu"
            or self.dtype != torch.float32
            or self.offload == "parameters"
        )

    def shard(self, model: nn.Module, blocks: Collection[str], *, methods: Sequence[str]) -> None:
        """Lay the model over all ranks: modules of these classes, or from min_shard_params on, are
        units; the rest is another.

        methods: those that run the model besides `forward`.
        """
        model.to(self.device)
        if not self.is_sharded:
            return
        is_gpu = self.device.type != "cpu"
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if is_gpu else "gloo"
            dist.init_process_group(
                backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1
            )
        options: dict[str, Any] = {
            "mesh": init_device_mesh(self.device.type, (self.world_size,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32),
            "offload_policy": (
                CPUOffloadPolicy(pin_memory=is_gpu)
                if self.offload == "parameters"
                else OffloadPolicy()
            ),
        }
        kept = {
            m
            for lm in model.modules()
            if isinstance(lm, PreTrainedModel)
            for m in (lm.get_input_embeddings(), lm.get_output_embeddings())
        }
        for module in units(model, blocks=blocks, min_params=self.min_shard_params, kept=kept):
            fully_shard(module, **options)
        fully_shard(model, **options, reshard_after_forward=False)
        for method in methods:
            register_fsdp_forward_method(model, method)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(x)
        return x

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier()


def units(
    model: nn.Module,
    *,
    blocks: Collection[str],
    min_params: int,
    kept: Collection[nn.Module | None],
) -> list[nn.Module]:
    """The modules inside the model that are sharded each by itself, inner ones first.

    They are those whose class is named in blocks; or, if min_params is above 0, the smallest with
    so many parameters that are in no other. Modules of `kept`, and what holds one, are never.
    """
    if not min_params:
        return [module for module in model.modules() if type(module).__name__ in blocks]
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        """The module's parameters that are in no unit."""
        left = sum(p.numel() for p in module.parameters(recurse=False)) + sum(
            visit(child) for child in module.children()
        )
        is_callable = type(module).forward is not nn.Module.forward
        if (
            left < min_params
            or module is model
            or not is_callable
            or any(m in kept for m in module.modules())
        ):
            return left
        found.append(module)
        return 0

    visit(model)
    return found


def reshard(model: nn.Module) -> None:
    """Forget gathered parameters: they were changed, or will be."""
    if isinstance(model, FSDPModule):
        model.reshard()


def local(x: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, or x itself."""
    return x.to_local() if isinstance(x, DTensor) else x


def full_tensor(x: Tensor) -> Tensor:
    """The whole of a sharded tensor (collective), or x itself."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Global norm of the gradients of all shards (collective)."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return full_tensor(torch.nn.utils.get_total_norm(gradients))
