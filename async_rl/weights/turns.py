"""Whose turn a shared device is, with placement=colocated: the state machine behind every switch.
Pure: no clock, no socket.

A turn of the learner: it asks, every generator that serves comes to rest, it takes the device,
steps, publishes, gives the device back; generators are woken by the push of its weights, one by
one, and write until the next turn is asked for. Invariants
- The learner holds the device only while every generator that could use it has said, in this turn,
  that it rests.  A process that starts touches the device when a push wakes it, not before; so one
  that joins during a turn rests already.
- Turns are numbered, over all lives of the learner, in the order of time.  A generator obeys no
  order of an earlier turn than it has heard of, so what a dead learner said cannot wake anybody
  under its successor.
- Nothing here survives the learner: its next life asks first, whatever there was.
Driven by training/shared_device.py (learner) and rollouts/resting.py (generator); who loads what is
decided by weights/membership.py.
"""

from __future__ import annotations

import enum
from collections.abc import Collection

from async_rl.core.errors import WeightsError
from async_rl.weights.membership import Life


class Phase(enum.Enum):
    """Who may use the device: generators, nobody (those who do come to rest), the learner."""

    GENERATING = enum.auto()
    SWITCHING = enum.auto()
    LEARNING = enum.auto()


class Turns:
    """One life of the learner. number: of the newest turn; a later life must begin above all
    numbers of an earlier one.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.phase = Phase.GENERATING
        self._present: set[Life] = set()
        self._told: set[Life] = set()
        self._rest: set[Life] = set()

    def ask(self) -> None:
        """The learner wants the device. Raises WeightsError if it asked before or has it."""
        self._require(Phase.GENERATING, "asked for")
        self.phase = Phase.SWITCHING
        self.number += 1
        self._told, self._rest = set(), set()

    def follow(self, present: Collection[Life]) -> None:
        """Which generators serve now; one that has gone uses nothing, for its process has ended."""
        self._present = set(present)

    def tell(self) -> set[Life]:
        """Generators to be told to rest, each once in a turn."""
        if self.phase is not Phase.SWITCHING:
            return set()
        new = self._present - self._told
        self._told |= new
        return new

    def rests(self, life: Life) -> None:
        """The generator has said that it rests, in answer to what it was told in this turn."""
        if life in self._told:
            self._rest.add(life)

    @property
    def is_clear(self) -> bool:
        """Whether nobody but the learner can use the device."""
        return self.phase is Phase.SWITCHING and self._present <= self._rest

    def take(self) -> None:
        """The device is the learner's. Raises WeightsError while a generator may use it."""
        self._require(Phase.SWITCHING, "taken")
        if not self.is_clear:
            raise WeightsError(
                f"the device cannot be taken while {sorted(self._present - self._rest)} may use it"
            )
        self.phase = Phase.LEARNING

    def give(self) -> None:
        """The device is the generators' again: pushes may wake them."""
        self._require(Phase.LEARNING, "given back")
        self.phase = Phase.GENERATING

    def _require(self, phase: Phase, what: str) -> None:
        if self.phase is not phase:
            raise WeightsError(f"the device cannot be {what} while it is {self.phase.name.lower()}")


class Orders:
    """What one generator has been told: later turns overrule earlier ones, never the other way
    round.
    """

    def __init__(self) -> None:
        self._newest = 0

    def accept(self, turn: int) -> None:
        """Raises WeightsError for an order of an earlier turn than one heard of: its learner is
        gone.
        """
        if turn < self._newest:
            raise WeightsError(
                f"an order of turn {turn} came after one of turn {self._newest}; it is of a learner"
                " that is gone"
            )
        self._newest = turn
