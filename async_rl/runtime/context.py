"""The environment of every process of a run: configuration, supervisor, server, peers, heartbeat.

Invariants
- A process, and a person's command, knows only the supervisor's address at its start
  (`<run>/control.json`). It finds all others through the directory.
- A process exits if the supervisor stops answering.
- SIGTERM (or SIGUSR1) sets `stopping`; `run(context)` then finishes its work and returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import signal
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from async_rl.config.pools import config_of, pool_of
from async_rl.config.run import RunConfig
from async_rl.core.errors import ProtocolError, Unavailable
from async_rl.core.frozen import Value
from async_rl.core.types import Role
from async_rl.observability.activity import Activity
from async_rl.protocol.base import Message, message_schema
from async_rl.protocol.supervisor import (
    FOLLOWED,
    Heartbeat,
    Member,
    NextBeat,
    Register,
    ReportMetrics,
)
from async_rl.runtime.directory import (
    Connections,
    Directory,
    Incarnation,
    Peer,
    SupervisorCalls,
)
from async_rl.wire.addresses import process_host
from async_rl.wire.rpc import Handler, Keys, RpcClient, RpcServer, load_keys

if TYPE_CHECKING:
    from async_rl.planning.topology import ProcessSpec


RENDEZVOUS_FILE = "rendezvous"
"""File in the run's directory through which the learner's ranks find each other."""
PROGRESS = "progress_mb"
"""A gauge of the heartbeats of a process that is starting: it advances if this changes."""
PROGRESS_MB = 16.0
"""A smaller change is no progress: heartbeats themselves read a few KB each."""


class Control(Value):
    """The content of `<run>/control.json`: the supervisor's address, process and machine, the run's
    start model, and the fingerprint of the supervisor's messages.
    """

    address: str
    pid: int
    machine: str
    model_path: str
    messages: str = ""

    def check_messages(self, run_name: str) -> None:
        """Raise ProtocolError if the supervisor's messages differ from this installation's."""
        if self.messages != message_schema():
            raise ProtocolError(
                f"run {run_name} was started by another version of async_rl (its messages are"
                f" {self.messages or 'without a schema'}, here {message_schema()}); use the version"
                " that started it, on every machine"
            )


def load_config(run_dir: Path) -> RunConfig:
    """Read the run's resolved configuration, as written at launch."""
    return RunConfig.model_validate(msgspec.yaml.decode((run_dir / "config.yaml").read_bytes()))


def load_control(run_dir: Path) -> Control:
    """Read the supervisor's address. Raises Unavailable if the run has none."""
    try:
        return msgspec.json.decode((run_dir / "control.json").read_bytes(), type=Control)
    except FileNotFoundError as error:
        raise Unavailable(
            f"{run_dir.name} has no processes yet; try again once async-rl status shows them"
        ) from error
    except (OSError, msgspec.DecodeError) as error:
        raise Unavailable(
            f"{run_dir.name} cannot be controlled by this user, or has no supervisor: {error}"
        ) from error


def require_running(run_dir: Path) -> Control:
    """Return the address of the run's supervisor. Raises Unavailable if its process has exited."""
    control = load_control(run_dir)
    # Only this machine's pids can be checked; elsewhere the call runs into its deadline.
    if control.machine == platform.node() and not _is_alive(control.pid):
        raise Unavailable(
            f"{run_dir.name} is not running: its supervisor (pid {control.pid}) has exited"
        )
    return control


@contextlib.asynccontextmanager
async def connect_control(run_dir: Path) -> AsyncIterator[RpcClient]:
    """Open a client of the run's supervisor. Raises Unavailable if its process has exited."""
    control = require_running(run_dir)
    control.check_messages(run_dir.name)
    async with RpcClient(control.address, load_keys(run_dir / "keys")) as client:
        yield client


