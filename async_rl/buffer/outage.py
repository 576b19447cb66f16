"""The pauses between tickets while nothing can be scored.

Generators report that scoring fails for every sample (rewards/scoring.py). Their attempts do not
count, and tickets are held back, since a prompt that is handed out would only be generated for
nothing. Pure: no clock; now_s are monotonic seconds of the caller.
Invariants
- A failure outside a pause starts the next pause, twice as long; further failures during the
  pause do not.
- After a pause one group at a time is handed out. The outage is over with the first complete group.
"""

from __future__ import annotations

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
"""Several attempts fit into the learner's wait for a batch (10/3 timeouts.start_s)."""
MOST_SPARED = 10
"""Attempts of one group that an outage does not count: three minutes of trials.

A generator that has scored nothing yet cannot distinguish an outage from a prompt that cannot be
scored. Without a bound such prompts would block the run for ever when no other group is allowed.
"""


class Outage:
    """The current outage, if there is one."""

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._until_s = 0.0
        self._message = ""

    def failed(self, message: str, now_s: float) -> None:
        """An attempt failed because nothing can be scored."""
        self._message = " ".join(message.split())  # one line, for the live line and status
        # Within a pause the failures belong to groups that were handed out before it.
        if self._pause_s == 0 or now_s >= self._until_s:
            self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            self._until_s = now_s + self._pause_s

    def end(self) -> None:
        """A group was scored."""
        self._pause_s = 0.0

    def pause_left_s(self, now_s: float) -> float:
        """Return the seconds until a group may be tried; 0 without an outage."""
        return max(self._until_s - now_s, 0.0) if self._pause_s else 0.0

    def num_allowed(self, num_free: int, *, is_generating: bool, now_s: float) -> int:
        """Return how many of the free tickets may be handed out."""
        if self._pause_s == 0:
            return num_free
        # The group on trial will show whether scoring works. A second one would be generated for
        # nothing if it does not.
        if is_generating or self.pause_left_s(now_s) > 0:
            return 0
        return min(num_free, 1)

    @property
    def refusal(self) -> str:
        """Return why generators get no tickets, or an empty string."""
        if self._pause_s == 0:
            return ""
        return f"scoring fails ({self._message}); one group is tried every {self._pause_s:g} s"
