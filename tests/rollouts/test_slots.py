"""The slots of a service's generators: both sides, the generators with scripted engines."""

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
from async_rl.observability.activity import Activity
from async_rl.processes.generator import Generator
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.generator import Complete, LoadReport, Scores
from async_rl.protocol.service import LoadSlot, Sample, Sampled
from async_rl.protocol.supervisor import Member, Members
from async_rl.protocol.weights import Manifest, StoredFile
from async_rl.rollouts.slots import Slots
from async_rl.runtime.directory import Directory
from async_rl.service.processes import Processes
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
        self.version = NO_VERSION
        self.loaded: list[tuple[str, int]] = []
        self.is_drawing = asyncio.Event()
        self.error: Exception | None = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def load_weights(self, manifest: Manifest, source: StoredFile) -> LoadReport:
        if self.error:
            raise self.error
        self.loaded.append((Path(source.url).name, manifest.version))
        self.version = manifest.version
        return LoadReport(version=manifest.version, pause_s=0.1)

    async def sample(self, request: Sample) -> Sampled:
        self.is_drawing.set()
        await self.may_answer.wait()
        if self.error:
            raise self.error
        return Sampled(sequences=[], prompt=NONE)


async def settle() -> None:
    """Let the tasks do what they can without a file."""
    for _ in range(50):
        await asyncio.sleep(0)


class Service:
    """Generators with two slots each, and the front's side of them."""

    def __init__(self, tmp_path: Path, *, count: int = 1) -> None:
        self.directory = Directory()
        self.slots: dict[str, Slots] = {}
        self.engines: list[Any] = []
        self.calls: list[str] = []
        self._tmp_path = tmp_path
        self._members: list[Member] = []
        for _ in range(count):
            self.add()
        context: Any = SimpleNamespace(
            directory=self.directory, incarnation_of=self._life_of, activity=Activity()
        )
        self.front = Processes(context)

    def _member(self, name: str, role: Any) -> Member:
        return Member(
            name=name, role=role, pid=1, address="", state="ready", waits_for="", since_s=0.0,
            version=0, counters={},
        )  # fmt: skip

    def add(self) -> None:
        """One more generator."""
        engine: Any = Place()
        engine.places = [Place(), Place()]
        self.engines.append(engine)
        name = f"generator-{len(self.slots)}"
        self.slots[name] = Slots(SimpleNamespace(engine=engine))  # type: ignore[arg-type]
        self._members.append(self._member(name, "generator"))
        self._publish()

    def remove(self, name: str) -> None:
        self._members = [member for member in self._members if member.name != name]
        self._publish()

    def _publish(self) -> None:
        revision = self.directory.revision + 1
        self.directory.update(Members(revision=revision, members=self._members))

    def _life_of(self, member: Member) -> Any:
        async def call(message: Message, *, timeout_s: float) -> Message:
            self.calls.append(type(message).__name__)
            if all(other.name != member.name for other in self._members):
                raise Unavailable(f"{member.name} exited")
            slots = self.slots[member.name]
            answers: dict[type[Message], Any] = {LoadSlot: slots.load, Sample: slots.sample}
            answer: Message = await answers[type(message)](message)
            return answer

        return SimpleNamespace(call=call)

    def places(self, number: int = 0) -> list[list[tuple[str, int]]]:
        return [place.loaded for place in self.engines[number].places]

    def directory_of(self, policy: str) -> Path:
        directory = self._tmp_path / policy
        if not directory.exists():
            partial = self._tmp_path / f"{policy}.partial"
            partial.mkdir()
            (partial / "adapter_model.safetensors").write_bytes(b"1")
            complete(partial, directory, sums_of(partial))
        return directory

    async def load(self, policy: str, version: int = 0) -> None:
        adapter = str(self.directory_of(policy))
        await self.front.load(LoadSlot(policy=policy, adapter=adapter, version=version))

    async def sample(self, policy: str, version: int = 0) -> Sampled:
        adapter = str(self.directory_of(policy)) if policy else ""
        return await self.front.sample(request(policy, adapter, version))


