"""Statements about seeds: the responses of samples and generators are independent draws.

Two independent samples of one prompt are equal with the probability that the policy has for the
response, which its log-probs say. So the expected number of equal pairs is known for each prompt,
without a model: a shared seed makes many more, also where responses are short or certain.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from async_rl.buffer.store.connection import Connection
from async_rl.buffer.store.trajectories import stored_group
from async_rl.config.pools import seat
from async_rl.config.run import RunConfig
from async_rl.core.frozen import frozen
from async_rl.core.types import Group
from async_rl.runs.certificate.statements import Statement, statement
from async_rl.runs.certificate.two_samples import LIMIT, excess_p_value

_MOST_GROUPS = 2_000  # stored trajectories of a long run may be hundreds of gigabytes
_LEAST_FACTOR = 2.0
"""Equal pairs, as a multiple of the expected ones, that break the promise."""
_STORED = (
    "SELECT group_id FROM blobs JOIN groups USING (group_id) WHERE purpose='train' ORDER BY"
    " group_id DESC LIMIT ?"
)
_GENERATORS = "SELECT DISTINCT generator FROM transitions WHERE generator != '' ORDER BY 1"


@frozen
class _Sample:
    """A response: its tokens, and its probability under the policy that wrote it."""

    tokens: bytes
    probability: float


def seeds(config: RunConfig, store: Connection) -> Iterator[Statement]:
    """Yield the statements about seeds."""
    names = [name for (name,) in store.execute(_GENERATORS)]
    by_seed: dict[int, list[str]] = {}
    for name in names:
        if name.startswith("generator-"):
            by_seed.setdefault(config.seed + seat(config, name), []).append(name)
    yield statement(
        "seeds",
        "each generator has its own seed",
        broken=[f"seed {seed}: {', '.join(n)}" for seed, n in by_seed.items() if len(n) > 1],
        unknown=[] if by_seed else ["no generator is on record"],
        evidence=[
            f"by the configuration: {', '.join(f'{n[0]} {seed}' for seed, n in by_seed.items())};"
            " the next two statements check the responses"
        ],
    )
    ids = [row[0] for row in store.execute(_STORED, (_MOST_GROUPS,))]
    groups = [group for each in ids if (group := stored_group(store, each)) is not None]
    within = [_excess(itertools.combinations(_samples(group), 2)) for group in groups]
    by_prompt: dict[str, list[Group]] = {}
    for group in groups:
        by_prompt.setdefault(group.prompt_id, []).append(group)
    across = []
    pairs: Counter[str] = Counter()
    for same in by_prompt.values():
        for one, other in itertools.combinations(same, 2):
            excess = _excess(itertools.product(_samples(one), _samples(other)))
            across.append(excess)
            if excess[0] > _LEAST_FACTOR * excess[1]:
                pairs[" and ".join(sorted({one.generator, other.generator}))] += 1
    selected = config.generation.num_drawn > config.generation.group_size
    unknown = (
        ["generation.generation_size keeps the best samples, which are not independent"]
        if selected
        else []
    )
    stored = f"of the newest {len(groups)} stored groups (recording={config.recording})"
    yield _independent(
        "the samples of a group are independent", within, unknown, f"pairs in a group, {stored}"
    )
    shared = ", ".join(f"{names} ({number} pairs)" for names, number in pairs.most_common(5))
    yield _independent(
        "groups of one prompt are independent, also of different generators",
        across,
        unknown,
        f"pairs of samples of two groups, {stored}",
        shared,
    )


def _independent(
    promise: str,
    excesses: Sequence[tuple[int, float]],
    unknown: Sequence[str],
    what: str,
    shared: str = "",
) -> Statement:
    equal = sum(observed for observed, _ in excesses)
    expected = sum(chance for _, chance in excesses)
    p = excess_p_value([observed - chance for observed, chance in excesses])
    numbers = f"{equal} equal {what}; {expected:.2f} are expected by chance; p = {p:.2g}"
    broken = []
    if p < LIMIT and equal > _LEAST_FACTOR * expected:
        broken = [
            f"{numbers} (limit {LIMIT:.2g}): a seed is shared{f' by {shared}' if shared else ''}"
        ]
    evidence = [] if broken else [numbers]
    if not excesses:
        unknown, evidence = ["no pair of responses to one prompt is stored"], []
    return statement("seeds", promise, broken=broken, unknown=unknown, evidence=evidence)


def _samples(group: Group) -> list[_Sample]:
    return [
        _Sample(
            tokens=sample.token_ids[sample.prompt_length :].tobytes(),
            # Tokens that the policy did not sample have a log-prob of 0.
            probability=float(np.exp(sample.behavior_logprobs[sample.prompt_length :].sum())),
        )
        for sample in group.trajectories
    ]


def _excess(pairs: Iterator[tuple[_Sample, _Sample]]) -> tuple[int, float]:
    """Return (number of equal pairs, expected number)."""
    observed = 0
    expected = 0.0
    for one, other in pairs:
        observed += one.tokens == other.tokens
        # Under one policy the mean over its samples of the probability of a sample is the
        # probability that two are equal; under two policies this is an upper bound.
        expected += (one.probability + other.probability) / 2
    return observed, expected
