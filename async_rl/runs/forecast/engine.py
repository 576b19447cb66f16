"""A generator in virtual time: its groups share its speed, and their samples end one by one."""

from __future__ import annotations

import heapq

from async_rl.buffer.groups import OpenGroup
from async_rl.runs.forecast.recorded import Work

Marks = list[tuple[float, float]]
"""The ends of a group's samples as shares of its units, the first one last, and the seconds of the
scoring of each.
"""


class Engine:
    """One generator."""

    def __init__(self, index: int, beside: float) -> None:
        self.index, self.name = index, f"generator-{index}"
        self.version = 0
        self.events = 0
        self.idle_s = 0.0
        self._beside = beside
        self._progress = 0.0
        self._load = 0.0
        self._updated_s = 0.0
        self._running: list[tuple[float, int, OpenGroup, Work, Marks]] = []

    def start(self, now_s: float, group: OpenGroup, work: Work, marks: Marks, speed: float) -> None:
        """Begin to write a group."""
        self.advance(now_s)
        ends = [(self._progress + work.units / speed * share, own_s) for share, own_s in marks]
        self._load += work.load
        heapq.heappush(self._running, (ends[-1][0], group.group_id, group, work, ends))

    def advance(self, now_s: float) -> None:
        """Move all groups on to this time."""
        elapsed_s = now_s - self._updated_s
        if self._running:
            self._progress += elapsed_s / self._unit_s
        else:
            self.idle_s += elapsed_s
        self._updated_s = now_s

    @property
    def _unit_s(self) -> float:
        return 1 + self._beside * max(self._load - 1, 0.0)

    @property
    def num_groups(self) -> int:
        """Groups that are being written; those that wait for scores take no room."""
        return len(self._running)

    @property
    def next_s(self) -> float | None:
        """Seconds until the first sample ends, if no group is added."""
        if not self._running:
            return None
        return max(self._running[0][0] - self._progress, 0.0) * self._unit_s

    def next_sample(self) -> tuple[OpenGroup, Work, float, bool]:
        """Take the sample that ends now: return its group, the seconds of its scoring, and whether
        it is the last one of the group.
        """
        _, group_id, group, work, ends = self._running[0]
        _, seconds = ends.pop()
        if ends:
            heapq.heapreplace(self._running, (ends[-1][0], group_id, group, work, ends))
        else:
            heapq.heappop(self._running)
            self._load -= work.load
        return group, work, seconds, not ends
