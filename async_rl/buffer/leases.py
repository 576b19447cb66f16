"""Who may act: the time limits of generators and of their tickets, the pauses between tickets while
nothing can be scored, the lives of the learner. Times are monotonic seconds of the caller.

The ticket of a generator that is not in the directory may be out for timeouts.lease_s: the
generator has left, and its request came late. Every other ticket may be out for the longest limit
of a group and a lease: by then its generator has failed it, or has lost it.
Of the learner the newest life may act, all earlier ones are refused: a learner that cannot be
reached is replaced while it may still run, for example behind a broken network, and could otherwise
commit steps of weights that the run no longer uses.
"""

import math
from collections.abc import Collection, Iterable

from async_rl.buffer.changes import LifeBegan
from async_rl.buffer.groups import OpenGroup
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
