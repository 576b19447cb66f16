"""Each generator gets a version by the way that reaches it."""

from __future__ import annotations

import asyncio

import pytest

from async_rl.core.errors import BlockUnreachable, Unavailable, WeightsError
from async_rl.protocol.generator import LoadReport, LoadWeights
from async_rl.protocol.weights import Manifest
from async_rl.weights.push import Route

MANIFEST = Manifest(version=3, path="/nowhere", tensors=[], total_bytes=0, checksum=0)


class Generator:
    """Loads what it is told, by the shared block only if it shares memory with the learner."""

    def __init__(self, *, shares_memory: bool, loads: int = 3) -> None:
        self.asked: list[str] = []
        self._shares_memory = shares_memory
        self._loads = loads

    async def call(self, request: LoadWeights, timeout_s: float) -> LoadReport:
        self.asked.append(request.url)
        if not request.url and not self._shares_memory:
            raise BlockUnreachable("no such block here")
        return LoadReport(version=self._loads, load_s=0.2, pause_s=0.1)


async def write(manifest: Manifest) -> str:
    return f"memory://version_{manifest.version}"


def asked(transfer: str, *, shares_memory: bool) -> list[str]:
    """The URLs it was asked to load in two pushes, empty for the shared block; `written` where the
    block was given up before.
    """
    generator, route = Generator(shares_memory=shares_memory), Route(transfer, write)

    async def run() -> None:
        for _ in range(2):
            await route.load(
                MANIFEST, generator, timeout_s=1, written=lambda: generator.asked.append("written")
            )

    asyncio.run(run())
    return generator.asked


def test_auto_takes_shared_memory_where_it_is_shared() -> None:
    assert asked("auto", shares_memory=True) == ["", ""]


def test_auto_takes_the_file_elsewhere_and_tries_the_block_once() -> None:
    assert asked("auto", shares_memory=False) == ["", *["written", "memory://version_3"] * 2]


def test_filesystem_is_used_even_where_memory_is_shared() -> None:
    assert asked("filesystem", shares_memory=True) == ["written", "memory://version_3"] * 2


def test_shared_memory_does_not_fall_back() -> None:
    with pytest.raises(BlockUnreachable):
        asked("shared_memory", shares_memory=False)


def test_a_generator_that_loaded_another_version_has_failed() -> None:
    with pytest.raises(WeightsError, match="it loaded version 2 instead of 3"):
        asyncio.run(
            Route("auto", write).load(
                MANIFEST, Generator(shares_memory=True, loads=2), timeout_s=1, written=list
            )
        )


def test_a_generator_that_is_gone_is_not_asked_again() -> None:
    class Gone:
        async def call(self, request: LoadWeights, timeout_s: float) -> LoadReport:
            raise Unavailable("the generator is gone")

    with pytest.raises(Unavailable):
        asyncio.run(Route("auto", write).load(MANIFEST, Gone(), timeout_s=1, written=list))
