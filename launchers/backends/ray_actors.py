"""Runs every process of a run as an actor of a Ray cluster: an existing one, or a new one on this
machine.

Invariants
- An actor starts its process as a child on its node and lives as long as that; it dies with the
  supervisor, its child dies with it.
- The run's directory is on a filesystem that the nodes share; the buffer, which writes the store,
  stays on the supervisor's node.
- An actor waits for resources without a limit, because an autoscaling cluster may add them; `pid`
  is 0 until then.
The only file that imports ray. Docs: docs/cluster.md.
"""

import asyncio
import contextlib
import logging
import os
import signal
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util import placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from async_rl.config.launchers import RayLaunch
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError, InfrastructureError
from async_rl.launchers.backends.backend import PlacedProcess
from async_rl.launchers.backends.cluster import (
    actor_options,
    group_strategy,
    is_with_learner,
    learner_bundles,
    needs,
    on_cluster,
)
from async_rl.launchers.backends.local import LocalLauncher, LocalProcess
from async_rl.planning.topology import ProcessSpec
from async_rl.wire.addresses import LOOPBACK

_KILL_S = 3.0
"""A node that does not answer for this time is treated as lost."""
_OWN_STORE_BYTES = 100 << 20  # Ray's object store contains nothing but the embedded model


class _Actor:
    """One process on a node of the cluster."""

    _process: LocalProcess

    async def start(self, spec: ProcessSpec, run_dir: Path) -> tuple[int, str]:
        """Start the process; return its id and the address of its node. Raises ConfigError without
        the run's directory.
        """
        # Ray's umask lets others read the logs of this actor's process.
        os.umask(0o077)
        if not await asyncio.to_thread(run_dir.is_dir):
            raise ConfigError(
                f"{run_dir} is missing there; set output_dir to a directory that all nodes share"
            )
        self._process = await LocalLauncher(run_dir).start(spec)
        return self._process.pid, _this_address()

    async def wait(self) -> int:
        """Return the exit code, once the process has exited."""
        return await self._process.wait()

    async def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    async def kill(self) -> None:
        """Send SIGKILL to the process and everything it has started."""
        self._process.kill()


class RayProcess(PlacedProcess):
    """An actor as the supervisor sees it."""

    def __init__(self, spec: ProcessSpec, run_dir: Path, actor: Any, *, waits_for: str) -> None:
        super().__init__(waits_for)
        self._node = ""
        self._actor = actor
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live(spec, run_dir), name=f"actor of {spec.name}")

    async def wait(self) -> int:
        """Return the exit code; -9 if the actor is lost."""
        # Several waiters share the future: cancelling one caller must not cancel it for other
        # callers.
        return await asyncio.shield(self._code)

    def terminate(self) -> None:
        """Send SIGTERM to the process; cancel one that still waits for resources."""
        if not self.pid:
            self.kill()
        elif not self._code.done():
            self._actor.terminate.remote()

    def kill(self) -> None:
        """End the process, and its actor in any case."""
        if not self._killing and not self._code.done():
            self._killing.add(asyncio.create_task(self._kill(), name="kill the actor"))

    async def close(self) -> None:
        """End the process and wait for its tasks."""
        self.kill()
        await asyncio.gather(self._life, *self._killing, return_exceptions=True)

    async def _live(self, spec: ProcessSpec, run_dir: Path) -> None:
        code = -signal.SIGKILL
        try:
            self.pid, self._node = await self._actor.start.remote(spec, run_dir)
            self._is_placed.set()
            code = await self._actor.wait.remote()
        except RayTaskError as error:
            cause = error.cause
            self.why = f"could not be run on its node: {type(cause).__name__}: {cause}"
        except RayError as error:
            if not self._killing:
                where = f"on its node {self._node}" if self._node else "before it had a node"
                self.why = f"was lost {where}: {_first_line(error)}"
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
        self._is_placed.set()
        if not self._code.done():
            self._code.set_result(code)


class RayLauncher:
    """Starts actors in the cluster of `launcher.address`."""

    def __init__(self, run_dir: Path, config: RunConfig) -> None:
        self._run_dir = run_dir.absolute()
        assert isinstance(config.launcher, RayLaunch)
        self._config = config
        self._launch = config.launcher
        self._is_own = self._launch.address == "local"
        self._started: list[RayProcess] = []
        self._learner_group: Any = None

    async def open(self) -> str:
        """Connect to the cluster. Raises ConfigError if there is none at its address."""
        # Not in the main thread: there Ray would handle SIGTERM, which must end the run in order.
        await asyncio.to_thread(self._connect)
        return LOOPBACK if self._is_own else _this_address()

    async def close(self) -> None:
        """End every actor and disconnect from the cluster."""
        await asyncio.gather(*(process.close() for process in self._started))
        if ray.is_initialized():
            await asyncio.to_thread(ray.shutdown)

    async def start(self, spec: ProcessSpec) -> RayProcess:
        """Ask the cluster for an actor. Raises InfrastructureError if the cluster is lost."""
        try:
            # Numbered: the previous actor may still be running.
            name = f"{spec.name} {len(self._started)}"
            options = self._options(spec)
            # No restarts by Ray: the supervisor decides about them, and counts them.
            actor = ray.remote(_Actor).options(name=name, max_restarts=0, **options).remote()
        except (RayError, OSError, ValueError) as error:
            raise InfrastructureError(
                f"the Ray cluster does not accept {spec.name}: {error}"
            ) from error
        placed = on_cluster(self._config, spec)
        waits_for = needs(self._config, spec)
        process = RayProcess(placed, self._run_dir, actor, waits_for=waits_for)
        self._started.append(process)
        return process

    def _connect(self) -> None:
        address = self._launch.address
        try:
            if not self._is_own:
                try:
                    self._init(address)
                    return
                except ConnectionError:
                    # A given address is meant; "auto" may start a cluster of the run's own.
                    if address != "auto":
                        raise
            self._is_own = True
            self._init("local", include_dashboard=False, object_store_memory=_OWN_STORE_BYTES)
        except (RayError, OSError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"launcher.address={address}: no Ray cluster to connect to ({_first_line(error)});"
                " start one with ray start --head and give its HOST:PORT from a machine that"
                " belongs to it, or set launcher.address=local to start one for this run"
            ) from error

    def _init(self, address: str, **options: Any) -> None:
        ray.init(
            address=address,
            # Two runs in one cluster have actors of the same names.
            namespace=f"async_rl-{self._run_dir.name}",
            log_to_driver=False,
            logging_level=logging.ERROR,
            **options,
        )

    def _options(self, spec: ProcessSpec) -> dict[str, Any]:
        """Return the actor's options: its resources and its node."""
        options = actor_options(self._config, spec, is_own_cluster=self._is_own)
        bundles = learner_bundles(self._config, is_own_cluster=self._is_own)
        node_id = ray.get_runtime_context().get_node_id()
        if bundles and is_with_learner(self._config, spec):
            # The group outlives restarts, so that no other actor takes its resources in between.
            if self._learner_group is None:
                strategy = group_strategy(self._config)
                self._learner_group = placement_group(bundles, strategy=strategy)
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._learner_group, spec.rank if spec.role == "learner" else 0
            )
        elif spec.role == "buffer":
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=False)
        elif spec.role == "verifier":
            # Another node only if this one is full, because it could take a generator's resources.
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
                node_id, soft=True, _spill_on_unavailable=True
            )
        return options


def _this_address() -> str:
    return str(ray.util.get_node_ip_address())


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
