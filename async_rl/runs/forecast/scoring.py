"""The scoring of samples: the number of places, and the seconds of each sample.

A sample that waits for a place is recorded as one that is scored for longer. The waits follow from
the order of arrival and the number of places in the settings.
"""

import heapq
import itertools
import math
from collections.abc import Sequence

import numpy as np

from async_rl.buffer.store.trajectories import GroupTimes
from async_rl.config.run import RunConfig
from async_rl.core.types import DoubleArray
from async_rl.rewards.verifier.protocol import SLOW_S

PLACE_SETTINGS = ("verifiers.cells", "reward.concurrency")
"""The settings that limit the samples scored at the same time in a verifier: of the cells, or of
functions.
"""
_QUICK = 0.1  # quantile of seconds: of samples that hardly wait


class Places:
    """The places of the scorer: each scores one sample, and samples are taken in order of arrival.

    number: of places; 0: unlimited.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.waited_s = 0.0
        self.num_scored = 0
        self._free_from_s = [-math.inf] * max(number, 1)

    def begin_s(self, written_s: float) -> float:
        """Return when a place is free for a sample that arrives now."""
        return max(written_s, self._free_from_s[0])

    def end_s(self, written_s: float, seconds: float) -> float:
        """Score a sample that arrives now; return when it is scored."""
        begin_s = self.begin_s(written_s)
        self.waited_s += begin_s - written_s
        self.num_scored += 1
        if self.number:
            heapq.heapreplace(self._free_from_s, begin_s + seconds)
        return begin_s + seconds


def setting_of(config: RunConfig) -> tuple[str, int]:
    """Return the setting that limits the samples scored at the same time in a verifier, and its
    value.
    """
    if config.reward.functions:
        return "reward.concurrency", config.reward.concurrency
    return "verifiers.cells", config.verifiers.cells


def read_scoring(
    groups: Sequence[GroupTimes], config: RunConfig
) -> tuple[list[tuple[float, ...]], int]:
    """Return for each group the seconds of each sample's scoring without waiting, and the places
    for each unit of the setting.
    """
    moments = [
        (group.handed_out_s + sample[2], group.handed_out_s + sample[3])
        for group in groups
        for sample in group.samples.tolist()
    ]
    written, scored = np.array(moments).T
    path, value = setting_of(config)
    # A slow program leaves its cell to the next and moves to a spare one.
    is_slow = np.quantile(scored - written, _QUICK) > SLOW_S
    per_unit = 1 + bool(is_slow and path == "verifiers.cells")
    number = value * per_unit * config.verifiers.count
    own = iter(alone_s(written, scored, number).tolist())
    return [tuple(itertools.islice(own, len(group.samples))) for group in groups], per_unit


def alone_s(written_s: DoubleArray, scored_s: DoubleArray, number: int) -> DoubleArray:
    """Return the seconds of each sample from the moment when it had a place. number: of places;
    0 is no limit.
    """
    places = Places(number)
    seconds = scored_s - written_s
    # In the order of arrival, as the scorer takes samples.
    for index in np.lexsort((scored_s, written_s)):
        own_s = max(scored_s[index] - places.begin_s(written_s[index]), 0.0)
        places.end_s(written_s[index], own_s)
        seconds[index] = own_s
    return seconds
