"""Decide who may use a shared device (placement=colocated): the state machine behind every switch.

Pure: no clock, no socket. `training/device.py` is the learner's side, `rollouts/turns.py` the
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

from collections.abc import Collection

from async_rl.core.errors import WeightsError
from async_rl.weights.membership import Life


class Handovers:
    """The handovers of one life of the learner.

    number: of the newest handover. A later life must start above all numbers of an earlier one.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._ordered: set[Life] = set()
        self._asleep: set[Life] = set()

    def ask(self) -> None:
        """Start a handover. No confirmation of an earlier one counts from now on."""
        self.number += 1
        self._ordered = set()
        self._asleep = set()

    def to_order(self, present: Collection[Life]) -> set[Life]:
        """Return the generators to order to sleep, each once per handover. present: those that
        serve; a generator that joins during the handover is ordered too.
        """
        new = set(present) - self._ordered
        self._ordered |= new
        return new

    def sleeps(self, life: Life) -> None:
        """Record the confirmation of a generator; ignored if it had no order in this handover."""
        if life in self._ordered:
            self._asleep.add(life)

    def is_clear(self, present: Collection[Life]) -> bool:
        """Return whether no generator may use the device, so that the learner may take it.

        present: the generators that serve; a process that exited uses no device.
        """
        return self._asleep.issuperset(present)


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
