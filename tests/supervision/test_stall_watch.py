"""A stalled run is reported, and ends at the deadline."""

from __future__ import annotations

from pathlib import Path

import pytest
from composing import compose
from fleet_support import LIMITS
from members import heartbeat

from async_rl.core.errors import RunFailed
from async_rl.monitoring.console import Console
from async_rl.protocol.membership import Register
from async_rl.supervision.liveness import Liveness
from async_rl.supervision.monitor import Monitor
from async_rl.supervision.registry import Registry


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


def test_only_a_new_version_or_a_new_learner_is_progress() -> None:
    it = Watched()
    for pid, version, at_s, since_s in ((1, 0, 5, 5), (1, 0, 9, 5), (1, 1, 11, 11), (2, 0, 14, 14)):
        it.now_s = at_s
        it.start(pid)
        it.beat(version, pid=pid)
        assert it.watch.since_s == since_s


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
