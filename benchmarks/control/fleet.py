"""Measure what a large fleet costs the learner and the buffer, in CPU time of the event loop.

A push: simulated generators load a version from the shared block; the product's pusher asks each,
and they answer within half a second. The time of the same answers without a pusher is subtracted.
Groups that are handed out again: a fleet with one group per generator loses half of its generators
while a quarter of the groups is ready, and the others request work.
"""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from async_rl.buffer.service import BufferService
from async_rl.buffer.store.store import Store
from async_rl.composition.compose import compose_unchecked
from async_rl.config.base import replace
from async_rl.core.heads import pack_group
from async_rl.core.types import Ticket
from async_rl.observability.activity import Activity
from async_rl.protocol.buffer import PutGroup, RequestWork
from async_rl.protocol.generator import LoadReport, LoadWeights
from async_rl.protocol.supervisor import Member, Members
from async_rl.protocol.weights import Manifest
from async_rl.runtime.directory import Directory
from async_rl.training.device import Device
from async_rl.training.pushing import Pusher
from async_rl.weights.block import SharedTensors
from async_rl.weights.tensors import tensor_spec
from benchmarks.control.buffer import _config, _group, _prompts
from benchmarks.figures import figure

MEMBERS = (1024, 2048, 4096)
GROUPS = (1000, 4000, 16_000)
ANSWER_S = 0.5
ROUNDS = 5


class _Fleet:
    """Generators that answer, and what the pusher needs besides: the ranks, the supervisor."""

    adapter = None

    def __init__(self, run_dir: Path, num_members: int) -> None:
        self.block = SharedTensors([tensor_spec("embed", torch.empty(4, 1))])
        self._rng = random.Random(0)
        self._directory = Directory()
        base = compose_unchecked("grpo_code", ["weights.probe_every_pushes=0"])
        context: Any = SimpleNamespace(
            config=base,
            run_dir=run_dir,
            activity=Activity(),
            incarnation="one",
            host="127.0.0.1",
            directory=self._directory,
            supervisor=self,
            incarnation_of=lambda member: self,
        )
        pool: Any = self
        self.pusher = Pusher(context, pool, Device(), rank_device=torch.device("cpu"), life=1)
        members = [_member(number) for number in range(num_members)]
        self._directory.update(Members(revision=1, members=members))

    async def call(self, request: LoadWeights, *, timeout_s: float) -> LoadReport:
        """Answer as a generator that loads the version."""
        await asyncio.sleep(self._rng.uniform(0, ANSWER_S))
        return LoadReport(version=request.manifest.version, pause_s=0.01)

    async def publish(self, version: int) -> Manifest:
        """Write the block, as the ranks do."""
        return self.block.write(version, [torch.zeros(4, 1)])

    async def lead(self, operation: object) -> list[object]:
        """Answer as ranks without log-probs."""
        return []


def _member(number: int) -> Member:
    return Member(
        name=f"generator-{number}",
        role="generator",
        pid=1,
        address="tcp://127.0.0.1:1",
        state="",
        waits_for="",
        since_s=0,
        version=-1,
        counters={},
        devices=["cpu"],
    )


async def _push_cpu_s(run_dir: Path, num_members: int) -> float:
    """Return the CPU seconds of one push besides those of the answers."""
    fleet = _Fleet(run_dir, num_members)
    request = LoadWeights(manifest=await fleet.publish(0))
    started_s = time.thread_time()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(num_members):
            tasks.create_task(fleet.call(request, timeout_s=1))
    answers_s = time.thread_time() - started_s
    async with asyncio.TaskGroup() as tasks:
        pushing = tasks.create_task(fleet.pusher.run())
        await asyncio.sleep(0)
        started_s = time.thread_time()
        await fleet.pusher.publish(1)
        await fleet.pusher.live(1)
        push_s = time.thread_time() - started_s
        pushing.cancel()
    return push_s - answers_s


async def _reissue_cpu_s(directory: Path, num_groups: int) -> float:
    """Return the CPU seconds of the loop per group that is handed out again."""
    config = _config()
    buffer = replace(config.buffer, groups_per_step=num_groups, max_staleness_versions=0)
    async with Store(directory, clock=time.time) as store:
        config = replace(config, buffer=buffer)
        service = BufferService(config, _prompts(), store, clock=time.monotonic)
        names = [f"generator-{number}" for number in range(num_groups)]
        tickets = await _ask(service, names)
        ready = tickets[::4]
        for ticket in ready:
            group = msgspec.structs.replace(_group(ticket, 32), generator=names[ticket.group_id])
            await service.put_group(PutGroup(payload=memoryview(pack_group(group))))
        lost, left = names[1::2], names[2::4]
        started_s = time.thread_time()
        for name in lost:
            service.lose(name, "its process ended")
        again = await _ask(service, left, credit=2)
        seconds = time.thread_time() - started_s
        if len(again) != len(lost):
            raise SystemExit(f"{len(again)} of {len(lost)} groups were handed out again")
        return seconds / len(lost)


async def _ask(service: BufferService, names: Sequence[str], credit: int = 1) -> list[Ticket]:
    tickets: list[Ticket] = []
    for name in names:
        request = RequestWork(generator=name, incarnation="a", version=0, credit=credit, wait_s=0.0)
        tickets += (await service.request_work(request)).tickets  # type: ignore[attr-defined]
    return tickets


def main() -> None:
    """Measure all sizes."""
    # Otherwise the figure is that of collections, which look at all that torch has made.
    gc.collect()
    gc.freeze()
    for num_members in MEMBERS:
        with tempfile.TemporaryDirectory() as directory:
            seconds = [
                asyncio.run(_push_cpu_s(Path(directory), num_members)) for _ in range(ROUNDS)
            ]
        figure(
            f"push to {num_members}: CPU of the loop",
            statistics.median(seconds),
            "s",
            goal="<= 0.3",
        )
    for num_groups in GROUPS:
        with tempfile.TemporaryDirectory() as directory:
            seconds_each = asyncio.run(_reissue_cpu_s(Path(directory), num_groups))
        name = f"half of {num_groups} groups handed out again: CPU per group"
        figure(name, seconds_each * 1e3, "ms", goal="<= 0.3")


if __name__ == "__main__":
    main()
