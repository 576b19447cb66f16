"""Statements about what was left out (is what was trained like what was generated), and about seeds
(are the responses of samples and generators independent draws).

A group is left out when it is complete (too old, untrainable), and an attempt when it fails before.
Of a complete group the ledger has lengths and rewards, of a failed attempt only its seconds, which
are a lower bound: a test for longer attempts is then one-sided. The limit of the tests is fixed
beforehand. Attempts that end with their generator are not tested, because its end is no choice
among groups; no_signal is a choice of the configuration, and only counted.

Two independent samples of one prompt are equal with the probability that the policy has for the
response, which its log-probs say. So the expected number of equal pairs is known for each prompt,
without a model: a shared seed makes many more, also where responses are short or certain.
Pure: the permutations have a fixed seed, so a certificate that is made again says the same.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from async_rl.buffer.store.connection import Connection
from async_rl.buffer.store.trajectories import rollouts
from async_rl.config.run import RunConfig
from async_rl.core.types import DoubleArray, DropReason, Group, Trajectory
from async_rl.runs.certificate.statements import Statement, statement

_NUMBERS = {
    "response length, tokens": "response_length_mean",
    "reward": "reward_mean",
    "generation time, s": "generation_s",
    "age, versions": "max(train_version - oldest_version, 0)",
}
# Only complete groups have these numbers.
_VALUES = (
    "SELECT state, {} AS value FROM groups WHERE purpose='train' AND state IN ('trained',"
    f" 'dropped') AND reason != '{DropReason.NO_SIGNAL}' AND value IS NOT NULL"
)
# How each hand-out ended, and after how many seconds.
_ATTEMPTS = (
    "SELECT why, next_s - at_s FROM (SELECT t.state AS state, at_s, lead(at_s) OVER each AS next_s,"
    " lead(t.reason) OVER each AS why FROM transitions t JOIN groups USING (group_id) WHERE"
    " purpose='train' WINDOW each AS (PARTITION BY group_id ORDER BY transition_id)) WHERE"
    " state='generating' AND next_s IS NOT NULL"
)
_NO_CHOICE = (DropReason.GENERATOR_LOST, DropReason.SCORING_OUTAGE, DropReason.NOT_TAKEN)
"""Reasons that say nothing about the group whose attempt ended."""
_LEAST_EFFECT = 0.01
"""Difference of the means, as a share, below which a difference is reported and breaks nothing."""


def selection(store: Connection) -> Iterator[Statement]:
    """Yield the statements about lengths, times, rewards and ages."""
    for name, column in _NUMBERS.items():
        sides: dict[str, list[float]] = {"trained": [], "dropped": []}
        for state, value in store.execute(_VALUES.format(column)):
            sides[state].append(value)
        kept, left = (np.array(values, np.float64) for values in sides.values())
        evidence = [f"trained: {_distribution(kept)}; left out: {_distribution(left)}"]
        yield _compared(f"trained groups are like generated ones: {name}", kept, left, evidence)
    yield _attempts(store)


def _compared(
    promise: str,
    kept: DoubleArray,
    left: DoubleArray,
    evidence: list[str],
    *,
    is_one_sided: bool = False,
) -> Statement:
    broken: list[str] = []
    if len(kept) and len(left):
        every = np.concatenate([kept, left])
        p = rank_test(left, kept, is_one_sided=is_one_sided)
        effect = (kept.mean() - every.mean()) / (abs(every.mean()) or 1.0)
        sentence = (
            f"without the {len(left)} that were left out the mean differs by {effect:+.1%} from"
            f" that of all; p = {p:.2g} (limit {LIMIT:.2g}{', one-sided' * is_one_sided})"
        )
        is_biased = p < LIMIT and abs(effect) >= _LEAST_EFFECT
        (broken if is_biased else evidence).append(sentence)
    return statement("selection", promise, broken=broken, evidence=evidence)


def _attempts(store: Connection) -> Statement:
    by_reason: dict[str, list[float]] = defaultdict(list)
    for reason, seconds in store.execute(_ATTEMPTS):
        by_reason[reason].append(seconds)
    evidence = [
        f"{f'failed ({reason})' if reason else 'complete'}, s: {_distribution(np.array(seconds))}"
        for reason, seconds in by_reason.items()
    ]
    failed = [s for why in by_reason if why and why not in _NO_CHOICE for s in by_reason[why]]
    return _compared(
        "attempts did not fail because they were long",
        np.array(by_reason[""]),
        np.array(failed),
        evidence,
        is_one_sided=True,
    )


def _distribution(values: DoubleArray) -> str:
    if not len(values):
        return "none"
    middle, high, most = np.quantile(values, (0.5, 0.9, 1.0))
    return (
        f"n {len(values)}, mean {values.mean():.4g}, median {middle:.4g}, 90 % {high:.4g}, most"
        f" {most:.4g}"
    )


LIMIT = 0.01 / 8
"""A smaller p value is a difference: with at most eight tests, a run without any bias is called
biased with a probability of 0.01 (Bonferroni).
"""
NUM_PERMUTATIONS = 9_999
_MOST = 2_000  # values of each side: their permutations take half a second of one core


def rank_test(chosen: DoubleArray, others: DoubleArray, *, is_one_sided: bool = False) -> float:
    """Return the p value of the hypothesis that `chosen` is a random subset of all values.

    chosen [n], others [m], float64. The statistic is the sum of the ranks of `chosen` (Wilcoxon),
    compared with random subsets of the same size; one-sided: larger values only. Of more than
    2,000 values a random subset is used.
    """
    rng = np.random.default_rng(0)
    first, second = (rng.permutation(values)[:_MOST] for values in (chosen, others))
    every = np.concatenate([first, second])
    # Equal values share their mean rank.
    _, index, counts = np.unique(every, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum() - (counts - 1) / 2)[index] - (len(every) + 1) / 2
    sums = np.array(
        [rng.permutation(ranks)[: len(first)].sum() for _ in range(NUM_PERMUTATIONS)]
        + [ranks[: len(first)].sum()]
    )
    if not is_one_sided:
        sums = np.abs(sums)
    # The sums of equal ranks differ in the last digits.
    return float((sums >= sums[-1] - 1e-6).mean())


def excess_p_value(excesses: Sequence[float]) -> float:
    """Return the p value of independent excesses having a mean of 0 rather than above it.

    The sum is divided by the root of the sum of squares, so no variance has to be known, and a few
    large excesses among many small ones count little (a self-normalized sum).
    """
    norm = math.sqrt(sum(value**2 for value in excesses))
    if norm:
        return 0.5 * math.erfc(sum(excesses) / norm / math.sqrt(2))
    return 1.0


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
