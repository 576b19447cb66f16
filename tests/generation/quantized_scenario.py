"""Scores rows with an engine of fewer bits before and after a push."""

from pathlib import Path
from typing import Any

import numpy as np
from generation_support import QUANTIZED_ROWS, make_model, weights_of

from async_rl.composition.compose import compose_unchecked
from async_rl.core.types import Alternatives, Sampling
from async_rl.generation.environment import prepare_environment
from async_rl.generation.opener import engine_opener
from async_rl.weights.block import SharedTensors
from async_rl.weights.tensors import tensor_spec


async def main(settings: list[str], path: Path) -> tuple[list[Any], Any]:
    """Return the log-probs at both versions, and those of the likeliest tokens of samples."""
    model = make_model(path)
    overrides = [f"model.path={path}", "model.dtype=bfloat16", "generation.vllm.enforce_eager=true"]
    config = compose_unchecked("grpo_code", [*overrides, *settings])
    prepare_environment(config, [])
    engine = await engine_opener(config, path)()
    specs = [tensor_spec(name, tensor) for name, tensor in weights_of(model, 0).items()]
    rows = [np.array(row, np.int32) for row in QUANTIZED_ROWS]
    scores = []
    with SharedTensors(specs) as publisher:
        for version in (0, 1):
            manifest = publisher.write(version, weights_of(model, version).values())
            await engine.load_weights(manifest)
            scores.append(np.stack(await engine.logprobs(rows)))
    sampling = Sampling(temperature=1.0, max_new_tokens=40, alternatives=Alternatives(num_top=4))
    samples = [it async for it in engine.generate("1.0.0", QUANTIZED_ROWS[0], 8, sampling)]
    await engine.close()
    return scores, np.concatenate([it.likeliest.logprobs for it in samples if it.likeliest])
