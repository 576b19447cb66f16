"""The terms of a row's reward with their weights, by the row's data_source.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from async_rl.config.plugins import short_name
from async_rl.config.rewards import RewardConfig

TESTS = "tests"
"""The row's tests or answer, judged by the verifier."""
READY = ("xml_format", "length", "reward_model", "remote")
"""Names of the functions that the project provides."""


class Term(NamedTuple):
    """One part of a reward: a function, or TESTS."""

    function: str
    weight: float


def terms_of(reward: RewardConfig, data_source: str) -> tuple[Term, ...]:
    """Return the terms whose weighted sum is the reward of a row of this source."""
    if (own := _by_source(reward).get(data_source)) is not None:
        return (Term(own, 1.0),)
    if reward.fns:
        return tuple(
            Term(function, weight)
            for function, weight in zip(reward.fns, reward.weights, strict=True)
        )
    return (Term(reward.fn or TESTS, 1.0),)


def _by_source(reward: RewardConfig) -> dict[str, str]:
    return dict(line.partition("=")[::2] for line in reward.by_source)


def functions_of(reward: RewardConfig) -> tuple[str, ...]:
    """Return every function that some row may need, once each, without TESTS."""
    named = [*_by_source(reward).values(), *reward.fns, *([reward.fn] if reward.fn else [])]
    return tuple(dict.fromkeys(name for name in named if name != TESTS))


def needs_tests(reward: RewardConfig, data_source: str) -> bool:
    """Return whether a row of this source must have tests or an answer."""
    return any(
        name == TESTS or (name == "remote" and reward.remote.form == "verifier")
        for name, _ in terms_of(reward, data_source)
    )


def setting_of(reward: RewardConfig, function: str) -> str:
    """Return the setting that names the function, for messages."""
    if function == reward.fn:
        return "reward.fn"
    if function in reward.fns:
        return "reward.fns"
    return "reward.by_source"


def same_names(functions: Iterable[str]) -> list[str]:
    """Return the short names that several functions share; metrics could not distinguish them."""
    names = [short_name(function) for function in functions]
    return sorted({name for name in names if names.count(name) > 1})
