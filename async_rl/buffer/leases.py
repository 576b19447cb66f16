"""Who may act and when: the start of groups, the limits of tickets, the pauses of an outage, the
lives of the learner. Pure: times are monotonic seconds of the caller.

The ticket of a generator that is not in the directory may be out for timeouts.lease_s: the
generator has left, and its request came late. Every other ticket may be out for the longest limit
of a group and a lease: by then its generator has failed it, or has lost it.
Of the learner the newest life may act, all earlier ones are refused: a learner that cannot be
reached is replaced while it may still run, for example behind a broken network, and could otherwise
commit steps of weights that the run no longer uses.
"""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from async_rl.buffer.changes import LifeBegan
from async_rl.buffer.groups import OpenGroup, StoredGroup
from async_rl.config.run import RunConfig
from async_rl.core.errors import Superseded, require_life
from async_rl.core.types import GroupState

FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
"""Several attempts fit into the learner's wait for a batch (10/3 timeouts.start_s)."""
MOST_SPARED = 10
"""Attempts of one group that an outage does not count: three minutes of trials.

A generator that has scored nothing yet cannot distinguish an outage from a prompt that cannot be
scored. Without a bound such prompts would block the run for ever when no other group is allowed.
"""


_WINDOW = 32
"""Batches. A stall of the machine makes groups start early for this number of steps."""
_LEAST = 4
"""Batches before a group is held back: the first ones wait for compilers and caches."""
_MOST_WAITS = 0.005
_NUM_AFTER = 2
"""Batches after an evaluated version that its evaluation delays: it is hardly ever longer."""


class Leases:
    """The limits of tickets, and the processes that generators of each name run as."""

    def __init__(self, config: RunConfig) -> None:
        self.lease_s = config.timeouts.lease_s
        longest_s = config.timeouts.longest_group_s(config.data.max_response_tokens)
        # Longer than the generator's own limit: the generator fails a slow group and says why, and
        # the buffer only collects tickets that no process works on.
        self.ticket_s = longest_s + self.lease_s
        if config.takes_turns:
            # A generator's own time limits stop while it sleeps, which is for at most this long.
            self.ticket_s += config.timeouts.stall_s
        # Of each generator the present process is the last.
        self._incarnations: dict[str, list[str]] = {}

    def admit(self, generator: str, incarnation: str) -> None:
        """The generator runs as this incarnation. Raises Superseded for one that another has
        replaced.
        """
        # Two processes of one name would return each other's tickets for ever. If the older one
        # came last, the supervisor starts the refused one again, and that replaces the older one.
        known = self._incarnations.setdefault(generator, [])
        if incarnation in known[:-1]:
            raise Superseded(
                f"{generator} runs as another process since; end this one ({incarnation})"
            )
        if incarnation not in known:
            known.append(incarnation)

    def end_s(self, group: OpenGroup, listed: Collection[str]) -> float:
        """The time when the group's ticket expires, math.inf if no generator has it. listed:
        generators in the directory.
        """
        if group.state is not GroupState.GENERATING:
            return math.inf
        return group.issued_s + (self.ticket_s if group.generator in listed else self.lease_s)


class Lives:
    """The numbers of the lives that have started, which grow, and the versions that they started
    from. started: incarnation, number and version of each.
    """

    def __init__(self, started: Iterable[tuple[str, int, int]]) -> None:
        self._started = list(started)

    @property
    def newest(self) -> int:
        """The number of the newest life, 0 before the first."""
        return max((number for _, number, _ in self._started), default=0)

    def begin(self, incarnation: str, version: int) -> list[LifeBegan]:
        """Begin a life, or return nothing if it is the newest already.

        Raises Superseded for an earlier one, whose request was delayed.
        """
        for known, number, _ in self._started:
            if known == incarnation:
                require_life(number, self.newest)
                return []
        # The order of arrival decides: a learner is started only after the supervisor gave up the
        # previous one.
        life = self.newest + 1
        self._started.append((incarnation, life, version))
        return [LifeBegan(life=life, incarnation=incarnation, version=version)]

    def surviving(self, life: int | None, version: int) -> int:
        """Return the newest version whose weights these are or grew from, in the history that
        survives: a later life that started from an older version makes other weights of the same
        number. life: that made the weights of `version`; None: not known.
        """
        if life is None:
            return version
        later = [first for _, number, first in self._started if number > life]
        return min([version, *later])


class Outage:
    """The current outage, if there is one: generators report that scoring fails for every sample
    (rewards/scoring.py), or every agent. Their attempts do not count, and tickets are held back,
    since a prompt that is handed out would only be generated for nothing.

    Invariants
    - A failure outside a pause starts the next pause, twice as long; further failures during the
      pause do not.
    - After a pause one group at a time is handed out. The outage is over with the first complete
      group.
    until_s: when the pause ends.
    """

    def __init__(self) -> None:
        self._pause_s = 0.0
        self.until_s = 0.0
        self._message = ""

    def failed(self, message: str, now_s: float) -> None:
        """An attempt failed for a reason that makes all attempts fail."""
        self._message = " ".join(message.split())  # one line, for the live line and status
        # Within a pause the failures belong to groups that were handed out before it.
        if self._pause_s == 0 or now_s >= self.until_s:
            self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            self.until_s = now_s + self._pause_s

    def end(self) -> None:
        """A group was scored."""
        self._pause_s = 0.0

    def num_allowed(self, num_free: int, *, is_generating: bool, now_s: float) -> int:
        """Return how many of the free tickets may be handed out."""
        if self._pause_s == 0:
            return num_free
        # The group on trial will show whether scoring works. A second one would be generated for
        # nothing if it does not.
        if is_generating or now_s < self.until_s:
            return 0
        return min(num_free, 1)

    @property
    def refusal(self) -> str:
        """Return why generators get no tickets, or an empty string."""
        if self._pause_s == 0:
            return ""
        return f"every group fails ({self._message}); one group is tried every {self._pause_s:g} s"


class Pace:
    """When a group may start so that it is complete just as the learner needs it.

    A group that is complete earlier waits for the learner and is trained on older data than
    necessary. The lead of a batch is measured: the time from its first ticket to its last group,
    and how much earlier the learner needed it than a usual step takes. The lead in force is the
    shortest one with which the recent batches would have cost the learner at most `_MOST_WAITS` of
    its time. Where generators are the slower side it is longer than a step, and nothing is held
    back. Generators serve evaluations first, so the batches of the two steps after an evaluated
    version have their own leads.

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
