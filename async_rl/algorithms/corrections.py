"""Importance weights that correct for the behavior policy being older than, or numerically different from, the proximal one.

Invariant: a weight is a constant of the loss (no gradient) and is always applied: capped or masked, never dropped.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

BehaviorCorrection = Literal["token_tis", "token_mis"]


def behavior_weights(
    proximal_logprobs: Tensor, *, behavior_logprobs: Tensor, correction: BehaviorCorrection, maximum: float, minimum: float
) -> tuple[Tensor, Tensor]:
    """w = exp(proximal - behavior) per token, bounded.

    proximal_logprobs, behavior_logprobs: float32 [R] -> weights float32 [R], clipped bool [R] (tokens that the bounds changed).
      token_tis  min(w, maximum)                                truncated importance sampling
      token_mis  w if minimum <= w <= maximum, else 0           masked importance sampling (IcePop, arXiv 2510.18855)
    """
    raw = (proximal_logprobs - behavior_logprobs).detach().exp()
    if correction == "token_tis":
        return raw.clamp(max=maximum), raw > maximum
    outside = (raw > maximum) | (raw < minimum)
    return torch.where(outside, 0.0, raw), outside
