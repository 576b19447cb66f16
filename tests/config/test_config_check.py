"""Facts about combinations of settings that are refused."""

import pytest
from tables import table

from async_rl.composition.compose import compose, compose_unchecked
from async_rl.config.checks.machine import machine_problems
from async_rl.core.errors import ConfigError
from async_rl.core.machine import Machine


@pytest.mark.parametrize(("overrides", "expected"), table(__file__, "refused"))
def test_a_combination_that_cannot_work_is_refused_with_its_remedy(
    overrides: list[str], expected: str
) -> None:
    compose_unchecked("ppo_code", overrides)
    with pytest.raises(ConfigError) as caught:
        compose("ppo_code", overrides)
    (line,) = str(caught.value).splitlines()
    assert expected in line


@pytest.mark.parametrize("overrides", table(__file__, "accepted"))
def test_a_combination_that_works_is_accepted(overrides: list[str]) -> None:
    compose("ppo_code", overrides)


@pytest.mark.parametrize(("overrides", "expected"), table(__file__, "what_the_machine_lacks_is"))
def test_what_the_machine_lacks_is_refused(overrides: list[str], expected: str) -> None:
    machine = Machine(cores=(0, 1, 2, 3), num_gpus=1, memory_mb=8000)
    (line,) = machine_problems(compose("ppo_code", overrides), machine)
    assert expected in line


def test_what_this_machine_lacks_a_cluster_may_have() -> None:
    config = compose("ppo_code", ["launcher=ray", "generators.count=2", "generators.gpus_each=1"])
    assert list(machine_problems(config, Machine(cores=(0,), num_gpus=0, memory_mb=8000))) == []


def test_one_device_in_turns_needs_nothing_but_the_word() -> None:
    assert compose("ppo_code", ["placement=colocated"]).placement == "colocated"
    shared = [
        "placement=colocated",
        "learner.gpus_each=0.5",
        "generators.gpus_each=0.5",
        "weights.push_every_steps=2",
    ]
    assert (
        compose("ppo_code", [*shared, "buffer.max_staleness_versions=4"]).weights.push_every_steps
        == 2
    )
