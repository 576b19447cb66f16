import numpy as np
import pytest
import torch
from composing import compose
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.learner.objective_state import Moments, ObjectiveState


def mean_and_std(moments: Moments) -> tuple[float, float]:
    return moments.mean, moments.std


@pytest.mark.covers("value_norm_type")
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_exp_is_the_weighted_mean_of_the_batches_without_the_bias_of_its_start(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batches = [rng.normal(3, 2, rng.integers(1, 9)) for _ in range(int(rng.integers(1, 5)))]
    moments = Moments()
    for batch in batches:
        moments = moments.observed(torch.tensor(batch), kind="exp")
    shares = np.array([0.99995**age for age in reversed(range(len(batches)))])
    shares /= shares.sum()
    mean = sum(share * batch.mean() for share, batch in zip(shares, batches, strict=True))
    square = sum(share * (batch**2).mean() for share, batch in zip(shares, batches, strict=True))
    expected = mean, max(square - mean**2, 1e-2) ** 0.5
    assert mean_and_std(moments) == pytest.approx(expected)


def test_the_spread_is_at_least_a_tenth() -> None:
    moments = Moments().observed(torch.full((5,), 2.0), kind="ma")
    assert mean_and_std(moments) == pytest.approx((2.0, 0.1))


@pytest.mark.parametrize(
    ("kl", "factor"),
    # A tenth above the target: 1 + 0.1 * 1000 / 10000; far above or below it, bounded at 0.2.
    [(6.0, 1.0), (6.6, 1.01), (60.0, 1.02), (-5.0, 0.98)],
)
def test_the_adaptive_coefficient_grows_above_its_target_and_falls_below(
    kl: float, factor: float
) -> None:
    knobs = ["controller=adaptive", "controller.target=6.0", "controller.horizon=10000", "coef=0.1"]
    config = compose("ppo_code", [f"algorithm.kl.{knob}" for knob in knobs])
    state = ObjectiveState(config.algorithm)
    state.end_step(Moments(), kl=kl, num_sequences=1000)
    assert state.kl_coef == pytest.approx(0.1 * factor)
