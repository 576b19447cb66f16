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

    def __getattr__(self, name: str) -> None:
        return None


class CountingMonitor(Unused):
    num_refreshes = 0

    def refresh(self) -> None:
        self.num_refreshes += 1


@pytest.fixture
def service() -> SimpleNamespace:
    async def make() -> SimpleNamespace:
        registry = CountingRegistry()
        liveness = Liveness(registry, CONFIG.timeouts, is_local=True)
        unused: Any = Unused()
        monitor: Any = CountingMonitor()
        answers = handlers(
            registry=registry,
            liveness=liveness,
            monitor=monitor,
            fleet=unused,
            scaler=unused,
            stop=StopRequest(),
        )
        return SimpleNamespace(registry=registry, monitor=monitor, handlers=answers)

    return asyncio.run(make())


async def test_a_heartbeat_reads_no_other_member(service: SimpleNamespace) -> None:
    handlers = service.handlers
    for index in range(300):
        await handlers[Register](registration(index))
    for index in range(300):
        await handlers[Heartbeat](beat(index))
    registry = service.registry
    assert (registry.num_reads, len(registry)) == (0, 300)
    assert service.monitor.num_refreshes == 0


def test_a_gauge_of_all_processes_is_looked_up_once(
    service: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches: list[None] = []
    monkeypatch.setattr(catalogue, "_patterns", lambda: searches.append(None) or ())
    for index in range(300):
        service.registry.register(registration(index))
        counters = COUNTERS | {"gauge/queue/nobody_declared_this": index}
        service.registry.beat(replace(beat(index), counters=counters))
    rates = Rates(0.0)
    rates.observe(service.registry.members)
    rates.now()
    assert len(searches) == 1


async def test_a_change_of_the_list_costs_its_own_size_only(service: SimpleNamespace) -> None:
    for index in range(300):
        service.registry.register(registration(index))
        service.registry.beat(beat(index))
    watch = service.handlers[WatchMembers]
    directory = Directory()
    whole: Any = await watch(WatchMembers(known_revision=-1, roles=["generator"], wait_s=1))
    directory.update(whole)
    service.registry.mark_ended("generator-7")
    service.registry.register(registration(300))
    service.registry.drain("generator-8")
    changes: Any = await watch(
        WatchMembers(known_revision=directory.revision, roles=["generator"], wait_s=1)
    )
    directory.update(changes)
    assert directory.members == service.registry.directory.members
    assert directory.revision == service.registry.directory.revision
    unchanged: Any = await watch(
        WatchMembers(known_revision=directory.revision, roles=["generator"], wait_s=0)
    )
    assert (unchanged.members, unchanged.left) == ([], [])
    whole, changes, names = (whole, changes, [member.name for member in directory.members])
    assert len(names) == 300
    assert "generator-7" not in names
    assert (changes.left, [member.name for member in changes.members]) == (
        ["generator-7"],
        ["generator-300", "generator-8"],
    )
    assert len(encode(changes)) < 500
    assert len(encode(whole)) < 300 * 200, "counters are for the supervisor only"


def test_the_work_of_a_join_does_not_grow_with_the_members(service: SimpleNamespace) -> None:
    """Of each joiner's own requests and of those that it wakes: answers, and members in them."""

    async def work_of(num_members: int) -> tuple[int, int]:
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
        for index in range(num_members):
            await handlers[Register](registration(index))
            followers.append(asyncio.create_task(follow("generator")))
        await settle()
        sent.clear()
        for index in range(num_members, num_members + 5):
            await handlers[Register](registration(index))
            followers.append(asyncio.create_task(follow("generator")))
            await settle()
        for follower in followers:
            follower.cancel()
        await asyncio.gather(*followers, return_exceptions=True)
        return len(sent), sum(len(reply.members) for reply in sent)

    # A joiner learns of the buffer and the verifier; the buffer and the learner learn of it.
    assert [virtually(work_of(number)) for number in (20, 400)] == [(15, 20)] * 2


def test_a_process_is_told_of_the_roles_that_it_follows_only() -> None:
    async def main() -> Directory:
        registry, directory = Registry(), Directory()
        for role in ("generator", "verifier", "buffer"):
            registry.register(Register(name=f"{role}-0", role=role, pid=1, address="a"))

        class Supervisor:
            async def call(self, request: WatchMembers, *, timeout_s: float) -> Members:
                await registry.news(request.known_revision, frozenset(request.roles))
                return registry.changes_since(request.known_revision, frozenset(request.roles))

        supervisor: Any = Supervisor()
        following = asyncio.create_task(
            directory.follow(supervisor, FOLLOWED["generator"], call_timeout_s=1)
        )
        await directory.changed(-1)
        seen = directory.revision
        registry.mark_ended("generator-0")
        registry.mark_ended("verifier-0")
        await directory.changed(seen)
        following.cancel()
        return directory

    directory = virtually(main())
    assert [member.name for member in directory.members] == ["buffer-0"]


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


def test_changes_applied_in_any_portions_give_the_list() -> None:
    registry, directory = Registry(), Directory()
    for index in range(13):
        registry.register(registration(index))
    for number in range(200):
        index = number * 7 % 13
        if number % 3:
            registry.register(registration(index))
        else:
            registry.mark_ended(f"generator-{index}")
        if number % 5 == 0:
            directory.update(registry.changes_since(directory.revision, GENERATORS))
            assert {m.name: m for m in directory.members} == {
                m.name: m for m in registry.directory.members
            }


@pytest.mark.parametrize(("num_members", "heartbeat_s"), [(1, 1), (250, 1), (500, 2), (9000, 5)])
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
