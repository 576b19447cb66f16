"""Facts about combinations of settings that are refused."""

import pytest
from tables import table

from async_rl.composition.compose import compose, compose_unchecked
from async_rl.composition.schema import find
from async_rl.config.checks.run import machine_problems, rows
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


def test_combinations_that_work_are_accepted() -> None:
    for overrides in table(__file__, "accepted"):
        compose("ppo_code", overrides)


def test_what_the_machine_lacks_is_refused_and_a_cluster_may_have() -> None:
    machine = Machine(cores=(0, 1, 2, 3), num_gpus=1, memory_mb=8000)
    for overrides, expected in table(__file__, "what_the_machine_lacks_is"):
        (line,) = machine_problems(compose("ppo_code", overrides), machine)
        assert expected in line
    config = compose("ppo_code", ["launcher=ray", "generators.count=2", "generators.gpus_each=1"])
    assert list(machine_problems(config, Machine(cores=(0,), num_gpus=0, memory_mb=8000))) == []


def test_every_condition_is_about_a_setting() -> None:
    assert {path for row in rows() for path, _, _ in row.when if find(path) is None} == set()


def test_a_text_with_a_dot_is_the_path_of_a_setting() -> None:
    others = {other for row in rows() for _, _, other in row.when if isinstance(other, str)}
    assert {other for other in others if "." in other and find(other) is None} == set()
