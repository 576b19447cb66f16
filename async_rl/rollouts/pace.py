"""The time limit of a group, from the rate at which the last groups were written."""

from __future__ import annotations

import collections

from async_rl.config.timeouts import TimeoutsConfig

_NUM_GROUPS = 32
_MARGIN = 3.0
"""A group may be this much slower than the slowest of the last ones: an engine that decodes more
sequences at a time is slower for each of them.
"""


class Pace:
    """The rates of one engine. max_tokens: the longest sample."""

    def __init__(self, timeouts: TimeoutsConfig, max_tokens: int) -> None:
        self._least_s = timeouts.group_s
        self._most_s = timeouts.longest_group_s(max_tokens)
        self._max_tokens = max_tokens
        self._rates: collections.deque[float] = collections.deque(maxlen=_NUM_GROUPS)

    @property
    def limit_s(self) -> float:
        """Seconds that a group may take: group_s or more, and no more than the buffer waits."""
        # Before the first group nothing is known about the engine, and a limit that is too short
        # would fail every group, so that nothing would ever be known.
        if not self._rates:
            return self._most_s
        expected_s = self._max_tokens / min(self._rates)
        return min(self._most_s, max(self._least_s, _MARGIN * expected_s))

    def note(self, num_tokens: int, seconds: float) -> None:
        """Record the duration of a group, including its scores, and the length of its longest
        sample.
        """
        if num_tokens and seconds > 0:
            self._rates.append(num_tokens / seconds)
