"""Training runs across kills: the real order of a front, with the real learner in its process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from service_support import Clock, ids
from training_support import (
    OTHER,
    RUN,
    as_json,
    ask,
    create,
    data_request,
    done,
    equal,
    make_datum,
    make_runs,
    optim,
    started,
    weights,
)

from async_rl.core.errors import Unavailable
from async_rl.protocol.service import Execute, Executed, Operation
from async_rl.service import tenants
from async_rl.service.order import Order
from async_rl.service.store import Run, Store
from async_rl.service.training import TrainingRuns

Step = tuple[str, int, str, bytes]


def folder(directory: Path, run_id: str = RUN) -> Path:
    return directory / "runs" / run_id.replace(":", ".")


def program() -> Iterator[Step]:
    """Requests of two runs of different rank, in turn: each accumulates over two calls, steps,
    saves, loads what it saved with its moments, and goes on.
    """
    requests: list[list[Step]] = []
    for run_id, rank in ((RUN, 3), (OTHER, 5)):
        rng = np.random.default_rng(rank)
        own: list[Step] = []

        def add(
            kind: Operation, body: bytes, *, own: list[Step] = own, run_id: str = run_id
        ) -> None:
            own.append((run_id, len(own), kind, body))

        def backward(loss: str, rng: np.random.Generator = rng) -> bytes:
            return data_request([make_datum(rng, 9, loss), make_datum(rng, 14, loss)], loss)

        save = as_json(model_id=run_id, seq_id=4, path="one")
        load = as_json(path=f"tinker://{run_id}/weights/one", optimizer=run_id == RUN)
        add("create_model", create(rank=rank))
        add("forward_backward", backward("ppo"))
        add("forward_backward", backward("cispo"))
        add("optim_step", optim(run_id))
        add("save_weights", save)
        add("forward_backward", backward("ppo"))
        add("optim_step", optim(run_id, beta1=0.8))
        add("load_weights", load)
        add("forward", backward("ppo"))
        add("forward_backward", backward("importance_sampling"))
        add("optim_step", optim(run_id, weight_decay=0.1))
        requests.append(own)
    for pair in zip(*requests, strict=True):
        yield from pair


class Learner:
    """The learner as the front calls it. request_s: what a request seems to take."""

    def __init__(self, model_path: Path, directory: Path, request_s: float) -> None:
        self._model_path = model_path
        self._directory = directory
        self._request_s = request_s
        self._has_left = False
        self.clock = Clock()
        self.runs = make_runs(model_path)
        self.num_repeated = 0

    def kill(self) -> None:
        self._has_left = True
        self.runs = make_runs(self._model_path)

    async def execute(self, request: Execute) -> Executed:
        if self._has_left:
            self._has_left = False
            raise Unavailable("it left")
        self.clock.now_s += self._request_s
        is_new = request.operation not in ("restore", "save_state")
        self.num_repeated += is_new and request.step == 0
        try:
            return self.runs.execute(request)
        except KeyboardInterrupt:
            self.kill()
            raise Unavailable("it left while it wrote") from None

    async def play(self, *, kills: bool = False) -> None:
        """Send the program, each request when the one before has its answer."""
        store = Store(self._directory, now=self.clock, new_id=ids())
        backend: Any = self
        order = Order(store, backend)
        working = asyncio.create_task(order.run())
        for run_id, seq_id, kind, body in program():
            new = Run(run_id=run_id, session_id="s", lora="{}", user_metadata="{}")
            request, _ = store.put(run_id, seq_id, kind, body, new=None if seq_id else new)
            order.wake()
            answered = await store.wait(request.request_id)
            assert answered is not None
            assert answered.error == ""
            if kills:
                self.kill()
        # The runs that a kill has left come back with their next request.
        for run_id in (RUN, OTHER):
            body = data_request([make_datum(np.random.default_rng(0), 9, "ppo")], "ppo")
            request, _ = store.put(run_id, 11, "forward", body)
            order.wake()
            await store.wait(request.request_id)
        working.cancel()
        await asyncio.wait((working,))
        store.close()


@pytest.fixture(scope="module")
def undisturbed(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainingRuns:
    learner = Learner(model_path, tmp_path_factory.mktemp("undisturbed"), 0.0)
    asyncio.run(learner.play())
    return learner.runs


@pytest.mark.parametrize("request_s", [0.0, 4.0, 100.0])
async def test_a_kill_after_every_request_gives_the_same_bits(
    request_s: float, model_path: Path, tmp_path: Path, undisturbed: TrainingRuns
) -> None:
    learner = Learner(model_path, tmp_path, request_s)
    await learner.play(kills=True)
    for run_id in (RUN, OTHER):
        assert equal(weights(learner.runs, run_id), weights(undisturbed, run_id))
    # Without a state in between everything is repeated every time.
    assert (learner.num_repeated > 100) == (request_s == 0.0)


async def test_a_kill_while_a_state_or_a_checkpoint_is_written_changes_nothing(
    model_path: Path, tmp_path: Path, undisturbed: TrainingRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each directory is written twice: the first time the process ends before it has its name."""
    whole = tenants.complete
    tried = set()

    def killed(partial: Path, directory: Path, sums: Mapping[str, str]) -> None:
        if directory not in tried:
            tried.add(directory)
            raise KeyboardInterrupt
        whole(partial, directory, sums)

    monkeypatch.setattr(tenants, "complete", killed)
    learner = Learner(model_path, tmp_path, 100.0)
    await learner.play()
    assert len(tried) > 6
    for run_id in (RUN, OTHER):
        assert equal(weights(learner.runs, run_id), weights(undisturbed, run_id))


