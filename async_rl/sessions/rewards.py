"""The rewards that an environment posts or returns."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from async_rl.core.frozen import frozen
from async_rl.sessions.errors import Refused


@frozen
class Reward:
    """The parts of a reward: of the sample, of the answers with these numbers, or of a role."""

    parts: Mapping[str, float]
    numbers: Sequence[int] = ()
    role: str | None = None

    @property
    def is_whole(self) -> bool:
        """Return whether it is of the sample."""
        return self.role is None and not self.numbers


class _Credit(msgspec.Struct, forbid_unknown_fields=True):
    """A reward of one answer or of one role. call: the id of the answer; choice: of several."""

    reward: Any
    call: str | None = None
    choice: int = 0
    role: str | None = None


def parts_of(value: Any) -> dict[str, float]:
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


def reward_of(value: Any, names: Mapping[str, Sequence[int]]) -> Reward:
    """Return a posted reward. names: the numbers of the answers by their ids. Raises Refused."""
    try:
        credit = msgspec.convert(value, _Credit)
    except msgspec.ValidationError:
        return Reward(parts=parts_of(value))
    parts = parts_of(credit.reward)
    if credit.call is None:
        return Reward(parts=parts, role=credit.role)
    numbers = names.get(credit.call, ())
    if not 0 <= credit.choice < len(numbers):
        raise Refused(
            f"choice {credit.choice} of {credit.call!r} is not an answer of this session; send the"
            " id of an answer as `call`",
            status=404,
        )
    return Reward(parts=parts, numbers=[numbers[credit.choice]])
