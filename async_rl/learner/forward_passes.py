"""Forward passes of the models over a batch, and the plan that divides a batch among minibatches,
ranks and passes.

If no target depends on the policy's log-probs, the training passes of the only update record them;
otherwise passes without a graph record them first.
Invariants
- Minibatches depend on the batch and the seed only, not on the number of ranks or a memory budget,
  so neither changes the objective.
- Sequences that share a prompt stay together if possible, because a packed row stores the prompt
  once.
- Every rank computes the same partition, from the sizes of all sequences.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from async_rl.batching.batch import Batch, Sizes, sizes_of
from async_rl.batching.packing import Pass, pack
from async_rl.config.algorithm import AlgorithmConfig, LossKl
from async_rl.config.learner import CACHE_TOKENS
from async_rl.config.policy_losses import PluginCorrection
from async_rl.config.run import RunConfig
from async_rl.core.frozen import frozen
from async_rl.core.heads import GroupHead
from async_rl.learner.models import LearnerModels, PolicyOutput, States, Values
from async_rl.learner.sharding import Ranks

Bundle = list[int]
"""Sequences that stay together."""


@frozen
class Minibatch:
    """The passes of this rank for one optimizer step, and the sequences of all ranks.

    num_silent: the passes, first in the list, whose loss has a gradient of exactly 0. They run
    without a graph, for their metrics.
    """

    passes: list[Pass]
    num_silent: int
    sequences: list[int]


class ForwardPasses:
    """Runs policy, reference and critic over batches."""

    def __init__(
        self,
        config: RunConfig,
        models: LearnerModels,
        ranks: Ranks,
    ) -> None:
        learner = config.learner
        kl = config.algorithm.kl
        self._models = models
        self._ranks = ranks
        self._config = config
        self._trains_kl = isinstance(kl, LossKl) and kl.estimator == "full"
        self._chunk_tokens = models.policy.chunk_tokens(learner.logits_chunk_mb)
        # On a CPU a larger pass is slower, whatever the budget allows.
        most = max(learner.budget_tokens, learner.forward_tokens)
        if not ranks.is_sharded:
            most = CACHE_TOKENS
        # The ranks of a context have a row together, each as many tokens as one rank without.
        self._pass_tokens = min(learner.budget_tokens, most) * ranks.context.size
        self._forward_tokens = min(learner.forward_tokens, most) * ranks.context.size

    def owners(self, heads: Sequence[GroupHead], version: int) -> list[int]:
        """Return the part of the batch that each sequence is in, as in `Ranks`, if this version
        trains it. It is the same on all ranks. Safe in any thread.

        The parts are balanced in each minibatch of the first epoch. Later epochs draw other
        minibatches, and a sequence stays where it is.
        """
        sizes = sizes_of(heads)
        parts = self._ranks.num_parts
        # Sequences without an advantage need no backward pass, so they are shared out separately.
        is_uniform = [group.is_uniform for group in heads for _ in group.samples]
        owners = [0] * sizes.num_sequences
        for sequences in self._minibatches(sizes, version, 0):
            for kind in (False, True):
                members = [s for s in sequences if is_uniform[s] is kind]
                shares = share_out(sizes, members, parts=parts, cap_tokens=self._pass_tokens)
                for part, share in enumerate(shares):
                    for s in share:
                        owners[s] = part
        return owners

    def _minibatches(self, sizes: Sizes, version: int, epoch: int) -> list[list[int]]:
        # At random: a batch is in the order of completion, so its first groups have short samples.
        # From the version, not from a running generator: a resumed run draws the same.
        rng = np.random.default_rng((self._config.seed, version, epoch))
        return minibatches(sizes, count=self._config.learner.minibatches, rng=rng)

    def plan(
        self, batch: Batch, version: int, epoch: int, *, has_gradient: Tensor
    ) -> list[Minibatch]:
        """Return the minibatches of an epoch with the passes of this rank.

        has_gradient: bool [B], False where the loss of the sequence does not depend on the policy.
        Minibatches are equal on all ranks and for all budgets; only their passes differ.
        """
        is_trained = has_gradient.tolist()
        budget = self._pass_tokens
        plan = []
        for sequences in self._minibatches(batch, version, epoch):
            # Packed apart: one sequence with a gradient would make its whole row need a graph.
            zero = self._passes(batch, [s for s in sequences if not is_trained[s]], budget)
            trained = self._passes(batch, [s for s in sequences if is_trained[s]], budget)
            plan.append(Minibatch(passes=zero + trained, num_silent=len(zero), sequences=sequences))
        return plan

    def _passes(self, batch: Batch, sequences: list[int], budget_tokens: int) -> list[Pass]:
        """Pack this rank's share of the sequences into passes."""
        if not sequences:
            return []
        ranks = self._ranks
        shares: list[list[int]] = [[] for _ in range(ranks.num_parts)]
        for s in sequences:
            shares[batch.owners[s]].append(s)
        # Only a critic reads the last token of a response; without one it is not computed.
        with_ends = self._models.has_values
        return [
            pack(batch, members, device=ranks.device, with_ends=with_ends)
            for members in passes(batch, shares, budget_tokens=budget_tokens)[ranks.part]
        ]

    @torch.no_grad()
    def run(self, batch: Batch, plan: Sequence[Minibatch], *, with_policy: bool) -> PolicyOutput:
        """Run the models over the rank's sequences before the update.

        with_policy: run policy and reference too; otherwise the training passes record them.
        """
        outputs = self.empty_outputs(batch)
        critic = self._models.critic
        for row in self._without_graph(batch, plan):
            if with_policy:
                record_policy(outputs, row, self.run_policy(row))
            if critic is not None:
                _record_values(outputs, row, critic(row))
        return outputs

    def _without_graph(self, batch: Batch, plan: Sequence[Minibatch]) -> list[Pass]:
        """The passes over these minibatches that need no graph: they may have more tokens than
        those that train, and then belong to no minibatch.
        """
        if self._forward_tokens == self._pass_tokens:
            return [row for minibatch in plan for row in minibatch.passes]
        sequences = sorted(s for minibatch in plan for s in minibatch.sequences)
        return self._passes(batch, sequences, self._forward_tokens)

    def run_policy(self, row: Pass, *, records: bool = True) -> PolicyOutput:
        """Run the policy on a pass, and the reference if the pass records or trains their KL."""
        states = None
        if self._models.reference is not None and (records or self._trains_kl):
            with torch.no_grad():
                states = self._models.reference.states(row)
                if self._ranks.is_sharded:
                    # FSDP frees the gathered head after the forward pass; backward needs it.
                    states = States(states.hidden, states.head.clone())
        output: PolicyOutput = self._models.policy(
            row,
            temperature=self._config.generation.temperature,
            chunk_tokens=self._chunk_tokens,
            reference=states,
        )
        return output

    def empty_outputs(self, batch: Batch) -> PolicyOutput:
        """Return zeros for every output of the models there are."""
        models = self._models
        num_tokens = batch.num_tokens

        def zeros(size: int) -> Tensor:
            return torch.zeros(size, device=self._ranks.device)

        values = Values(zeros(num_tokens), zeros(batch.num_sequences))
        has_reference = models.reference is not None
        return PolicyOutput(
            logprobs=zeros(num_tokens),
            entropies=zeros(num_tokens),
            ref_logprobs=zeros(num_tokens) if has_reference else None,
            kl=zeros(num_tokens) if has_reference else None,
            values=values if models.has_values else None,
        )


