"""What every child process of a run has: its configuration, its server, its peers, its heartbeat
and its end.

Invariants
- Only the supervisor's address is known at the start (`<run>/control.json`); everyone else is found
  through the directory.
- A process dies with its parent, and ends by itself if the supervisor stops answering.
- SIGTERM (or SIGUSR1) sets `stopping`; `run(context)` then finishes what it holds and returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import signal
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from async_rl.config.pools import config_of, pool_of
from async_rl.config.run import RunConfig
from async_rl.core.errors import Unavailable
from async_rl.core.types import Role
from async_rl.observability.activity import Activity
from async_rl.protocol.base import Message
from async_rl.protocol.membership import Heartbeat, Member, Register, ReportMetrics
from async_rl.runtime.directory import Connections, Directory, Incarnation, Peer
from async_rl.wire.addresses import process_host
from async_rl.wire.keys import Keys, load_keys
from async_rl.wire.rpc import Handler, RpcClient, RpcServer

RENDEZVOUS_FILE = "rendezvous"
"""Where the learner's ranks meet."""


class Control(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `<run>/control.json`: where the supervisor answers, its process on which
    machine, and the run's start model.
    """

    address: str
    pid: int
    machine: str
    model_path: str


def load_config(run_dir: Path) -> RunConfig:
    """The run's resolved configuration, as written at launch."""
    return msgspec.yaml.decode((run_dir / "config.yaml").read_bytes(), type=RunConfig)


def load_control(run_dir: Path) -> Control:
    """Where the run's supervisor answers. Raises Unavailable if the run has none."""
    path = run_dir / "control.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Control)
    except FileNotFoundError as error:
        raise Unavailable(
            f"{run_dir.name} has no processes yet; ask again once async-rl status shows them"
        ) from error
    except PermissionError as error:
        raise Unavailable(
            f"{run_dir.name} belongs to the user with id {path.stat().st_uid}, who alone can talk"
            f" to it ({error})"
        ) from error
    except (OSError, msgspec.DecodeError) as error:
        raise Unavailable(f"{run_dir.name} has no supervisor to talk to: {error}") from error


@contextlib.asynccontextmanager
async def connect_control(run_dir: Path) -> AsyncIterator[RpcClient]:
    """A client of the run's supervisor. Raises Unavailable if its process is gone."""
    control = load_control(run_dir)
    if control.machine == platform.node() and not psutil.pid_exists(control.pid):
        raise Unavailable(
            f"{run_dir.name} is not running: its supervisor (pid {control.pid}) is gone"
        )
    async with RpcClient(control.address, load_keys(run_dir / "keys")) as client:
        yield client


@dataclass(kw_only=True)
class ProcessContext:
    """The surroundings of one process; made by `open_context`, handed to its `run`."""

    name: str
    role: Role
    rank: int
    cores: tuple[int, ...]
    run_dir: Path
    config: RunConfig
    model_path: Path
    keys: Keys
    host: str
    supervisor: RpcClient
    group: asyncio.TaskGroup
    connections: Connections
    directory: Directory
    log: logging.Logger
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    activity: Activity = field(default_factory=Activity)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    version: int = -1
    _servers: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def token(self) -> str:
        """Bearer token of the run, for HTTP."""
        return self.keys.token

    def peer(self, who: str) -> Peer:
        """Whoever has this name or role, across restarts."""
        return Peer(who, self.directory, self.connections)

    def incarnation_of(self, member: Member) -> Incarnation:
        """This life of a process, and no other."""
        return Incarnation(member, self.directory, self.connections)

    async def serve(
        self, handlers: Mapping[type[Message], Handler], *, devices: Sequence[str] = ()
    ) -> None:
        """Binds this process's server, answers `handlers` from now on, and registers the address;
        devices as in Register.
        """
        server = RpcServer(self.host, 0, self.keys, handlers)
        self._servers.enter_context(server)
        self._own(server.serve(), "rpc server")
        await self.register(server.address, devices)

    async def register(self, address: str, devices: Sequence[str] = ()) -> None:
        """Tells the supervisor that this process serves at `address`."""
        self.activity.rest("serving")
        timeout_s = self.config.network.call_timeout_s
        request = Register(
            name=self.name, role=self.role, pid=os.getpid(), address=address, devices=list(devices)
        )
        await self.supervisor.call(request, timeout_s=timeout_s)

    async def report(
        self,
        step: int,
        *,
        scalars: Mapping[str, float] | None = None,
        histograms: Mapping[str, list[float]] | None = None,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        """Sends numbers of one learner step to the metrics writer."""
        request = ReportMetrics(
            source=self.name,
            step=step,
            scalars=dict(scalars or {}),
            histograms=dict(histograms or {}),
            texts=dict(texts or {}),
        )
        await self.supervisor.call(request, timeout_s=self.config.network.call_timeout_s)

    def _own(self, coroutine: object, name: str) -> None:
        self._tasks.append(self.group.create_task(coroutine, name=name))  # type: ignore[arg-type]

    async def _beat(self) -> None:
        process = psutil.Process()
        while True:
            self.activity.gauge("memory_mb", process.memory_info().rss / 2**20)
            self.activity.gauge("cpu_s", sum(process.cpu_times()[:2]))
            snapshot = self.activity.snapshot()
            beat = Heartbeat(
                name=self.name,
                pid=os.getpid(),
                state="stopping" if self.stopping.is_set() else snapshot.state,
                waits_for=snapshot.waits_for,
                since_s=snapshot.since_s,
                version=self.version,
                counters=snapshot.counters,
            )
            await self.supervisor.call(beat, timeout_s=self.config.supervisor.heartbeat_timeout_s)
            await asyncio.sleep(self.config.supervisor.heartbeat_s)

    def start_services(self) -> None:
        """Begins to beat and to follow the directory."""
        self._own(self._beat(), "heartbeat")
        self._own(
            self.directory.follow(
                self.supervisor, call_timeout_s=self.config.network.call_timeout_s
            ),
            "directory",
        )

    async def close(self) -> None:
        """Ends the process's own tasks, its server and its connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._servers.close()
        await self.connections.close()


@contextlib.asynccontextmanager
async def open_context(
    *, name: str, role: Role, rank: int, cores: tuple[int, ...], run_dir: Path, log: logging.Logger
) -> AsyncIterator[ProcessContext]:
    """Reads the run's directory, connects to the supervisor, and owns the process's background
    tasks until the block ends.
    """
    control = load_control(run_dir)
    keys = load_keys(run_dir / "keys")
    config = config_of(load_config(run_dir), pool_of(name))
    directory = Directory()
    async with RpcClient(control.address, keys) as supervisor, asyncio.TaskGroup() as group:
        context = ProcessContext(
            name=name,
            role=role,
            rank=rank,
            cores=cores,
            run_dir=run_dir,
            config=config,
            model_path=Path(control.model_path),
            keys=keys,
            host=process_host(config.network, control.address),
            supervisor=supervisor,
            group=group,
            connections=Connections(keys, directory),
            directory=directory,
            log=log,
        )
        for number in (
            signal.SIGTERM,
            signal.SIGUSR1,
        ):  # srun kills its task on SIGTERM, and passes SIGUSR1 on
            asyncio.get_running_loop().add_signal_handler(number, context.stopping.set)
        context.start_services()
        try:
            yield context
        finally:
            await context.close()
