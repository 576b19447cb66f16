"""M2PO: the tokens with the largest ratios are masked, as many as the batch needs (arXiv
2510.01161).

Start it with `async-rl launch conf=grpo_code algorithm=m2po`.
Changed: tokens of both directions are masked, because a correction sees the whole batch but no
advantages, and a loss sees one pass. The paper counts and masks only the tokens that an update
would move further: A > 0 and ratio > 1, or A < 0 and ratio < 1. The authors' code clips these
instead of masking them, and never closer to 1 than 0.7 and 1.5.
"""

import math

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
    bound = second_moment_bound(log_ratio, sequences=sequences, limit=MAX_MOMENT)
    return behavior_weights(
        log_ratio,
        sequences=sequences,
        correction="token_mis",
        maximum=math.exp(bound),
        minimum=math.exp(-bound),
    )


def second_moment_bound(log_ratio: Tensor, *, sequences: Parts, limit: float) -> float:
    """Return the largest |log_ratio| that M2PO keeps in a batch (algorithm 1 of the paper);
    infinity if all are kept.

    log_ratio: float32 [R], proximal - behavior log-probs; the mask of sequences is the trained
    tokens.  M2PO masks the tokens with the largest squares until the mean square of the kept tokens
    is below the limit.  Raising the bound can only raise that mean, so halving an interval finds it
    without sorting over ranks.
    """
    squares = log_ratio.detach().double().square()[sequences.mask]
    across = sequences.across
    low = 0.0
    high = across.largest(squares)
    if across.mean(squares) < limit:
        return math.inf
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if across.mean(squares[squares <= middle]) < limit:
            low = middle
        else:
            high = middle
    # Halfway between the last kept and the first masked token, so that rounding moves neither.
    bound = (across.largest(squares[squares <= low]) + high) / 2
    return math.sqrt(bound)
