"""The ranks of the learner: their process group, FSDP2 for the models, and collectives.

The process group uses gloo between main memories and NCCL between GPUs.
Invariants
- Only ranks of the pool reach the listeners of gloo (weights/gate.py). The listeners
  are at the address that the process has in the run.
- One rank that is not sharded has no process group, and so no listener. One rank that is sharded
  has a listener on loopback that accepts no connection.
- Sums over ranks are sums over the batch, because every rank computes a disjoint part of it.
- Embeddings belong to the unit of the whole model, because the output head's weight is read outside
  its module and may be the input embedding.
- One rank in float32 on a CPU is not wrapped: `fully_shard` would cost 15 percent of a step of the
  embedded model.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from async_rl.algorithms.parts import Across
from async_rl.config.learner import shard_ranks
from async_rl.core.frozen import frozen
from async_rl.core.sequences import one_ahead
from async_rl.learner.context import WHOLE_ROWS, Context
from async_rl.weights.communicator import private_gloo

BACKEND = "private_gloo"


def join(
    store: Any, rank: int, world_size: int, *, host: str, device: torch.device, timeout_s: float
) -> None:
    """Create the default process group; returns once all ranks are connected.

    store: of torch, shared by the ranks only. host: address of this process in the run.
    """

    def gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return private_gloo(store, rank, size, host=host, timeout=timeout)[0]

    dist.Backend.register_backend(BACKEND, gloo, devices=["cpu"])
    # gloo as well on GPUs: offloaded gradients and announced operations are in host memory, and
    # checkpoints gather there.
    backend = f"cpu:{BACKEND},cuda:nccl" if device.type == "cuda" else BACKEND
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )


def ensure_group_of_one(device: torch.device) -> None:
    """Create a process group of one rank, unless a group exists already."""
    if not dist.is_initialized():
        store = torch._C._distributed_c10d.HashStore()
        # A group of one has no other rank to wait for.
        join(store, 0, 1, host="127.0.0.1", device=device, timeout_s=60.0)


@frozen
class Ranks(Across):
    """The rank of this process in the learner pool, and how models are sharded over the pool.

    context: the ranks that compute the same rows as this one; data_group: the ranks that have the
    other sequences of the batch, one of each context. None = no other rank, or all.
    is_short_of_memory: activations are recomputed, so there is none for copies.
    node_ranks: as in RunConfig.
    """

    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype
    min_shard_params: int
    offload: Literal["none", "optimizer", "parameters"]
    is_short_of_memory: bool = False
    node_ranks: int = 0
    context: Context = WHOLE_ROWS
    data_group: dist.ProcessGroup | None = None

    @property
    def num_parts(self) -> int:
        """The number of parts of a batch; the ranks of a context share one."""
        return self.world_size // self.context.size

    @property
    def part(self) -> int:
        """The part of this rank."""
        return self.rank // self.context.size

    @property
    def is_sharded(self) -> bool:
        """True if models are wrapped by FSDP."""
        return (
            self.world_size > 1
            or self.device.type != "cpu"
            or self.dtype != torch.float32
            or self.offload == "parameters"
        )

    @property
    def stays_gathered(self) -> bool:
        """True if the weights of a trained model are copied once for all passes until `reshard`,
        and its gradients added up before FSDP joins them, which costs the memory of a copy.
        """
        # Alone, FSDP casts and copies every parameter of a unit by two kernels, in both directions
        # of every pass: 0.08 s of a step of 1.1 s of a model of 1.7B on an H200.
        return self.world_size == 1 and self.offload == "none" and not self.is_short_of_memory

    def backward(self, model: nn.Module, loss: Tensor, *, is_last: bool) -> None:
        """Add to the model's gradients. is_last: before the optimizer's step."""
        if self.stays_gathered and isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(is_last)
        # FSDP averages gradients over ranks, but the losses of ranks are parts of one sum.
        (loss * self.world_size).backward()  # type: ignore[no-untyped-call]

    def shard(
        self,
        model: nn.Module,
        blocks: Collection[str],
        *,
        fill: Callable[[nn.Module], None] | None,
        stays_gathered: bool = False,
    ) -> None:
        """Shard the model over all ranks, or over those of a copy.

        blocks: names of the module classes that are units if min_shard_params=0; otherwise units
        are modules of at least that size. The rest of the model is one more unit.
        fill: writes the weights of a unit before it is sharded; None = the model has them.
        stays_gathered: if the ranks allow it (`Ranks.stays_gathered`).
        """
        if not self.is_sharded:
            model.to(self.device)
            return
        # Neither the device nor, with `fill`, main memory ever holds the whole model: each unit is
        # filled, moved and sharded before the next.
        is_gpu = self.device.type != "cpu"
        # FSDP needs a group even for one rank.
        ensure_group_of_one(self.device)
        mesh = self._mesh(sum(p.numel() for p in model.parameters()))
        # Gradients are added in float32: sums over many ranks in bfloat16 lose small terms.
        precision = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        offload = OffloadPolicy()
        if self.offload == "parameters":
            offload = CPUOffloadPolicy(pin_memory=is_gpu)

        def wrap(module: nn.Module, *, reshard_after_forward: bool | None) -> None:
            if fill is not None:
                fill(module)
            fully_shard(
                module,
                mesh=mesh,
                mp_policy=precision,
                offload_policy=offload,
                reshard_after_forward=reshard_after_forward,
            )

        embeddings = set()
        for lm in model.modules():
            if isinstance(lm, PreTrainedModel):
                embeddings |= {lm.get_input_embeddings(), lm.get_output_embeddings()}
        params = self.min_shard_params
        stays = stays_gathered and self.stays_gathered
        for module in _units(model, blocks=blocks, min_params=params, kept=embeddings):
            wrap(module, reshard_after_forward=False if stays else None)
        # The root is used again by the backward pass right after, so it stays gathered.
        wrap(model, reshard_after_forward=False)
        if stays and isinstance(model, FSDPModule):
            model.set_reshard_after_backward(False)

    def _mesh(self, num_parameters: int) -> DeviceMesh:
        size = shard_ranks(num_parameters, ranks=self.world_size, node_ranks=self.node_ranks)
        shape = (self.world_size,) if size == self.world_size else (self.world_size // size, size)
        return init_device_mesh(
            self.device.type, shape, mesh_dim_names=("copies", "shards")[-len(shape) :]
        )

    def sum(self, x: Tensor) -> Tensor:
        """Replace x by its sum over all parts of the batch (collective) and return it."""
        # Ranks of one context have the same part, so it is counted once.
        if self.num_parts > 1:
            dist.all_reduce(x, group=self.data_group)
        return x

    def maximum(self, x: Tensor) -> Tensor:
        """Replace x by its largest values over all parts (collective) and return it."""
        if self.num_parts > 1:
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.data_group)
        return x

    def gather(self, tensors: Iterable[Tensor], dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield each tensor whole and in dtype on rank 0; nothing on other ranks, which only send
        (collective: every rank must iterate to the end).

        The next tensor is on its way while the caller copies one.
        """
        begun = one_ahead(_Gathering(self, tensor.detach(), dtype) for tensor in tensors)
        yield from itertools.chain.from_iterable(map(_Gathering.result, begun))

    def barrier(self) -> None:
        """Wait for all ranks (collective)."""
        if self.world_size > 1:
            dist.barrier()


