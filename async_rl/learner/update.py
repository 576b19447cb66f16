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

from async_rl.algorithms.losses import token_weights, value_loss
from async_rl.batching.batch import Batch
from async_rl.batching.packing import Pass
from async_rl.config import RunConfig
from async_rl.learner.evaluate import Evaluator, Kept, Minibatch, note
from async_rl.learner.models import Critic, Policy
from async_rl.learner.objective import Evaluated, Targets, ValueUnits, compute_targets, trained_mask
from async_rl.learner.objective_state import ObjectiveState
from async_rl.learner.optimizer import ModelOptimizer
from async_rl.learner.pass_loss import PolicySums, policy_pass_loss
from async_rl.learner.sharding import Ranks


@dataclasses.dataclass(slots=True)
class Totals:
    """Sums over the updates of a step, over all ranks."""

    updates: int = 0
    policy: PolicySums = dataclasses.field(default_factory=PolicySums)
    policy_grad_norm: float = 0.0
    value_loss: float = 0.0
    value_grad_norm: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """All that the metrics of a step are made of. kl_coef and units: those that the step was trained with."""

    mask: Tensor
    before: Evaluated
    targets: Targets
    totals: Totals
    kl_coef: float
    units: ValueUnits
    policy_lr: float
    value_lr: float | None
    forward_s: float
    advantages_s: float
    update_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """What all updates of a step share. value_targets: the returns in the critic's units, float32 [R]."""

    batch: Batch
    mask: Tensor
    before: Evaluated
    targets: Targets
    value_targets: Tensor | None
    kept: Kept
    totals: Totals


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
        state: ObjectiveState,
    ) -> None:
        self._config = config
        self._algorithm = config.algorithm
        self._ranks = ranks
        self._evaluator = Evaluator(config, ranks, policy=policy, reference=reference, critic=critic)
        self._policy_optimizer = policy_optimizer
        self._reference = reference
        self._critic = critic
        self._critic_optimizer = critic_optimizer
        self._state = state

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
        streams = trains_policy and len(updates) == 1 and not self._needs_policy_before
        before, kept = self._evaluator.evaluate(batch, updates[: learner.minibatches], with_policy=not streams, trains_policy=trains_policy)
        evaluated_s = time.perf_counter()
        kl_coef, units = self._state.kl_coef, self._state.units
        targets = compute_targets(batch, mask, before, config=self._config, kl_coef=kl_coef, units=units)
        moments, value_targets = self._state.moments, targets.returns
        if targets.returns is not None:
            moments, value_targets = self._state.observe(targets.returns, mask)
        step = _Step(batch=batch, mask=mask, before=before, targets=targets, value_targets=value_targets, kept=kept, totals=Totals())
        targeted_s = time.perf_counter()
        for minibatch in updates:
            weights = self._weights(batch, mask, minibatch.sequences)
            if trains_policy:
                self._update_policy(step, minibatch, weights)
            if self._critic is not None:
                self._update_critic(step, minibatch.passes, weights)
            step.totals.updates += 1
        if streams:
            self._evaluator.share(before.proximal_logprobs, before.entropies, before.ref_kl)
        self._state.end_step(moments, kl=_kl_per_sequence(batch, before), num_sequences=batch.num_sequences)
        return StepRecord(
            mask=mask,
            before=before,
            targets=targets,
            totals=step.totals,
            kl_coef=kl_coef,
            units=units,
            policy_lr=policy_lr,
            value_lr=value_lr,
            forward_s=evaluated_s - started_s,
            advantages_s=targeted_s - evaluated_s,
            update_s=time.perf_counter() - targeted_s,
        )

    @property
    def _needs_policy_before(self) -> bool:
        """Whether advantages depend on the policy's log-probs."""
        has_kl = self._reference is not None and self._algorithm.kl_placement == "reward"
        return has_kl or self._algorithm.advantage == "vtrace"

    def _pulls(self, batch: Batch, mask: Tensor) -> Tensor:
        """bool [B]: whether the loss of the sequence can have a gradient: where advantages are all of it, equal rewards have none."""
        if self._critic is not None or self._reference is not None or self._algorithm.entropy_coef:
            return torch.ones(batch.num_sequences, dtype=torch.bool, device=mask.device)
        nothing = self._evaluator.nothing_yet(batch)
        advantages = compute_targets(batch, mask, nothing, config=self._config, kl_coef=0.0, units=self._state.units).advantages
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
            constant_tokens=self._algorithm.aggregation_tokens,
        )

    def _update_policy(self, step: _Step, minibatch: Minibatch, weights: Tensor) -> None:
        """One optimizer step of the policy."""
        sums = torch.zeros(len(PolicySums._fields), device=self._ranks.device)
        for row in minibatch.passes:
            with torch.set_grad_enabled(row not in minibatch.silent):
                output = step.kept.policy.pop(row, None) or self._evaluator.run_policy(row)
                if step.kept.is_streaming:
                    note(step.before, row, output)
                loss, counted = policy_pass_loss(
                    self._algorithm,
                    step.batch,
                    row,
                    output,
                    weights=weights[row.token_index],
                    before=step.before,
                    targets=step.targets,
                    kl_coef=self._state.kl_coef,
                )
            if row not in minibatch.silent:
                (loss * self._ranks.world_size).backward()  # type: ignore[no-untyped-call]
            sums += counted
        found = PolicySums(*self._ranks.sum(sums).tolist())
        totals = step.totals
        totals.policy_grad_norm += self._policy_optimizer.apply(found.loss)
        totals.policy = PolicySums(*(a + b for a, b in zip(totals.policy, found, strict=True)))

    def _update_critic(self, step: _Step, rows: Sequence[Pass], weights: Tensor) -> None:
        """One optimizer step of the critic."""
        old_values, targets = step.before.values, step.value_targets
        if self._critic is None or self._critic_optimizer is None or old_values is None or targets is None:
            raise ValueError("a critic is trained on the returns of gae and vtrace only")
        total = torch.zeros((), device=self._ranks.device)
        for row in rows:
            values = step.kept.critic.pop(row, None)
            if values is None:
                values = self._critic(row)[0]
            index = row.token_index
            losses = value_loss(values, old_values=old_values[index], returns=targets[index], clip=self._algorithm.value_clip)
            loss = torch.where(weights[index] > 0, losses * weights[index], 0.0).sum()
            (loss * (self._algorithm.value_coef * self._ranks.world_size)).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        loss_value = float(self._ranks.sum(total))
        step.totals.value_grad_norm += self._critic_optimizer.apply(loss_value)
        step.totals.value_loss += loss_value


def _kl_per_sequence(batch: Batch, before: Evaluated) -> float:
    """Nats by which the proximal policy left the reference, mean over the sequences' sums; 0 without a reference."""
    if before.ref_logprobs is None:
        return 0.0
    return float(torch.where(batch.loss_mask, before.proximal_logprobs - before.ref_logprobs, 0.0).sum()) / batch.num_sequences
