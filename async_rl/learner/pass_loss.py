"""The loss of the policy on one forward pass, and the counts for its metrics.

Invariant: every quantity of a sequence is computed from its trained tokens only, and a pass holds
whole sequences. So the losses of passes add up to the loss of the minibatch for any packing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from async_rl.algorithms.kl import kl_estimate
from async_rl.algorithms.losses import (
    PolicyLoss,
    cispo_loss,
    clipped_loss,
    reinforce_loss,
    sequence_log_ratio,
)
from async_rl.algorithms.off_policy import (
    BehaviorCorrection,
    BehaviorWeights,
    behavior_weights,
    dppo_loss,
    drpo_loss,
    geometric_outliers,
    oapl_loss,
    sapo_loss,
    vespo_loss,
    vetoed_tokens,
)
from async_rl.algorithms.parts import Parts
from async_rl.batching.batch import Batch
from async_rl.batching.packing import Pass
from async_rl.config.algorithm import AlgorithmConfig, LossKl
from async_rl.config.plugins import CORRECTION, POLICY_LOSS, load_once
from async_rl.config.policy_losses import (
    BehaviorLoss,
    CapCorrection,
    CispoLoss,
    ClippedLoss,
    Correction,
    DppoLoss,
    DrpoLoss,
    MaskCorrection,
    MomentCorrection,
    NoCorrection,
    OaplLoss,
    PluginCorrection,
    PluginLoss,
    ReinforceLoss,
    SapoLoss,
    VanillaLoss,
    VespoLoss,
)
from async_rl.config.policy_losses import PolicyLoss as PolicyLossSettings
from async_rl.learner.models import PolicyOutput
from async_rl.learner.objective import BatchOutputs, Targets

# The published temperatures of SAPO for positive and other advantages (arXiv 2511.20347), and the
# powers and decays of VESPO (arXiv 2602.10693). Whoever tunes a gate chooses another loss first.
_SAPO_TAUS = (1.0, 1.05)
_VESPO_POSITIVE = (2.0, 3.0)
_VESPO_NEGATIVE = (3.0, 2.0)


class PolicySums(NamedTuple):
    """Sums over trained tokens.

    loss: as it is minimised; clipped_low, clipped_high: tokens whose ratio was bounded; left_out:
    tokens that max_mean_ratio or veto_ratio excludes; kl_proximal_policy: nats of
    KL(proximal, policy); tokens: the trained tokens.
    """

    loss: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    left_out: float = 0.0
    kl_proximal_policy: float = 0.0
    tokens: float = 0.0


def correction(
    algorithm: AlgorithmConfig,
    log_ratio: Tensor,
    sequences: Parts,
    largest_log_ratio: Tensor | None,
) -> BehaviorWeights:
    """Compute the behavior weights of the configured correction.

    log_ratio: float32 [R], proximal - behavior log-probs; sequences: the sequences of the R tokens,
    whose mask is the trained tokens; largest_log_ratio: as in `Targets`, at these tokens
    -> float32 [R], float32 [R], bool [R].
    """
    settings = algorithm.policy_loss.correction
    kind: BehaviorCorrection = "none"
    maximum: float | Tensor = math.inf
    minimum: float | Tensor = 0.0
    match settings:
        case PluginCorrection(fn=fn):
            weigh = load_once("algorithm.policy_loss.correction.fn", fn, CORRECTION)
            corrected: BehaviorWeights = weigh(log_ratio, sequences=sequences)
            return _without_outliers(settings, corrected, log_ratio, sequences)
        case MomentCorrection():
            if largest_log_ratio is None:
                raise ValueError("m2po needs the bound of the whole batch")
            kind = "token_mis"
            maximum, minimum = largest_log_ratio.exp(), (-largest_log_ratio).exp()
        case CapCorrection():
            kind, maximum = settings.kind, settings.max
        case MaskCorrection():
            kind, maximum, minimum = settings.kind, settings.max, settings.min
        case NoCorrection():
            pass
    corrected = behavior_weights(
        log_ratio, sequences=sequences, correction=kind, maximum=maximum, minimum=minimum
    )
    return _without_outliers(settings, corrected, log_ratio, sequences)


def _without_outliers(
    settings: Correction, corrected: BehaviorWeights, log_ratio: Tensor, sequences: Parts
) -> BehaviorWeights:
    is_outlier = geometric_outliers(
        log_ratio,
        sequences=sequences,
        maximum=settings.geometric_max or math.inf,
        minimum=settings.geometric_min or 0.0,
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
    loss_settings, reference = algorithm.policy_loss, algorithm.reference
    proximal, behavior = before.proximal_logprobs[index], batch.behavior_logprobs[index]
    sequences = Parts(index=batch.sequence_index[index], count=batch.num_sequences, mask=is_trained)
    largest = targets.largest_log_ratio
    if largest is not None:
        largest = largest[index]
    behavior_weight = correction(algorithm, proximal - behavior, sequences, largest).weights
    denominator = behavior if isinstance(loss_settings, BehaviorLoss) else proximal
    log_ratio = output.logprobs - denominator
    policy = _policy_loss(
        loss_settings,
        output.logprobs,
        log_ratio,
        targets.advantages[index],
        behavior_weight,
        sequences,
    )
    losses = policy.loss
    if isinstance(reference, LossKl) and before.ref_logprobs is not None:
        kl = _loss_kl(reference, output, before.ref_logprobs[index], behavior_weight)
        losses = losses + kl_coef * kl
    if algorithm.entropy_coef:
        losses = losses - algorithm.entropy_coef * output.entropies
    is_left_out = torch.zeros_like(is_trained)
    if loss_settings.max_mean_ratio is not None:
        is_left_out = sequences.mean(log_ratio.detach().exp()) > loss_settings.max_mean_ratio
    if loss_settings.veto_ratio is not None:
        is_left_out = is_left_out | vetoed_tokens(
            output.logprobs - behavior,
            advantages=targets.advantages[index],
            sequences=sequences,
            max_ratio=loss_settings.veto_ratio,
        )
    loss = torch.where(is_trained & ~is_left_out, losses * weights, 0.0).sum()
    moved = kl_estimate(proximal, ref_logprobs=output.logprobs.detach(), estimator="k3")
    counts = (policy.is_clipped_low, policy.is_clipped_high, is_left_out, moved, is_trained)
    sums = [(x * is_trained).sum() for x in counts]
    return loss, torch.stack([loss.detach(), *sums])


def _policy_loss(
    settings: PolicyLossSettings,
    logprobs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    behavior_weight: Tensor,
    sequences: Parts,
) -> PolicyLoss:
    match settings:
        case PluginLoss():
            loss: PolicyLoss = load_once("algorithm.policy_loss.fn", settings.fn, POLICY_LOSS)(
                log_ratio,
                advantages=advantages,
                behavior_weight=behavior_weight,
                sequences=sequences,
            )
            return loss
        case ReinforceLoss():
            return reinforce_loss(logprobs, advantages=advantages, behavior_weight=behavior_weight)
        case CispoLoss():
            return cispo_loss(
                logprobs,
                log_ratio=log_ratio,
                advantages=advantages,
                behavior_weight=behavior_weight,
                clip_low=settings.clip_low,
                clip_high=settings.clip_high,
            )
        case SapoLoss():
            return sapo_loss(
                log_ratio,
                advantages=advantages,
                behavior_weight=behavior_weight,
                tau_positive=_SAPO_TAUS[0],
                tau_negative=_SAPO_TAUS[1],
            )
        case DppoLoss() | DrpoLoss() | VespoLoss() | OaplLoss():
            return _behavior_loss(settings, logprobs, log_ratio, advantages, sequences)
        case ClippedLoss() | VanillaLoss():
            if settings.kind == "gspo":
                log_ratio = sequence_log_ratio(log_ratio, sequences=sequences)
            return clipped_loss(
                log_ratio,
                advantages=advantages,
                behavior_weight=behavior_weight,
                clip_low=settings.clip_low,
                clip_high=settings.clip_high,
                clip_dual=settings.clip_dual,
            )


def _behavior_loss(
    settings: DppoLoss | DrpoLoss | VespoLoss | OaplLoss,
    logprobs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    sequences: Parts,
) -> PolicyLoss:
    match settings:
        case DppoLoss():
            return dppo_loss(
                logprobs,
                log_ratio=log_ratio,
                advantages=advantages,
                max_shift=settings.max_shift,
            )
        case DrpoLoss():
            return drpo_loss(logprobs, log_ratio=log_ratio, advantages=advantages)
        case VespoLoss():
            return vespo_loss(
                logprobs,
                log_ratio=log_ratio,
                advantages=advantages,
                sequences=sequences,
                positive=_VESPO_POSITIVE,
                negative=_VESPO_NEGATIVE,
            )
        case OaplLoss():
            return oapl_loss(
                logprobs,
                log_ratio=log_ratio,
                advantages=advantages,
                sequences=sequences,
                beta=settings.beta,
            )


def _loss_kl(
    settings: LossKl, output: PolicyOutput, ref_logprobs: Tensor, behavior_weight: Tensor
) -> Tensor:
    """The KL at each token: float32 [R'].

    An estimate uses tokens that the behavior policy sampled, so it needs the behavior weight. The
    exact KL is a sum over the vocabulary and uses no sample.
    """
    if settings.estimator != "full":
        estimate = kl_estimate(
            output.logprobs, ref_logprobs=ref_logprobs, estimator=settings.estimator
        )
        return behavior_weight * estimate
    if output.kl is None:
        raise ValueError("the exact KL to the reference was not computed")
    return output.kl
