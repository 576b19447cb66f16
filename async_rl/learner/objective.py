"""From a batch and the outputs of the models to the targets of the update.

The targets are the trained tokens, their rewards and advantages, and the returns for the critic.
Rewards are of tokens and of an agent's calls, from the scores of responses, steps and calls.
These are pure functions of tensors and settings. Every rank computes them for its own sequences;
statistics of the batch are sums over the ranks (`batch.across`).
"""

import torch
from torch import Tensor

from async_rl.algorithms.advantages import (
    group_advantages,
    normalize_advantages,
    returns_to_go,
    temporal_differences,
)
from async_rl.algorithms.parts import Parts
from async_rl.batching.batch import Batch
from async_rl.config.algorithm import (
    AlgorithmConfig,
    GaeAdvantage,
    GroupAdvantage,
    PluginAdvantage,
    ReturnAdvantage,
    VtraceAdvantage,
)
from async_rl.config.plugins import ADVANTAGE, load_once
from async_rl.config.run import RunConfig
from async_rl.core.errors import StalenessError
from async_rl.core.frozen import frozen
from async_rl.learner.models import PolicyOutput
from async_rl.learner.objective_state import Moments


@frozen
class Targets:
    """The targets of the update, each float32 [R].

    raw_advantages: before normalisation; returns: None without a critic.
    """

    raw_advantages: Tensor
    advantages: Tensor
    returns: Tensor | None


def trained_mask(batch: Batch, *, version: int, config: RunConfig) -> Tensor:
    """Return the trained tokens: bool [R].

    These are the tokens that the policy wrote, without truncated responses if
    algorithm.truncated=mask, and without tokens above the staleness bound if
    buffer.age_rule=mask.  version: the learner's, before the update.  Raises StalenessError for a
    token of a later version, and for one above the bound unless buffer.age_rule=mask, because the
    buffer should have dropped its group.
    """
    mask = batch.loss_mask
    buffer = config.buffer
    if config.algorithm.truncated == "mask":
        mask = mask & ~batch.is_truncated[batch.sequence_index]
    ages = version - batch.versions
    # Every rank raises if one has such a token; otherwise the other ranks would wait for it.
    lead = int(batch.across.largest(-ages[mask]))
    if lead > 0:
        raise StalenessError(
            f"a token was sampled by version {version + lead}, but the learner is at version"
            f" {version}; restart the run from a checkpoint, because its versions are inconsistent"
        )
    is_over_age = ages > buffer.max_staleness_versions
    if buffer.age_rule == "mask":
        return mask & ~is_over_age
    oldest_age = int(batch.across.largest(ages[mask]))
    if oldest_age > buffer.max_staleness_versions:
        raise StalenessError(
            f"a token is {oldest_age} versions old, above buffer.max_staleness_versions="
            f"{buffer.max_staleness_versions}; the buffer must drop such a group before training"
        )
    return mask


def compute_targets(
    batch: Batch,
    mask: Tensor,
    outputs: PolicyOutput,
    *,
    config: RunConfig,
    kl_coef: float,
    moments: Moments,
) -> Targets:
    """Compute advantages by the configured estimator, and returns if there is a critic.

    mask: bool [R], the trained tokens; outputs: of the batch before the update; kl_coef: weight of
    the KL that the reward subtracts; moments: the unit of the critic's values.
    """
    algorithm = config.algorithm
    rewards = Rewards(config)
    calls = batch.calls
    # Rewards of tokens for critics and returns, of calls for estimators that compare them.
    per_token, of_calls = rewards.of_tokens(batch)
    penalty = kl_coef * _reward_kl(batch, outputs, algorithm)
    paid = torch.zeros_like(of_calls).index_add_(0, calls.of_tokens, penalty)
    paid = batch.across.sum(paid)
    # A response that is not trained must not move the baseline of its group.
    is_counted = ~batch.is_truncated | (algorithm.truncated != "mask")
    mask_of_parts = is_counted[calls.part_sequence]
    groups = Parts(index=calls.part_group, count=calls.num_groups, mask=mask_of_parts)
    returns = None
    match algorithm.advantage:
        case GaeAdvantage() | VtraceAdvantage() as advantage:
            has_more = batch.is_truncated & (algorithm.truncated == "bootstrap")
            raw, returns = _critic_targets(
                batch, per_token - penalty, has_more, outputs, advantage, moments
            )
        case ReturnAdvantage(kind=kind, gamma=gamma):
            written = batch.rows(batch.loss_mask)
            rows = batch.rows(per_token - penalty)
            raw = batch.flat(returns_to_go(rows, mask=written, gamma=gamma))
            if kind == "reinforce_plus_plus_baseline":
                raw = raw - groups.mean(calls.sums(of_calls))[calls.part_of_tokens]
            # The greedy answer is a baseline that does not depend on the sample: no bias.
            if kind == "remax":
                raw = raw - _greedy_rewards(batch, rewards)[batch.sequence_index]
        case GroupAdvantage(kind=estimator, gamma=gamma):
            # A call pays the KL of its tokens and of all later ones.
            has_call = calls.by_turn(torch.ones_like(calls.is_last))
            later = returns_to_go(calls.by_turn(of_calls - paid), mask=has_call, gamma=gamma)
            advantages = group_advantages(later, calls=has_call, groups=groups, estimator=estimator)
            raw = advantages[calls.part, calls.turn][calls.of_tokens]
        case PluginAdvantage() as plugin:
            estimate = load_once("algorithm.advantage.fn", plugin.fn, ADVANTAGE)
            raw = estimate(calls.sums(of_calls - paid), groups=groups)[calls.part_of_tokens]
    # Before the normalisation: a token that is not trained enters no statistic.
    raw = raw.masked_fill(~mask, 0.0)
    advantages = _normalized(batch, raw, mask, algorithm)
    return Targets(raw_advantages=raw, advantages=advantages, returns=returns)


