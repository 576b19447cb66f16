"""The ranks of the learner: one trainer per process, built by `build_trainer`. Every operation runs
on all ranks, in one order, in one thread per process.

Rank 0 sends an operation with its input to the other ranks, then takes part like them; they follow
until a `Stop`. So collective operations never interleave, and the event loop of each process stays
free.
"""

import asyncio
import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from async_rl.config.run import RunConfig
from async_rl.core.errors import NonFiniteError, StalenessError, Superseded
from async_rl.core.heads import GroupHead
from async_rl.learner import sharding
from async_rl.learner.trainer import Trainer
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.weights import Manifest
from async_rl.runtime.context import RENDEZVOUS_FILE, ProcessContext
from async_rl.training.operations import (
    EnterDevice,
    Fetch,
    Gather,
    LeaveDevice,
    Operation,
    Perform,
    Restore,
    Save,
    Score,
    Step,
    Stop,
)
from async_rl.training.taking import Parts
from async_rl.weights.block import SharedTensors
from async_rl.weights.communicator import choose_interface
from async_rl.weights.lora import Adapter
from async_rl.weights.media import Caller
from async_rl.weights.tensors import summed

T = TypeVar("T")

_ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}
"""Where a user sets torch's allocator, which reads it at its first use."""


def build_trainer(context: ProcessContext, device: torch.device) -> Trainer:
    """Join the other ranks and build this rank's trainer; blocks."""
    config = context.config
    # The number of threads is OMP_NUM_THREADS, which the launcher sets to this rank's cores.
    if device.type == "cuda":
        # Before FSDP's groups: they use NCCL earlier in this process than any push of weights.
        choose_interface(context.host)
        if not _ALLOCATOR & os.environ.keys():
            # The plan counts on small gaps (planning/estimate.py), and page-locked memory that is
            # not rounded up to a power of two. pinned_max_round_threshold_mb does that too, but in
            # torch 2.13 a freed block may then be reused for more bytes than it has: a copy ends
            # with an invalid argument or a segmentation fault.
            os.environ["PYTORCH_CUDA_ALLOC_CONF"] = (
                "expandable_segments:True,pinned_max_cached_size_mb:1"
            )
    return open_trainer(
        config,
        context.model_path,
        context.run_dir,
        rank=context.rank,
        device=device,
        host=context.host,
        # Bounds one collective; between operations the ranks wait without one.
        timeout_s=config.timeouts.collective_s,
    )


def open_trainer(
    config: RunConfig,
    model_path: Path,
    directory: Path,
    *,
    rank: int,
    device: torch.device,
    host: str,
    timeout_s: float,
) -> Trainer:
    """Join the other ranks, who meet in the directory, and build this rank's trainer; blocks.

    host: the address of this process for the other ranks. timeout_s: limit of one collective.
    """
    world_size = config.learner.ranks
    if world_size > 1:
        # A file and no port: only this user's processes can open it.
        path = str(directory / RENDEZVOUS_FILE)
        store = dist.FileStore(path, world_size)  # type: ignore[attr-defined]
        sharding.join(store, rank, world_size, host=host, device=device, timeout_s=timeout_s)
    return Trainer(config, model_path, rank=rank, world_size=world_size, device=device)


