"""Scores rows with an engine of fewer bits before and after a push, and writes down the log-probs
and those of the likeliest tokens of a sample: python quantized_scenario.py SETTINGS MODEL OUT.
"""

from __future__ import annotations

import asyncio
import json
import sys
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


async def run(settings: list[str], path: Path) -> list[Any]:
    model = make_model(path, is_tied=True)
    overrides = [f"model.path={path}", "generation.vllm.enforce_eager=true"]
    config = compose_unchecked("grpo_code", [*overrides, *settings])
    prepare_environment(config, [])
    engine = await engine_opener(config, path)()
    specs = [tensor_spec(name, tensor) for name, tensor in weights_of(model, 0).items()]
    scores = []
    with SharedTensors(specs) as publisher:
        for version in (0, 1):
            manifest = publisher.write(version, weights_of(model, version).values())
            await engine.load_weights(manifest)
            rows = [np.array(row, np.int32) for row in QUANTIZED_ROWS]
            scores.append([row.tolist() for row in await engine.logprobs(rows)])
    sampling = Sampling(temperature=1.0, max_new_tokens=40, alternatives=Alternatives(num_top=4))
    likeliest: list[Any] = []
    async for sample in engine.generate("1.0.0", QUANTIZED_ROWS[0], 8, sampling):
        assert sample.likeliest is not None
        likeliest += sample.likeliest.logprobs.tolist()
    await engine.close()
    return [*scores, likeliest]


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(
        json.dumps(asyncio.run(run(json.loads(sys.argv[1]), Path(sys.argv[2]))))
    )
