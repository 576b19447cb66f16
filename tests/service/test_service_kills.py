"""The front, the learner or both are killed at every point of a program whose client repeats what
it got no answer to: the same end state and the same answers as without a kill.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from service_support import Front, Played, client_of, open_desk

from async_rl.service.desk import Desk
from async_rl.service.store import Checkpoint, Request, Sampler, Session

SESSION = "0123456789abcdef"


class Killed(Exception):
    pass


async def program(api: Front) -> dict[str, Any]:
    """Two runs, one with samples and checkpoints; all on their way before the first answer."""
    runs = [f"{api.session_id}:train:{index}" for index in range(2)]
    for index in range(2):
        created = await api.http.post(
            "create_model",
            json={
                "session_id": api.session_id,
                "model_seq_id": index,
                "base_model": "local/tiny",
                "lora_config": {"rank": 8},
            },
        )
        assert created.status_code == 200, created.text
    first, second = runs
    adam = {"adam_params": {"learning_rate": 0.5}}
    ids = {
        "batch 1": await api.batch(first, 1, [1, 2, 3]),
        # Refused, which changes nothing and is not repeated.
        "wrong": await api.batch(first, 2, [1, 2], loss="unknown"),
        "step 3": await api.post("optim_step", model_id=first, seq_id=3, **adam),
        "batch 4": await api.batch(first, 4, [4, 5], [6]),
        "other 1": await api.batch(second, 1, [7, 8, 9, 10]),
        "step 5": await api.post("optim_step", model_id=first, seq_id=5, **adam),
        "forward": await api.batch(first, 6, [1, 2], forward_only=True),
        "save": await api.post("save_weights", model_id=first, seq_id=7, path="one"),
        "inflight": await api.post(
            "save_weights_for_sampler",
            model_id=first,
            seq_id=8,
            sampling_session_seq_id=0,
            kind="inflight",
        ),
        "batch 9": await api.batch(first, 9, [11, 12]),
        "other 2": await api.post("optim_step", model_id=second, seq_id=2, **adam),
        "step 10": await api.post("optim_step", model_id=first, seq_id=10, **adam),
    }
    answers = {name: await api.wait(request_id) for name, request_id in ids.items()}
    path = answers["save"].json()["path"]
    load = {"path": path, "optimizer": True, "model_id": second, "seq_id": 3}
    more = {
        "load": await api.post("load_weights", **load),
        "sample": await api.post(
            "asample",
            sampling_session_id=f"{api.session_id}:sample:0",
            seq_id=0,
            num_samples=2,
            prompt={"chunks": [{"tokens": [1, 2, 3]}]},
            sampling_params={"max_tokens": 3},
        ),
        "other 4": await api.batch(second, 4, [1, 2]),
    }
    answers |= {name: await api.wait(request_id) for name, request_id in more.items()}
    return {name: reply.content for name, reply in answers.items()}


async def touch(api: Front) -> dict[str, Any]:
    """Requests that change nothing."""
    ids = [
        await api.batch(f"{SESSION}:train:0", 11, [1], forward_only=True),
        await api.batch(f"{SESSION}:train:1", 5, [1], forward_only=True),
    ]
    return {f"last {index}": (await api.wait(it)).content for index, it in enumerate(ids)}


Program = Callable[[Front], Awaitable[dict[str, Any]]]


async def live(
    directory: Path, played: Played, life: int, work: Program, stop_after: int | None = None
) -> dict[str, Any] | None:
    """One life of the front, which is dropped without a word. Returns the answers,
    None if it was killed before. stop_after: turns of the loop.
    """
    desk = open_desk(directory, played, prefix=f"{life}-")
    working = asyncio.create_task(desk.run())
    async with client_of(desk) as http:
        api = Front(http, desk)
        api.session_id = SESSION
        running = asyncio.create_task(work(api))
        if stop_after is None:
            await asyncio.wait((running, working), return_when=asyncio.FIRST_COMPLETED)
        else:
            for _ in range(stop_after):
                await asyncio.sleep(0)
        result = running.result() if running.done() else None
        for task in (running, working):
            task.cancel()
        ended = await asyncio.gather(running, working, return_exceptions=True)
    # The kernel does this for a process that was killed. The connection stays as it is.
    desk.store._lock.close()
    for error in ended:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        assert not isinstance(error, Exception) or isinstance(error, Killed), error
    return result


def state_of(desk: Desk, played: Played, runs: list[str]) -> dict[str, Any]:
    """What must be the same. saved: the states of all checkpoints and adapters."""
    rows = desk.store.all(Checkpoint, "TRUE ORDER BY path, directory")
    requests = desk.store.all(Request, "TRUE")
    assert len({request.request_id for request in requests}) == len(requests)
    return {
        "chains": [(played.memory[run].chain, played.memory[run].version) for run in runs],
        "requests": sorted((it.owner, it.seq_id, it.kind, it.error) for it in requests),
        "saved": [(row.path, (Path(row.directory) / "state.json").read_text()) for row in rows],
        "samplers": desk.store.all(Sampler, "TRUE"),
    }


async def end_of(
    directory: Path, played: Played, *, on_life: Callable[[int], int | None] = lambda _: None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Live until the program has ended. Returns its answers and the state."""
    desk = open_desk(directory, played)
    desk.store.add(Session(session_id=SESSION, display_name=None, user_metadata="{}"))
    desk.store.close()
    answers, life = None, 0
    while answers is None:
        assert life < 10
        answers = await live(directory, played, life, program, on_life(life))
        life += 1
    # A killed learner gets its requests again with the next one.
    played.on = lambda name, value: None
    last = await live(directory, played, life, touch)
    assert last is not None
    desk = open_desk(directory, played)
    runs = [f"{SESSION}:train:{index}" for index in range(2)]
    state = state_of(desk, played, runs)
    desk.store.close()
    return {**answers, **last}, relative(state, directory)


