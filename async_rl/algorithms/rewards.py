"""Rewards from task scores: scaling, the penalty for overlong answers, and rewards of steps.

The KL to the reference is subtracted by the learner, not here.
"""

from __future__ import annotations

import torch
from torch import Tensor


def scaled(scores: Tensor, *, bias: float, scale: float, clip: float) -> Tensor:
    """Scale and clip scores: float32 [...] -> float32 [...].

    clip((score - bias) scale, -clip, clip) (reward scaling of PPO implementations, no paper).
    """
    return ((scores - bias) * scale).clamp(-clip, clip)


def overlong_penalty(
    lengths: Tensor, *, limit_tokens: int, buffer_tokens: int, penalty: float
) -> Tensor:
    """Compute DAPO's soft penalty for long answers, as a positive number to subtract.

    lengths: int64 [B], response tokens -> float32 [B].  It is 0 up to limit - buffer and rises
    linearly to `penalty` at the limit (arXiv 2503.14476 eq. 13).  buffer_tokens=0 makes it a step
    at limit_tokens + 1.
    """
    excess = (lengths - (limit_tokens - buffer_tokens)).float() / max(buffer_tokens, 1)
    return penalty * excess.clamp(0, 1)


def step_rewards(scores: Tensor, *, is_first: Tensor, start: float | None) -> Tensor:
    """Compute the rewards of the scored steps of all sequences.

    scores: float32 [S], d_k of the steps in order; is_first: bool [S], the first step of its
    sequence -> float32 [S].  With start=None r_k = d_k; otherwise a step is rewarded for what it
    changed, r_k = d_k - d_{k-1} with d_0 = start (differences of a potential: Ng, Harada, Russell,
    "Policy invariance under reward transformations", ICML 1999).
    """
    if start is None:
        return scores
    previous = torch.where(is_first, start, scores.roll(1))
    return scores - previous
