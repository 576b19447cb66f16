"""The supervisor's work per heartbeat and per change does not grow with the number of processes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from composing import compose
from fleet_support import virtually
from members import heartbeat
from msgspec.structs import replace

from async_rl.core.codec import encode
from async_rl.core.types import Role
from async_rl.monitoring.rates import Rates
from async_rl.observability import catalogue
from async_rl.protocol.membership import FOLLOWED, Heartbeat, Members, Register, WatchMembers
from async_rl.runtime.directory import Directory
from async_rl.supervision.clock import AwakeClock
from async_rl.supervision.control import StopRequest, handlers
from async_rl.supervision.liveness import Liveness
from async_rl.supervision.registry import Registry

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


class Unused:
    """The parts that answer messages of other tests."""

    num_refreshes = 0

    def refresh(self) -> None:
        self.num_refreshes += 1

    def __getattr__(self, name: str) -> None:
        return None


def make_service() -> SimpleNamespace:
    registry = CountingRegistry()
    unused: Any = Unused()
    answers = handlers(
        registry=registry,
        liveness=Liveness(registry, CONFIG.timeouts, is_local=True),
        monitor=unused,
        fleet=unused,
        scaler=unused,
        stop=StopRequest(),
    )
    return SimpleNamespace(registry=registry, monitor=unused, handlers=answers)


async def test_a_heartbeat_reads_no_other_member() -> None:
    service = make_service()
    for index in range(300):
        await service.handlers[Register](registration(index))
        await service.handlers[Heartbeat](beat(index))
    assert (service.registry.num_reads, service.monitor.num_refreshes) == (0, 0)


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


def test_the_work_of_a_join_does_not_grow_with_the_members() -> None:
    """Of each joiner's own requests and of those that it wakes: answers, and members in them."""

    async def work_of(num_members: int) -> tuple[int, int]:
        service = make_service()
        handlers = service.handlers
        sent: list[Members] = []

        async def follow(role: Role) -> None:
            directory = Directory()
            while True:
                roles = sorted(FOLLOWED[role])
                request = WatchMembers(known_revision=directory.revision, roles=roles, wait_s=1e6)
                reply: Any = await handlers[WatchMembers](request)
                sent.append(reply)
                directory.update(reply)

        async def settle() -> None:
            await asyncio.sleep(2 * len(service.registry) / 500 + 1)

        for role in ("buffer", "learner", "verifier"):
            await handlers[Register](Register(name=f"{role}-0", role=role, pid=1, address="a"))
        followers = [asyncio.create_task(follow("buffer")), asyncio.create_task(follow("learner"))]
        for index in range(num_members + 5):
            if index >= num_members:
                await settle()
            if index == num_members:
                sent.clear()
            await handlers[Register](registration(index))
            followers.append(asyncio.create_task(follow("generator")))
        await settle()
        for follower in followers:
            follower.cancel()
        await asyncio.gather(*followers, return_exceptions=True)
        return len(sent), sum(len(reply.members) for reply in sent)

    # A joiner learns of the buffer and the verifier; the buffer and the learner learn of it.
    assert [virtually(work_of(number)) for number in (20, 200)] == [(15, 20)] * 2


def test_a_process_that_joins_or_follows_another_list_gets_all_of_it() -> None:
    registry = Registry()
    for _ in range(3000):
        registry.register(registration(1))
        registry.mark_ended("generator-1")
    registry.register(registration(2))
    for known in (-1, registry.directory.revision + 5):
        found = registry.changes_since(known, GENERATORS)
        assert (found.since, [member.name for member in found.members]) == (-1, ["generator-2"])
    missed = registry.changes_since(100, GENERATORS)
    assert (missed.since, missed.left) == (100, ["generator-1"])
    directory = Directory()
    directory.update(Members(revision=9, members=[]))
    directory.update(registry.changes_since(9, GENERATORS))
    assert directory.members == registry.directory.members


@pytest.mark.parametrize(("num_members", "heartbeat_s"), [(1, 1), (250, 1), (500, 2), (3000, 5)])
def test_heartbeats_come_less_often_the_more_processes_there_are(
    num_members: int, heartbeat_s: float
) -> None:
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
