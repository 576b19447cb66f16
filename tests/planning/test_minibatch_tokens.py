"""Facts about the plan of a learner whose batches are smaller than its budget of tokens."""

import numpy as np
from composing import compose_unchecked
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.batching.batch import Sizes
from async_rl.config.base import with_settings
from async_rl.learner.forward_passes import cost_tokens, minibatches
from async_rl.planning.learner_memory import minibatch_tokens

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
    settings = {"buffer.groups_per_step": groups, "generation.group_size": size}
    settings |= {"data.max_prompt_tokens": prompt, "data.max_response_tokens": response}
    config = with_settings(RLOO, {**settings, "learner.minibatches": parts})
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
