"""From the scores of responses, of their steps and of an agent's calls to the rewards of tokens and
calls.
"""

import torch
from torch import Tensor

from async_rl.batching.batch import Batch
from async_rl.config.run import RunConfig


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


def _last_written(batch: Batch) -> tuple[Tensor, Tensor]:
    """The index in R of the last trained token of each call, -1 if the rank has none of it: int64
    [U]; and where there is one: bool [U].
    """
    index = torch.arange(batch.num_tokens, device=batch.rewards.device)
    index = index.masked_fill(~batch.loss_mask, -1)
    last = torch.full_like(batch.calls.sequence, -1)
    last.scatter_reduce_(0, batch.calls.of_tokens, index, "amax")
    return last, last >= 0
