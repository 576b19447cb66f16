"""What stands in the way of a run that goes on: each is told in one clear sentence, and nothing
that the run had is lost.

A store that others hold, ports that are taken, permissions that are missing, a checkpoint that
cannot be read or is of another model, a machine that is gone with all that was on it. All happen to
copies of one run that has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_support import SMALL, LiveRun
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

from async_rl.core.checksums import write_sums

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Launch = Callable[..., LiveRun]
QUICK = (
    *SMALL,
    "checkpoint.every_steps=2",
    "timeouts.call_s=10",
)
BOUND = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.getuid() == 0 else []
"""Root is asked for permission like everyone else."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of a run of four steps, with checkpoints of two and four, also in `copies`
    beside it.
    """
    directory = tmp_path_factory.mktemp("ended")
    run = LiveRun(directory, *QUICK, "num_steps=4", f"checkpoint.mirror={directory}/copies")
    try:
        assert run.wait() == 0, run.terminal
        yield run.run_dir
    finally:
        run.end()


@pytest.fixture
def run_dir(ended: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(ended, tmp_path / "run"))


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def ends_with(run: LiveRun, code: int, *sentences: str) -> None:
    """It says so and nothing else, leaves nothing running, and has lost nothing."""
    assert run.wait(timeout_s=120) == code, run.terminal
    said = " ".join(run.terminal.split())
    assert [sentence for sentence in sentences if sentence not in said] == [], run.terminal
    assert "Traceback" not in said
    assert run.processes() == []
    found = run.audit()
    assert (found["problems"], found["num_steps"]) == ([], 4)


@contextlib.contextmanager
def taken_ports(count: int) -> Iterator[list[int]]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
            each.listen()
        yield [each.getsockname()[1] for each in sockets]


def test_every_port_that_is_taken_is_named_when_a_run_goes_on(
    launch: Launch, run_dir: Path
) -> None:
    settings = ("monitoring.prometheus_port", "monitoring.tensorboard_port")
    with taken_ports(2) as ports:
        given = [f"{setting}={port}" for setting, port in zip(settings, ports, strict=True)]
        run = launch("num_steps=6", "monitoring.tensorboard_port=0", *given, resumes=True)
        ends_with(
            run,
            2,
            *(
                f"{one}: cannot be used on 127.0.0.1 (Address already in use); choose another port"
                for one in given
            ),
        )
    assert checkpoints(run_dir) == ["step_000002", "step_000004"]


def test_a_store_that_another_process_writes_ends_the_run_with_that_sentence(
    launch: Launch, run_dir: Path
) -> None:
    with (run_dir / "store.sqlite.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = launch("num_steps=6", resumes=True)
        ends_with(run, 1, "store.sqlite is written by another process; end that buffer first")
    assert checkpoints(run_dir) == ["step_000002", "step_000004"]


def test_a_directory_that_may_not_be_written_is_told_before_anything_starts(
    launch: Launch, run_dir: Path
) -> None:
    os.chmod(run_dir, 0o500)
    run = launch("num_steps=6", resumes=True, prefix=BOUND)
    ends_with(
        run,
        2,
        "run cannot be written (Permission denied); free disk space or grant write permission",
    )
    os.chmod(run_dir, 0o700)


def test_an_output_directory_that_may_not_be_written_is_told_before_anything_starts(
    tmp_path: Path,
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    (closed / "run.terminal").touch()
    os.chmod(closed, 0o500)
    run = LiveRun(closed, *QUICK, "num_steps=1", prefix=BOUND)
    try:
        assert run.wait(timeout_s=60) == 2, run.terminal
        assert (
            f"output_dir={closed}: {closed} is not a directory that may be written to"
            in run.terminal.replace("\n", "")
        )
        assert os.listdir(closed) == ["run.terminal"]
    finally:
        run.end()


def test_a_store_that_may_not_be_written_ends_the_run_with_that_sentence(
    launch: Launch, run_dir: Path
) -> None:
    os.chmod(run_dir / "store.sqlite", 0o400)
    ends_with(
        launch("num_steps=6", resumes=True, prefix=BOUND),
        1,
        "store.sqlite cannot be written: attempt to write a readonly database",
        "permission",
    )


def test_a_checkpoint_of_another_model_is_refused_by_the_tensor_that_differs(
    launch: Launch, tmp_path: Path, run_dir: Path
) -> None:
    newest = run_dir / "checkpoints" / "step_000004"
    dcp_to_torch_save(newest, tmp_path / "state.pt")
    shutil.rmtree(newest)
    torch_save_to_dcp(_widened(tmp_path / "state.pt"), newest)
    write_sums(newest)
    run = launch("num_steps=6", resumes=True)
    ends_with(run, 1, "step_000004 cannot be read, or is of another model", "policy.model")


def test_a_damaged_checkpoint_is_set_aside_and_the_run_goes_on_from_the_one_before(
    launch: Launch, run_dir: Path
) -> None:
    newest = run_dir / "checkpoints" / "step_000004"
    for path in newest.glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:100])
    run = launch("num_steps=6", "checkpoint.mirror=null", resumes=True)
    assert run.wait() == 0, run.terminal
    assert newest.with_name("step_000004.set_aside").is_dir()
    found = run.audit()
    assert (found["problems"], found["num_steps"], found["num_undone_steps"]) == ([], 6, 2)
    assert [row["step"] for row in run.rows] == list(range(1, 7))


def test_a_run_whose_machine_is_gone_is_resumed_from_its_mirror_alone(
    tmp_path: Path, ended: Path
) -> None:
    copies = shutil.copytree(ended.parent / "copies", tmp_path / "copies")
    there = LiveRun(
        tmp_path / "there",
        "num_steps=6",
        f"checkpoint.mirror={copies}",
        resumes=True,
        copy=f"file://{copies}/run",
    )
    try:
        assert there.wait() == 0, there.terminal
    finally:
        there.end()
    found = there.audit()
    assert (found["problems"], found["num_steps"], found["num_undone_steps"]) == ([], 6, 0)
    assert [row["step"] for row in there.rows] == list(range(1, 7))
    assert checkpoints(there.run_dir) == ["step_000004", "step_000006"]
    assert (copies / "run" / "step_000006.complete").is_file()


def _widened(path: Path) -> Path:
    """The same state with one more row in each matrix of the policy: that of a wider model."""
    state: dict[str, Any] = torch.load(path, weights_only=False)
    model = state["policy.model"]
    state["policy.model"] = {
        name: torch.cat([tensor, tensor[:1]]) if tensor.ndim == 2 else tensor
        for name, tensor in model.items()
    }
    torch.save(state, path)
    return path
