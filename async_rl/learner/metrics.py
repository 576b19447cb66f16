"""The values of one learner step, and its metrics under the names of the metric catalogue.

The metrics show how far behavior, proximal and current policy differ, and why. Means are over
trained tokens of the whole batch: `across` adds up the tokens of all ranks.
"""

import dataclasses
import math
import statistics

import torch
from torch import Tensor

from async_rl.algorithms.logprobs import kl_estimate
from async_rl.algorithms.losses import BehaviorWeights, counted
from async_rl.algorithms.parts import ALONE, Across, Parts
from async_rl.batching.batch import Batch
from async_rl.core.frozen import frozen
from async_rl.learner.models import PolicyOutput
from async_rl.learner.objective import Targets
from async_rl.learner.objective_state import Moments
from async_rl.learner.pass_loss import PolicySums


@dataclasses.dataclass(slots=True)
class Totals:
    """Sums over the updates of a step, over all ranks."""

    updates: int = 0
    policy: PolicySums = dataclasses.field(default_factory=PolicySums)
    policy_grad_norm: float = 0.0
    effective_sequences: float = 0.0
    step_scale: float = 0.0
    value_loss: float = 0.0
    value_grad_norm: float = 0.0


@frozen
class Step:
    """The values that all updates of a step share, and its results.

    value_targets: float32 [R], the returns in the critic's unit; corrected: the behavior weights,
    None while the passes of the only update record the proximal log-probs; trains_policy: False
    during the critic's warm-up; moments: as they were during the step; scalars: metrics that are
    known while it runs.
    """

    batch: Batch
    mask: Tensor
    before: PolicyOutput
    targets: Targets
    value_targets: Tensor | None
    corrected: BehaviorWeights | None
    trains_policy: bool
    moments: Moments
    scalars: dict[str, float]
    totals: Totals = dataclasses.field(default_factory=Totals)


def step_scalars(step: Step, *, version: int, pass_reward: float) -> dict[str, float]:
    """Return the scalars of a step.

    version: the learner's, before the step; pass_reward: a sample with this score counts as solved.
    """
    batch = step.batch
    mask = step.mask
    across = batch.across
    proximal = step.before.logprobs[mask]
    behavior = batch.behavior_logprobs[mask]
    advantages = step.targets.raw_advantages[mask]
    # Masked tokens have no version.
    ages = version - batch.versions[mask]
    lengths = torch.tensor(batch.response_lengths, dtype=torch.float32)
    assert step.corrected is not None, "an update has recorded the proximal log-probs"
    scalars = {
        **reward_metrics(
            batch.rewards,
            group_index=batch.group_index,
            num_groups=batch.num_groups,
            pass_reward=pass_reward,
        ),
        **behavior_metrics(
            proximal,
            behavior_logprobs=behavior,
            raw_weights=step.corrected.raw[mask],
            is_bounded=step.corrected.is_bounded[mask],
            across=across,
        ),
        **mismatch_metrics(
            proximal,
            behavior_logprobs=behavior,
            oldest_ages=_oldest_ages(step, version)[batch.sequence_index][mask],
            across=across,
        ),
        **_policy(step),
        **_value(step),
        "advantage/mean": across.mean(advantages),
        "advantage/std": math.sqrt(across.variance(advantages)),
        "staleness/mean_versions": across.mean(ages),
        "staleness/max_versions": across.largest(ages),
        "length/response_mean": float(lengths.mean()),
        "length/response_max": float(lengths.max()),
        "length/truncated_share": float(batch.is_truncated.float().mean()),
        "tokens/trained": float(across.sum(mask.sum())),
        "tokens/outside_support": float(across.sum(batch.is_outside.sum())),
        **step.scalars,
    }
    # No metric instead of 0: a run without a reference has no KL to report.
    if step.before.kl is not None:
        scalars["policy/kl_reference"] = _counted_mean(step, step.before.kl)
    if batch.baselines:
        scores = [answer.reward for answer in batch.baselines]
        scalars["reward/baseline_mean"] = statistics.fmean(scores)
    return scalars


def _policy(step: Step) -> dict[str, float]:
    totals = step.totals
    sums = step.totals.policy
    # During the critic's warm-up no token of the policy is trained, and all of its sums are 0.
    tokens = max(sums.tokens, 1.0)
    return {
        # The loss of a minibatch is a mean already, so it is averaged over the updates.
        "loss/policy": sums.loss / totals.updates,
        "policy/entropy": _counted_mean(step, step.before.entropies),
        "policy/clip_fraction": (sums.clipped_low + sums.clipped_high) / tokens,
        "policy/clip_fraction_low": sums.clipped_low / tokens,
        "policy/clip_fraction_high": sums.clipped_high / tokens,
        "policy/kl_proximal_policy": sums.kl_proximal_policy / tokens,
        "policy/left_out_share": sums.left_out / tokens,
        "policy/grad_norm": totals.policy_grad_norm / totals.updates,
        "policy/effective_sequences": totals.effective_sequences / totals.updates,
        "policy/step_scale": totals.step_scale / totals.updates,
    }


def _counted_mean(step: Step, values: Tensor) -> float:
    """The mean of float32 [R] over the trained tokens, as often as the policy would sample them."""
    across = step.batch.across
    log_ratio = step.before.logprobs - step.batch.behavior_logprobs
    shares = counted(log_ratio[step.mask])
    return across.mean(shares * values[step.mask]) / max(across.mean(shares), 1e-9)