@dataclass(kw_only=True, eq=False)
class Rank:
    """One rank. thread: the only thread that uses the trainer. pool: the same name in all ranks.

    parts: reads this rank's sequences of each batch. others: the ranks that rank 0 leads; empty on
    every other rank.
    """

    thread: ThreadPoolExecutor
    trainer: Trainer
    pool: str
    parts: Parts
    others: Sequence[Caller]
    operations: asyncio.Queue[Operation] = field(default_factory=asyncio.Queue)
    num_operations: int = 0

    @classmethod
    async def open(
        cls,
        make_trainer: Callable[[], Trainer],
        life: str,
        parts: Parts,
        others: Sequence[Caller] = (),
    ) -> Self:
        """Build the trainer in a new thread. life: of this process."""
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")

        def build() -> tuple[Trainer, str]:
            # The trainer first: it joins the process group that broadcasts the name.
            return make_trainer(), _life_of_first(life)

        trainer, pool = await asyncio.get_running_loop().run_in_executor(thread, build)
        return cls(thread=thread, trainer=trainer, pool=pool, parts=parts, others=others)

    async def accept(self, request: Perform) -> Message:
        """Take part in an operation of rank 0 once the earlier ones are done."""
        self._check_pool(request.pool)
        # Rank 0 sends an operation again if the answer is lost.
        if request.number > self.num_operations:
            self.num_operations = request.number
            self.operations.put_nowait(request.operation)
        return Ok()

    async def read(self, request: Fetch) -> Message:
        """Read this rank's sequences of a batch, while operations continue."""
        self._check_pool(request.pool)
        owners = self.trainer.owners(request.heads, request.train_version)
        await self.parts.fetch(request, owners)
        return Ok()

    def _check_pool(self, pool: str) -> None:
        if pool != self.pool:
            raise Superseded(
                f"pool {pool} of learner ranks was replaced by {self.pool}; end its rank 0"
            )

    async def follow(self) -> None:
        """Take part in the accepted operations, until `Stop`."""
        operation: Operation | None = None
        while not isinstance(operation, Stop):
            operation = await self.operations.get()
            work = functools.partial(self._perform, operation)
            # Rank 0 drops a batch that cannot be trained and continues, or all restart together.
            with contextlib.suppress(NonFiniteError, StalenessError):
                await self._in_thread(work)

    def close(self) -> None:
        """Stop the thread after its operation."""
        self.thread.shutdown(wait=False)

    def _in_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self.thread, work)

    def _perform(self, operation: Operation) -> Any:
        match operation:
            case Step(version=version):
                return self.trainer.train(self.parts.pop(version), version)
            case Gather():
                self.trainer.adapter()
                # Gathering is collective: every rank has to iterate over all tensors.
                for _ in self.trainer.full_tensors():
                    pass
            case Score(rows=rows):
                return self.trainer.logprobs(rows)
            case Save(version=version, directory=directory):
                return self.trainer.save(Path(directory), version)
            case Restore(directory=directory):
                return self.trainer.load(Path(directory))
            case EnterDevice():
                self.trainer.enter_device()
            case LeaveDevice():
                self.trainer.leave_device()
            case Stop():
                pass
        return None


@dataclass(kw_only=True, eq=False)
class TrainingPool(Rank):
    """Rank 0, which leads the other ranks.

    adapter: of the published version, if the run trains one.
    """

    adapter: Adapter | None = None

    def __post_init__(self) -> None:
        self._in_order = asyncio.Lock()
        cuda = torch.cuda if self.trainer.device.type == "cuda" else None
        self.block = SharedTensors(self.trainer.tensor_specs(), cuda)

    async def fetch(
        self, heads: Sequence[GroupHead], train_version: int, *, life: int, timeout_s: float
    ) -> None:
        """Let every rank read its sequences of the batch that `train_version` trains."""
        request = Fetch(pool=self.pool, life=life, train_version=train_version, heads=list(heads))
        calls = (other.call(request, timeout_s=timeout_s) for other in self.others)
        await asyncio.gather(self.read(request), *calls)

    async def publish(self, version: int, *, compares: bool) -> Manifest:
        """Gather the full weights and write them into the shared block. compares: as there."""

        def gather() -> Manifest:
            self.adapter = self.trainer.adapter()
            tensors = self.trainer.full_tensors()
            sums: list[torch.Tensor] = []
            if self.trainer.device.type == "cuda":
                tensors = summed(tensors, sums)
            return self.block.write(version, tensors, sums, compares=compares)

        return await self._together(Gather(), gather)

    def close(self) -> None:
        """Free the shared weights and stop the thread."""
        self.block.close()
        super().close()

    async def lead(self, operation: Operation) -> Any:
        """Perform an operation on all ranks and return the result of rank 0."""
        return await self._together(operation, functools.partial(self._perform, operation))

    async def _together(self, operation: Operation, work: Callable[[], T]) -> T:
        """Do the work of rank 0 in an operation of all ranks."""
        # Concurrent callers must not interleave: all ranks have to start the operations in one
        # order, or their collectives wait for each other.
        async with self._in_order:
            self.num_operations += 1
            request = Perform(pool=self.pool, number=self.num_operations, operation=operation)
            # A rank accepts immediately, unless it is busy with a chunk of a batch.
            calls = (other.call(request, timeout_s=120.0) for other in self.others)
            await asyncio.gather(*calls)
            done = self._in_thread(work)
        return await done


def _life_of_first(life: str) -> str:
    """Return rank 0's life on every rank (collective)."""
    if not dist.is_initialized():
        return life
    name = torch.tensor(list(life.encode()), dtype=torch.uint8)
    dist.broadcast(name, src=0)
    return bytes(name.tolist()).decode()
