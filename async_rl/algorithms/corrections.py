"""Importance weights that correct for the behavior policy being older than, or numerically
different from, the proximal one.

Invariant: a weight is a constant of the loss (no gradient) and is always applied: capped or masked,
never dropped.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from async_rl.algorithms.sequences import Sequences

BehaviorCorrection = Literal["none", "token_tis", "token_mis", "sequence_tis", "sequence_mis"]

_MAX_LOG = 30.0
"""Bound on the log of a sequence's weight: far beyond every sensible cap, and its square is still a
float32.
"""


class BehaviorWeights(NamedTuple):
    """weights float32 [R], as applied; raw float32 [R], before bounds; is_bounded bool [R], tokens
    that the bounds changed.
    """

    weights: Tensor
    raw: Tensor
    is_bounded: Tensor


def behavior_weights(
    log_ratio: Tensor,
    *,
    sequences: Sequences,
    correction: BehaviorCorrection,
    maximum: float,
    minimum: float,
) -> BehaviorWeights:
    """w = exp(proximal - behavior), of each token or of its sequence's trained tokens together,
    bounded.

    log_ratio: float32 [R], proximal - behavior log-probs.
      none          1
      token_tis     min(w_t, maximum)                                truncated importance sampling
      token_mis  w_t if minimum <= w_t <= maximum, else 0  masked importance sampling (IcePop, arXiv
      2510.18855) sequence_tis  min(w_s, maximum) for every token of s,  w_s = prod of w_t over the
      trained tokens of s sequence_mis  w_s if minimum <= w_s <= maximum, else 0
    """
    log_ratio = log_ratio.detach()
    if correction.startswith("sequence"):
        log_ratio = sequences.total(log_ratio).clamp(-_MAX_LOG, _MAX_LOG)
    raw = log_ratio.exp()
    if correction == "none":
        return BehaviorWeights(torch.ones_like(raw), raw, torch.zeros_like(raw, dtype=torch.bool))
    if correction.endswith("tis"):
        return BehaviorWeights(raw.clamp(max=maximum), raw, raw > maximum)
    outside = (raw > maximum) | (raw < minimum)
    return BehaviorWeights(torch.where(outside, 0.0, raw), raw, outside)


def geometric_outliers(
    log_ratio: Tensor, *, sequences: Sequences, maximum: float | None, minimum: float | None
) -> Tensor:
    """Tokens of sequences whose geometric mean weight, exp(mean of proximal - behavior), is outside
    [minimum, maximum].

    log_ratio: float32 [R] -> bool [R].  None = no bound.  Unlike the product of the weights it does
    not grow with the length.
    """
    mean = sequences.mean(log_ratio.detach()).exp()
    is_outlier = torch.zeros_like(mean, dtype=torch.bool)
    if maximum is not None:
        is_outlier |= mean > maximum
    if minimum is not None:
        is_outlier |= mean < minimum
    return is_outlier
