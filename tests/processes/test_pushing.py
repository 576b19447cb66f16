"""The learner's pushes: late joiners, a generator that hangs, one that does not share memory, a file that cannot be written."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from async_rl.errors import BlockUnreachable, ConfigError
from async_rl.launchers.compose import compose
from async_rl.messages import Expel, LoadReport, LoadWeights, Logprobs, Manifest, Member, Members, Message, Probe
from async_rl.observability.activity import Activity
from async_rl.processes.directory import Directory
from async_rl.processes.pushing import Pusher
from async_rl.weights.files import FileReader
from async_rl.wire.shared_tensors import SharedTensors, layout

TENSORS = [("embed", "float32", [5, 1], 20)]


class Generator:
    """Loads for real from files; hangs or fails if told so."""

    def __init__(self, *, hangs: bool = False, shares_memory: bool = True) -> None:
        self.versions: list[int] = []
        self.urls: list[str] = []
        self.has_loaded = asyncio.Event()
        self._hangs = hangs
        self._shares_memory = shares_memory
        self._files = FileReader()

    async def call(self, request: Message, *, timeout_s: float) -> Message:
        if isinstance(request, Probe):
            return Logprobs(version=-1, rows=[])
        assert isinstance(request, LoadWeights)
        if self._hangs:
            await asyncio.get_running_loop().create_future()
        if request.url:
            self._files.fetch(request.url, request.manifest)
        elif not self._shares_memory:
            raise BlockUnreachable("no such block here")
        self.urls.append(request.url)
        self.versions.append(request.manifest.version)
        self.has_loaded.set()
        return LoadReport(version=request.manifest.version, load_s=0.2, pause_s=0.1 * len(self.versions))


class Learner:
    """A pusher with everything around it that it needs."""

    def __init__(self, run_dir: Path, generators: dict[str, Generator], *overrides: str) -> None:
        self._generators = generators
        self._block = SharedTensors(*layout(TENSORS))
        self._directory = Directory()
        self.cut_off: list[Expel] = []
        config = compose("grpo_code", ["weights.deadline_s=0.3", "weights.probe_every_pushes=0", *overrides])
        context: Any = SimpleNamespace(
            config=config,
            run_dir=run_dir,
            activity=Activity(),
            directory=self._directory,
            supervisor=self,
            incarnation_of=lambda member: generators[member.name],
        )
        self.pusher = Pusher(context, self)  # type: ignore[arg-type]

    def serve(self, *names: str) -> None:
        """These generators are in the directory from now on."""
        members = [
            Member(name=n, role="generator", pid=1, address="a", state="", waits_for="", since_s=0, version=-1, counters={}) for n in names
        ]
        self._directory.update(Members(epoch=self._directory.epoch + 1, members=members))

    async def call(self, request: Expel, *, timeout_s: float) -> None:
        """The supervisor: who is cut off leaves."""
        self.cut_off.append(request)
        self.serve(*(m.name for m in self._directory.members if m.name != request.name))

    async def publish(self, version: int) -> Manifest:
        """The ranks."""
        return self._block.write(version, [bytes_of(version)])

    async def logprobs(self, rows: object) -> list[Any]:
        """The ranks' answer to a probe that no generator here can answer."""
        return []

    def run(self, story: Callable[[], Awaitable[None]]) -> None:
        """The story beside the pusher, in a minute at most."""

        async def both() -> None:
            async with asyncio.timeout(60), asyncio.TaskGroup() as group:
                pushing = group.create_task(self.pusher.run())
                await story()
                pushing.cancel()

        asyncio.run(both())


def bytes_of(version: int) -> Any:
    return np.full(20, version, np.uint8)


def test_a_late_joiner_gets_the_version_and_nobody_else_is_asked(tmp_path: Path) -> None:
    generators = {"a": Generator(), "b": Generator()}
    learner = Learner(tmp_path, generators)

    async def story() -> None:
        learner.serve("a")
        await learner.pusher.publish(0)
        await learner.pusher.live(0)
        learner.serve("a", "b")
        await generators["b"].has_loaded.wait()
        await learner.pusher.publish(1)
        await learner.pusher.live(1)

    learner.run(story)
    assert generators["a"].versions == generators["b"].versions == [0, 1]
    assert learner.pusher.metrics()["weights/pause_s"] == pytest.approx(0.2)


def test_a_generator_that_hangs_is_cut_off_and_the_learner_goes_on(tmp_path: Path) -> None:
    generators = {"a": Generator(), "b": Generator(hangs=True)}
    learner = Learner(tmp_path, generators)

    async def story() -> None:
        learner.serve("a", "b")
        await learner.pusher.publish(0)
        await generators["a"].has_loaded.wait()
        await learner.pusher.publish(1)
        await learner.pusher.live(1)

    learner.run(story)
    assert generators["a"].versions == [0, 1]
    assert [(e.name, e.reason) for e in learner.cut_off] == [("b", "version 0 was not loaded within 0.3 s (weights.deadline_s)")]


def test_a_mixed_fleet_gets_each_version_by_the_way_that_reaches_each_member(tmp_path: Path) -> None:
    generators = {"near": Generator(), "far": Generator(shares_memory=False)}
    learner = Learner(tmp_path, generators)

    async def story() -> None:
        learner.serve("near", "far")
        for version in (0, 1):
            await learner.pusher.publish(version)
            await learner.pusher.live(version)

    learner.run(story)
    assert generators["near"].urls == ["", ""]
    assert [url.rpartition("/")[2] for url in generators["far"].urls] == ["version_0.safetensors", "version_1.safetensors"]
    assert learner.cut_off == []
    assert list((tmp_path / "weights").iterdir()) == []


@pytest.mark.parametrize("override", ["weights.path=null", "weights.path=memory://elsewhere"])
def test_files_go_where_the_setting_says(override: str, tmp_path: Path) -> None:
    generators = {"a": Generator()}
    learner = Learner(tmp_path / "my_run", generators, "weights.transfer=filesystem", override)

    async def story() -> None:
        learner.serve("a")
        await learner.pusher.publish(0)
        await learner.pusher.live(0)

    learner.run(story)
    folder = "memory:///elsewhere/my_run" if "memory" in override else f"file://{tmp_path}/my_run/weights"
    assert generators["a"].urls == [f"{folder}/version_0.safetensors"]


def test_a_file_that_cannot_be_written_ends_the_run_and_no_generator_is_blamed(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("in the way")
    learner = Learner(tmp_path, {"a": Generator()}, "weights.transfer=filesystem")

    async def story() -> None:
        learner.serve("a")
        await learner.pusher.publish(0)
        await learner.pusher.live(0)

    with pytest.raises(ExceptionGroup) as caught:
        learner.run(story)
    assert caught.group_contains(ConfigError, match="weights.path")
    assert learner.cut_off == []
