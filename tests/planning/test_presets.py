"""The settings that follow from the model and the GPUs: they fit, and what a user gave stays."""

import itertools
import operator
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from planning_models import LLAMA_70B, MODELS, QWEN3_06B, QWEN3_8B, QWEN3_30B_A3B
from test_fit import LONG, machine, settled

from async_rl.composition.compose import compose_for
from async_rl.composition.overrides import with_defaults
from async_rl.config.base import with_settings
from async_rl.config.run import RunConfig
from async_rl.core.machine import Machine
from async_rl.planning.estimate import CUDA_CONTEXT_MB, gpu_memory_mb, kv_cache_mb, memory_mb
from async_rl.planning.fit import fit_problems, reasons
from async_rl.planning.presets import fitted, fleet, rank_counts
from async_rl.planning.shape import shape_from_hf

NODE = machine(8, memory_gb=2048)
CLUSTER = ("launcher=ray", "launcher.nodes=16", "launcher.gpus_per_node=8")


def chosen(
    hf: dict[str, object], on: Machine, *overrides: str, conf: str = "grpo_code"
) -> RunConfig:
    given = [pair.partition("=")[0] for pair in overrides]
    # The preset of a machine whose memory is unknown, as compose leaves it for any model.
    plain = Machine(cores=on.cores, num_gpus=on.num_gpus, memory_mb=on.memory_mb)
    config, _ = compose_for(plain, conf, with_defaults(overrides, LONG))
    whole = fleet(config, on)
    assert whole is not None
    return fitted(config, shape_from_hf(hf), whole, given)


@pytest.mark.parametrize(
    "case", yaml.safe_load(Path(__file__).with_name("plans.yaml").read_text())["plans"]
)
def test_a_plan_has_settings_that_fit_or_is_refused_with_its_numbers(case: dict[str, Any]) -> None:
    hf, given = MODELS[case["model"]], case.get("given", [])
    if case.get("nodes"):
        on = NODE
        config = chosen(hf, on, *with_defaults(given, CLUSTER))
    else:
        on = machine(**{"gpus": 8} | case.get("machine", {}))
        config = chosen(hf, on, *given) if case.get("is_fitted") else settled(on, *given)
    for path, value in case.get("chosen", {}).items():
        assert operator.attrgetter(path)(config) == value, path
    whole = fleet(config, on)
    assert whole is not None
    expected = case.get("problems", [])
    if expected != ["any"]:
        problems = fit_problems(config, shape_from_hf(hf), whole)
        assert len(problems) == len(expected), problems
        assert all(map(re.search, expected, problems)), problems


def test_a_model_that_a_quarter_of_the_gpus_cannot_train_gets_more_of_them() -> None:
    on, shape = machine(8, gpu_gb=40), shape_from_hf(QWEN3_8B)
    config = chosen(QWEN3_8B, on)
    assert config.learner.ranks > 2
    assert config.learner.ranks + config.generators.count == 8
    rows = dict(reasons(config, shape, on))
    assert "of 40.0 GB each; activations are recomputed" in rows["learner's GPUs"]
    assert "sequences of the greatest length" in rows["GPUs of generators"]
    assert reasons(config, None, on) == []


def test_what_is_chosen_fits_or_even_the_smallest_plan_does_not() -> None:
    for hf, gpus in itertools.product((QWEN3_06B, QWEN3_8B, QWEN3_30B_A3B), (1, 4, 8)):
        on, shape = machine(gpus, memory_gb=4096), shape_from_hf(hf)
        config = chosen(hf, on, conf="ppo_code")
        problems = fit_problems(config, shape, on)
        if problems:
            assert config.learner.gradient_checkpointing
            assert config.learner.budget_tokens == 2560
            assert config.learner.ranks == max(1, gpus - round(config.generators.gpus_each))


def test_a_shared_gpu_gives_the_engine_its_cache_in_bytes() -> None:
    on, shape = machine(1), shape_from_hf(QWEN3_06B)
    at_once, in_turns = (
        chosen(QWEN3_06B, on, f"placement={placement}")
        for placement in ("disaggregated", "colocated")
    )
    for config in (at_once, in_turns):
        # Bytes make vLLM skip its measurement, which would count the learner's memory as its own.
        assert config.generation.vllm.kv_cache_mb > 0
        assert fit_problems(config, shape, on) == []
    assert in_turns.generation.vllm.kv_cache_mb > at_once.generation.vllm.kv_cache_mb
    taken = gpu_memory_mb(at_once, "learner", shape) + gpu_memory_mb(at_once, "generator", shape)
    assert taken + CUDA_CONTEXT_MB < on.gpu_mb
    # The cache holds no more sequences than run together.
    few = chosen(QWEN3_06B, on, "generation.vllm.max_num_seqs=16")
    assert few.generation.vllm.kv_cache_mb == kv_cache_mb(few, shape, 16)


def test_without_gpus_the_cache_holds_some_sequences_of_the_model() -> None:
    on = Machine(cores=(0, 1), num_gpus=0, memory_mb=64 << 10)
    config = chosen(QWEN3_8B, on, "model.dtype=float32")
    assert config.generation.vllm.kv_cache_mb > 64
    assert not any(
        "kv_cache_mb=" in line for line in fit_problems(config, shape_from_hf(QWEN3_8B), on)
    )


def test_a_login_node_says_nothing_about_the_nodes() -> None:
    login = Machine(cores=(0, 1), num_gpus=0, memory_mb=64 << 10)
    config, _ = compose_for(login, "grpo_code", [*LONG, *CLUSTER])
    assert fleet(config, login) is None
    whole = fleet(config, NODE)
    assert whole is not None
    assert (whole.num_gpus, whole.gpu_mb, whole.memory_mb) == (128, 80 << 10, 16 * 2048 << 10)
    local, _ = compose_for(NODE, "grpo_code", [*LONG, "hardware=gpus"])
    assert fleet(local, NODE) is NODE


def test_numbers_of_ranks_are_whole_nodes_with_a_group_for_each_rank() -> None:
    config = chosen(LLAMA_70B, NODE, *CLUSTER, "learner.ranks=2", "buffer.groups_per_step=24")
    whole = fleet(config, NODE)
    assert whole is not None
    assert rank_counts(config, whole, 127) == [2, 3, 4, 5, 6, 7, 8, 16, 24]
    pairs = with_settings(config, {"learner.context_ranks": 2})
    assert rank_counts(pairs, whole, 127) == [2, 4, 6, 8, 16, 24, 32, 40, 48]


def test_the_ranks_of_a_node_fit_its_main_memory() -> None:
    config = chosen(LLAMA_70B, NODE, *CLUSTER, "buffer.groups_per_step=64")
    shape = shape_from_hf(LLAMA_70B)
    rank_gb = memory_mb(config, "learner", shape) / 1024
    small = fleet(config, machine(8, memory_gb=int(7 * rank_gb)))
    assert small is not None
    (problem,) = fit_problems(config, shape, small)
    assert problem.startswith(f"the learner ranks of a node need about {8 * rank_gb:.1f} GB")
    assert f"a node has {int(7 * rank_gb)}.0 GB" in problem
