"""How long the learner waits for a batch before it calls the run stuck."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from composing import compose_unchecked

from async_rl.core.errors import DeadlineExceeded
from async_rl.observability.activity import Activity
from async_rl.protocol.learner import TakeBatch, TakenGroups
from async_rl.protocol.membership import Member, Members
from async_rl.runtime.directory import Directory
from async_rl.training.device import Device
from async_rl.training.taking import Taker


class Buffer:
    """Has no batch for the first `num_refusals` requests, each of which it holds for a hundredth of
    a second.
    """

    def __init__(self, num_refusals: int) -> None:
        self._left = num_refusals

    async def call(self, request: TakeBatch, *, wait_s: float) -> TakenGroups:
        await asyncio.sleep(0.01)
        self._left -= 1
        return TakenGroups(
            groups=[] if self._left >= 0 else ["the batch"], waits_for="3 of 4 groups"
        )  # type: ignore[list-item]


def take(timeout_s: float, *roles: str, device: Device | None = None, first: int = 5) -> Any:
    directory = Directory()
    members = [
        Member(name=role, role=role, pid=1, address="a", state="", since_s=0) for role in roles
    ]
    directory.update(Members(revision=1, members=members))
    waits_s: list[float] = []

    async def fetch(heads: object, version: int, *, life: int, timeout_s: float) -> None:
        waits_s.append(timeout_s)

    context: Any = SimpleNamespace(
        config=compose_unchecked(
            "grpo_code", [f"timeouts.start_s={0.3 * timeout_s}", "weights.push_every_steps=3"]
        ),
        run_dir=Path("run"),
        incarnation="life",
        host="127.0.0.1",
        activity=Activity(),
        directory=directory,
        call_buffer=Buffer(num_refusals=60).call,
    )
    taker = Taker(context, device or Device(), fetch, life=0)
    return asyncio.run(taker.take(first)), waits_s


@pytest.mark.proves("timeouts.start_s")
def test_a_batch_later_than_the_timeout_ends_the_run_with_what_the_buffer_waits_for() -> None:
    with pytest.raises(
        DeadlineExceeded,
        match=r"no batch for version 5 within 0\.1 s .*the buffer waits for 3 of 4 groups",
    ):
        take(0.1, "generator")
    assert take(60, "generator") == ([["the batch"]], [2 * 18.0])


def test_without_any_generator_the_learner_waits_for_as_long_as_nobody_asks_for_one() -> None:
    assert take(0.1) == ([["the batch"]], [2 * 0.03])


def test_a_shared_device_takes_the_batches_of_all_steps_up_to_the_next_push() -> None:
    device = Device()
    assert take(60, "generator", device=device, first=4)[0] == [["the batch"]]
    device.is_shared = True
    taken, waits_s = take(60, "generator", device=device, first=4)
    assert len(taken) == len(waits_s) == 2
