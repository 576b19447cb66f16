"""Facts about processes that are added to a live fleet and let go."""

import asyncio
from pathlib import Path

from fleet_support import Scripted, World, spec, virtually
from members import heartbeat

from async_rl.protocol.membership import Register
from async_rl.supervision.clock import in_time
from async_rl.supervision.registry import Registry


def test_a_process_that_was_let_go_is_not_started_again_and_is_forgotten(tmp_path: Path) -> None:
    def ready(world: World, process: Scripted) -> None:
        world.register(process, rank=process.pid - 1000)

    async def main() -> World:
        world = World("verifier", tmp_path, ready, ranks=2)
        world.registry.wanted = {"verifiers": 1}
        running = asyncio.create_task(world.fleet.run())
        await world.until_serving(2)
        leaving = world.fleet.children["verifier-1"]
        world.fleet.remove("verifier-1")
        assert [m.name for m in world.registry.directory.members] == ["verifier-0"]
        assert [(p.live, p.draining) for p in world.registry.pools()] == [(1, 1)]
        assert not await in_time(leaving.has_left.wait(), 0.01)
        leaving.terminate()
        assert await in_time(leaving.has_left.wait(), 10)
        assert [(p.live, p.draining) for p in world.registry.pools()] == [(1, 0)]
        world.fails(Scripted(1), "verifier-1", "a report that came late")
        assert list(world.fleet.children) == ["verifier-0"]
        world.fleet.add(spec("verifier", 1))
        await world.until_serving(2)
        world.fleet.kill_all()
        await running
        return world

    world = virtually(main())
    assert (world.lost, world.given_up, len(world.launcher.started)) == ([], [], 3)


def test_a_draining_generator_still_gets_weights_and_says_that_it_drains() -> None:
    registry = Registry()
    registry.register(Register(name="generator-0", role="generator", pid=1, address="tcp://x"))
    registry.drain("generator-0")
    registry.beat(heartbeat("generator-0", version=7))
    assert [(m.name, m.state, m.version) for m in registry.members] == [
        ("generator-0", "draining", 7)
    ]
    assert [m.name for m in registry.directory.members] == ["generator-0"]


def test_a_process_added_to_a_live_run_that_cannot_start_is_given_up_and_the_run_goes_on(
    tmp_path: Path,
) -> None:
    def fails_unless_first(world: World, process: Scripted) -> None:
        if process.pid == 1000:
            world.register(process)
        else:
            world.fails(process, "generator-1", "OutOfMemory: 9 GB")
            process.end(1)

    async def main() -> World:
        world = World("generator", tmp_path, fails_unless_first)
        running = asyncio.create_task(world.fleet.run())
        await world.until_serving()
        world.fleet.add(spec("generator", 1))
        await world.fleet.children["generator-1"].has_left.wait()
        assert not world.fleet.failed.done()
        world.fleet.kill_all()
        await running
        return world

    world = virtually(main())
    assert world.lost == []
    assert world.given_up == [("generator-1", "failed: OutOfMemory: 9 GB")]


def test_a_starting_member_is_shown_and_is_killed_when_removed_since_it_may_hear_no_request(
    tmp_path: Path,
) -> None:
    def deaf_unless_first(world: World, process: Scripted) -> None:
        if process.pid == 1000:
            world.register(process)
        else:
            process.terminate = lambda: None  # type: ignore[method-assign]

    async def main() -> World:
        world = World("generator", tmp_path, deaf_unless_first)
        world.registry.wanted = {"generators": 2}
        running = asyncio.create_task(world.fleet.run())
        await world.until_serving()
        world.fleet.add(spec("generator", 1))
        assert [(p.live, p.starting) for p in world.registry.pools()] == [(1, 1)]
        await asyncio.wait({running}, timeout=0.1)
        for rank in (1, 2):  # the second is let go before it was even started
            if rank == 2:
                world.fleet.add(spec("generator", rank))
            leaving = world.fleet.children[f"generator-{rank}"]
            world.fleet.remove(leaving.name)
            assert await in_time(leaving.has_left.wait(), 10)
        world.fleet.kill_all()
        await running
        return world

    world = virtually(main())
    assert (world.lost, world.given_up) == ([], [])