async def test_policies_take_turns_on_the_slots_and_none_waits_forever(tmp_path: Path) -> None:
    service = Service(tmp_path)
    first, second = service.engines[0].places
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
            await service.engines[0].places[len(drawing) - 1].is_drawing.wait()
        await settle()
    # The third has no slot, and the fourth may not keep the second's busy.
    assert service.places() == [[("a", 1)], [("b", 4)]]
    # Its weights change while it samples; one that has no slot loads when it samples.
    await service.load("a", 2)
    await service.load("c", 1)
    assert service.places() == [[("a", 1), ("a", 2)], [("b", 4)]]
    first.may_answer.set()
    await asyncio.gather(drawing[0], drawing[2])
    # The first slot has no sample any more, so the third is in it.
    assert done == ["a v1", "c v0"]
    assert service.places()[0] == [("a", 1), ("a", 2), ("c", 0)]
    second.may_answer.set()
    await asyncio.gather(*drawing)
    assert service.places()[1] == [("b", 4)]
    # The slot of the least recent sample is given away; the base model needs none.
    await service.sample("a", 2)
    assert service.places()[0][-1] == ("a", 2)
    await service.sample("")
    service.engines[0].places = []
    service.slots["generator-0"] = Slots(SimpleNamespace(engine=service.engines[0]))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"model\.lora\.slots leaves no slot"):
        await service.sample("a", 2)


async def test_a_sample_has_the_weights_that_it_names_or_newer_ones(tmp_path: Path) -> None:
    service = Service(tmp_path)
    await service.sample("a", 3)
    service.add()
    service.remove("generator-0")
    await service.sample("a", 3)
    # One that was sent before the newest weights does not take them back.
    await service.load("a", 5)
    await service.sample("a", 3)
    assert service.places(1)[0] == [("a", 3), ("a", 5)]


async def test_weights_that_cannot_be_loaded_concern_their_policy_only(tmp_path: Path) -> None:
    """Any other error would end the front, again at each of its starts."""
    service = Service(tmp_path)
    await service.sample("b", 1)
    for place in service.engines[0].places:
        place.error = WeightsError("vLLM refuses the adapter")
    with pytest.raises(DataError, match="vLLM refuses"):
        await service.sample("a", 1)
    with pytest.raises(DataError, match="vLLM refuses"):
        await service.load("b", 2)
    for place in service.engines[0].places:
        place.error = None
    (service.directory_of("c") / "adapter_model.safetensors").write_bytes(b"2")
    with pytest.raises(DataError, match=r"c: adapter_model.* checksum .*; save its weights again"):
        await service.sample("c", 1)
    with pytest.raises(DataError, match=r"nowhere/sha256sums.txt cannot be read"):
        await service.front.sample(request("c", str(tmp_path / "nowhere")))
    await service.sample("a", 1)
    await service.sample("")


class Failing(ScriptedEngine):
    """Writes a row until it has an error."""

    places: tuple[Place, ...] = ()

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


class WholeModel:
    """An engine without slots. weights: of the model, one number; log: what happened."""

    def __init__(self) -> None:
        self.weights = 0.0
        self.log: list[str] = []
        self.may_answer = asyncio.Event()

    async def load_weights(self, manifest: Manifest) -> LoadReport:
        with SharedTensorsReader(manifest) as reader:
            self.weights = float(dict(reader.tensors())["w"])
        self.log.append(f"load {self.weights:g} v{manifest.version}")
        return LoadReport(version=manifest.version, pause_s=0.1)

    async def sample(self, request: Sample) -> Sampled:
        assert request.adapter == "", "the engine has no adapters"
        await self.may_answer.wait()
        self.log.append(f"{request.request_id}: {self.weights:g}")
        return Sampled(sequences=[], prompt=NONE)


def write(folder: Path, value: float) -> str:
    folder.mkdir()
    save_file({"w": torch.tensor(float(value))}, folder / "model.safetensors")
    return str(folder)


async def test_samples_of_whole_models_start_in_the_order_of_arrival(tmp_path: Path) -> None:
    base, one, two = (write(tmp_path / f"{value}", value) for value in (7, 1, 2))
    engine = WholeModel()
    turns = Slots(SimpleNamespace(engine=engine), Path(base))  # type: ignore[arg-type]
    wanted = [
        request("", name="base"),
        request("", one, 3, "one"),
        request("", two, 5, "two"),
        request("", one, 3, "one again"),
        request("", name="base again"),
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
