"""DRPO: a smooth pull to the behavior policy's probability of the token (arXiv 2606.09821 sec. 3).

Start it with `async-rl launch conf=grpo_code algorithm=drpo`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from async_rl.algorithms.losses import PolicyLoss
from async_rl.algorithms.parts import Parts

# The weight of the regulariser is from section 4 of the paper. The bound on the log-ratio is from
# the published code: the square of its exponential is still a float32.
THRESHOLD, MAX_LOG = 12.5, 20.0


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

    With u = exp(policy - behavior log-probs), its logarithm between -20 and 20, and q the
    probability of the token under the behavior policy:
      loss = -u A + |A| q (u - 1)^2 / (2 * 12.5)
    Its gradient is the gradient of -u A (1 - sign(A) (p - q) / 12.5) policy_logprobs: the pull
    grows with the shift of probability that DPPO bounds. Nothing is clipped. The ratio is already
    to the behavior policy, so behavior_weight is not used.
    """
    log_ratio = policy_logprobs - behavior_logprobs
    ratio = log_ratio.clamp(-MAX_LOG, MAX_LOG).exp()
    pull = advantages.abs() * behavior_logprobs.exp() * (ratio - 1).square() / (2 * THRESHOLD)
    is_clipped = torch.zeros_like(sequences.mask)
    return PolicyLoss(pull - ratio * advantages, is_clipped, is_clipped)
