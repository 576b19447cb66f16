"""How the learner takes batches."""

from types import SimpleNamespace
from typing import Any

import pytest
from composing import compose_unchecked

from async_rl.protocol.buffer import TakeBatch, TakenGroups
from async_rl.training.device import Device
from async_rl.training.taking import Taker


@pytest.mark.parametrize(("is_shared", "first", "num_batches"), [(False, 4, 1), (True, 4, 2)])
async def test_a_batch_is_requested_until_it_is_ready_and_on_a_shared_device_all_to_the_next_push(
    is_shared: bool, first: int, num_batches: int
) -> None:
    answers: list[Any] = [[], [], ["one"], [], ["two"]]
    asked: list[int] = []
    fetched: list[tuple[object, int, float]] = []

    async def call_buffer(request: TakeBatch, *, wait_s: float) -> TakenGroups:
        asked.append(request.train_version)
        return TakenGroups(groups=answers.pop(0))

    async def fetch(heads: object, version: int, *, life: int, timeout_s: float) -> None:
        fetched.append((heads, version, timeout_s))

    settings = ["timeouts.start_s=18", "weights.push_every_steps=3"]
    config = compose_unchecked("grpo_code", settings)
    context: Any = SimpleNamespace(config=config, call_buffer=call_buffer)
    device = Device()
    device.is_shared = is_shared
    taken = await Taker(context, device, fetch, life=0).take(first)
    assert taken == [["one"], ["two"]][:num_batches]
    assert fetched == [(["one"], 4, 36.0), (["two"], 5, 36.0)][:num_batches]
    assert asked == [4, 4, 4, 5, 5][: 1 + 2 * num_batches]