def _value(step: Step) -> dict[str, float]:
    mask = step.mask
    totals = step.totals
    across = step.batch.across
    before = step.before.values
    if before is None or step.targets.returns is None:
        return {}
    returns = step.targets.returns[mask]
    # In the unit that the critic had when it gave them; the moments have changed since.
    values = step.moments.to_returns(before.at_tokens[mask])
    return {
        "value/loss": totals.value_loss / totals.updates,
        "value/explained_variance": explained_variance(values, returns=returns, across=across),
        "value/return_mean": across.mean(returns),
        "value/grad_norm": totals.value_grad_norm / totals.updates,
    }


def _oldest_ages(step: Step, version: int) -> Tensor:
    """The age in versions of the oldest trained token of each sequence, -1 if none is trained:
    int64 [B].
    """
    batch = step.batch
    ages = (version - batch.versions).masked_fill(~step.mask, -1)
    oldest = torch.full((batch.num_sequences,), -1, dtype=ages.dtype, device=ages.device)
    oldest.scatter_reduce_(0, batch.sequence_index, ages, "amax")
    # Each sequence is on one rank; -1 on the other ranks does not change the maximum.
    return batch.across.maximum(oldest)


def behavior_metrics(
    proximal_logprobs: Tensor,
    *,
    behavior_logprobs: Tensor,
    raw_weights: Tensor,
    is_bounded: Tensor,
    across: Across = ALONE,
) -> dict[str, float]:
    """Return the weights of the behavior correction and the distance that they correct.

    proximal_logprobs, behavior_logprobs, raw_weights: float32 [R]; is_bounded: bool [R]; trained
    tokens only -> mean and maximum of the weights w before their bounds, the share of bounded ones,
    KL(behavior, proximal) by the estimator k3, and
      effective_sample_size = (sum w)^2 / (R sum w^2), in (0, 1], 1 = as useful as fresh samples
    (Kish 1965).
    """
    # Float64: the square of exp(30) leaves a float32 no digits for a sum of other weights.
    mean_square = across.mean(raw_weights.double().square())
    mean_weight = across.mean(raw_weights)
    effective = mean_weight**2 / mean_square if mean_square else 1.0
    kl = kl_estimate(behavior_logprobs, ref_logprobs=proximal_logprobs, estimator="k3")
    return {
        "policy/behavior_weight_mean": mean_weight,
        "policy/behavior_weight_max": across.largest(raw_weights),
        "policy/behavior_weight_clipped_share": across.mean(is_bounded),
        "policy/effective_sample_size": effective,
        "policy/kl_behavior_proximal": across.mean(kl),
    }


def mismatch_metrics(
    proximal_logprobs: Tensor,
    *,
    behavior_logprobs: Tensor,
    oldest_ages: Tensor,
    across: Across = ALONE,
) -> dict[str, float]:
    """Return |proximal - behavior| by cause: the numerics of the engine, or training since then.

    proximal_logprobs, behavior_logprobs: float32 [R]; oldest_ages: int64 [R], learner version minus
    the oldest version among the tokens of the same sequence; trained tokens only -> metrics of this
    project, no paper.  A token of the learner's version counts as stale if its sequence started
    under older weights, because it attended to their keys and values.  A cause without tokens has
    no metric.
    """
    difference = (proximal_logprobs - behavior_logprobs).abs()
    is_fresh = oldest_ages == 0
    is_stale = oldest_ages > 0
    # Over all ranks: a rank that skipped a mean would leave the other ranks waiting in it.
    metrics = {}
    if across.largest(is_fresh):
        metrics["mismatch/engine_abs_mean"] = across.mean(difference[is_fresh])
        metrics["mismatch/engine_abs_max"] = across.largest(difference[is_fresh])
    if across.largest(is_stale):
        metrics["mismatch/stale_abs_mean"] = across.mean(difference[is_stale])
    return metrics


def explained_variance(values: Tensor, *, returns: Tensor, across: Across = ALONE) -> float:
    """Return 1 - Var(return - V) / Var(return), or 0 if the returns do not vary.

    values, returns: float32 [R], trained tokens only -> 1 = the critic predicts the returns, 0 = it
    predicts them as well as their mean does (the coefficient of determination R^2).
    """
    variance = across.variance(returns)
    unexplained = across.variance(returns - values)
    return 1.0 - unexplained / variance if variance else 0.0


def reward_metrics(
    rewards: Tensor, *, group_index: Tensor, num_groups: int, pass_reward: float
) -> dict[str, float]:
    """Return mean and spread of the task reward, and the shares of uniform groups.

    rewards: float32 [B], before scaling; group_index: int64 [B] -> solve_all and solve_none are the
    shares of groups in which every sample, or no sample, reaches pass_reward.  Such groups have no
    advantage, so they contribute no policy gradient (DAPO, arXiv 2503.14476 sec. 3.2).
    """
    is_solved = rewards >= pass_reward
    groups = Parts(index=group_index, count=num_groups, mask=torch.ones_like(is_solved))
    num_solved = groups.sums(is_solved.float())
    share = num_solved / groups.sums(torch.ones_like(rewards)).clamp(min=1)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(correction=0)),
        "reward/solve_all": float((share == 1).float().mean()),
        "reward/solve_none": float((share == 0).float().mean()),
    }
