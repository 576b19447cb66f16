"""A run that does not fit a machine's memory is refused with numbers and a remedy that works."""

import pytest
from planning_models import QWEN3_8B, QWEN3_30B_A3B, QWEN3_32B

from async_rl.composition.compose import compose_for
from async_rl.composition.overrides import with_defaults
from async_rl.config.run import RunConfig
from async_rl.core.machine import Machine
from async_rl.planning.fit import fit_problems
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
    said = "learner.context_ranks=4 does not divide the 9 attention heads of the model"
    assert any(line.startswith(said) for line in fit_problems(shared, odd, on))
