"""Drives one vLLM with three policies, and writes down what they said: python adapters_scenario.py
KIND MODEL OUT.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from adapter_support import RANK, SCALING, adapter_of
from engine_scenario import group, prompt, refusal, sampling
from generation_support import make_model
from samples_scenario import SLOTS, draw_samples, write_tokenizer

from async_rl.composition.compose import compose
from async_rl.generation import environment
from async_rl.generation.environment import prepare_environment
from async_rl.generation.opener import engine_opener
from async_rl.protocol.weights import Manifest, StoredFile
from async_rl.weights.adapters import Adapter
from async_rl.weights.tensors import checksum, layout, tensor_spec

LAST = 4


class Pusher:
    """Writes the files of adapters as a learner does."""

    def __init__(self, folder: Path, model: Any) -> None:
        self.folder = folder
        self.model = model

    def manifest(self, version: int) -> Manifest:
        specs = [tensor_spec(name, tensor) for name, tensor in self.model.named_parameters()]
        entries, total_bytes = layout(specs)
        return Manifest(
            version=version, path="", tensors=entries, total_bytes=total_bytes, checksum=0
        )

    def stored(self, policy: str, version: int, *, rank: int = RANK) -> StoredFile:
        adapter = Adapter(
            tensors=adapter_of(self.model, policy, version, rank=rank), scaling=SCALING
        )
        content = adapter.to_bytes()
        path = self.folder / f"{policy}-{version}-{rank}.safetensors"
        path.write_bytes(content)
        return StoredFile(
            url=path.as_uri(),
            scaling=SCALING,
            checksum=checksum(content),
        )

    def damage(self, stored: StoredFile) -> None:
        Path(stored.url.removeprefix("file://")).write_bytes(b"x" * 100)

    async def push(self, engine: Any, policy: str, version: int) -> None:
        report = await engine.load_weights(self.manifest(version), self.stored(policy, version))
        assert report.version == version == engine.version
        assert report.pause_s > 0


async def play(engine: Any, pusher: Pusher) -> dict[str, Any]:
    own, said = engine, {}
    first, second = engine.places
    said["before_first_load"] = await refusal(group(first, "early", prompt(0), 1, sampling()))
    await pusher.push(own, "own", 0)
    said["still_before_first_load"] = await refusal(group(first, "e", prompt(0), 1, sampling()))
    await pusher.push(first, "first", 3)
    await pusher.push(second, "second", 0)
    policies = {"own": own, "first": first, "second": second}
    said["quiet"] = {
        name: await group(policy, f"quiet-{name}", prompt(1), 3, sampling(temperature=0.7))
        for name, policy in policies.items()
    }
    spanning: dict[str, list[asyncio.Task[dict[str, Any]]]] = {name: [] for name in policies}
    async with asyncio.TaskGroup() as tasks:

        def start(number: int) -> None:
            for name, policy in policies.items():
                making = group(policy, f"span-{name}-{number}", prompt(10 + number), 3, sampling())
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
    rows = [np.array(prompt(seed, 40), np.int32) for seed in (3, 4)]
    said["probe_rows"] = [row.tolist() for row in rows]
    said["probes"] = {
        name: [row.tolist() for row in await policy.logprobs(rows)]
        for name, policy in policies.items()
    }
    said["versions"] = {name: policy.version for name, policy in policies.items()}
    said["refused"] = await refusals(first, pusher)
    said["after_refusals"] = await group(first, "after", prompt(10), 2, sampling())
    third = first
    await pusher.push(third, "third", 0)
    said["third_at_0"] = await group(third, "third", prompt(10), 2, sampling())
    said["own_at_end"] = await group(own, "own", prompt(10), 2, sampling())
    return said


async def refusals(engine: Any, pusher: Pusher) -> dict[str, str]:
    """What an adapter that cannot be used is answered; nothing changes by it."""
    manifest, stored = pusher.manifest(9), pusher.stored("first", 9)
    pusher.damage(stored)
    large = pusher.stored("first", 9, rank=4 * RANK)
    return {
        "damaged": await refusal(engine.load_weights(manifest, stored)),
        "gone": await refusal(
            engine.load_weights(manifest, StoredFile(url="file:///nowhere/x", scaling=1.0))
        ),
        "rank": await refusal(engine.load_weights(manifest, large)),
    }


async def main(kind: str, model_path: Path) -> dict[str, Any]:
    if kind == "stock":
        environment.has_core_process = lambda _: True
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
    prepare_environment(config, [])
    write_tokenizer(model_path)
    open_engine = await asyncio.to_thread(engine_opener, config, model_path)
    engine = await open_engine()
    torch.manual_seed(0)
    model = make_model(model_path.with_name("again"), is_tied=True)
    try:
        said = await play(engine, Pusher(model_path.parent, model))
        if kind == "vllm":
            said["samples"] = await draw_samples(engine, model_path.parent, model)
        return said
    finally:
        await engine.close()


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(asyncio.run(main(sys.argv[1], Path(sys.argv[2])))))
