"""The supervisor's clock, and waits with a limit."""

import asyncio
import time
from collections.abc import Awaitable, Callable

_LONGEST_S = 2.0  # twice the interval at which the supervisor reads it; a busy machine delays that


class AwakeClock:
    """Seconds in which this process ran. read: monotonic seconds.

    A process that was stopped, or whose machine was suspended, has not heard its children and must
    not blame them for it. The time between two readings therefore counts as at most `_LONGEST_S`,
    so the clock must be read about once per second.
    """

    def __init__(self, read: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._last_s = read()
        self._awake_s = 0.0

    def __call__(self) -> float:
        """Return the seconds so far."""
        # A pause shows only as a long time between two readings.
        now_s = self._read()
        self._awake_s += min(now_s - self._last_s, _LONGEST_S)
        self._last_s = now_s
        return self._awake_s


async def in_time(event: Awaitable[object], limit_s: float) -> bool:
    """Wait for the event; return whether it came within the limit."""
    try:
        await asyncio.wait_for(event, limit_s)
    except TimeoutError:
        return False
    return True
