"""The sessions of a gateway: the open ones by their keys, and those offered to programs elsewhere.

The keys of a session are made of its name and of the gateway's secret. So a gateway that has
started again knows which keys are of sessions that come back, and which are of ended ones.
"""

import asyncio
import contextlib
import hashlib
import hmac
import secrets
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

from starlette.requests import Request

from async_rl.core.errors import AgentError, NotTaken
from async_rl.core.frozen import frozen
from async_rl.sessions.calls import Usage
from async_rl.sessions.endpoint import Endpoint
from async_rl.sessions.errors import Refused
from async_rl.sessions.requests import Outcome
from async_rl.sessions.session import Session

LONGEST_WAIT_S = 60.0
"""The longest request for a session: below the idle timeouts of proxies."""
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
        return {**gauges, **_means_of(self._ended)}

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


@frozen
class Offer:
    """A session that a program may take. is_taken: set by that; ended: by its end."""

    endpoint: Endpoint
    task: dict[str, Any]
    is_taken: asyncio.Event
    ended: asyncio.Future[None]


class Offers:
    """The sessions for agents that the run does not start. key: who has it may take one. take_s:
    how long each waits.

    takes: the session of a sample
    waits for: a program that takes it (POST /sessions), then for its end (POST /v1/session/end)
    returns: None; the program posts the reward to its session
    woken by: the program; a cancelled run; after that no program can take the session
    """

    def __init__(self, key: str, take_s: float) -> None:
        self._key = key.encode()
        self._take_s = take_s
        self.waiting: deque[Offer] = deque()
        self.taken: dict[str, Offer] = {}
        self._offered = asyncio.Event()

    def resume(self, endpoint: Endpoint, task: dict[str, Any], outcome: Outcome | None) -> None:
        """A program has the session that runs next, and has ended it with this outcome (None = it
        has not).
        """
        self._hand_out(self._offer(endpoint, task))
        if outcome is not None:
            self.end(endpoint.session_key, outcome)

    def accepts(self, key: str) -> bool:
        """Return whether this key may take a session."""
        # In constant time, because a comparison that stops early shows how much of a key is right.
        return hmac.compare_digest(key.encode(), self._key)

    async def run(self, endpoint: Endpoint, task: dict[str, Any]) -> Any:
        """Offer the session until a program has taken and ended it. Raises NotTaken if none takes
        it in time, and AgentError with the program's reason.
        """
        key = endpoint.session_key
        offer = self.taken.get(key) or self._offer(endpoint, task)
        try:
            try:
                async with asyncio.timeout(self._take_s):
                    await offer.is_taken.wait()
            except TimeoutError as error:
                raise NotTaken(
                    f"no program took the session within {self._take_s:g} s (half of"
                    " timeouts.group_s); start more programs that take sessions"
                ) from error
            await offer.ended
        finally:
            # The run is over or cancelled: no program can take or end the session any more.
            if self.taken.pop(key, None) is None:
                self.waiting.remove(offer)

    def _offer(self, endpoint: Endpoint, task: dict[str, Any]) -> Offer:
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        offer = Offer(endpoint=endpoint, task=task, is_taken=asyncio.Event(), ended=ended)
        self.waiting.append(offer)
        self._offered.set()
        return offer

    async def available(self, wait_s: float) -> None:
        """Return once a session may be taken, at the latest after this time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                # Another program may have taken the session that set the event.
                while not self.waiting:
                    self._offered.clear()
                    await self._offered.wait()

    def take(self, note: Callable[[str], None]) -> Offer | None:
        """Return the session that has waited longest; None without any. note: called with its
        second key; if it raises, the session still waits.
        """
        if not self.waiting:
            return None
        offer = self.waiting[0]
        note(offer.endpoint.session_key)
        self._hand_out(offer)
        return offer

    def _hand_out(self, offer: Offer) -> None:
        self.waiting.remove(offer)
        self.taken[offer.endpoint.session_key] = offer
        offer.is_taken.set()

    def is_taken(self, session_key: str) -> bool:
        """Return whether a program has the session and has not ended it."""
        offer = self.taken.get(session_key)
        return offer is not None and not offer.ended.done()

    def end(self, session_key: str, outcome: Outcome) -> None:
        """The program of a taken session has ended it."""
        ended = self.taken[session_key].ended
        if outcome.error:
            ended.set_exception(AgentError(f"the program failed its session: {outcome.error}"))
        else:
            ended.set_result(None)

    async def close(self) -> None:
        """Nothing to end: the programs are not the run's."""


def key_from(token: str) -> str:
    """Return the key for sessions of a run. The run's token, which verifiers take too, cannot be
    computed from it.
    """
    # A keyed hash: who has the key cannot compute the token.
    return hmac.new(token.encode(), b"sessions", hashlib.sha256).hexdigest()


def _means_of(ended: Collection[Usage]) -> dict[str, float]:
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
