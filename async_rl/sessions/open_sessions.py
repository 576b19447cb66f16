"""The open sessions of a gateway by their tokens, and metrics of how agents use them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection
from typing import Any

from starlette.requests import Request

from async_rl.core.frozen import frozen
from async_rl.sessions.errors import Refused
from async_rl.sessions.session import Session

_NUM_SESSIONS = 256
"""Sessions in the means: enough for steady means, few enough to follow a policy that changes."""


@frozen
class Usage:
    """One closed session. open_s: its age; calling_s: the part of it with a call open."""

    environment: str
    num_turns: int
    num_tokens: int
    num_tool_runs: int
    num_tool_errors: int
    open_s: float
    calling_s: float


def usage_of(session: Session) -> Usage:
    """Return how the agent has used the endpoint so far."""
    turns = session.record.turns
    return Usage(
        environment=session.environment,
        num_turns=len(turns),
        num_tokens=sum(turn.num_written for turn in turns),
        num_tool_runs=session.num_tool_runs,
        num_tool_errors=session.num_tool_errors,
        open_s=session.clock() - session.opened_s,
        calling_s=session.calling_s,
    )


class Sessions:
    """The open sessions by their tokens."""

    def __init__(self) -> None:
        self._by_token: dict[str, Session] = {}
        self._ended: deque[Usage] = deque(maxlen=_NUM_SESSIONS)
        # An environment without open sessions is still shown, with 0.
        self._names = {"open": None, "calling": None}

    def __len__(self) -> int:
        return len(self._by_token)

    @property
    def gauges(self) -> dict[str, float]:
        """The numbers of open sessions, all and by environment, and means over the last sessions.

        A session with an open call waits for the engine, any other for its agent.
        """
        gauges = dict.fromkeys(self._names, 0.0)
        for session in self._by_token.values():
            of_session = ["open"] if session.num_open == 0 else ["open", "calling"]
            for name in of_session:
                gauges[name] += 1
                gauges[f"{name}_in/{session.environment}"] += 1
        return {**gauges, **means_of(self._ended)}

    @contextlib.contextmanager
    def open(self, session: Session) -> Any:
        """Serve the session during the block."""
        self._by_token[session.token] = session
        for name in ("open", "calling"):
            self._names[f"{name}_in/{session.environment}"] = None
        try:
            yield session
        finally:
            del self._by_token[session.token]
            self._ended.append(usage_of(session))
            session.close("its sample is complete or was given up")

    def of(self, request: Request) -> Session:
        """Return the session of a request. Raises Refused."""
        session = self._by_token.get(token_of(request))
        if session is None:
            raise Refused(
                401,
                "the token is missing, or its session is unknown or closed; send the"
                " OPENAI_API_KEY that the agent was given",
                code="invalid_api_key",
            )
        return session


def token_of(request: Request) -> str:
    """Return the token of a request, as OpenAI's or Anthropic's package sends it."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token if scheme == "Bearer" else request.headers.get("x-api-key", "")


def means_of(ended: Collection[Usage]) -> dict[str, float]:
    """Return the means over sessions, without the metrics whose divisor is 0."""
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
