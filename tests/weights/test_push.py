"""Each generator gets a version through a medium that reaches it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composing import compose_unchecked

from async_rl.core.errors import BlockUnreachable, Unavailable, WeightsError
from async_rl.protocol.generator import LoadReport, LoadWeights
from async_rl.protocol.membership import Member
from async_rl.protocol.weights import Manifest, StoredFile, TensorEntry
from async_rl.weights.files import FileSender
from async_rl.weights.media import LearnerSide
from async_rl.weights.membership import Load
from async_rl.weights.routes import Caller, Route, open_senders

TENSOR = TensorEntry(name="a", dtype="float32", shape=[1], offset=64, size_bytes=4)
MANIFEST = Manifest(version=3, path="/nowhere", tensors=[TENSOR], total_bytes=0, checksum=0)
MEMBER = Member(
    name="g",
    role="generator",
    pid=1,
    address="tcp://127.0.0.1:1",
    state="",
    waits_for="",
    since_s=0,
    version=-1,
    counters={},
    devices=["cpu"],
)
LOAD = Load(number=1, version=3, members=frozenset([("g", 1)]), missing={("g", 1)})


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
        return LoadReport(version=self._loads, load_s=0.2, pause_s=0.1)


@pytest.fixture(autouse=True)
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(_: FileSender, manifest: Manifest, keep: object) -> StoredFile:
        return StoredFile(url=f"memory://version_{manifest.version}")

    monkeypatch.setattr(FileSender, "write", write)


async def load(route: Route, caller: Caller, release: Callable[[], Any] = list) -> None:
    await route.load(MANIFEST, LOAD, caller, handover=0, timeout_s=1, release=release)


def route_of(transfer: str) -> Route:
    exporter: Any = SimpleNamespace(adapter=None)
    learner = LearnerSide(
        config=compose_unchecked("grpo_code", [f"weights.transfer={transfer}"]).weights,
        folder="memory://weights",
        life="L",
        host="127.0.0.1",
        device=torch.device("cpu"),
        exporter=exporter,
        push_s=60,
    )
    return Route(MEMBER, open_senders(learner))


def asked(transfer: str, *, shares_memory: bool) -> list[str]:
    """The URLs it was asked to load in two pushes, empty for the shared block; `written` where the
    block was released before.
    """
    generator = Generator(shares_memory=shares_memory)
    route = route_of(transfer)

    async def run() -> None:
        for _ in range(2):
            await load(route, generator, lambda: generator.asked.append("written"))

    asyncio.run(run())
    return generator.asked


def test_auto_takes_shared_memory_where_it_is_shared() -> None:
    assert asked("auto", shares_memory=True) == ["", ""]


def test_auto_takes_the_file_elsewhere_and_tries_the_block_once() -> None:
    assert asked("auto", shares_memory=False) == ["", *["written", "memory://version_3"] * 2]


def test_filesystem_is_used_even_where_memory_is_shared() -> None:
    assert asked("filesystem", shares_memory=True) == ["written", "memory://version_3"] * 2


@pytest.mark.parametrize("transfer", ["shared_memory", "ipc"])
def test_shared_memory_does_not_fall_back(transfer: str) -> None:
    with pytest.raises(BlockUnreachable):
        asked(transfer, shares_memory=False)


def test_a_generator_that_loaded_another_version_has_failed() -> None:
    generator = Generator(shares_memory=True, loads=2)
    with pytest.raises(WeightsError, match="it loaded version 2 instead of 3"):
        asyncio.run(load(route_of("auto"), generator))


def test_a_generator_that_is_gone_is_not_asked_again() -> None:
    class Gone:
        async def call(self, request: LoadWeights, *, timeout_s: float) -> LoadReport:
            raise Unavailable("the generator is gone")

    with pytest.raises(Unavailable):
        asyncio.run(load(route_of("auto"), Gone()))
