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


def watch(registry: Registry) -> Liveness:
    registry.register(Register(name="learner-0", role="learner", pid=1, address="tcp://x"))
    return Liveness(registry, LIMITS, is_local=True)


def beat(registry: Registry, stall_watch: Liveness, version: int, pid: int = 1) -> bool:
    waiting = heartbeat("learner-0", pid=pid, waits_for="a batch", version=version)
    registry.beat(waiting)
    return stall_watch.observe()


def test_each_stall_is_told_once_and_taken_back_and_the_last_ends_the_run() -> None:
    now_s = 0.0
    registry = Registry(lambda: now_s)
    stall_watch = watch(registry)
    for version in (1, 2, 3):
        assert beat(registry, stall_watch, version) == (version > 1)
        assert stall_watch.stalled == ""
        now_s += LIMITS.stall_warning_s
        assert stall_watch.observe()
        assert f"no learner step after version {version}" in stall_watch.stalled
        assert not stall_watch.observe()
    beat(registry, stall_watch, 4)
    now_s += LIMITS.stall_s
    failure = r"version 4 for 20 min 0 s: .*learner-0.*\(10 timeouts\.start_s = 1200 s\)"
    with pytest.raises(RunFailed, match=failure):
        stall_watch.observe()


def test_only_a_new_version_or_a_new_learner_is_progress() -> None:
    now_s = 0.0
    registry = Registry(lambda: now_s)
    stall_watch = watch(registry)
    registry.register(Register(name="generator-0", role="generator", pid=3, address="tcp://y"))
    for pid, version, at_s, since_s in ((1, 0, 5, 5), (1, 0, 9, 5), (1, 1, 11, 11), (2, 0, 14, 14)):
        now_s = at_s
        registry.register(Register(name="learner-0", role="learner", pid=pid, address="tcp://x"))
        beat(registry, stall_watch, version, pid=pid)
        assert stall_watch.since_s == since_s


@pytest.mark.parametrize(
    ("conf", "words", "is_reported"),
    [("serve", [], False), ("agent_code", ["rollout.fn=external"], True)],
)
def test_programs_of_others_are_waited_for_without_a_limit(
    conf: str, words: list[str], is_reported: bool, tmp_path: Path
) -> None:
    """A service is idle by design; a run without its agents is told to be stalled."""
    config = compose(conf, ["monitoring.tensorboard_port=null", *words])

    now_s = 0.0
    registry = Registry(lambda: now_s)
    watch(registry)
    with Monitor(
        config,
        tmp_path,
        step=0,
        registry=registry,
        liveness=Liveness(
            registry, config.timeouts, is_local=True, is_endless=config.agent.is_external
        ),
        console=Console(config, tmp_path),
    ) as monitor:
        monitor.refresh()
        now_s = 2 * config.timeouts.stall_s
        monitor.refresh()
        assert bool(monitor.status().stalled) == is_reported
