from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.algorithms.logprobs import KLEstimator, adapted_kl_coef, full_kl, kl_estimate


@pytest.mark.covers("kl_penalty")
@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", -0.5), ("abs", 0.5), ("k2", 0.125), ("k3", math.exp(0.5) - 1 - 0.5)],
)
def test_kl_estimators_by_hand(estimator: KLEstimator, expected: float) -> None:
    found = kl_estimate(
        torch.tensor([-1.5]), ref_logprobs=torch.tensor([-1.0]), estimator=estimator
    )
    assert found.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("policy", "expected", "slope"),
    [
        # The token of a recorded step: the policy gives it 4e-4, the reference 0.46.
        (4e-4, math.exp(3) - 4 + (math.log(0.46 / 4e-4) - 3) * (math.exp(3) - 1), 1 - math.exp(3)),
        (0.1, 0.46 / 0.1 - 1 - math.log(0.46 / 0.1), 1 - 0.46 / 0.1),
    ],
)
def test_one_token_that_the_policy_left_does_not_decide_an_estimate(
    policy: float, expected: float, slope: float
) -> None:
    logprob = torch.tensor(policy).log().requires_grad_()
    found = kl_estimate(logprob, ref_logprobs=torch.tensor(0.46).log(), estimator="k3")
    found.backward()
    assert found.item() == pytest.approx(expected, rel=1e-4)
    assert logprob.grad is not None
    assert logprob.grad.item() == pytest.approx(slope, rel=1e-4)


@pytest.mark.covers("kl_penalty full")
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(0, 9),
    chunk=st.integers(1, 12),
    temperature=st.sampled_from([1.0, 0.7]),
)
def test_the_exact_kl_and_its_gradient_equal_plain_autograd(
    seed: int, rows: int, chunk: int, temperature: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, 6, generator=generator, requires_grad=True)
    head = torch.randn(11, 6, generator=generator, requires_grad=True)
    ref_hidden, ref_head = (
        torch.randn(rows, 5, generator=generator),
        torch.randn(11, 5, generator=generator),
    )
    pull = torch.randn(rows, generator=generator)
    found = full_kl(
        hidden,
        head=head,
        ref_hidden=ref_hidden,
        ref_head=ref_head,
        temperature=temperature,
        chunk_tokens=chunk,
    )
    (found * pull).sum().backward()
    hidden64, head64 = (
        hidden.detach().double().requires_grad_(),
        head.detach().double().requires_grad_(),
    )
    logp = torch.log_softmax(hidden64 @ head64.t() / temperature, -1)
    logq = torch.log_softmax(ref_hidden.double() @ ref_head.double().t() / temperature, -1)
    expected = (logp.exp() * (logp - logq)).sum(-1)
    (expected * pull.double()).sum().backward()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    for x, y in ((hidden, hidden64), (head, head64)):
        assert x.grad is not None
        assert y.grad is not None
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (6.0, 1.0),  # on target
        (6.6, 1.01),  # a tenth above: 1 + 0.1 * 1000 / 10000
        (60.0, 1.02),  # far above: bounded at 0.2
        (0.0, 0.98),  # below: the coefficient falls
        (-5.0, 0.98),
    ],
)
def test_the_adaptive_coefficient_grows_above_its_target_and_falls_below(
    kl: float, factor: float
) -> None:
    assert adapted_kl_coef(
        0.1, kl=kl, target=6.0, horizon=10_000, num_sequences=1000
    ) == pytest.approx(0.1 * factor)
