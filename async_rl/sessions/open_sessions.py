"""The open sessions of a gateway by their tokens."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator

from starlette.requests import Request

from async_rl.sessions.errors import Refused
from async_rl.sessions.session import Session
from async_rl.sessions.usage import Usage, means_of

_NUM_SESSIONS = 256
"""Sessions in the means: enough for steady means, few enough to follow a policy that changes."""


class Sessions:
    """The open sessions by their tokens."""

    def __init__(self) -> None:
        self._by_token: dict[str, Session] = {}
        self._by_session_key: dict[str, Session] = {}
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
        # An environment whose sessions are all closed is shown with 0.
        gauges = dict.fromkeys(self._names, 0.0)
        for session in self._by_token.values():
            usage = session.usage
            for name in ("open", "calling") if usage.num_open else ("open",):
                gauges[name] += 1
                gauges[f"{name}_in/{usage.environment}"] += 1
        return {**gauges, **means_of(self._ended)}

    @contextlib.contextmanager
    def open(self, session: Session) -> Iterator[Session]:
        """Serve the session during the block."""
        self._by_token[session.token] = session
        self._by_session_key[session.session_key] = session
        for name in ("open", "calling"):
            self._names[f"{name}_in/{session.usage.environment}"] = None
        try:
            yield session
        finally:
            del self._by_token[session.token], self._by_session_key[session.session_key]
            session.usage.close()
            self._ended.append(session.usage)
            session.close("its sample is complete or was given up")

    def of(self, request: Request) -> Session:
        """Return the session of a request with one of its keys. Raises Refused."""
        key = token_of(request)
        session = self._by_token.get(key) or self._by_session_key.get(key)
        if session is None:
            raise Refused(
                "the token is missing, or its session is unknown or closed; send the"
                " OPENAI_API_KEY that the agent was given",
                status=401,
                code="invalid_api_key",
            )
        return session

    def owned(self, request: Request) -> Session:
        """Return the session of a request with its second key. Raises Refused."""
        session = self.of(request)
        if token_of(request) != session.session_key:
            raise Refused(
                "the key of an agent calls the model only; send session_key, which the function or"
                " the program that starts the agent has",
                status=403,
                code="insufficient_permissions",
            )
        return session


def token_of(request: Request) -> str:
    """Return the token of a request, as OpenAI's or Anthropic's package sends it."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token if scheme == "Bearer" else request.headers.get("x-api-key", "")
