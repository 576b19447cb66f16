"""Reward functions: how those that the configuration names are found, called and read.

A function takes one RewardSample, plain or async, and returns a number, or named parts: a dict of
numbers whose "score", or else sum, is its score.  Anything else, and nan or infinity, is a
RewardError. Used by reward_child.py, in the process that runs them.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

from async_rl.config.plugins import load_function
from async_rl.config.reward_terms import READY, setting_of
from async_rl.config.rewards import RewardConfig
from async_rl.core.errors import ConfigError, RewardError
from async_rl.rewards import formats
from async_rl.rewards.verifier.protocol import RewardSample

RewardFunction = Callable[[RewardSample], Any]
"""Gives what `read_score` takes, or an awaitable of it."""
SCORE = "score"


def find_function(name: str, reward: RewardConfig) -> RewardFunction:
    """The function, its model loaded if it has one. Raises ConfigError."""
    if name not in READY:
        return load_function(setting_of(reward, name), name, "sample")
    if name == "reward_model":
        from async_rl.rewards.models import RewardModel

        return RewardModel(reward.model)
    if name == "remote":
        from async_rl.rewards.remote import RemoteScorer

        return RemoteScorer(reward)
    return formats.xml_format if name == "xml_format" else formats.length


def check_functions(names: tuple[str, ...], reward: RewardConfig) -> list[str]:
    """What is wrong with the names, one line each; imports the modules, loads no model."""
    found = []
    for name in names:
        try:
            if name not in READY:
                load_function(setting_of(reward, name), name, "sample")
        except ConfigError as error:
            found.append(str(error))
    return found


def read_score(name: str, returned: Any) -> dict[str, float]:
    """The parts, "score" among them. Raises RewardError."""
    if isinstance(returned, Awaitable):
        raise RewardError(f"{name} returned something to await; define it with async def")
    parts = returned if isinstance(returned, dict) else {SCORE: returned}
    for part, value in parts.items():
        if not isinstance(part, str) or isinstance(value, str | bytes) or not _is_number(value):
            raise RewardError(
                f"{name} returned {returned!r:.200}; return a finite number, or a dict of names and"
                " finite numbers"
            )
    numbers = {part: float(value) for part, value in parts.items()}
    if not numbers:
        raise RewardError(f"{name} returned an empty dict; return at least one part")
    return {SCORE: sum(numbers.values()), **numbers}


def _is_number(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False
