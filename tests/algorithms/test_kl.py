from __future__ import annotations

import math

import pytest
import torch
from composing import compose
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.algorithms.logprobs import KLEstimator, kl_estimate, token_logprobs
from async_rl.learner.objective_state import Moments, ObjectiveState


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
    targets = torch.randint(0, 11, (rows,), generator=generator)
    _, _, found, ref_logprobs = token_logprobs(
        hidden,
        head=head,
        reference=(ref_hidden, ref_head),
        targets=targets,
        temperature=temperature,
        chunk_tokens=chunk,
    )
    assert found is not None
    assert ref_logprobs is not None
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
    chosen = logq.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(ref_logprobs.double(), chosen, rtol=1e-5, atol=1e-5)
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
    knobs = ["controller=adaptive", "controller.target=6.0", "controller.horizon=10000", "coef=0.1"]
    state = ObjectiveState(
        compose("ppo_code", [f"algorithm.kl.{knob}" for knob in knobs]).algorithm
    )
    state.end_step(Moments(), kl=kl, num_sequences=1000)
    assert state.kl_coef == pytest.approx(0.1 * factor)
