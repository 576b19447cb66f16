"""Measure the time per push to 1, 2 and 4 generators on one host through each medium.

Run: `python -m benchmarks.weights.push_forms [--pushes N] [--generators 1,2,4] [--size "350 MB"]
[--engine hf]`. Generators are processes with a real, idle engine, connected through the sockets of
a run. The learner side is the real pusher. Each push is compared with a copy of the same number of
bytes in memory, made immediately after the push; ratios are medians over these pairs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from async_rl.protocol.generator import LoadWeights
from async_rl.protocol.supervisor import Member, Members
from async_rl.wire.rpc import Keys, RpcServer, create_keys, load_keys
from benchmarks.figures import figure
from benchmarks.generation.generation import parameters, random_model, settings
from benchmarks.weights.push import SIZES

FORMS = ("shared_memory", "filesystem", "collective")
HOST = "127.0.0.1"


async def generate(model: Path, keys: Path, kind: str) -> None:
    """Run a generator without work: it prints its address and loads each pushed version."""
    from async_rl.generation.environment import prepare_environment
    from async_rl.generation.opener import engine_opener
    from async_rl.weights.receiving import FileReader

    config = settings(model, f"generation.engine={kind}")
    prepare_environment(config, [])
    engine = await engine_opener(config, model)()
    files = FileReader()

    async def load(request: LoadWeights) -> Any:
        manifest, source = await asyncio.to_thread(files.localize, request.manifest, request.source)
        return await engine.load_weights(manifest, source)

    with RpcServer(HOST, 0, load_keys(keys), {LoadWeights: load}) as server:
        print(
            json.dumps({"address": server.address, "devices": await engine.weight_devices()}),
            flush=True,
        )
        await server.serve()


class Learner:
    """A pusher with the objects that it needs."""

    adapter = None

    def __init__(self, directory: Path, model: Path, members: list[Member], keys: Keys) -> None:
        import torch

        from async_rl.weights.block import SharedTensors
        from async_rl.weights.tensors import tensor_spec

        self._tensors = parameters(model)
        self.block = SharedTensors(
            [tensor_spec(name, tensor) for name, tensor in self._tensors.items()]
        )
        self._path, self._model, self._members, self._keys, self._device = (
            directory,
            model,
            members,
            keys,
            torch.device("cpu"),
        )
        self._version = -1
        self._is_written_s = 0.0
        self.num_bytes = 0

    async def publish(self, version: int) -> Any:
        """Write the version, as the learner ranks do."""
        manifest = await asyncio.to_thread(self.block.write, version, self._tensors.values())
        self.num_bytes, self._is_written_s = manifest.total_bytes, time.perf_counter()
        return manifest

    async def lead(self, operation: object) -> list[object]:
        """Return no log-probs, which disables the probe: the benchmark runs without a trainer."""
        return []

    async def pushes(
        self, form: str, count: int, num_pushes: int
    ) -> AsyncIterator[tuple[float, float]]:
        """Yield the seconds from the written block until all generators serve the version.

        The second value is the longest pause of a generator. The first push is a warm-up.
        """
        from async_rl.observability.activity import Activity
        from async_rl.runtime.directory import Connections, Directory, Incarnation
        from async_rl.training.device import Device
        from async_rl.training.pushing import Pusher

        directory = Directory()
        directory.update(Members(revision=0, members=self._members[:count]))
        connections = Connections(self._keys, directory)
        context: Any = SimpleNamespace(
            config=settings(
                self._model,
                f"weights.transfer={form}",
                "weights.probe_every_pushes=0",
                "timeouts.start_s=360",
            ),
            run_dir=self._path,
            activity=Activity(),
            incarnation=f"{form}-{count}",
            host=HOST,
            log=logging.getLogger(__name__),
            directory=directory,
            supervisor=None,
            incarnation_of=lambda member: Incarnation(member, connections),
        )
        pool: Any = self
        pusher = Pusher(context, pool, Device(), rank_device=self._device, life=1)
        pushing = asyncio.create_task(pusher.run(), name="pusher")
        for number in range(num_pushes + 1):
            self._version += 1
            await pusher.publish(self._version)
            live = asyncio.create_task(pusher.live(self._version), name="live")
            # No version becomes live after the pusher has failed.
            await asyncio.wait([live, pushing], return_when=asyncio.FIRST_COMPLETED)
            if pushing.done():
                live.cancel()
                await pushing
            if number:
                yield time.perf_counter() - self._is_written_s, pusher.metrics()["weights/pause_s"]
        pushing.cancel()
        await asyncio.wait([pushing])
        await connections.close()


def copier(num_bytes: int) -> Any:
    """Return a function that copies num_bytes between two touched buffers and returns seconds."""
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)

    def copy() -> float:
        started_s = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - started_s

    return copy


async def measure(
    model: Path, directory: Path, counts: list[int], options: argparse.Namespace
) -> None:
    """Measure all media with each number of generators."""
    keys = create_keys(directory / "keys")
    async with AsyncExitStack() as stack:
        members = [
            await stack.enter_async_context(generator(model, directory / "keys", i, options.engine))
            for i in range(max(counts))
        ]
        learner = Learner(directory, model, members, keys)
        stack.callback(learner.block.close)
        for count in counts:
            for form in FORMS:
                rows = []
                async for push_s, pause_s in learner.pushes(form, count, options.pushes):
                    copy = copier(learner.num_bytes)
                    copy()
                    rows.append((push_s, pause_s, copy()))
                report(f"{form}, {count} of {learner.num_bytes / 1e6:.0f} MB", rows)


@asynccontextmanager
async def generator(model: Path, keys: Path, rank: int, kind: str) -> AsyncIterator[Member]:
    """Start a generator process and yield it as a member, as the directory lists it."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.weights.push_forms",
        "--engine",
        kind,
        "--serve",
        str(model),
        str(keys),
    ]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    try:
        assert process.stdout is not None
        said = json.loads(await process.stdout.readline())
        facts: Any = {"state": "", "waits_for": "", "since_s": 0.0, "version": -1, "counters": {}}
        yield Member(name=f"generator-{rank}", role="generator", pid=process.pid, **facts, **said)
    finally:
        process.kill()
        await process.wait()


def report(name: str, rows: Iterable[tuple[float, float, float]]) -> None:
    """Print the figures of one medium with one number of generators."""
    pushes, pauses, copies = zip(*rows, strict=True)
    figure(f"{name}: push", 1e3 * statistics.median(pushes), "ms")
    figure(f"{name}: pause", 1e3 * statistics.median(pauses), "ms")
    figure(
        f"{name}: push over memcpy",
        statistics.median(p / c for p, c in zip(pushes, copies, strict=True)),
        "x",
    )
    figure(f"{name}: memcpy", 1e3 * statistics.median(copies), "ms")


def main() -> None:
    """Run the learner side, or with --serve a generator."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pushes", type=int, default=7)
    parser.add_argument("--generators", default="1,2,4")
    parser.add_argument("--size", choices=list(SIZES), default="350 MB")
    parser.add_argument("--engine", choices=["hf", "vllm"], default="hf")
    parser.add_argument("--serve", nargs=2, type=Path, metavar=("MODEL", "KEYS"))
    options = parser.parse_args()
    if options.serve is not None:
        model, keys = options.serve
        asyncio.run(generate(model, keys, options.engine))
        return
    with tempfile.TemporaryDirectory() as directory:
        model = random_model(Path(directory) / "model", **SIZES[options.size])
        asyncio.run(
            measure(
                model,
                Path(directory),
                [int(count) for count in options.generators.split(",")],
                options,
            )
        )


if __name__ == "__main__":
    main()
