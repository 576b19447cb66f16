"""Facts about keeping processes alive, with a launcher whose processes are scripted."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.base import replace
from async_rl.config.timeouts import TimeoutsConfig
from async_rl.core.os import RESTART_CODE
from async_rl.core.types import Role
from async_rl.planning.topology import ProcessSpec
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.buffer import ReleaseGenerator
from async_rl.protocol.membership import Heartbeat, Register, ReportFatal
from async_rl.supervision.fleet import Fleet, Left, Lost
from async_rl.supervision.liveness import Liveness
from async_rl.supervision.registry import Registry

MAX_RESTARTS = 2
LIMITS = TimeoutsConfig(call_s=0.2, start_s=0.5, group_s=120)
"""A process is lost after 0.3 s. For tests of that alone: nobody here sends a heartbeat."""
CALM = TimeoutsConfig(call_s=60, start_s=120, group_s=120)
"""A process is lost after 90 s, so a machine that stands still for a second loses none."""


class Scripted:
    """A process that ends when told."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.waits_for = ""
        self.why = ""
        self.has_place = asyncio.Event()
        self.has_place.set()
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def placed(self) -> None:
        await self.has_place.wait()

    async def wait(self) -> int:
        return await asyncio.shield(self.code)

    def end(self, code: int) -> None:
        if not self.code.done():
            self.code.set_result(code)

    def terminate(self) -> None:
        self.end(0)

    def kill(self) -> None:
        self.end(-9)


class ScriptedLauncher:
    def __init__(self, on_start: Callable[[ProcessSpec, Scripted], None], output: Path) -> None:
        self.started: list[Scripted] = []
        self.started_twice = asyncio.Event()
        self.is_full = False
        self._on_start = on_start
        self._output = output

    async def open(self) -> str:
        return "127.0.0.1"

    async def close(self) -> None:
        pass

    async def start(self, spec: ProcessSpec) -> Scripted:
        process = Scripted(1000 + len(self.started))
        if self.is_full:
            process.pid = 0
            process.waits_for = "room on the cluster: 1 CPU"
            process.has_place.clear()
        self.started.append(process)
        if len(self.started) == 2:
            self.started_twice.set()
        self._on_start(spec, process)
        return process

    def output_of(self, name: str) -> Path:
        return self._output


def spec(role: Role, rank: int = 0) -> ProcessSpec:
    return ProcessSpec(name=f"{role}-{rank}", role=role, rank=rank, cores=(), gpus=0, env={})


class NoBuffer:
    """The buffer of a fleet of scripted processes, which have no tickets to return."""

    def __init__(self) -> None:
        self.released: list[str] = []

    async def call(self, request: ReleaseGenerator, *, timeout_s: float) -> Message:
        self.released.append(request.generator)
        return Ok()


def surroundings(registry: Registry, run_dir: Path, limits: TimeoutsConfig) -> dict[str, Any]:
    return {
        "run_dir": run_dir,
        "timeouts": limits,
        "liveness": Liveness(registry, limits, is_local=True),
        "buffer": NoBuffer(),
    }


