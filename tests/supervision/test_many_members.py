"""The supervisor's work per heartbeat and per change does not grow with the number of processes."""

from typing import Any
from unittest.mock import Mock

import pytest
from composing import compose
from members import heartbeat
from msgspec.structs import replace

from async_rl.core.codec import encode
from async_rl.core.types import Role
from async_rl.monitoring.rates import Rates
from async_rl.observability import catalogue
from async_rl.protocol.supervisor import Heartbeat, Register
from async_rl.runtime.directory import Directory
from async_rl.supervision.control import StopRequest, handlers
from async_rl.supervision.liveness import Liveness
from async_rl.supervision.registry import AwakeClock, Registry

CONFIG = compose("grpo_code", [])
GENERATORS: frozenset[Role] = frozenset({"generator"})
COUNTERS = {f"stage_{number}": 1.5 for number in range(30)}


def registration(index: int) -> Register:
    return Register(
        name=f"generator-{index}", role="generator", pid=index, address=f"tcp://10.0.0.1:{index}"
    )


def beat(index: int) -> Heartbeat:
    return heartbeat(f"generator-{index}", COUNTERS, pid=index, version=3)


class CountingRegistry(Registry):
    """Counts how often all members are read."""

    num_reads = 0

    @property
    def members(self) -> Any:
        self.num_reads += 1
        return super().members


async def test_a_heartbeat_reads_no_other_member() -> None:
    registry, others = CountingRegistry(), Mock()
    liveness = Liveness(registry, CONFIG.timeouts, is_local=True)
    parts = {"monitor": others, "fleet": others, "scaler": others, "stop": StopRequest()}
    answers = handlers(registry=registry, liveness=liveness, **parts)
    for index in range(300):
        await answers[Register](registration(index))
        await answers[Heartbeat](beat(index))
    assert (registry.num_reads, others.refresh.call_count) == (0, 0)


def test_a_gauge_of_all_processes_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[None] = []
    monkeypatch.setattr(catalogue, "_patterns", lambda: searches.append(None) or ())
    registry = Registry()
    for index in range(300):
        registry.register(registration(index))
        counters = COUNTERS | {"gauge/queue/nobody_declared_this": index}
        registry.beat(replace(beat(index), counters=counters))
    rates = Rates(0.0)
    rates.observe(registry.members)
    rates.now()
    assert len(searches) == 1


def test_a_change_of_the_list_costs_its_own_size_only() -> None:
    registry, directory = Registry(), Directory()
    for index in range(300):
        registry.register(registration(index))
        registry.beat(beat(index))
    whole = registry.changes_since(-1, GENERATORS)
    directory.update(whole)
    registry.mark_ended("generator-7")
    registry.register(registration(300))
    registry.drain("generator-8")
    registry.register(Register(name="verifier-0", role="verifier", pid=1, address="a"))
    changes = registry.changes_since(directory.revision, GENERATORS)
    directory.update(changes)
    names = [member.name for member in directory.members]
    assert len(names) == 300
    assert "generator-7" not in names
    assert "verifier-0" not in names, "it is not followed"
    assert (changes.left, [member.name for member in changes.members]) == (
        ["generator-7"],
        ["generator-300", "generator-8"],
    )
    assert len(encode(changes)) < 500
    assert len(encode(whole)) < 300 * 200, "counters are for the supervisor only"
    unchanged = registry.changes_since(directory.revision, GENERATORS)
    assert (unchanged.members, unchanged.left) == ([], [])


@pytest.mark.parametrize(("num_members", "heartbeat_s"), [(1, 1), (250, 1), (500, 2), (3000, 5)])
def test_more_processes_send_fewer_heartbeats(num_members: int, heartbeat_s: float) -> None:
    registry = Registry()
    liveness = Liveness(registry, CONFIG.timeouts, is_local=True)
    for index in range(num_members):
        registry.register(registration(index))
    assert liveness.heartbeat_s == heartbeat_s


def test_a_pause_of_the_supervisor_is_not_silence_of_its_children() -> None:
    now_s = 100.0
    clock = AwakeClock(lambda: now_s)
    registry = Registry(clock)
    liveness = Liveness(registry, CONFIG.timeouts, is_local=True)
    registry.register(registration(1))
    now_s += 1.5
    assert registry.quiet_s("generator-1") == 1.5
    now_s += 3600
    assert liveness.silent_s() == {"generator-1": 3.5}
    for _ in range(10):
        now_s += 1.5
        quiet_s = registry.quiet_s("generator-1")
    assert quiet_s == 18.5, "silence while the supervisor runs counts in full"
