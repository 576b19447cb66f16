"""A fleet of scripted processes in virtual time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from loop import VirtualLoop

from async_rl.config.timeouts import TimeoutsConfig
from async_rl.core.types import Role
from async_rl.planning.topology import ProcessSpec
from async_rl.protocol.supervisor import Register, ReportFatal
from async_rl.supervision.fleet import Fleet
from async_rl.supervision.liveness import Liveness
from async_rl.supervision.registry import Registry

T = TypeVar("T")
MAX_RESTARTS = 2
LIMITS = TimeoutsConfig(call_s=20, start_s=120, group_s=120)
"""A process is lost after 30 s without a heartbeat, which no scripted process sends by itself."""


def virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run in virtual time: a wait takes no time, and nothing depends on the machine's speed."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(lambda: 0.0)) as runner:
        return runner.run(main)


def virtual_registry() -> Registry:
    return Registry(asyncio.get_running_loop().time)


class Scripted:
    """A process that ends when told."""

    def __init__(self, spec: ProcessSpec, pid: int) -> None:
        self.spec = spec
        self.pid = pid
        self.waits_for = ""
        self.why = ""
        self.has_place = asyncio.Event()
        self.has_place.set()
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def placed(self) -> None:
        await self.has_place.wait()

    async def wait(self) -> int:
        return await asyncio.shield(self.code)

    def end(self, code: int) -> None:
        if not self.code.done():
            self.code.set_result(code)

    def terminate(self) -> None:
        self.end(0)

    def kill(self) -> None:
        self.end(-9)


def spec(role: Role, rank: int = 0) -> ProcessSpec:
    return ProcessSpec(name=f"{role}-{rank}", role=role, rank=rank, cores=(), gpus=0, env={})


class World:
    """A fleet of these processes, with everything around it; also their launcher."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        run_dir: Path,
        on_start: Callable[[Any, Scripted], None],
    ) -> None:
        self.registry = virtual_registry()
        self.started: list[Scripted] = []
        self.is_full = False
        self.lost: list[tuple[str, str]] = []
        self.given_up: list[tuple[str, str]] = []
        self._on_start = on_start
        self.fleet = Fleet(
            specs,
            launcher=self,
            registry=self.registry,
            max_restarts=MAX_RESTARTS,
            run_dir=run_dir,
            timeouts=LIMITS,
            liveness=Liveness(self.registry, LIMITS, is_local=True),
        )
        self.fleet.on_restart = lambda name, reason: self.lost.append((name, reason))
        self.fleet.give_up = lambda spec, reason: self.given_up.append((spec.name, reason))

    async def open(self) -> str:
        return "127.0.0.1"

    async def close(self) -> None:
        pass

    async def start(self, spec: ProcessSpec) -> Scripted:
        process = Scripted(spec, 1000 + len(self.started))
        if self.is_full:
            process.pid = 0
            process.waits_for = "room on the cluster: 1 CPU"
            process.has_place.clear()
        self.started.append(process)
        asyncio.get_running_loop().call_soon(self._on_start, self, process)
        return process

    def fails(self, process: Scripted, text: str) -> None:
        name = process.spec.name
        self.fleet.note_fatal(ReportFatal(name=name, pid=process.pid, text=text))

    def register(self, process: Scripted) -> None:
        # Without an address nothing is sent to it.
        spec = process.spec
        message = Register(name=spec.name, role=spec.role, pid=process.pid, address="")
        self.registry.register(message)

    async def until(self, *names: str) -> None:
        """Wait until these processes serve, and no other."""
        directory = self.registry.directory
        while sorted(m.name for m in self.registry.members if m.state == "ready") != sorted(names):
            await directory.changed(directory.revision)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.fleet.run())
        try:
            yield
        finally:
            self.fleet.kill_all()
            await task
