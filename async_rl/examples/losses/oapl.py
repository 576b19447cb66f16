"""OAPL: regression of each response's log-ratio on its optimal advantage (arXiv 2602.19362).

Start it with `async-rl launch conf=grpo_code algorithm=oapl`.
Changed: TEMPERATURE and BETA are 1; the experiments of the paper have 1e-3. There the soft maximum
is the best reward of a group, so with rewards of 0 and 1 only failures have an advantage.
"""

import torch
from torch import Tensor

from async_rl.algorithms.losses import PolicyLoss
from async_rl.algorithms.parts import Parts

# The temperature of the soft maximum of a group's rewards, in units of reward, and the weight of
# the KL to the behavior policy, in units of reward per nat. The paper has one number for both.
TEMPERATURE = 1.0
BETA = 1.0


def advantages(rewards: Tensor, *, groups: Parts) -> Tensor:
    """Compare each reward with the soft maximum of its group: float32 [B] -> float32 [B].

    A = r - t log mean exp(r / t) with t = TEMPERATURE: the mean reward for a large t, the best
    reward for a small t. A sample that does not count has advantage 0.
    """
    mean = groups.mean(rewards)
    # Less the mean, so that the exponential of a large reward stays finite.
    centered = (rewards - mean) / TEMPERATURE
    value = TEMPERATURE * groups.mean(centered.exp()).log() + mean
    return torch.where(groups.mask, rewards - value, 0.0)


def loss(
    log_ratio: Tensor,
    *,
    advantages: Tensor,
    behavior_weight: Tensor,
    sequences: Parts,
    policy_logprobs: Tensor,
    behavior_logprobs: Tensor,
) -> PolicyLoss:
    """Return the loss of R tokens; `async_rl/plugins.py` has the arguments.

    With s the sum of policy - behavior log-probs over the trained tokens of the sequence, the paper
    minimises (beta s - A)^2. Its gradient, divided by the constant 2 beta, is the gradient of
      loss = -(A - beta stop_gradient(s)) policy_logprobs
    so it needs no importance weight, and behavior_weight is not used. Its minimum is the best
    policy within a KL of the behavior policy that beta weighs. Nothing is clipped.
    """
    moved = (policy_logprobs - behavior_logprobs).detach()
    pull = BETA * sequences.total(moved)
    is_clipped = torch.zeros_like(sequences.mask)
    return PolicyLoss(-(advantages - pull) * policy_logprobs, is_clipped, is_clipped)
