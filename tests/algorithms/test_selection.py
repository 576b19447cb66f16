from __future__ import annotations

import numpy as np
import pytest

from async_rl.config.sampling import best_of
from async_rl.core.types import Score, Trajectory


def sample(reward: float, length: int) -> Trajectory:
    size = 1 + length
    return Trajectory(
        token_ids=np.zeros(size, np.int32),
        prompt_length=1,
        loss_mask=np.arange(size) >= 1,
        behavior_logprobs=np.zeros(size, np.float32),
        versions=np.zeros(size, np.int32),
        is_truncated=False,
        score=Score(reward=reward, parts={}, verdicts=(), latency_s=0.0),
    )


@pytest.mark.covers("generation_size")
@pytest.mark.parametrize(
    ("drawn", "kept"),
    [
        ([(0.0, 9), (1.0, 2), (0.5, 1)], [1, 2]),  # by reward
        ([(1.0, 2), (1.0, 5), (1.0, 3)], [1, 2]),  # equal rewards: the longer
        ([(1.0, 3), (1.0, 3), (1.0, 3)], [0, 1]),  # all equal: the first
    ],
)
def test_the_best_are_kept_and_of_equals_the_longer(
    drawn: list[tuple[float, int]], kept: list[int]
) -> None:
    samples = [sample(*s) for s in drawn]
    assert [
        next(i for i, s in enumerate(samples) if s is k) for k in best_of(samples, count=2)
    ] == kept
