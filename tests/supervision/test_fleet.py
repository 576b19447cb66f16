"""Facts about keeping processes alive, with a launcher whose processes are scripted."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fleet_support import LIMITS, MAX_RESTARTS, Scripted, World, spec, virtually
from tables import table


@pytest.mark.parametrize("life", table(__file__, "lives"))
def test_a_process_that_is_lost_comes_back_and_one_that_failed_ends_the_run_with_its_cause(
    tmp_path: Path, life: dict[str, Any]
) -> None:
    role = life["role"]
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / f"{role}-0.out").write_text(life.get("printed", ""))

    def on_start(world: World, process: Scripted) -> None:
        process.why = life.get("why", "")
        if "is_ready" in life:
            world.register(process)
        if "error" in life:
            world.fails(process, life["error"])
        if "code" in life:
            process.end(life["code"])

    async def main() -> tuple[str, World]:
        world = World([spec(role)], tmp_path, on_start)
        async with world.running():
            return str(await world.fleet.failed), world

    told, world = virtually(main())
    limit = f"; it was restarted {MAX_RESTARTS} times within 300 s already"
    assert told.removesuffix(f"{limit} (supervisor.max_restarts)") == life["cause"]
    assert (limit in told) is (life["starts"] > 1)
    assert len(world.started) == life["starts"]
    assert world.lost == [(f"{role}-0", life["cause"])] * (life["starts"] - 1)


def test_waiting_for_a_place_is_not_counted_as_its_start_and_is_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        world = World([spec("generator")], tmp_path, lambda *_: None)
        world.is_full = True
        place = "room on the cluster: 1 CPU"
        async with world.running():
            await asyncio.sleep(2 * LIMITS.start_s)
            (member,) = world.registry.members
            assert (member.state, member.waits_for, member.pid) == ("starting", place, 0)
            assert not world.fleet.failed.done()
            world.started[0].pid = 1000
            world.started[0].has_place.set()
            assert (
                str(await world.fleet.failed)
                == "generator-0 was not ready and made no progress for 120 s"
            )
        assert f"generator-0 waits for {place}" in caplog.text

    virtually(main())


def test_ranks_of_the_learner_end_together_and_the_lost_one_is_the_cause(tmp_path: Path) -> None:
    """Rank 0 tells an error because its peer is gone, before the end of the peer is noticed."""

    def on_start(world: World, process: Scripted) -> None:
        started = world.started
        world.register(process)
        if len(started) == 2:
            world.fails(started[0], "RuntimeError: connection closed by peer")
            started[0].end(1)
            asyncio.get_running_loop().call_later(0.05, started[1].end, -9)
        if len(started) == 4:
            for rank in started[2:]:
                rank.end(0)

    async def main() -> World:
        world = World([spec("learner", 0), spec("learner", 1)], tmp_path, on_start)
        await world.fleet.run()
        return world

    world = virtually(main())
    assert [name for name, _ in world.lost] == ["learner-0", "learner-1"]
    assert len(world.started) == 4
    assert world.fleet.learner_done.done()


def test_a_process_that_is_silent_while_the_run_ends_may_finish(tmp_path: Path) -> None:
    """A learner that saves a large checkpoint may have no time for heartbeats."""

    async def main() -> None:
        world = World([spec("learner")], tmp_path, World.register)
        async with world.running():
            await world.until("learner-0")
            world.fleet.begin_stop()
            await asyncio.sleep(3 * LIMITS.silence_s)
            assert not world.started[0].code.done()

    virtually(main())


def test_an_added_process_that_cannot_start_is_given_up(tmp_path: Path) -> None:
    def fails_unless_first(world: World, process: Scripted) -> None:
        if process.pid == 1000:
            world.register(process)
        else:
            world.fails(process, "OutOfMemory: 9 GB")
            process.end(1)

    async def main() -> None:
        world = World([spec("generator")], tmp_path, fails_unless_first)
        async with world.running():
            await world.until("generator-0")
            world.fleet.add(spec("generator", 1))
            await world.fleet.children["generator-1"].has_left.wait()
            assert not world.fleet.failed.done()
        assert world.lost == []
        assert world.given_up == [("generator-1", "failed: OutOfMemory: 9 GB")]

    virtually(main())
