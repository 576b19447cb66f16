"""A learner's pusher, and the little around it that it needs."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from composing import compose

from async_rl.observability.activity import Activity
from async_rl.protocol.supervisor import Expel, Member, Members
from async_rl.protocol.weights import Manifest
from async_rl.runtime.directory import Directory
from async_rl.training.device import Device, SharedDevice
from async_rl.training.pushing import Pusher
from async_rl.weights.block import SharedTensors
from async_rl.weights.tensors import tensor_spec


class Learner:
    """A pusher with its directory, its supervisor and its ranks. generators: by name; those that
    serve are in the directory.
    """

    adapter = None

    def __init__(
        self,
        run_dir: Path,
        generators: dict[str, Any],
        *overrides: str,
        num_tensors: int = 1,
        rows: int = 5,
        device: str = "cpu",
    ) -> None:
        names = ["embed", *(f"layer {number}" for number in range(1, num_tensors))]
        self.block = SharedTensors([tensor_spec(name, torch.empty(rows, 1)) for name in names])
        self.generators = generators
        self._num_tensors, self._rows = num_tensors, rows
        self.directory = Directory()
        self.cut_off: list[Expel] = []
        self.compared: list[bool] = []
        self.others: list[Any] = []
        self.end_process: Callable[[str], None] = str
        config = compose(
            "grpo_code", ["timeouts.start_s=150", "weights.probe_every_pushes=0", *overrides]
        )
        context: Any = SimpleNamespace(
            config=config,
            run_dir=run_dir,
            activity=Activity(),
            incarnation="one",
            host="127.0.0.1",
            log=logging.getLogger(__name__),
            directory=self.directory,
            supervisor=self,
            incarnation_of=lambda member: generators[member.name],
        )
        pool: Any = self
        self.device = SharedDevice(context) if config.takes_turns else Device()
        rank_device = torch.device(device)
        self.pusher = Pusher(context, pool, self.device, rank_device=rank_device, life=1)

    def serve(self, *names: str) -> None:
        """These generators are in the directory from now on."""
        self.directory.update(
            Members(
                revision=self.directory.revision + 1,
                members=[member(n, self.generators[n]) for n in names],
            )
        )

    async def call(self, request: Expel) -> None:
        """The supervisor: who is cut off is ended and leaves."""
        self.cut_off.append(request)
        self.end_process(request.name)
        self.leave(request.name)

    def leave(self, name: str) -> None:
        """This generator is no longer in the directory."""
        self.serve(*(m.name for m in self.directory.members if m.name != name))

    async def publish(self, version: int, *, compares: bool) -> Manifest:
        """The ranks."""
        self.compared.append(compares)
        rows = [bytes_of(version, number, self._rows) for number in range(self._num_tensors)]
        return self.block.write(version, map(torch.from_numpy, rows), compares=compares)

    async def lead(self, operation: object) -> list[Any]:
        """Answer a probe that no generator here can answer."""
        return []

    @asynccontextmanager
    async def running(self, *tasks: Callable[[], Any]) -> AsyncIterator[None]:
        """The pusher, and the tasks, around a block of a minute at most."""
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            started = [group.create_task(each()) for each in (self.pusher.run, *tasks)]
            yield
            for task in started:
                task.cancel()

    async def push(self, *versions: int) -> None:
        for version in versions:
            await self.pusher.publish(version)
            await self.pusher.live(version)


def member(name: str, generator: Any) -> Member:
    """As the directory shows a generator that has `devices`, or one rank on the CPU."""
    return Member(
        name=name,
        role="generator",
        pid=1,
        address="tcp://127.0.0.1:1",
        state="",
        since_s=0,
        devices=vars(generator).get("devices", ["cpu"]),
    )


def bytes_of(version: int, number: int, rows: int) -> Any:
    """Return the content of tensor `number` of a version."""
    return np.random.default_rng((version, number)).integers(0, 256, 4 * rows, dtype=np.uint8)
