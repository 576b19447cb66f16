"""Order, exactly-once and futures of training runs, over the real app with a played learner."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from service_support import MODEL, Played, batch, folder, front, open_desk

from async_rl.service.proto import ForwardBackwardRequest
from async_rl.service.store import Request


async def test_another_body_with_the_same_number_is_a_conflict(tmp_path: Path) -> None:
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
    assert played.memory[run].chain


async def test_the_run_with_the_least_work_is_next_and_a_pause_is_no_credit(tmp_path: Path) -> None:
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


async def test_bodies_are_kept_until_two_states_have_them(tmp_path: Path) -> None:
    played = Played(request_s=6.0)
    async with front(tmp_path, played) as api:
        run = await api.create()
        kept, states = [], []
        for seq_id in range(1, 9):
            if seq_id == 5:
                await api.wait(await api.batch(run, seq_id, [1]))
            else:
                await api.result(await api.step(run, seq_id))
            await api.settle()
            rows = api.desk.store.all(Request, "body IS NOT NULL ORDER BY seq_id")
            kept.append([row.seq_id for row in rows])
            folders = (tmp_path / "runs" / folder(run)).glob("state-*")
            states.append(sorted(int(it.name.removeprefix("state-")) for it in folders))
    # 12 s of work since the newest state, and no gradient that waits for its step.
    assert states == [[1], [1], [1, 3], [1, 3], [1, 3], [3, 6], [3, 6], [6, 8]]
    firsts = [0, 0, 2, 2, 2, 4, 4, 7]
    assert kept == [list(range(first, last + 1)) for last, first in enumerate(firsts, 1)]


async def test_a_damaged_state_is_passed_over_and_two_are_a_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    played = Played(request_s=6.0)
    async with front(tmp_path, played) as api:
        run, session_id = await api.create(), api.session_id
        for seq_id in range(1, 6):
            await api.result(await api.step(run, seq_id))
        chain = played.memory[run].chain
    states = tmp_path / "runs" / folder(run)

    async def after(damaged: str, seq_id: int, life: str) -> dict[str, Any]:
        played.kill_learner()
        (states / damaged / "state.json").unlink()
        desk = open_desk(tmp_path, played, prefix=life)
        async with front(tmp_path, played, desk=desk) as api:
            api.session_id = session_id
            answer = await api.wait(await api.batch(run, seq_id, [1], forward_only=True))
            is_json = answer.headers["content-type"] == "application/json"
            return answer.json() if is_json else {}

    assert await after("state-5", 6, "2-") == {}
    assert played.memory[run].chain == chain
    assert sorted(it.name for it in states.glob("*state-*")) == ["damaged-state-5", "state-3"]
    assert "state-5 is damaged" in caplog.text
    error = (await after("state-3", 7, "3-"))["error"]
    assert error == f"{run} is lost: state-3 is damaged; load its newest checkpoint"


async def test_runs_of_all_weights_take_turns_and_other_ranks_are_refused(tmp_path: Path) -> None:
    played = Played(request_s=1.0)
    desk = open_desk(tmp_path, played, model=dataclasses.replace(MODEL, most_rank=0))
    async with front(tmp_path, played, desk=desk) as api:
        with pytest.raises(AssertionError, match="rank=8 is not trained here"):
            await api.create()
        first = await api.create(lora_config=None)
        second = await api.create(1, lora_config={"rank": 0})
        asked = []
        for seq_id in range(1, 4):
            for run in (first, second):
                asked.append(await api.batch(run, seq_id, [1, 2]))
        for request_id in asked:
            await api.forward_backward_result(request_id)
        assert list(played.memory) == [second]
        info = (await api.http.post("get_info", json={"model_id": first})).json()
        assert (info["is_lora"], info["lora_rank"]) == (False, 0)
    # The gradients of a run that left are computed again before its next request.
    order = [(run == second, seq_id) for run, seq_id, _ in played.executed]
    assert order[:8] == [
        *((False, 0), (True, 0)),
        *((False, 1), (True, 1)),
        *((False, 1), (False, 2), (True, 1), (True, 2)),
    ]
