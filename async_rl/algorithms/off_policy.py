"""Corrections and losses for data that a different policy sampled.

The behavior policy differs from the proximal policy because its weights are older, or because the
engine computes differently.
Invariant: a weight is a constant of the loss (no gradient), and every quantity of a sequence is
computed from its trained tokens only. So the losses add up over any packing and ranks. Log-probs
are in nats; shapes that do not match raise RuntimeError in torch.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from async_rl.algorithms.losses import PolicyLoss
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


# Bounds on the logarithm of a sequence's weight: those of the published code of VESPO. Above the
# upper one the weight of the loss is 0, and its exponential is still a float32.
_MIN_LOG, _MAX_LOG = -18.42, 20.0
# The ratio of DPPO is cut off far outside the trust region, as in its published code.
_MAX_RATIO = 20.0
# Of DRPO: the weight of its regulariser (section 4 of the paper), and the bound on the log-ratio of
# its published code, at which the square is still a float32.
_DRPO_THRESHOLD, _DRPO_MAX_LOG = 12.5, 20.0
# Halvings of the interval of M2PO's bound: after 60 it is as narrow as a float64 allows.
_HALVINGS = 60


def sapo_loss(
    log_ratio: Tensor,
    *,
    advantages: Tensor,
    behavior_weight: Tensor,
    tau_positive: float,
    tau_negative: float,
) -> PolicyLoss:
    """Compute the loss of SAPO: a soft gate instead of a clip (arXiv 2511.20347).

    log_ratio, advantages, behavior_weight: float32 [R] -> float32 [R], bool [R], bool [R].  With
    u = exp(log_ratio) and tau by the sign of the advantage:
      loss = -behavior_weight (4 / tau) sigmoid(tau (u - 1)) A
    Its gradient at u = 1 is that of u A, and falls to 0 away from it. Nothing is clipped.
    """
    tau = torch.where(advantages > 0, tau_positive, tau_negative)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau
    is_clipped = torch.zeros_like(advantages, dtype=torch.bool)
    return PolicyLoss(-behavior_weight * gate * advantages, is_clipped, is_clipped)


def dppo_loss(
    policy_logprobs: Tensor, *, log_ratio: Tensor, advantages: Tensor, max_shift: float
) -> PolicyLoss:
    """Compute the loss of DPPO with the binary total variation (arXiv 2602.04879).

    policy_logprobs, log_ratio, advantages: float32 [R], log_ratio = policy - behavior log-probs
    -> float32 [R], bool [R], bool [R].  With u = exp(log_ratio), p and q the probabilities of the
    token under the policy and the behavior policy:
      loss = -stop_gradient(min(u, 20)) A policy_logprobs
    and 0 where A > 0 and p - q > max_shift, or A <= 0 and q - p > max_shift.  The trust region
    bounds probabilities, so a rare token may multiply its own.
    """
    ratio = log_ratio.detach().exp()
    probability = policy_logprobs.detach().exp()
    shift = probability - (policy_logprobs - log_ratio).detach().exp()
    is_high = (shift > max_shift) & (advantages > 0)
    is_low = (shift < -max_shift) & (advantages <= 0)
    loss = -ratio.clamp(max=_MAX_RATIO) * advantages * policy_logprobs
    return PolicyLoss(loss.masked_fill(is_low | is_high, 0.0), is_low, is_high)


def drpo_loss(policy_logprobs: Tensor, *, log_ratio: Tensor, advantages: Tensor) -> PolicyLoss:
    """Compute the loss of DRPO: DPPO with a pull instead of a mask (arXiv 2606.09821 sec. 3).

    policy_logprobs, log_ratio, advantages: float32 [R], log_ratio = policy - behavior log-probs
    -> float32 [R], bool [R], bool [R].  With u = exp(log_ratio), log_ratio between -20 and 20, p
    and q the probabilities of the token under the policy and the behavior policy:
      loss = -u A + |A| q (u - 1)^2 / (2 * 12.5)
    Its gradient is that of -u A (1 - sign(A) (p - q) / 12.5) policy_logprobs: the pull grows with
    the shift of probability that DPPO bounds. Nothing is clipped.
    """
    behavior = (policy_logprobs - log_ratio).detach().exp()
    ratio = log_ratio.clamp(-_DRPO_MAX_LOG, _DRPO_MAX_LOG).exp()
    pull = advantages.abs() * behavior * (ratio - 1).square() / (2 * _DRPO_THRESHOLD)
    is_clipped = torch.zeros_like(advantages, dtype=torch.bool)
    return PolicyLoss(pull - ratio * advantages, is_clipped, is_clipped)


def vespo_loss(
    policy_logprobs: Tensor,
    *,
    log_ratio: Tensor,
    advantages: Tensor,
    sequences: Parts,
    positive: tuple[float, float],
    negative: tuple[float, float],
) -> PolicyLoss:
    """Compute the loss of VESPO (arXiv 2602.10693).

    policy_logprobs, log_ratio, advantages: float32 [R], log_ratio = policy - behavior log-probs;
    positive, negative: k and lambda by the sign of the advantage (0 counts as positive)
    -> float32 [R], bool [R], bool [R].  With W the product of exp(log_ratio) over the trained
    tokens of the sequence:
      phi(W) = W^k exp(lambda (1 - W))
      loss = -stop_gradient(phi(W)) A policy_logprobs
    phi(1) = 1, and phi falls to 0 for small and large W without a bound at which it jumps.
    """
    log_weight = sequences.total(log_ratio.detach()).clamp(_MIN_LOG, _MAX_LOG)
    is_positive = advantages >= 0
    k = torch.where(is_positive, positive[0], negative[0])
    rate = torch.where(is_positive, positive[1], negative[1])
    phi = (k * log_weight + rate * (1 - log_weight.exp())).exp()
    is_clipped = torch.zeros_like(is_positive)
    return PolicyLoss(-phi * advantages * policy_logprobs, is_clipped, is_clipped)


def oapl_loss(
    policy_logprobs: Tensor,
    *,
    log_ratio: Tensor,
    advantages: Tensor,
    sequences: Parts,
    beta: float,
) -> PolicyLoss:
    """Compute the loss of OAPL: regression on the optimal advantage (arXiv 2602.19362).

    policy_logprobs, log_ratio, advantages: float32 [R], log_ratio = policy - behavior log-probs
    -> float32 [R], bool [R], bool [R].  With s the sum of log_ratio over the trained tokens of the
    sequence, the paper minimises (beta s - A)^2.  Its gradient, divided by the constant 2 beta, is
    that of
      loss = -(A - beta stop_gradient(s)) policy_logprobs
    so it needs no importance weight, and its minimum is the best policy within a KL of the behavior
    policy that beta weighs.
    """
    pull = beta * sequences.total(log_ratio.detach())
    is_clipped = torch.zeros_like(advantages, dtype=torch.bool)
    return PolicyLoss(-(advantages - pull) * policy_logprobs, is_clipped, is_clipped)


def vetoed_tokens(
    log_ratio: Tensor, *, advantages: Tensor, sequences: Parts, max_ratio: float
) -> Tensor:
    """Return the tokens that the veto of mu-GRPO excludes (arXiv 2605.17570).

    log_ratio, advantages: float32 [R], log_ratio = policy - behavior log-probs; the tokens of a
    sequence are consecutive -> bool [R].  In a sequence with a negative advantage, the first
    trained token with exp(log_ratio) > max_ratio and all later ones: no clip bounds the loss of a
    token there, and what follows was written after a choice that the policy now prefers.
    """
    exceeds = log_ratio.detach() > math.log(max_ratio)
    is_trigger = exceeds & (advantages < 0) & sequences.mask
    num_triggers = is_trigger.long().cumsum(0)
    is_first = torch.ones_like(is_trigger)
    is_first[1:] = sequences.index[1:] != sequences.index[:-1]
    # Counts never fall, so the newest count before a sequence is the largest so far.
    earlier = torch.where(is_first, num_triggers - is_trigger.long(), 0).cummax(0).values
    return num_triggers > earlier


def soft_advantages(rewards: Tensor, *, groups: Parts, beta: float) -> Tensor:
    """Compare each reward with the soft maximum of its group.

    rewards: float32 [B]; groups: the groups of the B samples -> float32 [B], 0 for a sample that
    does not count.  A = r - beta log mean exp(r / beta)  (the value of OAPL, arXiv 2602.19362; the
    mean reward for a large beta, the best one for a small beta).
    """
    # Less the mean, so that the exponential of a large reward stays finite.
    centered = (rewards - groups.mean(rewards)) / beta
    value = beta * groups.mean(centered.exp()).log() + groups.mean(rewards)
    return torch.where(groups.mask, rewards - value, 0.0)


def second_moment_bound(log_ratio: Tensor, *, batches: Parts, limit: float) -> Tensor:
    """Return the largest |log_ratio| that M2PO keeps, at every token (arXiv 2510.01161, alg. 1).

    log_ratio: float32 [R], proximal - behavior log-probs; batches: the batch of each token, whose
    mask is the trained tokens -> float32 [R], infinity if all are kept.  M2PO masks the tokens with
    the largest squares until the mean square of the others is below the limit.  Raising the bound
    can only raise that mean, so halving an interval finds it without sorting over ranks.
    """
    square = log_ratio.detach().double().square()
    index, mask, across = batches.index, batches.mask, batches.across

    def mean_below(bound: Tensor) -> Tensor:
        kept = Parts(
            index=index, count=batches.count, mask=mask & (square <= bound[index]), across=across
        )
        return kept.sums(square) / kept.sums(torch.ones_like(square)).clamp(min=1)

    def largest_below(bound: Tensor) -> Tensor:
        slots = square.new_zeros(batches.count)
        kept = square.masked_fill(~mask | (square > bound[index]), 0.0)
        return across.maximum(slots.scatter_reduce(0, index, kept, "amax"))

    low = square.new_zeros(batches.count)
    high = largest_below(low + torch.inf)
    keeps_all = mean_below(high) < limit
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        fits = mean_below(middle) < limit
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle)
    # Halfway between the last kept and the first masked token, so that rounding moves neither.
    bound = (largest_below(low) + high) / 2
    return torch.where(keeps_all, torch.inf, bound.sqrt())[index].to(log_ratio.dtype)


def effective_sequences(log_ratio: Tensor, *, sequences: Parts) -> float:
    """Return the effective sample size of the weights of whole sequences, as a share of them.

    log_ratio: float32 [R], proximal - behavior log-probs; sequences: the sequences of the R tokens,
    whose mask is the trained tokens -> (sum w)^2 / (S sum w^2) in (0, 1], with w the product of
    exp(log_ratio) over the trained tokens of each of the S sequences that have any; 1 for S = 0
    (Kish 1965; VCPO, arXiv 2602.17616, uses it as a measure of the noise of a batch).
    """
    has_token = sequences.sums(torch.ones_like(log_ratio)) > 0
    logs = sequences.sums(log_ratio.detach())[has_token]
    if not len(logs):
        return 1.0
    # A common factor of all weights cancels, so the largest may be 1.
    weights = (logs - logs.max()).exp()
    return float(weights.sum().square() / (len(logs) * weights.square().sum()))


def step_scale(effective_share: float, *, bound: float) -> float:
    """Return the factor of the learning rate: sqrt(min(1, effective_share / bound)).

    VCPO (arXiv 2602.17616) has bound = 1.  The square root is that of AdamW-style optimizers, whose
    step grows with the square root of the batch.
    """
    return float(min(1.0, effective_share / bound) ** 0.5)


def repeated_part(
    squared: float, product: float, squared_before: float, *, bound: float
) -> tuple[float, float]:
    """Return how much of the direction before a gradient must lose to have the cosine `bound` with
    it, and the share of the gradient's norm that is left; (0, 1) if its cosine is not above that.

    squared: g.g; product: g.m; squared_before: m.m, of a gradient g and the direction m before. The
    gradient is then g - part m.  GAC (arXiv 2603.01501) projects where gradients of old data repeat
    each other; its thresholds are not ours.
    """
    norm = (squared * squared_before) ** 0.5
    cosine = min(1.0, product / norm) if norm > 0 else 0.0
    if cosine <= bound:
        return 0.0, 1.0
    orthogonal = (squared * (1 - cosine * cosine)) ** 0.5
    left = orthogonal / (1 - bound * bound) ** 0.5
    part = (cosine * squared**0.5 - bound * left) / squared_before**0.5
    return part, left / squared**0.5
