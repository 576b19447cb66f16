"""What the models say of a batch before its update, and how the batch is dealt out to forward
passes.

Invariant: the first update has the weights that were evaluated, so its passes are kept, graph
included, where memory allows; where the policy's log-probs are needed no earlier, its training
passes are the evaluation.  Nothing is computed twice. Called by update.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from async_rl.batching.batch import Batch
from async_rl.batching.packing import Pass, pack
from async_rl.batching.partition import cost_tokens, minibatches, passes
from async_rl.config.run import RunConfig
from async_rl.learner.models import Critic, Policy, PolicyOutput, States, Values
from async_rl.learner.objective import Evaluated
from async_rl.learner.sharding import Ranks

_CACHE_TOKENS = 1280
"""Tokens of a pass on a CPU: activations of a small model then stay in the core's cache, which is
faster than one large pass.
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """The passes of this rank for one optimizer step, and the minibatch's sequences on all ranks.

    silent: those passes, at the front, of whose loss the gradient is exactly 0: they are run for
    what they tell, without a graph.
    """

    passes: list[Pass]
    silent: frozenset[Pass]
    sequences: list[int]


@dataclasses.dataclass(slots=True, kw_only=True)
class Kept:
    """Outputs of passes, graph included, that the first update uses instead of running the models
    again.

    is_streaming: the policy was not run before the targets; its training passes give the proximal
    log-probs.
    """

    is_streaming: bool
    policy: dict[Pass, PolicyOutput] = dataclasses.field(default_factory=dict)
    critic: dict[Pass, Tensor] = dataclasses.field(default_factory=dict)


class Evaluator:
    """Runs the models over batches."""

    def __init__(
        self,
        config: RunConfig,
        ranks: Ranks,
        *,
        policy: Policy,
        reference: Policy | None,
        critic: Critic | None,
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._policy = policy
        self._reference = reference
        self._critic = critic
        self._has_values = config.learner.critic.enabled
        self._is_kl_exact = config.algorithm.kl_estimator == "full"
        self._temperature = config.generation.temperature
        self._chunk_tokens = policy.chunk_tokens(config.learner.logits_chunk_mb)

    def plan(self, batch: Batch, version: int, epoch: int, *, pulls: Tensor) -> list[Minibatch]:
        """The epoch's minibatches with this rank's passes; the same on every rank and for every
        budget but for the passes.

        pulls: bool [B], False where nothing in the sequence's loss depends on the policy.
        """
        device = self._ranks.device
        budget = self._config.learner.budget_tokens
        if not self._ranks.is_sharded:
            budget = min(budget, _CACHE_TOKENS)
        rng = (
            np.random.default_rng((self._config.seed, version, epoch))
            if self._config.learner.shuffle
            else None
        )
        does_pull = pulls.tolist()

        def mine(sequences: list[int]) -> list[Pass]:
            if not sequences:
                return []
            shares = passes(batch, sequences, ranks=self._ranks.world_size, budget_tokens=budget)
            return [
                pack(batch, members, device=device, with_ends=self._has_values)
                for members in shares[self._ranks.rank]
            ]

        plan = []
        for sequences in minibatches(batch, count=self._config.learner.minibatches, rng=rng):
            silent = mine([s for s in sequences if not does_pull[s]])
            loud = mine([s for s in sequences if does_pull[s]])
            plan.append(
                Minibatch(passes=silent + loud, silent=frozenset(silent), sequences=sequences)
            )
        return plan

    def evaluate(
        self, batch: Batch, plan: Sequence[Minibatch], *, with_policy: bool, trains_policy: bool
    ) -> tuple[Evaluated, Kept]:
        """Runs the models over the batch. The first update has the same weights, so its passes keep
        their graphs if memory allows.
        """
        reuse = self._reusable(batch, plan[0])
        silent = plan[0].silent
        before, kept = self.nothing_yet(batch), Kept(is_streaming=not with_policy)
        for row in [row for minibatch in plan for row in minibatch.passes]:
            if with_policy:
                with torch.set_grad_enabled(trains_policy and row in reuse and row not in silent):
                    output = self.run_policy(row)
                note(before, row, output)
                if trains_policy and row in reuse:
                    kept.policy[row] = output
            if self._reference is not None and before.ref_logprobs is not None:
                with torch.no_grad():
                    before.ref_logprobs[row.token_index] = self._ref_logprobs(self._reference, row)
            if self._critic is not None:
                with torch.set_grad_enabled(row in reuse):
                    values: Values = self._critic(row)
                _note_values(before, row, values)
                if row in reuse:
                    kept.critic[row] = values.here
        if with_policy:
            self.share(before.proximal_logprobs, before.entropies, before.ref_kl)
        self.share(before.ref_logprobs, before.values, before.bootstrap)
        return before, kept

    def run_policy(self, row: Pass) -> PolicyOutput:
        """The policy's log-probs and entropies of a pass, with the exact KL where that is the
        estimator.
        """
        states = None
        if self._is_kl_exact and self._reference is not None:
            with torch.no_grad():
                states = self._reference.states(row)
                if self._ranks.is_sharded:  # FSDP frees the head that the backward pass will need
                    states = States(states.hidden, states.head.clone())
        output: PolicyOutput = self._policy(
            row, temperature=self._temperature, chunk_tokens=self._chunk_tokens, reference=states
        )
        return output

    def _ref_logprobs(self, reference: Policy, row: Pass) -> Tensor:
        output: PolicyOutput = reference(
            row, temperature=self._temperature, chunk_tokens=self._chunk_tokens
        )
        return output.logprobs

    def _reusable(self, batch: Batch, first: Minibatch) -> set[Pass]:
        """Passes whose graphs may wait for the update: all of the first minibatch or none, within
        the budget.

        FSDP's hooks expect each backward pass before the next forward pass, so a sharded model
        keeps a single one.
        """
        fits = (
            cost_tokens(batch, first.sequences)
            <= self._config.learner.budget_tokens * self._ranks.world_size
        )
        if not fits or (self._ranks.is_sharded and len(first.passes) > 1):
            return set()
        return set(first.passes)

    def nothing_yet(self, batch: Batch) -> Evaluated:
        """What is known before any model has run: zeros."""

        def tokens() -> Tensor:
            return torch.zeros(batch.num_tokens, device=self._ranks.device)

        return Evaluated(
            proximal_logprobs=tokens(),
            entropies=tokens(),
            ref_logprobs=tokens() if self._reference is not None else None,
            ref_kl=tokens() if self._reference is not None and self._is_kl_exact else None,
            values=tokens() if self._has_values else None,
            bootstrap=(
                torch.zeros(batch.num_sequences, device=self._ranks.device)
                if self._has_values
                else None
            ),
        )

    def share(self, *tensors: Tensor | None) -> None:
        """Each rank has filled its own places and left 0 elsewhere; afterwards all have everything."""
        for tensor in tensors:
            if tensor is not None:
                self._ranks.sum(tensor)


def note(before: Evaluated, row: Pass, output: PolicyOutput) -> None:
    """Writes down what the proximal policy says of a pass."""
    before.proximal_logprobs[row.token_index] = output.logprobs.detach()
    before.entropies[row.token_index] = output.entropies.detach()
    if before.ref_kl is not None and output.kl is not None:
        before.ref_kl[row.token_index] = output.kl.detach()
    if output.values is not None:
        _note_values(before, row, output.values)


def _note_values(before: Evaluated, row: Pass, values: Values) -> None:
    if before.values is not None and before.bootstrap is not None:
        before.values[row.token_index] = values.here.detach()
        before.bootstrap[row.sequences] = values.after
