"""Statements about seeds: the responses of samples and generators are independent draws.

Two independent samples of one prompt are equal with the probability that the policy has for the
response, which its log-probs say. So the expected number of equal pairs is known for each prompt,
without a model: a shared seed makes many more, also where responses are short or certain.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from async_rl.buffer.store.connection import Connection
from async_rl.buffer.store.trajectories import rollouts
from async_rl.config.run import RunConfig
from async_rl.core.types import Group, Trajectory
from async_rl.runs.certificate.statements import Statement, statement
from async_rl.runs.certificate.two_samples import LIMIT, excess_p_value

_MOST_GROUPS = 2_000  # stored trajectories of a long run may be hundreds of gigabytes
_LEAST_FACTOR = 2.0
"""Equal pairs, as a multiple of the expected ones, that break the promise."""
Pairs = Iterable[tuple[Trajectory, Trajectory]]


def seeds(config: RunConfig, store: Connection) -> Iterator[Statement]:
    """Yield the statements about seeds."""
    groups = [each.group for each in rollouts(store, step=None, most=_MOST_GROUPS)]
    by_prompt: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_prompt[group.prompt_id].append(group)
    unknown = []
    if config.generation.num_drawn > config.generation.group_size:
        unknown = ["generation.generation_size keeps the best samples, which are not independent"]
    stored = f"in the newest {len(groups)} stored groups (recording={config.recording})"
    yield _independent(
        "the samples of a group are independent",
        [(group.generator, itertools.combinations(group.trajectories, 2)) for group in groups],
        unknown,
        stored,
    )
    yield _independent(
        "groups of one prompt are independent, also of different generators",
        [
            (
                " and ".join(sorted({one.generator, other.generator})),
                itertools.product(one.trajectories, other.trajectories),
            )
            for same in by_prompt.values()
            for one, other in itertools.pairwise(same)
        ],
        unknown,
        stored,
    )


def _independent(
    promise: str, sources: Sequence[tuple[str, Pairs]], unknown: Sequence[str], stored: str
) -> Statement:
    """sources: the generators of pairs of samples, and the pairs."""
    excesses: list[float] = []
    shared: Counter[str] = Counter()
    equal = 0
    for generators, pairs in sources:
        observed = 0
        expected = 0.0
        for pair in pairs:
            one, other = (sample.token_ids for sample in pair)
            observed += np.array_equal(one, other)
            # Under one policy the mean over its samples of the probability of a sample is the
            # probability that two are equal; under two policies this is an upper bound.
            expected += sum(float(np.exp(s.behavior_logprobs.sum())) for s in pair) / 2
        equal += observed
        excesses.append(observed - expected)
        if observed > _LEAST_FACTOR * expected:
            shared[generators] += 1
    chance = equal - sum(excesses)
    p = excess_p_value(excesses)
    numbers = (
        f"{equal} pairs of samples are equal {stored}; {chance:.2f} are expected by chance;"
        f" p = {p:.2g} (limit {LIMIT:.2g})"
    )
    broken = []
    if p < LIMIT and equal > _LEAST_FACTOR * chance:
        names = ", ".join(f"{name} ({number} times)" for name, number in shared.most_common())
        broken = [f"a seed is shared: {numbers}; by {names}"]
    if not sources:
        unknown = ["no two responses to one prompt are stored"]
    evidence = [numbers] if sources and not broken else ()
    return statement("seeds", promise, broken=broken, unknown=unknown, evidence=evidence)
