"""Pools of generators: what a pool reads, who writes what, where its processes run, and what is
refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tables import table

from async_rl.composition.compose import compose, recompose, write_config
from async_rl.composition.hardware import model_shape
from async_rl.composition.overrides import with_defaults
from async_rl.config.base import as_builtins
from async_rl.config.checks.machine import machine_problems
from async_rl.config.generation import PoolConfig
from async_rl.config.pool_sizes import pool_counts, process_name, with_counts
from async_rl.config.pools import (
    PLACES,
    config_of,
    evaluates_only,
    generator_pools,
    pool_of,
    seat,
    work_of,
)
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.core.machine import Machine
from async_rl.launchers.backends.cluster import actor_options, cluster_cpus, is_with_learner
from async_rl.launchers.backends.local import child_command
from async_rl.launchers.backends.slurm import SlurmLauncher
from async_rl.planning.estimate import total_memory_mb
from async_rl.planning.fit import fit_problems
from async_rl.planning.topology import ProcessSpec, processes
from async_rl.runs import status

TWO_CORES = Machine(cores=(0, 1), num_gpus=0, memory_mb=8000)
BIG = ("generators.pools.big.count=2", "generators.pools.big.work=train")
JUDGE = ("generators.pools.judge.count=1", "generators.pools.judge.work=evaluation")
GPUS = (
    "hardware=gpus",
    "generators.cores=[]",
    "learner.cores=[]",
    "verifiers.cores=[]",
    "learner.ranks=1",
)


def settings(*overrides: str) -> RunConfig:
    return compose("ppo_code", list(overrides))


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        settings(*overrides)
    return str(caught.value)


def value_at(config: RunConfig, path: str) -> Any:
    found: Any = as_builtins(config)
    for name in path.split("."):
        found = found[name]
    return found


@pytest.mark.parametrize(
    ("name", "value", "more"),
    [
        ("count", 3, ()),
        ("cores", [1], ()),
        ("gpus_each", 0.5, ()),
        ("max_concurrent_groups", 5, ()),
        ("tensor_parallel_size", 2, ("generators.pools.big.gpus_each=2",)),
        ("max_num_seqs", 64, ()),
        ("max_num_batched_tokens", 4096, ()),
        ("kv_cache_mb", 96, ()),
        ("gpu_memory_utilization", 0.5, ()),
        ("cpus_each", 4, ("launcher=ray",)),
        ("node_kind", "h100", ("launcher=ray",)),
    ],
)
def test_a_setting_of_a_pool_stands_in_its_processes_where_that_of_the_rest_stands(
    name: str, value: Any, more: tuple[str, ...]
) -> None:
    given = str(value).replace(" ", "")
    own = f"generators.pools.big.{name}={given}"
    config = settings(*with_defaults([*more, own], BIG))
    assert value_at(config_of(config, "generators.big"), PLACES[name]) == value
    plain = settings(*(word for word in more if word.startswith("launcher=")))
    assert value_at(config, PLACES[name]) == value_at(plain, PLACES[name]) != value
    assert config_of(config, "generators") == config_of(config, "verifiers") == config


def test_each_setting_of_a_pool_has_its_place_and_the_rest_of_the_configuration_is_the_same() -> (
    None
):
    assert set(PoolConfig.model_fields) - set(PLACES) == {"work"}
    config = settings(*BIG, "generators.pools.big.max_num_seqs=64")
    own = as_builtins(config_of(config, "generators.big"))
    own["generation"]["vllm"]["max_num_seqs"] = config.generation.vllm.max_num_seqs
    own["generators"]["count"] = config.generators.count
    assert own == as_builtins(config)


def test_names_of_processes_tell_their_pool() -> None:
    for pool, name in (
        ("generators", "generator-3"),
        ("generators.big_one", "generator-big_one-3"),
        ("verifiers", "verifier-3"),
    ):
        assert process_name(pool, 3) == name
        assert pool_of(name) == pool
    assert [pool_of(name) for name in ("buffer", "learner-0", "supervisor")] == ["", "", ""]


def test_no_two_generators_draw_the_same_noise() -> None:
    config = settings(*BIG, *JUDGE)
    names = [spec.name for spec in processes(config, TWO_CORES) if spec.role == "generator"]
    seats = [seat(config, name) for name in names]
    assert names == ["generator-0", "generator-big-0", "generator-big-1", "generator-judge-0"]
    assert len(set(seats)) == 4
    assert seats[0] == 0


@pytest.mark.parametrize(
    ("overrides", "work"),
    [
        (BIG, {"generators": "both", "generators.big": "train"}),
        (
            (*BIG, *JUDGE),
            {"generators": "train", "generators.big": "train", "generators.judge": "evaluation"},
        ),
        (
            ("generators.pools={a:{count:1,work:both}}",),
            {"generators": "both", "generators.a": "both"},
        ),
    ],
)
def test_the_plain_generators_evaluate_until_a_pool_is_there_for_it_alone(
    overrides: tuple[str, ...], work: dict[str, str]
) -> None:
    config = settings(*overrides)
    assert {pool: work_of(config, pool) for pool in generator_pools(config)} == work
    assert [evaluates_only(config, process_name(pool, 0)) for pool in work] == [
        w == "evaluation" for w in work.values()
    ]


def test_pools_are_composed_from_files_and_overrides_and_come_back_from_a_runs_file(
    tmp_path: Path,
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "defaults: [ppo_code]\ngenerators: {count: 0, pools: {big: {count: 2, work: both,"
        " max_num_seqs: 64}}}\n"
    )
    config = compose(
        str(mine), ["generators.pools.big.count=3", "generators.pools.small={count:1,work:both}"]
    )
    assert pool_counts(config) == {
        "generators": 0,
        "generators.big": 3,
        "generators.small": 1,
        "verifiers": 1,
    }
    assert config.generators.pools["big"].max_num_seqs == 64
    write_config(config, tmp_path / "config.yaml")
    assert recompose(status.config_of(tmp_path), []) == config
    again = recompose(
        status.config_of(tmp_path),
        ["generators.pools.big.work=train", "generators.pools={more:{count:4,work:both}}"],
    )
    assert (again.generators.pools["big"].work, again.generators.pools["big"].count) == ("train", 3)
    assert pool_counts(again) == {**pool_counts(config), "generators.more": 4}


@pytest.mark.parametrize(("overrides", "expected"), table(__file__, "refused"))
def test_a_pool_that_cannot_work_is_refused_with_its_remedy(
    overrides: tuple[str, ...], expected: str
) -> None:
    assert expected in refusal(*overrides)


def test_what_is_wrong_for_all_is_told_once() -> None:
    assert refusal(*BIG, "generation.vllm.max_num_seqs=4").count("\n") == 0


def test_gpus_are_dealt_out_by_pool_and_a_tensor_parallel_generator_takes_one_for_each_part() -> (
    None
):
    machine = Machine(cores=tuple(range(8)), num_gpus=8, memory_mb=64_000)
    config = settings(
        *GPUS, *BIG, *JUDGE, "generators.count=1", "generators.pools.big.tensor_parallel_size=2"
    )
    assert not list(machine_problems(config, machine))
    visible = {
        spec.name: spec.env["CUDA_VISIBLE_DEVICES"]
        for spec in processes(config, machine)
        if spec.gpus
    }
    dealt = {
        "learner-0": "0",
        "generator-0": "1",
        "generator-big-0": "2,3",
        "generator-big-1": "4,5",
        "generator-judge-0": "6",
    }
    assert visible == dealt


def test_too_many_gpus_are_told_pool_by_pool() -> None:
    config = settings(
        *GPUS, *BIG, "generators.count=1", "generators.pools.big.tensor_parallel_size=2"
    )
    (line,) = machine_problems(config, Machine(cores=(0, 1), num_gpus=4, memory_mb=64_000))
    assert line.startswith(
        "generators.gpus_each=1 x 1 and generators.pools.big.gpus_each=2 x 2 and"
        " learner.gpus_each=1 x 1 need 6 GPUs, this machine has 4"
    )
    assert not list(
        machine_problems(
            with_counts(config, {"generators.big": 1}),
            Machine(cores=(0, 1), num_gpus=4, memory_mb=64_000),
        )
    )


def test_a_pool_may_have_cores_of_its_own() -> None:
    config = settings(*JUDGE, "generators.pools.judge.cores=[1]", "generators.cores=[0]")
    cores = {spec.name: spec.cores for spec in processes(config, TWO_CORES)}
    assert (cores["generator-0"], cores["generator-judge-0"]) == ((0,), (1,))
    lacking = settings(
        *JUDGE,
        "generators.pools.judge.cores=[7]",
        "generators.cores=[0]",
        "learner.cores=[1]",
        "verifiers.cores=[1]",
    )
    (line,) = machine_problems(lacking, TWO_CORES)
    assert line.startswith("generators.pools.judge.cores=[7]: this machine does not have 7")


def test_pools_share_the_cores_as_evenly_as_one_pool_would() -> None:
    machine = Machine(cores=tuple(range(4)), num_gpus=0, memory_mb=8000)
    config = settings(*BIG, *JUDGE, "generators.cores=[0,1,2,3]")
    cores = [spec.cores for spec in processes(config, machine) if spec.role == "generator"]
    assert cores == [(0,), (1,), (2,), (3,)]


def spec(config: RunConfig, name: str) -> ProcessSpec:
    return next(spec for spec in processes(config, TWO_CORES) if spec.name == name)


def test_on_a_cluster_each_pool_takes_its_own_of_a_node() -> None:
    own = ("tensor_parallel_size=2", "gpus_each=2", "cpus_each=6", "node_kind=h100")
    config = settings(
        "launcher=ray",
        "launcher.node_kind=a100",
        *BIG,
        *(f"generators.pools.big.{setting}" for setting in own),
    )
    plain, big = (
        actor_options(config, spec(config, name), is_own_cluster=False)
        for name in ("generator-0", "generator-big-0")
    )
    assert (plain["num_cpus"], plain["num_gpus"], plain["resources"]) == (1, 0, {"a100": 1})
    assert (big["num_cpus"], big["num_gpus"], big["resources"]) == (6, 2, {"h100": 1})
    assert [
        cluster_cpus(config, spec(config, name))
        for name in ("generator-0", "generator-big-1", "verifier-0")
    ] == [1, 6, 2]


def test_a_gateway_is_placed_on_a_cluster_as_any_process(tmp_path: Path) -> None:
    config = settings("launcher=slurm", "rollout.fn=[a:b]", "generators.count=9")
    gateway = spec(config, "gateway-1")
    cpus = 1 + config.agent.workers
    assert cluster_cpus(config, gateway) == cpus
    options = SlurmLauncher(tmp_path, config).srun_command(gateway)
    assert f"--cpus-per-task={cpus}" in options
    assert not [option for option in options if option.startswith("--nodelist")]
    on_ray = settings("launcher=ray", "rollout.fn=[a:b]", "generators.count=9")
    options_of_ray = actor_options(on_ray, gateway, is_own_cluster=False)
    assert (options_of_ray["num_cpus"], options_of_ray["num_gpus"]) == (cpus, 0)
    assert not is_with_learner(on_ray, gateway)
    assert '"role":"gateway"' in child_command(gateway, tmp_path, parent_pid=1)[-1]


def test_the_estimate_of_memory_counts_every_pool() -> None:
    shape = model_shape(settings())
    assert shape is not None
    alone, more = (
        settings(),
        settings(
            *BIG,
            *JUDGE,
            "generators.pools.big.kv_cache_mb=164",
            "generators.pools.judge.max_concurrent_groups=9",
        ),
    )
    each = total_memory_mb(settings("generators.count=2"), shape) - total_memory_mb(alone, shape)
    assert total_memory_mb(more, shape) - total_memory_mb(alone, shape) == 3 * each + 2 * 100
    (problem,) = fit_problems(
        settings(*BIG, "generators.pools.big.kv_cache_mb=1", "data.max_response_tokens=350"),
        shape,
        Machine(cores=(0, 1), num_gpus=0, memory_mb=99_999),
    )
    assert problem.startswith("generators.pools.big.kv_cache_mb=1 holds")


def test_without_pools_there_are_those_of_always() -> None:
    assert settings().generators.pools == {}
    assert pool_counts(settings("verifiers.count=2")) == {"generators": 1, "verifiers": 2}
    assert work_of(settings(), "generators") == "both"
