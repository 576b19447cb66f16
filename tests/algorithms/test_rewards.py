from __future__ import annotations

import torch

from async_rl.learner.token_rewards import overlong_penalty, scaled, step_rewards


def test_rewards_are_shifted_scaled_and_clipped_by_hand() -> None:
    assert scaled(torch.tensor([0.0, 0.5, 0.75, 1.0]), bias=0.5, scale=4, clip=1.5).tolist() == [
        -1.5,
        0.0,
        1.0,
        1.5,
    ]


def test_the_penalty_rises_over_the_last_tokens_of_the_allowed_length() -> None:
    lengths = torch.tensor([0, 80, 85, 90, 100])
    found = overlong_penalty(lengths, limit_tokens=100, buffer_tokens=20, penalty=2.0)
    assert found.tolist() == [0.0, 0.0, 0.5, 1.0, 2.0]


def test_without_a_buffer_nobody_pays() -> None:
    assert overlong_penalty(
        torch.tensor([50, 100]), limit_tokens=100, buffer_tokens=0, penalty=2.0
    ).tolist() == [0.0, 0.0]


def test_deltas_pay_for_what_a_step_changed_in_its_own_sequence() -> None:
    scores, is_first = torch.tensor([0.25, 1.0, 0.5]), torch.tensor([True, False, True])
    assert step_rewards(scores, is_first=is_first, start=None).tolist() == [0.25, 1.0, 0.5]
    assert step_rewards(scores, is_first=is_first, start=0.0).tolist() == [0.25, 0.75, 0.5]
    assert step_rewards(scores, is_first=is_first, start=-1.0).tolist() == [1.25, 0.75, 1.5]
