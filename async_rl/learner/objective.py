"""From a batch and what the models said of it to the targets of the update: which tokens train, with what advantage and return.

Pure functions of tensors and configuration; every rank computes them on the whole batch, so each statistic is global.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from async_rl.algorithms.advantages import gae, group_advantages, normalize_advantages
from async_rl.algorithms.kl import kl_estimate
from async_rl.batching.batch import Batch
from async_rl.config import BufferConfig, RewardConfig
from async_rl.config_algorithm import AlgorithmConfig
from async_rl.errors import StalenessError


@dataclasses.dataclass(slots=True, kw_only=True)
class Evaluated:
    """What the models say of the batch before the update: float32 [R], bootstrap float32 [B]; None where there is no such model."""

    proximal_logprobs: Tensor
    entropies: Tensor
    ref_logprobs: Tensor | None
    values: Tensor | None
    bootstrap: Tensor | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What the update aims at, float32 [R]. raw_advantages are those before normalisation; returns is None without a critic."""

    raw_advantages: Tensor
    advantages: Tensor
    returns: Tensor | None


def trained_mask(batch: Batch, *, version: int, algorithm: AlgorithmConfig, buffer: BufferConfig) -> Tensor:
    """bool [R]: tokens of the policy, without truncated samples if those are masked, and without over-age tokens.

    version: the learner's, before the update.  Raises StalenessError on a token from the future, and on an over-age one unless over-age
    tokens are to be masked: the buffer should have dropped its group.
    """
    mask = batch.loss_mask
    if algorithm.mask_truncated:
        mask = mask & ~batch.is_truncated[batch.sequence_index]
    ages = version - batch.versions
    if bool((mask & (ages < 0)).any()):
        newest = int(batch.versions[mask].max())
        raise StalenessError(f"a token was sampled by version {newest}, but the learner is at {version}")
    over_age = ages > buffer.max_staleness_versions
    if buffer.over_age == "mask":
        return mask & ~over_age
    if bool((mask & over_age).any()):
        raise StalenessError(
            f"a token is {int(ages[mask].max())} versions old, buffer.max_staleness_versions is {buffer.max_staleness_versions}; "
            f"such a group must be dropped before it is trained"
        )
    return mask


def scaled_rewards(rewards: Tensor, config: RewardConfig) -> Tensor:
    """clip((reward - bias) * scale, -clip, clip): float32 [B] -> float32 [B]."""
    return ((rewards - config.bias) * config.scale).clamp(-config.clip, config.clip)


def compute_targets(batch: Batch, mask: Tensor, before: Evaluated, *, algorithm: AlgorithmConfig, reward: RewardConfig) -> Targets:
    """Advantages by the configured estimator from the scaled rewards, less the KL where it is part of the reward."""
    rewards = scaled_rewards(batch.rewards, reward)
    penalty = torch.zeros_like(before.proximal_logprobs)
    if algorithm.kl_placement == "reward" and before.ref_logprobs is not None:
        kl = kl_estimate(before.proximal_logprobs, ref_logprobs=before.ref_logprobs, estimator=algorithm.kl_estimator)
        penalty = (algorithm.kl_coef * kl).masked_fill(~batch.loss_mask, 0.0)
    returns = None
    if algorithm.advantage == "gae":
        raw, returns = _gae_targets(batch, rewards, penalty, before, algorithm)
    else:
        totals = rewards - torch.zeros_like(rewards).index_add_(0, batch.sequence_index, penalty)
        counts = ~batch.is_truncated if algorithm.mask_truncated else torch.ones_like(batch.is_truncated)
        per_sequence = group_advantages(
            totals, group_index=batch.group_index, num_groups=batch.num_groups, counts=counts, estimator=algorithm.advantage
        )
        raw = per_sequence[batch.sequence_index]
    raw = raw.masked_fill(~mask, 0.0)
    advantages = normalize_advantages(raw, mask=mask) if algorithm.normalize_advantages else raw
    return Targets(raw_advantages=raw, advantages=advantages, returns=returns)


def _gae_targets(batch: Batch, rewards: Tensor, penalty: Tensor, before: Evaluated, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """GAE over the tokens the policy wrote; the task reward lands on the last of them, only truncated responses bootstrap."""
    if before.values is None or before.bootstrap is None:
        raise ValueError("gae needs the critic's values")
    rows = batch.rows(-penalty)
    written = batch.rows(batch.loss_mask)
    if rows.shape[1]:
        last = (written * torch.arange(1, rows.shape[1] + 1, device=rows.device)).argmax(dim=1)
        rows[torch.arange(len(rows), device=rows.device), last] += rewards
    advantages, returns = gae(
        rows,
        values=batch.rows(before.values),
        bootstrap=before.bootstrap.masked_fill(~batch.is_truncated, 0.0),
        mask=written,
        gamma=algorithm.gamma,
        lam=algorithm.gae_lambda,
    )
    return batch.flat(advantages), batch.flat(returns)
