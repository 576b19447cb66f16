"""Divides the sequences of a batch among minibatches, ranks and forward passes."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from async_rl.batching.batch import Sizes

Bundle = list[int]
"""Sequences that stay together."""


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
