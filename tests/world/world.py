"""One run in virtual time: the product's processes, a seed, and the faults that the seed draws."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import itertools
import json
import logging
import os
import random
import shutil
import signal
import sqlite3
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import gateway as web
import httpx
import network
import parts
import torch
from composing import compose
from disk import Disk, fsync
from history import History
from loop import CURRENT, Process, VirtualLoop, kill, send_signal

from async_rl.config.base import as_builtins
from async_rl.config.checks.run import check
from async_rl.config.run import RunConfig
from async_rl.core.errors import AsyncRLError, ConfigError
from async_rl.launchers.api.resuming import reopen
from async_rl.launchers.api.starting import make_run_dir
from async_rl.monitoring import recorder
from async_rl.observability import activity
from async_rl.planning.topology import ProcessSpec
from async_rl.processes import buffer, gateway, generator, learner, supervisor, verifier
from async_rl.protocol.supervisor import Scale
from async_rl.rewards.verifier import pool
from async_rl.runs.status import config_of
from async_rl.runtime import context, directory
from async_rl.supervision import child, control, fleet, monitor, registry, scaler
from async_rl.supervision.registry import AwakeClock
from async_rl.training import checkpoints
from async_rl.wire.rpc import Keys

KEYS = Keys(server_public="", server_secret="", client_public="", client_secret="", token="")
SMALL = (
    "num_steps=8",
    "buffer.groups_per_step=2",
    "buffer.max_staleness_versions=1",
    "generation.group_size=2",
    "generation.max_concurrent_groups=3",
    "generators.count=2",
    "verifiers.count=1",
    "checkpoint.every_steps=2",
    "checkpoint.keep=2",
    "evaluation.every_steps=3",
    "weights.transfer=shared_memory",
    # More messages would give other worlds to the seeds that once found a fault.
    "weights.probe_every_pushes=0",
    "monitoring.tensorboard_port=null",
    "supervisor.max_restarts=1000",
    "learner.minibatches=1",
)


@dataclass
class Fault:
    """What happens at a time of the run. kind: the name of a method of World."""

    at_s: float
    kind: str
    arguments: tuple[Any, ...] = ()
    kinds: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class World:
    """One run. faults: in order of time. The attributes with a unit are means of random times."""

    seed: int
    path: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    token_s: float = 0.2
    verdict_s: float = 0.3
    step_s: float = 0.5
    load_s: float = 0.1
    save_s: float = 0.5
    commit_s: float = 0.002
    bad_batches: float = 0.0
    failed_verdicts: float = 0.0
    broken_loads: float = 0.0
    repeat: float = 0.0
    agent_s: float = 0.5
    dying_agents: float = 0.0
    agents_die_late: bool = False
    num_programs: int = 0
    """Programs outside the run, which take sessions of the first two gateways in turn."""
    has_disk: bool = False
    cut_at_sync: int = 0
    """The number of the sync at which the machine loses its power; 0: none."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        names = {"output_dir": str(self.path), "run_name": "run"} if self.has_disk else {}
        self.config = configured({**self.settings, **names})
        self.loop = VirtualLoop(lambda: self.rng.expovariate(1 / 0.002))
        self.network = network.Network(self.loop, self.rng, repeat=self.repeat)
        self.history = History(self)
        self.network.on_call = self.history.called
        self.handles: dict[str, parts.Handle] = {}
        self.processes: list[Process] = []
        self.log: list[str] = []
        self.run_dir = self.path / "run"
        self._pids = itertools.count(10_000_000)
        self.identities = itertools.count(1)
        self._on_fault = asyncio.Event()
        self.codes: list[int] = []
        self.started_s = 0.0
        self._usual_commit_s = self.commit_s
        rng = random.Random(f"disk {self.seed} {self.cut_at_sync}")
        self.disk = Disk(self.path, rng, self._on_sync) if self.has_disk else None
        self._image: dict[str, bytes | None] | None = None
        self._space_s = -1e9
        self.stops_in_push: dict[str, float] = {}
        self.rows: list[str] = []
        self._keeper: sqlite3.Connection | None = None
        self._wanted: dict[str, int] = {}
        self.scaled: dict[str, tuple[int, float]] = {}
        """By pool: the last size that the supervisor accepted, and when."""
        self.problems: list[str] = []
        self.strikes: dict[float, tuple[str, ...]] = {}
        """Faults at messages: when each had ended, and the processes that it hit."""

    # ---- what parts use

    def require_space(self) -> None:
        """Raise OSError if the disk is full."""
        if self.disk is not None and self.disk.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")

    def opened_store(self, path: Path) -> None:
        """Keep the log of the store: the last connection that closes would move it into the file,
        which a process that is killed does not.
        """
        if self.disk is not None:
            self.disk.create(f"run/{path.name}-wal")
            if self._keeper is None:
                self._keeper = sqlite3.connect(path)
                self._keeper.execute("SELECT count(*) FROM groups").fetchone()

    def new_process(self, name: str) -> Process:
        process = Process(name=name, pid=next(self._pids))
        self.processes.append(process)
        return process

    async def child(self, spec: ProcessSpec) -> int:
        await asyncio.sleep(0.2 + self.rng.expovariate(2.0))
        return await parts.run_child(spec, self.run_dir, _Log(self, spec.name))

    # ---- the run

    def play(self) -> list[str]:
        """Run; return, and keep in `problems`, the promises that break."""
        try:
            self.run()
            self.problems = self.history.check()
        except AssertionError as error:
            self.problems = [f"{type(error).__name__}: {error}"]
        except Exception as error:  # noqa: BLE001 - whatever ends the product is a finding
            self.problems = ["".join(traceback.format_exception(error))]
        return self.problems

    def run(self, until_s: float = 20_000.0) -> None:
        """Run to the end, resuming after each loss of the supervisor."""
        self.path.mkdir(parents=True, exist_ok=True)
        with self._patched():
            asyncio.set_event_loop(self.loop)
            try:
                if self.disk is None:
                    (self.run_dir / "logs").mkdir(parents=True)
                else:
                    make_run_dir(self.config)
                if self._image is None or self._restarted():
                    self.loop.run_until_complete(self._main(until_s))
                metrics = self.run_dir / "metrics.jsonl"
                self.rows = metrics.read_text().splitlines() if metrics.exists() else []
            finally:
                for process in self.processes:
                    kill(process)
                self.loop.bury()
                if self._keeper is not None:
                    self._keeper.close()
                asyncio.set_event_loop(None)

    async def _main(self, until_s: float) -> None:
        end_s = self.loop.time() + until_s
        faults = self.loop.create_task(self._cause(), name="faults")
        for number in range(self.num_programs):
            file = self.run_dir / "gateways" / f"gateway-{number % 2}.json"
            # Not one of the run's processes: it lives on when they are all lost.
            program = Process(f"program-{number}", next(self._pids))
            self.loop.start(program, web.Program.work(self, file), name="program")
        while True:
            self._on_fault.clear()
            self.supervisor = self.new_process("supervisor")
            running = self.loop.start(self.supervisor, self._supervise())
            lost = self.loop.create_task(self._on_fault.wait(), name="lost")
            await asyncio.wait(
                {running, lost},
                timeout=end_s - self.loop.time(),
                return_when=asyncio.FIRST_COMPLETED,
            )
            lost.cancel()
            if running.done():
                self.codes.append(running.result())
                if self.codes[-1] == 0 or self.loop.time() >= self._space_s + 600.0:
                    break
                # A person makes room, and resumes the run: another life of the supervisor, which
                # has no answers of the one that ended (rollouts/journal.py).
                self.history.answers.epoch += 1
                await asyncio.sleep(self._space_s - self.loop.time())
                self._on_fault.set()
            if not self._on_fault.is_set():
                tail = "\n".join(self.log[-60:])
                raise AssertionError(f"the run has not finished after {until_s:g} s\n{tail}")
            await asyncio.sleep(1.0)
            if self.disk is not None and not self._reopened():
                break
        faults.cancel()

    def _reopened(self) -> bool:
        """As async-rl resume: False if the run cannot be resumed."""
        try:
            config = config_of(self.run_dir)
            reopen(config, self.run_dir)
        except ConfigError as error:
            self.history.refused(str(error))
            return False
        self.history.resumed(config)
        return True

    async def _supervise(self) -> int:
        launcher = parts.Launcher(self)
        return await supervisor.Supervisor(
            config=self.config, run_dir=self.run_dir, launcher=launcher
        ).run()

    @property
    def cause(self) -> str:
        """Why the run has failed, as its outcome says."""
        return json.loads((self.run_dir / "state.json").read_text())["cause"]

    def warnings(self, text: str) -> list[str]:
        """The warnings and errors with this text."""
        return [
            line for line in self.log if text in line and (" WARNING " in line or "ERROR" in line)
        ]

    # ---- faults

    async def _cause(self) -> None:
        self.started_s = self.loop.time()
        for fault in self.faults:
            await asyncio.sleep(max(0.0, self.started_s + fault.at_s - self.loop.time()))
            self.log.append(f"{self.loop.time():9.3f} FAULT {fault.kind} {fault.arguments}")
            getattr(self, fault.kind)(*fault.arguments, **fault.kinds)

    def kill(self, name: str) -> None:
        """kill -9 of a process."""
        if name in self.handles:
            self.handles[name].kill()

    def stop(self, name: str, seconds: float) -> None:
        """kill -STOP, and kill -CONT some seconds later."""
        handle = self.handles.get(name)
        if handle is None or handle.process.is_dead:
            return
        handle.process.is_stopped = True
        self.loop.call_later(seconds, self.loop.resume, handle.process)

    def stop_in_push(self, name: str, seconds: float) -> None:
        """kill -STOP in the next load of weights."""
        self.stops_in_push[name] = seconds

    def cut(self, one: str, other: str, seconds: float) -> None:
        """No message passes from one process to the other."""
        if (one, other) not in self.network.cut:
            self.network.cut[one, other] = self.loop.time()
            self.loop.call_later(seconds, self.network.heal, (one, other))

    def isolate(self, name: str, seconds: float, buffer_s: float = 0.0) -> None:
        """The supervisor can neither reach a process nor end it: it replaces it, and both run.
        buffer_s: for how long the buffer does not hear it either.
        """
        handle = self.handles.get(name)
        if handle is None or handle.process.is_dead or handle.is_unreachable:
            return
        process = handle.process
        # Its successor has the old name.
        process.name = f"old {name} {process.pid}"
        handle.is_unreachable = True
        for one, other in ((process.name, "supervisor"), ("supervisor", process.name)):
            self.cut(one, other, seconds)
        if buffer_s:
            self.cut(process.name, "buffer", buffer_s)
        self.loop.call_later(seconds, setattr, handle, "is_unreachable", False)

    def at_message(
        self, kind: str, moment: str, number: int, fault: str, target: str, *arguments: float
    ) -> None:
        """The number-th message of this kind from now on brings a fault. target: client or server,
        whoever they are; empty for a fault of all.
        """

        def strike(client: Process, server: Process) -> None:
            ends = {"client": client.name, "server": server.name}
            names = (ends[target],) if target else ()
            if fault == "cut":
                names = (ends[target], *(name for name in ends.values() if name != ends[target]))
            self.strikes[self.loop.time() + sum(arguments)] = names
            self.log.append(f"{self.loop.time():9.3f} FAULT {fault} {names} {kind} {moment}")
            if fault == "kill" and "supervisor" in names:
                self.lose_all()
            else:
                getattr(self, fault)(*names, *arguments)

        self.network.armed.append(network.Armed(kind, moment, number, strike))

    def slow(self, name: str, by_s: float, seconds: float) -> None:
        """All messages of a process are late."""
        self.network.slow[name] = by_s
        self.loop.call_later(seconds, self.network.slow.pop, name, None)

    def slow_disk(self, commit_s: float, seconds: float) -> None:
        """Commits of the store take longer."""
        self.commit_s = commit_s
        self.loop.call_later(seconds, setattr, self, "commit_s", self._usual_commit_s)

    def scale(self, **wanted: int) -> None:
        """async-rl scale."""
        self.loop.start(Process(name="person", pid=1), self._scale(wanted))

    async def _scale(self, wanted: dict[str, int]) -> None:
        self._wanted = wanted
        # A run whose supervisor is away is scaled later, unless the person wants another size then.
        while self._wanted is wanted:
            with contextlib.suppress(AsyncRLError, FileNotFoundError):
                control = context.load_control(self.run_dir)
                client = network.Client(control.address, KEYS)
                await client.call(Scale(wanted=wanted), timeout_s=10.0)
                self.scaled |= {p: (count, self.loop.time()) for p, count in wanted.items()}
                return
            await asyncio.sleep(5.0)

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Ctrl-C."""
        send_signal(self.supervisor, signal.Signals(number))

    def jump(self, name: str, seconds: float) -> None:
        """The wall clock of a process's machine is set."""
        for process in self.processes:
            if process.name == name and not process.is_dead:
                process.clock_offset_s += seconds

    def lose_all(self) -> None:
        """kill -9 of the supervisor, whose children die with it; then a resume."""
        self.history.answers.epoch += 1
        for process in self.processes:
            kill(process)
        self.handles.clear()
        self._on_fault.set()

    def power_loss(self) -> None:
        """The machine loses its power; a person starts it and resumes the run."""
        if self.disk is not None:
            self._lose_power()
            self._end_all()

    def _on_sync(self, number: int) -> None:
        if number == self.cut_at_sync:
            self._lose_power()
            if self.loop.is_running():
                # The rest of this callback writes to files that the power loss discards.
                self.loop.call_next(self._end_all)

    def _lose_power(self) -> None:
        assert self.disk is not None
        self.log.append(f"{self.loop.time():9.3f} the power is lost")
        self._image = self.disk.image()
        self.history.lost_power()

    def _end_all(self) -> None:
        self.lose_all()
        self._restore_disk()

    def _restore_disk(self) -> None:
        assert self.disk is not None
        assert self._image is not None
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
        self.disk.restart(self._image)
        self._image = None
        self.history.restarted()

    def _restarted(self) -> bool:
        """After a power loss in the launch, a person launches again or resumes."""
        self._restore_disk()
        if self.run_dir.exists():
            return self._reopened()
        make_run_dir(self.config)
        return True

    @property
    def last_fault_s(self) -> float:
        """The time when the last fault has ended. Faults of a state name its seconds last."""
        ends = [self.started_s, *self.strikes]
        for fault in self.faults:
            numbers = [value for value in fault.arguments if isinstance(value, float)]
            lasting_s = sum(numbers) if fault.kind != "jump" else 0.0
            ends.append(self.started_s + fault.at_s + lasting_s)
        return max(ends)

    @property
    def kinds_of_faults(self) -> set[str]:
        """The faults of this world by kind."""
        return {fault.kind for fault in self.faults} | (
            {"power_loss"} if self.cut_at_sync else set()
        )

    def damage_checkpoint(self) -> None:
        """A bit of the newest of several checkpoints flips, and everything is killed."""
        for version in checkpoints.versions(self.run_dir)[1:][-1:]:
            path = checkpoints.directory_of(self.run_dir, version) / "weights.json"
            content = path.read_bytes()
            path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
            self.history.damaged(version)
        self.lose_all()

    def full_disk(self, seconds: float) -> None:
        """Nothing can be written for some seconds."""
        if self.disk is not None:
            self.disk.is_full = True
            self._space_s = self.loop.time() + seconds
            self.loop.call_later(seconds, setattr, self.disk, "is_full", False)

    # ---- the world around the product

    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        for part in (parts.Rollouts, parts.Pool, parts.Store):
            part.world = self
        network.Server.network = network.Client.network = self.network
        web.Transport.network, web.Transport.on_sent = self.network, self.history.sent
        with contextlib.ExitStack() as stack:
            # A world writes thousands of lines; `log` has those of its processes.
            stack.callback(logging.disable, logging.root.manager.disable)
            logging.disable(logging.CRITICAL)
            for target, name, value in self._replacements():
                stack.enter_context(mock.patch.object(target, name, value))
            if self.disk is not None:
                stack.enter_context(mock.patch.object(os, "fsync", fsync))
                stack.enter_context(self.disk)
            else:
                quick = mock.patch.object(recorder, "replace_file", Path.write_bytes)
                stack.enter_context(quick)
            yield

    def _replacements(self) -> Iterator[tuple[Any, str, Any]]:
        loop = self.loop
        yield time, "monotonic", loop.time
        yield time, "time", lambda: loop.time() + 1.7e9 + _offset_s()
        yield time, "time_ns", lambda: int(1e9 * (loop.time() + 1.7e9))
        yield os, "getpid", _getpid
        yield uuid, "uuid4", lambda: uuid.UUID(int=self.rng.getrandbits(128))
        yield loop, "_write_to_self", lambda: None
        yield context, "RpcServer", network.Server
        yield context, "RpcClient", network.Client
        yield context, "psutil", SimpleNamespace(Process=lambda *_: _PROCESS, Error=OSError)
        yield context, "moved_mb", lambda process: 100.0 * loop.time()
        yield context, "load_config", lambda run_dir: self.config
        yield context, "load_keys", lambda directory: KEYS
        yield context, "require_running", context.load_control
        yield directory, "RpcClient", network.Client
        yield directory, "random", self.rng
        yield supervisor, "RpcServer", network.Server
        yield supervisor, "create_keys", lambda directory: KEYS
        yield supervisor, "configure_logging", _Nothing
        for module in (supervisor, child, control, fleet, monitor, scaler):
            yield module, "_log", _Log(self, "supervisor")
        yield supervisor, "Console", _Nothing
        yield supervisor, "read_shape", lambda model_path: None
        yield supervisor, "prepare", _prepared
        # Their clock is a default, which is bound when the class is made.
        yield registry, "AwakeClock", lambda: AwakeClock(loop.time)
        real, kept = recorder.Recorder.__init__, activity.Activity.__init__
        clocks = {"clock": time.monotonic, "wall": time.time}
        yield recorder.Recorder, "__init__", functools.partialmethod(real, clock=loop.time)
        yield activity.Activity, "__init__", functools.partialmethod(kept, **clocks)
        yield recorder, "EventFile", _Nothing
        yield recorder, "_LOG", _Log(self, "metrics")
        yield buffer, "Store", parts.Store
        yield buffer, "spare_torch", _Nothing
        yield buffer, "load_tokenizer", lambda *_: parts.Tokenizer()
        yield buffer, "load_vocabulary_size", lambda *_: parts.VOCABULARY
        yield buffer, "open_prompts", lambda *_, **__: parts.Prompts(self.seed)
        yield generator, "prepare_environment", _Nothing
        yield generator, "import_engine", self._import_engine
        yield generator, "load_tokenizer", lambda *_: parts.Tokenizer()
        yield generator, "ToolCalls", _Nothing
        yield generator, "open_conversations", _Nothing
        yield generator, "Rollouts", parts.Rollouts
        yield generator, "FileReader", lambda *_, **__: _READER
        yield learner, "build_trainer", _Nothing
        yield learner, "learner_device", lambda gpus: torch.device("cpu")
        yield learner, "TrainingPool", parts.Pool
        yield verifier, "run", _verifier
        yield gateway, "spare_torch", _Nothing
        yield gateway, "spare_heap", _Nothing
        yield gateway, "load_tokenizer", lambda *_: parts.Tokenizer()
        yield gateway, "open_environments", lambda config: web.Agents(self)
        yield gateway, "listen_again", web.listen_again
        yield gateway, "serving", web.serving
        yield gateway, "url_of", str
        calls = {"AsyncClient": functools.partial(httpx.AsyncClient, transport=web.Transport())}
        yield pool, "httpx", SimpleNamespace(**vars(httpx) | calls)
        yield pool, "random", self.rng

    async def _import_engine(self, context: Any) -> Any:
        async def open_engine() -> parts.Engine:
            await asyncio.sleep(self.rng.expovariate(1.0))
            return parts.Engine(self)

        return open_engine


