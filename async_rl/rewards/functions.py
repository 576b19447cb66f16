"""Reward functions of the configuration: how they are found and how their results are read.

A function takes one RewardSample, plain or async. It returns a number, or named parts: a dict of
numbers whose "score", or else sum, is its score. Any other value, and nan or infinity, is a
RewardError.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

from async_rl.config.plugins import REWARD, load_function
from async_rl.config.rewards import PluginTerm, RemoteTerm, RewardConfig, RewardModelTerm
from async_rl.core.errors import ConfigError, RewardError
from async_rl.rewards import formats
from async_rl.rewards.verifier.protocol import RewardSample

RewardFunction = Callable[[RewardSample], Any]
"""Returns an argument of `read_score`, or an awaitable of it."""
SCORE = "score"


def find_function(name: str, reward: RewardConfig, *, limit_s: float) -> RewardFunction:
    """The function; loads its model if it has one. Raises ConfigError.

    limit_s: the longest call, for a function that retries within it.
    """
    match reward.terms[name]:
        case RewardModelTerm() as term:
            from async_rl.rewards.models import RewardModel

            return RewardModel(term, f"reward.terms.{name}")
        case RemoteTerm() as term:
            from async_rl.rewards.remote import RemoteScorer

            return RemoteScorer(term, extraction=reward.extraction, limit_s=limit_s)
        case PluginTerm(fn=function):
            return load_function(f"reward.terms.{name}.fn", function, REWARD)
        case term:
            return {"xml_format": formats.xml_format, "length": formats.length}[term.kind]


def check_functions(reward: RewardConfig) -> list[str]:
    """One line per function that cannot be loaded; imports the modules but loads no model."""
    problems = []
    for name, term in reward.terms.items():
        try:
            if isinstance(term, PluginTerm):
                load_function(f"reward.terms.{name}.fn", term.fn, REWARD)
        except ConfigError as error:
            problems.append(str(error))
    return problems


def read_score(name: str, returned: Any) -> dict[str, float]:
    """The parts of a score, "score" among them. Raises RewardError."""
    if isinstance(returned, Awaitable):
        raise RewardError(f"{name} returned an awaitable; define it with async def")
    parts = returned if isinstance(returned, dict) else {SCORE: returned}
    numbers = {}
    for part, value in parts.items():
        if not isinstance(part, str) or not _is_number(value):
            raise RewardError(
                f"{name} returned {returned!r:.200}; return a finite number, or a dict of names and"
                " finite numbers"
            )
        numbers[part] = float(value)
    if not numbers:
        raise RewardError(f"{name} returned an empty dict; return at least one part")
    return {SCORE: sum(numbers.values()), **numbers}


def _is_number(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False
