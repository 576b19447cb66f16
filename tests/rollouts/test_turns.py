"""The slots of a service's generator, with scripted engines."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from composing import compose
from rollouts_support import Alphabet, process
from safetensors.torch import save_file
from test_generator_groups import ScriptedEngine

from async_rl.core.checksums import complete, sums_of
from async_rl.core.errors import DataError, EngineDead, Unavailable, WeightsError
from async_rl.core.types import NO_VERSION, Sampling
from async_rl.processes.generator import Generator
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.generator import Complete, LoadReport, Scores
from async_rl.protocol.service import LoadSlot, Sample, Sampled
from async_rl.protocol.weights import Manifest, StoredFile
from async_rl.rollouts.turns import Slots
from async_rl.weights.block import SharedTensorsReader

NONE = Scores(ids=np.zeros((1, 0), np.int32), logprobs=np.zeros((1, 0), np.float32))


def request(policy: str, adapter: str = "", version: int = 0, name: str = "r") -> Sample:
    return Sample(
        request_id=name,
        token_ids=np.array([3], np.int32),
        num_samples=1,
        max_tokens=4,
        temperature=1.0,
        policy=policy,
        adapter=adapter,
        version=version,
    )


class Place:
    """A slot. loaded: the adapters and versions; its samples wait for `may_answer`."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.loaded: list[tuple[str, int]] = []
        self.is_drawing = asyncio.Event()
        self.error: Exception | None = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def load_weights(self, manifest: Manifest, source: StoredFile) -> LoadReport:
        if self.error:
            raise self.error
        self.loaded.append((Path(source.url).name, manifest.version))
        return LoadReport(version=manifest.version, pause_s=0.1)

    async def sample(self, request: Sample) -> Sampled:
        self.is_drawing.set()
        await self.may_answer.wait()
        return Sampled(sequences=[], prompt=NONE)


def slots_of(engine: Any, base: Path | None = None) -> Slots:
    return Slots(SimpleNamespace(engine=engine), base)  # type: ignore[arg-type]


class Service:
    """An engine with two slots, and the adapters of its policies."""

    def __init__(self, tmp_path: Path) -> None:
        self._tmp_path = tmp_path
        self.engine = Place()
        self.engine.places = [Place(), Place()]
        self.slots = slots_of(self.engine)

    @property
    def loaded(self) -> list[list[tuple[str, int]]]:
        return [place.loaded for place in self.engine.places]

    def adapter(self, policy: str) -> Path:
        folder = self._tmp_path / policy
        if policy and not folder.exists():
            partial = self._tmp_path / f"{policy}.partial"
            partial.mkdir()
            (partial / "adapter_model.safetensors").write_bytes(b"1")
            complete(partial, folder, sums_of(partial))
        return folder

    async def load(self, policy: str, version: int) -> None:
        adapter = str(self.adapter(policy))
        await self.slots.load(LoadSlot(policy=policy, adapter=adapter, version=version))

    async def sample(self, policy: str, version: int = 0) -> Sampled:
        return await self.slots.sample(request(policy, str(self.adapter(policy)), version))


async def test_policies_take_turns_on_the_slots_and_none_waits_forever(tmp_path: Path) -> None:
    service = Service(tmp_path)
    first, second = service.engine.places
    for place in (first, second):
        place.may_answer.clear()
    done: list[str] = []

    async def draw(policy: str, version: int) -> None:
        await service.sample(policy, version)
        done.append(f"{policy} v{version}")

    drawing = []
    for policy, version in (("a", 1), ("b", 4), ("c", 0), ("b", 4)):
        drawing.append(asyncio.create_task(draw(policy, version)))
        if len(drawing) <= 2:
            await service.engine.places[len(drawing) - 1].is_drawing.wait()
        for _ in range(50):
            await asyncio.sleep(0)
    # The third has no slot, and the fourth may not keep the second's busy.
    assert service.loaded == [[("a", 1)], [("b", 4)]]
    # Its weights change while it samples; one that has no slot loads when it samples.
    await service.load("a", 2)
    await service.load("c", 1)
    assert service.loaded == [[("a", 1), ("a", 2)], [("b", 4)]]
    first.may_answer.set()
    await asyncio.gather(drawing[0], drawing[2])
    # The first slot has no sample any more, so the third is in it.
    assert done == ["a v1", "c v0"]
    second.may_answer.set()
    await asyncio.gather(*drawing)
    # The slot of the least recent sample is given away; the base model needs none.
    await service.sample("a", 2)
    await service.sample("")
    assert service.loaded == [[("a", 1), ("a", 2), ("c", 0), ("a", 2)], [("b", 4)]]
    service.engine.places = []
    with pytest.raises(DataError, match=r"model\.lora\.slots leaves no slot"):
        await slots_of(service.engine).sample(request("a", "x"))


