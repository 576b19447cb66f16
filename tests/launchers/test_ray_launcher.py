"""Facts about launcher=ray that need no cluster: what an actor takes, and where it may go."""

from typing import Any

import pytest
from composing import compose
from tables import table

from async_rl.config.run import RunConfig
from async_rl.core.machine import Machine
from async_rl.launchers.backends.cluster import (
    actor_options,
    group_strategy,
    learner_bundles,
)
from async_rl.planning.topology import ProcessSpec, processes

MACHINE = Machine(cores=(0, 1), num_gpus=0, memory_mb=8000)


def settings(*overrides: str) -> RunConfig:
    return compose("ppo_code", ["launcher=ray", *overrides])


def spec(config: RunConfig, name: str) -> ProcessSpec:
    return next(spec for spec in processes(config, MACHINE) if spec.name == name)


@pytest.mark.parametrize(("overrides", "name", "expected"), table(__file__, "actors"))
def test_an_actor_takes_what_its_role_takes(
    overrides: list[str], name: str, expected: dict[str, Any]
) -> None:
    config = settings(*overrides)
    assert (
        actor_options(config, spec(config, name), is_own_cluster=False).items() >= expected.items()
    )
    assert actor_options(config, spec(config, name), is_own_cluster=True)["num_cpus"] == 0


@pytest.mark.parametrize(("overrides", "is_own", "expected"), table(__file__, "bundles"))
def test_a_bundle_has_what_a_learner_rank_takes(
    overrides: list[str], is_own: bool, expected: list[dict[str, float]]
) -> None:
    config = settings(*overrides)
    assert learner_bundles(config, is_own_cluster=is_own) == expected


def test_the_learner_is_on_one_node_if_it_fits_there() -> None:
    for ranks, gpus, expected in ((8, 8, "STRICT_PACK"), (8, 4, "PACK"), (2, 0, "PACK")):
        nodes = ("launcher.nodes=2", f"launcher.gpus_per_node={gpus}")
        assert group_strategy(settings(*nodes, f"learner.ranks={ranks}")) == expected