def stepped(runs: TrainingRuns, run_id: str = RUN) -> None:
    body = data_request([make_datum(np.random.default_rng(0), 9, "ppo")], "ppo")
    done(runs, "forward_backward", body, run_id=run_id)
    done(runs, "optim_step", optim(run_id), run_id=run_id)


def test_an_unloaded_run_leaves_the_model_as_it_was(model_path: Path) -> None:
    runs = make_runs(model_path)
    num_parameters = len(list(runs.policy.lm.named_parameters()))
    stepped(started(runs))
    done(runs, "unload_model")
    assert len(list(runs.policy.lm.named_parameters())) == num_parameters
    assert "does not exist" in ask(runs, "optim_step", optim()).error


@pytest.mark.parametrize("optimizer", [True, False])
def test_a_checkpoint_becomes_a_new_run_of_another_session(
    optimizer: bool, model_path: Path, tmp_path: Path
) -> None:
    runs = started(make_runs(model_path), rank=3)
    stepped(runs)
    path = folder(tmp_path) / "weights" / "w"
    done(runs, "save_weights", path=path)
    load = as_json(path="tinker://a/weights/w", optimizer=optimizer, session_id="b", model_seq_id=1)
    assert done(runs, "load_weights", load, run_id=OTHER, path=path).version == 0
    first, second = weights(runs), weights(runs, OTHER)
    moments = [name for name in first if name.endswith("exp_avg")]
    assert equal(
        {n: x for n, x in first.items() if n.endswith(".weight")},
        {n: x for n, x in second.items() if n.endswith(".weight")},
    )
    assert all(bool(second[n].any()) == (optimizer and bool(first[n].any())) for n in moments)
    stepped(runs)
    stepped(runs, OTHER)
    assert equal(weights(runs), weights(runs, OTHER)) == optimizer


def test_a_checkpoint_that_does_not_fit_is_refused(model_path: Path, tmp_path: Path) -> None:
    runs = started(make_runs(model_path), rank=3)
    path = folder(tmp_path) / "weights" / "w"
    done(runs, "save_weights", path=path)
    started(runs, OTHER, rank=5)
    before = weights(runs, OTHER)
    load = as_json(path="tinker://a/weights/w", optimizer=True)
    error = ask(runs, "load_weights", load, run_id=OTHER, path=path).error
    assert error.startswith("the checkpoint has LoraConfig(rank=3")
    assert "and this run LoraConfig(rank=5" in error
    stepped(runs, OTHER)
    body = data_request([make_datum(np.random.default_rng(1), 9, "ppo")], "ppo")
    done(runs, "forward_backward", body, run_id=OTHER)
    error = ask(runs, "load_weights", load, run_id=OTHER, path=path).error
    assert error.startswith("gradients wait for their optim_step")
    error = ask(runs, "load_weights", load, path=path.with_name("none")).error
    assert error.startswith("none cannot be read: ")
    assert error.endswith("none/sha256sums.txt cannot be read (No such file or directory)")
    (path / "state.json").write_text("{}")
    error = ask(runs, "load_weights", load, path=path).error
    assert error == "w cannot be read: state.json does not have the checksum in sha256sums.txt"
    assert not equal(weights(runs, OTHER), before)


def test_a_checkpoint_of_another_base_model_is_refused(
    model_path: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from learner_support import make_model

    runs = started(make_runs(model_path))
    path = folder(tmp_path) / "weights" / "w"
    done(runs, "save_weights", path=path)
    other = make_model(tmp_path_factory.mktemp("other"), scale=2.0)
    runs = started(make_runs(other))
    load = as_json(path="tinker://a/weights/w", optimizer=True)
    assert ask(runs, "load_weights", load, path=path).error == "w is of another base model"


def test_a_full_disk_refuses_what_is_saved(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = started(make_runs(model_path))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tenants, "complete", full)
    for operation in ("save_state", "save_weights"):
        error = ask(runs, operation, path=folder(tmp_path) / "w").error
        assert error.startswith("w could not be written: [Errno 28] No space left on device; free")