async def test_the_weights_of_a_policy_never_become_older(tmp_path: Path) -> None:
    service = Service(tmp_path)
    for version in (3, 5, 3):
        await service.sample("a", version)
        await service.load("a", version)
    assert service.loaded[0] == [("a", 3), ("a", 5)]


async def test_weights_that_cannot_be_loaded_concern_their_policy_only(tmp_path: Path) -> None:
    """Any other error would end the front, again at each of its starts."""
    service = Service(tmp_path)
    await service.sample("b", 1)
    for place in service.engine.places:
        place.error = WeightsError("vLLM refuses the adapter")
    with pytest.raises(DataError, match="vLLM refuses"):
        await service.sample("a", 1)
    with pytest.raises(DataError, match="vLLM refuses"):
        await service.load("b", 2)
    for place in service.engine.places:
        place.error = None
    (service.adapter("c") / "adapter_model.safetensors").write_bytes(b"2")
    with pytest.raises(DataError, match=r"c: adapter_model.* checksum .*; save its weights again"):
        await service.sample("c", 1)
    await service.sample("a", 1)


class Failing(ScriptedEngine):
    """Writes a row until it has an error."""

    async def sample(self, request: Sample) -> Sampled:
        raise DataError("top_p=3")

    async def close(self) -> None:
        pass


async def test_a_call_that_the_engine_fails_ends_the_process_and_a_refused_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("async_rl.processes.generator.load_tokenizer", lambda *_: Alphabet())
    how = Sampling(temperature=1.0, max_new_tokens=4)
    message = Complete(request_id="1.1.0/0", token_ids=np.array([3], np.int32), sampling=how)
    engine = Failing()

    async def open_engine() -> Failing:
        return engine

    async def call(_: Message, **more: float) -> Message:
        return Ok()

    async def play() -> None:
        async with asyncio.TaskGroup() as group:
            context: Any = process(compose("grpo_code"), call, group=group)
            context.stopping = asyncio.Event()
            generator = Generator(context, open_engine)
            await generator.sleeping.start()
            with pytest.raises(DataError, match="top_p=3"):
                await generator.sample(request(""))
            done: Any = await generator.complete(message)
            assert done.completed.token_ids.tolist() == [2]
            engine.version = NO_VERSION
            with pytest.raises(WeightsError, match="no version of the weights yet"):
                await generator.complete(message)
            engine.version, engine.error = 3, Unavailable("the vLLM engine died")
            # Its sender does not send it to another engine, which it may end as well.
            with pytest.raises(EngineDead, match="generator-0: the vLLM engine died"):
                await generator.complete(message)

    with pytest.raises(ExceptionGroup) as caught:
        await play()
    assert caught.group_contains(EngineDead, match="the vLLM engine died")


async def test_samples_of_whole_models_start_in_the_order_of_arrival(tmp_path: Path) -> None:
    """An engine without slots, whose models are one number each."""
    weights, log = 0.0, []
    may_answer = asyncio.Event()

    async def load_weights(manifest: Manifest) -> None:
        nonlocal weights
        with SharedTensorsReader(manifest) as reader:
            weights = float(dict(reader.tensors())["w"])
        log.append(f"load {weights:g} v{manifest.version}")

    async def sample(request: Sample) -> None:
        assert request.adapter == "", "the engine has no adapters"
        await may_answer.wait()
        log.append(f"{request.request_id}: {weights:g}")

    def saved(value: float) -> str:
        folder = tmp_path / f"{value:g}"
        folder.mkdir()
        save_file({"w": torch.tensor(value)}, folder / "model.safetensors")
        return str(folder)

    base, one, two = map(saved, (7.0, 1.0, 2.0))
    turns = slots_of(SimpleNamespace(load_weights=load_weights, sample=sample), Path(base))
    asked = []
    for adapter, version, name in (
        ("", 0, "base"),
        (one, 3, "one"),
        (two, 5, "two"),
        (one, 3, "one again"),
        ("", 0, "base again"),
    ):
        asked.append(asyncio.create_task(turns.sample(request("", adapter, version, name))))
        await asyncio.sleep(0)
    may_answer.set()
    await asyncio.gather(*asked)
    assert log == [
        *("base: 0", "load 1 v3", "one: 1", "load 2 v5", "two: 2"),
        *("load 1 v3", "one again: 1", "load 7 v0", "base again: 7"),
    ]
