"""The rewards that an environment posts or returns."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from async_rl.sessions.errors import Refused


def reward_of(value: Any) -> dict[str, float]:
    """Return the parts of a reward: a finite number, or a dict of them. Raises Refused."""
    parts = value if isinstance(value, dict) else {"reward": value}
    try:
        parts = msgspec.convert(parts, dict[str, float | bool])
    except msgspec.ValidationError:
        parts = {}
    if not parts or not all(map(math.isfinite, parts.values())):
        raise Refused(
            f"the reward {value} is neither a finite number nor a dict of finite numbers; give one,"
            " or nothing if the verifiers score the last answer"
        )
    return parts
