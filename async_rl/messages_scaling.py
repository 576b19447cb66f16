"""What is said when the number of processes changes while the run is live.

Part of the protocol of `messages.py`, with the same invariants.
"""

from __future__ import annotations

from typing import ClassVar

from async_rl.messages import Message, Ok


class ScaleRun(Message):
    """person -> supervisor: so many processes from now on, by pool; the others stay as they are."""

    Reply: ClassVar[type] = Ok
    counts: dict[str, int]


class LeaveWork(Message):
    """generator -> buffer: it takes no more tickets and goes on only with those it holds; what was handed to it besides goes out again."""

    Reply: ClassVar[type] = Ok
    generator: str
    incarnation: str
    held: list[int]
