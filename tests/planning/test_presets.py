"""The settings that follow from the model and the GPUs: they fit, and what a user gave stays."""

import itertools

import pytest
from planning_models import QWEN3_06B, QWEN3_8B, QWEN3_30B_A3B, QWEN3_32B
from test_fit import LONG, machine

from async_rl.composition.compose import compose_for
from async_rl.composition.overrides import with_defaults
from async_rl.config.run import RunConfig
from async_rl.core.machine import Machine
from async_rl.planning.estimate import CUDA_CONTEXT_MB, gpu_memory_mb, kv_cache_mb
from async_rl.planning.fit import fit_problems, reasons
from async_rl.planning.presets import fitted
from async_rl.planning.shape import shape_from_hf


def chosen(
    hf: dict[str, object], on: Machine, *overrides: str, conf: str = "grpo_code"
) -> RunConfig:
    given = [pair.partition("=")[0] for pair in overrides]
    # The preset of a machine whose memory is unknown, as compose leaves it for any model.
    plain = Machine(cores=on.cores, num_gpus=on.num_gpus, memory_mb=on.memory_mb)
    config, _ = compose_for(plain, conf, with_defaults(overrides, LONG))
    return fitted(config, shape_from_hf(hf), on, given)


@pytest.mark.parametrize("conf", ["grpo_code", "ppo_code"])
def test_what_is_chosen_fits_or_even_the_smallest_plan_does_not(conf: str) -> None:
    for hf, gpus in itertools.product((QWEN3_06B, QWEN3_8B, QWEN3_30B_A3B), (1, 2, 4, 8)):
        on, shape = machine(gpus, memory_gb=4096), shape_from_hf(hf)
        config = chosen(hf, on, conf=conf)
        problems = fit_problems(config, shape, on)
        if problems:
            assert config.learner.gradient_checkpointing
            assert config.learner.budget_tokens == 2560
            assert config.learner.ranks == max(1, gpus - round(config.generators.gpus_each))


def test_a_model_that_a_quarter_of_the_gpus_cannot_train_gets_more_of_them() -> None:
    small, large = (chosen(hf, machine(8, gpu_gb=40)) for hf in (QWEN3_06B, QWEN3_8B))
    assert (small.learner.ranks, small.generators.count) == (2, 6)
    assert large.learner.ranks > 2
    assert large.learner.ranks + large.generators.count == 8


def test_activations_are_kept_if_they_fit() -> None:
    assert not chosen(QWEN3_06B, machine(8)).learner.gradient_checkpointing
    assert chosen(QWEN3_8B, machine(8)).learner.gradient_checkpointing


def test_an_engine_is_divided_only_if_it_does_not_fit_one_gpu() -> None:
    for hf, parts in ((QWEN3_8B, 1), (QWEN3_32B, 2)):
        config = chosen(hf, machine(8))
        assert config.generation.vllm.tensor_parallel_size == parts
        assert config.generators.gpus_each == parts


def test_a_setting_that_was_given_stays() -> None:
    config = chosen(QWEN3_8B, machine(8), "learner.budget_tokens=4096", "learner.ranks=3")
    assert (config.learner.budget_tokens, config.learner.ranks) == (4096, 3)
    assert config.generators.count == 5


@pytest.mark.parametrize(
    ("gpus", "given"), [(1, []), (1, ["generators.gpus_each=1"]), (0, ["generators.gpus_each=1"])]
)
def test_gpus_that_the_machine_lacks_are_left_to_the_checks(gpus: int, given: list[str]) -> None:
    on, shape = machine(gpus), shape_from_hf(QWEN3_06B)
    config = chosen(QWEN3_06B, on, "learner.gpus_each=1", *given)
    assert (config.learner.gpus_each, config.generators.count) == (1, 1)
    assert not [problem for problem in fit_problems(config, shape, on) if "GPU has" in problem]


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


def test_the_cache_of_a_shared_gpu_holds_no_more_sequences_than_run_together() -> None:
    config = chosen(QWEN3_06B, machine(1), "generation.vllm.max_num_seqs=16")
    assert config.generation.vllm.kv_cache_mb == kv_cache_mb(config, shape_from_hf(QWEN3_06B), 16)


def test_without_gpus_the_cache_holds_some_sequences_of_the_model() -> None:
    on = Machine(cores=(0, 1), num_gpus=0, memory_mb=64 << 10)
    config = chosen(QWEN3_8B, on, "model.dtype=float32")
    assert config.generation.vllm.kv_cache_mb > 64
    assert not any(
        "kv_cache_mb=" in line for line in fit_problems(config, shape_from_hf(QWEN3_8B), on)
    )


def test_the_plan_says_why() -> None:
    on, shape = machine(8), shape_from_hf(QWEN3_8B)
    rows = dict(reasons(chosen(QWEN3_8B, on), shape, on))
    learner = rows["learner's GPUs"]
    assert "of 80.0 GB each; activations are recomputed" in learner
    assert "sequences of the greatest length" in rows["GPUs of generators"]
    assert "sequences of the greatest length" in rows["GPUs of generators"]
    assert reasons(chosen(QWEN3_8B, on), None, on) == []
