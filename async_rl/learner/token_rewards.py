"""From the scores of a batch to the rewards of its tokens, as the reward settings define them.

The KL to the reference is subtracted in objective.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from async_rl.batching.batch import Batch
from async_rl.config.rewards import RewardConfig
from async_rl.core.frozen import frozen


@frozen
class RewardRules:
    """The settings that turn scores into rewards.

    max_response_tokens: the length limit that the overlong penalty refers to; zero_truncated: a
    truncated response has no task reward.
    """

    reward: RewardConfig
    max_response_tokens: int
    zero_truncated: bool

    def of_tokens(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the rewards at own tokens, float32 [R], and the sums of all sequences, float32
        [B].

        A whole response is rewarded at the last token that the policy wrote, a scored step at its
        last token. A response without a trained token gets no reward at any token.
        """
        lengths = torch.tensor(batch.response_lengths, device=batch.rewards.device)
        last, has_token = _last_written(batch)
        per_token = torch.zeros_like(batch.behavior_logprobs)
        if self.reward.placement == "end":
            totals = self.of_responses(batch.rewards, lengths, batch.is_truncated)
            per_token[last[has_token]] = totals[has_token]
            return per_token, totals
        steps = batch.steps
        sequence = steps.sequence
        rewards = step_rewards(
            self.scaled(steps.scores), is_first=steps.is_first, start=self._step_start()
        )
        if self.zero_truncated:
            rewards = rewards.masked_fill(batch.is_truncated[sequence], 0.0)
        penalty = self.overlong_penalty(lengths)
        # The scored steps of all ranks: -1 for a sequence of another rank.
        starts = torch.tensor([batch.offsets.get(s, -1) for s in sequence.tolist()]).to(sequence)
        is_own = starts >= 0
        per_token.index_add_(0, (starts + steps.end - 1)[is_own], rewards[is_own])
        per_token[last[has_token]] -= penalty[has_token]
        # The heads have the steps of all ranks: group estimators compare whole responses.
        totals = torch.zeros_like(batch.rewards).index_add_(0, sequence, rewards)
        return per_token, totals - penalty

    def of_responses(self, scores: Tensor, lengths: Tensor, is_truncated: Tensor) -> Tensor:
        """Return the rewards of N whole responses.

        scores: float32 [N]; lengths: int64 [N]; is_truncated: bool [N] -> float32 [N].
        """
        rewards = self.scaled(scores)
        if self.zero_truncated:
            rewards = rewards.masked_fill(is_truncated, 0.0)
        return rewards - self.overlong_penalty(lengths)

    def _step_start(self) -> float | None:
        """The reward before the first step, or None if steps are not rewarded for differences."""
        if self.reward.placement != "step_deltas":
            return None
        # In float32 like the scores, so that a first step that fails changes exactly nothing.
        return float(self.scaled(torch.tensor(self.reward.fail_reward)))

    def scaled(self, scores: Tensor) -> Tensor:
        """Scale and clip scores: float32 [...] -> float32 [...].

        clip((score - bias) scale, -clip, clip) (reward scaling of PPO implementations, no paper).
        """
        reward = self.reward
        return ((scores - reward.bias) * reward.scale).clamp(-reward.clip, reward.clip)

    def overlong_penalty(self, lengths: Tensor) -> Tensor:
        """Compute DAPO's soft penalty for long answers, as a positive number to subtract.

        lengths: int64 [B], response tokens -> float32 [B].  It is 0 up to limit - overlong_tokens
        and rises linearly to `overlong_penalty` at the limit (arXiv 2503.14476 eq. 13).
        overlong_tokens=0 makes it a step at limit + 1.
        """
        num_soft = self.reward.overlong_tokens
        excess = (lengths - (self.max_response_tokens - num_soft)).float() / max(num_soft, 1)
        return self.reward.overlong_penalty * excess.clamp(0, 1)


def _last_written(batch: Batch) -> tuple[Tensor, Tensor]:
    """The index in R of the last trained token of each sequence, -1 if the rank has none of it:
    int64 [B]; and where there is one: bool [B].
    """
    index = torch.arange(batch.num_tokens, device=batch.rewards.device)
    index = index.masked_fill(~batch.loss_mask, -1)
    last = torch.full((batch.num_sequences,), -1, device=index.device)
    last.scatter_reduce_(0, batch.sequence_index, index, "amax")
    return last, last >= 0


def step_rewards(scores: Tensor, *, is_first: Tensor, start: float | None) -> Tensor:
    """Compute the rewards of the scored steps of all sequences.

    scores: float32 [S], d_k of the steps in order; is_first: bool [S], the first step of its
    sequence -> float32 [S].  With start=None r_k = d_k; otherwise a step is rewarded for its
    change, r_k = d_k - d_{k-1} with d_0 = start (differences of a potential: Ng, Harada, Russell,
    "Policy invariance under reward transformations", ICML 1999).
    """
    if start is None:
        return scores
    previous = torch.where(is_first, start, scores.roll(1))
    return scores - previous