def story(path: Path, faults: Sequence[Fault] = (), *, seed: int = 1, **given: Any) -> World:
    """Play a world with these faults. given: attributes of World, and settings with two underscores
    instead of each dot.
    """
    own = {each.name for each in fields(World)} & given.keys()
    settings = {name.replace("__", "."): given[name] for name in given.keys() - own}
    kinds = {name: given[name] for name in own}
    world = World(seed=seed, path=path, settings=settings, faults=list(faults), **kinds)
    world.play()
    return world


def configured(settings: Mapping[str, Any]) -> RunConfig:
    """The small configuration with these values, checked. Composing each would take longer than
    running it.
    """
    values = as_builtins(compose("ppo_code", SMALL))
    for name, value in settings.items():
        *sections, last = name.split(".")
        section = values
        for each in sections:
            section = section[each]
        section[last] = value
    config = RunConfig.model_validate(values)
    check(config)
    return config


class _Log:
    """Keeps lines with their virtual time and process."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name
        self.info = functools.partial(self._add, "info")
        self.warning = functools.partial(self._add, "WARNING")
        self.error = functools.partial(self._add, "ERROR")

    def _add(self, level: str, text: str, *values: Any, **_: Any) -> None:
        line = text % values if values else text
        if not self._world.loop.is_over:
            self._world.log.append(f"{self._world.loop.time():9.3f} {self._name} {level} {line}")


class _Nothing:
    """An output that nobody reads: every method may be called."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


# Weights in the world need no file.
_READER = SimpleNamespace(localize=lambda *given: given, close=lambda: None)
_PROCESS = SimpleNamespace(
    memory_info=lambda: SimpleNamespace(rss=2**20),
    cpu_times=lambda: SimpleNamespace(user=0.0, system=0.0),
)


def _offset_s() -> float:
    process = CURRENT.get()
    return process.clock_offset_s if process is not None else 0.0


_REAL_PID = os.getpid()


def _getpid() -> int:
    process = CURRENT.get()
    return process.pid if process is not None else _REAL_PID


async def _prepared(run_dir: Path, on_progress: Any) -> Path:
    await asyncio.sleep(0.6)
    return run_dir / "model"


async def _verifier(context: Any) -> None:
    await context.register("http://127.0.0.1:1")
    await context.stopping.wait()


def clear(path: Path) -> None:
    """Remove what a world has left."""
    shutil.rmtree(path, ignore_errors=True)
