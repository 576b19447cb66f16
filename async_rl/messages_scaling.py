"""What is said when generators and verifiers come and go while the run is live.

Part of the protocol of `messages.py`, with the same invariants.
"""

from __future__ import annotations

from typing import ClassVar

from async_rl.messages import Message, Ok
from async_rl.types import PoolCount


class Pools(Message):
    """The pools as they are now."""

    pools: list[PoolCount]


class Scale(Message):
    """people -> supervisor: so many processes of these pools from now on; pools that are not named stay as they are.

    is_forced: even if memory does not seem to suffice.
    """

    Reply: ClassVar[type] = Pools
    wanted: dict[str, int]
    is_forced: bool


class Drain(Message):
    """supervisor -> generator: take no more work, finish what you have, end."""

    Reply: ClassVar[type] = Ok
