"""Facts about which process runs where."""

from typing import Any

import pytest
from composing import compose
from tables import table

from async_rl.composition.compose import compose_for
from async_rl.config.pool_sizes import pool_counts
from async_rl.core.machine import Machine
from async_rl.planning.topology import has_its_gpus, joining, processes

PINNED = ("generators.cores=[0]", "learner.cores=[1]")


@pytest.mark.proves("generators.count", "verifiers.count", "learner.ranks", "learner.cores")
@pytest.mark.proves("generators.cores", "learner.gpus_each", "generators.gpus_each")
@pytest.mark.covers("nnodes, n_gpus_per_node")
@pytest.mark.parametrize("case", table(__file__, "processes"))
def test_each_process_has_its_cores_threads_and_gpus(case: dict[str, Any]) -> None:
    has = {"cores": 2, "gpus": 0, "threads_per_core": 1} | case.get("machine", {})
    machine = Machine(
        cores=tuple(range(has["cores"])),
        num_gpus=has["gpus"],
        threads_per_core=has["threads_per_core"],
        memory_mb=8000,
    )
    config = compose("ppo_code", [*PINNED, *case.get("given", [])])
    specs = processes(config, machine, case.get("wanted"))
    run = {spec.name: spec for spec in specs}
    assert len(run) == len(specs)
    assert all(name == s.role or name == f"{s.role}-{s.rank}" for name, s in run.items())
    assert list(run) == case.get("names", list(run))
    assert sum(spec.role == "gateway" for spec in specs) == case.get("gateways", 0)
    for name, cores in case.get("cores", {}).items():
        assert run[name].cores == tuple(cores)
    for name, threads in case.get("threads", {}).items():
        assert run[name].env["OMP_NUM_THREADS"] == str(threads)
    gpus = {name: s.env.get("CUDA_VISIBLE_DEVICES") for name, s in run.items()}
    assert gpus == case.get("gpus", dict.fromkeys(run))
    orders = {spec.env.get("CUDA_DEVICE_ORDER") for spec in specs}
    assert orders == ({"PCI_BUS_ID"} if "gpus" in case else {None})


def test_a_joining_process_takes_the_lowest_free_rank_and_the_gpus_that_nobody_has() -> None:
    machine = Machine(cores=(0, 1), num_gpus=4, memory_mb=8000)
    words = ["generators.count=3", "generators.gpus_each=1", "learner.gpus_each=1"]
    config = compose("ppo_code", words)
    assert pool_counts(config) == {"generators": 3, "verifiers": 1}
    start = processes(config, machine)
    joins = joining(config, machine, "generators", [s for s in start if s.name != "generator-1"])
    assert joins == next(spec for spec in start if spec.name == "generator-1")
    assert (joins.env["CUDA_VISIBLE_DEVICES"], has_its_gpus(joins)) == ("2", True)
    beyond = joining(config, machine, "generators", start)
    assert (beyond.name, beyond.env["CUDA_VISIBLE_DEVICES"]) == ("generator-3", "")
    assert not has_its_gpus(beyond)
    assert joining(config, machine, "verifiers", start).name == "verifier-1"


def test_processes_have_cores_near_their_gpus() -> None:
    machine = Machine(
        cores=tuple(range(16)),
        core_nodes=(0,) * 8 + (1,) * 8,
        num_gpus=4,
        gpu_nodes=(0, 0, 1, 1),
        memory_mb=64_000,
    )
    config, _ = compose_for(machine, "grpo_code", ["hardware=gpus", "learner.ranks=1"])
    run = {spec.name: spec for spec in processes(config, machine)}
    for name, node in (("learner-0", 0), ("generator-0", 0), ("generator-2", 1)):
        assert run[name].cores
        assert {core // 8 for core in run[name].cores} == {node}, name
    assert not set(run["generator-1"].cores) & set(run["generator-2"].cores)
