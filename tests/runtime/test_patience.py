"""Children wait for a supervisor that was paused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from async_rl.core.errors import DeadlineExceeded
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.control import GetStatus
from async_rl.runtime.patience import SupervisorCalls


class Paused:
    """A client whose supervisor answers the n-th attempt."""

    def __init__(self, answers_at: int) -> None:
        self.num_attempts = 0
        self._answers_at = answers_at

    async def call(self, request: Message, *, timeout_s: float) -> Any:
        self.num_attempts += 1
        if self.num_attempts < self._answers_at:
            await asyncio.sleep(timeout_s)
            raise DeadlineExceeded("no answer")
        return Ok()


def test_a_call_is_repeated_until_the_supervisor_runs_again() -> None:
    client: Any = Paused(answers_at=3)
    calls = SupervisorCalls(client, patience_s=60)
    assert asyncio.run(calls.call(GetStatus(), timeout_s=0.001)) == Ok()
    assert client.num_attempts == 3


def test_patience_begins_after_an_attempt_that_may_rightly_take_long() -> None:
    client: Any = Paused(answers_at=2)
    assert asyncio.run(SupervisorCalls(client, patience_s=0.01).call(GetStatus(), timeout_s=0.05))


def test_a_process_gives_up_a_supervisor_that_stays_away() -> None:
    client: Any = Paused(answers_at=10**9)
    with pytest.raises(DeadlineExceeded, match=r"no answer, for 0\.02 s"):
        asyncio.run(SupervisorCalls(client, patience_s=0.02).call(GetStatus(), timeout_s=0.005))
    assert 4 <= client.num_attempts <= 7
