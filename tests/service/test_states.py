"""Training runs across kills: the front's part is played by sending again what no state covers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest
from training_support import (
    OTHER,
    RUN,
    as_json,
    ask,
    create,
    data_request,
    done,
    equal,
    gradients,
    make_datum,
    make_runs,
    optim,
    started,
    weights,
)

from async_rl.core.errors import DataError
from async_rl.protocol.service import CHANGING, Execute, Operation
from async_rl.service import states
from async_rl.service.training import TrainingRuns


def folder(directory: Path, run_id: str = RUN) -> Path:
    return directory / run_id.replace(":", ".")


def program(directory: Path) -> Iterator[Execute]:
    """Requests of two runs of different rank, in turn: each accumulates over two calls, steps,
    saves, loads what it saved with its moments, and goes on.
    """
    requests: list[list[Execute]] = []
    for run_id, rank in ((RUN, 3), (OTHER, 5)):
        rng = np.random.default_rng(rank)
        path = str(folder(directory, run_id) / "weights" / "one")
        own: list[Execute] = []

        def add(
            operation: Operation,
            body: bytes,
            path: str = "",
            *,
            own: list[Execute] = own,
            run_id: str = run_id,
        ) -> None:
            own.append(
                Execute(run_id=run_id, seq_id=len(own), operation=operation, body=body, path=path)
            )

        def backward(loss: str, rng: np.random.Generator = rng) -> bytes:
            return data_request([make_datum(rng, 9, loss), make_datum(rng, 14, loss)], loss)

        load = as_json(path="tinker://x/weights/one", optimizer=run_id == RUN)
        add("create_model", create(rank=rank))
        add("forward_backward", backward("ppo"))
        add("forward_backward", backward("cispo"))
        add("optim_step", optim(run_id))
        add("save_weights", b"", path)
        add("forward_backward", backward("ppo"))
        add("optim_step", optim(run_id, beta1=0.8))
        add("load_weights", load, path)
        add("forward", backward("ppo"))
        add("forward_backward", backward("importance_sampling"))
        add("optim_step", optim(run_id, weight_decay=0.1))
        requests.append(own)
    for pair in zip(*requests, strict=True):
        yield from pair


class Front:
    """Sends requests in order, and after a kill those again that the learner does not have."""

    def __init__(self, model_path: Path, directory: Path, step_s: float) -> None:
        self._model_path = model_path
        self._directory = directory
        self._step_s = step_s
        self._sent: list[Execute] = []
        self._answers: dict[tuple[str, int], bytes] = {}
        self._covered = {RUN: -1, OTHER: -1}
        self.num_repeated = 0
        self.runs = self._start()

    def _start(self) -> TrainingRuns:
        runs = make_runs(self._model_path, self._directory, step_s=self._step_s)
        for run_id in (RUN, OTHER):
            runs.position(run_id)
        return runs

    def send(self, request: Execute) -> None:
        executed = self.runs.execute(request)
        assert executed.error == ""
        self._sent.append(request)
        self._answers[request.run_id, request.seq_id] = executed.body
        self._covered[request.run_id] = executed.saved_seq_id

    def kill(self) -> None:
        """All memory of the learner is lost; bodies that states cover are gone."""
        self.runs = self._start()
        for request in self._sent:
            position = self.runs.position(request.run_id)
            if request.operation in CHANGING and request.seq_id > position.seq_id:
                assert request.seq_id > self._covered[request.run_id]
                executed = self.runs.execute(request)
                assert executed.body == self._answers[request.run_id, request.seq_id]
                self.num_repeated += 1


@pytest.fixture(scope="module")
def undisturbed(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainingRuns:
    directory = tmp_path_factory.mktemp("undisturbed")
    front = Front(model_path, directory, 0.0)
    for request in program(directory):
        front.send(request)
    return front.runs


@pytest.mark.parametrize("step_s", [0.0, 4.0, 100.0])
def test_a_kill_after_every_request_gives_the_same_bits(
    step_s: float, model_path: Path, tmp_path: Path, undisturbed: TrainingRuns
) -> None:
    """step_s: how long a request seems to take, so how often a state is saved."""
    front = Front(model_path, tmp_path, step_s)
    for request in program(tmp_path):
        front.send(request)
        front.kill()
    for run_id in (RUN, OTHER):
        assert equal(weights(front.runs, run_id), weights(undisturbed, run_id))
        assert front.runs.position(run_id) == undisturbed.position(run_id)
    # Without a state in between everything is repeated every time.
    assert (front.num_repeated > 60) == (step_s == 0.0)


def test_a_kill_while_a_state_is_written_changes_nothing(
    model_path: Path, tmp_path: Path, undisturbed: TrainingRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each directory is written twice: the first time the process ends before it has its name."""
    front = Front(model_path, tmp_path, 100.0)
    whole = states.complete
    tried = set()

    def killed(partial: Path, directory: Path, sums: Mapping[str, str]) -> None:
        if directory not in tried:
            tried.add(directory)
            raise KeyboardInterrupt
        whole(partial, directory, sums)

    monkeypatch.setattr(states, "complete", killed)
    for request in program(tmp_path):
        # A repetition may reach a directory that was not written yet.
        while True:
            try:
                front.send(request)
                break
            except KeyboardInterrupt:
                front.kill()
    assert len(tried) > 10
    for run_id in (RUN, OTHER):
        assert equal(weights(front.runs, run_id), weights(undisturbed, run_id))


