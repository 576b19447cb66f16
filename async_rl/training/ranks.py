"""Run every operation of the trainer on all learner ranks, in one order, in one thread per process.

Rank 0 sends an operation with its input to the others, then takes part like them; they follow until
a `Stop`. So collective operations never interleave, and the event loop of each process stays free.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from async_rl.core.errors import NonFiniteError, StalenessError, Superseded
from async_rl.core.heads import GroupHead
from async_rl.core.types import FloatArray, IntArray
from async_rl.learner.host_memory import HostCopies
from async_rl.learner.trainer import StepResult, Trainer
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.weights import DeviceBlock, Manifest
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
from async_rl.training.parts import Parts
from async_rl.weights.adapters import Adapter
from async_rl.weights.block import SharedTensors
from async_rl.weights.ipc import ExportedWeights
from async_rl.weights.routes import Caller

T = TypeVar("T")

_ACCEPT_S = 120.0
"""A rank accepts immediately, unless it is busy with a chunk of a batch."""


class Rank:
    """One rank: its trainer, used in one thread only. pool: the same name in all its ranks.

    parts: the batches, of which it reads its own sequences. others: rank 0 leads them. They have
    none.
    """

    def __init__(
        self,
        thread: ThreadPoolExecutor,
        trainer: Trainer,
        pool: str,
        parts: Parts,
        others: Sequence[Caller],
    ) -> None:
        self._thread = thread
        self._trainer = trainer
        self._pool = pool
        self._parts = parts
        self._others = others
        self._operations: asyncio.Queue[Operation] = asyncio.Queue()

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
            return make_trainer(), _life_of_first(life)

        try:
            trainer, pool = await asyncio.get_running_loop().run_in_executor(thread, build)
            return cls(thread, trainer, pool, parts, others)
        except BaseException:
            thread.shutdown(wait=False)
            raise

    async def accept(self, request: Perform) -> Message:
        """Take part in an operation of rank 0 once the earlier ones are done."""
        self._check_pool(request.pool)
        self._operations.put_nowait(request.operation)
        return Ok()

    async def read(self, request: Fetch) -> Message:
        """Read this rank's sequences of a batch, next to the operations."""
        self._check_pool(request.pool)
        owners = self._trainer.owners(request.heads, request.train_version)
        await self._parts.fetch(request, owners)
        return Ok()

    def _check_pool(self, pool: str) -> None:
        if pool != self._pool:
            raise Superseded(
                f"pool {pool} of learner ranks was replaced by {self._pool}; end its rank 0"
            )

    async def follow(self) -> None:
        """Take part in the accepted operations, until `Stop`."""
        operation: Operation | None = None
        while not isinstance(operation, Stop):
            operation = await self._operations.get()
            work = functools.partial(self._perform, operation)
            # Rank 0 drops a batch that cannot be trained and continues, or all restart together.
            with contextlib.suppress(NonFiniteError, StalenessError):
                result = await self._in_thread(work)
                if isinstance(operation, Step):
                    await self._parts.keep_advantages(result.advantages)

    def close(self) -> None:
        """End the thread after its operation."""
        self._thread.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _perform(self, operation: Operation) -> Any:
        match operation:
            case Step(version=version):
                return self._trainer.train(self._parts.pop(version), version)
            case Gather():
                self._trainer.adapter()
                # Gathering is collective: every rank has to iterate to the end.
                for _ in self._trainer.full_tensors():
                    pass
            case Score(rows=rows):
                return self._trainer.logprobs(rows)
            case Save(version=version, directory=directory):
                return self._trainer.save(Path(directory), version)
            case Restore(directory=directory):
                return self._trainer.load(Path(directory))
            case EnterDevice():
                self._trainer.enter_device()
            case LeaveDevice():
                self._trainer.leave_device()
            case Stop():
                pass
        return None


