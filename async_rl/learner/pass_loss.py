"""The loss of the policy on one forward pass, and the counts for its metrics.

Invariant: every quantity of a sequence is computed from its trained tokens only, and a pass holds
whole sequences. So the losses of passes add up to the loss of the minibatch for any packing.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from async_rl.algorithms.logprobs import kl_estimate
from async_rl.algorithms.losses import (
    BehaviorWeights,
    PolicyLoss,
    behavior_weights,
    cispo_loss,
    clipped_loss,
    counted,
    dppo_loss,
    reinforce_loss,
    sequence_log_ratio,
    vespo_loss,
)
from async_rl.algorithms.parts import Parts
from async_rl.batching.batch import Batch
from async_rl.batching.packing import Pass
from async_rl.config.algorithm import AlgorithmConfig, LossKl
from async_rl.config.plugins import CORRECTION, POLICY_LOSS, load_once, wanted
from async_rl.config.policy_losses import (
    BehaviorCorrection,
    BehaviorLoss,
    CispoLoss,
    ClippedLoss,
    DppoLoss,
    MaskCorrection,
    NoCorrection,
    PluginCorrection,
    PluginLoss,
    ReinforceLoss,
    VanillaLoss,
    VespoLoss,
)
from async_rl.config.policy_losses import PolicyLoss as PolicyLossSettings
from async_rl.learner.models import PolicyOutput
from async_rl.learner.objective import Targets


class PolicySums(NamedTuple):
    """Sums over trained tokens, each counted as `losses.counted` says.

    loss: as it is minimised; clipped_low, clipped_high: tokens whose ratio was bounded; left_out:
    tokens that max_mean_ratio excludes; kl_proximal_policy: nats of KL(proximal, policy); tokens:
    the trained tokens.
    """

    loss: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    left_out: float = 0.0
    kl_proximal_policy: float = 0.0
    tokens: float = 0.0


def correction(
    settings: BehaviorCorrection, log_ratio: Tensor, *, sequences: Parts
) -> BehaviorWeights:
    """Compute the behavior weights of the configured correction.

    log_ratio: float32 [R], proximal - behavior log-probs; sequences: the sequences of the R tokens,
    whose mask is the trained tokens -> float32 [R], float32 [R], bool [R].  A plug-in may depend on
    all tokens of the batch, so it receives the batch and not a pass.
    """
    # A plug-in first: it has none of the bounds that the other corrections share.
    if isinstance(settings, PluginCorrection):
        setting = "algorithm.policy_loss.correction.fn"
        corrected: BehaviorWeights = load_once(setting, settings.fn, CORRECTION)(
            log_ratio, sequences=sequences
        )
        return corrected
    return behavior_weights(
        log_ratio,
        sequences=sequences,
        correction=settings.kind,
        # Corrections without a bound get one that no weight reaches.
        maximum=math.inf if isinstance(settings, NoCorrection) else settings.max,
        minimum=settings.min if isinstance(settings, MaskCorrection) else 0.0,
    )


def policy_pass_loss(
    algorithm: AlgorithmConfig,
    batch: Batch,
    row: Pass,
    output: PolicyOutput,
    *,
    weights: Tensor,
    before: PolicyOutput,
    targets: Targets,
    corrected: BehaviorWeights | None,
    kl_coef: float,
) -> tuple[Tensor, Tensor]:
    """Return the pass's part of the minibatch's loss, and its `PolicySums` as float32 [6].

    weights: float32 [R'], the weight of each token in the minibatch, 0 if it is not trained;
    before: the outputs of the models before the update; corrected: the behavior weights of the
    batch, None if this pass itself recorded the proximal log-probs.
    """
    index = row.token_index
    is_trained = weights > 0
    settings = algorithm.policy_loss
    reference = algorithm.reference
    proximal = before.logprobs[index]
    behavior = batch.behavior_logprobs[index]
    sequences = Parts(index=batch.sequence_index[index], count=batch.num_sequences, mask=is_trained)
    # Allowed for corrections that look at one sequence at a time (needs_policy_before).
    if corrected is None:
        behavior_weight = correction(
            settings.correction, proximal - behavior, sequences=sequences
        ).weights
    else:
        behavior_weight = corrected.weights[index]
    policy = _policy_loss(
        settings,
        output.logprobs,
        proximal=proximal,
        behavior=behavior,
        advantages=targets.advantages[index],
        behavior_weight=behavior_weight,
        sequences=sequences,
    )
    losses = policy.loss
    if isinstance(reference, LossKl) and before.ref_logprobs is not None:
        kl = _loss_kl(reference, output, before.ref_logprobs[index], behavior_weight)
        losses = losses + kl_coef * kl
    if algorithm.entropy_coef:
        losses = losses - algorithm.entropy_coef * output.entropies
    is_left_out = torch.zeros_like(is_trained)
    if settings.max_mean_ratio is not None:
        denominator = behavior if isinstance(settings, BehaviorLoss) else proximal
        # Per sequence and not per pass: a memory setting must not decide what is excluded.
        ratio = (output.logprobs.detach() - denominator).exp()
        is_left_out = sequences.mean(ratio) > settings.max_mean_ratio
    # where, not a product: the loss of a token that is not trained may be infinite or NaN.
    loss = torch.where(is_trained & ~is_left_out, losses * weights, 0.0).sum()
    # k3: never negative, also for the few tokens of one pass.
    moved = kl_estimate(proximal, ref_logprobs=output.logprobs.detach(), estimator="k3")
    counts = (policy.is_clipped_low, policy.is_clipped_high, is_left_out, moved, is_trained)
    shares = torch.where(is_trained, counted(proximal - behavior), 0.0)
    sums = [(x * shares).sum() for x in counts]
    return loss, torch.stack([loss.detach(), *sums])


def _policy_loss(
    settings: PolicyLossSettings,
    logprobs: Tensor,
    *,
    proximal: Tensor,
    behavior: Tensor,
    advantages: Tensor,
    behavior_weight: Tensor,
    sequences: Parts,
) -> PolicyLoss:
    """Call the function of the configured loss with the ratio that it is about."""
    # BehaviorLoss has its ratio to the sampling policy, and no behavior weight besides.
    log_ratio = logprobs - (behavior if isinstance(settings, BehaviorLoss) else proximal)
    match settings:
        case PluginLoss():
            function = load_once("algorithm.policy_loss.fn", settings.fn, POLICY_LOSS)
            # By name, so that functions without these parameters keep working.
            offered = {"policy_logprobs": logprobs, "behavior_logprobs": behavior}
            loss: PolicyLoss = function(
                log_ratio,
                advantages=advantages,
                behavior_weight=behavior_weight,
                sequences=sequences,
                **{name: offered[name] for name in wanted(function, POLICY_LOSS)},
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
        case DppoLoss(max_shift=max_shift):
            return dppo_loss(
                logprobs, log_ratio=log_ratio, advantages=advantages, max_shift=max_shift
            )
        case VespoLoss():
            return vespo_loss(
                logprobs, log_ratio=log_ratio, advantages=advantages, sequences=sequences
            )
        case ClippedLoss() | VanillaLoss():
            # GSPO clips one ratio for a whole sequence; the rest is the clipped loss of PPO.
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


def _loss_kl(
    settings: LossKl, output: PolicyOutput, ref_logprobs: Tensor, behavior_weight: Tensor
) -> Tensor:
    """The KL at each token: float32 [R'].

    An estimate uses tokens that the behavior policy sampled, so it needs the behavior weight. The
    exact KL is a sum over the vocabulary and uses no sample.
    """
    if settings.estimator == "full":
        assert output.kl is not None, "forward_passes.py computes it for this estimator"
        return output.kl
    estimate = kl_estimate(output.logprobs, ref_logprobs=ref_logprobs, estimator=settings.estimator)
    return behavior_weight * estimate
