"""Processes whose heartbeats stop, starts that do not advance, and runs that stand still."""

import asyncio
import mmap
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from composing import compose
from fleet_support import LIMITS, virtual_registry, virtually
from members import heartbeat

from async_rl.config.base import replace
from async_rl.core.errors import RunFailed
from async_rl.monitoring.console import Console
from async_rl.protocol.supervisor import Heartbeat, Register
from async_rl.runtime.context import PROGRESS_MB, moved_mb
from async_rl.supervision.liveness import Liveness
from async_rl.supervision.monitor import Monitor
from async_rl.supervision.registry import Registry

NAME = "generator-0"


class Quiet(Registry):
    """A registry that says how long everyone has been quiet."""

    seconds = 0.0

    def quiet_s(self, name: str) -> float:
        return self.seconds


@contextmanager
def stopped_process() -> Iterator[int]:
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    try:
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        yield child.pid
    finally:
        child.kill()
        child.communicate()


def test_a_stopped_process_is_told_once_with_its_cause() -> None:
    registry = Quiet()
    liveness = Liveness(registry, compose("grpo_code").timeouts, is_local=True)
    with stopped_process() as pid:
        registry.register(Register(name=NAME, role="generator", pid=pid, address="tcp://x"))
        registry.beat(heartbeat(NAME, pid=pid, version=3))
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


def beat(moved_mb: float, waits_for: str = "") -> Heartbeat:
    counters = {"gauge/progress_mb": moved_mb}
    return heartbeat(NAME, counters, pid=7, state="starting", waits_for=waits_for, version=-1)


@pytest.mark.proves("timeouts.start_s")
@pytest.mark.parametrize(
    ("beats", "start_s", "reason"),
    [
        (lambda n: beat(n * PROGRESS_MB), 120, ""),
        (lambda n: beat(0.0, f"stage {n}"), 120, ""),
        (lambda n: beat(5 + n * 0.01), 120, "was not ready and made no progress for 120 s"),
        (lambda n: beat(5 + n * 0.01), 60, "was not ready and made no progress for 60 s"),
    ],
    ids=["reads", "reaches stages", "only beats", "a shorter limit"],
)
def test_a_start_has_no_limit_while_it_advances(
    beats: Callable[[int], Heartbeat], start_s: float, reason: str
) -> None:
    async def main() -> str:
        registry = virtual_registry()
        registry.add(NAME, "generator", 7)
        limits = replace(LIMITS, start_s=start_s)
        lost = asyncio.create_task(Liveness(registry, limits, is_local=True).until_lost(NAME))
        for number in range(30):
            registry.beat(beats(number))
            await asyncio.wait({lost}, timeout=start_s / 10)
            if lost.done():
                return lost.result()
        registry.register(Register(name=NAME, role="generator", pid=7, address="tcp://x:1"))
        lost.cancel()
        return ""

    assert virtually(main()) == reason


def test_a_process_that_reads_or_grows_has_moved() -> None:
    process = psutil.Process()
    before = moved_mb(process)
    # Not a bytearray: malloc may reuse memory that this process has freed but still has resident.
    block = mmap.mmap(-1, 64 << 20)
    for place in range(0, len(block), 4096):
        block[place] = 1
    after = moved_mb(process)
    assert after - before > PROGRESS_MB
    with open("/dev/zero", "rb") as zeros:
        zeros.readinto(block)
    assert moved_mb(process) - after > PROGRESS_MB


class Watched:
    """A learner, and the watch of its progress, on a clock of the test."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.registry = Registry(lambda: self.now_s)
        self.watch = Liveness(self.registry, LIMITS, is_local=True)
        self.start(1)

    def start(self, pid: int) -> None:
        message = Register(name="learner-0", role="learner", pid=pid, address="tcp://x")
        self.registry.register(message)

    def beat(self, version: int, pid: int = 1) -> bool:
        waiting = heartbeat("learner-0", pid=pid, waits_for="a batch", version=version)
        self.registry.beat(waiting)
        return self.watch.observe()


def test_each_stall_is_told_once_and_taken_back_and_the_last_ends_the_run() -> None:
    it = Watched()
    for version in (1, 2, 3):
        assert it.beat(version) == (version > 1)
        assert it.watch.stalled == ""
        it.now_s += LIMITS.stall_warning_s
        assert it.watch.observe()
        assert f"no learner step after version {version}" in it.watch.stalled
        assert not it.watch.observe()
    it.beat(4)
    it.now_s += LIMITS.stall_s
    failure = r"version 4 for 20 min 0 s: .*learner-0.*\(10 timeouts\.start_s = 1200 s\)"
    with pytest.raises(RunFailed, match=failure):
        it.watch.observe()


@pytest.mark.parametrize(
    ("conf", "words", "is_reported"),
    [("serve", [], False), ("agent_code", ["rollout.fn=external"], True)],
)
def test_programs_of_others_are_waited_for_without_a_limit(
    conf: str, words: list[str], is_reported: bool, tmp_path: Path
) -> None:
    """A service is idle by design; a run without its agents is told to be stalled."""
    config = compose(conf, ["monitoring.tensorboard_port=null", *words])
    it = Watched()
    is_endless = config.agent.is_external
    liveness = Liveness(it.registry, config.timeouts, is_local=True, is_endless=is_endless)
    with Monitor(
        config,
        tmp_path,
        step=0,
        registry=it.registry,
        liveness=liveness,
        console=Console(config, tmp_path),
    ) as monitor:
        monitor.refresh()
        it.now_s = 2 * config.timeouts.stall_s
        monitor.refresh()
        assert bool(monitor.status().stalled) == is_reported
