"""Calls of the supervisor by its children."""

from __future__ import annotations

import time
from typing import Any

from async_rl.core.errors import DeadlineExceeded
from async_rl.protocol.base import Message
from async_rl.wire.rpc import RpcClient


class SupervisorCalls:
    """Calls the supervisor, again and again for `patience_s` while it does not answer.

    A supervisor that was stopped, or whose machine was suspended, answers later; its children must
    not end because of that. Every message to it may be sent twice.
    """

    def __init__(self, client: RpcClient, *, patience_s: float) -> None:
        self._client = client
        self._patience_s = patience_s

    async def call(self, request: Message, *, timeout_s: float) -> Any:
        """As RpcClient.call, with `timeout_s` for each attempt."""
        # On top of the first attempt: a request for news may rightly wait longer than that.
        deadline_s = time.monotonic() + timeout_s + self._patience_s
        while True:
            try:
                return await self._client.call(request, timeout_s=timeout_s)
            except DeadlineExceeded as error:
                if time.monotonic() >= deadline_s:
                    raise DeadlineExceeded(f"{error}, for {self._patience_s:g} s") from error
