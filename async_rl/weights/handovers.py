"""Decide who may use a shared device (placement=colocated): the state machine behind every switch.

Pure: no clock, no socket. `training/device.py` is the learner's side, `rollouts/sleeping.py` the
generator's; `weights/membership.py` decides who loads what.

One handover: the learner requests the device, every generator that serves goes to sleep, the
learner takes the device, makes its steps, publishes, and returns the device. The push of the new
weights then wakes the generators one by one, and they generate until the next handover.

Invariants
- The learner uses the device only after every generator that could use it has confirmed, in this
  handover, that it sleeps. A process that starts touches the device when a push wakes it, not
  before, so a generator that joins during a handover sleeps already.
- Handovers are numbered in the order of time, across all lives of the learner. A generator refuses
  an order with a smaller number than the largest it has seen, so an order of a dead learner cannot
  wake a generator under the next one.
- No state survives the learner: its next life starts with a handover.
"""

from __future__ import annotations

import enum
from collections.abc import Collection

from async_rl.core.errors import WeightsError
from async_rl.weights.membership import Life


class Phase(enum.Enum):
    """The user of the device: the generators, none while they go to sleep, or the learner."""

    GENERATING = enum.auto()
    SWITCHING = enum.auto()
    LEARNING = enum.auto()


class Handovers:
    """The handovers of one life of the learner.

    number: of the newest handover. A later life must start above all numbers of an earlier one.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.phase = Phase.GENERATING
        self._present: set[Life] = set()
        self._ordered: set[Life] = set()
        self._asleep: set[Life] = set()

    def ask(self) -> None:
        """Start a handover. Raises WeightsError during another, or while the learner has the
        device.
        """
        self._require(Phase.GENERATING, "asked for")
        self.phase = Phase.SWITCHING
        self.number += 1
        self._ordered = set()
        self._asleep = set()

    def follow(self, present: Collection[Life]) -> None:
        """Take over the list of generators that serve; a process that exited uses no device."""
        self._present = set(present)

    def to_order(self) -> set[Life]:
        """Return the generators to order to sleep, each once per handover."""
        if self.phase is not Phase.SWITCHING:
            return set()
        # A generator that joins during the handover is ordered too.
        new = self._present - self._ordered
        self._ordered |= new
        return new

    def sleeps(self, life: Life) -> None:
        """Record the confirmation of a generator; ignored if it had no order in this handover."""
        if life in self._ordered:
            self._asleep.add(life)

    @property
    def is_clear(self) -> bool:
        """No generator can use the device."""
        # A generator that has left is not present: a process that exited uses no device.
        return self.phase is Phase.SWITCHING and self._present <= self._asleep

    def take(self) -> None:
        """Assign the device to the learner. Raises WeightsError while a generator may use it."""
        self._require(Phase.SWITCHING, "taken")
        if not self.is_clear:
            awake = sorted(self._present - self._asleep)
            raise WeightsError(f"the learner cannot take the device while {awake} may use it")
        self.phase = Phase.LEARNING

    def give_back(self) -> None:
        """Return the device to the generators: pushes may wake them."""
        self._require(Phase.LEARNING, "given back")
        self.phase = Phase.GENERATING

    def _require(self, phase: Phase, action: str) -> None:
        if self.phase is not phase:
            raise WeightsError(
                f"the device cannot be {action} while it is {self.phase.name.lower()}"
            )


class Orders:
    """The newest handover that one generator knows; older orders are refused."""

    def __init__(self) -> None:
        self._newest = 0

    def accept(self, handover: int) -> None:
        """Raise WeightsError for an order of an earlier handover: its learner has exited."""
        # Equal is allowed: a push may be repeated within one handover.
        if handover < self._newest:
            raise WeightsError(
                f"an order of handover {handover} came after one of handover {self._newest}; it is"
                " from a learner that has exited"
            )
        self._newest = handover
