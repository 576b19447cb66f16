"""A fleet of scripted processes in virtual time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
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

    def __init__(self, pid: int) -> None:
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


class ScriptedLauncher:
    def __init__(self, on_start: Callable[[ProcessSpec, Scripted], None]) -> None:
        self.started: list[Scripted] = []
        self.is_full = False
        self._on_start = on_start

    async def open(self) -> str:
        return "127.0.0.1"

    async def close(self) -> None:
        pass

    async def start(self, spec: ProcessSpec) -> Scripted:
        process = Scripted(1000 + len(self.started))
        if self.is_full:
            process.pid = 0
            process.waits_for = "room on the cluster: 1 CPU"
            process.has_place.clear()
        self.started.append(process)
        self._on_start(spec, process)
        return process


def spec(role: Role, rank: int = 0) -> ProcessSpec:
    return ProcessSpec(name=f"{role}-{rank}", role=role, rank=rank, cores=(), gpus=0, env={})


def surroundings(registry: Registry, run_dir: Path) -> dict[str, Any]:
    return {
        "run_dir": run_dir,
        "timeouts": LIMITS,
        "liveness": Liveness(registry, LIMITS, is_local=True),
    }


class World:
    """A fleet of one process, or of several ranks, with everything around it."""

    def __init__(
        self,
        role: Role,
        tmp_path: Path,
        on_start: Callable[["World", Scripted], None],
        ranks: int = 1,
    ) -> None:
        self.registry = virtual_registry()
        self.lost: list[str] = []
        self.reasons: list[str] = []
        self.given_up: list[tuple[str, str]] = []
        self.launcher = ScriptedLauncher(
            lambda _, process: (
                asyncio.get_running_loop().call_soon(on_start, self, process) and None
            )
        )
        self.fleet = Fleet(
            [spec(role, rank) for rank in range(ranks)],
            launcher=self.launcher,
            registry=self.registry,
            max_restarts=MAX_RESTARTS,
            **surroundings(self.registry, tmp_path),
        )
        self.fleet.on_restart = self._on_restart
        self.fleet.give_up = lambda spec, reason: self.given_up.append((spec.name, reason))
        self.role: Role = role

    def _on_restart(self, name: str, reason: str) -> None:
        self.lost.append(name)
        self.reasons.append(reason)

    def fails(self, process: Scripted, name: str, text: str) -> None:
        self.fleet.note_fatal(ReportFatal(name=name, pid=process.pid, text=text))

    def register(self, process: Scripted, rank: int = 0) -> None:
        name = f"{self.role}-{rank}"
        self.registry.register(
            Register(name=name, role=self.role, pid=process.pid, address="tcp://x")
        )

    async def until_serving(self, count: int = 1) -> None:
        directory = self.registry.directory
        while len(directory.members) < count:
            await directory.changed(directory.revision)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.fleet.run())
        try:
            yield
        finally:
            self.fleet.kill_all()
            await task
