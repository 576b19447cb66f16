"""The loss of the policy on one forward pass, and the counts for its metrics.

Invariant: every quantity of a sequence is computed from its trained tokens only, and a pass holds
whole sequences. So the losses of passes add up to the loss of the minibatch for any packing.
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
from async_rl.algorithms.parts import Parts
from async_rl.batching.batch import Batch
from async_rl.batching.packing import Pass
from async_rl.config.algorithm import AlgorithmConfig
from async_rl.learner.models import PolicyOutput
from async_rl.learner.objective import BatchOutputs, Targets


class PolicySums(NamedTuple):
    """Sums over trained tokens.

    loss: as it is minimised; clipped_low, clipped_high: tokens whose ratio was bounded; left_out:
    tokens of sequences above algorithm.max_mean_ratio; kl_proximal_policy: nats of
    KL(proximal, policy); tokens: the trained tokens.
    """

    loss: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    left_out: float = 0.0
    kl_proximal_policy: float = 0.0
    tokens: float = 0.0


def correction(algorithm: AlgorithmConfig, log_ratio: Tensor, sequences: Parts) -> BehaviorWeights:
    """Compute the behavior weights of the configured correction.

    log_ratio: float32 [R], proximal - behavior log-probs; sequences: the sequences of the R tokens,
    whose mask is the trained tokens -> float32 [R], float32 [R], bool [R].
    """
    corrected = behavior_weights(
        log_ratio,
        sequences=sequences,
        correction=algorithm.behavior_correction,
        maximum=algorithm.behavior_weight_max,
        minimum=algorithm.behavior_weight_min,
    )
    if algorithm.geometric_max is None and algorithm.geometric_min is None:
        return corrected
    is_outlier = geometric_outliers(
        log_ratio,
        sequences=sequences,
        maximum=algorithm.geometric_max,
        minimum=algorithm.geometric_min,
    )
    weights = corrected.weights.masked_fill(is_outlier, 0.0)
    return BehaviorWeights(weights, corrected.raw, corrected.is_bounded | is_outlier)


def policy_pass_loss(
    algorithm: AlgorithmConfig,
    batch: Batch,
    row: Pass,
    output: PolicyOutput,
    *,
    weights: Tensor,
    before: BatchOutputs,
    targets: Targets,
    kl_coef: float,
) -> tuple[Tensor, Tensor]:
    """Return the pass's part of the minibatch's loss, and its `PolicySums` as float32 [6].

    weights: float32 [R'], the weight of each token in the minibatch, 0 if it is not trained;
    before: the outputs of the models before the update.
    """
    index, is_trained = row.token_index, weights > 0
    proximal, behavior = before.proximal_logprobs[index], batch.behavior_logprobs[index]
    sequences = Parts(index=batch.sequence_index[index], count=batch.num_sequences, mask=is_trained)
    behavior_weight = correction(algorithm, proximal - behavior, sequences).weights
    denominator = behavior if algorithm.policy_loss == "ppo_vanilla" else proximal
    log_ratio = output.logprobs - denominator
    policy = _policy_loss(
        algorithm, output.logprobs, log_ratio, targets.advantages[index], behavior_weight, sequences
    )
    losses = policy.loss
    if algorithm.kl_placement == "loss" and before.ref_logprobs is not None:
        kl = _loss_kl(algorithm, output, before.ref_logprobs[index], behavior_weight)
        losses = losses + kl_coef * kl
    if algorithm.entropy_coef:
        losses = losses - algorithm.entropy_coef * output.entropies
    is_left_out = torch.zeros_like(is_trained)
    if algorithm.max_mean_ratio is not None:
        is_left_out = sequences.mean(log_ratio.detach().exp()) > algorithm.max_mean_ratio
    loss = torch.where(is_trained & ~is_left_out, losses * weights, 0.0).sum()
    moved = kl_estimate(proximal, ref_logprobs=output.logprobs.detach(), estimator="k3")
    counts = (policy.is_clipped_low, policy.is_clipped_high, is_left_out, moved, is_trained)
    sums = [(x * is_trained).sum() for x in counts]
    return loss, torch.stack([loss.detach(), *sums])


def _policy_loss(
    algorithm: AlgorithmConfig,
    logprobs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    behavior_weight: Tensor,
    sequences: Parts,
) -> PolicyLoss:
    match algorithm.policy_loss:
        case "reinforce":
            return reinforce_loss(logprobs, advantages=advantages, behavior_weight=behavior_weight)
        case "cispo":
            return cispo_loss(
                logprobs,
                log_ratio=log_ratio,
                advantages=advantages,
                behavior_weight=behavior_weight,
                clip_low=algorithm.clip_low,
                clip_high=algorithm.clip_high,
            )
        case "gspo":
            log_ratio = sequence_log_ratio(log_ratio, sequences=sequences)
        case "ppo" | "ppo_vanilla":
            pass
    return clipped_loss(
        log_ratio,
        advantages=advantages,
        behavior_weight=behavior_weight,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        clip_dual=algorithm.clip_dual,
    )


def _loss_kl(
    algorithm: AlgorithmConfig, output: PolicyOutput, ref_logprobs: Tensor, behavior_weight: Tensor
) -> Tensor:
    """The KL at each token: float32 [R'].

    An estimate uses tokens that the behavior policy sampled, so it needs the behavior weight. The
    exact KL is a sum over the vocabulary and uses no sample.
    """
    if algorithm.kl_estimator != "full":
        estimate = kl_estimate(
            output.logprobs, ref_logprobs=ref_logprobs, estimator=algorithm.kl_estimator
        )
        return behavior_weight * estimate
    if output.kl is None:
        raise ValueError("the exact KL to the reference was not computed")
    return output.kl
