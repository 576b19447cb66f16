"""How the learner takes batches."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from composing import compose_unchecked

from async_rl.observability.activity import Activity
from async_rl.protocol.learner import TakeBatch, TakenGroups
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
        return TakenGroups(groups=[] if self._left >= 0 else ["the batch"])  # type: ignore[list-item]


def take(timeout_s: float, *, device: Device | None = None, first: int = 5) -> Any:
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
        call_buffer=Buffer(num_refusals=60).call,
    )
    taker = Taker(context, device or Device(), fetch, life=0)
    return asyncio.run(taker.take(first)), waits_s


def test_a_batch_is_requested_until_it_is_ready() -> None:
    assert take(60) == ([["the batch"]], [2 * 18.0])


def test_a_shared_device_takes_the_batches_of_all_steps_up_to_the_next_push() -> None:
    device = Device()
    assert take(60, device=device, first=4)[0] == [["the batch"]]
    device.is_shared = True
    taken, waits_s = take(60, device=device, first=4)
    assert len(taken) == len(waits_s) == 2
