"""How agents use the endpoint: means over the sessions that ended last, as metrics of the run."""

from __future__ import annotations

from collections import deque

from async_rl.core.frozen import frozen

_NUM_SESSIONS = 256
"""Enough for a steady mean, few enough to follow a policy that changes."""


@frozen
class Usage:
    """One session that ended. open_s: its age; calling_s: of that, the time with a call open."""

    environment: str
    num_turns: int
    num_tokens: int
    num_tool_runs: int
    num_tool_errors: int
    open_s: float
    calling_s: float


class Recent:
    """The sessions that ended last."""

    def __init__(self) -> None:
        self._usages: deque[Usage] = deque(maxlen=_NUM_SESSIONS)

    def add(self, usage: Usage) -> None:
        """A session has ended."""
        self._usages.append(usage)

    def means(self) -> dict[str, float]:
        """Return the metrics, without those that nothing is known about."""
        ended = self._usages
        num_turns = sum(usage.num_turns for usage in ended)
        open_s = sum(usage.open_s for usage in ended)
        means = {}
        if ended:
            means["turns"] = num_turns / len(ended)
        if num_turns:
            means["tokens_per_turn"] = sum(usage.num_tokens for usage in ended) / num_turns
        for name in ("", *sorted({usage.environment for usage in ended})):
            of_name = [usage for usage in ended if name in ("", usage.environment)]
            num_tool_runs = sum(usage.num_tool_runs for usage in of_name)
            if num_tool_runs:
                num_errors = sum(usage.num_tool_errors for usage in of_name)
                title = f"tool_error_share_in/{name}" if name else "tool_error_share"
                means[title] = num_errors / num_tool_runs
        if open_s:
            means["outside_engine_share"] = 1 - sum(u.calling_s for u in ended) / open_s
        return means