class World:
    """A fleet of one process, or of several ranks, with everything around it."""

    def __init__(
        self,
        role: Role,
        tmp_path: Path,
        on_start: Callable[["World", Scripted], None],
        ranks: int = 1,
        limits: TimeoutsConfig = CALM,
    ) -> None:
        self.registry = Registry()
        self._events: list[Lost | Left] = []
        self.launcher = ScriptedLauncher(
            lambda _, process: (
                asyncio.get_running_loop().call_soon(on_start, self, process) and None
            ),
            tmp_path / "out",
        )
        self.fleet = Fleet(
            [spec(role, rank) for rank in range(ranks)],
            launcher=self.launcher,
            registry=self.registry,
            max_restarts=MAX_RESTARTS,
            log=logging.getLogger("test"),
            **surroundings(self.registry, tmp_path, limits),
        )
        self.role: Role = role

    @property
    def events(self) -> list[Lost | Left]:
        while not self.fleet.events.empty():
            self._events.append(self.fleet.events.get_nowait())
        return self._events

    @property
    def lost(self) -> list[str]:
        return [event.name for event in self.events if isinstance(event, Lost)]

    @property
    def reasons(self) -> list[str]:
        return [event.reason for event in self.events if isinstance(event, Lost)]

    @property
    def left(self) -> list[tuple[str, str]]:
        return [(e.spec.name, e.reason) for e in self.events if isinstance(e, Left)]

    def fails(self, process: Scripted, name: str, text: str) -> None:
        self.fleet.note_fatal(ReportFatal(name=name, pid=process.pid, text=text))

    def register(self, process: Scripted) -> None:
        self.registry.register(
            Register(name=f"{self.role}-0", role=self.role, pid=process.pid, address="tcp://x")
        )

    async def until_failed(self) -> str:
        running = asyncio.create_task(self.fleet.run())
        try:
            async with asyncio.timeout(20):
                return str(await self.fleet.failed)
        finally:
            self.fleet.kill_all()
            await running


def test_waiting_for_a_place_is_not_counted_as_its_start_and_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("async_rl.supervision.child._PLACED_SOON_S", 0.1)

    async def main() -> tuple[list[tuple[str, str, int]], str]:
        world = World("generator", tmp_path, lambda *_: None, limits=LIMITS)
        world.launcher.is_full = True
        running = asyncio.create_task(world.fleet.run())
        await asyncio.wait({running}, timeout=2 * LIMITS.start_s)
        shown = [(m.state, m.waits_for, m.pid) for m in world.registry.members]
        assert not world.fleet.failed.done()
        world.launcher.started[0].pid = 1000
        world.launcher.started[0].has_place.set()
        async with asyncio.timeout(20):
            cause = str(await world.fleet.failed)
        world.fleet.kill_all()
        await running
        return shown, cause

    shown, cause = asyncio.run(main())
    assert shown == [("starting", "room on the cluster: 1 CPU", 0)]
    assert cause == "generator-0 was not ready and made no progress for 0.5 s"
    assert "generator-0 waits for room on the cluster: 1 CPU" in caplog.text


def test_an_end_that_the_launcher_explains_is_told_in_its_words_and_comes_back(
    tmp_path: Path,
) -> None:
    def its_node_dies(_: World, process: Scripted) -> None:
        process.why = "was lost with its node 10.0.0.3"
        process.end(-9)

    async def main() -> tuple[str, list[str]]:
        world = World("generator", tmp_path, its_node_dies)
        return await world.until_failed(), world.reasons

    cause, reasons = asyncio.run(main())
    assert reasons == ["generator-0 was lost with its node 10.0.0.3"] * MAX_RESTARTS
    assert cause.startswith("generator-0 was lost with its node 10.0.0.3; it was restarted 2 times")


def test_a_process_that_was_ready_is_started_again_until_the_limit(tmp_path: Path) -> None:
    def dies_when_ready(world: World, process: Scripted) -> None:
        world.register(process)
        process.end(-9)

    async def main() -> tuple[str, int, list[str]]:
        world = World("generator", tmp_path, dies_when_ready)
        cause = await world.until_failed()
        return cause, len(world.launcher.started), world.reasons

    cause, started, reasons = asyncio.run(main())
    assert started == 3
    assert reasons == ["generator-0 was ended by SIGKILL"] * 2
    assert cause.startswith("generator-0 was ended by SIGKILL; it was restarted 2 times")
    assert "supervisor.max_restarts" in cause


def test_a_process_that_never_was_ready_ends_the_run_with_its_root_cause(tmp_path: Path) -> None:
    def fails(world: World, process: Scripted) -> None:
        world.fails(process, "buffer-0", "DataError: rows.jsonl line 3 has no prompt")
        process.end(1)

    async def main() -> tuple[str, int]:
        world = World("buffer", tmp_path, fails)
        return await world.until_failed(), len(world.launcher.started)

    assert asyncio.run(main()) == ("buffer-0 failed: DataError: rows.jsonl line 3 has no prompt", 1)