def record_policy(outputs: PolicyOutput, row: Pass, output: PolicyOutput) -> None:
    """Write the policy's output of a pass into the outputs of the batch."""
    for stored, new in zip(outputs[:4], output[:4], strict=True):
        if stored is not None and new is not None:
            stored[row.token_index] = new.detach()
    if output.values is not None:
        _record_values(outputs, row, output.values)


def _record_values(outputs: PolicyOutput, row: Pass, values: Values) -> None:
    if outputs.values is not None:
        outputs.values.at_tokens[row.token_index] = values.at_tokens.detach()
        outputs.values.after_end[row.sequences] = values.after_end


def needs_policy_before(algorithm: AlgorithmConfig, models: LearnerModels) -> bool:
    """Return whether an update needs the policy's outputs of the whole batch before it starts."""
    pays_kl = algorithm.kl.kind == "reward"
    shares_backbone = models.policy.value_head is not None
    # The weights of a plug-in may depend on the whole batch.
    weighs_batch = isinstance(algorithm.policy_loss.correction, PluginCorrection)
    is_vtrace = algorithm.advantage.kind == "vtrace"
    return pays_kl or is_vtrace or shares_backbone or weighs_batch


def cost_tokens(batch: Sizes, sequences: Sequence[int]) -> int:
    """Return the tokens of a packed row of these sequences: each response, each prompt once."""
    prompts = {batch.prompt_key[s]: batch.prompt_lengths[s] for s in sequences}
    return sum(prompts.values()) + sum(batch.response_lengths[s] for s in sequences)


