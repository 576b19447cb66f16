"""Measure how long a push pauses generation, compared with loading and packing in an idle engine.

Run: `python -m benchmarks.weights.push [--pushes N] [--core N]`.
The two random models are one of the shape of the embedded model and one of about 350 MB. 64 samples
are in flight while one version after the other is pushed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from async_rl.core.codec import encode
from async_rl.core.types import Sampling
from async_rl.generation.engine import Engine
from async_rl.generation.environment import prepare_environment
from async_rl.generation.opener import engine_opener
from async_rl.protocol.generator import LoadReport
from async_rl.protocol.weights import SHARED_BLOCK
from benchmarks.figures import figure
from benchmarks.generation.generation import parameters, random_model, settings

SIZES = {
    "tiny": {},
    "350 MB": {"hidden": 1024, "layers": 6, "heads": 16, "vocabulary": 4096, "head_dim": 64},
}


async def writes(engine: Engine, name: str) -> None:
    """Generate one group after the other until cancelled."""
    sampling = Sampling(temperature=1.0, max_new_tokens=64)
    rng = np.random.default_rng(len(name))
    count = 0
    while True:
        count += 1
        async for _ in engine.generate(
            f"{name}-{count}", rng.integers(2, 500, size=30).tolist(), 8, sampling
        ):
            pass


async def measure(size: str, model: Path, num_pushes: int) -> None:
    """Push with no samples in flight, then with 64 samples in flight."""
    from async_rl.generation.vllm.core import ThreadedCore
    from async_rl.weights.block import SharedTensors
    from async_rl.weights.tensors import tensor_spec

    engine = await engine_opener(settings(model), model)()
    core = engine._vllm.core  # type: ignore[attr-defined]  # the floor is measured inside
    assert isinstance(core, ThreadedCore)
    tensors = parameters(model)
    with SharedTensors(
        [tensor_spec(name, tensor) for name, tensor in tensors.items()]
    ) as publisher:
        manifest = publisher.write(0, tensors.values())
        await engine.load_weights(manifest)
        floors = []
        staged = encode(manifest), encode(SHARED_BLOCK)
        for _ in range(num_pushes):
            started_s = time.perf_counter()
            await core.beside_async("stage_shared_weights", *staged)
            floors.append(time.perf_counter() - started_s)
        writers = [
            asyncio.create_task(writes(engine, f"group {i}"), name=f"group {i}") for i in range(8)
        ]
        written, loads, reports = [], [], []
        for version in range(1, num_pushes + 1):
            started_s = time.perf_counter()
            manifest = await asyncio.to_thread(publisher.write, version, tensors.values())
            written.append(time.perf_counter() - started_s)
            started_s = time.perf_counter()
            reports.append(await engine.load_weights(manifest))
            loads.append(time.perf_counter() - started_s)
        for writer in writers:
            writer.cancel()
        await asyncio.wait(writers)
        report(size, manifest.total_bytes, written, floors, loads, reports)
    await engine.close()


def report(
    size: str,
    total_bytes: int,
    written: list[float],
    floors: list[float],
    loads: list[float],
    reports: list[LoadReport],
) -> None:
    """Print the figures of one model."""
    pauses = [1e3 * r.pause_s for r in reports]
    floor = 1e3 * statistics.median(floors)
    name = f"{size} ({total_bytes / 1e6:.0f} MB)"
    figure(f"{name}: write the block", 1e3 * statistics.median(written), "ms")
    figure(f"{name}: load and pack, idle", floor, "ms")
    figure(f"{name}: load while writing", 1e3 * statistics.median(loads), "ms")
    figure(
        f"{name}: pause, median",
        statistics.median(pauses),
        "ms",
        goal="at most 30" if size == "tiny" else "",
    )
    figure(f"{name}: pause, worst", max(pauses), "ms")
    if size != "tiny":
        figure(
            f"{name}: pause over load and pack",
            statistics.median(pauses) / floor,
            "x",
            goal="at most 1.3",
        )


def main() -> None:
    """Measure each model in a separate process, because vLLM changes its process permanently."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pushes", type=int, default=20)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--size", choices=list(SIZES))
    options = parser.parse_args()
    if options.size is None:
        for size in SIZES:
            command = [
                sys.executable,
                "-m",
                "benchmarks.weights.push",
                "--size",
                size,
                "--pushes",
                str(options.pushes),
                "--core",
                str(options.core),
            ]
            subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        return
    with tempfile.TemporaryDirectory() as directory:
        model = random_model(Path(directory) / "model", **SIZES[options.size])
        prepare_environment(settings(model), [options.core])
        asyncio.run(measure(options.size, model, options.pushes))


if __name__ == "__main__":
    main()
