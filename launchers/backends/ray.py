"""Runs every process of a run as an actor of a Ray cluster: an existing one, or one of its own on
this machine.

Invariants
- An actor starts its process as a child on its node and lives as long as that; it dies with the
  supervisor, its child dies with it.
- Buffer and learner run on the supervisor's node, where store and checkpoints are, unless
  cluster.shared_run_dir says that every node has the run's directory.  Any other process gets what
  it needs (configuration, keys, the supervisor's address, the embedded model) with its actor, in a
  directory that goes with the actor (node_directory.py), and its logs come back as they are
  written.
- An actor that waits for resources waits as long as it takes (an autoscaling cluster brings them);
  `pid` is 0 meanwhile.
The only file that imports ray. Docs: docs/cluster.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError, RayTaskError
from ray.util import placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError, InfrastructureError
from async_rl.launchers.backends.cluster import needs, on_cluster
from async_rl.launchers.backends.local import LocalLauncher
from async_rl.launchers.backends.node_directory import NodeDirectory
from async_rl.launchers.backends.ray_places import actor_options, buffer_bundles, learner_bundles
from async_rl.observability.logs import log_path
from async_rl.planning.topology import ProcessSpec
from async_rl.runtime.context import Control, load_config, load_control
from async_rl.wire.addresses import LOOPBACK

_SHIPPED = ("config.yaml", "control.json", "keys/keys.json")
_LOOK_S = 0.5
_KILL_S = 3.0
"""A node that does not answer for so long is treated as gone."""
_OWN_STORE_BYTES = 100 << 20  # nothing but the embedded model ever lies in Ray's object store
_HERE = ("buffer", "learner")


class NodeProcess:
    """The actor: one process of the run, on the node where Ray has put it. files: what to unpack;
    none = the directory is there.
    """

    def __init__(
        self, spec: ProcessSpec, run_dir: str, files: dict[str, bytes], model: dict[str, bytes]
    ) -> None:
        self._spec = spec
        self._files = files
        self._model = model
        self._run_dir = Path(run_dir)
        self._sent: NodeDirectory | None = None

    async def start(self) -> tuple[int, str]:
        """Starts the process: its id and the node's address."""
        if self._files:
            await asyncio.to_thread(self._unpack)
        launcher = LocalLauncher(self._run_dir)
        self._logs = (launcher.output_of(self._spec.name), log_path(self._run_dir, self._spec.name))
        self._process = await launcher.start(self._spec)
        return self._process.pid, str(ray.util.get_node_ip_address())

    async def wait(self) -> int:
        """The exit code, once it has ended."""
        return await self._process.wait()

    async def follow(self) -> AsyncIterator[tuple[str, bytes]]:
        """(file name, bytes) of what it adds to its logs, until its end."""
        read = dict.fromkeys(self._logs, 0)
        ended = asyncio.create_task(self._process.wait(), name="end of the process")
        is_over = False
        while not is_over:
            is_over = bool((await asyncio.wait({ended}, timeout=_LOOK_S))[0])
            for path in self._logs:
                data = await asyncio.to_thread(_read_from, path, read[path])
                read[path] += len(data)
                if data:
                    yield path.name, data

    async def terminate(self) -> None:
        """SIGTERM."""
        self._process.terminate()

    async def kill(self) -> None:
        """SIGKILL to the process and all it has started."""
        self._process.kill()

    async def leave(self) -> None:
        """Removes what was unpacked."""
        if self._sent is not None:
            await asyncio.to_thread(self._sent.remove)

    def _unpack(self) -> None:
        """A directory of the run for this process alone."""
        self._sent = NodeDirectory(f"{self._run_dir.name}-{self._spec.name}")
        self._run_dir = self._sent.path
        model = {f"model/{name}": data for name, data in self._model.items()}
        for name, data in {**self._files, **model}.items():
            self._sent.write(name, data)
        control = load_control(self._run_dir)
        (self._run_dir / "control.json").write_bytes(
            msgspec.json.encode(
                msgspec.structs.replace(control, model_path=str(self._model_path(control)))
            )
        )

    def _model_path(self, control: Control) -> Path:
        if self._model:
            return self._run_dir / "model"
        if Path(control.model_path).is_dir():
            return Path(control.model_path)
        from async_rl.data.prepare import (
            prepare_model,
        )  # a hub name: this node's cache, or a download

        return prepare_model(load_config(self._run_dir), lambda *_: None)


