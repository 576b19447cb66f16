"""From a batch and what the models said of it to the targets of the update: which tokens train,
with what advantage and return.

Pure functions of tensors and configuration; every rank computes them on the whole batch, so each
statistic is global.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from async_rl.algorithms.advantages import (
    gae,
    group_advantages,
    group_means,
    normalize_advantages,
    returns_to_go,
    vtrace,
)
from async_rl.algorithms.kl import kl_estimate
from async_rl.algorithms.rewards import overlong_penalty, scaled, step_rewards
from async_rl.batching.batch import Batch
from async_rl.config.algorithm import AlgorithmConfig
from async_rl.config.run import RunConfig
from async_rl.config.running import BufferConfig
from async_rl.core.errors import StalenessError


@dataclasses.dataclass(slots=True, kw_only=True)
class Evaluated:
    """What the models say of the batch before the update: float32 [R], bootstrap float32 [B]; None
    where there is no such model.

    ref_kl: the exact KL to the reference where that is part of the reward.  values, bootstrap: in
    the critic's own units.
    """

    proximal_logprobs: Tensor
    entropies: Tensor
    ref_logprobs: Tensor | None
    ref_kl: Tensor | None
    values: Tensor | None
    bootstrap: Tensor | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ValueUnits:
    """What the critic's units are in those of the return: return = value * std + mean."""

    mean: float = 0.0
    std: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What the update aims at, float32 [R]. raw_advantages are those before normalisation; returns
    is None without a critic.
    """

    raw_advantages: Tensor
    advantages: Tensor
    returns: Tensor | None


def trained_mask(
    batch: Batch, *, version: int, algorithm: AlgorithmConfig, buffer: BufferConfig
) -> Tensor:
    """bool [R]: tokens of the policy, without truncated samples if those are masked, and without
    over-age tokens.

    version: the learner's, before the update.  Raises StalenessError on a token from the future,
    and on an over-age one unless over-age
    tokens are to be masked: the buffer should have dropped its group.
    """
    mask = batch.loss_mask
    if algorithm.mask_truncated:
        mask = mask & ~batch.is_truncated[batch.sequence_index]
    ages = version - batch.versions
    if bool((mask & (ages < 0)).any()):
        newest = int(batch.versions[mask].max())
        raise StalenessError(
            f"a token was sampled by version {newest}, but the learner is at {version}"
        )
    over_age = ages > buffer.max_staleness_versions
    if buffer.over_age == "mask":
        return mask & ~over_age
    if bool((mask & over_age).any()):
        raise StalenessError(
            f"a token is {int(ages[mask].max())} versions old, buffer.max_staleness_versions is"
            f" {buffer.max_staleness_versions}; such a group must be dropped before it is trained"
        )
    return mask


def compute_targets(
    batch: Batch,
    mask: Tensor,
    before: Evaluated,
    *,
    config: RunConfig,
    kl_coef: float,
    units: ValueUnits,
) -> Targets:
    """Advantages by the configured estimator from the task's rewards, less the KL where it is part
    of the reward.
    """
    algorithm = config.algorithm
    per_token, totals = _task_rewards(batch, config)
    penalty = kl_coef * _reward_kl(batch, before, algorithm)
    counts = (
        ~batch.is_truncated if algorithm.mask_truncated else torch.ones_like(batch.is_truncated)
    )
    returns = None
    match algorithm.advantage:
        case "gae" | "vtrace":
            raw, returns = _critic_targets(batch, per_token - penalty, before, algorithm, units)
        case "reinforce_plus_plus" | "reinforce_plus_plus_baseline" | "remax":
            to_go = returns_to_go(
                batch.rows(per_token - penalty),
                mask=batch.rows(batch.loss_mask),
                gamma=algorithm.gamma,
            )
            raw = batch.flat(to_go) - _baseline(batch, totals, counts, config)[batch.sequence_index]
        case estimator:
            totals = totals - torch.zeros_like(totals).index_add_(0, batch.sequence_index, penalty)
            per_sequence = group_advantages(
                totals,
                group_index=batch.group_index,
                num_groups=batch.num_groups,
                counts=counts,
                estimator=estimator,
            )
            raw = per_sequence[batch.sequence_index]
    raw = raw.masked_fill(~mask, 0.0)
    return Targets(
        raw_advantages=raw, advantages=_normalized(batch, raw, mask, algorithm), returns=returns
    )


def _task_rewards(batch: Batch, config: RunConfig) -> tuple[Tensor, Tensor]:
    """The task's rewards at the tokens that earn them, float32 [R], and their sum for each
    sequence, float32 [B].
    """
    lengths = torch.tensor(batch.response_lengths, device=batch.rewards.device)
    places = torch.arange(batch.num_tokens, device=batch.rewards.device).masked_fill(
        ~batch.loss_mask, -1
    )
    last = torch.full_like(lengths, -1).scatter_reduce_(0, batch.sequence_index, places, "amax")
    has_token = last >= 0
    per_token = torch.zeros_like(batch.behavior_logprobs)
    if config.reward.placement == "end":
        totals = _shaped(batch.rewards, lengths, batch.is_truncated, config)
        per_token[last[has_token]] = totals[has_token]
        return per_token, totals
    steps = batch.steps
    rewards = step_rewards(
        _scaled(steps.scores, config),
        is_first=steps.is_first,
        start=(
            float(_scaled(torch.tensor(config.reward.fail_reward), config))
            if config.reward.placement == "step_deltas"
            else None
        ),
    )
    sequence = batch.sequence_index[steps.last_token]
    if config.algorithm.zero_truncated_reward:
        rewards = rewards.masked_fill(batch.is_truncated[sequence], 0.0)
    penalty = _penalty(lengths, config)
    per_token.index_add_(0, steps.last_token, rewards)
    per_token[last[has_token]] -= penalty[has_token]
    return per_token, torch.zeros_like(batch.rewards).index_add_(0, sequence, rewards) - penalty


def _shaped(scores: Tensor, lengths: Tensor, is_truncated: Tensor, config: RunConfig) -> Tensor:
    """float32 [N] scores of whole responses -> their rewards."""
    rewards = _scaled(scores, config)
    if config.algorithm.zero_truncated_reward:
        rewards = rewards.masked_fill(is_truncated, 0.0)
    return rewards - _penalty(lengths, config)


def _scaled(scores: Tensor, config: RunConfig) -> Tensor:
    return scaled(
        scores, bias=config.reward.bias, scale=config.reward.scale, clip=config.reward.clip
    )


def _penalty(lengths: Tensor, config: RunConfig) -> Tensor:
    reward, limit = config.reward, config.data.max_response_tokens
    return overlong_penalty(
        lengths,
        limit_tokens=limit,
        buffer_tokens=reward.overlong_tokens,
        penalty=reward.overlong_penalty,
    )


def _reward_kl(batch: Batch, before: Evaluated, algorithm: AlgorithmConfig) -> Tensor:
    """The KL at each token of the policy that the reward pays for: float32 [R], 0 where it is no
    part of the reward.
    """
    if algorithm.kl_placement == "loss" or before.ref_logprobs is None:
        return torch.zeros_like(before.proximal_logprobs)
    if algorithm.kl_estimator != "full":
        kl = kl_estimate(
            before.proximal_logprobs,
            ref_logprobs=before.ref_logprobs,
            estimator=algorithm.kl_estimator,
        )
    elif before.ref_kl is not None:
        kl = before.ref_kl
    else:
        raise ValueError("the exact KL was not computed")
    return kl.masked_fill(~batch.loss_mask, 0.0)


def _baseline(batch: Batch, totals: Tensor, counts: Tensor, config: RunConfig) -> Tensor:
    """What an answer to the same prompt was worth without looking at the tokens: float32 [B]."""
    if config.algorithm.advantage == "reinforce_plus_plus":
        return torch.zeros_like(totals)
    if config.algorithm.advantage == "reinforce_plus_plus_baseline":
        return group_means(
            totals, group_index=batch.group_index, num_groups=batch.num_groups, counts=counts
        )
    if batch.baselines is None:
        raise ValueError("remax needs the greedy answer of every group")
    greedy = batch.baselines
    return _shaped(greedy.rewards, greedy.lengths, greedy.is_truncated, config)[batch.group_index]


def _normalized(batch: Batch, raw: Tensor, mask: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    if algorithm.normalize_advantages == "none":
        return raw
    if algorithm.normalize_advantages == "batch":
        return normalize_advantages(
            raw, mask=mask, part_index=torch.zeros_like(batch.sequence_index), num_parts=1
        )
    return normalize_advantages(
        raw,
        mask=mask,
        part_index=batch.group_index[batch.sequence_index],
        num_parts=batch.num_groups,
    )


def _critic_targets(
    batch: Batch, rewards: Tensor, before: Evaluated, algorithm: AlgorithmConfig, units: ValueUnits
) -> tuple[Tensor, Tensor]:
    """Advantages and returns over the tokens the policy wrote; only truncated responses bootstrap."""
    if before.values is None or before.bootstrap is None:
        raise ValueError(f"{algorithm.advantage} needs the critic's values")
    rows, written = batch.rows(rewards), batch.rows(batch.loss_mask)
    values = batch.rows(before.values * units.std + units.mean)
    bootstrap = (before.bootstrap * units.std + units.mean).masked_fill(~batch.is_truncated, 0.0)
    if algorithm.advantage == "gae":
        found = gae(
            rows,
            values=values,
            bootstrap=bootstrap,
            mask=written,
            gamma=algorithm.gamma,
            lam=algorithm.gae_lambda,
        )
    else:
        found = vtrace(
            rows,
            values=values,
            bootstrap=bootstrap,
            mask=written,
            log_ratio=batch.rows(before.proximal_logprobs - batch.behavior_logprobs),
            gamma=algorithm.gamma,
            lam=algorithm.gae_lambda,
            rho_max=algorithm.vtrace_rho_max,
            c_max=algorithm.vtrace_c_max,
        )
    return batch.flat(found[0]), batch.flat(found[1])
