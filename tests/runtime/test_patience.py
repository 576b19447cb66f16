"""Children wait for a supervisor that was paused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from async_rl.core.errors import DeadlineExceeded, RestartNeeded, SupervisorLost
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.control import GetStatus
from async_rl.runtime.directory import SupervisorCalls


class Paused:
    """A client whose supervisor answers the n-th attempt. It is the clock, too: an attempt takes
    its time limit, also on a busy machine.
    """

    def __init__(self, answers_at: int) -> None:
        self.num_attempts = 0
        self.now_s = 0.0
        self._answers_at = answers_at

    def monotonic(self) -> float:
        return self.now_s

    async def call(self, request: Message, *, timeout_s: float) -> Any:
        self.num_attempts += 1
        if self.num_attempts < self._answers_at:
            self.now_s += timeout_s
            raise DeadlineExceeded("no answer")
        return Ok()


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Any]:
    def make(answers_at: int) -> Any:
        client = Paused(answers_at)
        monkeypatch.setattr("async_rl.runtime.directory.time", client)
        return client

    return make


async def test_a_call_is_repeated_until_the_supervisor_runs_again(
    paused: Callable[[int], Any],
) -> None:
    client = paused(3)
    calls = SupervisorCalls(client, call_s=1, patience_s=60)
    assert await calls.call(GetStatus()) == Ok()
    assert client.num_attempts == 3


async def test_patience_begins_after_an_attempt_that_may_rightly_take_long(
    paused: Callable[[int], Any],
) -> None:
    calls = SupervisorCalls(paused(2), call_s=1, patience_s=1)
    assert await calls.call(GetStatus(), wait_s=4) == Ok()


async def test_a_process_gives_up_a_supervisor_that_stays_away(
    paused: Callable[[int], Any],
) -> None:
    client = paused(10**9)
    # A cut network looks the same: a supervisor that still runs starts the process again.
    assert issubclass(SupervisorLost, RestartNeeded)
    with pytest.raises(SupervisorLost, match=r"no answer, for 20 s"):
        await SupervisorCalls(client, call_s=5, patience_s=20).call(GetStatus())
    assert client.num_attempts == 5
