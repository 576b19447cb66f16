"""The scalars and histograms of one learner step, under the names of the metric catalogue."""

from __future__ import annotations

import torch

from async_rl.algorithms.diagnostics import (
    behavior_metrics,
    explained_variance,
    mismatch_metrics,
    reward_metrics,
)
from async_rl.algorithms.kl import kl_estimate
from async_rl.algorithms.sequences import Sequences
from async_rl.batching.batch import Batch
from async_rl.config.run import RunConfig
from async_rl.learner.pass_loss import correction
from async_rl.learner.update import StepRecord


def step_scalars(
    config: RunConfig, batch: Batch, record: StepRecord, *, version: int
) -> dict[str, float]:
    """Everything that one step tells about rewards, policy, critic and ages. version: the
    learner's, before the step.
    """
    mask, before, targets, totals = record.mask, record.before, record.targets, record.totals
    proximal, behavior = before.proximal_logprobs[mask], batch.behavior_logprobs[mask]
    ages = version - batch.versions[mask]
    oldest_ages = _oldest_ages(batch, record, version)[batch.sequence_index][mask]
    lengths = torch.tensor(batch.response_lengths, dtype=torch.float32)
    sums = totals.policy
    tokens = max(sums.tokens, 1.0)
    scalars = {
        **reward_metrics(
            batch.rewards,
            group_index=batch.group_index,
            num_groups=batch.num_groups,
            pass_reward=config.reward.pass_reward,
        ),
        **_behavior(config, record, batch),
        **mismatch_metrics(proximal, behavior_logprobs=behavior, oldest_ages=oldest_ages),
        "loss/policy": sums.loss / totals.updates,
        "policy/entropy": _mean(before.entropies[mask]),
        "policy/clip_fraction": (sums.clipped_low + sums.clipped_high) / tokens,
        "policy/clip_fraction_low": sums.clipped_low / tokens,
        "policy/clip_fraction_high": sums.clipped_high / tokens,
        "policy/kl_proximal_policy": sums.kl_proximal_policy / tokens,
        "policy/left_out_share": sums.left_out / tokens,
        "policy/grad_norm": totals.policy_grad_norm / totals.updates,
        "policy/lr": record.policy_lr,
        "advantage/mean": _mean(targets.raw_advantages[mask]),
        "advantage/std": (
            float(targets.raw_advantages[mask].std(correction=0)) if mask.any() else 0.0
        ),
        "staleness/mean_versions": _mean(ages.float()),
        "staleness/max_versions": float(ages.max()) if ages.numel() else 0.0,
        "length/response_mean": float(lengths.mean()),
        "length/response_max": float(lengths.max()),
        "length/truncated_share": float(batch.is_truncated.float().mean()),
        "tokens/trained": float(mask.sum()),
        "time/advantages_s": record.advantages_s,
        "time/forward_s": record.forward_s,
        "time/update_s": record.update_s,
    }
    if before.ref_logprobs is not None:
        scalars["policy/kl_reference"] = _mean(
            kl_estimate(proximal, ref_logprobs=before.ref_logprobs[mask], estimator="k3")
        )
        scalars["policy/kl_coef"] = record.kl_coef
    if batch.baselines is not None:
        scalars["reward/baseline_mean"] = _mean(batch.baselines.rewards)
    if before.values is not None and targets.returns is not None and record.value_lr is not None:
        scalars["value/loss"] = totals.value_loss / totals.updates
        values = before.values[mask] * record.units.std + record.units.mean
        scalars["value/explained_variance"] = explained_variance(
            values, returns=targets.returns[mask]
        )
        scalars["value/return_mean"] = _mean(targets.returns[mask])
        scalars["value/grad_norm"] = totals.value_grad_norm / totals.updates
        scalars["value/lr"] = record.value_lr
    return scalars


def step_histograms(batch: Batch, record: StepRecord, *, version: int) -> dict[str, list[float]]:
    """staleness/versions: age of the oldest trained token of each sequence that has one."""
    oldest = _oldest_ages(batch, record, version)
    return {"staleness/versions": oldest[oldest >= 0].float().tolist()}


def _oldest_ages(batch: Batch, record: StepRecord, version: int) -> torch.Tensor:
    """Age in versions of the oldest trained token of each sequence, int64 [B]; -1 where none is
    trained.
    """
    ages = (version - batch.versions).masked_fill(~record.mask, -1)
    oldest = torch.full((batch.num_sequences,), -1, dtype=ages.dtype, device=ages.device)
    return oldest.scatter_reduce_(0, batch.sequence_index, ages, "amax")


def _behavior(config: RunConfig, record: StepRecord, batch: Batch) -> dict[str, float]:
    proximal, behavior = record.before.proximal_logprobs, batch.behavior_logprobs
    sequences = Sequences(index=batch.sequence_index, count=batch.num_sequences, mask=record.mask)
    found = correction(config.algorithm, proximal - behavior, sequences)
    mask = record.mask
    return behavior_metrics(
        proximal[mask],
        behavior_logprobs=behavior[mask],
        raw_weights=found.raw[mask],
        is_bounded=found.is_bounded[mask],
    )


def _mean(x: torch.Tensor) -> float:
    return float(x.mean()) if x.numel() else 0.0
