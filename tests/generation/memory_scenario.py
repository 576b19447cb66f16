"""Pushes a model to a vLLM engine many times, and returns the memory of the process after each."""

import asyncio
import time
from pathlib import Path

from generation_support import make_model

from async_rl.composition.compose import compose
from async_rl.core.types import Sampling
from async_rl.generation.environment import prepare_environment
from async_rl.generation.opener import engine_opener
from async_rl.weights.block import SharedTensors
from async_rl.weights.tensors import tensor_spec

NUM_PUSHES = 6
SIZES = {"vocab_size": 2000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 7}


def rss_mb() -> float:
    """The process's memory that is not of files, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


async def main(path: Path) -> dict[str, object]:
    model = make_model(path, **SIZES)
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