def test_a_crash_without_a_word_shows_the_last_output(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("one\nSegmentation fault\n")

    async def main() -> str:
        return await World("verifier", tmp_path, lambda _, process: process.end(139)).until_failed()

    assert (
        asyncio.run(main())
        == "verifier-0 exited with code 139; its last output was:\n  one\n  Segmentation fault"
    )


def test_a_learner_that_is_killed_is_started_again_until_the_limit(tmp_path: Path) -> None:
    def dies_when_ready(world: World, process: Scripted) -> None:
        world.register(process)
        process.end(-11)

    async def main() -> tuple[str, int, list[str]]:
        world = World("learner", tmp_path, dies_when_ready)
        return await world.until_failed(), len(world.launcher.started), world.lost

    cause, started, lost = asyncio.run(main())
    assert cause.startswith("learner-0 was ended by SIGSEGV; it was restarted 2 times")
    assert (started, lost) == (3, ["learner-0", "learner-0"])


def test_a_learner_that_tells_its_own_error_ends_the_run_even_after_it_was_ready(
    tmp_path: Path,
) -> None:
    def fails_when_ready(world: World, process: Scripted) -> None:
        world.register(process)
        world.fails(process, "learner-0", "NonFiniteError: step 3")
        process.end(1)

    async def main() -> tuple[str, int]:
        world = World("learner", tmp_path, fails_when_ready)
        return await world.until_failed(), len(world.launcher.started)

    assert asyncio.run(main()) == ("learner-0 failed: NonFiniteError: step 3", 1)


def test_the_report_of_an_earlier_life_is_not_that_of_the_present_one(tmp_path: Path) -> None:
    """A learner behind a broken network may report its end after it was replaced."""

    def on_start(world: World, process: Scripted) -> None:
        world.register(process)
        if len(world.launcher.started) == 1:
            process.end(-9)
            return
        world.fails(world.launcher.started[0], "learner-0", "Superseded: another life")
        process.end(-9 if len(world.launcher.started) == 2 else 0)

    async def main() -> int:
        world = World("learner", tmp_path, on_start)
        async with asyncio.timeout(20):
            await world.fleet.run()
        return len(world.launcher.started)

    assert asyncio.run(main()) == 3


def test_a_learner_that_asks_to_be_started_again_is_restarted(tmp_path: Path) -> None:
    def on_start(world: World, process: Scripted) -> None:
        world.register(process)
        process.end(RESTART_CODE if len(world.launcher.started) == 1 else 0)

    async def main() -> list[str]:
        world = World("learner", tmp_path, on_start)
        async with asyncio.timeout(20):
            await world.fleet.run()
        return world.reasons

    assert asyncio.run(main()) == ["learner-0 asked to be started again"]


def test_ranks_of_the_learner_end_and_start_together_and_the_lost_one_is_the_cause(
    tmp_path: Path,
) -> None:
    """Rank 0 tells an error because its peer is gone, before the end of the peer is noticed."""

    def on_start(world: World, process: Scripted) -> None:
        num = len(world.launcher.started)
        world.registry.register(
            Register(
                name=f"learner-{process.pid % 2}",
                role="learner",
                pid=process.pid,
                address="tcp://x",
            )
        )
        if num == 2:
            world.fails(process, "learner-0", "RuntimeError: connection closed by peer")
            world.launcher.started[0].end(1)
            asyncio.get_running_loop().call_later(0.05, world.launcher.started[1].end, -9)
        if num == 4:
            for rank in world.launcher.started[2:]:
                rank.end(0)

    async def main() -> tuple[list[str], int, bool]:
        world = World("learner", tmp_path, on_start, ranks=2)
        async with asyncio.timeout(20):
            await world.fleet.run()
        return world.lost, len(world.launcher.started), world.fleet.learner_done.is_set()

    assert asyncio.run(main()) == (["learner-0", "learner-1"], 4, True)


def test_a_process_that_is_killed_before_it_was_ready_is_started_again(tmp_path: Path) -> None:
    def killed_once(world: World, process: Scripted) -> None:
        process.end(-9) if len(world.launcher.started) == 1 else process.end(1)

    async def main() -> tuple[str, int]:
        world = World("generator", tmp_path, killed_once)
        return await world.until_failed(), len(world.launcher.started)

    cause, started = asyncio.run(main())
    assert (cause.splitlines()[0], started) == (
        "generator-0 exited with code 1; its last output was:",
        2,
    )


def test_a_learner_that_exits_0_has_finished(tmp_path: Path) -> None:
    async def main() -> bool:
        world = World("learner", tmp_path, lambda _, process: process.end(0))
        async with asyncio.timeout(5):
            await world.fleet.run()
        return world.fleet.learner_done.is_set() and not world.fleet.failed.done()

    assert asyncio.run(main())


def test_a_process_that_never_gets_ready_is_killed_at_its_start_timeout(tmp_path: Path) -> None:
    async def main() -> str:
        return await World("generator", tmp_path, lambda *_: None, limits=LIMITS).until_failed()

    assert asyncio.run(main()) == "generator-0 was not ready and made no progress for 0.5 s"


def test_a_silent_process_is_killed_and_started_again(tmp_path: Path) -> None:
    async def main() -> tuple[list[str], int]:
        world = World("generator", tmp_path, World.register, limits=LIMITS)
        running = asyncio.create_task(world.fleet.run())
        async with asyncio.timeout(10):
            await world.launcher.started_twice.wait()
        first = world.launcher.started[0].code.result()
        world.fleet.kill_all()
        await running
        return world.lost, first

    assert asyncio.run(main()) == (["generator-0"], -9)


def test_a_process_that_is_silent_while_the_run_ends_may_finish(tmp_path: Path) -> None:
    """A learner that saves a large checkpoint may have no time for heartbeats."""

    async def main() -> int:
        world = World("learner", tmp_path, World.register, limits=LIMITS)
        running = asyncio.create_task(world.fleet.run())
        while not world.registry.directory.members:
            await world.registry.directory.changed(world.registry.directory.revision)
        world.fleet.begin_stop()
        learner = world.launcher.started[0]
        await asyncio.wait({running, learner.code}, timeout=3 * LIMITS.silence_s)
        assert not learner.code.done()
        learner.end(0)
        await running
        return learner.code.result()

    assert asyncio.run(main()) == 0


def test_silence_is_noticed_from_the_moment_a_process_serves_however_long_it_may_start() -> None:
    async def main() -> str:
        registry = Registry()
        registry.add("g", "generator", 1)
        limits = replace(LIMITS, start_s=600, call_s=0.1 / 1.5)
        listening = asyncio.create_task(Liveness(registry, limits, is_local=True).until_lost("g"))
        await asyncio.sleep(0)
        registry.register(Register(name="g", role="generator", pid=1, address="tcp://x"))
        async with asyncio.timeout(10):
            return await listening

    assert asyncio.run(main()) == "sent no heartbeat for 0.1 s"


def test_heartbeats_of_a_predecessor_are_ignored() -> None:
    registry = Registry()
    registry.register(Register(name="g", role="generator", pid=2, address="tcp://x"))
    beat = Heartbeat(name="g", pid=1, state="old", waits_for="", since_s=0, version=7, counters={})
    registry.beat(beat)
    assert [(m.pid, m.version) for m in registry.members] == [(2, -1)]


def test_the_directory_changes_only_when_someone_begins_or_ends_to_serve() -> None:
    registry = Registry()
    start = registry.directory.revision
    registry.add("g", "generator", 1)
    assert registry.directory.revision == start
    registry.register(Register(name="g", role="generator", pid=1, address="tcp://x"))
    assert [m.name for m in registry.directory.members] == ["g"]
    registry.mark_ended("g")
    assert registry.directory.members == []
    assert registry.directory.revision == start + 2
    registry.mark_ended("g")
    assert registry.directory.revision == start + 2
