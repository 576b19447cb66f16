"""From wanted counts to processes that come and go, with a fleet of scripted processes."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from composing import compose
from fleet_support import World, virtually
from tables import table

from async_rl.composition.hardware import model_shape
from async_rl.config.base import replace
from async_rl.config.pools import SCALE_FILE
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.core.machine import Machine
from async_rl.planning.estimate import gb, total_memory_mb
from async_rl.planning.topology import processes
from async_rl.runtime.directory import Connections
from async_rl.supervision.scaler import Scaler, wanted_counts
from async_rl.wire.rpc import create_keys

MACHINE = Machine(cores=(0, 1), num_gpus=0, memory_mb=8000)


class ScaledRun(World):
    """Processes that serve as soon as they are started, and end when asked."""

    def __init__(self, config: RunConfig, run_dir: Path, machine: Machine) -> None:
        wanted = wanted_counts(config, run_dir)
        super().__init__(processes(config, machine, wanted), run_dir, World.register)
        self.registry.wanted = wanted
        self.scaler = Scaler(
            config=config,
            run_dir=run_dir,
            machine=machine,
            fleet=self.fleet,
            registry=self.registry,
            connect=Connections(create_keys(run_dir / "keys"), self.registry.directory),
            shape=None if machine is MACHINE else model_shape(config),
        )


def with_run(
    config: RunConfig,
    run_dir: Path,
    act: Callable[[ScaledRun], Awaitable[None]],
    machine: Machine = MACHINE,
) -> None:
    async def main() -> None:
        run = ScaledRun(config, run_dir, machine)
        async with run.running():
            scaling = asyncio.create_task(run.scaler.run())
            await act(run)
            scaling.cancel()
            await asyncio.wait((scaling,))

    virtually(main())


@pytest.mark.parametrize(("settings", "num_gpus", "refusals"), table(__file__, "refused"))
def test_what_cannot_be_is_refused_with_its_remedy_and_changes_nothing(
    tmp_path: Path, settings: list[str], num_gpus: int, refusals: list[tuple[dict[str, int], str]]
) -> None:
    async def act(run: ScaledRun) -> None:
        before = dict(run.registry.wanted)
        for wanted, remedy in refusals:
            with pytest.raises(ConfigError, match=remedy):
                run.scaler.scale(wanted)
            assert run.registry.wanted == before, wanted
        assert not (tmp_path / SCALE_FILE).exists()

    machine = Machine(cores=(0, 1), num_gpus=num_gpus, memory_mb=8000)
    with_run(compose("grpo_code", settings), tmp_path, act, machine)


POOLS = ("generators.pools={big:{count:1,work:train},judge:{count:1,work:evaluation}}",)
START = ("buffer", "learner-0", "verifier-0", "generator-0", "generator-big-0", "generator-judge-0")


def test_each_pool_is_scaled_by_itself_and_kept_for_a_later_life(tmp_path: Path) -> None:
    config = compose("grpo_code", POOLS)

    async def act(run: ScaledRun) -> None:
        await run.until(*START)
        run.scaler.scale({"generators.big": 3, "generators.judge": 0})
        await run.until(*START[:-1], "generator-big-1", "generator-big-2")
        run.scaler.scale({"generators.big": 1, "generators": 2})
        await run.until(*START[:-1], "generator-1")
        found = {pool.pool: (pool.wanted, pool.live, pool.work) for pool in run.registry.pools()}
        assert found == {
            "generators": (2, 2, "train"),
            "generators.big": (1, 1, "train"),
            "generators.judge": (0, 0, "evaluation"),
            "verifiers": (1, 1, ""),
        }

    with_run(config, tmp_path, act)
    assert wanted_counts(config, tmp_path) == {
        "generators": 2,
        "generators.big": 1,
        "generators.judge": 0,
        "verifiers": 1,
    }
    assert wanted_counts(compose("grpo_code", []), tmp_path) == {"generators": 2, "verifiers": 1}


def test_more_than_fits_in_memory_is_refused_with_figures_and_fewer_never(tmp_path: Path) -> None:
    config = compose("grpo_code", ["verifiers.count=2"])
    grown = replace(config, generators=replace(config.generators, count=3))
    needed_mb = total_memory_mb(grown, model_shape(config))

    async def act(run: ScaledRun) -> None:
        await run.until("buffer", "learner-0", "verifier-0", "verifier-1", "generator-0")
        with pytest.raises(ConfigError, match=f"needs about {gb(needed_mb)} of memory"):
            run.scaler.scale({"generators": 3})
        assert run.registry.wanted["generators"] == 1
        run.scaler.scale({"generators": 2})
        run.scaler.give_up(run.fleet.children["generator-1"].spec, "failed: OutOfMemory")
        run.scaler.scale({"verifiers": 1})
        assert run.registry.wanted == {"generators": 1, "verifiers": 1}

    with_run(config, tmp_path, act, dataclasses.replace(MACHINE, memory_mb=needed_mb - 1))


def test_the_memory_of_this_machine_does_not_limit_a_cluster(tmp_path: Path) -> None:
    async def act(run: ScaledRun) -> None:
        await run.until("buffer", "learner-0", "verifier-0", "generator-0")
        run.scaler.scale({"generators": 4})
        assert run.registry.wanted["generators"] == 4

    on_cluster = compose("grpo_code", ["launcher=ray"])
    with_run(on_cluster, tmp_path, act, dataclasses.replace(MACHINE, memory_mb=1))
