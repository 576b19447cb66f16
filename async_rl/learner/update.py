"""One learner step: forward passes, targets, then minibatches of forward, backward and optimizer.

Invariants
- Every mean is over the whole minibatch on all ranks. Budgets, packing and ranks change memory and
  time, never a gradient.
- The proximal policy is the policy before the first update of the step.
- Every rank runs the step with its own sequences of one batch, and makes the same collectives.
"""

import dataclasses
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from async_rl.algorithms.losses import (
    BehaviorWeights,
    effective_sequences,
    token_weights,
    value_loss,
)
from async_rl.algorithms.parts import Parts
from async_rl.batching.batch import Batch
from async_rl.batching.packing import Pass
from async_rl.config.algorithm import SumAggregation
from async_rl.config.run import RunConfig
from async_rl.learner.forward_passes import (
    ForwardPasses,
    Minibatch,
    needs_policy_before,
    record_policy,
)
from async_rl.learner.metrics import Step, Totals
from async_rl.learner.models import Critic, LearnerModels, PolicyOutput
from async_rl.learner.objective import (
    Targets,
    compute_targets,
    trained_mask,
)
from async_rl.learner.objective_state import ObjectiveState
from async_rl.learner.optimizer import ModelOptimizer
from async_rl.learner.pass_loss import PolicySums, correction, policy_pass_loss
from async_rl.learner.sharding import Ranks


