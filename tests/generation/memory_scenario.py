"""Pushes a model of 100 MB to a vLLM engine many times, and writes down the memory of the process
after each push: python memory_scenario.py DIRECTORY OUT.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from async_rl.composition.compose import compose
from async_rl.core.types import Sampling
from async_rl.generation.environment import prepare_environment
from async_rl.generation.opener import engine_opener

NUM_PUSHES = 14


def rss_mb() -> float:
    """The process's memory that is not of files, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def model_of_100_mb(path: Path) -> Qwen3ForCausalLM:
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=2000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=10,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=2,
    )
    model = Qwen3ForCausalLM(config).float()
    model.save_pretrained(path)
    return model


async def main(path: Path) -> dict[str, object]:
    from async_rl.weights.block import SharedTensors
    from async_rl.weights.tensors import tensor_spec

    model = model_of_100_mb(path)
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    size_mb = sum(t.numel() * t.element_size() for t in tensors.values()) / 2**20
    config = compose("grpo_code", [f"model.path={path}", "generation.vllm.kv_cache_mb=200"])
    prepare_environment(config, [])
    engine = await (await asyncio.to_thread(engine_opener, config, path))()
    publisher = SharedTensors([tensor_spec(name, tensor) for name, tensor in tensors.items()])
    # A generator has used all threads of the loop's pool before long.
    await asyncio.gather(*[asyncio.to_thread(time.sleep, 0.2) for _ in range(16)])
    memory_mb = []
    for version in range(NUM_PUSHES):
        await engine.load_weights(publisher.write(version, tensors.values()))
        async for _ in engine.generate(
            str(version), [5, 6, 7], 2, Sampling(temperature=1.0, max_new_tokens=4)
        ):
            pass
        memory_mb.append(rss_mb())
    await engine.close()
    return {"size_mb": size_mb, "memory_mb": memory_mb}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(asyncio.run(main(Path(sys.argv[1])))))