class RayProcess:
    """An actor as the supervisor sees it. keep: takes what the process adds to its logs; None = it
    writes them into the run itself.
    """

    def __init__(
        self, name: str, actor: Any, keep: Callable[[str, bytes], None] | None, *, waits_for: str
    ) -> None:
        self.pid = 0
        self.waits_for = waits_for
        self.why = ""
        self._node = ""
        self._actor = actor
        self._keep = keep
        self._has_place = asyncio.Event()
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live(), name=f"actor of {name}")
        self._killing: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._code.done()

    async def placed(self) -> None:
        """Returns once the actor has started the process, or never will."""
        await self._has_place.wait()

    async def wait(self) -> int:
        """The exit code; -9 if the actor is gone."""
        return await asyncio.shield(self._code)

    def terminate(self) -> None:
        """SIGTERM to the process; one that still waits for a place gives the wait up."""
        if not self.pid:
            self.kill()
        elif not self._code.done():
            self._actor.terminate.remote()

    def kill(self) -> None:
        """Ends the process, and its actor in any case."""
        if self._killing is None and not self._code.done():
            self._killing = asyncio.create_task(self._kill(), name="kill the actor")

    async def close(self) -> None:
        """Ends whatever is left."""
        self.kill()
        await asyncio.gather(
            self._life, *([self._killing] if self._killing else []), return_exceptions=True
        )

    async def _live(self) -> None:
        code = -signal.SIGKILL
        try:
            self.pid, self._node = await self._actor.start.remote()
            self._has_place.set()
            if self._keep is not None:
                async for addition in self._actor.follow.remote():
                    self._keep(*await addition)
            code = await self._actor.wait.remote()
            await self._actor.leave.remote()
        except RayError as error:
            if self._killing is None:
                self.why = self._reason(error)
        finally:
            self._end(code)
            ray.kill(self._actor)

    async def _kill(self) -> None:
        with contextlib.suppress(TimeoutError, RayError):
            if self.pid:
                async with asyncio.timeout(_KILL_S):
                    await self._actor.kill.remote()
                    await self._life
        ray.kill(self._actor)
        self._end(-signal.SIGKILL)
        self._life.cancel()

    def _end(self, code: int) -> None:
        self._has_place.set()
        if not self._code.done():
            self._code.set_result(code)

    def _reason(self, error: RayError) -> str:
        if isinstance(error, RayTaskError):
            return f"could not be run on its node: {type(error.cause).__name__}: {error.cause}"
        where = f"on its node {self._node}" if self._node else "before it had a node"
        return f"was lost {where}: {str(error).strip().splitlines()[0]}"


