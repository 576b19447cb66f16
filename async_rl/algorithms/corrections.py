"""Importance weights for a behavior policy that differs from the proximal policy.

The two differ because the sampled weights are older, or because the engine computes differently.
Invariant: a weight is a constant of the loss (no gradient). It is bounded or set to 0 where it is
too large, and never ignored. Log-probs are in nats; shapes that do not match raise RuntimeError in
torch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from async_rl.algorithms.parts import Parts

BehaviorCorrection = Literal["none", "token_tis", "token_mis", "sequence_tis", "sequence_mis"]

# Bound on the logarithm of a sequence's weight. It is far above every useful cap, and the square of
# exp(30), which the effective sample size needs, is still a float32.
_MAX_LOG = 30.0


class BehaviorWeights(NamedTuple):
    """The weights of R tokens.

    weights: float32 [R], as applied; raw: float32 [R], before the bounds; is_bounded: bool [R],
    tokens whose weight a bound changed.
    """

    weights: Tensor
    raw: Tensor
    is_bounded: Tensor


def behavior_weights(
    log_ratio: Tensor,
    *,
    sequences: Parts,
    correction: BehaviorCorrection,
    maximum: float | Tensor,
    minimum: float | Tensor,
) -> BehaviorWeights:
    """Compute exp(proximal - behavior) per token or per sequence, within bounds.

    log_ratio: float32 [R], proximal - behavior log-probs; sequences: the sequences of the R tokens,
    whose mask is the trained tokens; maximum, minimum: numbers, or float32 [R]
    -> float32 [R], float32 [R], bool [R].  With w_t the weight of a token and w_s the product of
    w_t over the trained tokens of its sequence s:
      none          1
      token_tis     min(w_t, maximum)                          truncated importance sampling
      token_mis     w_t if minimum <= w_t <= maximum, else 0   masked importance sampling
                                                               (IcePop, arXiv 2510.18855)
      sequence_tis  min(w_s, maximum)
      sequence_mis  w_s if minimum <= w_s <= maximum, else 0
    """
    log_ratio = log_ratio.detach()
    if correction.startswith("sequence"):
        log_ratio = sequences.total(log_ratio).clamp(-_MAX_LOG, _MAX_LOG)
    raw = log_ratio.exp()
    if correction == "none":
        return BehaviorWeights(torch.ones_like(raw), raw, torch.zeros_like(raw, dtype=torch.bool))
    if correction.endswith("tis"):
        return BehaviorWeights(raw.clamp(max=maximum), raw, raw > maximum)
    is_outside = (raw > maximum) | (raw < minimum)
    return BehaviorWeights(torch.where(is_outside, 0.0, raw), raw, is_outside)


def geometric_outliers(
    log_ratio: Tensor, *, sequences: Parts, maximum: float, minimum: float
) -> Tensor:
    """Return the tokens of sequences whose geometric mean weight is out of bounds.

    log_ratio: float32 [R], proximal - behavior log-probs -> bool [R].  The geometric mean weight is
    exp(mean of log_ratio over the trained tokens); maximum, minimum: its bounds, infinity and 0 for
    none.  Unlike the product of the weights it does not grow with the length of the sequence (the
    sequence ratio of GSPO, arXiv 2507.18071 eq. 7, between proximal and behavior policy).
    """
    mean = sequences.mean(log_ratio.detach()).exp()
    return (mean > maximum) | (mean < minimum)
