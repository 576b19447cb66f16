"""The terms of a row's reward with their weights, by the row's data_source.

Pure.
"""

from __future__ import annotations

from typing import NamedTuple

from async_rl.config.rewards import RemoteTerm, RewardConfig, RewardTerm

TESTS = "tests"
"""The row's tests or answer, judged by the verifier."""


class Part(NamedTuple):
    """One part of a reward: the name of a term that calls a function, or TESTS."""

    function: str
    weight: float


def terms_of(reward: RewardConfig, data_source: str) -> tuple[Part, ...]:
    """Return the parts whose weighted sum is the reward of a row of this source."""
    own = _chosen(reward, data_source)
    if not own:
        return (Part(TESTS, 1.0),)
    return tuple(
        Part(TESTS if term.kind == TESTS else name, term.weight) for name, term in own.items()
    )


def _chosen(reward: RewardConfig, data_source: str) -> dict[str, RewardTerm]:
    own = {name: term for name, term in reward.terms.items() if data_source in term.sources}
    # Terms for a source replace the general terms: a row of mathematics has no tests to run.
    return own or {name: term for name, term in reward.terms.items() if not term.sources}


def functions_of(reward: RewardConfig) -> tuple[str, ...]:
    """Return the name of every term that calls a function."""
    return tuple(name for name, term in reward.terms.items() if term.kind != TESTS)


def needs_tests(reward: RewardConfig, data_source: str) -> bool:
    """Return whether a row of this source must have tests or an answer."""
    terms = _chosen(reward, data_source).values()
    return not terms or any(
        term.kind == TESTS or (isinstance(term, RemoteTerm) and term.form == "verifier")
        for term in terms
    )
