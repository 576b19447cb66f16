"""Measure the buffer under 1, 16, 128 and 1,024 simulated generators.

Sockets, service and store are real; only the model is missing. The generators together request work
and put groups at the same total rate for every number of generators. For this, each generator keeps
its group for a time proportional to their number. A learner takes and commits ready batches. The
buffer runs in a separate process, whose CPU time is compared. At the end the ledger is audited.

Run: `python -m benchmarks.control.control_plane [--generators N ...]`.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import psutil

from async_rl.buffer.service import BufferService
from async_rl.buffer.store.ledger import audit, reading
from async_rl.buffer.store.store import Store
from async_rl.config.base import replace
from async_rl.core.heads import pack_group
from async_rl.core.types import NO_VERSION, Group, Ticket
from async_rl.observability.activity import Activity
from async_rl.processes.buffer import show_state
from async_rl.protocol.buffer import CommitStep, PutGroup, RequestWork, TakeBatch
from benchmarks.control import simulated
from benchmarks.control.buffer import _config, _group, _prompts, _ticket
from benchmarks.figures import figure

GROUPS_PER_S = 150
TOKENS = 256
SECONDS = 12.0
WARM_UP_S = 3.0
SMALLEST_BATCH = 16


def batch_of(num_generators: int) -> int:
    """Return groups_per_step. Admission allows three times as many active groups.

    The generators have at most one group each, so admission never limits the rate.
    """
    return max(SMALLEST_BATCH, num_generators)


def config_of(num_generators: int) -> Any:
    """Return the configuration of the run."""
    config = _config()
    return replace(
        config,
        buffer=replace(config.buffer, groups_per_step=batch_of(num_generators)),
    )


async def serve(directory: Path, num_generators: int) -> None:
    """Run the buffer until SIGTERM."""
    async with Store(directory, clock=time.time) as store:
        config = config_of(num_generators)
        service = BufferService(config, _prompts(), store, clock=time.monotonic)
        context: Any = SimpleNamespace(activity=Activity(), version=0, config=config)
        showing = show_state(context, service)
        await simulated.serve_until_terminated(directory, service.handlers(), showing)


class Load:
    """Simulated generators and a learner that use one buffer."""

    def __init__(self, directory: Path, num_generators: int) -> None:
        self._clients = simulated.Clients(directory)
        self._num_generators = num_generators
        self._template = _group(_ticket(), TOKENS)
        self.version = 0
        self.num_put = 0
        self.latencies_s: list[float] = []

    async def run(self, process: psutil.Process) -> tuple[float, float, float]:
        """Return (CPU seconds of the buffer, groups put, seconds) after the warm-up."""
        tasks = [asyncio.create_task(self._generate(i)) for i in range(self._num_generators)]
        tasks.append(asyncio.create_task(self._learn()))
        await asyncio.sleep(WARM_UP_S + self._num_generators / 250)
        self.latencies_s.clear()
        cpu_s, num_put, started = simulated.cpu_s(process), self.num_put, time.monotonic()
        await asyncio.sleep(SECONDS)
        result = (
            simulated.cpu_s(process) - cpu_s,
            self.num_put - num_put,
            time.monotonic() - started,
        )
        await self._clients.end(tasks)
        return result

    async def _generate(self, index: int) -> None:
        name = f"generator-{index}"
        period_s = self._num_generators / GROUPS_PER_S
        await asyncio.sleep(WARM_UP_S * index / self._num_generators)
        due_s = time.monotonic()
        async with self._clients.connect() as buffer:
            while True:
                request = RequestWork(
                    generator=name,
                    incarnation="a",
                    version=self.version,
                    credit=1,
                    held=[],
                    wait_s=20.0,
                )
                asked = time.perf_counter()
                tickets = (await buffer.call(request, timeout_s=60)).tickets
                self.latencies_s.append(time.perf_counter() - asked)
                due_s = max(due_s + period_s, time.monotonic() - period_s)
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                for ticket in tickets:
                    payload = memoryview(pack_group(self._written(ticket, name)))
                    await buffer.call(PutGroup(payload=payload), timeout_s=60)
                    self.num_put += 1

    def _written(self, ticket: Ticket, generator: str) -> Group:
        before = self._template.trajectories[0].versions
        versions = np.where(before == NO_VERSION, before, np.int32(ticket.admitted_version))
        samples = [
            msgspec.structs.replace(t, versions=versions) for t in self._template.trajectories
        ]
        return msgspec.structs.replace(
            self._template,
            group_id=ticket.group_id,
            attempt=ticket.attempt,
            generator=generator,
            prompt_id=ticket.prompt.prompt_id,
            admitted_version=ticket.admitted_version,
            trajectories=samples,
        )

    async def _learn(self) -> None:
        async with self._clients.connect() as buffer:
            while True:
                batch = await buffer.call(
                    TakeBatch(train_version=self.version, wait_s=20.0), timeout_s=60
                )
                if batch.groups:
                    ids = [group.group_id for group in batch.groups]
                    await buffer.call(
                        CommitStep(version=self.version + 1, group_ids=ids), timeout_s=60
                    )
                    self.version += 1


def measure(num_generators: int) -> float:
    """Return the CPU milliseconds of the buffer per group."""
    with tempfile.TemporaryDirectory(prefix="bench-control-", dir=Path.cwd()) as name:
        directory = Path(name)
        words = ("--generators", str(num_generators))
        with simulated.service("benchmarks.control.control_plane", directory, *words) as process:
            load = Load(directory, num_generators)
            cpu_s, num_put, seconds = asyncio.run(load.run(process))
        buffer = config_of(num_generators).buffer
        with reading(directory) as connection:
            found = audit(connection, buffer)
    per_group_ms = 1e3 * cpu_s / num_put
    who = f"{num_generators} generator{'s' if num_generators > 1 else ''}"
    figure(f"{who}: groups put", num_put / seconds, "1/s")
    figure(f"{who}: buffer CPU per group", per_group_ms, "ms")
    figure(
        f"{who}: admission latency p99",
        1e3 * float(np.quantile(load.latencies_s, 0.99)),
        "ms",
        goal="< 100",
    )
    figure(
        f"{who}: problems in the ledger's audit, {found.num_groups} groups",
        len(found.problems),
        "",
        goal="0",
    )
    for problem in found.problems:
        print(f"  {problem}")
    return per_group_ms


def main() -> None:
    """Measure every size, and the cost per group at the largest size relative to 16 generators."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generators", type=int, nargs="*", default=[1, 16, 128, 1024])
    parser.add_argument("--serve", type=Path)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        asyncio.run(serve(arguments.serve, arguments.generators[0]))
        return
    per_group_ms = {number: measure(number) for number in arguments.generators}
    if 16 in per_group_ms and max(per_group_ms) > 16:
        figure(
            f"CPU per group, {max(per_group_ms)} generators over 16",
            per_group_ms[max(per_group_ms)] / per_group_ms[16],
            "x",
            goal="<= 1.2",
        )


if __name__ == "__main__":
    main()