class Updater:
    """Trains models with their optimizers on one batch at a time."""

    def __init__(
        self,
        config: RunConfig,
        ranks: Ranks,
        *,
        models: LearnerModels,
        forward: ForwardPasses,
        optimizers: Mapping[str, ModelOptimizer],
        state: ObjectiveState,
    ) -> None:
        self._algorithm = config.algorithm
        self._config = config
        self._ranks = ranks
        self._models = models
        self._forward = forward
        self._policy_optimizer = optimizers["policy"]
        self._critic_optimizer = optimizers.get("critic")
        self._state = state
        self._critic = config.algorithm.critic
        self._value_coef = 0.0 if self._critic is None else self._critic.value_coef
        self._warmup_steps = 0 if self._critic is None else self._critic.warmup_steps

    def step(self, batch: Batch, version: int) -> Step:
        """Train on the batch. Raises StalenessError, NonFiniteError before a parameter changes."""
        mask = trained_mask(batch, version=version, config=self._config)
        trains_policy = version >= self._warmup_steps
        # The policy's schedule starts after the critic's warm-up.
        policy_step = version - self._warmup_steps
        policy_lr = self._policy_optimizer.set_step(policy_step) if trains_policy else 0.0
        scalars = {"policy/lr": policy_lr}
        if self._critic_optimizer is not None:
            scalars["value/lr"] = self._critic_optimizer.set_step(version)

        started_s = time.perf_counter()
        # For the batch, not for a minibatch: every epoch draws other minibatches.
        has_gradient = self._has_gradient(batch, mask)
        updates = [
            minibatch
            for epoch in range(self._config.learner.epochs)
            for minibatch in self._forward.plan(batch, version, epoch, has_gradient=has_gradient)
        ]
        waits = needs_policy_before(self._algorithm, self._models)
        # With one update the training pass itself records the proximal log-probs.
        records_policy = trains_policy and len(updates) == 1 and not waits
        before = self._forward.run(
            batch, updates[: self._config.learner.minibatches], with_policy=not records_policy
        )
        if before.kl is not None:
            scalars["policy/kl_coef"] = self._state.kl_coef
        forwarded_s = time.perf_counter()
        scalars["time/forward_s"] = forwarded_s - started_s
        targets = self._targets(batch, mask, before)
        moments, value_targets = self._state.observe(targets.returns, mask, batch.across)
        step = Step(
            batch=batch,
            mask=mask,
            before=before,
            targets=targets,
            value_targets=value_targets,
            corrected=None if records_policy else self._corrected(batch, mask, before),
            trains_policy=trains_policy,
            # As they are before this step: the metrics report the numbers that the step used.
            moments=self._state.moments,
            scalars=scalars,
        )
        targeted_s = time.perf_counter()
        scalars["time/advantages_s"] = targeted_s - forwarded_s
        for minibatch in updates:
            self._update(step, minibatch)
        kl = _kl_per_sequence(batch, before)
        self._state.end_step(moments, kl=kl, num_sequences=batch.num_sequences)
        corrected = step.corrected or self._corrected(batch, mask, before)
        scalars["time/update_s"] = time.perf_counter() - targeted_s
        return dataclasses.replace(step, corrected=corrected)

    def _targets(self, batch: Batch, mask: Tensor, before: PolicyOutput) -> Targets:
        state = self._state
        return compute_targets(
            batch, mask, before, config=self._config, kl_coef=state.kl_coef, moments=state.moments
        )

    def _corrected(self, batch: Batch, mask: Tensor, before: PolicyOutput) -> BehaviorWeights:
        """The behavior weights of all own tokens (collective)."""
        log_ratio = before.logprobs - batch.behavior_logprobs
        settings = self._algorithm.policy_loss.correction
        return correction(settings, log_ratio, sequences=batch.sequences(mask))

    def _has_gradient(self, batch: Batch, mask: Tensor) -> Tensor:
        """Return the sequences whose loss can have a gradient: bool [B].

        Without another term than the advantages, a group of equal rewards has no gradient.
        """
        models = self._models
        if models.has_values or models.reference is not None or self._algorithm.entropy_coef:
            return torch.ones(batch.num_sequences, dtype=torch.bool, device=mask.device)
        # The models have not run yet. Without values and a reference, advantages need no output.
        outputs = self._forward.empty_outputs(batch)
        advantages = self._targets(batch, mask, outputs).advantages
        # Over all ranks: plans that differ would leave a rank alone in a collective operation.
        pulling = batch.sequence_index[mask & (advantages != 0)]
        return batch.across.sum(torch.bincount(pulling, minlength=batch.num_sequences)) > 0

    def _update(self, step: Step, minibatch: Minibatch) -> None:
        """Run the optimizer steps of one minibatch."""
        batch = step.batch
        is_member = torch.zeros(batch.num_sequences, dtype=torch.bool, device=step.mask.device)
        is_member[minibatch.sequences] = True
        members = batch.sequences(step.mask & is_member[batch.sequence_index])
        aggregation = self._algorithm.aggregation
        constant = aggregation.tokens if isinstance(aggregation, SumAggregation) else None
        weights = token_weights(members, aggregation=aggregation.kind, constant_tokens=constant)
        if step.trains_policy or self._models.critic is None:
            self._update_policy(step, minibatch, members, weights)
        if self._models.critic is not None:
            self._update_critic(step, minibatch, self._models.critic, weights)
        step.totals.updates += 1

    def _update_policy(
        self, step: Step, minibatch: Minibatch, members: Parts, weights: Tensor
    ) -> None:
        """Run one optimizer step of the policy, and one of the head of a critic on its backbone.

        members: the trained tokens of the minibatch.  During the warm-up only the head is trained.
        """
        sums = torch.zeros(len(PolicySums._fields), device=self._ranks.device)
        value_sum = sums.new_zeros(())
        for index, row in enumerate(minibatch.passes):
            has_gradient = index >= minibatch.num_silent  # without: only for its metrics
            losses = []
            with torch.set_grad_enabled(has_gradient):
                records = step.corrected is None
                output = self._forward.run_policy(row, records=records)
                if records:
                    record_policy(step.before, row, output)
                if step.trains_policy:
                    loss, counted = policy_pass_loss(
                        self._algorithm,
                        step.batch,
                        row,
                        output,
                        weights=weights[row.token_index],
                        before=step.before,
                        targets=step.targets,
                        corrected=step.corrected,
                        kl_coef=self._state.kl_coef,
                    )
                    losses.append(loss)
                    sums += counted
                if output.values is not None:
                    value = self._value_loss(step, row, output.values.at_tokens, weights)
                    losses.append(self._value_coef * value)
                    value_sum += value.detach()
            if has_gradient:
                # One backward pass for both losses: the backbone is run backwards once.
                is_last = row is minibatch.passes[-1]
                self._ranks.backward(
                    self._models.policy, torch.stack(losses).sum(), is_last=is_last
                )
        if step.trains_policy:
            self._apply_policy(step, members, sums)
        else:
            # The value loss has put gradients on the backbone, which the warm-up must not move.
            self._policy_optimizer.discard()
        if self._models.policy.value_head is not None:
            self._apply_critic(step.totals, value_sum)

    def _update_critic(
        self, step: Step, minibatch: Minibatch, critic: Critic, weights: Tensor
    ) -> None:
        """Run one optimizer step of a critic that has its own backbone."""
        value_sum = torch.zeros((), device=self._ranks.device)
        for row in minibatch.passes:
            loss = self._value_loss(step, row, critic(row).at_tokens, weights)
            is_last = row is minibatch.passes[-1]
            self._ranks.backward(critic, self._value_coef * loss, is_last=is_last)
            value_sum += loss.detach()
        self._apply_critic(step.totals, value_sum)

    def _value_loss(self, step: Step, row: Pass, values: Tensor, weights: Tensor) -> Tensor:
        """The pass's part of the minibatch's value loss. weights: float32 [R], of the batch."""
        critic = self._critic
        old = step.before.values
        targets = step.value_targets
        assert critic is not None, "values are the output of a critic"
        assert old is not None, "its outputs before the update are kept"
        assert targets is not None, "gae and vtrace have returns"
        index = row.token_index
        losses = value_loss(
            values,
            old_values=old.at_tokens[index],
            returns=targets[index],
            clip=critic.value_clip,
        )
        return torch.where(weights[index] > 0, losses * weights[index], 0.0).sum()

    def _apply_policy(self, step: Step, members: Parts, sums: Tensor) -> None:
        totals = step.totals
        added = PolicySums(*self._ranks.sum(sums).tolist())
        log_ratio = step.before.logprobs - step.batch.behavior_logprobs
        # For this minibatch: its step is scaled by the sequences that it trains.
        effective = effective_sequences(log_ratio, sequences=members)
        applied = self._policy_optimizer.apply(added.loss, effective_share=effective)
        totals.policy_grad_norm += applied.norm
        totals.effective_sequences += effective
        totals.step_scale += applied.scale
        totals.policy = PolicySums(*(a + b for a, b in zip(totals.policy, added, strict=True)))

    def _apply_critic(self, totals: Totals, value_sum: Tensor) -> None:
        assert self._critic_optimizer is not None, "a critic has an optimizer"
        # Summed before the check for finite values, so that all ranks raise or none does.
        loss = float(self._ranks.sum(value_sum))
        totals.value_grad_norm += self._critic_optimizer.apply(loss).norm
        totals.value_loss += loss


def _kl_per_sequence(batch: Batch, before: PolicyOutput) -> float:
    """Nats of KL(proximal, reference) per sequence, 0 without a reference."""
    if before.kl is None:
        return 0.0
    # All written tokens, trained or not: the controller steers the policy, not the batch.
    total = torch.where(batch.loss_mask, before.kl, 0.0).sum()
    return float(batch.across.sum(total)) / batch.num_sequences
