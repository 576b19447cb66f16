"""Order, exactly-once and futures of training runs, over the real app with a played learner."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from service_support import (
    Clock,
    Played,
    batch,
    front,
    ids,
    open_desk,
)

from async_rl.service.proto import ForwardBackwardRequest
from async_rl.service.store import Session, Store


async def test_the_requests_of_a_run_are_executed_in_the_order_of_their_numbers(
    tmp_path: Path,
) -> None:
    played = Played()
    async with front(tmp_path, played) as api:
        run = await api.create()
        third = await api.post("optim_step", model_id=run, seq_id=3, adam_params={})
        second = await api.batch(run, 2, [1, 2, 3])
        assert (await api.retrieve(third))["type"] == "try_again"
        assert played.executed == [(run, 0, "create_model")]
        first = await api.batch(run, 1, [4, 5])
        assert (await api.result(third))["metrics"]
        for request_id in (first, second):
            assert (await api.forward_backward_result(request_id)).metrics["loss:sum"]
    assert played.executed == [
        (run, 0, "create_model"),
        (run, 1, "forward_backward"),
        (run, 2, "forward_backward"),
        (run, 3, "optim_step"),
    ]


async def test_the_same_number_has_one_request_and_another_body_is_a_conflict(
    tmp_path: Path,
) -> None:
    played = Played()
    async with front(tmp_path, played) as api:
        run = await api.create()
        step = {"model_id": run, "seq_id": 1, "adam_params": {"learning_rate": 0.5}}
        first = await api.post("optim_step", **step)
        await api.result(first)
        assert await api.post("optim_step", **step) == first
        other = {**step, "adam_params": {"learning_rate": 0.25}}
        refused = await api.http.post("optim_step", json=other)
        assert refused.status_code == 409
        assert "number 1" in refused.json()["detail"]
        # The number is the same, the operation is not.
        assert (await api.http.post("save_weights", json=step)).status_code == 409
        await api.create(model_seq_id=0)
    assert [entry[1:] for entry in played.executed] == [(0, "create_model"), (1, "optim_step")]


async def test_a_refused_request_takes_its_number_and_changes_nothing(tmp_path: Path) -> None:
    played = Played()
    async with front(tmp_path, played) as api:
        run = await api.create()
        wrong = await api.post("optim_step", model_id=run, seq_id=1, adam_params={"beta1": 2})
        unpublished = await api.batch(run, 2, [1, 2], loss="stable_reinforce")
        unknown = await api.batch(run, 3, [1, 2], loss="grpo")
        right = await api.batch(run, 4, [1, 2])
        for request_id, text in (
            (wrong, "beta1"),
            (unpublished, "its formula is not published"),
            (unknown, "unknown loss 'grpo'"),
        ):
            answer = await api.result(request_id)
            assert answer["category"] == "user"
            assert text in answer["error"]
        assert await api.forward_backward_result(right)
    assert played.memory[run].seq_id == 4


async def test_the_run_with_the_least_work_is_next(tmp_path: Path) -> None:
    played = Played()
    desk = open_desk(tmp_path, played)
    async with front(tmp_path, played, desk=desk) as api:
        big, small = await api.create(), await api.create(model_seq_id=1)
        held = asyncio.Event()
        played.gate = held
        requests = [await api.batch(big, seq, list(range(30))) for seq in range(1, 4)]
        requests += [await api.batch(small, seq, [1, 2]) for seq in range(1, 9)]
        held.set()
        played.gate = None
        for request_id in requests:
            await api.forward_backward_result(request_id)
    order = [run == big for run, seq, _ in played.executed if seq]
    # 30 tokens of the one run, then as many of the other run's as there are: 8 times 2.
    assert order == [True, *[False] * 8, True, True]


async def test_a_waiting_client_has_the_answer_as_soon_as_it_is_there(tmp_path: Path) -> None:
    played = Played()
    async with front(tmp_path, played, desk=open_desk(tmp_path, played, poll_s=1e9)) as api:
        run = await api.create()
        played.gate = asyncio.Event()
        request_id = await api.post("optim_step", model_id=run, seq_id=1, adam_params={})
        waiting = asyncio.create_task(api.result(request_id))
        await api.settle()
        assert not waiting.done()
        played.gate.set()
        assert (await waiting)["metrics"]


async def test_a_run_that_paused_has_no_credit(tmp_path: Path) -> None:
    played = Played()
    async with front(tmp_path, played) as api:
        big, small = await api.create(), await api.create(model_seq_id=1)
        for seq_id in range(1, 4):
            await api.forward_backward_result(await api.batch(big, seq_id, list(range(30))))
        held = played.gate = asyncio.Event()
        requests = [await api.batch(big, seq, list(range(30))) for seq in (4, 5)]
        requests += [await api.batch(small, seq, [1, 2]) for seq in range(1, 21)]
        held.set()
        played.gate = None
        for request_id in requests:
            await api.forward_backward_result(request_id)
    order = [run == big for run, seq, _ in played.executed[5:]]
    # Both continue at 90 tokens; 15 times 2 are as many as the next 30 of the other run.
    assert order == [True, *[False] * 15, True, *[False] * 5]


async def test_the_order_of_fields_makes_no_other_batch(tmp_path: Path) -> None:
    async with front(tmp_path, Played()) as api:
        run = await api.create()
        parts = [
            ForwardBackwardRequest(loss_fn_config={name: 1.0}).SerializeToString()
            for name in ("low", "high")
        ]
        ids = set()
        for order in (parts, parts[::-1]):
            body = batch(run, 1, [1, 2]) + b"".join(order)
            reply = await api.http.post("forward_backward", content=body)
            ids.add(reply.json()["request_id"])
        assert len(ids) == 1


def opened(directory: Path) -> Store:
    return Store(directory, now=Clock(), new_id=ids(), poll_s=0.0)


def test_a_block_that_raises_leaves_no_row(tmp_path: Path) -> None:
    store = opened(tmp_path)
    session = Session(session_id="a", display_name=None, user_metadata="{}")

    def change() -> None:
        with store.transaction():
            store.add(session)
            raise KeyError

    with pytest.raises(KeyError):
        change()
    assert store.all(Session, "TRUE") == []
    with store.transaction():
        store.add(session)
    store.close()
    again = opened(tmp_path)
    assert again.all(Session, "TRUE") == [session]
    again.close()