def relative(value: Any, directory: Path) -> Any:
    return repr(value).replace(str(directory), "")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, int]:
    """The end without a kill, and the number of calls of the processes."""
    played = Killing(10**6, "nobody")
    return asyncio.run(end_of(tmp_path_factory.mktemp("undisturbed"), played)), played.num_calls


class Killing(Played):
    """Kills at a call, once."""

    def __init__(self, kill_at: int, who: str) -> None:
        # Two requests between two states.
        super().__init__(request_s=6.0)
        self.num_calls = 0
        self.at = ""
        self._kill_at = kill_at
        self._who = who
        self.on = self._called

    def _called(self, name: str, _: Any) -> None:
        self.num_calls += 1
        if self.num_calls == self._kill_at:
            self.at = name
            if self._who != "front":
                self.kill_learner()
            if self._who != "learner":
                raise Killed


@pytest.mark.parametrize("who", ["front", "learner", "both"])
def test_a_kill_at_any_call_changes_neither_the_answers_nor_the_end(
    undisturbed: tuple[Any, int], who: str, tmp_path: Path
) -> None:
    end, num_calls = undisturbed
    assert num_calls > 30
    for kill_at in range(1, num_calls + 1):
        played = Killing(kill_at, who)
        found = asyncio.run(end_of(tmp_path / f"{kill_at}", played))
        assert found == end, f"{who} killed at call {kill_at}, {played.at}"
        assert played.at


def test_a_front_that_is_dropped_after_any_turn_of_its_loop_continues(
    undisturbed: tuple[Any, int], tmp_path: Path
) -> None:
    end, _ = undisturbed
    for turns in range(0, 400, 19):
        played = Played(request_s=6.0)
        lives = {0: turns}
        found = asyncio.run(end_of(tmp_path / f"{turns}", played, on_life=lives.get))
        assert found == end, f"dropped after {turns} turns"
