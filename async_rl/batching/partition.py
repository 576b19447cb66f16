"""Deals sequences out to minibatches, ranks and forward passes, balanced by tokens.

Invariants
- Minibatches depend on nothing but the batch and the seed: neither on the number of ranks nor on a
  memory budget, so those never change the objective.
- Sequences that begin with the same prompt stay together where they can, because a packed row holds
  such a prompt once.
Pure; every rank computes the same partition.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from async_rl.batching.batch import Batch


def cost_tokens(batch: Batch, sequences: Sequence[int]) -> int:
    """Tokens of a packed row that holds these sequences: each response, each distinct prompt once."""
    prompts = {batch.prompt_key[s]: batch.prompt_lengths[s] for s in sequences}
    return sum(prompts.values()) + sum(batch.response_lengths[s] for s in sequences)


def _bundles(
    batch: Batch, sequences: Sequence[int], *, parts: int, cap_tokens: int | None
) -> list[list[int]]:
    """Sequences of one prompt each; split further when there are too few for `parts`, or over
    cap_tokens.
    """
    by_prompt: dict[int, list[int]] = {}
    for s in sequences:
        by_prompt.setdefault(batch.prompt_key[s], []).append(s)
    if len(by_prompt) < 2 * parts and parts > 1:
        return [[s] for s in sequences]
    if cap_tokens is None:
        return list(by_prompt.values())
    bundles: list[list[int]] = []
    for members in by_prompt.values():
        room = 0
        for s in members:
            if batch.response_lengths[s] > room:
                bundles.append([])
                room = cap_tokens - batch.prompt_lengths[s]
            bundles[-1].append(s)
            room -= batch.response_lengths[s]
    return bundles


def minibatches(batch: Batch, *, count: int, rng: np.random.Generator | None) -> list[list[int]]:
    """Splits the batch into `count` lists of sequences of about equal tokens: dealt out at random,
    or in order without rng.
    """
    everything = list(range(batch.num_sequences))
    if count == 1:
        return [everything]
    bundles = _bundles(batch, everything, parts=count, cap_tokens=None)
    loads = [0] * count
    result: list[list[int]] = [[] for _ in range(count)]
    for i in range(len(bundles)) if rng is None else rng.permutation(len(bundles)):
        lightest = loads.index(min(loads))
        result[lightest] += bundles[i]
        loads[lightest] += cost_tokens(batch, bundles[i])
    return [sorted(sequences) for sequences in result]


def passes(
    batch: Batch, sequences: Sequence[int], *, ranks: int, budget_tokens: int
) -> list[list[list[int]]]:
    """For each rank, the sequences of each of its forward passes.

    A pass holds at most budget_tokens tokens, or one longer sequence.  All ranks get the same
    number of passes, because sharded models communicate in each; a rank with less to do has empty
    ones at its end.
    """
    bundles = _bundles(batch, sequences, parts=ranks, cap_tokens=budget_tokens)
    bundles.sort(key=lambda members: -cost_tokens(batch, members))
    shares: list[list[list[int]]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for members in bundles:
        lightest = loads.index(min(loads))
        shares[lightest].append(members)
        loads[lightest] += cost_tokens(batch, members)
    result = [_fill(batch, share, budget_tokens) for share in shares]
    longest = max(len(rank_passes) for rank_passes in result)
    return [rank_passes + [[]] * (longest - len(rank_passes)) for rank_passes in result]


def _fill(batch: Batch, bundles: Sequence[list[int]], budget_tokens: int) -> list[list[int]]:
    """Bundles, longest first, each into the first pass with room for it."""
    filled: list[list[int]] = []
    rooms: list[int] = []
    for members in bundles:
        cost = cost_tokens(batch, members)
        fitting = next((i for i, room in enumerate(rooms) if cost <= room), None)
        if fitting is None:
            filled.append([])
            rooms.append(budget_tokens)
            fitting = len(filled) - 1
        filled[fitting] += members
        rooms[fitting] -= cost
    return filled
