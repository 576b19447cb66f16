"""The learner's pushes: late joiners, a generator that hangs, one that does not share memory, a
file that cannot be written.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pushing_support import Learner

from async_rl.core import records
from async_rl.core.errors import BlockUnreachable, ConfigError, WeightsError
from async_rl.protocol.base import Message
from async_rl.protocol.generator import LoadReport, LoadWeights, Logprobs, Probe
from async_rl.protocol.weights import StoredFile
from async_rl.runtime.directory import Directory
from async_rl.training import pushing
from async_rl.training.checkpoints import PUSHES_FILE, VERSIONS_FILE, Published, Pushed
from async_rl.weights.files import FileReader, FileSender
from async_rl.weights.membership import Membership


class Generator:
    """Loads for real from files; hangs or fails if told so."""

    def __init__(
        self, *, hangs: bool = False, shares_memory: bool = True, pause_s: float = 0.1
    ) -> None:
        self.versions: list[int] = []
        self.urls: list[str] = []
        self.has_loaded = asyncio.Event()
        self.is_asked = asyncio.Event()
        self.may_read = asyncio.Event()
        self.may_read.set()
        self._pause_s = pause_s
        self._hangs = hangs
        self._shares_memory = shares_memory
        self._files = FileReader()

    async def call(self, request: Message, *, timeout_s: float) -> Message:
        if isinstance(request, Probe):
            return Logprobs(version=-1, rows=[])
        assert isinstance(request, LoadWeights)
        self.is_asked.set()
        if self._hangs:
            await asyncio.get_running_loop().create_future()
        url = ""
        if isinstance(request.source, StoredFile):
            url = request.source.url
            await self.may_read.wait()
            self._files.fetch(request.source, request.manifest)
        elif not self._shares_memory:
            raise BlockUnreachable("no such block here")
        self.urls.append(url)
        self.versions.append(request.manifest.version)
        self.has_loaded.set()
        pause_s = self._pause_s * len(self.versions)
        return LoadReport(version=request.manifest.version, pause_s=pause_s)


def test_a_late_joiner_gets_the_version_and_nobody_else_is_asked(tmp_path: Path) -> None:
    generators = {"a": Generator(), "b": Generator(pause_s=0.3), "c": Generator()}
    learner = Learner(tmp_path, generators)
    pauses_s: list[float] = []

    async def story() -> None:
        learner.serve("a")
        await learner.pusher.publish(0)
        for number, joiner in enumerate(generators.values(), 1):
            learner.serve(*list(generators)[:number])
            await joiner.has_loaded.wait()
            await learner.pusher.live(0)
            pauses_s.append(learner.pusher.metrics()["weights/pause_s"])
            for _ in range(20):  # until the pusher's loop has written the answer
                await asyncio.sleep(0)
            answers = records.read(tmp_path / PUSHES_FILE, Pushed)
            assert [(p.generator, p.pid) for p in answers] == [(n, 1) for n in "abc"[:number]]
        await learner.pusher.publish(1)
        await learner.pusher.live(1)

    learner.run(story)
    assert [each.versions for each in generators.values()] == [[0, 1]] * 3
    assert pauses_s == [0.1, 0.3, 0.3], "of the slowest, whoever answers last"
    assert learner.pusher.metrics()["weights/pause_s"] == 0.6
    assert 0 < learner.pusher.metrics()["weights/push_s"] < 60
    published = list(records.read(tmp_path / VERSIONS_FILE, Published))
    assert [(each.version, each.life) for each in published] == [(0, 1), (1, 1)]


def test_a_generator_that_hangs_is_cut_off_and_the_learner_goes_on(tmp_path: Path) -> None:
    generators = {"a": Generator(), "b": Generator(hangs=True)}
    learner = Learner(tmp_path, generators, "timeouts.start_s=6")
    meanwhile: list[Pushed] = []

    async def story() -> None:
        learner.serve("a", "b")
        await learner.pusher.publish(0)
        await generators["a"].has_loaded.wait()
        await learner.pusher.publish(1)
        await learner.pusher.live(1)
        meanwhile.extend(records.read(tmp_path / PUSHES_FILE, Pushed))

    learner.run(story)
    assert generators["a"].versions == [0, 1]
    assert [(e.name, e.reason) for e in learner.cut_off] == [
        ("b", "version 0 was not loaded within 2 s (timeouts.start_s / 3)")
    ]
    answers = list(records.read(tmp_path / PUSHES_FILE, Pushed))
    assert meanwhile == answers[: len(meanwhile) or 1], "they are on record during the run"
    assert [(p.life, p.generator, p.pid, p.version, p.loaded, p.reason) for p in answers] == [
        (1, "a", 1, 0, 0, ""),
        (1, "b", 1, 0, None, learner.cut_off[0].reason),
        (1, "a", 1, 1, 1, ""),
    ]


def test_a_learner_that_leaves_starts_no_load_and_does_not_wait_long_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pushing, "SETTLE_S", 0.05)
    generators = {"a": Generator(hangs=True), "late": Generator()}
    learner = Learner(tmp_path, generators)

    async def story() -> None:
        learner.serve("a")
        await learner.pusher.publish(0)
        await generators["a"].is_asked.wait()
        await learner.pusher.settle()
        learner.serve("a", "late")
        for _ in range(20):
            await asyncio.sleep(0)

    learner.run(story)
    assert "version 0 is still being loaded after 0.05 s" in caplog.text
    assert not generators["late"].is_asked.is_set()


def test_a_generator_with_other_weights_is_on_record_before_the_run_ends(tmp_path: Path) -> None:
    class Stale(Generator):
        async def call(self, request: Message, *, timeout_s: float) -> Message:
            if isinstance(request, Probe):
                return Logprobs(version=0, rows=[row - 9.0 for row in request.rows])
            return await super().call(request, timeout_s=timeout_s)

    class Probing(Learner):
        async def lead(self, operation: Any) -> list[Any]:
            return [row.astype(np.float32) for row in operation.rows]

    learner = Probing(tmp_path, {"a": Stale()})

    async def story() -> None:
        learner.serve("a")
        await learner.pusher.publish(0)
        await asyncio.get_running_loop().create_future()

    with pytest.raises(ExceptionGroup) as raised:
        learner.run(story)
    assert raised.group_contains(WeightsError, match="a and the learner disagree by 9 nats")
    [answer] = records.read(tmp_path / PUSHES_FILE, Pushed)
    assert (answer.generator, answer.loaded, answer.reason) == ("a", 0, "")
    assert answer.probed is not None
    assert answer.probed.problem.startswith("a and the learner disagree by 9 nats")


def test_a_file_that_takes_long_to_write_is_no_fault_of_the_generators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = FileSender.write

    def slow(self: FileSender, *arguments: Any) -> StoredFile:
        time.sleep(0.6)  # storage that needs longer than push_s, which is 0.5 s
        return write(self, *arguments)

    monkeypatch.setattr(FileSender, "write", slow)
    generators = {"a": Generator(), "b": Generator()}
    learner = Learner(tmp_path, generators, "weights.transfer=filesystem", "timeouts.start_s=1.5")

    async def story() -> None:
        learner.serve("a", "b")
        await learner.pusher.publish(0)
        await learner.pusher.live(0)

    with caplog.at_level(logging.WARNING):
        learner.run(story)
    assert learner.cut_off == []
    assert generators["a"].versions == generators["b"].versions == [0]
    assert "version 0 took the learner 1 s to write" in caplog.text


def test_a_mixed_fleet_gets_each_version_by_the_way_that_reaches_each_member(
    tmp_path: Path,
) -> None:
    generators = {"near": Generator(), "far": Generator(shares_memory=False)}
    learner = Learner(tmp_path, generators)

    async def story() -> None:
        learner.serve("near", "far")
        for version in (0, 1):
            await learner.pusher.publish(version)
            await learner.pusher.live(version)

    learner.run(story)
    assert generators["near"].urls == ["", ""]
    assert [url.rpartition("/")[2] for url in generators["far"].urls] == [
        "version_0.safetensors",
        "version_1.safetensors",
    ]
    assert learner.cut_off == []
    assert list((tmp_path / "weights").iterdir()) == []


def test_a_version_is_published_while_a_far_generator_still_reads_the_file_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = Generator(), Generator(shares_memory=False)
    learner = Learner(tmp_path, {"near": near, "far": far})
    may_write = threading.Event()
    write = FileSender.write

    def gated(self: FileSender, *arguments: Any) -> StoredFile:
        may_write.wait(30)
        return write(self, *arguments)

    monkeypatch.setattr(FileSender, "write", gated)

    async def story() -> None:
        far.may_read.clear()
        learner.serve("near", "far")
        await learner.pusher.publish(0)
        await near.has_loaded.wait()
        # It waits for the file only.
        published = asyncio.create_task(learner.pusher.publish(1))
        await asyncio.sleep(0)
        may_write.set()
        await published
        await far.is_asked.wait()
        assert far.versions == []
        far.may_read.set()
        await learner.pusher.live(1)

    learner.run(story)
    assert far.versions == [0, 1]


@pytest.mark.parametrize(
    "override", ["weights.transfer.path=null", "weights.transfer.path=memory://elsewhere"]
)
def test_files_go_where_the_setting_says(override: str, tmp_path: Path) -> None:
    generators = {"a": Generator()}
    (tmp_path / "my_run").mkdir()
    learner = Learner(tmp_path / "my_run", generators, "weights.transfer=filesystem", override)

    async def story() -> None:
        learner.serve("a")
        for version in range(2):
            await learner.pusher.publish(version)
            await learner.pusher.live(version)

    learner.run(story)
    # A generator that has a file needs only what changes.
    assert learner.compared == [False, True]
    folder = (
        "memory:///elsewhere/my_run"
        if "memory" in override
        else f"file://{tmp_path}/my_run/weights"
    )
    assert generators["a"].urls == [f"{folder}/life_1/version_{v}.safetensors" for v in range(2)]


def test_a_file_that_cannot_be_written_ends_the_run_and_no_generator_is_blamed(
    tmp_path: Path,
) -> None:
    (tmp_path / "weights").write_text("in the way")
    learner = Learner(tmp_path, {"a": Generator()}, "weights.transfer=filesystem")

    async def story() -> None:
        learner.serve("a")
        await learner.pusher.publish(0)
        await learner.pusher.live(0)

    with pytest.raises(ExceptionGroup) as caught:
        learner.run(story)
    assert caught.group_contains(ConfigError, match="weights.transfer.path")
    assert learner.cut_off == []


class InTurn:
    """A fleet whose generators answer one after another."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def call(self, request: Message, *, timeout_s: float) -> Message:
        if isinstance(request, Probe):
            return Logprobs(version=-1, rows=[])
        assert isinstance(request, LoadWeights)
        async with self._turn:
            for _ in range(5):  # the pusher's loop runs between two answers if it is woken
                await asyncio.sleep(0)
        return LoadReport(version=request.manifest.version, pause_s=0.1)


def looks_at_the_fleet(
    tmp_path: Path, num_members: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int]:
    """How often one push looks at all members: in the directory, and for new loads."""
    fleet = InTurn()
    learner = Learner(tmp_path, dict.fromkeys(map(str, range(num_members)), fleet))
    looks = [0, 0]

    def counted(kind: type, name: str, index: int) -> None:
        original = getattr(kind, name)

        def call(*arguments: Any) -> Any:
            looks[index] += 1
            return original(*arguments)

        monkeypatch.setattr(kind, name, call)

    counted(Directory, "of_role", 0)
    counted(Membership, "behind", 1)

    async def story() -> None:
        learner.serve(*map(str, range(num_members)))
        await learner.pusher.publish(1)
        await learner.pusher.live(1)

    learner.run(story)
    monkeypatch.undo()
    return looks[0], looks[1]


def test_a_push_looks_at_all_members_as_often_in_a_large_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = looks_at_the_fleet(tmp_path, 4, monkeypatch)
    assert looks_at_the_fleet(tmp_path, 64, monkeypatch) == small
    assert max(small) < 5
