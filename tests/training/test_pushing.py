"""The learner's pushes: late joiners, a generator that does not share memory, a file that cannot be
written. tests/world has one that hangs.
"""

import asyncio
import threading
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
from async_rl.training.checkpoints import PUSHES_FILE, VERSIONS_FILE, Published, Pushed
from async_rl.weights.media import FileSender
from async_rl.weights.receiving import FileReader


class Generator:
    """Loads for real from files; answers probes so much off if told so."""

    def __init__(
        self, *, shares_memory: bool = True, pause_s: float = 0.1, is_off: float | None = None
    ) -> None:
        self.versions: list[int] = []
        self.urls: list[str] = []
        self.has_loaded = asyncio.Event()
        self.is_asked = asyncio.Event()
        self.may_read = asyncio.Event()
        self.may_read.set()
        self._pause_s = pause_s
        self._shares_memory = shares_memory
        self._is_off = is_off
        self._files = FileReader()

    async def call(self, request: Message, *, timeout_s: float) -> Message:
        if isinstance(request, Probe):
            rows = [row - np.float32(self._is_off or 0) for row in request.rows]
            return Logprobs(version=-1 if self._is_off is None else 0, rows=rows)
        assert isinstance(request, LoadWeights)
        self.is_asked.set()
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


async def test_a_late_joiner_gets_the_version_and_nobody_else_is_asked(tmp_path: Path) -> None:
    generators = {"a": Generator(), "b": Generator(pause_s=0.3), "c": Generator()}
    learner = Learner(tmp_path, generators)
    pauses_s: list[float] = []

    async with learner.running():
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
        await learner.push(1)
    assert [each.versions for each in generators.values()] == [[0, 1]] * 3
    assert pauses_s == [0.1, 0.3, 0.3], "of the slowest, whoever answers last"
    assert learner.pusher.metrics()["weights/pause_s"] == 0.6
    assert 0 < learner.pusher.metrics()["weights/push_s"] < 60
    published = list(records.read(tmp_path / VERSIONS_FILE, Published))
    assert [(each.version, each.life) for each in published] == [(0, 1), (1, 1)]


class Probing(Learner):
    """Its log-probs are the tokens."""

    async def lead(self, operation: Any) -> list[Any]:
        return [row.astype(np.float32) for row in operation.rows]


async def test_a_generator_with_other_weights_is_on_record_before_the_run_ends(
    tmp_path: Path,
) -> None:
    learner = Probing(tmp_path, {"a": Generator(is_off=9.0)})
    told = "a and the learner disagree by 9 nats"
    with pytest.raises(ExceptionGroup) as raised:
        await ended(learner)
    assert raised.group_contains(WeightsError, match=told)
    [answer] = records.read(tmp_path / PUSHES_FILE, Pushed)
    assert (answer.generator, answer.loaded, answer.reason) == ("a", 0, "")
    assert answer.probed is not None
    assert answer.probed.problem.startswith(told)


async def test_a_file_that_cannot_be_written_ends_the_run_and_no_generator_is_blamed(
    tmp_path: Path,
) -> None:
    (tmp_path / "weights").write_text("in the way")
    learner = Learner(tmp_path, {"a": Generator()}, "weights.transfer=filesystem")
    with pytest.raises(ExceptionGroup) as caught:
        await ended(learner)
    assert caught.group_contains(ConfigError, match="weights.transfer.path")
    assert learner.cut_off == []


async def ended(learner: Learner) -> None:
    """Push to generator a until the pusher fails."""
    async with learner.running():
        learner.serve("a")
        await learner.pusher.publish(0)
        await asyncio.get_running_loop().create_future()


async def test_each_member_is_reached_its_own_way_and_may_still_read_the_file_of_the_version_before(
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

    async with learner.running():
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
    assert (near.urls, far.versions, learner.cut_off) == (["", ""], [0, 1], [])
    folder = f"file://{tmp_path}/weights/life_1"
    assert far.urls == [f"{folder}/version_{version}.safetensors" for version in (0, 1)]
    assert list((tmp_path / "weights").iterdir()) == []


async def test_files_go_where_the_setting_says_and_later_versions_are_compared(
    tmp_path: Path,
) -> None:
    generator = Generator()
    settings = ("weights.transfer=filesystem", "weights.transfer.path=memory://elsewhere")
    (tmp_path / "my_run").mkdir()
    learner = Learner(tmp_path / "my_run", {"a": generator}, *settings)

    async with learner.running():
        learner.serve("a")
        await learner.push(0, 1)
    # A generator that has a file needs only what changes.
    assert learner.compared == [False, True]
    folder = "memory:///elsewhere/my_run/life_1"
    assert generator.urls == [f"{folder}/version_{version}.safetensors" for version in range(2)]
