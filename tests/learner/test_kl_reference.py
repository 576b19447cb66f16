"""The reported KL to the reference."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from async_rl.algorithms.parts import ALONE
from async_rl.learner import metrics


def test_tokens_that_the_policy_no_longer_writes_count_by_their_behavior_weight() -> None:
    """Older weights wrote an end in 46 of 100 cases, as the reference does; the policy in 0.4."""
    proximal, reference = [0.5, 0.004, 0.9], [0.25, 0.46, 0.1]
    step = SimpleNamespace(
        mask=torch.tensor([True, True, False]),
        before=SimpleNamespace(
            proximal_logprobs=torch.tensor(proximal).log(),
            ref_logprobs=torch.tensor(reference).log(),
        ),
        corrected=SimpleNamespace(weights=torch.tensor([1.0, 0.004 / 0.46, 1.0])),
        batch=SimpleNamespace(across=ALONE),
        kl_coef=0.1,
    )
    scalars = metrics._reference(step)  # type: ignore[arg-type]
    usual = 0.25 / 0.5 - 1 - math.log(0.25 / 0.5)
    left = math.exp(3) - 4 + (math.log(0.46 / 0.004) - 3) * (math.exp(3) - 1)
    weight = 0.004 / 0.46
    assert scalars["policy/kl_reference"] == pytest.approx((usual + weight * left) / (1 + weight))
    assert scalars["policy/kl_reference"] < 4 * usual < left / 50
