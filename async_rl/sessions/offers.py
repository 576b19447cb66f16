"""Sessions for agents that the run does not start: programs elsewhere take them over HTTP.

takes: the session of a sample
waits for: a program that takes it (POST /sessions), then for its end (POST /v1/session/end)
returns: None; the program posts the reward to its session
woken by: the program; a cancelled run; after that no program can take the session

Raises NotTaken if no program takes the session in time, and AgentError with the program's
reason.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import hmac
from typing import Any

from async_rl.core.errors import AgentError, NotTaken
from async_rl.core.frozen import frozen
from async_rl.sessions.endpoint import Endpoint

_MOST_ENDED = 4096
"""Ended sessions whose second end is recognized: a program repeats it within seconds."""
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
        self._waiting: collections.deque[Offer] = collections.deque()
        self._taken: dict[str, Offer] = {}
        self._offered = asyncio.Event()
        self._ended: collections.deque[str] = collections.deque(maxlen=_MOST_ENDED)

    def has_ended(self, session_key: str) -> bool:
        """Return whether a program has ended the session of this key."""
        return session_key in self._ended

    def accepts(self, key: str) -> bool:
        """Return whether this key may take a session."""
        # In constant time, because a comparison that stops early shows how much of a key is right.
        return hmac.compare_digest(key.encode(), self._key)

    async def run(self, endpoint: Endpoint, task: dict[str, Any]) -> Any:
        """Offer the session until a program has taken and ended it."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        offer = Offer(endpoint=endpoint, task=task, is_taken=asyncio.Event(), ended=ended)
        self._waiting.append(offer)
        self._offered.set()
        try:
            try:
                async with asyncio.timeout(self._take_s):
                    await offer.is_taken.wait()
            except TimeoutError as error:
                raise NotTaken(
                    f"no program took the session within {self._take_s:g} s (half of"
                    " timeouts.group_s); start more programs that take sessions"
                ) from error
            await ended
        finally:
            # The run is over or cancelled: no program can take or end the session any more.
            if self._taken.pop(endpoint.session_key, None) is None:
                self._waiting.remove(offer)

    async def available(self, wait_s: float) -> None:
        """Return once a session may be taken, at the latest after this time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                # Another program may have taken the session that set the event.
                while not self._waiting:
                    self._offered.clear()
                    await self._offered.wait()

    def take(self) -> Offer | None:
        """Return the session that has waited longest; None without any."""
        if not self._waiting:
            return None
        offer = self._waiting.popleft()
        self._taken[offer.endpoint.session_key] = offer
        offer.is_taken.set()
        return offer

    def end(self, session_key: str, error: str) -> None:
        """The program has exited, or failed with this reason. It may say so twice, or while its
        group is given up, because another sample failed.
        """
        offer = self._taken.get(session_key)
        if offer is None or offer.ended.done():
            return
        self._ended.append(session_key)
        if error:
            offer.ended.set_exception(AgentError(f"the program failed its session: {error}"))
        else:
            offer.ended.set_result(None)

    async def close(self) -> None:
        """Nothing to end: the programs are not the run's."""


def key_from(token: str) -> str:
    """Return the key for sessions of a run. The run's token, which verifiers take too, cannot be
    computed from it.
    """
    # A keyed hash: who has the key cannot compute the token.
    return hmac.new(token.encode(), b"sessions", hashlib.sha256).hexdigest()
