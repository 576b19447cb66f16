"""Facts about the plan of a learner whose batches are smaller than its budget of tokens."""

import numpy as np
import pytest
from composing import compose, compose_unchecked
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_models import SMOLLM2_135M

from async_rl.batching.batch import Sizes
from async_rl.batching.packing import cost_tokens, minibatches
from async_rl.config.base import with_settings
from async_rl.planning.estimate import memory_mb
from async_rl.planning.learner_memory import minibatch_tokens
from async_rl.planning.shape import shape_from_hf

RLOO = compose_unchecked("grpo_code", ["algorithm=rloo"])


@settings(max_examples=60, deadline=None)
@given(
    groups=st.integers(1, 12),
    size=st.integers(1, 6),
    parts=st.integers(1, 6),
    prompt=st.integers(1, 40),
    response=st.integers(1, 40),
    seed=st.integers(0, 10**6),
)
def test_no_minibatch_has_more_tokens_than_the_plan_says(
    groups: int, size: int, parts: int, prompt: int, response: int, seed: int
) -> None:
    config = with_settings(
        RLOO,
        {
            "buffer.groups_per_step": groups,
            "generation.group_size": size,
            "learner.minibatches": parts,
            "data.max_prompt_tokens": prompt,
            "data.max_response_tokens": response,
        },
    )
    rng = np.random.default_rng(seed)
    # Half of the lengths are at the limits.
    longest = rng.integers(0, 2, groups * size).astype(bool)
    lengths = np.where(longest, response, rng.integers(0, response + 1, groups * size))
    of_prompts = np.where(rng.integers(0, 2, groups), prompt, rng.integers(1, prompt + 1, groups))
    batch = Sizes(
        prompt_key=np.repeat(np.arange(groups), size).tolist(),
        prompt_lengths=np.repeat(of_prompts, size).tolist(),
        response_lengths=lengths.tolist(),
    )
    for members in minibatches(batch, count=parts, rng=rng):
        assert cost_tokens(batch, members) <= minibatch_tokens(config)


def test_a_batch_below_the_budget_is_planned_with_its_own_tokens() -> None:
    shape = shape_from_hf(SMOLLM2_135M)

    def learner_mb(*settings: str) -> int:
        # In float32 a pass on a CPU has few tokens, whatever the budget.
        sizes = ["hardware=cpu", "learner.minibatches=1", "model.dtype=bfloat16", *settings]
        return memory_mb(compose("real", sizes), "learner", shape)

    small = learner_mb()
    assert learner_mb("learner.budget_tokens=16384") == small
    assert learner_mb("buffer.groups_per_step=16") > 1.2 * small
    assert learner_mb("buffer.uses_per_group=2") == learner_mb("buffer.groups_per_step=16")
    assert learner_mb("learner.minibatches=2") < small
    # Of agents a sample may have several segments.
    of_agents = ["rollout.fn=external"]
    assert minibatch_tokens(compose_unchecked("grpo_code", of_agents)) == 8192


def test_the_copy_of_a_checkpoint_is_planned_beside_the_next_step() -> None:
    shape = shape_from_hf(SMOLLM2_135M)

    def learner_mb(*settings: str) -> int:
        sizes = ["hardware=cpu", "checkpoint.every_steps=0", "checkpoint.every_minutes=0"]
        return memory_mb(compose("real", [*sizes, *settings]), "learner", shape)

    # Weights and two moments of 134.5 million parameters in float32.
    for by in ("checkpoint.every_steps=5", "checkpoint.every_minutes=10"):
        assert learner_mb(by) - learner_mb() == pytest.approx(12 * 134.5 / 1.048576, rel=0.01)


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "ppo"])
def test_every_objective_of_the_real_model_fits_a_machine_of_20_gb(algorithm: str) -> None:
    settings = ["hardware=cpu", f"algorithm={algorithm}", "generators.cores=[0]"]
    config = compose("real", [*settings, "learner.cores=[1]"])
    shape = shape_from_hf(SMOLLM2_135M)
    needed = memory_mb(config, "learner", shape) + memory_mb(config, "generator", shape)
    assert needed < 17_000


def test_an_adapter_without_a_gpu_is_planned_with_the_holes_of_the_heap() -> None:
    shape = shape_from_hf(SMOLLM2_135M)
    with_adapter, without = (
        memory_mb(compose("real", ["hardware=cpu", f"model.lora={kind}"]), "learner", shape)
        for kind in ("lora", "none")
    )
    # Runs of 40 steps had at most 5.3 and 4.5 GB; a run of all weights has copies of checkpoints.
    assert 5_200 < with_adapter < 5_700
    assert 4_500 < without < 7_200