def minibatches(batch: Sizes, *, count: int, rng: np.random.Generator) -> list[list[int]]:
    """Divide the batch into `count` lists of sequences of about equal tokens.

    rng: assigns them in random order.  The first list with the fewest tokens gets the next bundle
    (greedy scheduling, Graham 1969).
    """
    everything = range(batch.num_sequences)
    # Without a limit: minibatches must not depend on a memory budget.
    bundles = _bundles(batch, everything, parts=count, cap_tokens=math.inf)
    return _balanced(batch, [bundles[i] for i in rng.permutation(len(bundles))], count)


def share_out(
    batch: Sizes, sequences: Sequence[int], *, parts: int, cap_tokens: int
) -> list[list[int]]:
    """Return the sequences of each part of the batch, balanced by tokens.

    cap_tokens: sequences of one prompt stay together up to this number.
    """
    bundles = _bundles(batch, sequences, parts=parts, cap_tokens=cap_tokens)
    # Largest first: the greedy rule is then at most a third above the best division (Graham 1969).
    bundles.sort(key=lambda bundle: -cost_tokens(batch, bundle))
    return _balanced(batch, bundles, parts)


def passes(
    batch: Sizes, shares: Sequence[Sequence[int]], *, budget_tokens: int
) -> list[list[list[int]]]:
    """Return, for each rank's share of sequences, the sequences of each of its forward passes.

    A pass has at most budget_tokens tokens, or a single longer sequence.  All ranks have the same
    number of passes, because sharded models communicate in each pass; ranks with less work have
    empty passes at the end.
    """
    result = []
    for share in shares:
        bundles = _bundles(batch, share, parts=1, cap_tokens=budget_tokens)
        bundles.sort(key=lambda bundle: -cost_tokens(batch, bundle))
        result.append(_fill(batch, bundles, budget_tokens))
    # A rank with fewer passes would leave other ranks waiting in the collectives of FSDP.
    longest = max(map(len, result))
    return [rank_passes + [[]] * (longest - len(rank_passes)) for rank_passes in result]


def _bundles(
    batch: Sizes, sequences: Sequence[int], *, parts: int, cap_tokens: float
) -> list[Bundle]:
    """Bundle the sequences of each prompt, divided further above cap_tokens.

    With fewer than two prompts per part, bundles could not be balanced, so each sequence is its own
    bundle.
    """
    by_prompt: dict[int, Bundle] = {}
    for s in sequences:
        by_prompt.setdefault(batch.prompt_key[s], []).append(s)
    if len(by_prompt) < 2 * parts and parts > 1:
        return [[s] for s in sequences]
    bundles: list[Bundle] = []
    for members in by_prompt.values():
        room = -1.0  # below every length, so that an empty response starts a bundle too
        for s in members:
            if batch.response_lengths[s] > room:
                bundles.append([])
                room = cap_tokens - batch.prompt_lengths[s]
            bundles[-1].append(s)
            room -= batch.response_lengths[s]
    return bundles


def _balanced(batch: Sizes, bundles: Iterable[Bundle], count: int) -> list[list[int]]:
    """Give each bundle in turn to the part with the fewest tokens so far; return the sequences of
    each part in the order of the batch.
    """
    parts: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for bundle in bundles:
        # The first of equals, so that every rank computes the same partition.
        lightest = loads.index(min(loads))
        parts[lightest] += bundle
        loads[lightest] += cost_tokens(batch, bundle)
    return [sorted(part) for part in parts]


def _fill(batch: Sizes, bundles: Sequence[Bundle], budget_tokens: int) -> list[list[int]]:
    """Put each bundle, largest first, into the first pass with room for it."""
    filled: list[list[int]] = []
    rooms: list[int] = []
    for bundle in bundles:
        cost = cost_tokens(batch, bundle)
        index = next((i for i, room in enumerate(rooms) if cost <= room), len(rooms))
        if index == len(rooms):
            filled.append([])
            rooms.append(budget_tokens)
        filled[index] += bundle
        rooms[index] -= cost
    return filled
