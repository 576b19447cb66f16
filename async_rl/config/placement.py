"""The two ways in which generators and learner use devices, which `placement` names.

`RunConfig.devices` is one of the two objects. The product asks it what they can do, and never
which placement is set.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar


class OwnDevices:
    """Generators and learner compute at the same time, each on its own devices or its own part of
    one device.
    """

    # The learner and the engines leave the device to each other: engines sleep while the learner
    # steps, and start with the first push.
    are_handed_over: ClassVar = False

    def used_mb(self, loads_mb: Iterable[int]) -> int:
        """Return the memory of a device that its processes use at one time."""
        return sum(loads_mb)

    def resting_bytes(self, kept: float) -> float:
        """Return how much of the learner's tensors is in main memory while engines generate."""
        return 0.0


class TurnsOnDevices(OwnDevices):
    """Generators and learner use the same devices in turns."""

    are_handed_over: ClassVar = True

    def used_mb(self, loads_mb: Iterable[int]) -> int:
        """Return the memory of the largest process: two are never on the device together."""
        return max(loads_mb)

    def resting_bytes(self, kept: float) -> float:
        """Return all of it: models and moments leave the device with the learner."""
        return kept


PLACEMENTS = {"disaggregated": OwnDevices(), "colocated": TurnsOnDevices()}
