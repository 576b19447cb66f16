"""The policy's loss on one forward pass under the configured objective, and what is counted there.

Invariant: everything that is about a sequence is computed from its trained tokens alone, and a pass
holds whole sequences; so losses of passes add up to the loss of the minibatch however it was
packed. Called by update.py; metrics.py uses `correction` for the whole batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from async_rl.algorithms.corrections import BehaviorWeights, behavior_weights, geometric_outliers
from async_rl.algorithms.kl import kl_estimate
from async_rl.algorithms.losses import (
    PolicyLoss,
    cispo_loss,
    clipped_loss,
    reinforce_loss,
    sequence_log_ratio,
)
from async_rl.algorithms.sequences import Sequences
from async_rl.batching.batch import Batch
from async_rl.batching.packing import Pass
from async_rl.config.algorithm import AlgorithmConfig
from async_rl.learner.models import PolicyOutput
from async_rl.learner.objective import Evaluated, Targets


class PolicySums(NamedTuple):
    """Sums over trained tokens: the loss as it is minimised, tokens clipped at either side and left
    out by algorithm.max_mean_ratio, KL(proximal, policy), and the tokens themselves.
    """

    loss: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    left_out: float = 0.0
    kl_proximal_policy: float = 0.0
    tokens: float = 0.0


def correction(
    algorithm: AlgorithmConfig, log_ratio: Tensor, sequences: Sequences
) -> BehaviorWeights:
    """The behavior weights of the configured correction; log_ratio: float32 [R], proximal -
    behavior log-probs.
    """
    found = behavior_weights(
        log_ratio,
        sequences=sequences,
        correction=algorithm.behavior_correction,
        maximum=algorithm.behavior_weight_max,
        minimum=algorithm.behavior_weight_min,
    )
    if algorithm.geometric_max is None and algorithm.geometric_min is None:
        return found
    outliers = geometric_outliers(
        log_ratio,
        sequences=sequences,
        maximum=algorithm.geometric_max,
        minimum=algorithm.geometric_min,
    )
    return BehaviorWeights(
        found.weights.masked_fill(outliers, 0.0), found.raw, found.is_bounded | outliers
    )


def policy_pass_loss(
    algorithm: AlgorithmConfig,
    batch: Batch,
    row: Pass,
    output: PolicyOutput,
    *,
    weights: Tensor,
    before: Evaluated,
    targets: Targets,
    kl_coef: float,
) -> tuple[Tensor, Tensor]:
    """The pass's part of the minibatch's loss; and its `PolicySums` as float32 [6].

    weights: float32 [R'], each token's share of the minibatch, 0 where it is not trained.
    """
    index, is_trained = row.token_index, weights > 0
    proximal, behavior = before.proximal_logprobs[index], batch.behavior_logprobs[index]
    sequences = Sequences(
        index=batch.sequence_index[index], count=batch.num_sequences, mask=is_trained
    )
    behavior_weight = correction(algorithm, proximal - behavior, sequences).weights
    log_ratio = output.logprobs - (behavior if algorithm.policy_loss == "ppo_vanilla" else proximal)
    found = _policy_loss(
        algorithm, output.logprobs, log_ratio, targets.advantages[index], behavior_weight, sequences
    )
    losses = found.loss
    if algorithm.kl_placement == "loss" and before.ref_logprobs is not None:
        losses = losses + kl_coef * _loss_kl(
            algorithm, output, before.ref_logprobs[index], behavior_weight
        )
    if algorithm.entropy_coef:
        losses = losses - algorithm.entropy_coef * output.entropies
    is_left_out = torch.zeros_like(is_trained)
    if algorithm.max_mean_ratio is not None:
        is_left_out = sequences.mean(log_ratio.detach().exp()) > algorithm.max_mean_ratio
    loss = torch.where(is_trained & ~is_left_out, losses * weights, 0.0).sum()
    moved = kl_estimate(proximal, ref_logprobs=output.logprobs.detach(), estimator="k3")
    counts = (found.is_clipped_low, found.is_clipped_high, is_left_out, moved, is_trained)
    return loss, torch.stack([loss.detach(), *((x * is_trained).sum() for x in counts)])


def _policy_loss(
    algorithm: AlgorithmConfig,
    logprobs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    behavior_weight: Tensor,
    sequences: Sequences,
) -> PolicyLoss:
    if algorithm.policy_loss == "reinforce":
        return reinforce_loss(logprobs, advantages=advantages, behavior_weight=behavior_weight)
    low, high = algorithm.clip_low, algorithm.clip_high
    if algorithm.policy_loss == "cispo":
        return cispo_loss(
            logprobs,
            log_ratio=log_ratio,
            advantages=advantages,
            behavior_weight=behavior_weight,
            clip_low=low,
            clip_high=high,
        )
    if algorithm.policy_loss == "gspo":
        log_ratio = sequence_log_ratio(log_ratio, sequences=sequences)
    return clipped_loss(
        log_ratio,
        advantages=advantages,
        behavior_weight=behavior_weight,
        clip_low=low,
        clip_high=high,
        clip_dual=algorithm.clip_dual,
    )


def _loss_kl(
    algorithm: AlgorithmConfig, output: PolicyOutput, ref_logprobs: Tensor, behavior_weight: Tensor
) -> Tensor:
    """The KL at each token. An estimate is of tokens that the behavior policy drew, so it is
    weighted; the exact KL draws none.
    """
    if algorithm.kl_estimator != "full":
        return behavior_weight * kl_estimate(
            output.logprobs, ref_logprobs=ref_logprobs, estimator=algorithm.kl_estimator
        )
    if output.kl is None:
        raise ValueError("the exact KL was not computed")
    return output.kl
