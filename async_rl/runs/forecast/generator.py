"""A generator in virtual time."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from async_rl.buffer.groups import OpenGroup
from async_rl.runs.forecast.recorded import Work

Marks = list[tuple[float, float]]
"""The end of each sample of a group as a share of the group's units, and the seconds of its
scoring. The sample that finishes first is the last entry.
"""


@dataclass(slots=True, kw_only=True)
class Flight:
    """A group that a generator writes. ends: (progress of the generator, seconds of scoring) at the
    end of each sample, the next end last. scored_s: time when its finished samples are scored.
    """

    group: OpenGroup
    work: Work
    num_samples: int
    ends: list[tuple[float, float]]
    scored_s: float = 0.0

    def __lt__(self, other: Flight) -> bool:
        # Equal ends are taken in the order of groups, so that a forecast repeats.
        mine = self.ends[-1][0], self.group.group_id
        return mine < (other.ends[-1][0], other.group.group_id)


class Generator:
    """One generator: its groups share its speed, and their samples end one by one.

    plans: number of plans of its next end; only the newest plan is valid.
    slowdown: of a step by each further sample in flight, relative to a step with one sample.
    """

    def __init__(self, index: int, slowdown: float) -> None:
        self.index = index
        self.name = f"generator-{index}"
        self.version = 0
        self.plans = 0
        self.idle_s = 0.0
        self._slowdown = slowdown
        self._flights: list[Flight] = []
        self._samples_in_flight = 0.0
        self._progress = 0.0  # units that each group in flight advanced since the start
        self._advanced_to_s = 0.0

    @property
    def num_samples(self) -> int:
        """Samples of the groups that are being written; those that wait for scores take no room."""
        return sum(flight.num_samples for flight in self._flights)

    @property
    def _unit_s(self) -> float:
        # The time of one token: a step of the engine writes one token of each sample in flight.
        return 1 + self._slowdown * max(self._samples_in_flight - 1, 0.0)

    @property
    def next_end_s(self) -> float | None:
        """Seconds until the first sample finishes, if no group is added."""
        if not self._flights:
            return None
        return max(self._flights[0].ends[-1][0] - self._progress, 0.0) * self._unit_s

    def start(
        self,
        now_s: float,
        group: OpenGroup,
        work: Work,
        *,
        marks: Marks,
        num_samples: int,
        speed: float,
    ) -> None:
        """Start to write a group."""
        self.advance(now_s)
        ends = [(self._progress + work.units / speed * share, score_s) for share, score_s in marks]
        # The mean load of the group stands for its samples, which finish one by one.
        self._samples_in_flight += work.load
        heapq.heappush(
            self._flights, Flight(group=group, work=work, num_samples=num_samples, ends=ends)
        )

    def advance(self, now_s: float) -> None:
        """Let all groups in flight progress until this time."""
        elapsed_s = now_s - self._advanced_to_s
        if self._flights:
            self._progress += elapsed_s / self._unit_s
        else:
            self.idle_s += elapsed_s
        self._advanced_to_s = now_s

    def end_sample(self) -> tuple[Flight, float]:
        """Finish the next sample; return its group, which is complete without more ends, and the
        seconds of the sample's scoring.
        """
        flight = self._flights[0]
        _, score_s = flight.ends.pop()
        if flight.ends:
            heapq.heapreplace(self._flights, flight)
        else:
            heapq.heappop(self._flights)
            self._samples_in_flight -= flight.work.load
        return flight, score_s
