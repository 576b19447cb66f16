"""SAPO: a soft gate of the ratio instead of a clip (arXiv 2511.20347).

Start it with `async-rl launch conf=grpo_code algorithm=sapo`.
As published, with the factor behavior_weight for old data.
"""

import torch
from torch import Tensor

from async_rl.algorithms.losses import PolicyLoss
from async_rl.algorithms.parts import Parts

# The published temperatures for positive and for other advantages.
TAU_POSITIVE = 1.0
TAU_NEGATIVE = 1.05


def loss(
    log_ratio: Tensor, *, advantages: Tensor, behavior_weight: Tensor, sequences: Parts
) -> PolicyLoss:
    """Return the loss of R tokens; `async_rl/plugins.py` has the arguments.

    With u = exp(log_ratio) and tau by the sign of the advantage:
      loss = -behavior_weight (4 / tau) sigmoid(tau (u - 1)) A
    Its gradient at u = 1 is the gradient of u A, and falls to 0 away from it. Nothing is clipped.
    """
    tau = torch.where(advantages > 0, TAU_POSITIVE, TAU_NEGATIVE)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau
    is_clipped = torch.zeros_like(sequences.mask)
    return PolicyLoss(-behavior_weight * gate * advantages, is_clipped, is_clipped)
