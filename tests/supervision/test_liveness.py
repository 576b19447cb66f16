"""Facts about processes whose heartbeats stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from composing import compose
from members import heartbeat

from async_rl.protocol.membership import Register
from async_rl.supervision.liveness import Liveness
from async_rl.supervision.registry import Registry


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


def watched(pid: int, *settings: str, is_local: bool = True) -> tuple[Quiet, Liveness]:
    config = compose("grpo_code", list(settings))
    registry = Quiet()
    registry.register(Register(name="generator-0", role="generator", pid=pid, address="tcp://x"))
    registry.beat(heartbeat("generator-0", pid=pid, version=3))
    return registry, Liveness(registry, config.timeouts, is_local=is_local)


def test_a_stopped_process_is_silent_with_its_cause_and_is_told_once_until_it_is_heard_again() -> (
    None
):
    with stopped_process() as pid:
        registry, liveness = watched(pid)
        registry.seconds = 2.6
        silent = liveness.changes()
        assert liveness.changes() == []
        (member,) = liveness.members()
        registry.seconds = 0.1
        recovered = liveness.changes()
        assert liveness.changes() == []
    assert member.state == "silent"
    assert (
        member.waits_for == "no heartbeat for 3 s, generating before; stopped by a signal;"
        f" kill -CONT {pid} continues it; restarted at 15 s"
    )
    assert silent == [f"generator-0 is silent: {member.waits_for}"]
    assert recovered == ["generator-0 sends heartbeats again"]
    assert [m.state for m in liveness.members()] == ["generating"]


@pytest.mark.parametrize(
    ("heartbeat_s", "quiet_s", "state"),
    [(1, 2.4, "generating"), (1, 2.6, "silent"), (0.5, 1.9, "generating"), (0.5, 2.1, "silent")],
)
def test_silence_begins_after_two_and_a_half_heartbeats(
    heartbeat_s: float, quiet_s: float, state: str
) -> None:
    registry, liveness = watched(os.getpid(), f"timeouts.call_s={10 * heartbeat_s}")
    registry.seconds = quiet_s
    assert [member.state for member in liveness.members()] == [state]
    assert bool(liveness.silent_s()) == (state == "silent"), "as a report of a stall says"


def test_a_process_that_is_on_another_machine_is_silent_without_a_guess_at_the_cause() -> None:
    registry, liveness = watched(os.getpid(), is_local=False)
    registry.seconds = 9.0
    assert [m.waits_for for m in liveness.members()] == [
        "no heartbeat for 9 s, generating before; restarted at 15 s"
    ]


def test_a_process_that_ended_or_starts_is_neither_silent_nor_recovered() -> None:
    registry, liveness = watched(os.getpid())
    registry.seconds = 9.0
    assert len(liveness.changes()) == 1
    registry.mark_ended("generator-0")
    assert liveness.changes() == []
    assert [member.state for member in liveness.members()] == ["ended"]
    registry.add("generator-0", "generator", os.getpid() + 1)
    assert liveness.changes() == []
    assert [member.state for member in liveness.members()] == ["starting"]
