"""Sessions for agents that the run does not start: programs elsewhere take them over HTTP.

takes: the session of a sample
waits for: a program that takes it (POST /sessions), then for its end (POST /v1/session/end)
returns: None; the program posts the reward to its session
woken by: the program; a cancelled run; after that no program can take the session

Raises NotTaken if no program takes the session in time, and AgentError with the program's
reason.
"""

import asyncio
import collections
import contextlib
import hashlib
import hmac
from collections.abc import Callable
from typing import Any

from async_rl.core.errors import AgentError, NotTaken
from async_rl.core.frozen import frozen
from async_rl.sessions.endpoint import Endpoint
from async_rl.sessions.requests import Outcome

LONGEST_WAIT_S = 60.0
"""The longest request for a session: below the idle timeouts of proxies."""


@frozen
class Offer:
    """A session that a program may take. is_taken: set by that; ended: by its end."""

    endpoint: Endpoint
    task: dict[str, Any]
    is_taken: asyncio.Event
    ended: asyncio.Future[None]


class Offers:
    """The sessions of one gateway. key: who has it may take one. take_s: how long each waits."""

    def __init__(self, key: str, take_s: float) -> None:
        self._key = key.encode()
        self._take_s = take_s
        self.waiting: collections.deque[Offer] = collections.deque()
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
        """Offer the session until a program has taken and ended it."""
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
