"""How agents use the endpoint: counts and times of one session, and means over several."""

import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Usage:
    """What one session has done so far. environment: the name under which it is counted.

    num_tokens: written by the policy. num_open: calls in progress. open_s: for how long the session
    was open, once it is closed; calling_s: the part of it with a call open. clock: monotonic
    seconds.
    """

    environment: str = "agent"
    clock: Callable[[], float] = time.monotonic
    num_turns: int = 0
    num_tokens: int = 0
    num_tool_runs: int = 0
    num_tool_errors: int = 0
    num_open: int = 0
    open_s: float = 0.0
    calling_s: float = 0.0
    _called_s: float = 0.0

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Count the time with at least one open call as the engine's."""
        if not self.num_open:
            self._called_s = self.clock()
        # Calls that overlap count once.
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1
            if not self.num_open:
                self.calling_s += self.clock() - self._called_s


def means_of(ended: Collection[Usage]) -> dict[str, float]:
    """Return the means over sessions, without the metrics whose divisor is 0."""
    num_turns = sum(usage.num_turns for usage in ended)
    shares = {
        "turns": (num_turns, len(ended)),
        "tokens_per_turn": (sum(usage.num_tokens for usage in ended), num_turns),
        "outside_engine_share": (
            sum(usage.open_s - usage.calling_s for usage in ended),
            sum(usage.open_s for usage in ended),
        ),
        "tool_error_share": _tool_errors(ended),
    }
    for name in sorted({usage.environment for usage in ended}):
        of_name = [usage for usage in ended if usage.environment == name]
        shares[f"tool_error_share_in/{name}"] = _tool_errors(of_name)
    # A mean over nothing is left out.
    return {name: value / divisor for name, (value, divisor) in shares.items() if divisor}


def _tool_errors(ended: Collection[Usage]) -> tuple[int, int]:
    num_errors = sum(usage.num_tool_errors for usage in ended)
    return num_errors, sum(usage.num_tool_runs for usage in ended)
