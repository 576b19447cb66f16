import math

import pytest
import torch

from async_rl.learner.metrics import (
    behavior_metrics,
    explained_variance,
    mismatch_metrics,
    reward_metrics,
)


def test_effective_sample_size_by_hand() -> None:
    proximal = torch.tensor([1.0, 3.0]).log()
    found = behavior_metrics(
        proximal,
        behavior_logprobs=torch.zeros(2),
        raw_weights=proximal.exp(),
        is_bounded=torch.tensor([False, True]),
    )
    assert found["policy/effective_sample_size"] == pytest.approx(16 / (2 * 10))
    assert found["policy/behavior_weight_mean"] == pytest.approx(2.0)
    assert found["policy/behavior_weight_max"] == pytest.approx(3.0)
    assert found["policy/behavior_weight_clipped_share"] == 0.5
    # k3 of log-ratio behavior - proximal = -ln 3 (and 0): 3 - 1 - ln 3, averaged with 0
    assert found["policy/kl_behavior_proximal"] == pytest.approx((2 - math.log(3)) / 2, rel=1e-5)


def test_mismatch_is_split_by_age() -> None:
    behavior = torch.tensor([-1.1, -0.7, -3.0, -1.0])
    found = mismatch_metrics(
        torch.tensor([-1.0, -1.0, -1.0, -1.0]),
        behavior_logprobs=behavior,
        oldest_ages=torch.tensor([0, 0, 1, 2]),
    )
    assert found["mismatch/engine_abs_mean"] == pytest.approx(0.2)
    assert found["mismatch/engine_abs_max"] == pytest.approx(0.3)
    assert found["mismatch/stale_abs_mean"] == pytest.approx(1.0)


def test_explained_variance_of_a_perfect_and_a_constant_critic() -> None:
    returns = torch.tensor([0.0, 1.0, 2.0])
    assert explained_variance(returns, returns=returns) == pytest.approx(1.0)
    assert explained_variance(torch.ones(3), returns=returns) == pytest.approx(0.0)
    assert explained_variance(returns, returns=torch.ones(3)) == 0.0


def test_solved_groups_are_counted() -> None:
    found = reward_metrics(
        torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0]),
        group_index=torch.tensor([0, 0, 1, 1, 2, 2]),
        num_groups=3,
        pass_reward=1.0,
    )
    assert found["reward/solve_all"] == pytest.approx(1 / 3)
    assert found["reward/solve_none"] == pytest.approx(1 / 3)
    assert found["reward/mean"] == 0.5
    assert found["reward/std"] == 0.5
