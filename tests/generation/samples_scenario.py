"""Draws samples of a service from a vLLM that adapters_scenario.py has opened."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
from adapter_support import SCALING, adapter_of
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from async_rl.core.errors import DataError
from async_rl.protocol.service import Sample, Sampled
from async_rl.protocol.weights import Manifest, StoredFile
from async_rl.weights.adapters import Adapter, write_peft

PROMPT = np.arange(20, 32, dtype=np.int32)
SLOTS = 6


class Drawing:
    """Requests with names of their own."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.count = 0

    async def __call__(self, **settings: Any) -> dict[str, Any]:
        self.count += 1
        request = {
            "request_id": f"sample-{self.count}",
            "token_ids": PROMPT,
            "num_samples": 2,
            "max_tokens": 8,
            "temperature": 1.0,
        }
        try:
            return plain(await self.engine.sample(Sample(**(request | settings))))
        except DataError as error:
            return {"refused": str(error)}


def plain(sampled: Sampled) -> dict[str, Any]:
    return {
        "sequences": [
            {
                "token_ids": one.token_ids.tolist(),
                "logprobs": one.logprobs.tolist(),
                "versions": one.versions.tolist(),
                "is_stopped": not one.is_truncated,
                "top_ids": one.likeliest.ids.tolist() if one.likeliest else [],
                "top_logprobs": one.likeliest.logprobs.tolist() if one.likeliest else [],
            }
            for one in sampled.sequences
        ],
        "prompt_ids": sampled.prompt.ids.tolist(),
        "prompt_logprobs": sampled.prompt.logprobs.tolist(),
    }


def write_adapter(folder: Path, model: Any, name: str, rank: int) -> str:
    adapter = Adapter(tensors=adapter_of(model, name, 0, rank=rank), scaling=SCALING)
    write_peft(folder / name, adapter.to_bytes(), adapter.scaling)
    return str(folder / name)


async def draw_samples(engine: Any, folder: Path, model: Any) -> dict[str, Any]:
    draw = Drawing(engine)
    # More than the slots, of several ranks; the last ones of them stay in all slots.
    names = [f"a{index}" for index in range(SLOTS + 1)]
    adapters = {
        name: write_adapter(folder, model, name, 8 + 8 * (i % 2)) for i, name in enumerate(names)
    }
    place = engine.places[0]
    manifest = Manifest(version=7, path="", tensors=[], total_bytes=0, checksum=0)
    await place.load_weights(manifest, StoredFile(url=adapters["a0"]))
    said: dict[str, Any] = {"in_turn": {}}
    for name, directory in adapters.items():
        said["in_turn"][name] = await draw(adapter=directory, version=3, num_prompt_top=0)
    slot = Drawing(place)
    slot.count = 1000
    mixed = await asyncio.gather(
        draw(num_prompt_top=0),
        *(draw(adapter=adapters[name], num_prompt_top=0) for name in names[-2:]),
        slot(policy="run", num_prompt_top=0),
    )
    said["mixed"] = dict(zip(["base", *names[-2:], "a0"], mixed, strict=True))
    said["seeded"] = [await draw(seed=5) for _ in range(2)]
    said["greedy"] = await draw(temperature=0.0, num_samples=3, stop_ids=())
    said["top"] = await draw(num_top=3, num_prompt_top=2, top_k=2)
    chosen = np.array([[5, -1], [-1, 6]] * 6)[: len(PROMPT) - 1]
    further = {"num_prompt_top": 1, "chosen": chosen, "num_drawn": 2, "temperature": 0.5}
    # Beside a request without them.
    said["chosen"], said["plain"] = await asyncio.gather(
        draw(**further), draw(num_prompt_top=0, num_top=1)
    )
    many = {"num_drawn": 64, "num_prompt_top": 0, "temperature": 1.5, "num_samples": 1}
    said["drawn"] = [await draw(**many, seed=seed) for seed in range(20)]
    first = said["seeded"][0]["sequences"][0]["token_ids"]
    said["stop_text"] = await draw(seed=5, num_samples=1, stop_texts=(f"w{first[2]}",), stop_ids=())
    said["stop_id"] = await draw(seed=5, num_samples=1, stop_ids=(first[1],))
    said["no_stop"] = await draw(stop_ids=(), max_tokens=40)
    said["refused"] = [
        await draw(token_ids=np.zeros(600, np.int32)),
        await draw(token_ids=np.array([5000], np.int32)),
        await draw(top_p=3.0),
        await draw(adapter=str(folder / "nowhere")),
    ]
    return said


def write_tokenizer(folder: Path) -> None:
    """Word `w5` has the id 5."""
    words = {f"w{index}": index for index in range(200)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
