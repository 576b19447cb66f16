"""mu-GRPO: a wide clip range for old data, and the veto of bad responses (arXiv 2605.17570).

Start it with `async-rl launch conf=grpo_code algorithm=mu_grpo`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from async_rl.algorithms.losses import PolicyLoss, clipped_loss
from async_rl.algorithms.parts import Parts

# The numbers of the paper were not published when this was written: a factor of 5 in both
# directions for the clip range, and a factor of 2 for the veto.
CLIP_LOW, CLIP_HIGH = 0.8, 4.0
MAX_RATIO = 2.0


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

    It is PPO's clipped surrogate of the ratio to the behavior policy, so behavior_weight is not
    used, and 0 for vetoed tokens, which count as clipped above.
    """
    moved = policy_logprobs - behavior_logprobs
    clipped, is_low, is_high = clipped_loss(
        moved,
        advantages=advantages,
        behavior_weight=torch.ones_like(behavior_weight),
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
        clip_dual=None,
    )
    is_vetoed = vetoed_tokens(
        moved, advantages=advantages, sequences=sequences, max_ratio=MAX_RATIO
    )
    return PolicyLoss(clipped.masked_fill(is_vetoed, 0.0), is_low, is_high | is_vetoed)


def vetoed_tokens(
    log_ratio: Tensor, *, advantages: Tensor, sequences: Parts, max_ratio: float
) -> Tensor:
    """Return the tokens that the veto excludes.

    log_ratio, advantages: float32 [R], log_ratio = policy - behavior log-probs; the tokens of a
    sequence are consecutive -> bool [R].  In a sequence with a negative advantage, the first
    trained token with exp(log_ratio) > max_ratio and all later tokens: no clip bounds the loss of
    such a token, and the later text was written after a choice that the policy now prefers.
    """
    exceeds = log_ratio.detach() > math.log(max_ratio)
    is_trigger = exceeds & (advantages < 0) & sequences.mask
    num_triggers = is_trigger.long().cumsum(0)
    is_first = torch.ones_like(is_trigger)
    is_first[1:] = sequences.index[1:] != sequences.index[:-1]
    # Counts never fall, so the newest count before a sequence is the largest so far.
    earlier = torch.where(is_first, num_triggers - is_trigger.long(), 0).cummax(0).values
    return num_triggers > earlier
