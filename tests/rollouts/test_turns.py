"""Whole models that take turns on an engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from async_rl.core.errors import DataError
from async_rl.protocol.generator import LoadReport, Scores
from async_rl.protocol.service import LoadSlot, Sample, Sampled
from async_rl.protocol.weights import Manifest
from async_rl.rollouts.slots import Slots
from async_rl.weights.block import SharedTensorsReader


class Engine:
    """weights: of the model, one number; log: what happened, in order."""

    def __init__(self) -> None:
        self.weights = 0.0
        self.log: list[str] = []
        self.may_answer = asyncio.Event()
        self.has_loaded = asyncio.Event()

    async def load_weights(self, manifest: Manifest) -> LoadReport:
        with SharedTensorsReader(manifest) as reader:
            self.weights = float(dict(reader.tensors())["w"])
        self.has_loaded.set()
        self.log.append(f"load {self.weights:g} v{manifest.version}")
        return LoadReport(version=manifest.version, pause_s=0.1)

    async def sample(self, request: Sample) -> Sampled:
        assert request.adapter == "", "the engine has no adapters"
        before = self.weights
        await self.may_answer.wait()
        changed = "" if before == self.weights else f" from {before:g}"
        self.log.append(f"{request.request_id}: {self.weights:g}{changed}")
        empty = Scores(ids=np.zeros((1, 0), np.int32), logprobs=np.zeros((1, 0), np.float32))
        return Sampled(sequences=[], prompt=empty)


def write(folder: Path, value: float) -> str:
    folder.mkdir()
    save_file({"w": torch.tensor(float(value))}, folder / "model.safetensors")
    return str(folder)


def request(name: str, **more: Any) -> Sample:
    ids = np.array([1], np.int32)
    form = {"token_ids": ids, "num_samples": 1, "max_tokens": 1, "temperature": 1.0}
    return Sample(request_id=name, **form, **more)


async def test_samples_have_their_weights_and_start_in_the_order_of_arrival(
    tmp_path: Path,
) -> None:
    base, one, two = (write(tmp_path / f"{value}", value) for value in (7, 1, 2))
    engine = Engine()
    sleeping: Any = type("Sleeping", (), {"engine": engine})()
    turns = Slots(sleeping, Path(base))
    wanted = [
        request("base"),
        request("one", adapter=one, version=3),
        request("two", adapter=two, version=5),
        request("one again", adapter=one, version=3),
        request("base again"),
    ]
    asked = []
    for sample in wanted:
        asked.append(asyncio.create_task(turns.sample(sample)))
        await asyncio.sleep(0)
    engine.may_answer.set()
    await asyncio.gather(*asked)
    assert engine.log == [
        "base: 0",
        "load 1 v3",
        "one: 1",
        "load 2 v5",
        "two: 2",
        "load 1 v3",
        "one again: 1",
        "load 7 v0",
        "base again: 7",
    ]


async def test_the_weights_of_a_policy_change_under_its_samples_only(tmp_path: Path) -> None:
    base, one, two, three = (write(tmp_path / f"{value}", value) for value in (7, 1, 2, 3))
    engine = Engine()
    sleeping: Any = type("Sleeping", (), {"engine": engine})()
    turns = Slots(sleeping, Path(base))
    await turns.load(LoadSlot(policy="a", adapter=one, version=4))
    assert engine.log == [], "nobody samples it yet"
    running = asyncio.create_task(turns.sample(request("a", policy="a", adapter=one, version=4)))
    await engine.has_loaded.wait()
    other = asyncio.create_task(turns.sample(request("other", adapter=three)))
    await turns.load(LoadSlot(policy="a", adapter=two, version=5))
    engine.may_answer.set()
    await asyncio.gather(running, other)
    await turns.load(LoadSlot(policy="a", adapter=one, version=6))
    assert engine.log == ["load 1 v4", "load 2 v5", "a: 2 from 1", "load 3 v0", "other: 3"]
    with pytest.raises(DataError, match="has no weights; save them for sampling again"):
        await turns.sample(request("gone", adapter=str(tmp_path / "gone")))
    await turns.sample(request("other again", adapter=three))
    assert engine.log[-1] == "other again: 3"
