import torch
from composing import compose

from async_rl.learner.objective import Rewards


def rules(*knobs: str) -> Rewards:
    return Rewards(compose("grpo_code", (*knobs, "data.max_response_tokens=100")))


def test_rewards_are_shifted_scaled_and_clipped_by_hand() -> None:
    found = rules("reward.bias=0.5", "reward.scale=4", "reward.clip=1.5").scaled(
        torch.tensor([0.0, 0.5, 0.75, 1.0])
    )
    assert found.tolist() == [-1.5, 0.0, 1.0, 1.5]


def test_the_penalty_rises_over_the_last_tokens_of_the_allowed_length() -> None:
    lengths = torch.tensor([0, 80, 85, 90, 100])
    found = rules("reward.overlong_tokens=20", "reward.overlong_penalty=2.0").overlong_penalty(
        lengths
    )
    assert found.tolist() == [0.0, 0.0, 0.5, 1.0, 2.0]
