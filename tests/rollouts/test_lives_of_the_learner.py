"""A generator loads no weights of a learner that another one has replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from composing import compose
from test_generator_groups import Letters, ScriptedEngine

from async_rl.core.errors import Superseded
from async_rl.observability.activity import Activity
from async_rl.processes.generator import Generator
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.generator import LoadReport, LoadWeights
from async_rl.protocol.weights import Manifest


class LoadingEngine(ScriptedEngine):
    """Keeps the (life, version) of every load."""

    def __init__(self) -> None:
        self.loaded: list[tuple[int, int]] = []

    async def load_weights(self, manifest: Manifest, source: object) -> LoadReport:
        self.loaded.append((manifest.life, manifest.version))
        return LoadReport(version=manifest.version, load_s=0.0, pause_s=0.0)

    async def close(self) -> None:
        pass


def weights(life: int, version: int) -> LoadWeights:
    manifest = Manifest(
        version=version, path="block", tensors=[], total_bytes=0, checksum=0, life=life
    )
    return LoadWeights(manifest=manifest)


async def load_all(engine: LoadingEngine, *loads: LoadWeights) -> tuple[list[object], Any]:
    """What the generator answered to each load, and its context."""

    async def open_engine() -> LoadingEngine:
        return engine

    async def call(request: Message, *, timeout_s: float) -> Message:
        return Ok()

    async with asyncio.TaskGroup() as group:
        context: Any = SimpleNamespace(
            config=compose("grpo_code"), model_path=None, token="t", name="generator-0",
            incarnation="a", version=-1, activity=Activity(), group=group,
            peer=lambda _: SimpleNamespace(call=call),
        )  # fmt: skip
        generator = Generator(context, open_engine)  # type: ignore[arg-type]
        await generator.sleeping.start()
        answers = []
        for load in loads:
            answers.append(await _outcome(generator._load_weights(load)))
        await generator.close()
    return answers, context


async def _outcome(answer: Coroutine[Any, Any, Message]) -> object:
    try:
        return await answer
    except Superseded as error:
        return str(error)


def test_weights_of_an_earlier_life_are_refused_and_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("async_rl.processes.generator.load_tokenizer", lambda *_: Letters())
    engine = LoadingEngine()
    loads = (weights(1, 7), weights(2, 6), weights(1, 8), weights(2, 7), weights(3, 6))
    answers, context = asyncio.run(load_all(engine, *loads))
    assert engine.loaded == [(1, 7), (2, 6), (2, 7), (3, 6)]
    assert answers[2] == (
        "generator-0 has weights of life 2 of the learner; weights of life 1 are refused"
    )
    assert context.version == 6
