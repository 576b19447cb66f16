"""One learner step: what the models say before, targets, then minibatches of forward, backward and optimizer step.

Invariants
- Every mean is over the whole minibatch, on all ranks: budgets, packing and ranks change memory and time, never a gradient.
- The proximal policy is the policy before the first update of the step.
Called by the trainer; every rank runs it with the same batch.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from async_rl.algorithms.corrections import behavior_weights
from async_rl.algorithms.kl import kl_estimate
from async_rl.algorithms.losses import policy_loss, token_weights, value_loss
from async_rl.batching.batch import Batch
from async_rl.batching.packing import Pass
from async_rl.config import RunConfig
from async_rl.learner.evaluate import Evaluator, Kept, Minibatch, Output, note
from async_rl.learner.models import Critic, Policy
from async_rl.learner.objective import Evaluated, Targets, compute_targets, trained_mask
from async_rl.learner.optimizer import ModelOptimizer
from async_rl.learner.sharding import Ranks


@dataclasses.dataclass(slots=True)
class Totals:
    """Sums over the updates of a step, over all ranks."""

    updates: int = 0
    policy_loss: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    kl_proximal_policy: float = 0.0
    tokens: float = 0.0
    policy_grad_norm: float = 0.0
    value_loss: float = 0.0
    value_grad_norm: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """All that the metrics of a step are made of."""

    mask: Tensor
    before: Evaluated
    targets: Targets
    totals: Totals
    policy_lr: float
    value_lr: float | None
    forward_s: float
    advantages_s: float
    update_s: float


class Updater:
    """Holds models and optimizers and trains them on one batch at a time."""

    def __init__(
        self,
        config: RunConfig,
        ranks: Ranks,
        *,
        policy: Policy,
        policy_optimizer: ModelOptimizer,
        reference: Policy | None,
        critic: Critic | None,
        critic_optimizer: ModelOptimizer | None,
    ) -> None:
        self._config = config
        self._algorithm = config.algorithm
        self._ranks = ranks
        self._evaluator = Evaluator(config, ranks, policy=policy, reference=reference, critic=critic)
        self._policy_optimizer = policy_optimizer
        self._reference = reference
        self._critic = critic
        self._critic_optimizer = critic_optimizer

    def step(self, batch: Batch, version: int) -> StepRecord:
        """Trains on the batch. Raises StalenessError and NonFiniteError before any parameter changes."""
        learner = self._config.learner
        mask = trained_mask(batch, version=version, algorithm=self._algorithm, buffer=self._config.buffer)
        trains_policy = self._critic is None or version >= learner.critic.warmup_steps
        value_lr = self._critic_optimizer.set_step(version) if self._critic_optimizer else None
        policy_lr = (
            self._policy_optimizer.set_step(version - (learner.critic.warmup_steps if self._critic else 0)) if trains_policy else 0.0
        )

        started_s = time.perf_counter()
        pulls = self._pulls(batch, mask)
        updates = [m for epoch in range(learner.epochs) for m in self._evaluator.plan(batch, version, epoch, pulls=pulls)]
        streams = trains_policy and len(updates) == 1 and not self._needs_kl_before
        before, kept = self._evaluator.evaluate(batch, updates[: learner.minibatches], with_policy=not streams, trains_policy=trains_policy)
        evaluated_s = time.perf_counter()
        targets = compute_targets(batch, mask, before, algorithm=self._algorithm, reward=self._config.reward)
        targeted_s = time.perf_counter()
        totals = Totals()
        for minibatch in updates:
            weights = self._weights(batch, mask, minibatch.sequences)
            if trains_policy:
                self._update_policy(batch, minibatch, weights, before, targets, kept, totals)
            if self._critic is not None:
                self._update_critic(minibatch.passes, weights, before, targets, kept, totals)
            totals.updates += 1
        if streams:
            self._evaluator.share(before.proximal_logprobs, before.entropies)
        return StepRecord(
            mask=mask,
            before=before,
            targets=targets,
            totals=totals,
            policy_lr=policy_lr,
            value_lr=value_lr,
            forward_s=evaluated_s - started_s,
            advantages_s=targeted_s - evaluated_s,
            update_s=time.perf_counter() - targeted_s,
        )

    @property
    def _needs_kl_before(self) -> bool:
        """Whether advantages depend on the policy's log-probs."""
        return self._reference is not None and self._algorithm.kl_placement == "reward"

    def _pulls(self, batch: Batch, mask: Tensor) -> Tensor:
        """bool [B]: whether the loss of the sequence can have a gradient: where advantages are all of it, equal rewards have none."""
        algorithm = self._algorithm
        if self._critic is not None or self._reference is not None or algorithm.entropy_coef:
            return torch.ones(batch.num_sequences, dtype=torch.bool, device=mask.device)
        nothing = self._evaluator.nothing_yet(batch)
        advantages = compute_targets(batch, mask, nothing, algorithm=algorithm, reward=self._config.reward).advantages
        counts = torch.bincount(batch.sequence_index[mask & (advantages != 0)], minlength=batch.num_sequences)
        return counts > 0

    def _weights(self, batch: Batch, mask: Tensor, sequences: Sequence[int]) -> Tensor:
        """The share of each token in the minibatch's mean: float32 [R]."""
        is_member = torch.zeros(batch.num_sequences, dtype=torch.bool, device=mask.device)
        is_member[list(sequences)] = True
        return token_weights(
            mask & is_member[batch.sequence_index],
            sequence_index=batch.sequence_index,
            num_sequences=batch.num_sequences,
            aggregation=self._algorithm.aggregation,
        )

    def _update_policy(
        self, batch: Batch, minibatch: Minibatch, weights: Tensor, before: Evaluated, targets: Targets, kept: Kept, totals: Totals
    ) -> None:
        """One optimizer step of the policy."""
        sums = torch.zeros(5, device=self._ranks.device)
        for row in minibatch.passes:
            with torch.set_grad_enabled(row not in minibatch.silent):
                output = kept.policy.pop(row, None) or self._evaluator.run_policy(row)
                if kept.is_streaming:
                    note(before, row, output)
                loss, statistics = self._policy_objective(batch, row, output, weights[row.token_index], before, targets)
            if row not in minibatch.silent:
                (loss * self._ranks.world_size).backward()  # type: ignore[no-untyped-call]
            sums += statistics
        loss_value, low, high, kl, tokens = self._ranks.sum(sums).tolist()
        totals.policy_grad_norm += self._policy_optimizer.apply(loss_value)
        totals.policy_loss += loss_value
        totals.clipped_low += low
        totals.clipped_high += high
        totals.kl_proximal_policy += kl
        totals.tokens += tokens

    def _policy_objective(
        self, batch: Batch, row: Pass, output: Output, weights: Tensor, before: Evaluated, targets: Targets
    ) -> tuple[Tensor, Tensor]:
        """The pass's part of the loss; and sums, float32 [5]: that loss, clipped low and high, KL(proximal, policy), trained tokens."""
        algorithm, index = self._algorithm, row.token_index
        logprobs, entropies = output
        proximal = before.proximal_logprobs[index]
        behavior_weight, _ = behavior_weights(
            proximal,
            behavior_logprobs=batch.behavior_logprobs[index],
            correction=algorithm.behavior_correction,
            maximum=algorithm.behavior_weight_max,
            minimum=algorithm.behavior_weight_min,
        )
        losses, is_low, is_high = policy_loss(
            logprobs,
            proximal_logprobs=proximal,
            advantages=targets.advantages[index],
            behavior_weight=behavior_weight,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            clip_dual=algorithm.clip_dual,
        )
        if algorithm.kl_placement == "loss" and before.ref_logprobs is not None:
            kl = kl_estimate(logprobs, ref_logprobs=before.ref_logprobs[index], estimator=algorithm.kl_estimator)
            losses = losses + algorithm.kl_coef * behavior_weight * kl
        if algorithm.entropy_coef:
            losses = losses - algorithm.entropy_coef * entropies
        is_trained = weights > 0
        loss = torch.where(is_trained, losses * weights, 0.0).sum()
        moved = kl_estimate(proximal, ref_logprobs=logprobs.detach(), estimator="k3")
        counts = [(x * is_trained).sum() for x in (is_low, is_high, moved, is_trained)]
        return loss, torch.stack([loss.detach(), *counts])

    def _update_critic(
        self, rows: Sequence[Pass], weights: Tensor, before: Evaluated, targets: Targets, kept: Kept, totals: Totals
    ) -> None:
        """One optimizer step of the critic."""
        if self._critic is None or self._critic_optimizer is None or before.values is None or targets.returns is None:
            raise ValueError("a critic is trained on the returns of gae only")
        total = torch.zeros((), device=self._ranks.device)
        for row in rows:
            values = kept.critic.pop(row, None)
            if values is None:
                values = self._critic(row)[0]
            index = row.token_index
            losses = value_loss(values, old_values=before.values[index], returns=targets.returns[index], clip=self._algorithm.value_clip)
            loss = torch.where(weights[index] > 0, losses * weights[index], 0.0).sum()
            (loss * (self._algorithm.value_coef * self._ranks.world_size)).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        loss_value = float(self._ranks.sum(total))
        totals.value_grad_norm += self._critic_optimizer.apply(loss_value)
        totals.value_loss += loss_value
