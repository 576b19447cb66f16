"""Training runs across their states: a new process continues with the same bits, and a directory
is whole or not there.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

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
    make_datum,
    make_runs,
    optim,
    started,
    weights,
)

from async_rl.protocol.service import Operation
from async_rl.service import tenants
from async_rl.service.training import TrainingRuns


def folder(directory: Path, run_id: str = RUN) -> Path:
    return directory / "runs" / run_id.replace(":", ".")


def backward(rng: np.random.Generator, loss: str) -> tuple[Operation, bytes]:
    data = [make_datum(rng, size, loss) for size in (9, 14)]
    return "forward_backward", data_request(data, loss)


def program(run_id: str, rank: int) -> Iterator[tuple[Operation, bytes]]:
    """A run that accumulates over two calls, steps, saves, loads what it saved, and goes on."""
    rng = np.random.default_rng(rank)
    yield "create_model", create(rank=rank)
    yield backward(rng, "ppo")
    yield backward(rng, "cispo")
    yield "optim_step", optim(run_id)
    yield "save_weights", b""
    yield backward(rng, "ppo")
    yield "optim_step", optim(run_id, beta1=0.8)
    yield "load_weights", as_json(path="tinker://a/weights/w", optimizer=run_id == RUN)
    yield backward(rng, "importance_sampling")
    yield "optim_step", optim(run_id, weight_decay=0.1)


def test_a_process_that_continues_has_the_same_bits(model_path: Path, tmp_path: Path) -> None:
    """Two runs of different rank, in turn. The second time a new process restores both before each
    request that no gradients await.
    """
    ends = []
    for is_killed in (False, True):
        runs = make_runs(model_path)
        states: list[tuple[str, Path]] = []
        programs = zip(program(RUN, 3), program(OTHER, 5), strict=True)
        for index, pair in enumerate(programs):
            for run_id, (operation, body) in zip((RUN, OTHER), pair, strict=True):
                path = folder(tmp_path / str(is_killed), run_id) / "weights" / "w"
                done(runs, operation, body, run_id=run_id, path=path)
            if is_killed and pair[0][0] not in ("forward_backward", "forward"):
                states = [(it, folder(tmp_path, it) / f"state-{index}") for it in (RUN, OTHER)]
                for run_id, state in states:
                    done(runs, "save_state", run_id=run_id, path=state)
                runs = make_runs(model_path)
                for run_id, state in states:
                    done(runs, "restore", run_id=run_id, path=state)
        ends.append(weights(runs) | weights(runs, OTHER))
    assert equal(*ends)


def test_a_kill_while_a_directory_is_written_leaves_none(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, kills = tenants.complete, iter((True, False))

    def killed(partial: Path, directory: Path, sums: Mapping[str, str]) -> None:
        if next(kills):
            raise KeyboardInterrupt
        whole(partial, directory, sums)

    monkeypatch.setattr(tenants, "complete", killed)
    runs = started(make_runs(model_path))
    path = tmp_path / "state-1"
    with pytest.raises(KeyboardInterrupt):
        done(runs, "save_state", path=path)
    assert "cannot be read" in ask(make_runs(model_path), "restore", path=path).error
    stepped(runs)
    done(runs, "save_state", path=path)
    again = make_runs(model_path)
    done(again, "restore", path=path)
    assert equal(weights(again), weights(runs))


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
def test_a_checkpoint_becomes_a_new_run(optimizer: bool, model_path: Path, tmp_path: Path) -> None:
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
