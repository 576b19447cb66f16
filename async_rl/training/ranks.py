"""Runs every operation of the trainer on all learner ranks, in one order, in one thread per
process.

Rank 0 leads: it announces an operation, sends its input, then takes part like the others.  The
other ranks follow until told to stop. Collective operations therefore never interleave, and the
event loop of each process stays free.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from async_rl.core.codec import decode, encode
from async_rl.core.errors import ConfigError
from async_rl.core.types import FloatArray, Group, IntArray
from async_rl.learner.trainer import StepResult, Trainer
from async_rl.protocol.weights import DeviceBlock, Manifest
from async_rl.runtime.context import RENDEZVOUS_FILE
from async_rl.weights.publisher import WeightPublisher
from async_rl.weights.transport.ipc import ExportedWeights

T = TypeVar("T")


class Operation(enum.IntEnum):
    """What the ranks do together."""

    STEP = 0
    PUBLISH = 1
    LOGPROBS = 2
    SAVE = 3
    LOAD = 4
    STOP = 5
    ENTER_DEVICE = 6
    LEAVE_DEVICE = 7


def learner_device(gpus: float) -> torch.device:
    """Where a rank computes: the one GPU it was given and sees as the first, or the CPU. Raises
    ConfigError if torch cannot use GPUs.
    """
    if gpus == 0:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"learner.gpus_each={gpus:g} but torch {torch.__version__} finds no CUDA GPU here:"
            " install its CUDA build (pip install .[gpu]), mend the driver (nvidia-smi), or set"
            " learner.gpus_each=0"
        )
    return torch.device("cuda", 0)


def join_process_group(
    run_dir: Path, rank: int, world_size: int, *, device: torch.device, timeout_s: float
) -> None:
    """Joins this rank's process group; ranks meet through a file of the run, so no port is opened
    for it.
    """
    backend = (
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    )  # offloaded gradients, and what is announced, are on the host
    store = dist.FileStore(str(run_dir / RENDEZVOUS_FILE), world_size)  # type: ignore[attr-defined]
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )


class TrainingPool:
    """The trainer on all ranks, as rank 0 sees it (`step`, `publish`, ...) and as the others do
    (`follow`).
    """

    def __init__(self, make_trainer: Callable[[], Trainer], *, rank: int, world_size: int) -> None:
        self._make_trainer = make_trainer
        self._rank = rank
        self._world_size = world_size
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        self._publisher: WeightPublisher | None = None
        self._exported: ExportedWeights | None = None

    async def start(self) -> None:
        """Builds the trainer on this rank."""
        self._trainer = await self._in_thread(self._make_trainer)
        self._publisher = WeightPublisher(self._trainer.tensor_specs()) if self._rank == 0 else None

    async def step(self, groups: Sequence[Group], version: int) -> StepResult:
        """Trains one batch on all ranks: `version` becomes version + 1."""
        result: StepResult = await self._in_thread(
            lambda: self._lead(Operation.STEP, version, encode(list(groups)), list(groups))
        )
        return result

    async def publish(self, version: int) -> Manifest:
        """Gathers the full weights and writes them into the shared block."""
        manifest: Manifest = await self._in_thread(
            lambda: self._lead(Operation.PUBLISH, version, b"", None)
        )
        return manifest

    async def logprobs(self, rows: Sequence[IntArray]) -> list[FloatArray]:
        """Log-probs of the probe rows under the current weights."""
        result: list[FloatArray] = await self._in_thread(
            lambda: self._lead(Operation.LOGPROBS, 0, encode(list(rows)), list(rows))
        )
        return result

    async def save(self, directory: Path, version: int) -> Future[None]:
        """Begins a checkpoint of all ranks; the result tells when it is complete."""
        written: Future[None] = await self._in_thread(
            lambda: self._lead(Operation.SAVE, version, str(directory).encode(), directory)
        )
        return written

    async def load(self, directory: Path) -> int:
        """Restores a checkpoint on all ranks; its version."""
        version: int = await self._in_thread(
            lambda: self._lead(Operation.LOAD, 0, str(directory).encode(), directory)
        )
        return version

    async def enter_device(self) -> None:
        """Brings models and moments back to the device."""
        await self._in_thread(lambda: self._lead(Operation.ENTER_DEVICE, 0, b"", None))

    async def leave_device(self) -> None:
        """Models and moments wait in host memory, until `enter_device`."""
        await self._in_thread(lambda: self._lead(Operation.LEAVE_DEVICE, 0, b"", None))

    async def share_on_device(self) -> DeviceBlock:
        """Packs the weights into memory of the GPU that generators map; a pool of one rank only."""

        def export() -> DeviceBlock:
            self._exported = ExportedWeights(
                self._trainer.full_tensors(on_device=True),
                size_bytes=sum(size for *_, size in self._trainer.tensor_specs()),
                device=self._trainer.device,
            )
            return self._exported.block

        await self.unshare_on_device()
        return await self._in_thread(export)

    async def unshare_on_device(self) -> None:
        """Gives that memory back."""
        exported, self._exported = self._exported, None
        if exported is not None:
            await self._in_thread(exported.close)

    async def stop(self) -> None:
        """Lets the other ranks leave."""
        await self._in_thread(lambda: self._lead(Operation.STOP, 0, b"", None))

    async def follow(self) -> None:
        """The life of a rank other than 0: takes part in each operation until told to stop."""
        await self._in_thread(self._follow)

    def close(self) -> None:
        """Gives the shared weights back."""
        if self._publisher is not None:
            self._publisher.close()
        self._thread.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _lead(self, operation: Operation, version: int, payload: bytes, value: Any) -> Any:
        if self._world_size > 1:
            _broadcast(torch.tensor([operation, version, len(payload)], dtype=torch.int64))
            if payload:
                _broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        return self._perform(operation, version, value)

    def _follow(self) -> None:
        while True:
            operation, version, size = _broadcast(torch.zeros(3, dtype=torch.int64)).tolist()
            payload = (
                _broadcast(torch.zeros(size, dtype=torch.uint8)).numpy().tobytes() if size else b""
            )
            value: Any = None
            if operation == Operation.STEP:
                value = decode(payload, list[Group])
            elif operation == Operation.LOGPROBS:
                value = decode(payload, list[np.ndarray])
            elif operation in (Operation.SAVE, Operation.LOAD):
                value = Path(payload.decode())
            if operation == Operation.STOP:
                return
            self._perform(Operation(operation), version, value)

    def _perform(self, operation: Operation, version: int, value: Any) -> Any:
        match operation:
            case Operation.STEP:
                return self._trainer.step(value, version)
            case Operation.PUBLISH:
                tensors = self._trainer.full_tensors()
                if self._publisher is None:
                    for (
                        _
                    ) in tensors:  # gathering is collective: every rank has to take part to the end
                        pass
                    return None
                return self._publisher.write(version, tensors)
            case Operation.LOGPROBS:
                return self._trainer.logprobs(value)
            case Operation.SAVE:
                return self._trainer.save(value, version)
            case Operation.LOAD:
                return self._trainer.load(value)
            case Operation.ENTER_DEVICE:
                return self._trainer.enter_device()
            case Operation.LEAVE_DEVICE:
                return self._trainer.leave_device()
            case Operation.STOP:
                return None


def _broadcast(tensor: torch.Tensor) -> torch.Tensor:
    dist.broadcast(tensor, src=0)
    return tensor
