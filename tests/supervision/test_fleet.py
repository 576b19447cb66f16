"""Facts about keeping processes alive, with a launcher whose processes are scripted."""

import asyncio
from pathlib import Path
from typing import NamedTuple

import pytest
from fleet_support import LIMITS, MAX_RESTARTS, Scripted, World, spec, virtually

from async_rl.core.types import Role


class Life(NamedTuple):
    """What a process does in each of its lives; without a code it stays."""

    code: int | None = None
    is_ready: bool = False
    error: str = ""
    why: str = ""


OF_NODE = "was lost with its node 10.0.0.3"
# As vLLM 0.32 prints it, seen on a GPU.
ENGINE = (
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
)
CAUSE = "ModuleNotFoundError: No module named 'torchvision'"
PRINTED = f"(EngineCore pid=7) ERROR 11-26 12:01:09 [core.py:1510] {CAUSE}\n"
NEVER_READY = "generator-0 was not ready and made no progress for 120 s"


@pytest.mark.parametrize(
    ("role", "life", "cause", "starts"),
    [
        ("generator", Life(-9, is_ready=True), "generator-0 was ended by SIGKILL", 3),
        ("generator", Life(-9, why=OF_NODE), f"generator-0 {OF_NODE}", 3),
        ("generator", Life(), NEVER_READY, 1),
        ("buffer", Life(1, error="DataError: row 3"), "buffer-0 failed: DataError: row 3", 1),
        ("generator", Life(1, error=ENGINE), f"generator-0 failed: {ENGINE}\n  {CAUSE}", 1),
        # An error that the learner reports is final, even after it was ready.
        ("learner", Life(1, is_ready=True, error="NaN"), "learner-0 failed: NaN", 1),
        (
            "verifier",
            Life(139),
            "verifier-0 exited with code 139; its last output was:\n  one\n  Segmentation fault",
            1,
        ),
    ],
)
def test_a_process_that_is_lost_comes_back_and_one_that_failed_ends_the_run_with_its_cause(
    tmp_path: Path, role: Role, life: Life, cause: str, starts: int
) -> None:
    printed = f"{PRINTED}{CAUSE}\n  File x\n{ENGINE}\n" if life.error == ENGINE else ""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / f"{role}-0.out").write_text(f"{printed}one\nSegmentation fault\n")

    def on_start(world: World, process: Scripted) -> None:
        process.why = life.why
        if life.is_ready:
            world.register(process)
        if life.error:
            world.fails(process, life.error)
        if life.code is not None:
            process.end(life.code)

    async def main() -> tuple[str, World]:
        world = World([spec(role)], tmp_path, on_start)
        async with world.running():
            return str(await world.fleet.failed), world

    told, world = virtually(main())
    limit = f"; it was restarted {MAX_RESTARTS} times within 300 s already"
    assert told.removesuffix(f"{limit} (supervisor.max_restarts)") == cause
    assert (limit in told) is (starts > 1)
    assert len(world.started) == starts
    assert world.lost == [(f"{role}-0", cause)] * (starts - 1)


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
            assert str(await world.fleet.failed) == NEVER_READY
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
