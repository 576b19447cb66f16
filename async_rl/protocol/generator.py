"""Messages to a generator: load weights, score rows, release the device, drain."""

from __future__ import annotations

from typing import ClassVar

from async_rl.core.types import FloatArray, IntArray
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.weights import Manifest, Source


class LoadReport(Message):
    """The generator samples with `version` now. Seconds: whole load, and how long generation stood
    still.
    """

    version: int
    load_s: float
    pause_s: float


class LoadWeights(Message):
    """Load this version between two engine steps; requests in flight go on. url: the file to read
    instead of the shared block.

    turn: with placement=colocated, of the learner that gives the device back by this
    (weights/turns.py).
    """

    Reply: ClassVar[type] = LoadReport
    manifest: Manifest
    url: str = ""
    turn: int = 0


class Logprobs(Message):
    """float32 log-probs of each row's tokens 1.. (first token has none, 0), concatenated per row,
    with the version used.
    """

    version: int
    rows: list[FloatArray]


class Probe(Message):
    """Score these token rows with the weights held now (temperature 1)."""

    Reply: ClassVar[type] = Logprobs
    rows: list[IntArray]


class Rest(Message):
    """learner -> generator: let go of the device until weights come; answered once that is done.
    turn: as in weights/turns.py.
    """

    Reply: ClassVar[type] = Ok
    turn: int


class Drain(Message):
    """supervisor -> generator: take no more work, finish what you have, end."""

    Reply: ClassVar[type] = Ok


class ReceiveWeights(Message):
    """Receive this version from its source and load it, as LoadWeights does. The path in the
    manifest is of no use here.

    turn: as in LoadWeights.
    """

    Reply: ClassVar[type] = LoadReport
    manifest: Manifest
    source: Source
    turn: int = 0
