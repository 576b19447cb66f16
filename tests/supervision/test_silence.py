"""Facts about processes that are not heard of."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from async_rl.launchers.configuration.compose import compose
from async_rl.protocol.membership import Heartbeat, Register
from async_rl.supervision.registry import Registry
from async_rl.supervision.silence import Silence


class Quiet(Registry):
    """A registry that says how long everyone has been quiet."""

    seconds = 0.0

    def quiet_s(self, name: str) -> float:
        return self.seconds


@contextmanager
def stopped_process() -> Iterator[int]:
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    try:
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        yield child.pid
    finally:
        child.kill()
        child.communicate()


def watched(pid: int, *settings: str, launcher: str = "local") -> tuple[Quiet, Silence, list[str]]:
    config = msgspec.structs.replace(compose("grpo_code", list(settings)), launcher=launcher)
    registry, told = Quiet(), list[str]()
    registry.register(Register(name="generator-0", role="generator", pid=pid, address="tcp://x"))
    registry.beat(
        Heartbeat(
            name="generator-0",
            pid=pid,
            state="generating",
            waits_for="",
            since_s=0,
            version=3,
            counters={},
        )
    )
    return registry, Silence(registry, config, told.append), told


def test_a_stopped_process_is_silent_with_its_cause_and_is_told_once_until_it_is_heard_again() -> (
    None
):
    with stopped_process() as pid:
        registry, silence, told = watched(pid)
        registry.seconds = 2.6
        silence.look()
        silence.look()
        (member,) = silence.members()
        registry.seconds = 0.1
        silence.look()
        silence.look()
    assert member.state == "silent"
    assert (
        member.waits_for
        == f"not heard of for 3 s, generating before; stopped by a signal; kill -CONT {pid} lets it"
        " go on; it is ended and started again at 15 s"
    )
    assert told == [f"generator-0 is silent: {member.waits_for}", "generator-0 is heard again"]
    assert [m.state for m in silence.members()] == ["generating"]


@pytest.mark.parametrize(
    ("heartbeat_s", "quiet_s", "state"),
    [(1, 2.4, "generating"), (1, 2.6, "silent"), (2, 2.6, "generating")],
)
def test_silence_begins_after_two_and_a_half_heartbeats(
    heartbeat_s: int, quiet_s: float, state: str
) -> None:
    registry, silence, _ = watched(os.getpid(), f"supervisor.heartbeat_s={heartbeat_s}")
    registry.seconds = quiet_s
    assert [member.state for member in silence.members()] == [state]


def test_a_process_that_is_on_another_machine_is_silent_without_a_guess_at_the_cause() -> None:
    registry, silence, _ = watched(os.getpid(), launcher="ray")
    registry.seconds = 9.0
    assert [m.waits_for for m in silence.members()] == [
        "not heard of for 9 s, generating before; it is ended and started again at 15 s"
    ]


def test_a_process_that_ended_or_starts_is_not_called_silent_nor_heard_again() -> None:
    registry, silence, told = watched(os.getpid())
    registry.seconds = 9.0
    silence.look()
    registry.mark("generator-0", "ended")
    silence.look()
    assert [member.state for member in silence.members()] == ["ended"]
    registry.add("generator-0", "generator", os.getpid() + 1)
    silence.look()
    assert [member.state for member in silence.members()] == ["starting"]
    assert len(told) == 1