class Rewards:
    """The reward settings, which turn scores into rewards. The KL to the reference is no part of
    them.
    """

    def __init__(self, config: RunConfig) -> None:
        self._reward = config.reward
        self._max_response_tokens = config.data.max_response_tokens
        self._zero_truncated = config.algorithm.truncated in ("zero_reward", "bootstrap")

    def of_tokens(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the rewards at own tokens, float32 [R], and of the calls of all sequences, float32
        [U].

        A whole response is rewarded at the last token that the policy wrote, or at the last token
        of each role; a call and a scored step at its last token. A call without a trained token
        gets no reward at any token.
        """
        calls = batch.calls
        lengths = torch.tensor(batch.response_lengths, device=batch.rewards.device)
        last, has_token = _last_written(batch)
        per_token = torch.zeros_like(batch.behavior_logprobs)
        if self._reward.placement == "end":
            # The bias is that of a whole response: each call without a reward would have one.
            of_calls = self.scaled(calls.rewards + self._reward.bias)
            if self._zero_truncated:
                of_calls = of_calls.masked_fill(batch.is_truncated[calls.sequence], 0.0)
            given = torch.zeros_like(batch.rewards).index_add_(0, calls.sequence, calls.rewards)
            ends = self.of_responses(batch.rewards - given, lengths, batch.is_truncated)
            of_calls = of_calls + torch.where(calls.is_last, ends[calls.sequence], 0.0)
            per_token[last[has_token]] = of_calls[has_token]
            return per_token, of_calls
        new_tensor = calls.sequence.new_tensor
        sequence = new_tensor([number for number, _ in batch.steps])
        ends = new_tensor([step.end_tokens for _, step in batch.steps])
        scores = batch.rewards.new_tensor([step.reward for _, step in batch.steps])
        rewards = self._of_steps(scores, sequence)
        if self._zero_truncated:
            rewards = rewards.masked_fill(batch.is_truncated[sequence], 0.0)
        penalty = self.overlong_penalty(lengths)
        # The scored steps of all ranks: -1 for a sequence of another rank.
        starts = new_tensor([batch.offsets.get(number, -1) for number, _ in batch.steps])
        is_own = starts >= 0
        per_token.index_add_(0, (starts + ends - 1)[is_own], rewards[is_own])
        per_token[last[has_token]] -= penalty[has_token]
        # The heads have the steps of all ranks: group estimators compare whole responses, and such
        # a response is one call.
        totals = torch.zeros_like(batch.rewards).index_add_(0, sequence, rewards)
        return per_token, totals - penalty

    def of_responses(self, scores: Tensor, lengths: Tensor, is_truncated: Tensor) -> Tensor:
        """Return the rewards of N whole responses.

        scores: float32 [N]; lengths: int64 [N]; is_truncated: bool [N] -> float32 [N].
        """
        rewards = self.scaled(scores)
        if self._zero_truncated:
            rewards = rewards.masked_fill(is_truncated, 0.0)
        return rewards - self.overlong_penalty(lengths)

    def _of_steps(self, scores: Tensor, sequence: Tensor) -> Tensor:
        """The rewards of the scored steps: float32 [S], int64 [S] -> float32 [S].

        The score d_k of step k, or, for placement=step_deltas, its change d_k - d_{k-1}, with
        fail_reward before the first step (differences of a potential: Ng, Harada, Russell, "Policy
        invariance under reward transformations", ICML 1999).
        """
        scores = self.scaled(scores)
        if self._reward.placement != "step_deltas":
            return scores
        # In float32 like the scores, so that a first step that fails changes exactly nothing.
        start = float(self.scaled(torch.tensor(self._reward.fail_reward)))
        is_first = sequence.diff(prepend=sequence.new_full((1,), -1)) > 0
        return scores - torch.where(is_first, start, scores.roll(1))

    def scaled(self, scores: Tensor) -> Tensor:
        """Scale and clip scores: float32 [...] -> float32 [...].

        clip((score - bias) scale, -clip, clip) (reward scaling of PPO implementations, no paper).
        """
        reward = self._reward
        return ((scores - reward.bias) * reward.scale).clamp(-reward.clip, reward.clip)

    def overlong_penalty(self, lengths: Tensor) -> Tensor:
        """Compute DAPO's soft penalty for long answers, as a positive number to subtract.

        lengths: int64 [B], response tokens -> float32 [B].  It is 0 up to limit - overlong_tokens
        and rises linearly to `overlong_penalty` at the limit (arXiv 2503.14476 eq. 13).
        overlong_tokens=0 makes it a step at limit + 1.
        """
        num_soft = self._reward.overlong_tokens
        excess = (lengths - (self._max_response_tokens - num_soft)).float() / max(num_soft, 1)
        return self._reward.overlong_penalty * excess.clamp(0, 1)


def _reward_kl(batch: Batch, outputs: PolicyOutput, algorithm: AlgorithmConfig) -> Tensor:
    """The KL at each token of the policy that the reward subtracts: float32 [R], 0 if the KL is not
    part of the reward.

    It is k1. The policy gradient of any other estimate lacks the term that pulls the policy back
    (tests/algorithms/test_kl_holds_the_policy.py).
    """
    if algorithm.kl.kind != "reward" or outputs.ref_logprobs is None:
        return torch.zeros_like(outputs.logprobs)
    kl = outputs.logprobs - outputs.ref_logprobs
    return kl.masked_fill(~batch.loss_mask, 0.0)


def _greedy_rewards(batch: Batch, rewards: Rewards) -> Tensor:
    """The reward of the greedy answer to the prompt of each sequence: float32 [B]."""
    assert len(batch.baselines) == batch.num_groups, "remax has the greedy answer of every group"
    of_groups = rewards.of_responses(
        batch.rewards.new_tensor([answer.reward for answer in batch.baselines]),
        batch.group_index.new_tensor([answer.response_length for answer in batch.baselines]),
        batch.is_truncated.new_tensor([answer.is_truncated for answer in batch.baselines]),
    )
    return of_groups[batch.group_index]


def _normalized(batch: Batch, raw: Tensor, mask: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    match algorithm.normalize_advantages:
        case "none":
            return raw
        case "batch":
            index = torch.zeros_like(batch.sequence_index)
            count = 1
        case "group":
            index = batch.group_index[batch.sequence_index]
            count = batch.num_groups
    parts = Parts(index=index, count=count, mask=mask, across=batch.across)
    return normalize_advantages(raw, parts=parts)


def _critic_targets(
    batch: Batch,
    rewards: Tensor,
    has_more: Tensor,
    outputs: PolicyOutput,
    advantage: GaeAdvantage | VtraceAdvantage,
    moments: Moments,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of the tokens that the policy wrote: float32 [R], float32 [R].

    has_more: bool [B], the responses whose return includes the value after their end.  A
    response that was scored is none of them, even if it was truncated: no target trains that
    value, so it would be paid twice and grow with every step.
    """
    assert outputs.values is not None, "gae and vtrace have a critic"
    of_rows = batch.calls.part_sequence[batch.calls.rows()[0]]
    after_end = moments.to_returns(outputs.values.after_end)
    bootstrap = after_end.masked_fill(~has_more, 0.0)[of_rows]
    rows = batch.rows(rewards)
    values = batch.rows(moments.to_returns(outputs.values.at_tokens))
    log_ratio = None
    if isinstance(advantage, VtraceAdvantage):
        log_ratio = batch.rows(outputs.logprobs - batch.behavior_logprobs)
    advantages, returns = temporal_differences(
        rows,
        values=values,
        bootstrap=bootstrap,
        mask=batch.rows(batch.loss_mask),
        gamma=advantage.gamma,
        lam=advantage.gae_lambda,
        log_ratio=log_ratio,
    )
    return batch.flat(advantages), batch.flat(returns)


def _last_written(batch: Batch) -> tuple[Tensor, Tensor]:
    """The index in R of the last trained token of each call, -1 if the rank has none of it: int64
    [U]; and where there is one: bool [U].
    """
    index = torch.arange(batch.num_tokens, device=batch.rewards.device)
    index = index.masked_fill(~batch.loss_mask, -1)
    last = torch.full_like(batch.calls.sequence, -1)
    last.scatter_reduce_(0, batch.calls.of_tokens, index, "amax")
    return last, last >= 0
