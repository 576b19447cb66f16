"""Facts about `async-rl status` and `async-rl stop`, against a supervisor's control socket and
without one, and about `async-rl logs`.
"""

import json
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from anyio.abc import TaskStatus
from anyio.from_thread import start_blocking_portal
from members import member, reply

from async_rl.composition.compose import compose, write_config
from async_rl.core.errors import ConfigError
from async_rl.launchers.commands import live
from async_rl.launchers.commands.launch import resume
from async_rl.protocol.base import Message, Ok, message_schema
from async_rl.protocol.supervisor import GetStatus, StopRun
from async_rl.runs.control import (
    MARK,
    Mark,
    leave_mark,
    living_pid,
    owning,
    start_ticks,
    wait_for_end,
    wait_for_run,
)
from async_rl.runtime.context import Control
from async_rl.wire.rpc import RpcServer, create_keys


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "mine"
    directory.mkdir()
    words = ["run_name=mine", "num_steps=9", "timeouts.start_s=60"]
    write_config(compose("ppo_code", words), directory / "config.yaml")
    return directory


@contextmanager
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def mark(run_dir: Path, pid: int, *, machine: str = platform.node(), later: int = 0) -> None:
    left = Mark(machine=machine, pid=pid, start_ticks=start_ticks(pid) - later)
    (run_dir / MARK).write_bytes(msgspec.json.encode(left))


@contextmanager
def control_socket(run_dir: Path, pid: int) -> Iterator[list[Message]]:
    """A supervisor's side of the control socket, on a thread; gives the requests that arrived."""
    keys = create_keys(run_dir / "keys")
    asked: list[Message] = []

    async def status(request: GetStatus) -> Message:
        asked.append(request)
        facts = {"run_name": "mine", "run_dir": str(run_dir), "metrics": {"reward/mean": 0.5}}
        return reply([member("buffer")], step=4, **facts)

    async def stop(request: StopRun) -> Message:
        asked.append(request)
        os.kill(pid, 9)
        return Ok()

    async def serve(*, task_status: TaskStatus[str]) -> None:
        with RpcServer("127.0.0.1", 0, keys, {GetStatus: status, StopRun: stop}) as server:
            task_status.started(server.address)
            await server.serve()

    with start_blocking_portal() as portal:
        serving, address = portal.start_task(serve)
        facts = {"machine": platform.node(), "model_path": "", "messages": message_schema()}
        control = Control(address=address, pid=pid, **facts)
        (run_dir / "control.json").write_bytes(msgspec.json.encode(control))
        try:
            yield asked
        finally:
            serving.cancel()


def test_a_run_that_is_gone_is_told_from_its_files(run_dir: Path, async_rl: Any) -> None:
    (run_dir / "metrics.jsonl").write_text('{"step": 5, "reward/mean": 0.5}\n')
    told = "run mine is not running (was killed); last step 5 of 9\n"
    assert async_rl("status", str(run_dir)).out == told
    (run_dir / "job.sh").touch()
    assert "(its job has not started yet: squeue)" in async_rl("status", str(run_dir)).out
    (run_dir / "state.json").write_text('{"outcome": "finished", "step": 9, "ended_s": 0}')
    assert async_rl("stop", str(run_dir)).out == told.replace("was killed", "finished")


@pytest.mark.parametrize(("option", "is_graceful"), [([], True), (["--now"], False)])
def test_status_and_stop_ask_the_supervisor(
    run_dir: Path, async_rl: Any, option: list[str], is_graceful: bool
) -> None:
    dead = json.loads(async_rl("status", str(run_dir), "--json").out)
    with sleeper() as process:
        mark(run_dir, process.pid)
        with control_socket(run_dir, process.pid) as asked:
            words = ["status", "mine", "--json", "--output-dir", str(run_dir.parent)]
            alive = json.loads(async_rl(*words).out)
            answer = async_rl("stop", str(run_dir), *option)
        assert asked[-1] == StopRun(is_graceful=is_graceful)
        assert process.wait(10) == -9
    assert (answer.code, "run mine is not running" in answer.out) == (0, True)
    assert (dead["is_running"], dead["step"], dead["members"]) == (False, 0, [])
    assert (alive["is_running"], alive["step"], alive["members"][0]["name"]) == (True, 4, "buffer")
    assert set(dead) <= set(alive)


