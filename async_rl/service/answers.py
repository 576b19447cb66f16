"""Requests whose answers are futures: accepted once, answered once, and both in the store before
anybody sees them.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path

from async_rl.protocol.service import CHANGING
from async_rl.service.store import Request, Run, Store
from async_rl.sessions.errors import Refused


class Answers(Store):
    """The store, and the clients that wait for answers in it. poll_s: for how long a client waits
    before it has to ask again.
    """

    def __init__(
        self, directory: Path, *, now: Callable[[], float], new_id: Callable[[], str], poll_s: float
    ) -> None:
        super().__init__(directory)
        self.now = now
        self.new_id = new_id
        self._poll_s = poll_s
        self._events: dict[str, asyncio.Event] = {}

    def put(
        self, owner: str, seq_id: int, kind: str, body: bytes, *, new: Run | None = None
    ) -> tuple[Request, bool]:
        """Store a request, with its new run. Returns it, and whether it was there already. Raises
        Refused if its number has another body.
        """
        digest = hashlib.sha256(f"{kind} ".encode() + body).hexdigest()
        known = self.one(Request, "owner=? AND seq_id=?", owner, seq_id)
        if known is not None:
            if known.digest != digest:
                reason = f"number {seq_id} of {owner} is another request ({known.kind})"
                raise Refused(reason, status=409)
            return known, True
        request = Request(
            request_id=self.new_id(),
            owner=owner,
            seq_id=seq_id,
            kind=kind,
            digest=digest,
            body=body,
            accepted_s=self.now(),
        )
        with self.transaction():
            if new is not None:
                self.add(new)
            self.add(request)
        return request, False

    async def wait(self, request_id: str) -> Request | None:
        """Return a request with its answer, None if there is none in time. Raises Refused."""
        request = self.known(Request, request_id)
        if request.answered_s is None:
            event = self._events.setdefault(request_id, asyncio.Event())
            try:
                async with asyncio.timeout(self._poll_s):
                    await event.wait()
            except TimeoutError:
                return None
            request = self.known(Request, request_id)
        if request.answer is None and not request.error:
            raise Refused(f"the answer to {request_id} was delivered, and is deleted", status=410)
        if request.delivered_s is None:
            statement = "UPDATE requests SET delivered_s=? WHERE request_id=?"
            self.change(statement, self.now(), request_id)
        return request

    def finish(
        self,
        request: Request,
        answer: bytes | None = None,
        *,
        error: str = "",
        directory: str = "",
        outcome: int = 0,
    ) -> None:
        """Store the answer or the error of a request, and wake its client."""
        is_needed = request.kind in CHANGING or request.kind == "sample"
        self.change(
            "UPDATE requests SET answer=?, error=?, directory=?, outcome=?, answered_s=?, body=?"
            " WHERE request_id=?",
            answer,
            error,
            directory,
            outcome,
            self.now(),
            request.body if is_needed and not error else None,
            request.request_id,
        )
        event = self._events.pop(request.request_id, None)
        if event is not None:
            event.set()