def test_a_damaged_state_is_passed_over_and_its_requests_are_repeated(
    model_path: Path, tmp_path: Path, undisturbed: TrainingRuns
) -> None:
    front = Front(model_path, tmp_path, 100.0)
    for request in program(tmp_path):
        front.send(request)
    newest, older = sorted(
        folder(tmp_path).glob("state-*"), key=lambda p: -int(p.name.removeprefix("state-"))
    )
    file = newest / "state.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    front.kill()
    assert (newest.with_name(f"damaged-{newest.name}")).exists()
    assert front.num_repeated == 2
    assert equal(weights(front.runs), weights(undisturbed))
    shutil.rmtree(newest, ignore_errors=True)
    (older / "state.json").write_text("{}")
    with pytest.raises(DataError, match=r"state-7 cannot be read: state\.json does not have"):
        make_runs(model_path, tmp_path).position(RUN)


def stepped(runs: TrainingRuns, run_id: str = RUN, *, first: int = 1) -> None:
    body = data_request([make_datum(np.random.default_rng(0), 9, "ppo")], "ppo")
    done(runs, first, "forward_backward", body, run_id=run_id)
    done(runs, first + 1, "optim_step", optim(run_id), run_id=run_id)


def test_a_released_run_is_on_the_disk_and_comes_back(model_path: Path, tmp_path: Path) -> None:
    runs = started(make_runs(model_path, tmp_path))
    stepped(runs)
    before = weights(runs)
    num_tensors = len(list(runs._policy.lm.named_parameters()))
    runs.release(RUN)
    assert len(list(runs._policy.lm.named_parameters())) == num_tensors - len(before) // 4
    assert runs.position(RUN).seq_id == 2
    assert equal(weights(runs), before)
    # Gradients wait for their step: the state is the one before them, and the rest is repeated.
    body = data_request([make_datum(np.random.default_rng(1), 9, "ppo")], "ppo")
    done(runs, 3, "forward_backward", body)
    runs.close()
    again = make_runs(model_path, tmp_path)
    assert again.position(RUN).seq_id == 2
    assert gradients(again) == {}


def test_an_unloaded_run_drops_its_gradients_and_answers_again(
    model_path: Path, tmp_path: Path
) -> None:
    runs = started(make_runs(model_path, tmp_path))
    stepped(runs)
    body = data_request([make_datum(np.random.default_rng(1), 9, "ppo")], "ppo")
    done(runs, 3, "forward_backward", body)
    done(runs, 4, "unload_model")
    assert runs.position(RUN).seq_id == 4
    assert gradients(runs) == {}
    assert done(runs, 4, "unload_model").version == 1


def test_a_step_is_answered_again_after_a_kill(model_path: Path, tmp_path: Path) -> None:
    runs = started(make_runs(model_path, tmp_path, step_s=100.0))
    body = data_request([make_datum(np.random.default_rng(0), 9, "ppo")], "ppo")
    done(runs, 1, "forward_backward", body)
    first = done(runs, 2, "optim_step", optim())
    again = make_runs(model_path, tmp_path)
    again.position(RUN)
    assert msgspec.structs.replace(done(again, 2, "optim_step", optim()), saved_seq_id=-1) == (
        msgspec.structs.replace(first, saved_seq_id=-1)
    )


