"""Scores rows with a quantized engine before and after a push, and writes the log-probs down:
python quantized_scenario.py ENTRY MODEL OUT.
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
from async_rl.generation.environment import prepare_environment
from async_rl.generation.opener import engine_opener
from async_rl.weights.block import SharedTensors
from async_rl.weights.tensors import tensor_spec


async def run(entry: str, path: Path) -> list[Any]:
    model = make_model(path, is_tied=True)
    dtype = "bfloat16" if entry.startswith("quantization") else "float32"
    overrides = [
        f"generation.vllm.extra=['{entry}']",
        f"model.dtype={dtype}",
        f"model.path={path}",
        "generation.vllm.enforce_eager=true",
    ]
    config = compose_unchecked("grpo_code", overrides)
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
    await engine.close()
    return scores


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(asyncio.run(run(sys.argv[1], Path(sys.argv[2])))))
