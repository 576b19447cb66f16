"""The plan of a run over several nodes is fitted to their GPUs and refused with its numbers."""

from __future__ import annotations

from planning_models import LLAMA_70B, QWEN3_8B
from test_fit import LONG, machine

from async_rl.composition.compose import compose_for
from async_rl.config.base import with_settings
from async_rl.config.run import RunConfig
from async_rl.core.machine import Machine
from async_rl.planning.estimate import gpu_memory_mb, memory_mb
from async_rl.planning.fit import fit_problems
from async_rl.planning.presets import fitted, fleet, rank_counts
from async_rl.planning.shape import shape_from_hf

NODE = machine(8, memory_gb=2048)
CLUSTER = ("launcher=ray", "launcher.nodes=16", "launcher.gpus_per_node=8")


def planned(*overrides: str, hf: dict[str, object] = LLAMA_70B) -> tuple[RunConfig, list[str]]:
    """The fitted plan of a model on the nodes, and its problems."""
    # The last value of a setting counts.
    overrides = tuple({pair.partition("=")[0]: pair for pair in overrides}.values())
    given = [pair.partition("=")[0] for pair in overrides]
    config, _ = compose_for(NODE, "grpo_code", [*LONG, *overrides])
    whole = fleet(config, NODE)
    assert whole is not None
    config = fitted(config, shape_from_hf(hf), whole, given)
    return config, fit_problems(config, shape_from_hf(hf), whole)


def test_a_login_node_says_nothing_about_the_nodes() -> None:
    login = Machine(cores=(0, 1), num_gpus=0, memory_mb=64 << 10)
    config, _ = compose_for(login, "grpo_code", [*LONG, *CLUSTER])
    assert fleet(config, login) is None
    whole = fleet(config, NODE)
    assert whole is not None
    assert (whole.num_gpus, whole.gpu_mb, whole.memory_mb) == (128, 80 << 10, 16 * 2048 << 10)
    local, _ = compose_for(NODE, "grpo_code", [*LONG, "hardware=gpus"])
    assert fleet(local, NODE) is NODE


def test_a_learner_that_needs_several_nodes_has_whole_ones() -> None:
    config, problems = planned(*CLUSTER, "buffer.groups_per_step=64")
    assert problems == []
    assert (config.learner.ranks, config.generators.gpus_each) == (24, 4)
    # Three nodes learn, and each of the 13 others has two engines.
    assert config.generators.count == 26
    smaller = with_settings(config, {"learner.ranks": 16})
    assert gpu_memory_mb(smaller, "learner", shape_from_hf(LLAMA_70B)) > 0.95 * (80 << 10)


def test_a_small_model_stays_on_one_node() -> None:
    config, problems = planned(*CLUSTER, hf=QWEN3_8B)
    assert problems == []
    assert (config.learner.ranks, config.generators.count) == (8, 120)


def test_a_plan_that_does_not_fit_the_nodes_is_refused_with_the_numbers() -> None:
    config, (problem,) = planned(*CLUSTER)
    # A rank needs a group of its own.
    assert config.learner.ranks == 16
    assert "GB are needed (learner-0" in problem
    assert "one GPU has 80.0 GB; set learner." in problem
    # Main memory then has the parameters, the version that is sent and lists of its changes.
    offloaded = (*CLUSTER, "learner.offload=parameters")
    _, (problem,) = planned(*offloaded)
    assert "memory, a node has 2048.0 GB; raise learner.ranks" in problem
    assert planned(*offloaded, "buffer.groups_per_step=64", "learner.ranks=24")[1] == []


def test_numbers_of_ranks_are_whole_nodes_with_a_group_for_each_rank() -> None:
    config, _ = planned(*CLUSTER, "learner.ranks=2", "buffer.groups_per_step=24")
    whole = fleet(config, NODE)
    assert whole is not None
    assert rank_counts(config, whole, 127) == [2, 3, 4, 5, 6, 7, 8, 16, 24]
    pairs = with_settings(config, {"learner.context_ranks": 2})
    assert rank_counts(pairs, whole, 127) == [2, 4, 6, 8, 16, 24, 32, 40, 48]


def test_the_ranks_of_a_node_fit_its_main_memory() -> None:
    config, _ = planned(*CLUSTER, "buffer.groups_per_step=64")
    shape = shape_from_hf(LLAMA_70B)
    rank_gb = memory_mb(config, "learner", shape) / 1024
    small = fleet(config, machine(8, memory_gb=int(7 * rank_gb)))
    assert small is not None
    (problem,) = fit_problems(config, shape, small)
    assert problem.startswith(f"the learner ranks of a node need about {8 * rank_gb:.1f} GB")
    assert f"a node has {int(7 * rank_gb)}.0 GB" in problem


def test_an_engine_has_gpus_of_one_node() -> None:
    config, problems = planned(*CLUSTER, "launcher.gpus_per_node=2", "launcher.nodes=64")
    assert config.generators.gpus_each == 2
    assert problems != [], "four GPUs would be needed"


def test_gpus_of_a_node_that_are_too_few_for_an_engine_stay_free() -> None:
    three = ("generation.vllm.tensor_parallel_size=3", "generators.gpus_each=3")
    config, _ = planned(*CLUSTER, *three, "learner.ranks=2", hf=QWEN3_8B)
    assert config.generators.count == 2 + 15 * 2
