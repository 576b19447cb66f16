from types import SimpleNamespace
from typing import Any

import pytest

from async_rl.config.sampling import best_of


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
    samples: list[Any] = [
        SimpleNamespace(number=number, response_length=length, score=SimpleNamespace(reward=reward))
        for number, (reward, length) in enumerate(drawn)
    ]
    best: Any = best_of(samples, count=2)
    assert [sample.number for sample in best] == kept