def _units(
    model: nn.Module,
    *,
    blocks: Collection[str],
    min_params: int,
    kept: Collection[nn.Module | None],
) -> list[nn.Module]:
    """Return the modules inside the model that are sharded separately, inner ones first.

    With min_params=0 they are the modules whose class is named in blocks.  Otherwise they are the
    smallest modules with at least min_params parameters that are in no other unit; modules of
    `kept`, and modules that contain one, are never units.
    """
    if not min_params:
        return [module for module in model.modules() if type(module).__name__ in blocks]
    units: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        """Return the module's parameters that are in no unit."""
        left = sum(p.numel() for p in module.parameters(recurse=False))
        left += sum(visit(child) for child in module.children())
        # FSDP's hooks run with forward; a ModuleList has none.
        is_callable = type(module).forward is not nn.Module.forward
        has_kept = any(m in kept for m in module.modules())
        if left < min_params or module is model or has_kept or not is_callable:
            return left
        units.append(module)
        return 0

    visit(model)
    return units


class _Gathering:
    """The parts of one tensor on their way to rank 0."""

    def __init__(self, ranks: Ranks, tensor: Tensor, dtype: torch.dtype) -> None:
        self._is_first = ranks.rank == 0
        self._num_rows = tensor.shape[0]
        self._work: dist.Work | None = None
        # Cast before it is sent: half the bytes in bfloat16. Offloaded shards are in main memory.
        self._whole = local(tensor).to(ranks.device, dtype).contiguous()
        size = num_shards(tensor)
        # The ranks of the first copy send.
        if size == 1 or not isinstance(tensor, DTensor) or ranks.rank >= size:
            return
        _, rows = chunk(self._num_rows, size, 0)
        part = self._whole
        if len(part) < rows:
            part = torch.cat([part, part.new_zeros(rows - len(part), *tensor.shape[1:])])
        parts = None
        if self._is_first:
            self._whole = part.new_empty(rows * size, *tensor.shape[1:])
            parts = [self._whole[i * rows : (i + 1) * rows] for i in range(size)]
        self._part = part  # in use until the work is done
        group = tensor.device_mesh.get_group(-1)
        self._work = dist.gather(part, parts, dst=0, group=group, async_op=True)

    def result(self) -> Iterator[Tensor]:
        """Wait, and yield the tensor on rank 0."""
        if self._work is not None:
            self._work.wait()
        if self._is_first:
            yield self._whole[: self._num_rows]


def chunk(num_rows: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """Return the first row of a rank, and the row after its last one, in a sharded tensor."""
    # FSDP divides the rows like torch.chunk: the last ranks may have fewer or none.
    size = -(-num_rows // num_ranks)
    return min(rank * size, num_rows), min((rank + 1) * size, num_rows)


def num_shards(x: Tensor) -> int:
    """Return the number of ranks that have different rows of a tensor."""
    return x.device_mesh.size(-1) if isinstance(x, DTensor) else 1


def reshard(model: nn.Module) -> None:
    """Release the gathered parameters of all units, because they were changed or will be."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local(x: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, or x if it is not sharded."""
    return x.to_local() if isinstance(x, DTensor) else x


def full_tensor(x: Tensor) -> Tensor:
    """Return the whole of a sharded tensor (collective), or x if it is not sharded."""
    return x.full_tensor() if isinstance(x, DTensor) else x
