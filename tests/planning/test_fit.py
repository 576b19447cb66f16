"""A run that does not fit a machine's memory is refused with numbers and a remedy that works."""

import pytest
from planning_models import QWEN3_8B, QWEN3_30B_A3B, QWEN3_32B

from async_rl.composition.compose import compose_for
from async_rl.composition.overrides import with_defaults
from async_rl.config.run import RunConfig
from async_rl.core.machine import Machine
from async_rl.planning.estimate import gpu_memory_mb, memory_mb, total_memory_mb
from async_rl.planning.fit import fit_problems
from async_rl.planning.learner_memory import learner_memory
from async_rl.planning.shape import shape_from_hf

LONG = ("model.dtype=bfloat16", "data.max_prompt_tokens=512", "data.max_response_tokens=2048")
FOUR_AND_FOUR = ("learner.ranks=4", "learner.gradient_checkpointing=true", "generators.count=4")


def machine(gpus: int, *, gpu_gb: int = 80, memory_gb: int = 256) -> Machine:
    return Machine(
        cores=tuple(range(64)), num_gpus=gpus, memory_mb=memory_gb << 10, gpu_mb=gpu_gb << 10
    )


def settled(on: Machine, *overrides: str) -> RunConfig:
    return compose_for(on, "grpo_code", with_defaults(overrides, [*LONG, "hardware=gpus"]))[0]


@pytest.mark.parametrize(
    ("hf", "billions", "active"),
    [(QWEN3_8B, 8.19, 8.19), (QWEN3_32B, 32.76, 32.76), (QWEN3_30B_A3B, 30.53, 3.34)],
)
def test_all_experts_of_a_mixture_count(
    hf: dict[str, object], billions: float, active: float
) -> None:
    shape = shape_from_hf(hf)
    assert abs(shape.num_parameters / 1e9 / billions - 1) < 0.005
    assert abs(shape.num_active / 1e9 / active - 1) < 0.02
    if "num_experts" in hf:
        # Dense layers of a mixture have no experts.
        experts, router, dense = 3 * 2048 * 768 * 128, 2048 * 128, 3 * 2048 * 6144
        for field, value, number in (("mlp_only_layers", [0], 1), ("decoder_sparse_step", 2, 24)):
            fewer = shape_from_hf(hf | {field: value}).num_parameters
            assert shape.num_parameters - fewer == number * (experts + router - dense)


def test_a_mixture_is_loaded_by_units_if_the_names_of_its_files_are_known() -> None:
    on = machine(8)
    config = settled(on, *FOUR_AND_FOUR)
    own, other, unknown = (
        learner_memory(config, shape_from_hf(QWEN3_30B_A3B | {"model_type": kind})).loaded
        for kind in ("qwen3_moe", "mixtral", "unheard_of")
    )
    whole = 4 * shape_from_hf(QWEN3_30B_A3B).num_parameters
    assert own < whole / 5
    assert other == unknown == whole


def test_the_pieces_of_a_broadcast_are_counted_where_the_learner_has_a_gpu_of_its_own() -> None:
    def planned_mb(transfer: str, *more: str) -> int:
        config = settled(machine(8), *FOUR_AND_FOUR, f"weights.transfer={transfer}", *more)
        return gpu_memory_mb(config, "learner", shape_from_hf(QWEN3_8B))

    assert planned_mb("auto") - planned_mb("filesystem") == 512


def test_a_sequence_too_long_for_one_gpu_is_shared() -> None:
    on, shape = machine(8), shape_from_hf(QWEN3_8B)
    settings = [x for x in LONG if "response_tokens" not in x and "budget_tokens" not in x]
    settings += ["hardware=gpus", "data.max_response_tokens=200000", "generators.count=1"]
    settings += ["learner.ranks=4", "learner.gradient_checkpointing=true"]

    def settled(*overrides: str) -> RunConfig:
        return compose_for(on, "grpo_code", [*settings, *overrides])[0]

    config = settled("learner.offload=parameters", "learner.budget_tokens=262144")
    (problem,) = [x for x in fit_problems(config, shape, on) if "learner-0" in x]
    assert "raise learner.context_ranks" in problem
    shared = settled(
        "learner.offload=parameters", "learner.budget_tokens=65536", "learner.context_ranks=4"
    )
    assert not any("learner-0" in x for x in fit_problems(shared, shape, on))
    odd = shape_from_hf(QWEN3_8B | {"num_attention_heads": 9})
    assert (
        "learner.context_ranks=4 does not divide the 9 attention heads of the model, which the"
        " ranks divide; set it to a divisor of 9"
    ) in fit_problems(shared, odd, on)


def test_gpu_memory_is_not_main_memory() -> None:
    on, shape = machine(8), shape_from_hf(QWEN3_8B)
    config = settled(on, *FOUR_AND_FOUR)
    on_gpu = gpu_memory_mb(config, "learner", shape)
    # 16 bytes of weights, gradients and moments per parameter on four ranks, and activations.
    assert on_gpu > 16 * shape.num_parameters / 4 / 2**20
    # Main memory has the copy of weights and moments that a checkpoint writes, and the published
    # weights with lists of what changed. No rank reads the whole float32 model.
    copies = (12 + 2 * 1.75) * shape.num_parameters / 4 / 2**20
    libraries = 800 + 3000
    assert memory_mb(config, "learner", shape) == pytest.approx(copies + libraries, abs=2)
    assert gpu_memory_mb(config, "buffer", shape) == 0
    assert total_memory_mb(config, shape) < 256 << 10
    assert fit_problems(config, shape, on) == []


def test_lists_of_changed_words_are_counted_up_to_the_size_at_which_all_weights_are_sent() -> None:
    on, shape = machine(8), shape_from_hf(QWEN3_8B)

    def main_memory_mb(transfer: str) -> int:
        config = settled(on, *FOUR_AND_FOUR, f"weights.transfer={transfer}")
        return memory_mb(config, "learner", shape)

    for transfer in ("filesystem", "auto"):
        added = main_memory_mb(transfer) - main_memory_mb("shared_memory")
        # Four bytes for each changed word, three of eight words at most, on one rank of four.
        assert added == pytest.approx(0.375 * 4 * shape.num_parameters / 4 / 2**20, abs=2)
