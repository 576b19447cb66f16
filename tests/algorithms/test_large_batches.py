"""Statistics stay right over as many tokens as a large batch has."""

from __future__ import annotations

import pytest
import torch

from async_rl.algorithms.advantages import normalize_advantages
from async_rl.algorithms.losses import token_weights
from async_rl.algorithms.parts import Parts

NUM_TOKENS = 20_000_000
"""More than a sum of ones in float32 can count in one slot (2^24 = 16.8M)."""


@pytest.fixture(scope="module")
def whole_batch() -> Parts:
    index = torch.zeros(NUM_TOKENS, dtype=torch.int64)
    return Parts(index=index, count=1, mask=torch.arange(NUM_TOKENS) % 50 != 0)


@pytest.mark.slow
def test_advantages_of_20_million_tokens_are_normalized_as_in_float64(whole_batch: Parts) -> None:
    generator = torch.Generator().manual_seed(0)
    advantages = 3 + torch.randn(NUM_TOKENS, generator=generator)
    found = normalize_advantages(advantages, parts=whole_batch)
    counted = advantages.double()[whole_batch.mask]
    expected = (counted - counted.mean()) / (counted.std(correction=0) + 1e-5)
    assert float((found[whole_batch.mask] - expected).abs().max()) < 1e-5
    assert not found[~whole_batch.mask].any()


@pytest.mark.slow
def test_the_weights_of_20_million_tokens_sum_to_1(whole_batch: Parts) -> None:
    for aggregation in ("token_mean", "sequence_mean"):
        weights = token_weights(whole_batch, aggregation=aggregation, constant_tokens=None)
        assert float(weights.double().sum()) == pytest.approx(1, abs=1e-6)


def test_many_small_terms_after_a_large_one_are_counted() -> None:
    """A float32 slot that has reached 1e8 loses every 1 that is added to it."""
    x = torch.tensor([1e8, *[1.0] * 4000, -1e8])
    parts = Parts(index=torch.zeros(len(x), dtype=torch.int64), count=1, mask=x != 0)
    assert parts.sums(x).tolist() == [4000.0]
    assert parts.mean(x)[0] == pytest.approx(4000 / 4002)
