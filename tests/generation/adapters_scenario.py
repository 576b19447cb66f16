"""Drives one vLLM with three policies, and draws samples of a service from it."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
from engine_scenario import NO_TENSORS, group, prepare, prompt, refusal, sampling
from generation_support import PROMPT, RANK, SCALING, SLOTS, adapter_of, model_from
from msgspec.structs import replace
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from async_rl.composition.compose import compose
from async_rl.core.errors import DataError
from async_rl.generation.opener import engine_opener
from async_rl.protocol.service import Sample
from async_rl.protocol.weights import StoredFile
from async_rl.weights.lora import Adapter, write_peft
from async_rl.weights.tensors import checksum

LAST = 4


class Pusher:
    def __init__(self, folder: Path, model: Any) -> None:
        self.folder = folder
        self.model = model

    def adapter(self, policy: str, version: int, rank: int = RANK) -> bytes:
        tensors = adapter_of(self.model, policy, version, rank=rank)
        return Adapter(tensors=tensors, scaling=SCALING).to_bytes()

    async def push(
        self, engine: Any, policy: str, version: int, rank: int = RANK, damage: bytes = b""
    ) -> None:
        content = self.adapter(policy, version, rank)
        path = self.folder / f"{policy}-{version}-{rank}.safetensors"
        path.write_bytes(damage or content)
        stored = StoredFile(url=path.as_uri(), scaling=SCALING, checksum=checksum(content))
        report = await engine.load_weights(replace(NO_TENSORS, version=version), stored)
        assert report.version == version == engine.version
        assert report.pause_s > 0


async def play(engine: Any, pusher: Pusher) -> dict[str, Any]:
    own, said = engine, {}
    first, second = engine.places
    await pusher.push(own, "own", 0)
    said["before_first_load"] = await refusal(group(first, "early", prompt(0), 1, sampling()))
    await pusher.push(first, "first", 3)
    await pusher.push(second, "second", 0)
    policies = {"own": own, "first": first, "second": second}
    said["quiet"] = {
        name: await group(policy, f"quiet-{name}", prompt(1), 1, sampling(temperature=0.7))
        for name, policy in policies.items()
    }
    spanning: dict[str, list[asyncio.Task[dict[str, Any]]]] = {name: [] for name in policies}
    async with asyncio.TaskGroup() as tasks:

        def start(number: int) -> None:
            for name, policy in policies.items():
                making = group(policy, f"span-{name}-{number}", prompt(10 + number), 2, sampling())
                spanning[name].append(tasks.create_task(making))

        start(0)
        start(1)
        for version in range(1, LAST + 1):
            if version == LAST:
                # However fast the pushes are, these groups end with older weights than the last
                # groups have.
                await asyncio.wait([spanning["own"][0], spanning["first"][0]])
            await pusher.push(own, "own", version)
            await pusher.push(first, "first", 3 + version)
        start(2)
    said["spanning"] = {name: [task.result() for task in made] for name, made in spanning.items()}
    said["versions"] = {name: policy.version for name, policy in policies.items()}
    said["refused"] = {
        "damaged": await refusal(pusher.push(first, "first", 9, damage=b"x" * 100)),
        "rank": await refusal(pusher.push(first, "first", 9, rank=4 * RANK)),
    }
    said["after_refusals"] = await group(first, "after", prompt(10), 2, sampling())
    await pusher.push(first, "third", 0)
    said["third_at_0"] = await group(first, "third", prompt(10), 2, sampling())
    return said


async def draw(engine: Any, name: str, **settings: Any) -> Any:
    request = {"num_samples": 2, "max_tokens": 8, "temperature": 1.0, "token_ids": PROMPT}
    try:
        return await engine.sample(Sample(request_id=name, **(request | settings)))
    except DataError as error:
        return str(error)


async def draw_samples(engine: Any, pusher: Pusher) -> dict[str, Any]:
    # More than the slots, of several ranks; the last ones of them stay in all slots.
    names = [f"a{index}" for index in range(SLOTS + 1)]
    adapters = {name: str(pusher.folder / name) for name in names}
    for index, (name, folder) in enumerate(adapters.items()):
        write_peft(Path(folder), pusher.adapter(name, 0, 8 + 8 * (index % 2)), SCALING)
    place = engine.places[0]
    await place.load_weights(replace(NO_TENSORS, version=7), StoredFile(url=adapters["a0"]))
    said: dict[str, Any] = {}
    said["in_turn"] = {
        name: await draw(engine, name, adapter=directory, version=3, num_prompt_top=0)
        for name, directory in adapters.items()
    }
    mixed = await asyncio.gather(
        draw(engine, "base", num_prompt_top=0),
        *(draw(engine, name, adapter=adapters[name], num_prompt_top=0) for name in names[-2:]),
        draw(place, "a0", policy="run", num_prompt_top=0),
    )
    said["mixed"] = dict(zip(["base", *names[-2:], "a0"], mixed, strict=True))
    said["seeded"] = [await draw(engine, f"seed-{number}", seed=5) for number in range(2)]
    said["greedy"] = await draw(engine, "greedy", temperature=0.0, num_samples=3, stop_ids=())
    first = said["seeded"][0].sequences[0].token_ids.tolist()
    one = {"seed": 5, "num_samples": 1}
    text = f"w{first[2]}"
    said["stop_text"] = await draw(engine, "text", **one, stop_texts=(text,), stop_ids=())
    said["stop_id"] = await draw(engine, "id", **one, stop_ids=(first[1],))
    said["no_stop"] = await draw(engine, "none", stop_ids=(), max_tokens=40)
    said["refused_samples"] = [
        await draw(engine, "long", token_ids=np.zeros(600, np.int32)),
        await draw(engine, "other", token_ids=np.array([5000], np.int32)),
        await draw(engine, "top_p", top_p=3.0),
        await draw(engine, "lost", adapter=str(pusher.folder / "nowhere")),
    ]
    return said


def write_tokenizer(folder: Path) -> None:
    """Word `w5` has the id 5."""
    words = {f"w{index}": index for index in range(200)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


async def main(model_path: Path) -> dict[str, Any]:
    config = compose(
        "serve",
        [
            f"model.path={model_path}",
            f"model.lora.rank={2 * RANK}",
            f"model.lora.slots={SLOTS}",
            "data.max_prompt_tokens=100",
            "data.max_response_tokens=150",
            "generation.vllm.max_num_seqs=32",
        ],
    )
    prepare(config, "stock")
    write_tokenizer(model_path)
    open_engine = await asyncio.to_thread(engine_opener, config, model_path)
    engine = await open_engine()
    pusher = Pusher(model_path.parent, model_from(model_path))
    try:
        return await play(engine, pusher) | await draw_samples(engine, pusher)
    finally:
        await engine.close()
