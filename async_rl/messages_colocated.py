"""What is said where learner and generators take turns on one device (placement=colocated).

Part of the protocol of `messages.py`, with the same invariants; the push that ends a rest is `LoadWeights` or `ReceiveWeights`.
"""

from __future__ import annotations

from typing import ClassVar

from async_rl.messages import Message, Ok


class Rest(Message):
    """learner -> generator: let go of the device until weights come; answered once that is done. turn: as in weights/turns.py."""

    Reply: ClassVar[type] = Ok
    turn: int
