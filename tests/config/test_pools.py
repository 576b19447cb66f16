"""Pools of generators: what a pool reads, who writes what, where its processes run, and what is
refused.
"""

from pathlib import Path
from typing import Any

import pytest
from tables import table

from async_rl.composition.compose import compose, recompose, write_config
from async_rl.composition.hardware import model_shape
from async_rl.composition.overrides import with_defaults
from async_rl.config.base import as_builtins
from async_rl.config.checks.run import machine_problems
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
from async_rl.planning.estimate import total_memory_mb
from async_rl.planning.fit import fit_problems
from async_rl.planning.topology import processes
from async_rl.runs import status

TWO_CORES = Machine(cores=(0, 1), num_gpus=0, memory_mb=8000)
BIG = ("generators.pools.big.count=2", "generators.pools.big.work=train")
JUDGE = ("generators.pools.judge.count=1", "generators.pools.judge.work=evaluation")
CORES = (f"{pool}.cores=[]" for pool in ("generators", "learner", "verifiers"))
GPUS = ("hardware=gpus", *CORES, "learner.ranks=1")


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


def test_a_setting_of_a_pool_stands_in_its_processes_where_that_of_the_rest_stands() -> None:
    rows = table(__file__, "places")
    assert {name for name, *_ in rows} == set(PLACES)
    assert set(PoolConfig.model_fields) - set(PLACES) == {"work"}
    for name, value, more in rows:
        given = f"generators.pools.big.{name}={value}".replace(" ", "")
        config = settings(*with_defaults([*more, given], BIG))
        own = config_of(config, "generators.big")
        assert value_at(own, PLACES[name]) == value, name
        plain = settings(*(word for word in more if word.startswith("launcher=")))
        assert value_at(config, PLACES[name]) == value_at(plain, PLACES[name]) != value, name
        assert config_of(config, "generators") == config_of(config, "verifiers") == config
    config = settings(*BIG, "generators.pools.big.max_num_seqs=64")
    tree = as_builtins(config_of(config, "generators.big"))
    tree["generation"]["vllm"]["max_num_seqs"] = config.generation.vllm.max_num_seqs
    tree["generators"]["count"] = config.generators.count
    assert tree == as_builtins(config), "the rest of the configuration is the same"


def test_names_of_processes_tell_their_pool_and_no_two_draw_the_same_noise() -> None:
    config = settings(*BIG, *JUDGE)
    names = [spec.name for spec in processes(config, TWO_CORES) if spec.role == "generator"]
    assert names == ["generator-0", "generator-big-0", "generator-big-1", "generator-judge-0"]
    pools = ["generators", "generators.big", "generators.big", "generators.judge"]
    assert [pool_of(name) for name in names] == pools
    assert process_name("generators.big_one", 3) == "generator-big_one-3"
    assert [pool_of(name) for name in ("verifier-3", "buffer", "learner-0", "supervisor")] == [
        *("verifiers", "", "", "")
    ]
    seats = [seat(config, name) for name in names]
    assert (len(set(seats)), seats[0]) == (4, 0)


def test_the_plain_generators_evaluate_until_a_pool_is_there_for_it_alone() -> None:
    plain, big, judge = "generators", "generators.big", "generators.judge"
    for words, work in (
        ((), {plain: "both"}),
        (BIG, {plain: "both", big: "train"}),
        ((*BIG, *JUDGE), {plain: "train", big: "train", judge: "evaluation"}),
    ):
        config = settings(*words)
        assert {pool: work_of(config, pool) for pool in generator_pools(config)} == work
        for pool in work:
            assert evaluates_only(config, process_name(pool, 0)) == (pool == judge)


def test_pools_are_composed_from_files_and_overrides_and_come_back_from_a_runs_file(
    tmp_path: Path,
) -> None:
    mine = tmp_path / "mine.yaml"
    big = "{count: 2, work: both, max_num_seqs: 64}"
    mine.write_text(f"defaults: [ppo_code]\ngenerators: {{count: 0, pools: {{big: {big}}}}}\n")
    small = "generators.pools.small={count:1,work:both}"
    config = compose(str(mine), ["generators.pools.big.count=3", small])
    counts = {"generators": 0, "generators.big": 3, "generators.small": 1, "verifiers": 1}
    assert pool_counts(config) == counts
    assert config.generators.pools["big"].max_num_seqs == 64
    write_config(config, tmp_path / "config.yaml")
    assert recompose(status.config_of(tmp_path), []) == config
    more = ["generators.pools.big.work=train", "generators.pools={more:{count:4,work:both}}"]
    again = recompose(status.config_of(tmp_path), more)
    assert (again.generators.pools["big"].work, again.generators.pools["big"].count) == ("train", 3)
    assert pool_counts(again) == {**counts, "generators.more": 4}


def test_a_pool_that_cannot_work_is_refused_with_its_remedy() -> None:
    for overrides, expected in table(__file__, "refused"):
        assert expected in refusal(*overrides), overrides
    assert refusal(*BIG, "generation.vllm.max_num_seqs=4").count("\n") == 0, "told once"


def test_gpus_are_dealt_out_by_pool_and_a_tensor_parallel_generator_takes_one_for_each_part() -> (
    None
):
    parts = "generators.pools.big.tensor_parallel_size=2"
    machine = Machine(cores=tuple(range(8)), num_gpus=8, memory_mb=64_000)
    config = settings(*GPUS, *BIG, *JUDGE, "generators.count=1", parts)
    assert not list(machine_problems(config, machine))
    specs = [spec for spec in processes(config, machine) if spec.gpus]
    assert {spec.name: spec.env["CUDA_VISIBLE_DEVICES"] for spec in specs} == {
        "learner-0": "0",
        "generator-0": "1",
        "generator-big-0": "2,3",
        "generator-big-1": "4,5",
        "generator-judge-0": "6",
    }
    machine = Machine(cores=(0, 1), num_gpus=4, memory_mb=64_000)
    config = settings(*GPUS, *BIG, "generators.count=1", parts)
    (line,) = machine_problems(config, machine)
    assert "learner.gpus_each=1 x 1 need 6 GPUs, this machine has 4" in line
    assert not list(machine_problems(with_counts(config, {"generators.big": 1}), machine))


def test_the_estimate_of_memory_counts_every_pool() -> None:
    shape = model_shape(settings())
    assert shape is not None
    sizes = ("big.kv_cache_mb=164", "judge.max_concurrent_groups=9")
    pools = (*BIG, *JUDGE, *(f"generators.pools.{size}" for size in sizes))
    alone, two, more = (
        total_memory_mb(settings(*words), shape) for words in ((), ("generators.count=2",), pools)
    )
    assert more - alone == 3 * (two - alone) + 2 * 100
    small = (*BIG, "generators.pools.big.kv_cache_mb=1", "data.max_response_tokens=350")
    machine = Machine(cores=(0, 1), num_gpus=0, memory_mb=99_999)
    (problem,) = fit_problems(settings(*small), shape, machine)
    assert problem.startswith("generators.pools.big.kv_cache_mb=1 holds")
