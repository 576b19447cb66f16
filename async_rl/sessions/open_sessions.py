"""The open sessions of a gateway by their keys.

The keys of a session are made of its name and of the gateway's secret. So a gateway that has
started again knows which keys are of sessions that come back, and which are of ended ones.
"""

import asyncio
import contextlib
import hashlib
import hmac
import secrets
from collections import deque
from collections.abc import Collection, Iterator

from starlette.requests import Request

from async_rl.sessions.calls import Usage, means_of
from async_rl.sessions.errors import Refused
from async_rl.sessions.session import Session

_AGENT = "sk"
_OWNER = "session"
_RETURN_S = 60.0
"""The longest wait for a session that comes back: clients wait longer for an answer."""
_NUM_SESSIONS = 256
"""Sessions in the means: enough for steady means, few enough to follow a policy that changes."""


class Sessions:
    """The open sessions by their keys. secret: of the gateway; returning: the names of the sessions
    that will be opened again, because an earlier life of the gateway had handed them out.
    """

    def __init__(self, secret: bytes = b"", returning: Collection[str] = ()) -> None:
        self._secret = secret or secrets.token_bytes()
        self._returning = returning
        self._by_key: dict[str, Session] = {}
        self._opened = asyncio.Event()
        self._ended: deque[Usage] = deque(maxlen=_NUM_SESSIONS)
        # An environment without open sessions is still shown, with 0.
        self._names = {"open": None, "calling": None}

    def keys(self, name: str) -> tuple[str, str]:
        """Return the agent's key of the session with this name, and its owner's."""
        return self._signed(_AGENT, name), self._signed(_OWNER, name)

    def _signed(self, kind: str, name: str) -> str:
        signature = hmac.new(self._secret, f"{kind} {name}".encode(), hashlib.sha256)
        return f"{kind}-{name}-{signature.hexdigest()}"

    def _name_of(self, key: str) -> str:
        """Return the name of the session of a key; empty if this gateway has not made the key."""
        kind, _, rest = key.partition("-")
        name = rest.rpartition("-")[0]
        is_ours = hmac.compare_digest(self._signed(kind, name).encode(), key.encode())
        return name if is_ours else ""

    def __getitem__(self, key: str) -> Session:
        """Return the open session of a key."""
        return self._by_key[key]

    @property
    def gauges(self) -> dict[str, float]:
        """The numbers of open sessions, all and by environment, and means over the last sessions.

        A session with an open call waits for the engine, any other for its agent.
        """
        # An environment whose sessions are all closed is shown with 0.
        gauges = dict.fromkeys(self._names, 0.0)
        for session in [each for key, each in self._by_key.items() if key == each.token]:
            usage = session.usage
            for name in ("open", "calling") if usage.num_open else ("open",):
                gauges[name] += 1
                gauges[f"{name}_in/{usage.environment}"] += 1
        return {**gauges, **means_of(self._ended)}

    @contextlib.contextmanager
    def open(self, session: Session) -> Iterator[Session]:
        """Serve the session during the block."""
        self._by_key[session.token] = self._by_key[session.session_key] = session
        self._opened.set()
        usage = session.usage
        opened_s = usage.clock()
        for name in ("open", "calling"):
            self._names[f"{name}_in/{usage.environment}"] = None
        try:
            yield session
        finally:
            del self._by_key[session.token], self._by_key[session.session_key]
            usage.open_s = usage.clock() - opened_s
            self._ended.append(usage)
            session.close("its sample is complete or was given up")

    async def of(self, request: Request) -> Session:
        """Return the session of a request with one of its keys, once it is open, if it comes back.
        Raises Refused.
        """
        key = token_of(request)
        name = self._name_of(key)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RETURN_S):
                while key not in self._by_key and name in self._returning:
                    self._opened.clear()
                    await self._opened.wait()
        if key not in self._by_key:
            raise Refused(
                "the token is missing, or its session is unknown or closed; send the"
                " OPENAI_API_KEY that the agent was given",
                status=401,
                code="invalid_api_key",
            )
        return self._by_key[key]

    async def owned(self, request: Request) -> Session:
        """Return the session of a request with its second key. Raises Refused."""
        session = await self.of(request)
        if token_of(request) != session.session_key:
            raise Refused(
                "the key of an agent calls the model only; send session_key, which the function or"
                " the program that starts the agent has",
                status=403,
                code="insufficient_permissions",
            )
        return session

    def has_ended(self, request: Request) -> bool:
        """Return whether a request has the second key of a session that was open."""
        key = token_of(request)
        name = self._name_of(key)
        is_here = key in self._by_key or name in self._returning
        return bool(name) and key.startswith(_OWNER) and not is_here


def token_of(request: Request) -> str:
    """Return the token of a request, as OpenAI's or Anthropic's package sends it."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token if scheme == "Bearer" else request.headers.get("x-api-key", "")
