"""Facts about which process runs where."""

import pytest
from composing import compose

from async_rl.composition.compose import compose_for
from async_rl.config.pool_sizes import pool_counts
from async_rl.core.machine import Machine
from async_rl.planning.topology import ProcessSpec, has_its_gpus, joining, processes

TWO_CORES = Machine(cores=(0, 1), num_gpus=0, memory_mb=8000)
PINNED = ("generators.cores=[0]", "learner.cores=[1]")


def specs(*overrides: str, machine: Machine = TWO_CORES) -> dict[str, ProcessSpec]:
    listed = processes(compose("ppo_code", [*PINNED, *overrides]), machine)
    assert len({spec.name for spec in listed}) == len(listed)
    return {spec.name: spec for spec in listed}


def test_two_cores_generate_on_one_and_learn_on_the_other() -> None:
    run = specs()
    assert list(run) == ["buffer", "learner-0", "generator-0", "verifier-0"]
    assert (run["generator-0"].cores, run["learner-0"].cores, run["buffer"].cores) == (
        (0,),
        (1,),
        (),
    )


@pytest.mark.proves("generators.count", "verifiers.count")
def test_ranks_and_roles_follow_the_counts() -> None:
    run = specs("generators.count=2", "verifiers.count=3", "learner.ranks=2")
    assert [(s.role, s.rank) for s in run.values()] == [
        *[("buffer", 0), ("learner", 0), ("learner", 1), ("generator", 0), ("generator", 1)],
        *[("verifier", 0), ("verifier", 1), ("verifier", 2)],
    ]


@pytest.mark.proves("learner.ranks", "learner.cores")
def test_learner_ranks_divide_their_cores_and_share_them_where_there_are_too_few() -> None:
    machine = Machine(cores=tuple(range(8)), num_gpus=0, memory_mb=8000)
    run = specs("learner.ranks=3", "learner.cores=[0,1,2,3,4]", machine=machine)
    assert [run[f"learner-{r}"].cores for r in range(3)] == [(0,), (1, 2), (3, 4)]
    run = specs("learner.ranks=3", "learner.cores=[6,7]", machine=machine)
    assert [run[f"learner-{r}"].cores for r in range(3)] == [(6,), (7,), (6,)]
    assert specs("learner.cores=[]")["learner-0"].cores == ()


@pytest.mark.proves("generators.cores")
def test_generators_take_their_share_of_the_pool_and_start_again_at_its_end() -> None:
    machine = Machine(cores=tuple(range(8)), num_gpus=0, memory_mb=8000)
    run = specs(
        "generators.count=3",
        "generators.cores=[1,2]",
        machine=machine,
    )
    assert [run[f"generator-{r}"].cores for r in range(3)] == [(1,), (2,), (1,)]
    run = specs("generators.count=2", "generators.cores=[1,2,3,4]", machine=machine)
    assert [run[f"generator-{r}"].cores for r in range(2)] == [(1, 2), (3, 4)]
    run = specs("generators.count=2", "generators.cores=[]", machine=machine)
    assert [run[f"generator-{r}"].cores for r in range(2)] == [(), ()]
    assert specs("generators.cores=[0,1]")["generator-0"].cores == (0, 1)


def test_a_process_has_as_many_threads_as_cores() -> None:
    run = specs("learner.cores=[]", "generators.cores=[0]")
    assert [
        run[name].env["OMP_NUM_THREADS"]
        for name in ("generator-0", "learner-0", "verifier-0", "buffer")
    ] == ["1", "2", "1", "1"]


@pytest.mark.proves("learner.gpus_each", "generators.gpus_each")
@pytest.mark.covers("nnodes, n_gpus_per_node")
def test_gpus_are_dealt_out_whole_or_in_shares_and_hidden_from_the_others() -> None:
    machine = Machine(cores=(0, 1), num_gpus=4, memory_mb=8000)
    run = specs(
        "generators.count=2",
        "generators.gpus_each=0.5",
        "learner.gpus_each=1",
        "learner.ranks=2",
        machine=machine,
    )
    visible = {name: spec.env["CUDA_VISIBLE_DEVICES"] for name, spec in run.items()}
    assert visible == {
        "buffer": "",
        "verifier-0": "",
        "learner-0": "0",
        "learner-1": "1",
        "generator-0": "2",
        "generator-1": "2",
    }
    assert {spec.env["CUDA_DEVICE_ORDER"] for spec in run.values()} == {"PCI_BUS_ID"}
    assert "CUDA_VISIBLE_DEVICES" not in specs()["learner-0"].env


def test_a_joining_process_takes_the_lowest_free_rank_and_the_gpus_that_nobody_has() -> None:
    machine = Machine(cores=(0, 1), num_gpus=4, memory_mb=8000)
    config = compose(
        "ppo_code", ["generators.count=3", "generators.gpus_each=1", "learner.gpus_each=1"]
    )
    start = processes(config, machine)
    staying = [spec for spec in start if spec.name != "generator-1"]
    joins = joining(config, machine, "generators", staying)
    assert (joins.name, joins.env["CUDA_VISIBLE_DEVICES"], has_its_gpus(joins)) == (
        "generator-1",
        "2",
        True,
    )
    assert joins == next(spec for spec in start if spec.name == "generator-1")
    beyond = joining(config, machine, "generators", start)
    assert (beyond.name, beyond.env["CUDA_VISIBLE_DEVICES"], has_its_gpus(beyond)) == (
        "generator-3",
        "",
        False,
    )
    assert joining(config, machine, "verifiers", start).name == "verifier-1"


def test_wanted_counts_stand_in_for_those_of_the_configuration() -> None:
    machine = Machine(cores=(0, 1), num_gpus=0, memory_mb=8000)
    config = compose("ppo_code", ["generators.count=3"])
    assert pool_counts(config) == {"generators": 3, "verifiers": 1}
    names = [spec.name for spec in processes(config, machine, {"generators": 0, "verifiers": 2})]
    assert names == ["buffer", "learner-0", "verifier-0", "verifier-1"]


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


def test_hyperthreads_of_a_core_count_as_one_thread() -> None:
    machine = Machine(cores=(0, 4, 1, 5), threads_per_core=2, num_gpus=0, memory_mb=8000)
    run = specs("learner.cores=[0,4]", "generators.cores=[1,5]", machine=machine)
    assert run["learner-0"].env["OMP_NUM_THREADS"] == "1"
    assert run["generator-0"].env["OMP_NUM_THREADS"] == "1"


def test_agents_have_a_gateway_per_eight_generators_which_is_a_pool_like_the_others() -> None:
    def gateways(*overrides: str) -> list[str]:
        return [name for name in specs("rollout.fn=[a:b]", *overrides) if "gateway" in name]

    assert gateways() == gateways("generators.count=0") == ["gateway-0"]
    assert gateways("generators.count=8") == ["gateway-0"]
    assert gateways("generators.count=9") == ["gateway-0", "gateway-1"]
    config = compose("ppo_code", ["rollout.fn=[a:b]"])
    start = processes(config, TWO_CORES, {"generators": 1, "verifiers": 1, "gateways": 2})
    assert [spec.name for spec in start[-2:]] == ["gateway-0", "gateway-1"]
    joins = joining(config, TWO_CORES, "gateways", [start[-1]])
    assert (joins.name, joins.role, joins.rank) == ("gateway-0", "gateway", 0)
    assert "gateways" not in pool_counts(compose("ppo_code", []))
