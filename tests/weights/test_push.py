"""Each generator gets a version through a medium that reaches it."""

import asyncio
import functools
from types import SimpleNamespace
from typing import Any

import pytest
from loop import VirtualLoop
from msgspec.structs import replace
from weights_support import MANIFEST, MEMBER, SEAT, learner_side, load

from async_rl.core.errors import BlockUnreachable, DeadlineExceeded, WeightsError
from async_rl.protocol.generator import LoadReport, LoadWeights
from async_rl.protocol.weights import SHARED_BLOCK, Manifest, StoredFile
from async_rl.weights import routes
from async_rl.weights.media import FileSender, Sender
from async_rl.weights.routes import Route, open_senders
from benchmarks.weights import push_model

VERSION_3 = replace(MANIFEST, version=3)
LOAD = load(1, ("g", 1), version=3)


class Generator:
    """Loads what it is asked to, by the shared block only if it shares memory with the learner."""

    def __init__(self, *, shares_memory: bool, loads: int = 3) -> None:
        self.asked: list[str] = []
        self._shares_memory = shares_memory
        self._loads = loads

    async def call(self, request: LoadWeights, *, timeout_s: float) -> LoadReport:
        source = request.source
        self.asked.append(source.url if isinstance(source, StoredFile) else "")
        if not isinstance(source, StoredFile) and not self._shares_memory:
            raise BlockUnreachable("no such block here")
        return LoadReport(version=self._loads, pause_s=0.1)


class InFile(FileSender):
    def write(self, manifest: Manifest) -> StoredFile:
        return StoredFile(url="a file")


async def pushed(
    generator: Generator, *kinds: type[Sender], transfer: str = "auto", num_pushes: int = 1
) -> list[str]:
    """What the generator was asked for, "" is the shared block, and when the block was released."""
    side = learner_side(f"weights.transfer={transfer}")
    route = Route(MEMBER, [kind(side) for kind in kinds] or open_senders(side))
    for _ in range(num_pushes):
        release = functools.partial(generator.asked.append, "written")
        await route.load(VERSION_3, LOAD, generator, handover=0, timeout_s=1, release=release)
    return generator.asked


async def test_a_version_takes_the_first_medium_that_reaches_the_generator() -> None:
    near, far = Generator(shares_memory=True), Generator(shares_memory=False)
    assert await pushed(near, Sender, InFile) == [""]
    # The block is tried once, since unreachable memory does not become reachable.
    found = await pushed(far, Sender, InFile, num_pushes=2)
    assert found == ["", *["written", "a file"] * 2]
    with pytest.raises(BlockUnreachable):
        await pushed(far, transfer="shared_memory")


async def test_a_generator_that_loaded_another_version_has_failed() -> None:
    with pytest.raises(WeightsError, match="it loaded version 2 instead of 3"):
        await pushed(Generator(shares_memory=True, loads=2))


def seconds_until_late(
    monkeypatch: pytest.MonkeyPatch, write_s: float, sent_s: float = 0.0, source: Any = SHARED_BLOCK
) -> tuple[int, str]:
    """Push to a silent generator in virtual time; return the seconds from the request, or from the
    end of a broadcast, and the reason. Two other generators read too.
    """

    class Slow(Sender):
        async def source(self, *_: object) -> Any:
            await asyncio.sleep(write_s)
            return source

    async def story() -> tuple[int, str]:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(routes.time, "monotonic", loop.time)
        begun_s = loop.time() + write_s + sent_s
        sent = asyncio.Event() if sent_s else None
        if sent is not None:
            loop.call_later(sent_s, sent.set)
        route = Route(MEMBER, [Slow(None)])  # type: ignore[arg-type]
        silent: Any = SimpleNamespace(call=lambda *_, **__: loop.create_future())
        limits: Any = {"handover": 0, "timeout_s": 60, "num_readers": 3, "release": list}
        with pytest.raises(DeadlineExceeded) as raised:
            await route.load(VERSION_3, LOAD, silent, sent=sent, **limits)
        return round(loop.time() - begun_s), str(raised.value)

    with asyncio.Runner(loop_factory=lambda: VirtualLoop(lambda: 0.0)) as runner:
        return runner.run(story())


def test_a_member_has_the_time_that_the_sender_took_for_each_that_reads_from_when_it_is_sent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert seconds_until_late(monkeypatch, 0.0) == (
        60,
        "version 3 was not loaded within 60 s (timeouts.start_s / 3)",
    )
    assert caplog.text == ""
    assert seconds_until_late(monkeypatch, 100.0) == (
        360,
        "version 3 was not loaded within 360 s (timeouts.start_s / 3, and 300 s for a slow medium)",
    )
    assert "version 3 took the learner 100 s to write, and g waited for it" in caplog.text
    assert seconds_until_late(monkeypatch, 0.0, 1000.0)[0] == 60
    seat = replace(SEAT, timeout_s=45.0)
    assert seconds_until_late(monkeypatch, 0.0, 1000.0, seat)[0] == 90, "twice its patience"


def test_the_page_has_the_computed_times_of_the_default_rates() -> None:
    assert push_model.table(push_model.Rates()) in push_model.PAGE.read_text()
