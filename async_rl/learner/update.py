"""One learner step: what the models say before, targets, then minibatches of forward, backward and
optimizer step.

Invariants
- Every mean is over the whole minibatch, on all ranks: budgets, packing and ranks change memory and
  time, never a gradient.
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
from async_rl.config.run import RunConfig
from async_rl.learner.forward_passes import Evaluator, Kept, Minibatch, note
from async_rl.learner.models import Critic, Policy, PolicyOutput
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
    """All that the metrics of a step are made of. kl_coef and units: those that the step was
    trained with.
    """

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
    """What all updates of a step share. value_targets: the returns in the critic's units, float32
    [R].
    """

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
        self._evaluator = Evaluator(
            config, ranks, policy=policy, reference=reference, critic=critic
        )
        self._policy_optimizer = policy_optimizer
        self._reference = reference
        self._critic = critic
        self._critic_optimizer = critic_optimizer
        self._state = state
        self._shares_backbone = critic is None and config.learner.critic.enabled

    def step(self, batch: Batch, version: int) -> StepRecord:
        """Trains on the batch. Raises StalenessError and NonFiniteError before any parameter
        changes.
        """
        learner = self._config.learner
        mask = trained_mask(
            batch, version=version, algorithm=self._algorithm, buffer=self._config.buffer
        )
        warmup_steps = learner.critic.warmup_steps if learner.critic.enabled else 0
        trains_policy = version >= warmup_steps
        value_lr = self._critic_optimizer.set_step(version) if self._critic_optimizer else None
        policy_lr = (
            self._policy_optimizer.set_step(version - warmup_steps) if trains_policy else 0.0
        )

        started_s = time.perf_counter()
        pulls = self._pulls(batch, mask)
        updates = [
            m
            for epoch in range(learner.epochs)
            for m in self._evaluator.plan(batch, version, epoch, pulls=pulls)
        ]
        streams = trains_policy and len(updates) == 1 and not self._needs_policy_before
        before, kept = self._evaluator.evaluate(
            batch,
            updates[: learner.minibatches],
            with_policy=not streams,
            trains_policy=trains_policy,
        )
        evaluated_s = time.perf_counter()
        kl_coef, units = self._state.kl_coef, self._state.units
        targets = compute_targets(
            batch, mask, before, config=self._config, kl_coef=kl_coef, units=units
        )
        moments, value_targets = self._state.moments, targets.returns
        if targets.returns is not None:
            moments, value_targets = self._state.observe(targets.returns, mask)
        step = _Step(
            batch=batch,
            mask=mask,
            before=before,
            targets=targets,
            value_targets=value_targets,
            kept=kept,
            totals=Totals(),
        )
        targeted_s = time.perf_counter()
        for minibatch in updates:
            weights = self._weights(batch, mask, minibatch.sequences)
            if self._shares_backbone:
                self._update_both(step, minibatch.passes, weights, trains_policy=trains_policy)
                step.totals.updates += 1
                continue
            if trains_policy:
                self._update_policy(step, minibatch, weights)
            if self._critic is not None:
                self._update_critic(step, minibatch.passes, weights)
            step.totals.updates += 1
        if streams:
            self._evaluator.share(before.proximal_logprobs, before.entropies, before.ref_kl)
        self._state.end_step(
            moments, kl=_kl_per_sequence(batch, before), num_sequences=batch.num_sequences
        )
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
        """Whether advantages depend on what the policy's model says."""
        has_kl = self._reference is not None and self._algorithm.kl_placement == "reward"
        return has_kl or self._algorithm.advantage == "vtrace" or self._shares_backbone

    def _pulls(self, batch: Batch, mask: Tensor) -> Tensor:
        """bool [B]: whether the loss of the sequence can have a gradient: where advantages are all
        of it, equal rewards have none.
        """
        if (
            self._config.learner.critic.enabled
            or self._reference is not None
            or self._algorithm.entropy_coef
        ):
            return torch.ones(batch.num_sequences, dtype=torch.bool, device=mask.device)
        nothing = self._evaluator.nothing_yet(batch)
        advantages = compute_targets(
            batch, mask, nothing, config=self._config, kl_coef=0.0, units=self._state.units
        ).advantages
        counts = torch.bincount(
            batch.sequence_index[mask & (advantages != 0)], minlength=batch.num_sequences
        )
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
                loss, counted = self._policy_loss(step, row, output, weights)
            if row not in minibatch.silent:
                (loss * self._ranks.world_size).backward()  # type: ignore[no-untyped-call]
            sums += counted
        self._apply_policy(step.totals, sums)

    def _apply_policy(self, totals: Totals, sums: Tensor) -> None:
        found = PolicySums(*self._ranks.sum(sums).tolist())
        totals.policy_grad_norm += self._policy_optimizer.apply(found.loss)
        totals.policy = PolicySums(*(a + b for a, b in zip(totals.policy, found, strict=True)))

    def _policy_loss(
        self, step: _Step, row: Pass, output: PolicyOutput, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        return policy_pass_loss(
            self._algorithm,
            step.batch,
            row,
            output,
            weights=weights[row.token_index],
            before=step.before,
            targets=step.targets,
            kl_coef=self._state.kl_coef,
        )

    def _update_critic(self, step: _Step, rows: Sequence[Pass], weights: Tensor) -> None:
        """One optimizer step of a critic with a backbone of its own."""
        total = torch.zeros((), device=self._ranks.device)
        for row in rows:
            values = step.kept.critic.pop(row, None)
            if values is None and self._critic is not None:
                values = self._critic(row).here
            loss = self._value_loss(step, row, values, weights)
            (loss * (self._algorithm.value_coef * self._ranks.world_size)).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        self._apply_critic(step.totals, total)

    def _update_both(
        self, step: _Step, rows: Sequence[Pass], weights: Tensor, *, trains_policy: bool
    ) -> None:
        """One optimizer step of the policy, on both losses, and of the critic's head on it; of the
        head alone during the warm-up.
        """
        sums, total = (
            torch.zeros(len(PolicySums._fields), device=self._ranks.device),
            torch.zeros((), device=self._ranks.device),
        )
        for row in rows:
            output = step.kept.policy.pop(row, None) or self._evaluator.run_policy(row)
            value = self._value_loss(
                step, row, output.values.here if output.values is not None else None, weights
            )
            loss = self._algorithm.value_coef * value
            if trains_policy:
                policy, counted = self._policy_loss(step, row, output, weights)
                loss, sums = loss + policy, sums + counted
            (loss * self._ranks.world_size).backward()  # type: ignore[no-untyped-call]
            total += value.detach()
        if trains_policy:
            self._apply_policy(step.totals, sums)
        else:
            self._policy_optimizer.discard()
        self._apply_critic(step.totals, total)

    def _apply_critic(self, totals: Totals, total: Tensor) -> None:
        if self._critic_optimizer is None:
            raise ValueError("there is no critic")
        loss = float(self._ranks.sum(total))
        totals.value_grad_norm += self._critic_optimizer.apply(loss)
        totals.value_loss += loss

    def _value_loss(self, step: _Step, row: Pass, values: Tensor | None, weights: Tensor) -> Tensor:
        """The pass's part of the minibatch's value loss."""
        old_values, targets, index = step.before.values, step.value_targets, row.token_index
        if values is None or old_values is None or targets is None:
            raise ValueError("a critic is trained on the returns of gae and vtrace only")
        losses = value_loss(
            values,
            old_values=old_values[index],
            returns=targets[index],
            clip=self._algorithm.value_clip,
        )
        return torch.where(weights[index] > 0, losses * weights[index], 0.0).sum()


def _kl_per_sequence(batch: Batch, before: Evaluated) -> float:
    """Nats by which the proximal policy left the reference, mean over the sequences' sums; 0
    without a reference.
    """
    if before.ref_logprobs is None:
        return 0.0
    return (
        float(
            torch.where(batch.loss_mask, before.proximal_logprobs - before.ref_logprobs, 0.0).sum()
        )
        / batch.num_sequences
    )