class RayLauncher:
    """Starts actors in the cluster of `ray.address`."""

    def __init__(self, run_dir: Path, config: RunConfig) -> None:
        self._run_dir = run_dir.absolute()
        self._config = config
        self._is_own = config.ray.address == "local"
        self._started: list[RayProcess] = []
        self._num_started = 0
        self._groups: dict[str, Any] = {}
        self._model: Any = None

    async def open(self) -> str:
        """Connects to the cluster. Raises ConfigError if there is none at `ray.address`."""
        # Not in the main thread: there Ray would take SIGTERM, which ends the run in order, for
        # itself.
        await asyncio.to_thread(self._connect)
        self._node_id = ray.get_runtime_context().get_node_id()
        self._host = str(ray.util.get_node_ip_address())
        return LOOPBACK if self._is_own else self._host

    async def close(self) -> None:
        """Ends every actor and lets go of the cluster."""
        await asyncio.gather(*(process.close() for process in self._started))
        if ray.is_initialized():
            await asyncio.to_thread(ray.shutdown)

    def output_of(self, name: str) -> Path:
        """The file with what the process and its libraries print."""
        return LocalLauncher(self._run_dir).output_of(name)

    async def start(self, spec: ProcessSpec) -> RayProcess:
        """Asks the cluster for an actor. Raises InfrastructureError if the cluster is gone."""
        is_here = self._config.cluster.shared_run_dir or spec.role in _HERE
        try:
            files = (
                {} if is_here else {name: (self._run_dir / name).read_bytes() for name in _SHIPPED}
            )
            model = {} if is_here else self._shipped_model()
            make = ray.remote(NodeProcess).options(
                name=f"{spec.name} {self._num_started}", max_restarts=0, **self._place(spec)
            )
            actor = make.remote(on_cluster(self._config, spec), str(self._run_dir), files, model)
        except (RayError, OSError, ValueError) as error:
            raise InfrastructureError(
                f"{spec.name} cannot be given to the Ray cluster: {error}"
            ) from error
        process = RayProcess(
            spec.name, actor, None if is_here else self._keep, waits_for=needs(self._config, spec)
        )
        self._started = [*(one for one in self._started if not one.is_over), process]
        self._num_started += 1
        return process

    def _connect(self) -> None:
        common = {
            "namespace": f"async_rl-{self._run_dir.name}",
            "log_to_driver": False,
            "logging_level": logging.ERROR,
        }
        try:
            if not self._is_own:
                with (
                    contextlib.suppress(ConnectionError)
                    if self._config.ray.address == "auto"
                    else contextlib.nullcontext()
                ):
                    ray.init(address=self._config.ray.address, **common)
                    return
                self._is_own = True
            ray.init(
                address="local",
                include_dashboard=False,
                object_store_memory=_OWN_STORE_BYTES,
                **common,
            )
        except (RayError, OSError, ValueError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"ray.address={self._config.ray.address}: no Ray cluster to connect to ({reason});"
                " start one with ray start --head, give its HOST:PORT from a machine that belongs"
                " to it, or ray.address=local for one of the run's own"
            ) from error

    def _place(self, spec: ProcessSpec) -> dict[str, Any]:
        """Options of the actor: what it takes and where."""
        options = actor_options(self._config, spec, is_own_cluster=self._is_own)
        where: dict[str, Any] = {"supervisor_host": self._host, "is_own_cluster": self._is_own}
        if spec.role == "learner" or (
            spec.role == "generator" and self._config.placement == "colocated"
        ):
            owner, bundles = "learner", learner_bundles(self._config, **where)
        else:
            owner, bundles = (
                spec.role,
                buffer_bundles(self._config, **where) if spec.role == "buffer" else [],
            )
        if bundles:
            if owner not in self._groups:  # it outlives restarts: nobody takes the place meanwhile
                self._groups[owner] = placement_group(
                    bundles, strategy=self._config.ray.learner.upper()
                )
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._groups[owner], spec.rank if owner == spec.role else 0
            )
        elif spec.role == "buffer":
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
                self._node_id, soft=False
            )
        elif (
            spec.role == "verifier"
        ):  # elsewhere only if there is no room here: it might take the place of a generator
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
                self._node_id, soft=True, _spill_on_unavailable=True
            )
        return options

    def _shipped_model(self) -> Any:
        """The embedded model's files, once for all actors; a model with a path is on every node, or
        comes from the hub.
        """
        if self._config.model.path is not None:
            return {}
        if self._model is None:
            directory = Path(load_control(self._run_dir).model_path)
            self._model = ray.put(
                {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
            )
        return self._model

    def _keep(self, file_name: str, data: bytes) -> None:
        with (self._run_dir / "logs" / file_name).open("ab") as file:
            file.write(data)


def _read_from(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read()
    except OSError:
        return b""
