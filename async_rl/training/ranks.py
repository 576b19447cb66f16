"""Run every operation of the trainer on all learner ranks, in one order, in one thread per process.

Rank 0 announces an operation with its input, then takes part like the others, which follow until a
`Stop`. So collective operations never interleave, and the event loop of each process stays free.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from async_rl.core.codec import decode, encode
from async_rl.core.errors import ConfigError, NonFiniteError, StalenessError
from async_rl.core.types import FloatArray, Group, IntArray
from async_rl.learner import process_group
from async_rl.learner.trainer import StepResult, Trainer
from async_rl.protocol.weights import DeviceBlock, Manifest
from async_rl.runtime.context import RENDEZVOUS_FILE, ProcessContext
from async_rl.training.operations import (
    EnterDevice,
    Gather,
    LeaveDevice,
    Operation,
    Restore,
    Save,
    Score,
    Step,
    Stop,
)
from async_rl.weights.publisher import WeightPublisher
from async_rl.weights.transport.ipc import ExportedWeights

T = TypeVar("T")


def learner_device(gpus: float) -> torch.device:
    """Return the device of a rank: the one GPU assigned to it, which it sees as the first, or the
    CPU. Raises ConfigError if torch cannot use GPUs.
    """
    if gpus == 0:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"learner.gpus_each={gpus:g} but torch {torch.__version__} finds no CUDA GPU here:"
            " install its CUDA build (pip install .[gpu]), repair the driver (nvidia-smi), or set"
            " learner.gpus_each=0"
        )
    return torch.device("cuda", 0)


def build_trainer(context: ProcessContext, device: torch.device) -> Trainer:
    """Join the other ranks and build this rank's trainer; blocks."""
    config = context.config
    torch.set_num_threads(max(1, len(context.cores)))
    world_size = config.learner.ranks
    if world_size > 1:
        # Longer than rank 0 may wait for a batch, during which the others wait for rank 0.
        timeout_s = 2 * config.timeouts.take_s
        # Through a file of the run, to which only its processes have access.
        path = str(context.run_dir / RENDEZVOUS_FILE)
        store = dist.FileStore(path, world_size)  # type: ignore[attr-defined]
        process_group.join(
            store,
            context.rank,
            world_size,
            host=context.host,
            device=device,
            timeout_s=timeout_s,
        )
    return Trainer(
        config,
        context.model_path,
        rank=context.rank,
        world_size=world_size,
        device=device,
        failed_batches=context.run_dir / "failed_batches",
    )


class Rank:
    """One rank: its trainer, used in one thread only."""

    def __init__(self, thread: ThreadPoolExecutor, trainer: Trainer) -> None:
        self._thread = thread
        self._trainer = trainer

    @classmethod
    async def open(cls, make_trainer: Callable[[], Trainer]) -> Self:
        """Build the trainer in a new thread."""
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        try:
            trainer = await asyncio.get_running_loop().run_in_executor(thread, make_trainer)
            return cls(thread, trainer)
        except BaseException:
            thread.shutdown(wait=False)
            raise

    async def follow(self) -> None:
        """Take part in each operation that rank 0 announces, until `Stop`."""
        await self._in_thread(self._follow)

    def close(self) -> None:
        """End the thread after its operation."""
        self._thread.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _follow(self) -> None:
        operation: Operation | None = None
        while not isinstance(operation, Stop):
            size = int(_broadcast(torch.zeros(1, dtype=torch.int64)))
            payload = _broadcast(torch.zeros(size, dtype=torch.uint8)).numpy().tobytes()
            operation = decode(payload, Operation)  # type: ignore[arg-type]  # mypy: a union
            # Rank 0 drops a batch that cannot be trained and continues, or all restart together.
            with contextlib.suppress(NonFiniteError, StalenessError):
                self._perform(operation)

    def _perform(self, operation: Operation) -> Any:
        match operation:
            case Step(version=version, groups=groups):
                return self._trainer.step(groups, version)
            case Gather():
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

    def __init__(self, thread: ThreadPoolExecutor, trainer: Trainer) -> None:
        super().__init__(thread, trainer)
        self._publisher = WeightPublisher(trainer.tensor_specs())
        self._exported: ExportedWeights | None = None

    async def step(self, groups: Sequence[Group], version: int) -> StepResult:
        """Train one batch: `version` becomes version + 1."""
        result: StepResult = await self._lead(Step(version=version, groups=list(groups)))
        return result

    async def publish(self, version: int) -> Manifest:
        """Gather the full weights and write them into the shared block."""

        def gather() -> Manifest:
            _announce(Gather())
            return self._publisher.write(version, self._trainer.full_tensors())

        return await self._in_thread(gather)

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
        def lead() -> Any:
            _announce(operation)
            return self._perform(operation)

        return await self._in_thread(lead)


def _announce(operation: Operation) -> None:
    """Send the operation to the other ranks; a rank that trains alone has no process group."""
    if dist.is_initialized():
        payload = torch.frombuffer(bytearray(encode(operation)), dtype=torch.uint8)
        _broadcast(torch.tensor([len(payload)], dtype=torch.int64))
        _broadcast(payload)


def _broadcast(tensor: torch.Tensor) -> torch.Tensor:
    dist.broadcast(tensor, src=0)
    return tensor
