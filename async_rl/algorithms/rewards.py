"""From the score of a task to rewards at tokens: scaling, the penalty of overlong answers, and
which token is rewarded.

Pure tensor functions; the KL to the reference is no part of this.
"""

from __future__ import annotations

import torch
from torch import Tensor


def scaled(scores: Tensor, *, bias: float, scale: float, clip: float) -> Tensor:
    """clip((score - bias) scale, -clip, clip): float32 [...] -> float32 [...]."""
    return ((scores - bias) * scale).clamp(-clip, clip)


def overlong_penalty(
    lengths: Tensor, *, limit_tokens: int, buffer_tokens: int, penalty: float
) -> Tensor:
    """DAPO's soft punishment of long answers (arXiv 2503.14476 eq. 13), as a positive number to be
    taken off the reward.

    lengths: int64 [B], response tokens -> float32 [B]: 0 up to limit - buffer, rising to `penalty`
    at the limit.
    """
    excess = (lengths - (limit_tokens - buffer_tokens)).float() / max(buffer_tokens, 1)
    return penalty * excess.clamp(0, 1)


def step_rewards(scores: Tensor, *, is_first: Tensor, start: float | None) -> Tensor:
    """Rewards of the scored steps of all sequences, in order.

    scores: float32 [S]; is_first: bool [S], the first step of its sequence -> float32 [S].
    start None: r_k = d_k;  else each step gives what it changed, r_k = d_k - d_{k-1} with d_0 =
    start.
    """
    if start is None:
        return scores
    before = torch.where(is_first, start, scores.roll(1))
    return scores - before
