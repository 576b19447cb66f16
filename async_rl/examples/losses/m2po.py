"""M2PO: the tokens with the largest ratios are masked, as many as the batch needs (arXiv
2510.01161).

Start it with `async-rl launch conf=grpo_code algorithm=m2po`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from async_rl.algorithms.losses import BehaviorWeights, behavior_weights
from async_rl.algorithms.parts import Parts

# The published bound on the mean square of the log-ratios of the tokens that are kept.
MAX_MOMENT = 0.04
# Halvings of the interval of the bound: after 60 it is as narrow as a float64 allows.
_HALVINGS = 60


def weights(log_ratio: Tensor, *, sequences: Parts) -> BehaviorWeights:
    """Return the weights of the R tokens of a batch; `async_rl/plugins.py` has the arguments.

    The weight of a token is exp(log_ratio), or 0 if |log_ratio| is above the bound of the batch.
    """
    everything = torch.zeros_like(sequences.index)
    batch = Parts(index=everything, count=1, mask=sequences.mask, across=sequences.across)
    bound = second_moment_bound(log_ratio, batches=batch, limit=MAX_MOMENT)
    return behavior_weights(
        log_ratio,
        sequences=sequences,
        correction="token_mis",
        maximum=bound.exp(),
        minimum=(-bound).exp(),
    )


def second_moment_bound(log_ratio: Tensor, *, batches: Parts, limit: float) -> Tensor:
    """Return the largest |log_ratio| that M2PO keeps, at every token (algorithm 1 of the paper).

    log_ratio: float32 [R], proximal - behavior log-probs; batches: the batch of each token, whose
    mask is the trained tokens -> float32 [R], infinity if all are kept.  M2PO masks the tokens with
    the largest squares until the mean square of the kept tokens is below the limit.  Raising the
    bound can only raise that mean, so halving an interval finds it without sorting over ranks.
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
