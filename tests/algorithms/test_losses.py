from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.algorithms.corrections import BehaviorCorrection, behavior_weights
from async_rl.algorithms.kl import KLEstimator, kl_estimate
from async_rl.algorithms.losses import policy_loss, token_weights, value_loss


def surrogate_oracle(policy: float, proximal: float, advantage: float, weight: float, low: float, high: float, dual: float | None) -> float:
    u = math.exp(policy - proximal)
    s = min(u * advantage, min(max(u, 1 - low), 1 + high) * advantage)
    if dual is not None and advantage < 0:
        s = max(s, dual * advantage)
    return -weight * s


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), dual=st.sampled_from([None, 3.0]))
def test_policy_loss_equals_the_formula_token_by_token(seed: int, dual: float | None) -> None:
    rng = np.random.default_rng(seed)
    policy, proximal, advantages = rng.normal(size=(3, 20)) * 1.5
    weights = rng.uniform(0, 2, 20)
    loss, low, high = policy_loss(
        torch.tensor(policy),
        proximal_logprobs=torch.tensor(proximal),
        advantages=torch.tensor(advantages),
        behavior_weight=torch.tensor(weights),
        clip_low=0.2,
        clip_high=0.28,
        clip_dual=dual,
    )
    expected = [surrogate_oracle(*row, 0.2, 0.28, dual) for row in zip(policy, proximal, advantages, weights, strict=True)]
    np.testing.assert_allclose(loss, expected, rtol=1e-9)
    ratio = np.exp(policy - proximal)
    assert low.tolist() == ((ratio < 0.8) & (advantages < 0)).tolist()
    assert high.tolist() == ((ratio > 1.28) & (advantages > 0)).tolist()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),  # on-policy: the policy gradient
        (1.5, 2.0, -2.56, 0.0),  # risen beyond 1.28 with a positive advantage: clipped
        (0.5, 2.0, -1.0, -1.0),  # fallen, but wanted back
        (0.5, -2.0, 1.6, 0.0),  # fallen below 0.8 with a negative advantage: clipped
        (5.0, -2.0, 6.0, 0.0),  # dual clip at 3
    ],
)
def test_policy_loss_and_its_gradient_by_hand(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    policy = torch.tensor([math.log(ratio)], requires_grad=True)
    found, *_ = policy_loss(
        policy,
        proximal_logprobs=torch.zeros(1),
        advantages=torch.tensor([advantage]),
        behavior_weight=torch.ones(1),
        clip_low=0.2,
        clip_high=0.28,
        clip_dual=3.0,
    )
    found.sum().backward()
    assert found.item() == pytest.approx(loss)
    assert policy.grad is not None
    assert policy.grad.item() == pytest.approx(gradient)


@pytest.mark.parametrize(
    ("correction", "expected", "clipped"),
    [
        ("token_tis", [0.1, 1.0, 2.0], [False, False, True]),
        ("token_mis", [0.0, 1.0, 0.0], [True, False, True]),
    ],
)
def test_behavior_weights_are_capped_or_masked(correction: BehaviorCorrection, expected: list[float], clipped: list[bool]) -> None:
    raw = torch.tensor([0.1, 1.0, 4.0]).log().requires_grad_()
    weights, is_clipped = behavior_weights(raw, behavior_logprobs=torch.zeros(3), correction=correction, maximum=2.0, minimum=0.5)
    torch.testing.assert_close(weights, torch.tensor(expected))
    assert is_clipped.tolist() == clipped
    assert not weights.requires_grad


@pytest.mark.parametrize(("estimator", "expected"), [("k1", -0.5), ("abs", 0.5), ("k2", 0.125), ("k3", math.exp(0.5) - 1 - 0.5)])
def test_kl_estimators_by_hand(estimator: KLEstimator, expected: float) -> None:
    found = kl_estimate(torch.tensor([-1.5]), ref_logprobs=torch.tensor([-1.0]), estimator=estimator)
    assert found.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator: KLEstimator) -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    expectation = (p * kl_estimate(p.log(), ref_logprobs=q.log(), estimator=estimator)).sum()
    torch.testing.assert_close(expectation, (p * (p / q).log()).sum())


def test_value_loss_by_hand() -> None:
    values, old, returns = torch.tensor([2.0, 2.0]), torch.tensor([1.0, 1.0]), torch.tensor([3.0, 1.0])
    torch.testing.assert_close(value_loss(values, old_values=old, returns=returns, clip=None), torch.tensor([0.5, 0.5]))
    # V_old + clip(1, +-0.5) = 1.5: (1.5 - 3)^2 / 2 = 1.125 is worse than 0.5; (1.5 - 1)^2 / 2 = 0.125 is better
    torch.testing.assert_close(value_loss(values, old_values=old, returns=returns, clip=0.5), torch.tensor([1.125, 0.5]))


def test_token_weights_by_hand() -> None:
    mask = torch.tensor([True, True, False, True, True, True, False])
    sequence_index = torch.tensor([0, 0, 0, 1, 1, 1, 2])
    by_token = token_weights(mask, sequence_index=sequence_index, num_sequences=3, aggregation="token_mean")
    torch.testing.assert_close(by_token, torch.tensor([0.2, 0.2, 0, 0.2, 0.2, 0.2, 0]))
    by_sequence = token_weights(mask, sequence_index=sequence_index, num_sequences=3, aggregation="sequence_mean")
    torch.testing.assert_close(by_sequence, torch.tensor([0.25, 0.25, 0, 1 / 6, 1 / 6, 1 / 6, 0]))


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_weights_of_nothing_are_zero(aggregation: str) -> None:
    mask = torch.zeros(4, dtype=torch.bool)
    found = token_weights(mask, sequence_index=torch.zeros(4, dtype=torch.int64), num_sequences=1, aggregation=aggregation)  # type: ignore[arg-type]
    assert found.tolist() == [0, 0, 0, 0]
