"""How often and after which pause a process that was lost is started again.

Used by the fleet.
"""

from __future__ import annotations

import collections
import time

from async_rl.config_running import SupervisorConfig

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0


class Restarts:
    """The restarts of one process, or of the learner's ranks together."""

    def __init__(self, config: SupervisorConfig) -> None:
        self._config = config
        self._times_s: collections.deque[float] = collections.deque()

    def next_pause_s(self) -> float | None:
        """Seconds to wait before the next start; None if there were too many."""
        now = time.monotonic()
        self._times_s.append(now)
        while now - self._times_s[0] > self._config.restart_window_s:
            self._times_s.popleft()
        if len(self._times_s) > self._config.max_restarts:
            return None
        return float(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (len(self._times_s) - 1)))
