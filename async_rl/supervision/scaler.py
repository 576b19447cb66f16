"""Keeps as many processes of each pool as are wanted: adds and lets go, while the others and the
learner go on.

takes: counts from people (`async-rl scale`); with generators.autoscale the shares of time that the
members tell
waits for: the next look of the autoscaler; the end of processes that leave
gives: specs to the fleet; `<run>/scale.json`, so that a resumed run has as many
woken by: the clock, a process that has left
Used by the supervisor.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from async_rl.config.checks.run import machine_problems, raise_if_any
from async_rl.config.pools import (
    GENERATORS,
    SEATS_PER_POOL,
    VERIFIERS,
    evaluates_only,
    generator_pools,
    pool_counts,
    pool_of,
    with_counts,
    work_of,
)
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError, InfrastructureError
from async_rl.core.machine import Machine
from async_rl.monitoring.bottleneck import share, total_rate
from async_rl.planning.headroom import Headroom
from async_rl.planning.scaling import Steering
from async_rl.planning.topology import SCALE_FILE, ProcessSpec, has_its_gpus, joining
from async_rl.protocol.generator import Drain
from async_rl.protocol.membership import Member
from async_rl.runtime.directory import Connections, Incarnation
from async_rl.supervision.fleet import Fleet
from async_rl.supervision.registry import Registry

_CLOSE_S = 5.0


def wanted_counts(config: RunConfig, run_dir: Path) -> dict[str, int]:
    """Processes per pool: those in the configuration, unless the run was scaled."""
    try:
        scaled = msgspec.json.decode((run_dir / SCALE_FILE).read_bytes(), type=dict[str, int])
    except FileNotFoundError:
        scaled = {}
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{run_dir / SCALE_FILE} cannot be read ({error}); remove it, and scale the run again"
        ) from error
    return {pool: scaled.get(pool, count) for pool, count in pool_counts(config).items()}


class Scaler:
    """The wanted counts of one run, and the way there."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        *,
        machine: Machine,
        fleet: Fleet,
        registry: Registry,
        connect: Connections,
        headroom: Headroom,
        log: logging.Logger,
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._headroom = headroom
        self._machine = machine
        self._fleet = fleet
        self._registry = registry
        registry.work = {pool: work_of(config, pool) for pool in generator_pools(config)}
        self._connect = connect
        self._log = log
        self._group: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            self._reconcile()
            await self._autoscale()

    def scale(self, wanted: Mapping[str, int], reason: str, *, is_forced: bool) -> None:
        """So many processes of these pools from now on. Raises ConfigError, and changes nothing, if
        that cannot be.

        is_forced: whether or not memory seems to suffice.  `generators.big` may be called `big`.
        """
        names = {pool.removeprefix(f"{GENERATORS}."): pool for pool in pool_counts(self._config)}
        for short, pool in names.items():
            if short in wanted and pool in wanted and short != pool:
                raise ConfigError(
                    f"{short}={wanted[short]}: {short} and {pool} are the same pool; give it once"
                )
        wanted = {names.get(pool, pool): count for pool, count in wanted.items()}
        raise_if_any(self._refusals(wanted))
        if not is_forced:
            raise_if_any(self._headroom.problems(self._registry.pools(), wanted))
        changed = {
            pool: count for pool, count in wanted.items() if count != self._registry.wanted[pool]
        }
        for pool, count in changed.items():
            self._log.info("%s=%d (was %d): %s", pool, count, self._registry.wanted[pool], reason)
        self._want(changed)
        self._reconcile()

    def given_up(self, spec: ProcessSpec, why: str) -> None:
        """A process that was added could not be started: the run goes on with those it has."""
        pool = pool_of(spec.name)
        count = max(0, self._registry.wanted[pool] - 1)
        self._log.error("%s %s; it is given up, %s=%d", spec.name, why, pool, count)
        self._want({pool: count})

    def _want(self, wanted: Mapping[str, int]) -> None:
        self._registry.wanted.update(wanted)
        partial = self._run_dir / f"{SCALE_FILE}.partial"
        partial.write_bytes(msgspec.json.encode(self._registry.wanted))
        partial.replace(self._run_dir / SCALE_FILE)

    def _refusals(self, wanted: Mapping[str, int]) -> list[str]:
        pools = pool_counts(self._config)
        found = [
            f"{pool}={count}: there is no such pool; {_nearest(pool, pools)}this run has"
            f" {', '.join(pools)}"
            for pool, count in wanted.items()
            if pool not in pools
        ]
        found += [
            f"{pool}={count}: give a number from 0 to {SEATS_PER_POOL}"
            for pool, count in wanted.items()
            if not 0 <= count <= SEATS_PER_POOL
        ]
        if wanted.get("verifiers") == 0:
            found.append(
                "verifiers=0: nothing could be scored and every group would fail; keep at least 1"
            )
        auto = self._config.generators.autoscale
        if auto.pool in wanted and auto.enabled:
            found.append(
                f"{auto.pool}={wanted[auto.pool]}: generators.autoscale.enabled=true decides on"
                " them; resume the run with generators.autoscale.enabled=false to decide yourself"
            )
        if not found and wanted.keys() - {VERIFIERS}:
            found += machine_problems(
                with_counts(self._config, {**self._registry.wanted, **wanted}), self._machine
            )
        return found

    def _reconcile(self) -> None:
        """Adds and lets go until there are as many as wanted. GPUs of those that still leave come
        free later; then this runs again.
        """
        for pool, wanted in self._registry.wanted.items():
            staying = [
                s
                for s in self._fleet.specs
                if pool_of(s.name) == pool and not self._fleet.is_leaving(s.name)
            ]
            for spec in sorted(staying, key=lambda s: -s.rank)[: max(0, len(staying) - wanted)]:
                self._let_go(spec)
            for _ in range(wanted - len(staying)):
                spec = joining(self._config, self._machine, pool, self._fleet.specs)
                if self._config.launcher == "local" and not has_its_gpus(spec):
                    break
                self._fleet.add(spec)

    def _let_go(self, spec: ProcessSpec) -> None:
        self._log.info("%s leaves", spec.name)
        member = next((m for m in self._registry.directory.members if m.name == spec.name), None)
        self._fleet.let_go(spec.name)
        if self._group is not None:
            self._group.create_task(self._see_off(spec, member), name=f"see {spec.name} off")

    async def _see_off(self, spec: ProcessSpec, member: Member | None) -> None:
        """A generator finishes its groups, a verifier its requests; what is not done in time goes
        back, or is asked elsewhere.
        """
        grace_s = (
            self._config.generators.drain_timeout_s
            if spec.role == "generator"
            else self._config.verifiers.timeout_s
        )
        if spec.role == "verifier":
            self._fleet.end(spec.name, at_once=False)
        elif member is not None:
            try:
                call = Incarnation(member, self._registry.directory, self._connect).call
                await call(Drain(), timeout_s=self._config.network.call_timeout_s)
            except InfrastructureError as error:
                self._log.warning(
                    "%s cannot be asked to finish what it holds: %s", spec.name, error
                )
                grace_s = 0.0
        for at_once, wait_s in ((False, grace_s), (True, _CLOSE_S)):
            if await self._fleet.until_left(spec.name, timeout_s=wait_s):
                break
            self._fleet.end(spec.name, at_once=at_once)
        await self._fleet.until_left(spec.name, timeout_s=self._config.supervisor.stop_timeout_s)
        self._log.info("%s has left", spec.name)
        self._reconcile()

    async def _autoscale(self) -> None:
        """Looks every interval_s; decides on windows in which every generator that trains and is
        wanted served, and none left.
        """
        auto, before = self._config.generators.autoscale, list[Member]()
        steering, is_told = Steering(auto), False
        while True:
            await asyncio.sleep(auto.interval_s)
            pools = {
                pool.pool: pool
                for pool in self._registry.pools()
                if pool.work not in ("", "evaluation")
            }
            members = [
                m for m in self._registry.members if not evaluates_only(self._config, m.name)
            ]
            if not auto.enabled or any(
                pool.live != pool.wanted or pool.draining for pool in pools.values()
            ):
                before = []
                continue
            pool = pools.pop(auto.pool)
            others = sum(other.wanted for other in pools.values())
            waits, held = (
                share(members, before, "learner", "wait_s"),
                share(members, before, "generator", "blocked_s"),
            )
            is_outside = not auto.min <= pool.wanted <= auto.max
            if is_outside or (before and waits is not None and held is not None):
                rate = total_rate(members, before, "generator", "tokens_generated")
                decision = steering.decide(
                    pool.wanted,
                    others=others,
                    learner_waits=waits or 0.0,
                    held_back=held or 0.0,
                    rate=rate,
                )
                problems = self._headroom.problems(
                    self._registry.pools(), {auto.pool: decision.wanted}
                )
                if problems and not is_told:
                    is_told = True
                    self._log.warning("%s; not added: %s", decision.reason, problems[0])
                elif not problems and decision.wanted != pool.wanted:
                    is_told = False
                    self._log.info(
                        "%s=%d (was %d): %s",
                        auto.pool,
                        decision.wanted,
                        pool.wanted,
                        decision.reason,
                    )
                    self._want({auto.pool: decision.wanted})
                    self._reconcile()
                    members = []
            before = members


def _nearest(name: str, pools: Iterable[str]) -> str:
    by_any_name = {
        known: pool for pool in pools for known in (pool, pool.removeprefix(f"{GENERATORS}."))
    }
    return "".join(
        f"did you mean {by_any_name[known]}? "
        for known in difflib.get_close_matches(name, by_any_name, 1)
    )
