"""The time that a run still needs, from the pace of its newest steps."""

from __future__ import annotations

import collections

_NUM_STEPS = 20
"""A mean over these steps changes slowly enough to be read, and follows a change of the fleet."""
_LEAST_STEPS = 3  # the first steps wait for the first groups, and say nothing about the others


class Pace:
    """Times at which steps were seen. Pure state; times are monotonic seconds from the caller."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._seen: collections.deque[tuple[int, float]] = collections.deque(maxlen=_NUM_STEPS + 1)

    def at(self, step: int, now_s: float) -> None:
        """Note that `step` is the newest one."""
        # A learner that resumes from a checkpoint starts anew.
        if self._seen and step < self._seen[-1][0]:
            self._seen.clear()
        if step > 0 and (not self._seen or step > self._seen[-1][0]):
            self._seen.append((step, now_s))

    def left_s(self) -> float | None:
        """Return the seconds to the last step; None before a few steps, and at the end."""
        if not self._seen:
            return None
        (first, first_s), (last, last_s) = self._seen[0], self._seen[-1]
        if last - first < _LEAST_STEPS or last >= self._num_steps:
            return None
        return (self._num_steps - last) * (last_s - first_s) / (last - first)
