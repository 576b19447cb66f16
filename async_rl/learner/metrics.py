"""The scalars and histograms of one learner step, under the names of the metric catalogue."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from async_rl.algorithms.diagnostics import (
    behavior_metrics,
    explained_variance,
    mean,
    mismatch_metrics,
    reward_metrics,
)
from async_rl.algorithms.kl import kl_estimate
from async_rl.algorithms.parts import Across, Parts
from async_rl.batching.batch import Batch
from async_rl.config.algorithm import AlgorithmConfig
from async_rl.core.heads import SampleHead, part_means
from async_rl.learner.pass_loss import correction
from async_rl.learner.records import StepRecord

_MOST_SHOWN = 512
"""Values of one histogram. TensorBoard draws 30 bars, and a step of 10 million tokens would be a
message of 90 MB.
"""


def step_scalars(
    batch: Batch,
    record: StepRecord,
    *,
    version: int,
    algorithm: AlgorithmConfig,
    pass_reward: float,
) -> dict[str, float]:
    """Return the scalars of a step.

    version: the learner's, before the step; pass_reward: the score at which a sample counts as
    solved.
    """
    mask, before, across = record.mask, record.before, batch.across
    advantages = record.targets.raw_advantages[mask]
    ages = version - batch.versions[mask]
    lengths = torch.tensor(batch.response_lengths, dtype=torch.float32)
    scalars = {
        **reward_metrics(
            batch.rewards,
            group_index=batch.group_index,
            num_groups=batch.num_groups,
            pass_reward=pass_reward,
        ),
        **_behavior(algorithm, record, batch),
        **mismatch_metrics(
            before.proximal_logprobs[mask],
            behavior_logprobs=batch.behavior_logprobs[mask],
            oldest_ages=_oldest_ages(batch, record, version)[batch.sequence_index][mask],
            across=across,
        ),
        **_policy(record, across),
        **_reference(record, across),
        **_value(record, across),
        "advantage/mean": across.mean(advantages),
        "advantage/std": math.sqrt(across.variance(advantages)),
        "staleness/mean_versions": across.mean(ages),
        "staleness/max_versions": across.largest(ages),
        "length/response_mean": float(lengths.mean()),
        "length/response_max": float(lengths.max()),
        "length/truncated_share": float(batch.is_truncated.float().mean()),
        "tokens/trained": float(across.sum(mask.sum())),
        "time/advantages_s": record.advantages_s,
        "time/forward_s": record.forward_s,
        "time/update_s": record.update_s,
    }
    if batch.baselines is not None:
        scalars["reward/baseline_mean"] = mean(batch.baselines.rewards)
    return scalars


def _policy(record: StepRecord, across: Across) -> dict[str, float]:
    totals, sums = record.totals, record.totals.policy
    # During the critic's warm-up no token of the policy is trained.
    tokens = max(sums.tokens, 1.0)
    num_policy_updates = max(totals.policy_updates, 1)
    return {
        "loss/policy": sums.loss / totals.updates,
        "policy/entropy": across.mean(record.before.entropies[record.mask]),
        "policy/clip_fraction": (sums.clipped_low + sums.clipped_high) / tokens,
        "policy/clip_fraction_low": sums.clipped_low / tokens,
        "policy/clip_fraction_high": sums.clipped_high / tokens,
        "policy/kl_proximal_policy": sums.kl_proximal_policy / tokens,
        "policy/left_out_share": sums.left_out / tokens,
        "policy/grad_norm": totals.policy_grad_norm / totals.updates,
        "policy/lr": record.policy_lr,
        "policy/effective_sequences": totals.effective_sequences / num_policy_updates,
        "policy/step_scale": totals.step_scale / num_policy_updates,
    }


def _behavior(algorithm: AlgorithmConfig, record: StepRecord, batch: Batch) -> dict[str, float]:
    mask, proximal = record.mask, record.before.proximal_logprobs
    behavior = batch.behavior_logprobs
    sequences = Parts(index=batch.sequence_index, count=batch.num_sequences, mask=mask)
    largest = record.targets.largest_log_ratio
    corrected = correction(algorithm, proximal - behavior, sequences, largest)
    return behavior_metrics(
        proximal[mask],
        behavior_logprobs=behavior[mask],
        raw_weights=corrected.raw[mask],
        is_bounded=corrected.is_bounded[mask],
        across=batch.across,
    )


def _reference(record: StepRecord, across: Across) -> dict[str, float]:
    mask, before = record.mask, record.before
    if before.ref_logprobs is None:
        return {}
    kl = kl_estimate(
        before.proximal_logprobs[mask], ref_logprobs=before.ref_logprobs[mask], estimator="k3"
    )
    return {"policy/kl_reference": across.mean(kl), "policy/kl_coef": record.kl_coef}


def _value(record: StepRecord, across: Across) -> dict[str, float]:
    mask, totals, values = record.mask, record.totals, record.before.values
    if values is None or record.targets.returns is None or record.value_lr is None:
        return {}
    returns = record.targets.returns[mask]
    values = record.units.to_returns(values[mask])
    return {
        "value/loss": totals.value_loss / totals.updates,
        "value/explained_variance": explained_variance(values, returns=returns, across=across),
        "value/return_mean": across.mean(returns),
        "value/grad_norm": totals.value_grad_norm / totals.updates,
        "value/lr": record.value_lr,
    }


def step_histograms(batch: Batch, record: StepRecord, *, version: int) -> dict[str, list[float]]:
    """Return the histograms of a step: of the batch's sequences, and of the rank's own tokens."""
    oldest, mask = _oldest_ages(batch, record, version), record.mask
    log_ratio = record.before.proximal_logprobs - batch.behavior_logprobs
    values = {
        "staleness/versions": oldest[oldest >= 0],
        "reward/samples": batch.rewards,
        "length/responses": torch.tensor(batch.response_lengths),
        "policy/behavior_weights": log_ratio[mask].exp(),
        "advantage/tokens": record.targets.raw_advantages[mask],
    }
    return {name: _thinned(x.float()) for name, x in values.items()}


def _thinned(x: Tensor) -> list[float]:
    """Return the values in order; of many only evenly spaced quantiles, the extremes among them."""
    ordered = x.sort().values
    if len(ordered) > _MOST_SHOWN:
        chosen = torch.linspace(0, len(ordered) - 1, _MOST_SHOWN, dtype=torch.float64)
        ordered = ordered[chosen.round().long().to(x.device)]
    values: list[float] = ordered.tolist()
    return values


def _oldest_ages(batch: Batch, record: StepRecord, version: int) -> Tensor:
    """The age in versions of the oldest trained token of each sequence, -1 if none is trained:
    int64 [B].
    """
    ages = (version - batch.versions).masked_fill(~record.mask, -1)
    oldest = torch.full((batch.num_sequences,), -1, dtype=ages.dtype, device=ages.device)
    oldest.scatter_reduce_(0, batch.sequence_index, ages, "amax")
    return batch.across.maximum(oldest)


def part_scalars(samples: Sequence[SampleHead]) -> dict[str, float]:
    """The mean of each named part of the reward over all samples of the step."""
    means = part_means(sample.parts for sample in samples)
    return {f"reward/part/{name}": value for name, value in means.items()}
