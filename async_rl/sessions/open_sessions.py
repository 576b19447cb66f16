"""The open sessions of a gateway by their tokens, and metrics of how agents use them."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any

from starlette.requests import Request

from async_rl.sessions.errors import Refused
from async_rl.sessions.session import Session, Usage

_NUM_SESSIONS = 256
"""Enough for a steady mean, few enough to follow a policy that changes."""


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


class Sessions:
    """The open sessions by their tokens."""

    def __init__(self) -> None:
        self._by_token: dict[str, Session] = {}
        self._recent = Recent()
        # An environment whose sessions have all ended is still shown, with 0.
        self._names = {"open": None, "calling": None}

    def __len__(self) -> int:
        return len(self._by_token)

    @property
    def gauges(self) -> dict[str, float]:
        """The sessions now, all and by environment, of which those with an open call wait for the
        engine and the others for their agents; and means over those that ended last.
        """
        gauges = dict.fromkeys(self._names, 0.0)
        for session in self._by_token.values():
            of_session = ["open"] if session.num_open == 0 else ["open", "calling"]
            for name in of_session:
                gauges[name] += 1
                gauges[f"{name}_in/{session.environment}"] += 1
        return {**gauges, **self._recent.means()}

    @contextlib.contextmanager
    def open(self, session: Session) -> Any:
        """Serve the session until the block ends."""
        self._by_token[session.token] = session
        for name in ("open", "calling"):
            self._names[f"{name}_in/{session.environment}"] = None
        try:
            yield session
        finally:
            del self._by_token[session.token]
            self._recent.add(session.usage)
            session.close("its sample is complete or was given up")

    def of(self, request: Request) -> Session:
        """Return the session of a request. Raises Refused."""
        session = self._by_token.get(token_of(request))
        if session is None:
            raise Refused(
                401,
                "the token is missing, or its session is unknown or has ended; send the"
                " OPENAI_API_KEY that the agent was given",
                code="invalid_api_key",
            )
        return session


def token_of(request: Request) -> str:
    """Return the token of a request, as OpenAI's or Anthropic's package sends it."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token if scheme == "Bearer" else request.headers.get("x-api-key", "")
