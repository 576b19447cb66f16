"""Keeps as many processes of each pool as are wanted, while the other processes and the learner
continue.

takes: counts from people (`async-rl scale`)
waits for: the end of processes that leave
returns: specs to the fleet; `<run>/scale.json`, so that a resumed run has the same counts
woken by: a request to scale, a process that has left
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from async_rl.config.checks.run import machine_problems, raise_if_any
from async_rl.config.pool_sizes import pool_counts, with_counts
from async_rl.config.pools import (
    GATEWAYS,
    SCALE_FILE,
    SEATS_PER_POOL,
    VERIFIERS,
    generator_pools,
    pool_of,
    work_of,
)
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError, InfrastructureError
from async_rl.core.machine import Machine
from async_rl.core.os import replace_synced
from async_rl.planning.fit import fit_problems
from async_rl.planning.shape import ModelShape
from async_rl.planning.topology import ProcessSpec, has_its_gpus, joining
from async_rl.protocol.generator import Drain
from async_rl.protocol.supervisor import Member
from async_rl.runtime.directory import Connections, Incarnation
from async_rl.supervision.child import Child
from async_rl.supervision.fleet import Fleet
from async_rl.supervision.registry import Registry, in_time

_log = logging.getLogger(__name__)
_CLOSE_S = 5.0
_WITHOUT = {
    VERIFIERS: "nothing could be scored and every group would fail",
    GATEWAYS: "no agent could run",
}
"""The effect of a pool without processes; generators may all leave, and the learner then waits."""


def wanted_counts(config: RunConfig, run_dir: Path) -> dict[str, int]:
    """Return the processes per pool: the configured numbers, unless the run was scaled."""
    path = run_dir / SCALE_FILE
    try:
        scaled = msgspec.json.decode(path.read_bytes(), type=dict[str, int])
    except FileNotFoundError:
        scaled = {}
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}); remove it, and scale the run again"
        ) from error
    return {pool: scaled.get(pool, count) for pool, count in pool_counts(config).items()}


@dataclass(kw_only=True, eq=False)
class Scaler:
    """The wanted counts of one run."""

    config: RunConfig
    run_dir: Path
    machine: Machine
    fleet: Fleet
    registry: Registry
    connect: Connections
    shape: ModelShape | None
    group: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)

    def __post_init__(self) -> None:
        self.registry.work = {
            pool: work_of(self.config, pool) for pool in generator_pools(self.config)
        }

    async def run(self) -> None:
        """Scale the run until cancelled."""
        async with self.group:
            self._reconcile()
            await asyncio.Event().wait()  # keep the group open for processes that leave

    def scale(self, wanted: Mapping[str, int]) -> None:
        """Set the number of processes of these pools, as a person requests. Raises ConfigError, and
        changes nothing, if that is not possible.
        """
        # All checks come before the first change, so that a request is done as a whole or not at
        # all.
        raise_if_any(self._refusals(wanted))
        for pool, count in wanted.items():
            if count != self.registry.wanted[pool]:
                self._want(pool, count, "as requested by a person")
        self._reconcile()

    def give_up(self, spec: ProcessSpec, reason: str) -> None:
        """Want one process less: this one was added and could not start."""
        pool = pool_of(spec.name)
        count = max(0, self.registry.wanted[pool] - 1)
        _log.error("%s %s", spec.name, reason)
        self._want(pool, count, f"{spec.name} could not start")

    def _want(self, pool: str, count: int, reason: str) -> None:
        _log.info("%s=%d (was %d): %s", pool, count, self.registry.wanted[pool], reason)
        self.registry.wanted[pool] = count
        # A crash never leaves half a file for resume.
        replace_synced(self.run_dir / SCALE_FILE, msgspec.json.encode(self.registry.wanted))

    def _refusals(self, wanted: Mapping[str, int]) -> list[str]:
        pools = pool_counts(self.config)
        problems = []
        for pool, count in wanted.items():
            if pool not in pools:
                problems.append(
                    f"{pool}={count}: there is no such pool; this run has {', '.join(pools)}"
                )
            if not 0 <= count <= SEATS_PER_POOL:
                problems.append(f"{pool}={count}: give a number from 0 to {SEATS_PER_POOL}")
            if pool in _WITHOUT and count == 0:
                problems.append(f"{pool}=0: {_WITHOUT[pool]}; keep at least 1")
        if problems:
            return problems
        grown = with_counts(self.config, {**self.registry.wanted, **wanted})
        problems += machine_problems(grown, self.machine)
        # The memory of the nodes of a cluster is not known here. A run may always shrink.
        is_more = any(count > self.registry.wanted[pool] for pool, count in wanted.items())
        if is_more and not problems and self.shape and self.config.launcher.is_one_machine:
            problems += fit_problems(grown, self.shape, self.machine)
        return problems

    def _reconcile(self) -> None:
        """Add and remove processes until their number is the wanted one.

        The GPUs of a process that leaves become free later; this then runs again.
        """
        for pool, wanted in self.registry.wanted.items():
            staying = [
                child
                for child in self.fleet.children.values()
                if pool_of(child.name) == pool and not child.is_leaving
            ]
            # The highest ranks leave, so that the remaining names have no gaps.
            staying.sort(key=lambda child: child.spec.rank)
            for child in staying[wanted:]:
                self._remove(child)
            # One by one: each new process takes cores and GPUs that the next must not take.
            for _ in range(wanted - len(staying)):
                in_use = [child.spec for child in self.fleet.children.values()]
                spec = joining(self.config, self.machine, pool, in_use)
                # A cluster queues the process; locally it would start without a GPU.
                if self.config.launcher.is_one_machine and not has_its_gpus(spec):
                    break
                self.fleet.add(spec)

    def _remove(self, child: Child) -> None:
        _log.info("%s leaves", child.name)
        # Its address, before a draining verifier is taken off the list.
        member = self.registry.directory.find(child.name)
        self.fleet.remove(child.name)
        self.group.create_task(self._see_off(child, member), name=f"end {child.name}")

    async def _see_off(self, child: Child, member: Member | None) -> None:
        """Wait until a process has left.

        A generator or gateway finishes its groups and a verifier its requests. Groups that are not
        finished in time return to the buffer; requests are sent to another verifier.
        """
        if child.spec.role == "verifier":
            child.terminate()
            # No request takes longer than this.
            grace_s = self.config.timeouts.score_s
        else:
            grace_s = await self.drain(child.name, member)
        if not await in_time(child.has_left.wait(), grace_s):
            child.terminate()
            if not await in_time(child.has_left.wait(), _CLOSE_S):
                child.kill()
        # Its exit frees GPUs, for which a process of another pool may wait.
        await in_time(child.has_left.wait(), self.config.timeouts.stop_s)
        _log.info("%s has left", child.name)
        self._reconcile()

    async def drain(self, name: str, member: Member | None) -> float:
        """Ask a generator or gateway to finish its groups; return the seconds that it may take."""
        if member is not None:
            process = Incarnation(member, self.connect)
            try:
                await process.call(Drain(), timeout_s=self.config.timeouts.call_s)
            except InfrastructureError as error:
                _log.warning("%s cannot be drained: %s", name, error)
                return 0.0  # its groups go to another process without a delay
        return self.config.timeouts.drain_s
