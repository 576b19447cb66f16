"""When a group may start so that it is complete just as the learner needs it.

A group that is complete earlier waits for the learner and is trained on older data than necessary.
The lead of a batch is measured: the time from its first ticket to its last group, and how much
earlier the learner needed it than a usual step takes. The lead in force is the shortest one with
which the recent batches would have cost the learner at most `_MOST_WAITS` of its time. Where
generators are the slower side it is longer than a step, and nothing is held back. Generators serve
evaluations first, so the batches of the two steps after an evaluated version have their own leads.
Pure: times are monotonic seconds of the caller.
"""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Sequence

from async_rl.buffer.groups import StoredGroup
from async_rl.config.run import RunConfig

_WINDOW = 32
"""Batches. A stall of the machine makes groups start early for this number of steps."""
_LEAST = 4
"""Batches before a group is held back: the first ones wait for compilers and caches."""
_MOST_WAITS = 0.005
_NUM_AFTER = 2
"""Batches after an evaluated version that its evaluation delays: it is hardly ever longer."""


class Pace:
    """The times of recent batches and steps.

    opens_s: when a group may start, by the steps between its own and the step in training; never
    decreasing. math.inf: not before the learner commits or takes a batch.
    """

    def __init__(self, config: RunConfig) -> None:
        # Steps that the bound of the age allows ahead, and the present one.
        self.opens_s = [-math.inf] * (config.buffer.max_staleness_versions + 1)
        # An exact age is the bound itself. On a shared device no generator works during a step.
        self._is_on = config.buffer.age_rule != "exact" and not config.takes_turns
        self._evaluate_every = config.evaluation.every_steps
        # Of the step in training; None while the learner has no batch, since `_free_s`.
        self._began_s: float | None = None
        self._free_s = math.inf
        self._new: list[tuple[int, float, float]] = []
        self._steps_s: deque[float] = deque(maxlen=_WINDOW)
        self._leads_s = [deque[float](maxlen=_WINDOW) for _ in range(_NUM_AFTER + 1)]

    def lease(self, train_version: int, batch: Sequence[StoredGroup], now_s: float) -> None:
        """The learner gets this batch, and trains it after those that it has."""
        is_late = self._began_s is None
        if is_late:
            self._began_s = now_s
            self._plan(train_version)
        # A restarted buffer does not know the times of the groups in its store.
        timed = [group for group in batch if group.ready_s]
        if timed:
            made_s = max(g.ready_s for g in timed) - min(g.issued_s for g in timed)
            late_s = now_s - self._free_s if is_late else 0.0
            # A batch that took longer than its lead is late by that much; the rest is a late start,
            # for example because of an evaluation.
            late_s -= max(made_s - self._lead_s(train_version), 0.0)
            self._new.append((train_version, made_s, late_s))

    def commit(self, version: int, now_s: float, *, has_next: bool) -> None:
        """The learner made this version. has_next: it has the next batch already."""
        if self._began_s is not None:
            self._steps_s.append(now_s - self._began_s)
            for train_version, made_s, late_s in self._new:
                earlier_s = max(late_s, self._step_s - self._steps_s[-1], 0.0)
                self._leads_s[self._phase(train_version)].append(made_s + earlier_s)
            self._new.clear()
        self._began_s = now_s if has_next else None
        self._free_s = now_s
        self._plan(version)

    def stop(self) -> None:
        """The learner has no batch: it starts again, or dropped one."""
        self._began_s = None
        self._free_s = math.inf
        self._new.clear()

    @property
    def _step_s(self) -> float:
        return statistics.median(self._steps_s)

    def _phase(self, train_version: int) -> int:
        every = self._evaluate_every
        if every:
            return min((train_version - 1) % every, _NUM_AFTER)
        return _NUM_AFTER

    def _lead_s(self, train_version: int) -> float:
        leads_s = sorted(self._leads_s[self._phase(train_version)], reverse=True)
        if len(leads_s) < _LEAST:
            return math.inf
        may_wait_s = _MOST_WAITS * len(leads_s) * self._step_s
        sums_s = itertools.accumulate(leads_s)
        # With a lead L, the n batches with a longer one would have cost their sum - n x L.
        return min(
            lead_s
            for n, (sum_s, lead_s) in enumerate(zip(sums_s, leads_s, strict=True), start=1)
            if sum_s - n * lead_s <= may_wait_s
        )

    def _plan(self, version: int) -> None:
        """Set opens_s. version: of the step in training, or the next one."""
        if not self._is_on or not self._steps_s:
            return
        step_s = self._step_s
        opens_s = math.inf
        for ahead in range(len(self.opens_s) - 1, 0, -1):
            spare_s = ahead * step_s - self._lead_s(version + ahead)
            if spare_s <= 0:
                own_s = -math.inf
            elif self._began_s is None:
                # The learner waits longer than it may: a slow group needs to be replaced.
                own_s = self._free_s + _MOST_WAITS * _WINDOW * step_s
            else:
                # This step may take longer than usual, but the next one does not start earlier.
                own_s = self._began_s + spare_s if spare_s <= step_s else math.inf
            # Groups start in order: a later batch that is urgent is preceded by this one.
            opens_s = min(opens_s, own_s)
            self.opens_s[ahead] = opens_s