def test_steps_of_all_runs_are_counted_on_in_the_next_life(
    model_path: Path, tmp_path: Path
) -> None:
    runs = started(started(make_runs(model_path, tmp_path, step_s=100.0)), OTHER)
    for first in (1, 3):
        stepped(runs, first=first)
    stepped(runs, OTHER)
    runs.release(RUN)
    runs.position(RUN)
    stepped(runs, first=5)
    assert [step for step, _ in runs.reports] == [1, 2, 3, 4]
    again = make_runs(model_path, tmp_path)
    again.position(OTHER)
    stepped(again, OTHER, first=3)
    assert [step for step, _ in again.reports] == [5]


@pytest.mark.parametrize("optimizer", [True, False])
def test_a_checkpoint_becomes_a_new_run_of_another_session(
    optimizer: bool, model_path: Path, tmp_path: Path
) -> None:
    runs = started(make_runs(model_path, tmp_path), rank=3)
    stepped(runs)
    path = folder(tmp_path) / "weights" / "w"
    done(runs, 3, "save_weights", path=path)
    assert runs.position(OTHER).seq_id == -1
    load = as_json(path="tinker://a/weights/w", optimizer=optimizer, session_id="b", model_seq_id=1)
    assert done(runs, 0, "load_weights", load, run_id=OTHER, path=path).version == 0
    first, second = weights(runs), weights(runs, OTHER)
    moments = [name for name in first if name.endswith("exp_avg")]
    assert equal(
        {n: x for n, x in first.items() if n.endswith(".weight")},
        {n: x for n, x in second.items() if n.endswith(".weight")},
    )
    assert all(bool(second[n].any()) == (optimizer and bool(first[n].any())) for n in moments)
    stepped(runs, first=4)
    stepped(runs, OTHER)
    assert equal(weights(runs), weights(runs, OTHER)) == optimizer


def test_a_checkpoint_that_does_not_fit_is_refused(model_path: Path, tmp_path: Path) -> None:
    runs = started(make_runs(model_path, tmp_path), rank=3)
    path = folder(tmp_path) / "weights" / "w"
    done(runs, 1, "save_weights", path=path)
    started(runs, OTHER, rank=5)
    before = weights(runs, OTHER)
    load = as_json(path="tinker://a/weights/w", optimizer=True)
    error = ask(runs, 1, "load_weights", load, run_id=OTHER, path=path).error
    assert error.startswith("the checkpoint has LoraConfig(rank=3")
    assert "and this run LoraConfig(rank=5" in error
    stepped(runs, OTHER)
    body = data_request([make_datum(np.random.default_rng(1), 9, "ppo")], "ppo")
    done(runs, 3, "forward_backward", body, run_id=OTHER)
    error = ask(runs, 4, "load_weights", load, run_id=OTHER, path=path).error
    assert error.startswith("gradients wait for their optim_step")
    error = ask(runs, 2, "load_weights", load, path=path.with_name("none")).error
    assert error.startswith("none cannot be read: ")
    assert error.endswith("none/sha256sums.txt cannot be read (No such file or directory)")
    (path / "state.json").write_text("{}")
    error = ask(runs, 2, "load_weights", load, path=path).error
    assert error == "w cannot be read: state.json does not have the checksum in sha256sums.txt"
    assert not equal(weights(runs, OTHER), before)


def test_a_checkpoint_of_another_base_model_is_refused(
    model_path: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from learner_support import make_model

    runs = started(make_runs(model_path, tmp_path))
    path = folder(tmp_path) / "weights" / "w"
    done(runs, 1, "save_weights", path=path)
    other = make_model(tmp_path_factory.mktemp("other"), scale=2.0)
    runs = started(make_runs(other, tmp_path / "2"))
    load = as_json(path="tinker://a/weights/w", optimizer=True)
    assert ask(runs, 1, "load_weights", load, path=path).error == "w is of another base model"


def test_a_full_disk_refuses_what_is_saved_and_leaves_the_runs(
    model_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runs = started(make_runs(model_path, tmp_path, step_s=100.0))
    stepped(runs)
    whole = states.complete

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(states, "complete", full)
    path = folder(tmp_path) / "weights" / "w"
    error = ask(runs, 3, "save_weights", path=path).error
    assert error.startswith("w could not be written: [Errno 28] No space left on device; free disk")
    stepped(runs, first=4)
    assert "state-5 could not be written" in caplog.text
    before = weights(runs)
    # What is on the disk is as old as before, so the front sends the rest again.
    again = make_runs(model_path, tmp_path)
    assert again.position(RUN).seq_id == 2
    monkeypatch.setattr(states, "complete", whole)
    stepped(again, first=4)
    assert equal(weights(again), before)
    assert done(runs, 6, "save_weights", path=path).error == ""