class TrainingPool(Rank):
    """Rank 0, which leads the others: each method is one operation on all ranks."""

    def __init__(
        self,
        thread: ThreadPoolExecutor,
        trainer: Trainer,
        pool: str,
        parts: Parts,
        others: Sequence[Caller],
    ) -> None:
        super().__init__(thread, trainer, pool, parts, others)
        self._in_order = asyncio.Lock()
        specs = trainer.tensor_specs()
        self._publisher = SharedTensors(specs)
        self._host_copies = HostCopies(max((size for *_, size in specs), default=0))
        self._exported: ExportedWeights | None = None
        self.adapter: Adapter | None = None
        """Of the published version, if the run trains one."""

    async def fetch(
        self, heads: Sequence[GroupHead], train_version: int, *, life: int, timeout_s: float
    ) -> None:
        """Let every rank read its sequences of the batch that `train_version` trains."""
        request = Fetch(pool=self._pool, life=life, train_version=train_version, heads=list(heads))
        calls = (other.call(request, timeout_s=timeout_s) for other in self._others)
        await asyncio.gather(self.read(request), *calls)

    async def step(self, version: int) -> StepResult:
        """Train the batch that was fetched for `version`, which becomes version + 1."""
        result: StepResult = await self._lead(Step(version=version))
        return result

    async def keep_advantages(self, result: StepResult) -> None:
        """Let the buffer store the advantages of rank 0; the other ranks send theirs."""
        await self._parts.keep_advantages(result.advantages)

    async def publish(self, version: int) -> Manifest:
        """Gather the full weights and write them into the shared block."""

        def gather() -> Manifest:
            self.adapter = self._trainer.adapter()
            tensors = self._trainer.full_tensors(on_device=True)
            if self._trainer.device.type == "cuda":
                tensors = self._host_copies.copy(tensors)
            return self._publisher.write(version, tensors)

        return await self._together(Gather(), gather)

    async def logprobs(self, rows: Sequence[IntArray]) -> list[FloatArray]:
        """Return the log-probs of the probe rows under the current weights."""
        result: list[FloatArray] = await self._lead(Score(rows=list(rows)))
        return result

    async def save(self, directory: Path, version: int) -> Future[None]:
        """Begin a checkpoint of all ranks; the future is done when it is complete."""
        written: Future[None] = await self._lead(Save(version=version, directory=str(directory)))
        return written

    async def load(self, directory: Path) -> int:
        """Restore a checkpoint on all ranks and return its version."""
        version: int = await self._lead(Restore(directory=str(directory)))
        return version

    async def enter_device(self) -> None:
        """Move models and moments back to the device."""
        await self._lead(EnterDevice())

    async def leave_device(self) -> None:
        """Move models and moments to host memory, until `enter_device`."""
        await self._lead(LeaveDevice())

    async def share_on_device(self) -> DeviceBlock:
        """Pack the weights into memory of the GPU that generators map; a pool of one rank only."""

        def export() -> ExportedWeights:
            return ExportedWeights(
                self._trainer.full_tensors(on_device=True),
                size_bytes=sum(size for *_, size in self._trainer.tensor_specs()),
                device=self._trainer.device,
            )

        await self.unshare_on_device()
        self._exported = await self._in_thread(export)
        return self._exported.block

    async def unshare_on_device(self) -> None:
        """Free that memory."""
        exported = self._exported
        self._exported = None
        if exported is not None:
            await self._in_thread(exported.close)

    async def stop(self) -> None:
        """Let the other ranks return."""
        await self._lead(Stop())

    def close(self) -> None:
        """Free the shared weights and end the thread."""
        self._publisher.close()
        super().close()

    async def _lead(self, operation: Operation) -> Any:
        return await self._together(operation, functools.partial(self._perform, operation))

    async def _together(self, operation: Operation, work: Callable[[], T]) -> T:
        """Do the work of rank 0 in an operation of all ranks."""
        request = Perform(pool=self._pool, operation=operation)
        # All ranks must start the operations in one order, also those of concurrent callers.
        async with self._in_order:
            calls = (other.call(request, timeout_s=_ACCEPT_S) for other in self._others)
            await asyncio.gather(*calls)
            done = asyncio.get_running_loop().run_in_executor(self._thread, work)
        return await done


def _life_of_first(life: str) -> str:
    """Return rank 0's life on every rank (collective)."""
    if not dist.is_initialized():
        return life
    name = torch.tensor(list(life.encode()), dtype=torch.uint8)
    dist.broadcast(name, src=0)
    return bytes(name.tolist()).decode()
