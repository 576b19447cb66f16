"""Statistics stay right over as many tokens as a large batch has."""

from __future__ import annotations

import pytest
import torch

from async_rl.algorithms.parts import Parts


def test_many_small_terms_after_a_large_one_are_counted() -> None:
    """A float32 slot that has reached 1e8 loses every 1 that is added to it."""
    x = torch.tensor([1e8, *[1.0] * 4000, -1e8])
    parts = Parts(index=torch.zeros(len(x), dtype=torch.int64), count=1, mask=x != 0)
    assert parts.sums(x).tolist() == [4000.0]
    assert parts.mean(x)[0] == pytest.approx(4000 / 4002)
