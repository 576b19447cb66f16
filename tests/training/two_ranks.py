"""Two learner ranks in two processes, whose collectives time out after a second; run by
test_ranks.py as `two_ranks.py RANK FOLDER`.

Rank 0 waits for three seconds, as for a batch, between two steps, and the other rank waits for it.
The one sequence of a batch belongs to rank 0 and rank 1 in turn.
"""

from __future__ import annotations

import asyncio
import datetime
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from async_rl.batching.batch import BatchPart
from async_rl.core.heads import pack_group, packed, read_group
from async_rl.protocol.learner import ReadSequences, Sequences
from async_rl.training.operations import Fetch, Perform, Score, Step, Stop
from async_rl.training.ranks import Rank, TrainingPool
from async_rl.training.taking import Parts
from async_rl.wire.keys import create_keys, load_keys
from async_rl.wire.rpc import RpcClient, RpcServer

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "learner"))

from learner_support import make_groups

RANK, FOLDER = int(sys.argv[1]), Path(sys.argv[2])
PAUSE_S = 3.0


class Trainer:
    """A step is a sum over the ranks."""

    device = torch.device("cpu")

    def tensor_specs(self) -> list[Any]:
        return []

    def owners(self, heads: list[Any], version: int) -> list[int]:
        return [version % 2]

    def train(self, part: BatchPart, version: int) -> Any:
        value = torch.tensor([float(version + RANK + len(part.trajectories) / 100)])
        dist.all_reduce(value)
        return SimpleNamespace(value=round(float(value), 2))

    def logprobs(self, rows: list[Any]) -> list[Any]:
        return []


class Buffer:
    """Has one sequence."""

    async def call(self, request: ReadSequences) -> Sequences:
        assert request.samples == [(5, 0)]
        group = read_group(pack_group(make_groups(num_groups=1, size=1)[0]))
        return Sequences(trajectories=[group.member(0)])


def make_trainer() -> Any:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(FOLDER / "rendezvous"), 2),  # type: ignore[attr-defined]
        rank=RANK,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    # Only now: the start of two processes may take longer than a second.
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1), None)
    return Trainer()


def content(name: str) -> str:
    """The content of a file that the other process writes."""
    path = FOLDER / name
    while not (path.exists() and path.read_text()):
        time.sleep(0.05)
    return path.read_text()


async def lead(address: str) -> None:
    async with RpcClient(address, load_keys(FOLDER / "keys")) as other:
        parts = Parts(Buffer().call, RANK)
        pool = await TrainingPool.open(make_trainer, "first-life-0", parts, [other])
        head = msgspec.structs.replace(
            packed(make_groups(num_groups=1, size=1)[0]).head, group_id=5
        )
        for version in range(20):
            await pool.fetch([head], version, life=1, timeout_s=9)
        results = [(await pool.lead(Step(version=0))).value]
        await asyncio.sleep(PAUSE_S)
        # Callers that do not wait for each other: all ranks begin in one order.
        steps = [pool.lead(Step(version=version)) for version in range(1, 20)]
        *stepped, logprobs = await asyncio.gather(*steps, pool.lead(Score(rows=[])))
        results += [*(result.value for result in stepped), logprobs]
        await pool.lead(Stop())
        (FOLDER / "results").write_text(repr(results))
        pool.close()


async def follow() -> None:
    opened: asyncio.Future[Rank] = asyncio.get_running_loop().create_future()

    async def accept(request: Perform) -> Any:
        return await (await opened).accept(request)

    async def read(request: Fetch) -> Any:
        return await (await opened).read(request)

    keys = create_keys(FOLDER / "keys")
    with RpcServer("127.0.0.1", 0, keys, {Perform: accept, Fetch: read}) as server:
        serving = asyncio.create_task(server.serve())
        (FOLDER / "address").write_text(server.address)
        opened.set_result(await Rank.open(make_trainer, "other-life-1", Parts(Buffer().call, RANK)))
        await opened.result().follow()
        opened.result().close()
        await asyncio.sleep(0.2)
        serving.cancel()


asyncio.run(lead(content("address")) if RANK == 0 else follow())