def _is_alive(pid: int) -> bool:
    # A zombie has exited; only its parent has not asked for its exit code yet.
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@dataclass(kw_only=True)
class ProcessContext:
    """The environment of one process; `open_context` creates it for `run`.

    incarnation: id of this life of the process. version: newest weights, for the heartbeat;
    life: of the learner that made them.
    """

    name: str
    role: Role
    rank: int
    cores: tuple[int, ...]
    run_dir: Path
    config: RunConfig
    model_path: Path
    keys: Keys
    host: str
    supervisor: SupervisorCalls
    group: asyncio.TaskGroup
    connections: Connections
    directory: Directory
    log: logging.Logger
    # Random, because two lives of a process may have the same pid in containers.
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    activity: Activity = field(default_factory=Activity)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    version: int = -1
    life: int = 0
    _is_serving: bool = False
    _servers: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def token(self) -> str:
        """Bearer token of the run, for HTTP."""
        return self.keys.token

    def peer(self, name_or_role: str) -> Peer:
        """Return a caller of the process with this name or role, across restarts."""
        return Peer(name_or_role, self.connections)

    async def call_buffer(self, request: Message, *, wait_s: float = 0.0) -> Any:
        """Call the buffer, across its restarts. wait_s: the buffer may take this long to answer."""
        # Long enough for the buffer to die and come back.
        timeout_s = wait_s + self.config.timeouts.start_s
        return await self.peer("buffer").call(request, timeout_s=timeout_s)

    def incarnation_of(self, member: Member) -> Incarnation:
        """Return a caller of this life of a process only."""
        return Incarnation(member, self.connections)

    async def serve(
        self, handlers: Mapping[type[Message], Handler], *, devices: Sequence[str] = ()
    ) -> None:
        """Answer `handlers` from now on, and register the address; devices as in Register."""
        server = RpcServer(self.host, 0, self.keys, handlers)
        self._servers.enter_context(server)
        self._own(server.serve(), "rpc server")
        # After the socket is bound: peers call as soon as they have the address.
        await self.register(server.address, devices)

    async def register(self, address: str, devices: Sequence[str] = ()) -> None:
        """Register this process with the supervisor: it serves at `address`."""
        self.activity.rest("serving")  # its state while it does nothing
        request = Register(
            name=self.name, role=self.role, pid=os.getpid(), address=address, devices=list(devices)
        )
        await self.supervisor.call(request)
        self._is_serving = True

    async def report(self, step: int, scalars: Mapping[str, float]) -> None:
        """Send numbers of one learner step to the metrics writer."""
        request = ReportMetrics(source=self.name, step=step, scalars=dict(scalars))
        await self.supervisor.call(request)

    async def work_until_stopped(
        self, work: Coroutine[Any, Any, None], owned: Mapping[str, Coroutine[Any, Any, None]]
    ) -> None:
        """Do the work until it is done or `stopping` is set, and the named tasks next to it."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(task, name=name) for name, task in owned.items()]
            working = group.create_task(work, name="work")
            stopped = group.create_task(self.stopping.wait(), name="stopping")
            await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
            for task in (*tasks, working, stopped):
                task.cancel()

    def _own(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.append(self.group.create_task(coroutine, name=name))

    async def _beat(self) -> None:
        process = psutil.Process()
        while True:
            self.activity.gauge("memory_mb", process.memory_info().rss / 2**20)
            times = process.cpu_times()
            # Cumulative, but a gauge: a counter would appear among the stages of the process.
            self.activity.gauge("cpu_s", times.user + times.system)
            if not self._is_serving:
                self.activity.gauge(PROGRESS, moved_mb(process))
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
            # Without an answer this raises and the process exits: no supervisor could end it.
            reply: NextBeat = await self.supervisor.call(beat)
            await asyncio.sleep(reply.after_s)

    def start_services(self) -> None:
        """Start the heartbeat and follow the directory."""
        # srun passes SIGUSR1 on, while SIGTERM to srun would kill the process.
        for number in (signal.SIGTERM, signal.SIGUSR1):
            asyncio.get_running_loop().add_signal_handler(number, self.stopping.set)
        self._own(self._beat(), "heartbeat")
        self._own(self.directory.follow(self.supervisor, FOLLOWED[self.role]), "directory")

    async def close(self) -> None:
        """Stop the process's own tasks, its server and its connections."""
        # Before the connections, through which these tasks call.
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._servers.close()
        await self.connections.close()


def moved_mb(process: psutil.Process) -> float:
    """Return MB that a process and its children have read, have written, and have in memory.

    An engine that loads weights, compiles or captures graphs reports nothing meanwhile, but this
    number changes. CPU time would be no evidence of progress: a deadlock may spin.
    """
    moved = 0
    for each in (process, *process.children(recursive=True)):
        # A child may exit between the calls, or belong to another user.
        with contextlib.suppress(psutil.Error):
            counters = each.io_counters()
            moved += counters.read_chars + counters.write_chars + each.memory_info().rss
    return float(moved / 2**20)


@contextlib.asynccontextmanager
async def open_context(
    spec: ProcessSpec, run_dir: Path, log: logging.Logger
) -> AsyncIterator[ProcessContext]:
    """Read the run's directory, connect to the supervisor, and run the process's background tasks
    inside the block.
    """
    control = load_control(run_dir)
    control.check_messages(run_dir.name)
    keys = load_keys(run_dir / "keys")
    # A pool may have its own settings.
    config = config_of(load_config(run_dir), pool_of(spec.name))
    directory = Directory()
    async with RpcClient(control.address, keys) as client, asyncio.TaskGroup() as group:
        context = ProcessContext(
            name=spec.name,
            role=spec.role,
            rank=spec.rank,
            cores=spec.cores,
            run_dir=run_dir,
            config=config,
            model_path=Path(control.model_path),
            keys=keys,
            host=process_host(config.network, control.address),
            supervisor=SupervisorCalls(
                client, call_s=config.timeouts.call_s, patience_s=config.timeouts.orphan_s
            ),
            group=group,
            connections=Connections(keys, directory),
            directory=directory,
            log=log,
        )
        context.start_services()
        try:
            yield context
        finally:
            await context.close()