def test_a_run_without_a_control_socket_is_starting_and_stop_signals_it(
    run_dir: Path, async_rl: Any
) -> None:
    with sleeper() as process:
        mark(run_dir, process.pid)
        assert f"run mine is starting (pid {process.pid})" in async_rl("status", str(run_dir)).out
        assert not wait_for_end(process.pid, timeout_s=0.01)
        reaper = threading.Thread(target=process.wait)
        reaper.start()
        assert async_rl("stop", str(run_dir)).code == 0
        reaper.join(10)
        assert process.returncode == -15
    code, _, err = async_rl("status", "nothing", "--output-dir", str(run_dir))
    assert code == 2
    assert err.startswith("error: nothing: neither a run in")


def test_one_process_at_a_time_launches_or_resumes_a_run(run_dir: Path) -> None:
    message = "is being resumed by another process"
    with owning(run_dir):
        with pytest.raises(ConfigError, match=message), owning(run_dir):
            pass
        with pytest.raises(ConfigError, match=message):
            resume("mine", output_dir=run_dir.parent)
    with owning(run_dir):
        pass


def test_another_process_with_the_same_id_is_not_taken_for_the_run(run_dir: Path) -> None:
    assert living_pid(run_dir) is None
    leave_mark(run_dir)
    assert living_pid(run_dir) == os.getpid()
    mark(run_dir, os.getpid(), later=1)
    assert living_pid(run_dir) is None
    with sleeper() as process:
        mark(run_dir, process.pid)
    assert living_pid(run_dir) is None


def test_a_run_on_another_machine_lives_as_long_as_it_answers(run_dir: Path) -> None:
    mark(run_dir, os.getpid(), machine="elsewhere")
    assert living_pid(run_dir) is None
    assert wait_for_run(run_dir, os.getpid(), timeout_s=0.01)
    with control_socket(run_dir, os.getpid()):
        assert living_pid(run_dir) == os.getpid()
        assert not wait_for_run(run_dir, os.getpid(), timeout_s=0.01)


@pytest.fixture
def logged(run_dir: Path) -> Path:
    """The run with logs of three processes."""
    logs = run_dir / "logs"
    logs.mkdir()
    stamp = "2026-11-20 19:30:0"
    for name, text in (
        ("buffer.log", f"{stamp}1.000 INFO buffer one\n{stamp}4.000 INFO buffer four\n"),
        (
            "learner-0.log",
            f"{stamp}2.000 ERROR learner-0 two\n    Traceback\n    ValueError: 2\n"
            f"{stamp}3.000 INFO learner-0 three\n",
        ),
        ("tensorboard.log", "NOTE: zero\n"),
        ("learner-0.out", "from a library\n"),
    ):
        (logs / name).write_text(text)
    return run_dir


def last_words(text: str) -> list[str]:
    return [line.split()[-1] for line in text.splitlines()]


def test_entries_of_all_processes_are_in_order_of_time_and_tracebacks_stay_whole(
    logged: Path, async_rl: Any
) -> None:
    words = ["zero", "one", "two", "Traceback", "2", "three", "four"]
    assert last_words(async_rl("logs", str(logged)).out) == words
    # A traceback counts as one entry with its head.
    assert last_words(async_rl("logs", str(logged), "--num", "3").out) == words[2:]
    assert async_rl("logs", str(logged), "--num", "0").out == ""


def test_following_shows_what_is_added_whole_and_ends_with_the_run(
    logged: Path, monkeypatch: pytest.MonkeyPatch, async_rl: Any
) -> None:
    log = logged / "logs" / "buffer.log"
    five = "2026-11-20 19:30:05.000 INFO    buffer  five\n2026-11-20 19:30:06."
    added = iter([five, "000 INFO    buffer  six\n", None])

    def living_pid(_: Path) -> int | None:
        text = next(added)
        if text is None:
            return None
        with log.open("a") as file:
            file.write(text)
        return 7

    monkeypatch.setattr(live, "living_pid", living_pid)
    monkeypatch.setattr(live, "POLL_S", 0.0)
    out = async_rl("logs", str(logged), "--follow", "--num", "0").out
    assert last_words(out) == ["five", "six"]
