"""A generator loads no weights of a learner that another one has replaced."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from composing import compose
from rollouts_support import Alphabet, process
from test_generator_groups import ScriptedEngine

from async_rl.core.errors import Superseded
from async_rl.processes.generator import Generator
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.generator import LoadReport, LoadWeights
from async_rl.protocol.weights import Manifest


class LoadingEngine(ScriptedEngine):
    """Keeps the (life, version) of every load."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[tuple[int, int]] = []

    async def load_weights(self, manifest: Manifest, source: object) -> LoadReport:
        self.loaded.append((manifest.life, manifest.version))
        return LoadReport(version=manifest.version, pause_s=0.0)

    async def close(self) -> None:
        pass


def weights(life: int, version: int) -> LoadWeights:
    manifest = Manifest(
        version=version, path="block", tensors=[], total_bytes=0, checksum=0, life=life
    )
    return LoadWeights(manifest=manifest)


async def load_all(engine: LoadingEngine, *loads: LoadWeights) -> tuple[list[str], Any]:
    """Return the refusals of these loads, and the context of the generator."""

    async def open_engine() -> LoadingEngine:
        return engine

    async def call(request: Message, *, timeout_s: float) -> Message:
        return Ok()

    refusals = []
    async with asyncio.TaskGroup() as group:
        context = process(compose("grpo_code"), call, version=-1, group=group)
        generator = Generator(context, open_engine)  # type: ignore[arg-type]
        await generator.sleeping.start()
        for load in loads:
            try:
                await generator._load_weights(load)
            except Superseded as error:
                refusals.append(str(error))
        await generator.close()
    return refusals, context


def test_weights_of_an_earlier_life_are_refused_and_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("async_rl.processes.generator.load_tokenizer", lambda *_: Alphabet())
    engine = LoadingEngine()
    loads = (weights(1, 7), weights(2, 6), weights(1, 8), weights(2, 7), weights(3, 6))
    refusals, context = asyncio.run(load_all(engine, *loads))
    assert engine.loaded == [(1, 7), (2, 6), (2, 7), (3, 6)]
    assert refusals == [
        "life 1 of the learner is refused, because life 2 has started; end the older process"
    ]
    assert context.version == 6
