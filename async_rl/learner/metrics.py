"""The values of one learner step, and its metrics under the names of the metric catalogue."""

from __future__ import annotations

import dataclasses
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
from async_rl.algorithms.off_policy import BehaviorWeights
from async_rl.algorithms.parts import Across
from async_rl.batching.batch import Batch
from async_rl.core.frozen import frozen
from async_rl.core.heads import SampleHead, part_means
from async_rl.learner.forward_passes import KeptOutputs
from async_rl.learner.objective import BatchOutputs, Targets
from async_rl.learner.objective_state import ValueUnits
from async_rl.learner.pass_loss import PolicySums

_MOST_SHOWN = 512
"""Values of one histogram. TensorBoard draws 30 bars, and a step of 10 million tokens would be a
message of 90 MB.
"""


@dataclasses.dataclass(slots=True)
class Totals:
    """Sums over the updates of a step, over all ranks."""

    updates: int = 0
    policy: PolicySums = dataclasses.field(default_factory=PolicySums)
    policy_grad_norm: float = 0.0
    policy_updates: int = 0
    effective_sequences: float = 0.0
    step_scale: float = 0.0
    value_loss: float = 0.0
    value_grad_norm: float = 0.0


@frozen
class Step:
    """The values that all updates of a step share, and its results.

    value_targets: float32 [R], the returns in the critic's unit; corrected: the behavior weights,
    None while the passes of the only update record the proximal log-probs; trains_policy: False
    during the critic's warm-up; kl_coef, units: as they were during the step; value_lr: None
    without a critic.
    """

    batch: Batch
    mask: Tensor
    before: BatchOutputs
    targets: Targets
    value_targets: Tensor | None
    corrected: BehaviorWeights | None
    kept: KeptOutputs
    trains_policy: bool
    kl_coef: float
    units: ValueUnits
    policy_lr: float
    value_lr: float | None
    forward_s: float
    advantages_s: float
    update_s: float = 0.0
    totals: Totals = dataclasses.field(default_factory=Totals)


def step_scalars(step: Step, *, version: int, pass_reward: float) -> dict[str, float]:
    """Return the scalars of a step.

    version: the learner's, before the step; pass_reward: a sample with this score counts as solved.
    """
    batch, mask, before, across = step.batch, step.mask, step.before, step.batch.across
    advantages = step.targets.raw_advantages[mask]
    ages = version - batch.versions[mask]
    lengths = torch.tensor(batch.response_lengths, dtype=torch.float32)
    scalars = {
        **reward_metrics(
            batch.rewards,
            group_index=batch.group_index,
            num_groups=batch.num_groups,
            pass_reward=pass_reward,
        ),
        **_behavior(step),
        **mismatch_metrics(
            before.proximal_logprobs[mask],
            behavior_logprobs=batch.behavior_logprobs[mask],
            oldest_ages=_oldest_ages(step, version)[batch.sequence_index][mask],
            across=across,
        ),
        **_policy(step, across),
        **_reference(step, across),
        **_value(step, across),
        "advantage/mean": across.mean(advantages),
        "advantage/std": math.sqrt(across.variance(advantages)),
        "staleness/mean_versions": across.mean(ages),
        "staleness/max_versions": across.largest(ages),
        "length/response_mean": float(lengths.mean()),
        "length/response_max": float(lengths.max()),
        "length/truncated_share": float(batch.is_truncated.float().mean()),
        "tokens/trained": float(across.sum(mask.sum())),
        "time/advantages_s": step.advantages_s,
        "time/forward_s": step.forward_s,
        "time/update_s": step.update_s,
    }
    if batch.baselines is not None:
        scalars["reward/baseline_mean"] = mean(batch.baselines.rewards)
    return scalars


def _policy(step: Step, across: Across) -> dict[str, float]:
    totals, sums = step.totals, step.totals.policy
    # During the critic's warm-up no token of the policy is trained.
    tokens = max(sums.tokens, 1.0)
    num_policy_updates = max(totals.policy_updates, 1)
    return {
        "loss/policy": sums.loss / totals.updates,
        "policy/entropy": across.mean(step.before.entropies[step.mask]),
        "policy/clip_fraction": (sums.clipped_low + sums.clipped_high) / tokens,
        "policy/clip_fraction_low": sums.clipped_low / tokens,
        "policy/clip_fraction_high": sums.clipped_high / tokens,
        "policy/kl_proximal_policy": sums.kl_proximal_policy / tokens,
        "policy/left_out_share": sums.left_out / tokens,
        "policy/grad_norm": totals.policy_grad_norm / totals.updates,
        "policy/lr": step.policy_lr,
        "policy/effective_sequences": totals.effective_sequences / num_policy_updates,
        "policy/step_scale": totals.step_scale / num_policy_updates,
    }


def _behavior(step: Step) -> dict[str, float]:
    mask, batch = step.mask, step.batch
    assert step.corrected is not None, "an update has recorded the proximal log-probs"
    return behavior_metrics(
        step.before.proximal_logprobs[mask],
        behavior_logprobs=batch.behavior_logprobs[mask],
        raw_weights=step.corrected.raw[mask],
        is_bounded=step.corrected.is_bounded[mask],
        across=batch.across,
    )


def _reference(step: Step, across: Across) -> dict[str, float]:
    mask, before = step.mask, step.before
    if before.ref_logprobs is None:
        return {}
    kl = kl_estimate(
        before.proximal_logprobs[mask], ref_logprobs=before.ref_logprobs[mask], estimator="k3"
    )
    return {"policy/kl_reference": across.mean(kl), "policy/kl_coef": step.kl_coef}


def _value(step: Step, across: Across) -> dict[str, float]:
    mask, totals, values = step.mask, step.totals, step.before.values
    if values is None or step.targets.returns is None or step.value_lr is None:
        return {}
    returns = step.targets.returns[mask]
    values = step.units.to_returns(values[mask])
    return {
        "value/loss": totals.value_loss / totals.updates,
        "value/explained_variance": explained_variance(values, returns=returns, across=across),
        "value/return_mean": across.mean(returns),
        "value/grad_norm": totals.value_grad_norm / totals.updates,
        "value/lr": step.value_lr,
    }


def step_histograms(step: Step, *, version: int) -> dict[str, list[float]]:
    """Return the histograms of a step: of the batch's sequences, and of the rank's own tokens."""
    batch, mask, oldest = step.batch, step.mask, _oldest_ages(step, version)
    log_ratio = step.before.proximal_logprobs - batch.behavior_logprobs
    values = {
        "staleness/versions": oldest[oldest >= 0],
        "reward/samples": batch.rewards,
        "length/responses": torch.tensor(batch.response_lengths),
        "policy/behavior_weights": log_ratio[mask].exp(),
        "advantage/tokens": step.targets.raw_advantages[mask],
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


def part_scalars(samples: Sequence[SampleHead]) -> dict[str, float]:
    """The mean of each named part of the reward over all samples of the step."""
    means = part_means(sample.parts for sample in samples)
    return {f"reward/part/{name}": value for name, value in means.items()}
